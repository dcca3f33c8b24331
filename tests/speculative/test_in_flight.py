"""Steps in flight: each tells its own rows' tokens, whatever the host does before it has run."""

from __future__ import annotations

import random

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.step.host_buffers import InFlight
from tests.books import check_books
from tests.samples import half, on_cpu
from tests.speculative.stepping import PROMPTS, admitted, engine, hold_up, told_of_itself
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_may_be_read_a_step_late(backend):
    run, late = engine((3, 4, 9), backend), engine((3, 4, 9), backend)
    for one in (run, late):
        admitted(one)
    rows = [live.row for live in run.running]
    assert rows == [live.row for live in late.running]
    decoder, other = run.decoder(run.config), late.decoder(late.config)
    wanted = [decoder.step(rows) for _ in range(6)]
    found, pending = [], [other.step_async(rows)]
    for _ in range(5):
        pending.append(other.step_async(rows))
        with pytest.raises(ValueError, match="2 steps are in flight"):
            other.step_async(rows)
        found.append(pending.pop(0).wait())
    assert [*found, pending[0].wait()] == wanted
    assert pending[0].wait() == wanted[-1], "waiting twice tells the same"


@pytest.mark.parametrize("rows", [[2, 1], [1, 0, 2], []], ids=["all", "padding", "none"])
def test_a_step_writes_its_outcome_where_it_says(rows):
    run = engine((3, 4, 9), buckets=(2, 5))
    admitted(run, PROMPTS[:2])
    pending = run.decoder(run.config).step_async(rows)
    packed, gained = pending.packed, pending.wait()
    assert packed.shape == (len(rows), run.config.num_steps + 2)
    assert packed.dtype == torch.int64
    assert packed.is_pinned() == (DEVICE.type == "cuda")
    zeros = [0] * packed.shape[1]
    assert packed.tolist() == [[len(new), *new, *zeros][: len(zeros)] for new in gained]
    assert [bool(new) for new in gained] == [row > 0 for row in rows]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_freed_row_is_given_away_while_its_step_is_in_flight(backend):
    """What the step leaves in the row and its slots is overwritten: the prompt comes later."""
    run, prompt = engine((3, 4, 9), backend), [7, 1, 1, 30]
    outputs = run.add([Request(one, 80) for one in PROMPTS])
    rows, decoder = [live.row for live in run.running], run.decoder(run.config)
    run.table.reserve(rows, [run.config.max_context_len] * len(rows))
    hold_up()
    pending = decoder.step_async(rows)
    run.drop(outputs[2])
    (other,) = run.add([Request(prompt, 80)])
    assert run.running[-1].row == rows[2]
    run.table.reserve(rows, [run.config.max_context_len] * len(rows))
    gained = pending.wait()
    texts = [[*output.tokens, *new] for output, new in zip(outputs, gained, strict=True)]
    texts[2] = list(other.tokens)
    for _ in range(4):
        for text, new in zip(texts, decoder.step(rows), strict=True):
            text += new
    for one, text in zip([*PROMPTS[:2], prompt, *PROMPTS[3:]], texts, strict=True):
        assert text == dense_greedy(run.target.model, one, len(text))


@on_cpu(half, "cudagraph", "tbo")
@pytest.mark.parametrize("tbo", [False, True], ids=["whole", "tbo"])
@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_in_flight_are_of_their_own_rows(backend, cudagraph, tbo):
    """The host names the next step's rows while the last one has yet to read its own."""
    run, late = (
        engine((3, 4, 9), backend, buckets=(2, 4, 5), cudagraph=cudagraph, tbo=tbo)
        for _ in range(2)
    )
    rows, rng = admitted(run), random.Random(3)
    assert rows == admitted(late)
    parts = [rng.sample(rows, rng.randint(1, 5)) for _ in range(12)]
    wanted = [run.decoder(run.config).step(part) for part in parts]
    decoder, found, early = late.decoder(late.config), [], 0
    before = decoder.step_async(parts[0])
    for part in parts[1:]:
        hold_up()
        pending = decoder.step_async(part)
        early += not pending.ready
        found.append(before.wait())
        before = pending
    assert [*found, before.wait()] == wanted
    if DEVICE.type == "cuda" and backend == "triton":
        assert early == len(parts) - 1, "the host was never ahead"


@pytest.mark.parametrize("tbo", [False, True], ids=["whole", "tbo"])
@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_their_own_steps_after_a_late_capture(backend, cudagraph, tbo):
    """What warms a capture up takes turns of the host buffers, while a step is in flight."""
    run = engine((3, 4, 9), backend, cudagraph=cudagraph, tbo=tbo, buckets=(2, 5))
    rows, decoder = admitted(run), run.decoder(run.config)
    for _ in range(3):
        told_of_itself(run, decoder, rows)
    before = run.states.seq_lens[rows].tolist()
    hold_up()
    pending = decoder.step_async(rows)
    decoder.capture(sampled=True)
    after = run.states.seq_lens[rows].tolist()
    assert [len(new) for new in pending.wait()] == [
        b - a for a, b in zip(before, after, strict=True)
    ]
    for part in (rows, rows[:2], rows[1:]):
        told_of_itself(run, decoder, part)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_their_own_steps_after_an_interrupt(monkeypatch, backend):
    """Between a launch and its note the device's entry has moved on, and the host has not."""
    run = engine((3, 4, 9), backend, buckets=(2, 5))
    rows, decoder = admitted(run), run.decoder(run.config)
    told_of_itself(run, decoder, rows)
    for parts in ((rows[:2], rows[1:], rows), (rows, rows[1:])):  # in either turn
        before = run.states.seq_lens[rows]
        with monkeypatch.context() as patch:
            patch.setattr(InFlight, "launched", interrupt)
            hold_up()
            with pytest.raises(KeyboardInterrupt):
                decoder.step_async(rows)
        # the interrupted step has its own rows, whatever the next one's are
        gained = decoder.step(rows[:2])
        grown = run.states.seq_lens[rows] - before
        assert (grown > 0).all()
        assert (grown[:2].cpu() > torch.tensor([len(new) for new in gained])).all()
        for part in parts:
            told_of_itself(run, decoder, part)


def test_a_step_that_is_noted_is_the_last_one_of_its_turn(monkeypatch):
    """An interrupt that comes when a step has been noted costs its tokens, not the decoder."""
    run = engine((3, 4, 9), buckets=(2, 5))
    rows, decoder = admitted(run), run.decoder(run.config)

    class Noting(list):
        def __setitem__(self, at, step):
            super().__setitem__(at, step)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        steps = decoder._in_flight
        patch.setattr(steps, "_steps", Noting(steps._steps))
        with pytest.raises(KeyboardInterrupt):
            decoder.step_async(rows)
        noted = list(steps._steps)
    steps._steps = noted
    assert len(decoder._in_flight.steps) == 1
    for part in (rows, rows[:2]):
        told_of_itself(run, decoder, part)


def test_rows_that_were_checked_stay_what_they_were():
    run = engine((3, 4, 9))
    rows, decoder = admitted(run), run.decoder(run.config)
    given = list(rows)
    pending = decoder.step_async(given)
    given[1] = given[0]
    assert pending.rows == tuple(rows)
    assert all(pending.wait())
    with pytest.raises(ValueError, match="rows must be distinct"):
        decoder.step(given)
    with pytest.raises(ValueError, match="every row must be a whole number"):
        decoder.step([1.0])
    told_of_itself(run, decoder, rows)


def interrupt(*_arguments, **_options) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_a_step_ahead_gives_the_same(ahead):
    """Requests that end, join and reach their context's end while a step is in flight."""
    run = engine((3, 4, 9), buckets=(5,))
    new, results = [12, 80, 5, 33, 99, 7], []
    waiting = [Request(p, n) for p, n in zip([*PROMPTS, [9, 9]], new, strict=True)]
    results += run.add([waiting.pop(0), waiting.pop(0)])
    while run.num_running:
        run.step(ahead=ahead)
        if waiting and run.num_running < 4:
            results += run.add([waiting.pop(0)])
    assert run.table.num_free_rows == 5
    run.clear()
    check_books(run.table)
    for result, prompt, count in zip(results, [*PROMPTS, [9, 9]], new, strict=True):
        assert result.finish_reason == ("length" if count < 90 else "context")
        assert result.tokens == dense_greedy(run.target.model, prompt, len(result.tokens))
        assert sum(result.accept_lens) == len(result.tokens) - 1


@pytest.mark.parametrize("tbo", [False, True])
@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
def test_a_late_capture_writes_to_nobodys_slots(cudagraph, tbo):
    """Slots of the last step may be another request's by then, and states are not the capture's."""
    run = engine((3, 4, 9), cudagraph=cudagraph, tbo=tbo, buckets=(2, 5))
    rows, decoder = admitted(run), run.decoder(run.config)
    pools = [pool for slot in (run.target, run.draft) for pool in (slot.pool.k, slot.pool.v)]

    def again():  # as after a capture that failed
        for part in decoder.modes:
            decoder.runner.capture(part)

    for capture in (lambda: decoder.capture(sampled=True), again):
        assert all(decoder.step(rows)), "the host buffers still held padding"
        for pool in pools:
            pool[:, 1:] = 7.0
        states = {name: value.clone() for name, value in run.states.tensors().items()}
        capture()
        assert all(bool((pool[:, 1:] == 7).all()) for pool in pools)
        for name, before in states.items():
            assert torch.equal(run.states.tensors()[name], before), name


@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 4, 9)], ids=["chain", "tree"])
def test_a_step_ahead_has_room_for_all_that_the_one_before_it_may_gain(tree):
    """To the last slot and to the context's end: no step is sat out for want of a slot."""
    models = TinyTarget(device=DEVICE, sharp=6.0), TinyDraft(device=DEVICE, sharp=6.0, noise=0.1)
    config = SpecConfig(*tree, 40, 1)
    for slots in (28, 41):
        run = Engine(*models, config, backend="torch_native", num_slots=slots)
        (result,) = run.add([Request([3, 14, 15], 99 if slots == 41 else 16)])
        while run.num_running:
            run.step(ahead=True)
        assert sum(result.accept_lens[:4]) > 3 * 4, "nearly all is accepted"
        assert min(result.accept_lens) > 0


@pytest.mark.parametrize("new", [2, 3, 9])
def test_who_joins_while_a_step_is_in_flight_steps_with_the_others(new):
    """Also one that needs a single token more, which a step in flight would bring others."""
    run = engine((3, 4, 9))
    run.add([Request(PROMPTS[0], 80)])
    run.step(ahead=True)
    (late,) = run.add([Request(PROMPTS[1], new)])
    steps = 0
    while not late.finish_reason:
        run.step(ahead=True)
        steps += 1
    assert steps <= new + 1
    assert run.num_running == 1
    assert late.tokens == dense_greedy(run.target.model, PROMPTS[1], new)
