"""What is measured: sides, settings and places, in the order of their importance."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: Steps, topk and nodes, as SGLang names them, and the tokens that every step is made to gain.
SETTINGS = {"plain": (0, 1, 1, 1), "chain": (3, 1, 4, 3), "tree": (4, 5, 16, 4)}
#: Batch and context, the most telling first.
PLACES = ((16, 4096), (1, 32768), (1, 4096), (64, 4096))
OWN = "own"
#: SGLang with whole steps of ours over its modules, and with forwards fused over its weights;
#: prompts by its best backend.
STEPS, FUSED = "steps", "fused"
#: One of `bench.step_world.shapes`, and its longest context.
MODEL, LONGEST = "Llama-3.1-8B", 131072


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
    """

    side: str
    setting: str
    places: tuple[tuple[int, int], ...] = PLACES
    kind: str = "bench"
    steps: int = 96
    seconds: float = 170.0
    tp: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.side}-{self.setting}"

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
    return [
        Job(side, setting)
        for setting in ("tree", "chain")
        for side in ("fa3", "specattn", STEPS, FUSED, OWN, "triton")
    ] + [Job("flashinfer", setting, PLACES[:2]) for setting in ("tree", "chain")]


def smoke_jobs() -> list[Job]:
    """Return short runs of what is measured, and those whose tokens are compared."""
    places = ((2, 256),)
    short = [(side, "tree") for side in (FUSED, STEPS, "specattn", "fa3", OWN, "triton")]
    short += [(side, "chain") for side in (FUSED, "specattn", "fa3")]
    short += [("specattn", "plain")]
    told = [("triton", "plain")]
    told += [(side, "tree") for side in (FUSED, STEPS, "specattn", "fa3", "triton")]
    told += [(side, "chain") for side in (FUSED, "specattn")]
    return [
        *(Job(side, setting, places, "smoke", 24, 150.0) for side, setting in short[:3]),
        *(Job(side, setting, (), "tokens", seconds=150.0) for side, setting in told),
        *(Job(side, setting, places, "smoke", 24, 150.0) for side, setting in short[3:]),
    ]


def write_models(folder: Path, layers: int) -> tuple[Path, Path]:
    """Write the configurations of a target and of its EAGLE-3 head; returns their folders."""
    from bench.step_world import shapes

    shape = shapes(LONGEST, layers)[MODEL]
    shape.draft.draft_vocab_size = shape.draft_vocab
    paths = folder / "target", folder / "head"
    architectures = "LlamaForCausalLM", "LlamaForCausalLMEagle3"
    for path, config, name in zip(paths, (shape.target, shape.draft), architectures, strict=True):
        config.architectures = [name]
        config.save_pretrained(path)
    return paths
