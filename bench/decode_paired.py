"""Whether a step in one graph is slower than the same step in three, decided in pairs.

Graphs that do the same differ by a percent and more, which is more than one graph and three do. So
both are recorded over the same buffers, pools and states, from the same requests, and into a memory
pool that an earlier recording has grown, so that what they allocate comes to lie alike. What
still differs besides their seams is not known in full. Instantiating one and the same recording
anew moves its time, so all graphs are instantiated several times, in any order, and times are means
over that. Everything is made anew many times, moved a little further, and every time counts as one
observation of how fast one graph is beside three (`bench.suite.seams`). Each time they are
instantiated they take turns, one, three, three, one, at the same few steps of the same requests.

A turn is timed between the landings of its first and its last step, once launched a step ahead,
by the host's clock and by events on the device, and once with every step waited for.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bench.step_timing import between, mark
from bench.suite import seams
from bench.suite.decode import ONE, THREE
from bench.suite.seams import AHEAD, DEVICE, TIMED, WAITED
from specattn.config import SpecConfig
from specattn.cuda_graph.recorder import instantiate
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.speculative.sampling import SamplingParams
from specattn.speculative.step_decoder import StepDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specattn.speculative.step_program import StepProgram
    from specattn.speculative.tbo_step import TboStepProgram

    from specattn.speculative.step_decoder import CudagraphMode

    #: What rows gained, step by step.
    Gained = list[list[list[int]]]

SEAMS: dict[str, CudagraphMode] = {ONE: "full", THREE: "piecewise"}
# what order and place alone make of it: one graph stands where three do
CONTROL: dict[str, CudagraphMode] = {ONE: "full", THREE: "full"}
# kernels of the largest graph that is instantiated between them
OTHERS = 1500
# memory that moves what is made after it, in segments of torch's allocator
PADDING, SEGMENT = 64, 2 << 20


def other(kernels: int) -> torch.cuda.CUDAGraph:
    """Return a graph that takes room on the device, for it has been launched."""
    graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            number.add_(1)
    graph.replay()
    return graph


class Twin(StepDecoder):
    """Records the steps of another decoder anew, over its buffers and into its memory pool."""

    def __init__(self, owner: StepDecoder, seams: CudagraphMode) -> None:
        self._owner = owner
        super().__init__(
            owner.target,
            owner.draft,
            owner.config,
            owner.table,
            owner.states,
            features=owner.features,
            buckets=owner.runner.buckets,
            record=owner.runner.recording,
            cudagraph=seams,
            indices=owner.indices,
            recorder=owner.runner.recorder,
            accept=owner.accept,
        )
        # those of the ring that the owner's programs have bound, and captures have moved on
        self._turns = owner._turns
        self._turns.align()

    def _program(self, size: int) -> StepProgram | TboStepProgram:
        return self._owner._programs[size]

    @property
    def grown(self) -> int:
        """Bytes that the memory pool grew by; 0 if memory is what the owner's recordings had."""
        return sum(report.nbytes for report in self.report())


@dataclass(frozen=True)
class Turn:
    """Microseconds per step, by how they were timed, and what was gained."""

    us: dict[str, float]
    gained: Gained


class Rebuild:
    """One graph and three over the same memory, made anew.

    Parameters
    ----------
    models : tuple
        Target and draft.
    prompts : list of list of int
        Of the batch.
    config : SpecConfig
        With room for the batch, and no more.
    nth : int
        Which it is: how far it is moved, and who is recorded first.
    seams : dict
        Those of both.
    """

    def __init__(
        self,
        models: tuple[Any, Any],
        prompts: list[list[int]],
        config: SpecConfig,
        nth: int,
        seams: dict[str, CudagraphMode] = SEAMS,
    ) -> None:
        segments = random.Random(nth).randrange(1, PADDING)
        self._padding = torch.empty(segments * SEGMENT, dtype=torch.uint8, device=models[0].device)
        self.prompts, self.config = prompts, config
        self.engine = Engine(*models, config, buckets=[len(prompts)], cudagraph="full")
        # the engine's own graphs are never replayed: recording them grows the pool
        order = tuple(seams) if nth % 2 == 0 else tuple(reversed(seams))
        owner = self.engine.decoder(config)
        self.twins = {way: Twin(owner, seams[way]) for way in order}
        self.first = ONE if nth // 2 % 2 == 0 else THREE
        self._random = random.Random(nth)
        self._others: list[torch.cuda.CUDAGraph] = []
        self.rows = list(range(1, len(prompts) + 1))
        self.sampled = False
        self._kept: dict[str, torch.Tensor] = {}

    def admit(self, temperature: float) -> None:
        """Run the prompts, and keep what the first step finds."""
        table, states, size = self.engine.table, self.engine.states, len(self.prompts)
        new = self.config.max_context_len
        self.engine.add(
            [
                Request(prompt, new, SamplingParams(temperature, seed=at), ignore_eos=True)
                for at, prompt in enumerate(self.prompts)
            ]
        )
        assert self.engine.num_running == size == self.config.max_num_reqs
        table.reserve(self.rows, [self.config.max_context_len] * size)
        self.sampled = bool(temperature)
        for twin in self.twins.values():
            twin.capture(sampled=self.sampled)
        self._kept = {name: tensor.clone() for name, tensor in states.tensors().items()}

    def instantiate(self) -> None:
        """Instantiate all graphs anew, in any order, between others of any size."""
        # until all are instantiated, those of the last time stay in the way
        before, self._others = self._others, []
        for twin in self._random.sample(list(self.twins.values()), len(self.twins)):
            for part in twin.modes:
                graph = twin.runner.ready(part, len(self.rows)).graph
                if graph is not None:
                    self._others.append(other(self._random.randrange(1, OTHERS)))
                    instantiate(graph)
        del before

    def turn(self, way: str, steps: int, *, ahead: bool) -> Turn:
        """Take a step and then ``steps`` that are timed, from where the prompts left off."""
        for name, tensor in self.engine.states.tensors().items():
            tensor.copy_(self._kept[name])
        if self.engine.states.seq_lens.is_cuda:
            torch.cuda.synchronize()
        take = self._ahead if ahead else self._waited
        found = take(self.twins[way], steps)
        assert all(map(all, found.gained)), "a request had no slots for a step"
        return found

    def _ahead(self, twin: Twin, steps: int) -> Turn:
        device, gained, begun = self.engine.states.seq_lens.device, [], 0.0
        before = twin.step_async(self.rows, sampled=self.sampled)
        begin = mark(device)
        for _ in range(steps):
            pending = twin.step_async(self.rows, sampled=self.sampled)
            gained.append(before.wait())
            begun, before = begun or time.perf_counter(), pending
        end = mark(device)
        gained.append(before.wait())
        seconds = time.perf_counter() - begun
        if device.type == "cuda":
            torch.cuda.synchronize()
        times = {AHEAD: seconds * 1e6 / steps, DEVICE: between(begin, end) / steps}
        return Turn(times, gained)

    def _waited(self, twin: Twin, steps: int) -> Turn:
        gained = [twin.step(self.rows, sampled=self.sampled)]
        begun = time.perf_counter()
        gained += [twin.step(self.rows, sampled=self.sampled) for _ in range(steps)]
        return Turn({WAITED: (time.perf_counter() - begun) * 1e6 / steps}, gained)


def turns(first: str, rounds: int) -> Iterator[str]:
    """Say whose turn it is: A B B A, B A A B, and so on, so that no drift favours either."""
    second = THREE if first == ONE else ONE
    for nth in range(rounds):
        yield from (
            (first, second, second, first) if nth % 2 == 0 else (second, first, first, second)
        )


#: Microseconds per step by how they were timed, and whose they are.
Times = dict[str, dict[str, list[float]]]


def observe(rebuild: Rebuild, plan: Plan, *, exact: bool) -> dict[str, Any]:
    """Let both take turns, as often as graphs are instantiated.

    Returns times by how they were timed, and how many texts differ.

    Raises
    ------
    ArithmeticError
        If ``exact`` and one graph's tokens are not three graphs'.
    """
    placed: Times = {name: {way: [] for way in SEAMS} for name in TIMED}
    gained: list[Gained] = []
    for _ in range(plan.places):
        rebuild.instantiate()
        for name, by_way in _taken(rebuild, plan, gained).items():
            for way, us in by_way.items():
                placed[name][way].append(round(statistics.median(us), 2))
    apart = sum(one != gained[0] for one in gained)
    if exact and apart:
        raise ArithmeticError(f"{apart} of {len(gained)} turns gained other tokens than the first")
    return {
        "us": {
            name: {way: round(statistics.fmean(us), 2) for way, us in by_way.items()}
            for name, by_way in placed.items()
        },
        "placed_us": placed,
        "accepted_per_step": round(
            statistics.fmean(len(tokens) for step in gained[0][1:] for tokens in step), 3
        ),
        "turns": len(gained),
        "apart": apart,
    }


def _taken(rebuild: Rebuild, plan: Plan, gained: list[Gained]) -> Times:
    """Return the times of turns, with graphs where they are; adds what was gained."""
    times: Times = {name: {way: [] for way in SEAMS} for name in TIMED}
    for way in SEAMS:  # graphs go to the device when they are launched first
        rebuild.turn(way, 1, ahead=True)
    gc.disable()
    try:
        for ahead, count in ((True, plan.rounds), (False, max(1, plan.rounds // 2))):
            for way in turns(rebuild.first, count):
                found = rebuild.turn(way, plan.steps, ahead=ahead)
                for name, us in found.us.items():
                    times[name][way].append(us)
                gained.append(found.gained)
    finally:
        gc.enable()
    return times


@dataclass(frozen=True)
class Plan:
    """What is compared, and how often.

    Parameters
    ----------
    trees : dict
        Settings by name.
    batches : list of int
        Batch sizes.
    temperatures : sequence of float
        How requests draw.
    context : int
        Tokens that a request may have.
    rebuilds : int
        How often everything is made anew, at most; even, so that either is recorded first as often.
    steps, rounds : int
        Steps of a turn, and fours of turns (half as many where steps are waited for).
    places : int
        How often graphs are instantiated within one time.
    limit : float
        Seconds that all of it may take, the first time excepted.
    control : bool
        Whether one graph stands where three do (`CONTROL`).
    """

    trees: dict[str, tuple[int, int, int]]
    batches: list[int]
    temperatures: Sequence[float]
    context: int
    rebuilds: int
    steps: int = 6
    rounds: int = 2
    places: int = 3
    limit: float = 100.0
    control: bool = False


def compare(
    models: tuple[Any, Any],
    prompts: list[list[int]],
    plan: Plan,
    *,
    exact: bool,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Make everything anew as often as planned, as long as there is time.

    What is known is handed to ``keep`` whenever every cell has one more observation, and returned
    at the end.
    """
    begin, took = time.perf_counter(), 0.0
    cells = {
        (size, name, temperature): {
            "name": f"batch {size}, {'drawn' if temperature else 'greedy'}, {name}",
            "batch": size,
            "temperature": temperature,
            "setting": name,
            "rebuilds": [],
        }
        for temperature in plan.temperatures
        for size in plan.batches
        for name in plan.trees
    }
    found: dict[str, Any] = {
        "trees": plan.trees,
        "steps": plan.steps,
        "rounds": plan.rounds,
        "places": plan.places,
        "cells": list(cells.values()),
    }
    gc.collect()
    gc.freeze()  # the models stay; looking for garbage among them takes longer than a step
    for nth in range(plan.rebuilds):
        began = time.perf_counter()
        # both orders of recording as often: for some cells they matter more than seams
        if nth and nth % 2 == 0 and began - begin + 2 * took > plan.limit:
            break
        for size in plan.batches:
            for name, tree in plan.trees.items():
                _observe(models, prompts[:size], name, tree, nth, plan, cells, exact=exact)
        took = time.perf_counter() - began  # the first time may compile
        found["slower"] = seams.slower(found["cells"])
        found["seconds"] = round(time.perf_counter() - begin, 1)
        print(f"made anew {nth + 1} times, {found['seconds']} s", flush=True)
        keep(found)
    gc.unfreeze()
    return found


def _observe(
    models: tuple[Any, Any],
    prompts: list[list[int]],
    name: str,
    tree: tuple[int, int, int],
    nth: int,
    plan: Plan,
    cells: dict[tuple[int, str, float], dict[str, Any]],
    *,
    exact: bool,
) -> None:
    """Make both anew for a batch and a tree, and add what is observed to its cells."""
    config = SpecConfig(*tree, plan.context, len(prompts))
    rebuild = Rebuild(models, prompts, config, nth, CONTROL if plan.control else SEAMS)
    for temperature in plan.temperatures:
        rebuild.admit(temperature)
        seen = observe(rebuild, plan, exact=exact)
        rebuild.engine.clear()
        seen["captured_first"] = next(iter(rebuild.twins))
        seen["pool_grew"] = sum(twin.grown for twin in rebuild.twins.values())
        cells[len(prompts), name, temperature]["rebuilds"].append(seen)
    del rebuild
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
