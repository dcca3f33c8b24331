"""What an engine captures while requests run may fail: nobody loses a token, or a step, by that."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from specattn.config import SpecConfig
from specattn.cuda_graph import GraphRunner
from specattn.engine.engine import Engine, Request
from specattn.engine.flight import Flight
from specattn.errors import CaptureError
from specattn.speculative.proposers.host import HostProposer, HostTree
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step import decoder as step_decoder
from specattn.speculative.step.launch import StepMemory
from tests.books import check_books
from tests.samples import half, on_cpu, sampled
from tests.tiny import TinyBlockDraft, TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

DRAWN = SamplingParams(0.8, seed=5)
# comes to its context's end, where it decodes plainly, while the other has room
LONG, SHORT = Request(list(range(1, 40)), 99), Request([3, 14, 15], 30)
# what fails, and what is logged
FAULTS = {
    "launch": (RuntimeError("no such luck"), "RuntimeError: no such luck; batches run eagerly"),
    "memory": (torch.OutOfMemoryError("no more"), "out of device memory capturing"),
}


def engine(**options) -> Engine:
    config = SpecConfig(3, 4, 9, 48, 3)
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    return Engine(*models, config, backend="torch_native", buckets=(1, 3), **options)


@pytest.fixture(params=FAULTS)
def fault(request):
    return FAULTS[request.param]


def broken(monkeypatch, method: str, error: Exception) -> list:
    """Let every call of a `GraphRunner`'s method fail from now on; returns the calls."""
    calls = []

    def fail(*args):
        calls.append(args)
        raise error

    monkeypatch.setattr(GraphRunner, method, fail)
    return calls


def finish(run: Engine, ahead: bool) -> None:
    while run.num_running:
        run.step(ahead=ahead)
    run.clear()
    check_books(run.table)


def exact(run: Engine, results, requests=(LONG, SHORT)) -> None:
    for request, result in zip(requests, results, strict=True):
        want = dense_greedy(run.target.model, request.prompt, len(result.tokens))
        assert result.tokens == want
        assert result.finish_reason == ("context" if request is LONG else "length")


@pytest.mark.parametrize("ahead", [False, True], ids=["waited", "ahead"])
def test_plain_decoding_that_cannot_be_captured_runs_eagerly(monkeypatch, caplog, fault, ahead):
    run = engine()
    results = run.add([LONG, SHORT])
    tried = broken(monkeypatch, "_capture", fault[0])
    finish(run, ahead)
    exact(run, results)
    assert len(tried) == 1
    assert caplog.text.count(fault[1]) == 1
    _, plain = run.decoders
    (part,) = plain.modes
    assert not plain.runner.captured(part)
    assert plain.runner.stats.eager[part]


def test_buffers_without_room_are_named_like_graphs(monkeypatch, caplog):
    """They are made for the largest bucket, and eagerly for the batch that there is."""
    run = engine()
    results = run.add([LONG, SHORT])

    def make(setup, host, size, **options):
        if size == 3:
            raise torch.OutOfMemoryError("no more")
        return StepMemory(setup, host, size, **options)

    monkeypatch.setattr(step_decoder, "StepMemory", make)
    finish(run, ahead=False)
    exact(run, results)
    assert caplog.text.count("out of device memory capturing step for a batch of 3;") == 1


@on_cpu(half, "fault", "cudagraph")
@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
def test_drawing_steps_that_cannot_be_captured_run_eagerly(monkeypatch, caplog, fault, cudagraph):
    """The first request that draws has them captured, and no other tries it again."""
    requests = [SHORT, Request([35], 20, DRAWN)]
    want = engine(sampled=True).generate(requests)
    run = engine(cudagraph=cudagraph)
    tried = broken(monkeypatch, "_capture", fault[0])
    for _ in range(3):
        results = run.generate(requests)
        assert [result.tokens for result in results] == [result.tokens for result in want]
    assert len(tried) == 1
    assert caplog.text.count(fault[1]) == 1


def test_drawing_steps_run_eagerly_whichever_capture_fails(monkeypatch):
    """Of parts that are captured before them, too: memory for these had run out at first."""
    capture, errors = GraphRunner._capture, [torch.OutOfMemoryError("no more")]

    def fail(runner, bound, size):
        if errors:
            raise errors.pop()
        return capture(runner, bound, size)

    monkeypatch.setattr(GraphRunner, "_capture", fail)
    run = engine(cudagraph="piecewise")
    assert not errors
    errors.append(RuntimeError("no such luck"))
    requests = [SHORT, Request([35], 20, DRAWN)]
    results = run.generate(requests)
    assert not errors
    want = engine(sampled=True).generate(requests)
    assert [result.tokens for result in results] == [result.tokens for result in want]


def test_plain_decoding_near_the_end_draws_without_graphs(monkeypatch):
    request = Request(LONG.prompt, 99, DRAWN)
    (want,) = engine().generate([request])
    run = engine()
    (result,) = run.add([request])
    broken(monkeypatch, "_capture", RuntimeError("no such luck"))
    finish(run, ahead=False)
    assert result.tokens == want.tokens


def test_plain_decoding_that_is_made_for_drawing_requests_is_captured_once(monkeypatch, caplog):
    run, request = engine(sampled=True), Request(LONG.prompt, 99, DRAWN)
    tried = broken(monkeypatch, "_capture", RuntimeError("no such luck"))
    first, second = (run.generate([request])[0] for _ in range(2))
    assert first.tokens == second.tokens
    assert first.finish_reason == "context"
    assert len(tried) == 1
    assert caplog.text.count("batches run eagerly") == 1


def test_a_capture_that_is_interrupted_is_made_by_the_next_request(monkeypatch):
    run = engine()
    with monkeypatch.context() as patch:
        broken(patch, "_capture", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run.add([Request([35], 20, DRAWN)])
    run.generate([Request([35], 20, DRAWN)])
    (decoder,) = run.decoders
    assert [decoder.runner.captured(part) for part in decoder.modes] == [[1, 3]] * 2


class OneToken(HostProposer):
    """Drafts less than trees may hold."""

    def draft(self, requests, config):
        return [HostTree([1 + len(one.tokens) % 60]) for one in requests]


DRAFT, BLOCK = TinyDraft(device=DEVICE), TinyBlockDraft(device=DEVICE)
# what proposes, and more options of an engine
PROPOSERS = {
    "host": (OneToken(), {}),
    "host in parts": (OneToken(), {"cudagraph": "piecewise"}),
    "host in halves": (OneToken(), {"tbo": True}),
    "beams": (DRAFT, {"cudagraph": "piecewise"}),
    "lists": (DRAFT, {"indices": "csr"}),
    "block": (BLOCK, {}),
    "lookup": (LookupProposer(), {"cudagraph": "piecewise"}),
    "lookup first": (LookupFirst(LookupProposer(1), DRAFT), {}),
}


@sampled(half, proposer=PROPOSERS, count=[2, 1])
def test_a_late_capture_runs_over_what_smaller_batches_left(proposer, count):
    """Padding reads the rows of buckets that share buffers with those that ran."""
    draft, options = proposer
    config, buckets = SpecConfig(3, 2, 7, 80, 4), (1, 2, 4)
    made = partial(Engine, TinyTarget(device=DEVICE), draft, config, backend="torch_native")
    run, late = made(buckets=buckets, **options), Request([35], 12, DRAWN)
    early = [Request([5 + at, 6], 9) for at in range(count)]
    for request, result in zip(early, run.generate(early), strict=True):
        assert result.tokens == dense_greedy(run.target.model, request.prompt, 9)
    (got,) = run.generate([late])
    decoder = run.decoder(config)
    assert all(decoder.runner.captured(part) == [1, 2, 4] for part in decoder.modes)
    (want,) = made(buckets=buckets, sampled=True, **options).generate([late])
    assert got.tokens == want.tokens


@pytest.mark.parametrize("options", [{}, {"sampled": True}], ids=["greedy", "sampled"])
def test_what_was_asked_for_at_once_raises(monkeypatch, options):
    broken(monkeypatch, "_capture", RuntimeError("no such luck"))
    with pytest.raises(CaptureError, match="capturing step for a batch of 3 failed"):
        engine(**options)


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("ahead", [False, True], ids=["waited", "ahead"])
def test_a_group_that_cannot_be_launched_keeps_no_other_from_its_step(monkeypatch, ahead, first):
    """Its error is raised when the others are on their way; the next step hands those out."""
    run, launch = engine(), Flight._launch_group
    results = run.add([LONG, SHORT])
    told = {id(result): list(result.tokens) for result in results}
    plain = run.config.plain()
    broken_one = plain if first else run.config

    def fail(flight, config, group):
        if config == broken_one:
            raise ValueError("no such luck")
        return launch(flight, config, group)

    def step(ahead: bool = ahead) -> None:
        for result, new in run.step(ahead=ahead):
            told[id(result)] += new

    while plain not in run.scheduler.schedule():
        step()
    step(ahead=False)  # nothing is in flight now
    assert set(run.scheduler.schedule()) == {run.config, plain}
    with monkeypatch.context() as patch:
        patch.setattr(Flight, "_launch_group", fail)
        going, stuck = results[::-1] if first else results
        before = len(stuck.tokens)
        for _ in range(2):
            had = len(going.tokens)
            with pytest.raises(ValueError, match="no such luck"):
                step()
            step()
            assert len(going.tokens) > had
        assert len(stuck.tokens) == before
    while run.num_running:
        step()
    exact(run, results)
    assert list(told.values()) == [result.tokens for result in results]


def test_a_step_ahead_that_cannot_be_launched_keeps_no_tokens_back(monkeypatch):
    run, launch = engine(), Flight._launch_group
    (result,) = run.add([SHORT])

    def fail(flight, config, group):
        if flight.steps:
            raise ValueError("no such luck")
        return launch(flight, config, group)

    monkeypatch.setattr(Flight, "_launch_group", fail)
    while run.num_running:
        had = len(result.tokens)
        with pytest.raises(ValueError, match="no such luck"):
            run.step(ahead=True)
        ((_, new),) = run.step(ahead=True)
        assert len(result.tokens) == had + len(new) > had
    assert result.tokens == dense_greedy(run.target.model, SHORT.prompt, 30)
