"""Prompts are launched beside steps; nobody waits for them, and texts stay as they are."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.prompts import WaitedPrompts
from specattn.errors import CapacityError
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.runner import PromptRunner
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step.host_buffers import PendingStep
from tests.books import check_books
from tests.samples import half, on_cpu
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

CONTEXT, ROWS = 64, 3
TREES = {"plain": (0, 1, 1), "chain": (3, 1, 4), "tree": (3, 4, 9)}


@pytest.fixture(scope="module")
def models():
    return TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)


def make(models, tree="chain", *, slots=None, **options) -> Engine:
    config = SpecConfig(*TREES[tree], CONTEXT, ROWS)
    draft = models[1] if tree != "plain" else None
    options = {"buckets": (1, ROWS)} | options
    return Engine(models[0], draft, config, backend="torch_native", num_slots=slots, **options)


def requests_of(seed: int, count: int, longest: int = 30) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request([rng.randrange(61) for _ in range(rng.randint(1, longest))], rng.randint(1, 12))
        for _ in range(count)
    ]


class Log:
    """Launches and readings of an engine, in their order."""

    def __init__(self, monkeypatch, run: Engine) -> None:
        self.names: list[str] = []
        runner = run._admission.prompts
        kinds: dict[int, str] = {}
        launch, group = runner._launch, run._flight._launch_group

        def chunk(prompts, pieces):
            pending = launch(prompts, pieces)
            kinds[id(pending)] = f"chunk of {sum(piece.places for piece in pieces)}"
            self.names.append(kinds[id(pending)])
            self.kept.append(pending)
            return pending

        def step(config, of):
            found = group(config, of)
            kinds[id(found.pending)] = "step"
            self.names.append(f"step of {len(of)}")
            self.kept.append(found.pending)
            return found

        wait = PendingStep.wait

        def waited(pending):
            if not pending.waited:
                self.names.append(f"read {kinds.get(id(pending), 'other')}")
            return wait(pending)

        self.kept: list[PendingStep] = []
        monkeypatch.setattr(runner, "_launch", chunk)
        monkeypatch.setattr(run._flight, "_launch_group", step)
        monkeypatch.setattr(PendingStep, "wait", waited)


@on_cpu(half, "tree", "buckets")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("buckets", "chunk"), [((), 4096), ((16, 40), 40), ((6, 12), 4096), ((), 9)]
)
def test_texts_are_those_of_plain_decoding(models, tree, buckets, chunk):
    """Requests of one token, at their contexts' ends, longer than a chunk, and more than rows."""
    run = make(models, tree, prompt_buckets=buckets, prompt_chunk=chunk)
    requests = [*requests_of(3, 9), Request([9] * CONTEXT, 5), Request([4] * (CONTEXT - 2), 9)]
    told: dict[int, list[int]] = {}
    results = run.generate(requests, lambda at, new: told.setdefault(at, []).extend(new))
    for at, (request, result) in enumerate(zip(requests, results, strict=True)):
        count = min(request.max_new_tokens, CONTEXT + 1 - len(request.prompt))
        assert result.tokens == told[at] == dense_greedy(models[0], request.prompt, count)
        assert result.started_at < result.first_token_at <= result.finished_at
    check_books(run.table)
    assert run.table.num_free_rows == ROWS
    assert run.metrics().generated_tokens == sum(map(len, told.values()))
    runner = run._admission.prompts
    assert isinstance(runner, PromptRunner)
    assert bool(runner.targets.stats.replays) == bool(buckets)


def test_a_request_joins_the_next_step_before_its_first_token_is_read(models, monkeypatch):
    run = make(models, "plain")
    log = Log(monkeypatch, run)
    run.generate([Request([5, 6, 7], 4)])
    assert log.names[:4] == ["chunk of 3", "step of 1", "read chunk of 3", "step of 1"]
    log.names.clear()
    # three run, and two wait for the first of them
    run.generate([Request([at, 6, 7], 5 + 9 * (at > 0)) for at in range(5)])
    assert log.names[:3] == ["chunk of 9", "step of 3", "read chunk of 9"]
    second = log.names.index("chunk of 3")
    assert log.names[second + 1 : second + 4] == ["step of 3", "read step", "read chunk of 3"]


def test_steps_are_launched_ahead_while_requests_wait(models, monkeypatch):
    run = make(models, "plain")
    log = Log(monkeypatch, run)
    run.generate([Request([at], 9) for at in range(4)])
    reads = [at for at, name in enumerate(log.names) if name == "read step"]
    assert all(log.names[at - 1].startswith("step of") for at in reads[:5])


def test_what_runs_waits_for_one_chunk_at_most(models, monkeypatch):
    """A prompt longer than a chunk runs in parts, a step of the others between any two."""
    run = make(models, "plain", prompt_chunk=8)
    log = Log(monkeypatch, run)
    requests = [Request([1, 2, 3], 25), Request([5] * 30, 3), Request([7] * 20, 3)]
    (first,) = run.add(requests[:1])
    log.names.clear()
    results = run.generate(requests[1:])
    chunks = [at for at, name in enumerate(log.names) if name.startswith("chunk")]
    assert len(chunks) == 4 + 3
    for one, other in pairwise(chunks):
        assert any(name.startswith("step") for name in log.names[one:other])
    for request, result in zip(requests, [first, *results], strict=True):
        count = request.max_new_tokens
        assert result.tokens == dense_greedy(models[0], request.prompt, count)


class Clock:
    """A device that takes a unit for a step, and one for 16 places of a chunk.

    The host takes no time, and waits for what it reads.
    """

    def __init__(self, monkeypatch, run: Engine) -> None:
        self.now = self.end = self.longest = 0.0
        self.ends: dict[int, float] = {}
        self.kept: list[PendingStep] = []
        runner = run._admission.prompts
        launch, group, wait = runner._launch, run._flight._launch_group, PendingStep.wait

        def chunk(prompts, pieces):
            took = sum(piece.places for piece in pieces) / 16
            self.longest = max(self.longest, took)
            return self.begin(launch(prompts, pieces), took)

        def step(config, of):
            found = group(config, of)
            self.begin(found.pending, 1.0)
            return found

        def waited(pending):
            self.now = max(self.now, self.ends[id(pending)])
            return wait(pending)

        monkeypatch.setattr(runner, "_launch", chunk)
        monkeypatch.setattr(run._flight, "_launch_group", step)
        monkeypatch.setattr(PendingStep, "wait", waited)

    def begin(self, pending: PendingStep, took: float) -> PendingStep:
        self.end = max(self.end, self.now) + took
        self.ends[id(pending)] = self.end
        self.kept.append(pending)
        return pending


@on_cpu(half, "chunk", "tree")
@pytest.mark.parametrize("tree", ["plain", "chain"])
@pytest.mark.parametrize("chunk", [512, 128])
def test_a_gap_is_two_steps_and_a_chunk_at_most(monkeypatch, tree, chunk):
    """Prompts of a third to all of 384 tokens; two of three come while others run."""
    config = SpecConfig(*TREES[tree], 448, 8)
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    options = {"backend": "torch_native", "prompt_chunk": chunk, "prompt_buckets": ()}
    run = Engine(target, draft if tree == "chain" else None, config, **options)
    rng, told = random.Random(7), {}
    requests = [
        Request([rng.randrange(61) for _ in range(rng.randint(128, 384))], rng.randint(20, 40))
        for _ in range(24)
    ]
    clock = Clock(monkeypatch, run)
    run.generate(requests, lambda at, new: told.setdefault(at, []).append(clock.now))
    gaps = [
        later - before
        for at, times in told.items()
        # those that found nobody running ran one after the other, before any step
        for before, later in list(pairwise(times))[at < config.max_num_reqs :]
    ]
    assert clock.longest > 0.9 * chunk / 16
    assert max(gaps) > 128 / 16, "some waited for a chunk"
    assert max(gaps) <= 2 + chunk / 16


def test_a_prompt_in_parts_may_be_dropped(models):
    run = make(models, "plain", prompt_chunk=8)
    (first,) = run.add([Request([1, 2, 3], 25)])
    (long, other) = run.scheduler.wait([Request([5] * 30, 3), Request([3, 1], 4)])
    run.step(ahead=True)
    run._admission.admit_waiting()
    run.step(ahead=True)
    assert run._admission._begun is not None
    run.drop(long)
    while run.num_running or run.scheduler.waiting:
        run._admission.admit_waiting()
        run.step(ahead=True)
    assert (long.tokens, long.finish_reason) == ([], "dropped")
    assert first.tokens == dense_greedy(models[0], [1, 2, 3], 25)
    assert other.tokens == dense_greedy(models[0], [3, 1], 4)
    check_books(run.table)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("chunk", [8, 4096])
def test_a_chunk_that_fails_leaves_the_books_whole(models, monkeypatch, at, chunk):
    """Whoever runs goes on, and what comes next runs."""
    run = make(models, prompt_chunk=chunk)
    (before,) = run.add([Request([1, 2, 3], 20)])
    run.step(ahead=True)
    runner, calls = run._admission.prompts, []
    launch = runner._launch

    def fails(prompts, pieces):
        calls.append(0)
        if len(calls) == at:
            raise RuntimeError("the device is lost")
        return launch(prompts, pieces)

    monkeypatch.setattr(runner, "_launch", fails)
    free, rows = run.table.num_free_slots, run.table.num_free_rows
    if chunk == 8:
        with pytest.raises(RuntimeError, match="the device is lost"):
            run.add([Request([5] * 30, 3)])
        assert (run.num_running, run.table.num_free_rows) == (1, rows)
        assert run.table.num_free_slots >= free - 64
        assert not run._flight.prompts
    monkeypatch.undo()
    (after,) = run.add([Request([6] * 30, 5)])
    while run.num_running:
        run.step(ahead=True)
    assert before.tokens == dense_greedy(models[0], [1, 2, 3], 20)
    assert after.tokens == dense_greedy(models[0], [6] * 30, 5)
    check_books(run.table)


def test_an_error_before_first_tokens_are_handed_out_loses_none(models, monkeypatch):
    run = make(models, "plain")
    first, second = run.scheduler.wait([Request([3, 1], 4), Request([4, 1], 4)])
    run._admission.admit_waiting()

    def short():
        raise CapacityError("no slots")

    with monkeypatch.context() as patch:
        patch.setattr(run.scheduler, "schedule", short)
        with pytest.raises(CapacityError, match="no slots"):
            run.step()
        gains = run.step()
    assert [result for result, _ in gains] == [first, second]
    while run.num_running:
        run.step(ahead=True)
    for result, prompt in ((first, [3, 1]), (second, [4, 1])):
        assert result.tokens == dense_greedy(models[0], prompt, 4)


def test_who_is_dropped_before_its_first_token_has_none(models):
    run = make(models)
    first, second = run.scheduler.wait([Request([3, 1], 4), Request([4, 1], 4)])
    run._admission.admit_waiting()
    run.drop(first)
    while run.num_running:
        run.step(ahead=True)
    assert (first.tokens, first.finish_reason) == ([], "dropped")
    assert second.tokens == dense_greedy(models[0], [4, 1], 4)
    check_books(run.table)
    assert run.table.num_free_rows == ROWS


def test_drawn_texts_do_not_depend_on_chunks(models):
    requests = [
        Request(one.prompt, one.max_new_tokens, SamplingParams(0.9, 20, 0.9, seed=at))
        for at, one in enumerate(requests_of(5, 7))
    ]
    want = [one.tokens for one in make(models).generate(requests)]
    for options in ({"prompt_buckets": (8, 20)}, {"prompt_chunk": 5}, {"prompt_buckets": (64,)}):
        got = make(models, **options).generate(requests)
        assert [one.tokens for one in got] == want


def test_setups_that_need_the_host_run_prompts_as_before(models):
    class Own(TinyTarget):
        pass

    run = make((Own(device=DEVICE), models[1]))
    assert isinstance(run._admission.prompts, PromptRunner)
    setup = run._decoders.setup
    run._admission.prompts = WaitedPrompts(Prefill.of(setup), setup.states)
    requests = requests_of(8, 7)
    for request, result in zip(requests, run.generate(requests), strict=True):
        want = dense_greedy(models[0], request.prompt, request.max_new_tokens)
        assert result.tokens == want


def test_graphs_report_chunks(models):
    run = make(models, prompt_buckets=(8, 16))
    parts = [(one.part, one.bucket) for one in run.graphs()[run.config]]
    assert ("prompts", 16) in parts
    assert ("prompts' drafts", 8) in parts
    assert ("first tokens", 8) in parts
    assert not [part for part, _ in parts if "sampled" in part]
    run.generate([Request([3], 2, SamplingParams(1.0, seed=1))])
    parts = [one.part for one in run.graphs()[run.config]]
    assert "first tokens (sampled)" in parts


@pytest.mark.parametrize("error", [RuntimeError("an unsupported call"), torch.OutOfMemoryError()])
def test_prompts_run_eagerly_if_their_capture_fails(models, caplog, error):
    """A forward of prompts may do what one of steps does not."""

    class Stubborn(TinyTarget):
        def forward(self, input_ids, *rest):
            if len(input_ids) == 17:
                raise error
            return super().forward(input_ids, *rest)

    target = Stubborn(device=DEVICE)
    run = make((target, models[1]), prompt_buckets=(8, 17))
    said = "prompts run eagerly" if "call" in str(error) else "out of device memory"
    assert said in caplog.text
    requests = [Request([5] * length, 6) for length in (3, 12, 30)]
    for request, result in zip(requests, run.generate(requests), strict=True):
        assert result.tokens == dense_greedy(models[0], request.prompt, 6)
