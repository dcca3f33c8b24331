"""Backends that compute with torch and keep a record of what was asked of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from specattn.backends.base import BoundAttention, Capabilities
from specattn.backends.torch_native import TorchNativeBackend
from specattn.errors import UnsupportedError
from specattn.plan import ExtendPlan


@dataclass
class BoundSpy(BoundAttention):
    """Delegates, and refuses to run before it was scheduled and filled."""

    inner: Any
    spy: Any
    plan: Any
    filled: bool = False

    def schedule(self, seq_lens_cpu) -> None:
        if seq_lens_cpu is None and self.spy.capabilities.host_plan:
            raise UnsupportedError(f"backend {self.spy.name!r}", ["needs seq_lens_cpu"])
        self.spy.scheduled.append(None if seq_lens_cpu is None else seq_lens_cpu.tolist())

    def fill(self) -> None:
        self.filled = True
        self.inner.fill()

    def run(self, q, *rest) -> None:
        assert self.filled
        self.spy.ran.append(len(q))
        self.inner.run(q, *rest)


def spy(called: str, **promises: Any) -> type:
    """A new backend class with records of its own: ``binds``, ``scheduled``, ``ran``."""

    class Spy(TorchNativeBackend):
        name = called
        capabilities = Capabilities(**promises)
        binds: ClassVar[list[str]] = []
        scheduled: ClassVar[list[list[int] | None]] = []
        ran: ClassVar[list[int]] = []

        def bind(self, plan):
            phase = "prompt" if isinstance(plan, ExtendPlan) else plan.layout.phase.value
            self.binds.append(phase)
            return BoundSpy(super().bind(plan), type(self), plan)

    return Spy
