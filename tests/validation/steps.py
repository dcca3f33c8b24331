"""A step that tests spoil, over a backend that fails when told to.

docs/validation.md has what is refused for readers. Every message names the argument, what was
expected and what was got.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from specattn import AttnConfig
from specattn.backends import BoundAttention
from specattn.backends.torch_native import TorchNativeBackend
from specattn.batch import ForwardMode
from tests.worlds import DEVICE, World, inputs, world

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
        self.inner.fill()

    def run(self, q, *rest):
        Failing.ran.append(len(q))
        self.inner.run(q, *rest)
        self._maybe("run")


@dataclass
class Steps:
    """A decoder that was captured for 4 requests, and a good step of 2."""

    one: World
    drafting: dict[str, torch.Tensor]

    @property
    def rows(self) -> list[int]:
        return self.one.rows[:2]

    def prepare(self, **bad) -> None:
        """Put the requests where the step begins; ``bad`` replaces columns of their states."""
        self.one.poison(LENS)
        given = self.drafting | {
            "seq_lens": torch.tensor(LENS, dtype=i32),
            "bonus_tokens": torch.tensor([3, 14]),
        }
        states = self.one.decoder.states.tensors()
        for name, value in (given | bad).items():
            states[name][self.rows] = value.to(DEVICE, states[name].dtype)

    def run(self, rows=None, lens=None, **bad) -> list[list[int]]:
        """Step two requests, or other rows, told these lengths on the host."""
        self.prepare(**bad)
        return self.go(rows, lens)

    def go(self, rows=None, lens=None) -> list[list[int]]:
        """Step requests that are where the step begins."""
        on_host = torch.tensor(LENS, dtype=i32) if lens is None else lens
        return self.one.decoder.step(rows or self.rows, seq_lens_cpu=on_host)

    def outcome(self) -> dict[str, torch.Tensor]:
        """What a good step gains and leaves."""
        gained = self.run()
        states = self.one.decoder.states.tensors()
        left = {name: value[self.rows].clone() for name, value in states.items()}
        return left | {f"tokens of {at}": torch.tensor(new) for at, new in enumerate(gained)}


def step_of(backend=Failing, **options) -> Steps:
    return Steps(world(backend, [PADDED], **options), inputs(ForwardMode.DRAFT_DECODE, LENS, 1))


def same(got, want) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def ints(*shape, dtype=torch.int64, device=DEVICE, value=1):
    return torch.full(shape, value, dtype=dtype, device=device)


i32 = torch.int32
