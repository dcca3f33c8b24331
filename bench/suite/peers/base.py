"""What a contestant is."""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .. import oracle

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch
    from ..cases import Case


class Contestant:
    """One way to compute a case, made ready for one batch.

    Parameters
    ----------
    batch : Batch
        What to compute.
    """

    #: As tables show it.
    name: ClassVar[str]
    #: How it is called, in a few words.
    setting: ClassVar[str] = ""
    #: Modules without which it is absent.
    needs: ClassVar[tuple[str, ...]] = ()
    #: Modes that it serves.
    modes: ClassVar[tuple[str, ...]] = ()
    #: Whether it takes the accepted tokens of an ``extend`` alone.
    packs: ClassVar[bool] = True
    #: Whether it reads float8 pools.
    float8: ClassVar[bool] = False
    #: Whether `plan` can be captured in a graph.
    device_plan: ClassVar[bool] = True

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.q, self.out = batch.q, batch.out
        self._index: Tensor | None = None
        if self.packs and sum(batch.accepted) < len(batch.q):
            self._index = oracle.used_index(batch)
            self.q = batch.q[self._index]
            self.out = batch.out[self._index]

    @classmethod
    def absent(cls) -> str | None:
        """Say why it cannot run on this machine."""
        for module in cls.needs:
            try:
                import_module(module)
            # a library can fail to load in any way: a missing symbol, driver or file
            except Exception as problem:
                return f"{type(problem).__name__}: {str(problem).splitlines()[0][:150]}"
        return None

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        """Say why it does not serve a case; an empty string where nobody would expect it to."""
        if case.mode not in cls.modes or case.latent:
            return ""
        if case.window_left >= 0 or case.logit_cap or case.fixed:
            return ""
        if case.stored and not cls.float8:
            return ""
        return None

    @property
    def plans(self) -> bool:
        """Whether there is anything to plan."""
        return type(self).plan is not Contestant.plan

    def plan(self) -> None:
        """Do the work of a step that all layers share."""

    def run(self, pool: int) -> None:
        """Attend over a pool, into ``out``."""
        raise NotImplementedError

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Return out with ``q_len`` rows per request, and the lse if it writes one."""
        if self._index is None:
            return self.out, None
        full = torch.full_like(self.batch.out, math.nan)
        full[self._index] = self.out
        return full, None

    def detail(self) -> dict[str, Any]:
        """Return what else is worth recording."""
        return {}


def int32(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def query_offsets(batch: Batch) -> Tensor:
    """``[B + 1]`` int32: where each request's query tokens begin, packed."""
    return int32(batch.offsets, batch.device)


def total_lens(batch: Batch) -> list[int]:
    """Keys of every request, its own query tokens included."""
    new = batch.accepted if batch.case.mode == "extend" else [batch.case.tail] * batch.case.batch
    return [length + more for length, more in zip(batch.case.lengths, new, strict=True)]


def ancestor_lists(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each query token's visible tail slots, packed to the left, and their count.

    ``[B * q_len, tail]`` and ``[B * q_len]``, int32; entries past the count are other slots.
    """
    seen = torch.cat([batch.visible(b) for b in range(batch.case.batch)])
    order = torch.argsort((~seen).to(torch.int8), dim=1, stable=True)
    slots = batch.tails.repeat_interleave(batch.case.q_len, 0).gather(1, order)
    return slots.contiguous(), seen.sum(1).to(torch.int32)


def branch_lists(batch: Batch) -> tuple[list[int], Tensor]:
    """Return every query token's own slots, prefix and ancestors, as offsets and a flat list."""
    slots, counts = ancestor_lists(batch)
    found, offsets = [], [0]
    for row, count in enumerate(counts.tolist()):
        b = row // batch.case.q_len
        length = batch.case.lengths[b]
        found += [batch.table[b + 1, :length], slots[row, :count]]
        offsets.append(offsets[-1] + length + count)
    return offsets, torch.cat(found)


def full_mask(batch: Batch) -> Tensor:
    """``[sum of rows * keys]`` bool: the mask of prefix and tail, request after request."""
    rows = []
    for b, length in enumerate(batch.case.lengths):
        tail = batch.visible(b)
        prefix = torch.ones(len(tail), length, dtype=torch.bool, device=batch.device)
        rows.append(torch.cat([prefix, tail], 1).flatten())
    return torch.cat(rows)
