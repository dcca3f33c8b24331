"""Steps that are all the same, and what one takes of the device's and of the host's time."""

from __future__ import annotations

import gc
import os
import statistics
import time
from contextlib import contextmanager
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.step_forced import Forced
    from specattn.speculative.step.decoder import PendingStep, StepDecoder

WARM = 3
# numbers added up in a loop whose time tells what the host is capable of just then
LOOP = 1000
# loops that are timed on every core, to find the one that nobody else holds up
PROBES = 20
# steps under the profiler, and the kernels that are told
TRACED, TOLD = 3, 24


class Stepper:
    """Steps of one batch whose lengths go back after each, so that every step is the same.

    Parameters
    ----------
    decoder : StepDecoder
        Its requests are admitted already.
    rows : list of int
        Those that take part.
    accept : Forced
        The decoder's.
    **options
        What `StepDecoder.step_async` is told of the requests.
    """

    def __init__(
        self, decoder: StepDecoder, rows: list[int], accept: Forced, **options: Any
    ) -> None:
        self.decoder, self.rows, self.accept = decoder, rows, accept
        self.launch: Callable[[], PendingStep] = partial(decoder.step_async, rows, **options)
        self.lens = decoder.states.seq_lens.clone()
        self.length = 1
        # steps that gained less, and trees so far that could not give more, by place
        self.short = [0] * len(rows)
        self._shallow = accept.shallow.tolist()
        self._before: PendingStep | None = None

    def force(self, length: int) -> None:
        """Gain ``length`` tokens from the next step on."""
        self.finish()
        self.length = length
        self.accept.lens.fill_(length)

    def reset(self) -> None:
        """Put lengths back."""
        self.decoder.states.seq_lens.copy_(self.lens)

    def step(self) -> None:
        """Launch a step, then wait for the one before, so that the device never waits."""
        pending = self.launch()
        self.finish()
        self._before = pending

    def finish(self) -> list[int]:
        """Wait for the last step; returns how many tokens it gained, by place."""
        if self._before is None:
            return []
        gained = [len(tokens) for tokens in self._before.wait()]
        self._before = None
        if gained != [self.length] * len(self.rows):
            assert 1 <= min(gained) <= max(gained) <= self.length, (self.length, gained)
            less = (one < self.length for one in gained)
            self.short = list(map(add, self.short, less))
        return gained

    def check(self) -> None:
        """Assert that no step gained less than what is forced, but where trees were not so deep."""
        self.finish()
        found = self.accept.shallow.tolist()
        shallow = [now - then for now, then in zip(found, self._shallow, strict=True)]
        assert shallow[: len(self.rows)] == self.short, (self.short, shallow)

    def both(self) -> None:
        """Put lengths back and step."""
        self.reset()
        self.step()


def check_advance(stepper: Stepper) -> None:
    """Assert that a step is one graph, and adds to lengths what it gains, and nobody else's."""
    stats = stepper.decoder.runner.stats
    before, eager = stats.replays.total(), stats.eager.total()
    stepper.both()
    gained = dict(zip(stepper.rows, stepper.finish(), strict=True))
    assert (stats.replays.total() - before, stats.eager.total() - eager) == (1, 0), stats
    moved = (stepper.decoder.states.seq_lens - stepper.lens).tolist()
    assert moved == [gained.get(row, 0) for row in range(len(moved))], (moved, gained)
    stepper.reset()


def mark(device: torch.device) -> Any:
    """Return a mark in the device's time, or in the host's where there is no other."""
    if device.type != "cuda":
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Return microseconds between two marks; the device must have come to both."""
    if isinstance(begin, int):
        return (end - begin) / 1e3
    return float(begin.elapsed_time(end) * 1e3)


def timed(stepper: Stepper, rounds: int) -> dict[str, float]:
    """Return microseconds of the device and of the host per step, on the calmest core.

    The rows are those of the step before, and so known to be good.
    """
    spans, hosts, device = [], [], stepper.lens.device
    with calm_core(), collecting_nothing():
        for _ in range(WARM + rounds):
            stepper.reset()
            begin, at = mark(device), time.perf_counter_ns()
            pending = stepper.launch()
            hosts.append((time.perf_counter_ns() - at) / 1e3)
            spans.append((begin, mark(device)))
            stepper.finish()
            stepper._before = pending
        stepper.finish()
    times = sorted(between(*span) for span in spans[WARM:])
    launches = sorted(hosts[WARM:])
    return {
        "us": round(statistics.median(times), 2),
        "p10_us": round(times[rounds // 10], 2),
        "p90_us": round(times[9 * rounds // 10], 2),
        "host_us": round(statistics.median(launches), 2),
        "host_p10_us": round(launches[rounds // 10], 2),
        "host_p90_us": round(launches[9 * rounds // 10], 2),
    }


@contextmanager
def calm_core() -> Iterator[None]:
    """Stay on the core on which the loop takes least: somebody else may hold up the others."""
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        yield
        return
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(sorted(allowed), key=_loop_on)})
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _loop_on(core: int) -> float:
    os.sched_setaffinity(0, {core})
    return statistics.median(loop() for _ in range(PROBES))


def loop() -> float:
    """Return microseconds of a loop that is always the same."""
    at = time.perf_counter_ns()
    sum(range(LOOP))
    return (time.perf_counter_ns() - at) / 1e3


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Keep the garbage collector from taking part."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def launched(stepper: Stepper, rounds: int) -> dict[str, float]:
    """Return microseconds that the host takes to launch a step on an idle device, and until it
    has read the tokens.
    """
    launches, trips = [], []
    with collecting_nothing():
        for _ in range(WARM + rounds):
            stepper.reset()
            if stepper.lens.is_cuda:
                torch.cuda.synchronize()
            at = time.perf_counter_ns()
            stepper._before = stepper.launch()
            launches.append((time.perf_counter_ns() - at) / 1e3)
            stepper.finish()
            trips.append((time.perf_counter_ns() - at) / 1e3)
    return {
        "host_idle_us": round(statistics.median(launches[WARM:]), 2),
        "round_trip_us": round(statistics.median(trips[WARM:]), 2),
    }


def traced(stepper: Stepper) -> dict[str, Any]:
    """Return how many kernels a step has, and the longest by name, as the profiler sees them."""
    stepper.both()
    stepper.finish()
    activity = torch.profiler.ProfilerActivity
    device = activity.CUDA if stepper.lens.is_cuda else activity.CPU
    with torch.profiler.profile(activities=[device]) as profile:
        for _ in range(TRACED):
            stepper.both()
        stepper.finish()
    found = [
        {"name": one.key, "count": one.count / TRACED, "us": one.self_device_time_total / TRACED}
        for one in profile.key_averages()
        if one.device_type.name == device.name
    ]
    found.sort(key=lambda one: -one["us"])
    return {"kernels": sum(one["count"] for one in found), "by_name": found[:TOLD]}
