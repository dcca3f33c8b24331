"""Requests that come and go at random: their texts, what they share, what steps wait for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from specattn.backends.triton import TritonTree
from specattn.speculative.step.host_buffers import PendingStep

if TYPE_CHECKING:
    import pytest

    from specattn.backends.triton import TritonBound
    from specattn.config import SpecConfig
    from specattn.engine.engine import Engine
    from specattn.engine.policy import Observed
    from specattn.engine.request import Request, RequestOutput
    from specattn.kernels.attention.plan import TreePlan

COUNTERS = (
    "allocation.all.allocated",
    "segment.all.allocated",
    "num_device_alloc",
    "num_alloc_retries",
)
# a chance per step that requests join where there is room
JOINS = 0.12


class Dice:
    """A policy: any of the settings that fit, at random, for every step."""

    def __init__(self, seed: int = 0) -> None:
        self.rng, self.seen = random.Random(seed), []

    def __call__(self, observed: Observed) -> SpecConfig:
        self.seen.append(observed)
        return self.rng.choice(observed.configs)


class Churn:
    """Requests that come and go at random over an engine.

    Parameters
    ----------
    engine : Engine
        Without requests.
    kinds : sequence of Request
        What comes; a request gets up to its kind's tokens.
    seed : int
        Of all that is random here.
    joining : callable, optional
        Makes what prompts run within.
    """

    def __init__(
        self,
        engine: Engine,
        kinds: Sequence[Request],
        seed: int,
        joining: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.engine, self.kinds, self.joining = engine, kinds, joining
        self.rng = random.Random(seed)
        self.running: list[tuple[int, RequestOutput]] = []
        self.joins = self.level = 0
        self.sizes: set[int] = set()

    def join(self, count: int) -> None:
        """Add requests of any kinds, each of up to its kind's tokens."""
        picked = [self.rng.randrange(len(self.kinds)) for _ in range(count)]
        kinds = [self.kinds[at] for at in picked]
        requests = [
            replace(kind, max_new_tokens=self.rng.randint(1, kind.max_new_tokens)) for kind in kinds
        ]
        with self.joining():
            results = self.engine.add(requests)
        self.running += zip(picked, results, strict=True)
        self.joins += count

    def step(self) -> list[tuple[int, RequestOutput]]:
        """Take a step, perhaps after requests joined; returns those that ended, by kind."""
        engine, rng = self.engine, self.rng
        if rng.random() < 0.02 or not self.level:
            self.level = rng.randint(1, engine.config.max_num_reqs)
        missing = self.level - engine.num_running
        if not engine.num_running or (missing > 0 and rng.random() < JOINS):
            self.join(rng.randint(1, max(1, missing)))
        self.sizes.add(engine.num_running)
        engine.step(ahead=rng.random() < 0.9)
        ended = [item for item in self.running if item[1].finish_reason]
        self.running = [item for item in self.running if not item[1].finish_reason]
        return ended

    def drop(self) -> list[tuple[int, RequestOutput]]:
        """Drop everything that runs, a step in flight included; returns it."""
        self.engine.clear()
        dropped, self.running = self.running, []
        return dropped


class Texts:
    """What requests of every kind come to in an engine that runs nothing else.

    Parameters
    ----------
    engine : Engine
        Without requests. Where a policy chooses, drawn tokens and gains follow from its choices, so
        that greedy texts alone are compared.
    kinds : sequence of Request
        What comes.
    """

    def __init__(self, engine: Engine, kinds: Sequence[Request]) -> None:
        self.kinds, self.fixed = kinds, not engine.configs.adaptive
        self.alone = engine.generate(kinds)

    def hold(self, ended: Sequence[tuple[int, RequestOutput]]) -> None:
        """Hold texts against those.

        A coin at the edge of two tokens may tell one drawn text of a hundred apart.
        """
        apart = drawn = gained = expected = 0
        for kind, result in ended:
            want = self.alone[kind]
            equal = result.tokens == want.tokens[: len(result.tokens)]
            if not self.kinds[kind].sampling.temperature:
                assert equal, (self.kinds[kind], result)
            elif not self.fixed:
                continue
            drawn += bool(self.kinds[kind].sampling.temperature)
            apart += not equal
            if equal and self.fixed:
                # an end cuts what the last step gained
                whole = result.accept_lens[:-1]
                gained, expected = (
                    gained + sum(whole),
                    expected + sum(want.accept_lens[: len(whole)]),
                )
            scored = zip(result.logprobs, want.logprobs, strict=False) if equal else ()
            assert all(abs(one.value - other.value) < 1e-3 for one, other in scored)
        assert apart <= max(1, drawn // 100)
        assert abs(gained - expected) <= expected // 100, "what was drafted depends on the company"


class Groups:
    """Notes which requests share a prefix, in plans that are filled from now on.

    Attributes
    ----------
    sizes : set of int
        How many requests of a plan shared one, at any look.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: set[int] = set()
        self._plans: set[TreePlan] = set()
        noted = self._plans

        class Noted(TritonTree):
            @staticmethod
            def fill_together(bounds: Sequence[TritonBound]) -> None:
                TritonTree.fill_together(bounds)
                noted.update(one.kernel.tables for one in bounds if one.kernel.kernels.sharing)

        monkeypatch.setattr("specattn.backends.triton.TritonTree", Noted)

    def look(self) -> None:
        """Read what the last fills found, those of replays too; waits for the device."""
        for plan in self._plans:
            # tiles that a request leaves to its group
            self.sizes.add(int((plan.requests[: plan.batch, 2] > 0).sum()))


class Watch:
    """While it watches, a sync is an error; counts allocations, and waits for events.

    Without CUDA nothing is counted.

    Attributes
    ----------
    steps : int
        How often it watched.
    waits, launch_waits : int
        For tokens or other events, while it watched; and how many of them launches made, those of
        prompts that waited included.
    allocations : dict
        By counter of torch's allocator, while it watched.
    """

    def __init__(self) -> None:
        self.reset()
        self._watches = False
        self._before: dict[str, int] = {}

    def reset(self) -> None:
        """Forget what was counted."""
        self.steps = self.waits = self.launch_waits = 0
        self.allocations = dict.fromkeys(COUNTERS, 0)

    def counted(self) -> dict[str, Any]:
        """Return what was counted, by name."""
        counts = {name: getattr(self, name) for name in ("steps", "waits", "launch_waits")}
        return counts | {"allocations": dict(self.allocations)}

    @contextmanager
    def over(self, *engines: Engine) -> Iterator[Watch]:
        """Count waits until the context ends, and those of these engines' launches."""
        if not torch.cuda.is_available():
            yield self
            return
        wait_for_event, wait_for_tokens = torch.cuda.Event.synchronize, PendingStep.wait
        wait_for_stream = torch.cuda.Stream.synchronize

        def event(event: torch.cuda.Event) -> None:
            self.waits += self._watches and not event.query()
            wait_for_event(event)

        def tokens(pending: PendingStep) -> list[list[int]]:
            self.waits += self._watches and not pending.ready
            return wait_for_tokens(pending)

        def stream(stream: torch.cuda.Stream) -> None:
            assert not self._watches, "a stream or the device was waited for"
            wait_for_stream(stream)

        calls: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.cuda.Event, "synchronize", event),
            (PendingStep, "wait", tokens),
            (torch.cuda.Stream, "synchronize", stream),
        ]
        for run in engines:
            for owner, name in (
                (run.scheduler, "schedule"),
                (run._admission, "admit_waiting"),
                (run._flight, "launch"),
                (run._flight, "_launch_ahead"),
            ):
                calls.append((owner, name, self._launching(getattr(owner, name))))
        with ExitStack() as stack:
            for call in calls:
                stack.enter_context(mock.patch.object(*call))
            yield self

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Refuse syncs, and count what is allocated."""
        self.steps += 1
        self._start()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away, for a prompt, if it watches."""
        watches = self._watches
        self._stop()
        try:
            yield
        finally:
            if watches:
                self._start()

    def _start(self) -> None:
        self._watches = torch.cuda.is_available()
        if self._watches:
            self._before = _counters()
            torch.cuda.set_sync_debug_mode("error")

    def _stop(self) -> None:
        if not self._watches:
            return
        self._watches = False
        torch.cuda.set_sync_debug_mode("default")
        for name, count in _counters().items():
            self.allocations[name] += count - self._before[name]

    def _launching(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            before = self.waits
            found = call(*args)
            self.launch_waits += self.waits - before
            return found

        return counted


def _counters() -> dict[str, int]:
    found = torch.cuda.memory_stats()
    return {name: found.get(name, 0) for name in COUNTERS}
