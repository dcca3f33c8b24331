"""A step in three graphs: its parts run over the same buffers, and there is room between them."""

from __future__ import annotations

import random

import pytest
import torch

from specattn.batch import ForwardMode
from specattn.cuda_graph import GraphRunner
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step.decoder import StepDecoder
from tests.books import check_books
from tests.speculative.stepping import PROMPTS, admitted, engine, told_of_itself
from tests.speculative.test_host_plans import PlanningBackend
from tests.tiny import dense_greedy

DRAWN = SamplingParams(0.8, seed=5)
TREE = (3, 4, 9)
FORWARDS = [ForwardMode.DRAFT_DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND]
PARTS = [mode.value for mode in FORWARDS]


def short_of_memory(monkeypatch, part: str, bucket: int) -> None:
    """Let captures of a part fail from this bucket on; larger ones come first."""
    capture = GraphRunner._capture

    def failing(self, mode, size):
        if mode.value == part and size <= bucket:
            self._make(mode, size)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(self, mode, size)

    monkeypatch.setattr(GraphRunner, "_capture", failing)


@pytest.mark.parametrize("bucket", [2, 5])
@pytest.mark.parametrize("part", PARTS)
def test_parts_without_graphs_run_over_the_buffers_of_the_others(monkeypatch, part, bucket):
    """Batches that every part has captured replay; the others run eagerly as a whole."""
    short_of_memory(monkeypatch, part, bucket)
    run = engine(TREE, cudagraph="piecewise", buckets=(2, 5))
    rows, decoder, rng = admitted(run), run.decoder(run.config), random.Random(3)
    assert sorted(len(decoder.runner.captured(mode)) for mode in decoder.modes) == [
        {2: 1, 5: 0}[bucket],
        2,
        2,
    ]
    tokens = {live.row: list(live.result.tokens) for live in run.running}
    for size in (5, 2, 4, 1, 3, 2, 5):
        part = rng.sample(rows, size)
        for row, new in zip(part, decoder.step(part), strict=True):
            tokens[row] += new
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert tokens[row] == dense_greedy(run.target.model, prompt, len(tokens[row]))
    stats, forwards = decoder.runner.stats, set(decoder.modes)
    assert {stats.eager[mode] for mode in forwards} == {0 if bucket == 2 else 7}
    assert {stats.replays[mode] for mode in forwards} == {7 if bucket == 2 else 0}


@pytest.mark.parametrize("bucket", [2, 5])
def test_drawing_parts_without_graphs_do_no_harm(monkeypatch, bucket):
    """They fail when the first request that draws has come, and its company does not notice."""
    short_of_memory(monkeypatch, f"{ForwardMode.TARGET_VERIFY.value} (sampled)", bucket)
    run = engine(TREE, cudagraph="piecewise", buckets=(2, 5))
    results = run.generate(
        [
            Request(prompt, 20, DRAWN if at == 1 else SamplingParams())
            for at, prompt in enumerate(PROMPTS)
        ]
    )
    for at, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        if at != 1:
            assert result.tokens == dense_greedy(run.target.model, prompt, 20)
    alone = engine(TREE).generate([Request(PROMPTS[1], 20, DRAWN)])
    assert results[1].tokens == alone[0].tokens


def test_batches_larger_than_all_buckets_keep_one_program():
    run = engine((3, 1, 4), buckets=(1,))
    rows, decoder = admitted(run), run.decoder(run.config)
    for size in (2, 3, 4, 5, 1, 4):
        told_of_itself(run, decoder, rows[:size])
        assert set(decoder._launches) <= {1, size, 5}
        assert len(decoder._launches) <= 2


def test_a_host_may_work_between_the_parts():
    """What it launches there runs there: after the drafts, and before the target."""
    run, other = engine(TREE, cudagraph="piecewise"), engine(TREE, cudagraph="piecewise")
    rows = admitted(run)
    assert admitted(other) == rows
    decoder, plain, seen = run.decoder(run.config), other.decoder(other.config), []

    def look(part) -> None:
        (step,) = decoder._launches[5].steps
        seen.append((part.mode, step.tree.tokens.clone(), run.states.seq_lens.clone()))

    for _ in range(3):
        seen.clear()
        lens = run.states.seq_lens.clone()
        assert decoder.step_async(rows, between=look).wait() == plain.step(rows)
        assert [mode for mode, *_ in seen] == FORWARDS[1:]
        (_, drafted, before), (_, verified, after) = seen
        assert torch.equal(drafted, verified), "the tree was there before the target ran"
        assert torch.equal(before, lens)
        assert torch.equal(after, lens)
        assert (run.states.seq_lens[rows] > lens[rows]).all()


@pytest.mark.parametrize("at", FORWARDS[1:], ids=lambda mode: mode.value)
def test_a_host_that_fails_between_the_parts_leaves_the_requests_as_they_were(at):
    run = engine(TREE, cudagraph="piecewise")
    rows, decoder = admitted(run), run.decoder(run.config)
    tokens = {live.row: list(live.result.tokens) for live in run.running}

    def fail(part) -> None:
        if part.mode == at:
            raise InterruptedError

    for _ in range(4):
        before = {name: value.clone() for name, value in run.states.tensors().items()}
        with pytest.raises(InterruptedError):
            decoder.step_async(rows, between=fail)
        for name, value in run.states.tensors().items():
            assert torch.equal(value, before[name]), name
        for row, new in zip(rows, decoder.step(rows), strict=True):
            tokens[row] += new
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert tokens[row] == dense_greedy(run.target.model, prompt, len(tokens[row]))


def test_nothing_comes_between_the_parts_of_one_graph():
    run = engine(TREE)
    rows, decoder = admitted(run), run.decoder(run.config)
    with pytest.raises(ValueError, match="nothing comes between"):
        decoder.step_async(rows, between=print)
    told_of_itself(run, decoder, rows)


def test_rows_are_the_steps_until_all_parts_are_launched():
    """Else who takes the row, or its slots, would find what this step still writes."""
    run = engine(TREE, cudagraph="piecewise")
    rows, decoder = admitted(run)[:2], run.decoder(run.config)
    other, tried = run.running[3].row, []

    def free(part) -> None:
        tried.append(part.mode)
        for row in rows:
            with pytest.raises(ValueError, match=f"row {row} takes part in a step"):
                run.table.free(row)
        if len(tried) == 1:  # who does not take part may end
            run.table.free(other)

    pending = decoder.step_async(rows, between=free)
    assert tried == FORWARDS[1:]
    run.table.free(rows[0])
    assert all(pending.wait())
    check_books(run.table)


def test_no_step_and_no_capture_runs_between_the_parts_of_another():
    run, calm = engine(TREE, cudagraph="piecewise"), engine(TREE, cudagraph="piecewise")
    rows, decoder = admitted(run), run.decoder(run.config)
    admitted(calm)
    refused = []

    def nested(_part) -> None:
        for call in (lambda: decoder.step_async(rows[2:]), lambda: decoder.capture(sampled=True)):
            with pytest.raises(ValueError, match="is being launched"):
                call()
            refused.append(call)

    for _ in range(3):
        gained = decoder.step_async(rows, between=nested).wait()
        assert gained == calm.decoder(calm.config).step(rows)
    assert len(refused) == 12
    decoder.capture(sampled=True)
    told_of_itself(run, decoder, rows)


def test_debugging_leaves_alone_who_sits_a_step_out():
    run, plain = (
        engine(TREE, cudagraph="piecewise", validate="debug"),
        engine(TREE, cudagraph="piecewise"),
    )
    rows = admitted(run)
    assert admitted(plain) == rows
    for one in (run, plain):
        one.table.free(rows[1])  # as ended requests that ride along
        one.table.reserved[rows[3]] = one.running[3].length
    for part in (rows, rows[1:4], [rows[1], 0], [rows[3]]):
        gained = run.decoder(run.config).step(part)
        assert gained == plain.decoder(plain.config).step(part)
        for row, new in zip(part, gained, strict=True):
            assert bool(new) == (row not in (0, rows[1], rows[3]))


def test_what_plans_on_the_host_needs_three_graphs():
    run = engine(TREE, PlanningBackend)
    with pytest.raises(ValueError, match="plans on the host needs cudagraph='piecewise'"):
        StepDecoder(run.target, run.draft, run.config, run.table, run.states, cudagraph="full")
    with pytest.raises(ValueError, match="plans on the host needs cudagraph='piecewise'"):
        Engine(
            run.target.model, run.draft.model, run.config, backend=PlanningBackend, cudagraph="full"
        )


def test_lengths_that_a_step_in_flight_changes_are_refused():
    """The mirror of a request that has not been read is a step behind."""
    run = engine(TREE, PlanningBackend)
    rows, decoder = admitted(run), run.decoder(run.config)

    def lens(some) -> torch.Tensor:
        return run.states.seq_lens[some].cpu()

    first = decoder.step_async(rows[:2], seq_lens_cpu=lens(rows[:2]))
    with pytest.raises(ValueError, match=rf"rows \[{rows[1]}\] take part in a step"):
        decoder.step_async(rows[1:4], seq_lens_cpu=lens(rows[1:4]))
    # others, and padding, may go on
    padded = [*rows[2:4], 0]
    second = decoder.step_async(padded, seq_lens_cpu=torch.cat([lens(padded[:2]), lens([0])]))
    assert all(first.wait())
    assert [len(new) > 0 for new in second.wait()] == [True, True, False]
    assert all(decoder.step(rows, seq_lens_cpu=lens(rows)))
