"""What is measured: sides, settings and places, in the order of their importance."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Qwen3Config

    from bench.step_world import Shape

#: A best-first tree over the block of a DFlash head, and the tokens of such a block.
BLOCK, BLOCK_SIZE = "block", 8
#: What a hybrid target's own MTP layer drafts, inside SGLang alone.
MTP = ("mtp-chain", "mtp-tree")
#: Steps, topk and nodes, as SGLang names them, and the tokens that every step is made to gain.
SETTINGS = {
    "plain": (0, 1, 1, 1),
    "chain": (3, 1, 4, 3),
    "tree": (4, 5, 16, 4),
    BLOCK: (BLOCK_SIZE - 1, 8, 16, 4),
    MTP[0]: (3, 1, 4, 3),
    MTP[1]: (3, 3, 8, 3),
}
#: Batch and context, the most telling first.
PLACES = ((16, 4096), (1, 32768), (1, 4096), (64, 4096))
OWN = "own"
#: SGLang with whole steps of ours over its modules, and with forwards fused over its weights;
#: prompts by its best backend.
STEPS, FUSED = "steps", "fused"
#: How fused steps have their head quantised; the plug-in, which reads it, needs SGLang.
QUANTIZATION_VARIABLE = "SPECATTN_SGLANG_DRAFT_QUANTIZATION"
#: Every fourth of the 32 layers of Qwen3.5-9B attends; the sizes of its text model.
INTERVAL = 4
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "full_attention_interval": INTERVAL,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mtp_num_hidden_layers": 1,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
#: SGLang makes the tower of such a model, and nothing here asks for it.
TOWER = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 4096,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
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

    @property
    def stated(self) -> dict[str, Any]:
        """What its lines say of models and GPUs, where that is not usual."""
        draft = os.environ.get(QUANTIZATION_VARIABLE, "") if self.side == FUSED else ""
        ranks = self.tp if self.tp > 1 else 0
        said = {"weights": self.weights, "draft_weights": draft, "tp": ranks}
        return {name: value for name, value in said.items() if value}

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
    jobs += [Job(side, BLOCK) for side in (STEPS, FUSED, OWN)]
    few = ((1, 4096), (16, 4096))
    return jobs + [Job(side, one, few) for one in MTP for side in ("fa3", STEPS, "triton")]


def smoke_jobs() -> list[Job]:
    """Return short runs of what is measured, and those whose tokens are compared."""
    places = ((2, 256),)
    short = [(side, "tree") for side in (FUSED, STEPS, "specattn", "fa3", OWN, "triton")]
    short += [(side, "chain") for side in (FUSED, "specattn", "fa3")]
    short += [("specattn", "plain"), (FUSED, BLOCK), (OWN, BLOCK)]
    short += [(side, one) for one in MTP for side in (STEPS, "triton")]
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

    if setting in MTP:
        return (write_hybrid(folder, layers),) * 2
    shape = shapes(LONGEST, layers)[MODEL]
    if weights:
        shape.target.quantization_config = QUANTISED[weights]
    return write_shape(shape, folder, setting)


def write_hybrid(folder: Path, layers: int) -> Path:
    """Write the configuration of a hybrid target with an MTP layer; returns its folder."""
    kinds = ["linear_attention"] * (INTERVAL - 1) + ["full_attention"]
    text = {
        "num_hidden_layers": layers,
        "layer_types": kinds * (layers // INTERVAL),
        "max_position_embeddings": LONGEST,
    }
    found = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": HYBRID | text,
        "vision_config": TOWER,
        "tie_word_embeddings": False,
    }
    target = folder / "hybrid"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(found, indent=1))
    return target


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
    config.dflash_config = {
        "mask_token_id": 1,
        "target_layer_ids": leaving,
        "num_target_layers": shape.target.num_hidden_layers,
    }
    return config


def states_read(shape: Shape) -> tuple[int, ...]:
    """Return the layers of a target whose inputs a DFlash head reads."""
    from bench.step_blocks import FEATURES, spaced

    depth = shape.target.num_hidden_layers
    return spaced(depth, max(1, min(FEATURES, depth - 2)))
