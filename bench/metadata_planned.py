"""The metadata of a step where a library plans it on the host (Pattern B): FlashInfer's wrappers.

Before every part of a step the host plans all forwards of that part from its mirror of the
lengths, and the plans travel to the device; a recorded part then lists slots and packs masks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import timeline
from bench.metadata_sglang import DRAFT, EXTEND, VERIFY
from bench.metadata_sides import DIM, Seams, same
from specattn.backends.flashinfer import FlashInferTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.metadata_sides import Requests
    from specattn.backends.layers import BoundLayers

PROFILED = 20


class Planned(Seams):
    """FlashInfer's plans: ``schedules`` is what the host does, ``phases`` what is recorded."""

    name = "specattn, FlashInfer"

    def __init__(self, requests: Requests, dim: int = DIM) -> None:
        super().__init__(requests, dim, "flashinfer")
        lens = requests.lens.cpu().int()
        self.schedules: dict[str, Callable[[], None]] = {
            DRAFT: lambda: self.draft.schedule(lens),
            VERIFY: lambda: self.verify.schedule(lens),
            EXTEND: lambda: self.extend.schedule(lens),
        }
        self.phases[DRAFT] = self._fill_drafts

    def _fill_drafts(self) -> None:
        """Fill slots and lists of all steps, and pack the masks that later steps pack themselves.

        A draft step's ancestors become known when it runs, so its layers pack its mask, one layer
        in a draft of one.
        """
        self.draft.fill()
        for layers in self.draft.steps:
            pack = late_masks(layers)
            if pack is not None:
                pack()

    def check(self) -> None:
        """Plan and fill everything, and hold it to the table and the lengths."""
        for schedule in self.schedules.values():
            schedule()
        for fill in self.phases.values():
            fill()
        self.check_inputs()
        for layers in self.layers:
            self._check_lists(layers)

    def _check_lists(self, layers: BoundLayers) -> None:
        bound: Any = layers.bounds[0]
        r, whole = self.requests, not isinstance(bound, FlashInferTree)
        lists = bound.lists if whole else bound.prefix.lists
        tails = lists.plan.tail_slots[:, : None if whole else 0]
        keys = [
            torch.cat([r.table[row, :length], tail])
            for row, length, tail in zip(r.rows.tolist(), r.lens.tolist(), tails, strict=True)
        ]
        ends = torch.tensor([len(one) for one in keys], device=tails.device).cumsum(0)
        # a grid may have requests without keys at its end
        padded = ends[-1:].expand(len(lists.indptr) - 1 - len(ends))
        same("offsets", lists.indptr[1:], torch.cat([ends, padded]))
        same("lists", lists.indices[: int(ends[-1])], torch.cat(keys))

    def sent(self, phases: Iterable[str]) -> dict[str, float]:
        """Return how long the device is busy with the phases' plans, and with how many copies."""

        def schedule() -> None:
            for phase in phases:
                self.schedules[phase]()

        with tempfile.TemporaryDirectory() as folder:
            trace = timeline.record(schedule, Path(folder) / "trace.json", steps=PROFILED, timed=0)
        busy = sum(kernel.us for kernel in trace.kernels) / PROFILED
        return {"sent_us": round(busy, 3), "sent": round(len(trace.kernels) / PROFILED, 1)}


def late_masks(layers: BoundLayers) -> Callable[[], None] | None:
    """Return what packs the masks of a draft step after the first, if it has masks."""
    layout = layers.plan.layout
    if layout.causal or layout.tail <= layout.q_len:
        return None
    bound: Any = layers.bounds[0]
    return (bound.tail if isinstance(bound, FlashInferTree) else bound).masks.fill
