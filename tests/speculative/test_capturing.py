"""What an engine surrounds captures with: entered and left around each, late and failing ones."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from specattn.cuda_graph import GraphRunner
from specattn.errors import CaptureError
from specattn.speculative.step.decoder import StepDecoder
from tests.speculative.stepping import admitted, engine
from tests.worlds import BACKENDS, DEVICE


class Surroundings:
    """Says when captures are surrounded; fails, or changes streams, if told to."""

    def __init__(self) -> None:
        self.inside = False
        self.left: list[type | None] = []
        self.fails_at_the_end = False
        self.stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None

    @contextmanager
    def __call__(self):
        assert not self.inside
        self.inside, error = True, None
        try:
            with torch.cuda.stream(self.stream):
                yield
        except Exception as failed:
            error = type(failed)
            raise
        finally:
            self.inside = False
            self.left.append(error)
        if self.fails_at_the_end:
            raise RuntimeError("not registered")


@pytest.fixture(autouse=True)
def captures_alone(monkeypatch):
    """What compiles before them is surrounded, too; see tests/cuda_graph/test_compile.py."""
    monkeypatch.setattr(GraphRunner, "compile", lambda runner, modes: None)


def decoder_of(run, monkeypatch, around: Surroundings, **options) -> tuple[StepDecoder, list[bool]]:
    """A decoder beside the engine's; and whether its target's forwards were surrounded."""
    own, seen = run.decoder(run.config), []
    forward = own.target.model.forward

    def watched(*args):
        seen.append(around.inside)
        return forward(*args)

    monkeypatch.setattr(own.target.model, "forward", watched)
    decoder = StepDecoder(
        own.target,
        own.proposer,
        own.config,
        own.table,
        own.states,
        buckets=(1, 5),
        capturing=around,
        **options,
    )
    return decoder, seen


@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_capture_is_surrounded_and_no_step(monkeypatch, backend, cudagraph):
    run, other = engine((3, 4, 9), backend), engine((3, 4, 9), backend)
    rows, around = admitted(run), Surroundings()
    assert rows == admitted(other)
    decoder, seen = decoder_of(run, monkeypatch, around, cudagraph=cudagraph)
    reports = decoder.report()
    assert around.left == [None] * len(reports)
    assert len(reports) == 2 * len(decoder.modes)
    assert seen
    assert all(seen)
    gained = decoder.step(rows)
    decoder.capture(sampled=True)
    late = len(decoder.report()) - len(reports)
    assert late > 0
    assert around.left == [None] * (len(reports) + late)
    seen.clear()
    gained += decoder.step(rows, sampled=True)
    assert not any(seen)
    assert len(around.left) == len(decoder.report())
    wanted = other.decoder(other.config)
    assert gained == wanted.step(rows) + wanted.step(rows)


def test_a_capture_that_fails_leaves_its_surroundings(monkeypatch):
    run, around = engine((3, 4, 9)), Surroundings()
    rows = admitted(run)
    decoder, _ = decoder_of(run, monkeypatch, around)
    own, model = len(around.left), decoder.target.model

    def failing(*args):
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", failing)
        with pytest.raises(CaptureError, match="no such luck"):
            decoder.capture(sampled=True)
    assert around.left[own:] == [RuntimeError]
    assert not around.inside
    decoder.capture(sampled=True)
    assert around.left[own:] == [RuntimeError, None, None]
    assert all(decoder.step(rows, sampled=True))


def test_surroundings_that_fail_at_the_end_are_a_capture_that_fails(monkeypatch):
    run, around = engine((3, 4, 9)), Surroundings()
    admitted(run)
    decoder, _ = decoder_of(run, monkeypatch, around)
    around.fails_at_the_end = True
    with pytest.raises(CaptureError, match=r"for a batch of 5 failed: RuntimeError: not regist"):
        decoder.capture(sampled=True)
    sampled = decoder.modes[-1]
    assert not decoder.runner.captured(sampled)


def test_an_engine_hands_all_options_of_steps_down():
    around = Surroundings()
    run = engine((3, 4, 9), capturing=around, indices="csr")
    assert len(around.left) == sum(map(len, run.graphs().values()))
    assert all(decoder.options.indices == "csr" for decoder in run.decoders)
    with pytest.raises(TypeError, match="unexpected keyword argument 'capture'"):
        engine((3, 4, 9), capture=around)
