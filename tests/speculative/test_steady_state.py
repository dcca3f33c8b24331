"""Steps neither wait for the device nor allocate on it, whoever joins, grows and ends.

torch's sync debug mode reports what it waits for itself; waits for events, which it does not
report, are counted: a step's tokens may be waited for once, after the next step was launched or
not, and launching waits for nothing. A joining request's prompt is excepted.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.soak import Churn, Dice
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.host_buffers import PendingStep
from specattn.speculative.sampling import SamplingParams
from tests.processors import GREEDY, greedy_text
from tests.tiny import TinyDraft, TinyTarget

pytestmark = pytest.mark.gpu

DRAWN = SamplingParams(0.8, top_p=0.9, seed=7)
KINDS = [
    Request([3, 14, 15, 9, 26, 5], 150),
    Request([35], 150, DRAWN),
    Request([8, 9, 7], 60),
    Request([3, 14, 15, 2], 90, SamplingParams(1.2, 20, seed=3)),
    Request([6, 1], 150),
]
# beside them, each processor alone and with draws, and log-probabilities
PROCESSED = [
    *KINDS,
    *(Request([3, 14, 15, at], 150 - at, params) for at, params in enumerate(GREEDY.values())),
    Request([9, 26], 70, replace(GREEDY["three"], temperature=0.9, min_p=0.1, logprobs=3)),
    Request([5, 35], 50, SamplingParams(logprobs=0)),
]
COUNTERS = (
    "allocation.all.allocated",
    "segment.all.allocated",
    "num_device_alloc",
    "num_alloc_retries",
)


class Steady:
    """While it watches, a sync is an error; counts allocations, and waits for events."""

    def __init__(self, monkeypatch) -> None:
        self.waits = self.launch_waits = 0
        self._watches = False
        self.allocations = dict.fromkeys(COUNTERS, 0)
        synchronize = torch.cuda.Event.synchronize

        def wait(event):
            self.waits += not event.query()
            synchronize(event)

        tokens = PendingStep.wait

        def wait_for_tokens(pending):
            self.waits += not pending.ready
            return tokens(pending)

        wait_for_stream = torch.cuda.Stream.synchronize

        def refuse(stream):
            assert not self._watches, "a stream or the device was waited for"
            wait_for_stream(stream)

        monkeypatch.setattr(torch.cuda.Event, "synchronize", wait)
        monkeypatch.setattr(PendingStep, "wait", wait_for_tokens)
        monkeypatch.setattr(torch.cuda.Stream, "synchronize", refuse)

    @contextmanager
    def watching(self):
        before = self._counters()
        torch.cuda.set_sync_debug_mode("error")
        self._watches = True
        try:
            yield
        finally:
            self._watches = False
            torch.cuda.set_sync_debug_mode("default")
            for name, count in self._counters().items():
                self.allocations[name] += count - before[name]

    def launches_of(self, run, monkeypatch) -> None:
        """Count what launching a step waits for, its slots included."""

        def counted(call, *args):
            before = self.waits
            found = call(*args)
            self.launch_waits += self.waits - before
            return found

        for owner, name in ((run.scheduler, "schedule"), (run, "_launch"), (run, "_launch_ahead")):
            monkeypatch.setattr(owner, name, partial(counted, getattr(owner, name)))

    def _counters(self) -> dict[str, int]:
        found = torch.cuda.memory_stats()
        return {name: found.get(name, 0) for name in COUNTERS}


RUNS = {
    "full": (1000, {"cudagraph": "full"}, [], KINDS),
    "piecewise": (300, {"cudagraph": "piecewise"}, [], KINDS),
    "switching": (300, {"policy": Dice(2)}, [(2, 1, 3), (0, 1, 1)], KINDS),
    "processed": (500, {"cudagraph": "full", "processed": True}, [], PROCESSED),
    "processed parts": (300, {"cudagraph": "piecewise", "processed": True}, [], PROCESSED),
}


def engine(others, options, device="cuda", backend="triton") -> Engine:
    config, *more = (
        SpecConfig(*tree, max_context_len=192, max_num_reqs=6, page_size=2)
        for tree in ((3, 4, 9), *others)
    )
    models = TinyTarget(device=device), TinyDraft(device=device)
    return Engine(*models, config, configs=more, backend=backend, buckets=[2, 6], **options)


@pytest.mark.parametrize(("steps", "options", "others", "kinds"), RUNS.values(), ids=RUNS)
def test_steps_neither_wait_nor_allocate(monkeypatch, steps, options, others, kinds):
    run = engine(others, options)
    paused = []

    @contextmanager
    def joining():
        paused[-1].__exit__(None, None, None)
        try:
            yield
        finally:
            paused[-1] = steady.watching()
            paused[-1].__enter__()

    churn = Churn(run, kinds, 5, joining)
    steady = Steady(monkeypatch)
    steady.launches_of(run, monkeypatch)
    ended = []
    for at in range(60 + steps):
        if at == 60:  # everything has been compiled, and both kinds of steps captured
            steady.allocations = dict.fromkeys(COUNTERS, 0)
            steady.waits = steady.launch_waits = 0
        # what warms up may allocate
        paused.append(steady.watching())
        paused[-1].__enter__()
        try:
            ended += churn.step()
        finally:
            paused.pop().__exit__(None, None, None)
    assert steady.allocations == dict.fromkeys(COUNTERS, 0)
    assert not steady.launch_waits
    assert steady.waits <= steps
    assert len(ended) > steps // 20, f"only {len(ended)} requests ended"
    # the longer ones seldom run all at once
    assert churn.sizes >= set(range(1, 7 if kinds is KINDS else 6))
    for decoder in run.decoders:
        assert decoder.config in run.configs.all
        assert all(map(decoder.runner.recorded, decoder.modes))
        assert not decoder.runner.stats.eager
    assert {result.finish_reason for _, result in ended} == {"length"}
    greedy = {
        at: greedy_text(run.target.model, list(kind.prompt), kind.max_new_tokens, kind.sampling)
        for at, kind in enumerate(kinds)
        if not kind.sampling.temperature
    }
    for kind, result in ended:
        if kind in greedy:
            assert result.tokens == greedy[kind][: len(result.tokens)]
    run.clear()
    run.table.check()


def test_what_waits_or_allocates_is_noticed(monkeypatch):
    """The control."""
    steady, number = Steady(monkeypatch), torch.zeros(1, device="cuda")
    with steady.watching(), pytest.raises(RuntimeError, match="synchronizing"):
        number.item()
    with steady.watching(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.tensor([1.0], device="cuda")
    done = torch.cuda.Event()
    with steady.watching():
        kept = number + 1
        torch.cuda._sleep(10_000_000)
        done.record()
        done.synchronize()
        with pytest.raises(AssertionError, match="waited for"):
            torch.cuda.current_stream().synchronize()
    assert kept.is_cuda
    assert steady.waits == 1
    # the tensor that was refused above was allocated first
    assert steady.allocations["allocation.all.allocated"] >= 1
