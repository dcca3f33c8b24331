"""What is measured: sides, settings and places, in the order of their importance."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Qwen3Config

    from bench.step_world import Shape

#: A best-first tree over the block of a DFlash head, and the tokens of such a block.
BLOCK, BLOCK_SIZE = "block", 8
#: Steps, topk and nodes, as SGLang names them, and the tokens that every step is made to gain.
SETTINGS = {
    "plain": (0, 1, 1, 1),
    "chain": (3, 1, 4, 3),
    "tree": (4, 5, 16, 4),
    BLOCK: (BLOCK_SIZE - 1, 8, 16, 4),
}
#: Batch and context, the most telling first.
PLACES = ((16, 4096), (1, 32768), (1, 4096), (64, 4096))
OWN = "own"
#: SGLang with whole steps of ours over its modules, and with forwards fused over its weights;
#: prompts by its best backend.
STEPS, FUSED = "steps", "fused"
#: One of `bench.step_world.shapes`, and its longest context.
MODEL, LONGEST = "Llama-3.1-8B", 131072
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
#: What checkpoints state whose weights are FP8, by the format of `specattn` that they have.
QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "fp8-channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _FLOAT8 | {"strategy": "channel", "dynamic": False},
                "input_activations": _FLOAT8 | {"strategy": "token", "dynamic": True},
            }
        },
    },
}


@dataclass(frozen=True)
class Job:
    """One process: a side and a setting, and the places it is measured at.

    Parameters
    ----------
    side : str
        SGLang's attention backend; ``steps`` and ``fused`` for SGLang with this library's whole
        steps; ``own`` for this library's `Engine`.
    setting : str
        A key of `SETTINGS`.
    places : tuple of (int, int)
        Batches and contexts, in order.
    kind : str
        ``bench`` with forced lengths; ``smoke`` with forced lengths on a short model; ``tokens``
        for the tokens of the shipped pair.
    steps : int
        How many steps are timed at each place.
    seconds : float
        What the process may take.
    tp : int
        GPUs that SGLang spreads the model over.
    weights : str
        A key of `QUANTISED`: the target's; those of 16 bits if empty.
    """

    side: str
    setting: str
    places: tuple[tuple[int, int], ...] = PLACES
    kind: str = "bench"
    steps: int = 96
    seconds: float = 170.0
    tp: int = 1
    weights: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.kind, self.side, self.setting, self.weights)))

    def file(self, out: Path, ending: str) -> Path:
        """Return one of its files in the folder ``out``."""
        return out / f"{self.name}.{ending}"

    def room(self, gained: int) -> int:
        """Return the KV tokens of the largest place, with what its steps gain."""
        extra = (self.steps + WARM) * gained + SPARE
        return max(batch * (context + extra) for batch, context in self.places)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        found = json.loads(text)
        found["places"] = tuple((batch, context) for batch, context in found["places"])
        return Job(**found)


# steps before those that are timed, and slots that an engine reserves for steps in flight
WARM, SPARE = 16, 256
# prompt tokens per second, to tell whether a place still fits into the time
PROMPT_SPEED, PLACE_SECONDS = 15000.0, 6.0


def seconds_for(batch: int, context: int) -> float:
    """Estimate what a place takes."""
    return batch * context / PROMPT_SPEED + PLACE_SECONDS


def bench_jobs() -> list[Job]:
    """Return all measurements; the first ones matter most."""
    jobs = [
        Job(side, setting)
        for setting in ("tree", "chain")
        for side in ("fa3", "specattn", STEPS, FUSED, OWN, "triton")
    ]
    jobs += [Job("flashinfer", setting, PLACES[:2]) for setting in ("tree", "chain")]
    return jobs + [Job(side, BLOCK) for side in (STEPS, FUSED, OWN)]


def smoke_jobs() -> list[Job]:
    """Return short runs of what is measured, and those whose tokens are compared."""
    places = ((2, 256),)
    short = [(side, "tree") for side in (FUSED, STEPS, "specattn", "fa3", OWN, "triton")]
    short += [(side, "chain") for side in (FUSED, "specattn", "fa3")]
    short += [("specattn", "plain"), (FUSED, BLOCK), (OWN, BLOCK)]
    told = [("triton", "plain")]
    told += [(side, "tree") for side in (FUSED, STEPS, "specattn", "fa3", "triton")]
    told += [(side, "chain") for side in (FUSED, "specattn")]
    return [
        *(Job(side, setting, places, "smoke", 24, 150.0) for side, setting in short[:3]),
        *(Job(side, setting, (), "tokens", seconds=150.0) for side, setting in told),
        *(Job(side, setting, places, "smoke", 24, 150.0) for side, setting in short[3:]),
    ]


def write_models(
    folder: Path, layers: int, setting: str = "tree", weights: str = ""
) -> tuple[Path, Path]:
    """Write the configurations of a target and of a setting's head; returns their folders.

    ``weights`` are the target's, as in `Job`.
    """
    from bench.step_world import shapes

    shape = shapes(LONGEST, layers)[MODEL]
    if weights:
        shape.target.quantization_config = QUANTISED[weights]
    return write_shape(shape, folder, setting)


def write_shape(shape: Shape, folder: Path, setting: str = "tree") -> tuple[Path, Path]:
    """Write the configurations of a shape, as `write_models`."""
    target, head = folder / "target", folder / "head"
    kind = "Qwen2" if shape.target.model_type == "qwen2" else "Llama"
    shape.target.architectures = [f"{kind}ForCausalLM"]
    shape.target.save_pretrained(target)
    if setting == BLOCK:
        head = folder / BLOCK
        draft = block_config(shape)
    else:
        draft = shape.draft
        draft.draft_vocab_size = shape.draft_vocab
        draft.architectures = ["LlamaForCausalLMEagle3"]
    draft.save_pretrained(head)
    return target, head


def block_config(shape: Shape) -> Qwen3Config:
    """Return the configuration of a DFlash head, as SGLang reads it."""
    from bench.step_blocks import draft_config

    config = draft_config(shape.draft)
    config.architectures, config.block_size = ["DFlashDraftModel"], BLOCK_SIZE
    # which SGLang counts where they leave a layer
    leaving = [layer - 1 for layer in states_read(shape)]
    config.dflash_config = {"mask_token_id": 1, "target_layer_ids": leaving}
    return config


def states_read(shape: Shape) -> tuple[int, ...]:
    """Return the layers of a target whose inputs a DFlash head reads."""
    from bench.step_blocks import FEATURES, spaced

    depth = shape.target.num_hidden_layers
    return spaced(depth, max(1, min(FEATURES, depth - 2)))
