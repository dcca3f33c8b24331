"""Engines that go, with steps in flight, take nothing from those that stay."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from specattn.speculative.step.host_buffers import InFlight
from tests.speculative.stepping import admitted, engine, hold_up
from tests.worlds import DEVICE

CUDA = DEVICE.type == "cuda"


def test_engines_come_and_go_in_many_processes():
    processes, rounds = (6, 40) if CUDA else (1, 3)
    program = [sys.executable, "-m", "tests.engine.made_and_dropped"]
    running = [
        subprocess.Popen(
            [*program, str(seed), str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(processes)
    ]
    for one in running:
        printed, errors = one.communicate()
        assert (one.returncode, printed) == (0, "whole\n"), errors[-2000:]


@pytest.mark.gpu
def test_pinned_memory_is_given_away_after_the_step_that_writes_it():
    run = engine((3, 4, 9), "triton")
    rows, decoder = admitted(run), run.decoder(run.config)
    decoder.step(rows)
    hold_up()
    done = decoder.step_async(rows)._done
    gone = weakref.ref(decoder._in_flight)
    assert not done.query()
    del run, decoder
    gc.collect()
    assert gone() is None
    assert done.query()


@pytest.mark.gpu
def test_engines_that_are_gone_leave_no_memory():
    reserved = []
    for _ in range(6):
        run = engine((3, 4, 9), "triton")
        run.decoder(run.config).step(admitted(run))
        del run
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert set(reserved[1:]) == {reserved[1]}


def test_what_is_dropped_waits_for_nobody_but_steps_in_flight(monkeypatch):
    run = engine((3, 4, 9))
    rows, decoder, waited = admitted(run), run.decoder(run.config), []
    pending = decoder.step_async(rows)
    gc.collect()  # what other tests have left
    monkeypatch.setattr(type(pending), "ready", property(lambda one: one.waited))
    monkeypatch.setattr(type(pending), "wait", lambda one: waited.append(one))
    flight = decoder._in_flight
    assert isinstance(flight, InFlight)
    del run, decoder, flight
    gc.collect()
    assert waited == [pending]
