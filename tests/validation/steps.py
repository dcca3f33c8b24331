"""A step that tests spoil, over a backend that fails when told to.

docs/validation.md has what is refused for readers. Every message names the argument, what was
expected and what was got.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from specattn import AttnConfig, SamplingBatch, SamplingParams
from specattn.backends import BoundAttention
from specattn.backends.torch_native import TorchNativeBackend
from specattn.batch import DraftState, ForwardMode, SpecBatch
from tests.worlds import DEVICE, inputs, world

LENS = [5, 17]
PADDED = 4
HEADS = AttnConfig(4, 2, 64)


class Failing(TorchNativeBackend):
    """Fails in one call if told to; counts what it was asked to compute."""

    name = "failing"
    capabilities = replace(TorchNativeBackend.capabilities, host_plan=True)
    fails: ClassVar[str | None] = None
    ran: ClassVar[list[int]] = []

    def bind(self, plan):
        return BoundFailing(super().bind(plan))


@dataclass
class BoundFailing(BoundAttention):
    inner: object

    def _maybe(self, call: str) -> None:
        if Failing.fails == call:
            raise RuntimeError(f"{call} failed")

    def schedule(self, seq_lens_cpu):
        self._maybe("schedule")

    def fill(self):
        self._maybe("fill")

    def run(self, q, *rest):
        Failing.ran.append(len(q))
        self.inner.run(q, *rest)
        self._maybe("run")


@dataclass
class Step:
    """A decoder that was captured for 4 requests, and a good step of 2."""

    one: object
    batch: SpecBatch
    state: DraftState
    sampling: SamplingBatch

    def run(self, **bad):
        """Step; ``bad`` replaces fields of the batch, or the state or the sampling."""
        self.one.poison(LENS)
        parts = {"state": self.state, "sampling": self.sampling}
        parts |= {name: bad.pop(name) for name in parts if name in bad}
        batch = replace(self.batch, **bad)
        return self.one.decoder.step(batch, parts["state"], parts["sampling"])

    def outcome(self):
        return vars(self.run().accepted)


def step_of(backend=Failing) -> Step:
    one = world(backend, [PADDED])
    lens = torch.tensor(LENS, dtype=torch.int32)
    rows = torch.tensor(one.rows[:2], device=DEVICE)
    bonus = torch.tensor([3, 14], device=DEVICE)
    values = inputs(ForwardMode.DRAFT_DECODE, LENS, 1)
    sampling = SamplingBatch.of([SamplingParams()] * 2, DEVICE)
    return Step(one, SpecBatch(rows, lens.to(DEVICE), lens, bonus), DraftState(**values), sampling)


def same(got, want) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def ints(*shape, dtype=torch.int64, device=DEVICE, value=1):
    return torch.full(shape, value, dtype=dtype, device=device)


def state_of(**change):
    return replace(DraftState(**inputs(ForwardMode.DRAFT_DECODE, LENS, 1)), **change)


i32 = torch.int32
