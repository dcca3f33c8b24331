"""Launches for practice: they change nothing, and refuse what a launch refuses."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.errors import CaptureMismatch, NotCapturedError
from specattn.speculative import rehearsal
from specattn.speculative.host_buffers import Landing
from tests.speculative.stepping import admitted, engine
from tests.worlds import DEVICE

if TYPE_CHECKING:
    from specattn.speculative.host_buffers import PendingStep


@pytest.fixture(autouse=True)
def always_due(monkeypatch):
    monkeypatch.setattr(rehearsal, "PACE", 0.0)


@pytest.mark.parametrize("tbo", [False, True], ids=["whole", "tbo"])
@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
def test_steps_are_the_same_with_and_without(cudagraph, tbo):
    gained, states, stats = [], [], []
    for rehearses in (False, True):
        run = engine((3, 4, 9), cudagraph=cudagraph, tbo=tbo)
        rows, decoder = admitted(run), run.decoder(run.config)
        found = []
        for at in range(6):
            part = rows[at % 3 :: 2]
            if rehearses:
                decoder.rehearse(part)
                decoder.rehearse(rows)
            pending = decoder.step_async(part)
            if rehearses:
                decoder.rehearse(rows[::-1])
                decoder.rehearse([])
            found.append(pending.wait())
        gained.append(found)
        states.append({name: value.clone() for name, value in run.states.tensors().items()})
        stats.append((decoder.runner.stats.replays, decoder.runner.stats.eager))
    assert gained[0] == gained[1]
    assert all(map(all, gained[0]))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert stats[0] == stats[1], "a rehearsal was counted as a step"


def launches(decoder, monkeypatch) -> list[int]:
    """Return a list that grows with every launch aside."""
    found: list[int] = []
    replay = decoder._aside._replay
    monkeypatch.setattr(decoder._aside, "_replay", lambda *args: found.append(1) or replay(*args))
    return found


@pytest.mark.parametrize(("cudagraph", "parts"), [("full", 1), ("piecewise", 3)])
def test_every_part_is_launched_aside(cudagraph, parts, monkeypatch):
    run = engine((3, 4, 9), cudagraph=cudagraph)
    rows, decoder = admitted(run), run.decoder(run.config)
    found = launches(decoder, monkeypatch)
    decoder.rehearse(rows)
    assert len(found) == parts


def test_a_batch_that_no_bucket_holds_is_left_out(monkeypatch):
    run = engine((3, 1, 4), buckets=(2,))
    rows, decoder = admitted(run), run.decoder(run.config)
    found = launches(decoder, monkeypatch)
    assert not decoder.rehearse(rows)
    assert not found
    assert decoder.rehearse(rows[:2])
    assert len(found) == 1
    assert not decoder.runner.stats.eager


def test_one_rehearsal_waits_its_time_after_another(monkeypatch):
    run = engine((3, 1, 4))
    rows, decoder = admitted(run), run.decoder(run.config)
    found, clock = launches(decoder, monkeypatch), SimpleNamespace(now=5.0)
    monkeypatch.setattr(rehearsal, "PACE", 0.25)
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    for now, due in ((5.0, 1), (5.0, 1), (5.24, 1), (5.25, 2), (5.4, 2), (9.0, 3)):
        clock.now, before = now, len(found)
        assert decoder.rehearse(rows) == (due > before)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert len(found) == due, now


def test_none_queues_up_behind_another(monkeypatch):
    run = engine((3, 1, 4))
    rows, decoder = admitted(run), run.decoder(run.config)
    found = launches(decoder, monkeypatch)
    decoder.rehearse(rows)
    (before,) = decoder._aside._turns.in_flight
    late(before, 1)
    decoder.rehearse(rows)
    assert len(found) == 1
    decoder.rehearse(rows)
    assert len(found) == 2


@pytest.mark.parametrize("rows", [[1, 1], [77], [-1], [1.5]])
def test_rows_that_a_step_refuses_are_refused(rows):
    run = engine((3, 1, 4))
    admitted(run)
    decoder = run.decoder(run.config)
    with pytest.raises(ValueError, match="row"):
        decoder.step_async(rows)
    with pytest.raises(ValueError, match="row"):
        decoder.rehearse(rows)


def test_memory_that_moved_and_steps_that_were_not_captured_are_refused():
    run = engine((3, 1, 4))
    rows, decoder = admitted(run), run.decoder(run.config)
    with pytest.raises(NotCapturedError):
        decoder.rehearse(rows, sampled=True)
    before = run.table.reserved
    run.table.reserved = before.clone()
    with pytest.raises(CaptureMismatch, match=r"table\.reserved changed"):
        decoder.rehearse(rows)
    run.table.reserved = before
    decoder.rehearse(rows)
    assert all(decoder.step(rows))


def test_nothing_is_rehearsed_within_a_launch():
    run = engine((3, 4, 9), cudagraph="piecewise")
    rows, decoder = admitted(run), run.decoder(run.config)
    with pytest.raises(ValueError, match="is being launched"):
        decoder.step_async(rows, between=lambda _: decoder.rehearse(rows))
    assert all(decoder.step(rows))


class Late(Landing):
    """One that is through when it has been asked a few times."""

    @property
    def ready(self):
        self.left -= 1
        return self.left < 0

    def wait(self):
        assert self.left < 0, "waited before"
        super().wait()


def late(pending: PendingStep, times: int) -> PendingStep:
    """Change the turn that it has for good, so that it and those after it are late."""
    pending._landing.__class__, pending._landing.left = Late, times
    return pending


def test_something_is_done_until_a_step_is_through():
    run = engine((3, 1, 4))
    rows, decoder = admitted(run), run.decoder(run.config)
    for times in (0, 1, 4):
        pending, called = late(decoder.step_async(rows), times), itertools.count()
        assert all(pending.wait(lambda called=called: next(called)))
        assert next(called) == times
        # nothing is waited for a second time
        assert all(pending.wait(lambda: pytest.fail("called though it is through")))


def test_what_it_raises_ends_the_wait_and_no_tokens_are_lost():
    run = engine((3, 1, 4))
    rows, decoder = admitted(run), run.decoder(run.config)
    pending = late(decoder.step_async(rows), 2)
    with pytest.raises(KeyError):
        pending.wait({}.popitem)
    assert not pending.waited
    assert all(pending.wait(lambda: None))


def test_it_may_wait_for_the_step_itself_and_launch_others():
    """Then the step's turn is another's, whose tokens are not its own."""
    run, other = engine((3, 1, 4)), engine((3, 1, 4))
    rows, decoder = admitted(run), run.decoder(run.config)
    admitted(other)
    expected = [other.decoder(other.config).step(rows) for _ in range(4)]
    pending, found = late(decoder.step_async(rows), 1), []

    def steps():
        pending._landing.left = -1
        found.append(pending.wait())
        found.extend(decoder.step(rows) for _ in range(3))

    assert pending.wait(steps) == expected[0]
    assert found == expected
    assert expected[0] != expected[2], "two turns on it is the same turn"


@pytest.mark.gpu
def test_launches_run_aside_while_a_step_is_in_flight(monkeypatch):
    run = engine((3, 4, 9), "triton")
    rows, decoder = admitted(run), run.decoder(run.config)
    decoder.rehearse(rows)
    torch.cuda.synchronize()
    found, stream = launches(decoder, monkeypatch), torch.cuda.current_stream()
    torch.cuda._sleep(40_000_000)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = decoder.step_async(rows)
        through = []

        def rehearse():
            decoder.rehearse(rows)
            through.append(all(one.ready for one in decoder._aside._turns.in_flight))

        gained = pending.wait(rehearse)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert all(gained)
    assert len(found) > 3, "the step ran before anything was rehearsed"
    assert any(through), "rehearsals waited for the step"
    assert torch.cuda.current_stream() == stream
