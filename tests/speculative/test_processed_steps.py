"""Steps of requests with processors and grammars, launched by hand and run phase by phase."""

from __future__ import annotations

import pytest
import torch

from specattn.engine.engine import Request
from specattn.errors import NotCapturedError
from specattn.speculative.sampling.grammar import fill_bitmasks
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.sampling.processors import ProcessorStates
from specattn.speculative.step.level import Level
from tests.grammars import Remainders, constrained_text
from tests.own_processors import NoNgram
from tests.processors import GREEDY, greedy_text
from tests.samples import half, on_cpu
from tests.speculative.stepping import PROMPTS, SETTINGS, admitted, engine
from tests.speculative.test_tbo_step import Counted
from tests.tiny import TinyDraft
from tests.worlds import DEVICE

COUNT = 20
KINDS = [GREEDY["three"], SamplingParams(), GREEDY["presence"], GREEDY["bad words"], GREEDY["bias"]]


def prepared(setting: str, *, constrained=False, **options):
    """An engine whose requests are asked for by different processors; its decoder, and its rows."""
    run = engine(SETTINGS[setting], processed=True, **options)
    outs = run.add(
        [
            Request(prompt, COUNT, params, grammar=maker(prompt) if constrained else None)
            for prompt, params in zip(PROMPTS, KINDS, strict=True)
        ]
    )
    rows = [live.row for live in run.running]
    run.table.reserve(rows, [run.config.max_context_len] * len(rows))
    return run, run.decoders[0], rows, [list(out.tokens) for out in outs]


def maker(prompt):
    return lambda: Remainders(prompt)


def expected(run, count: int, *, constrained=False) -> list[list[int]]:
    target = run.target.model
    text = constrained_text if constrained else greedy_text
    pairs = zip(PROMPTS, KINDS, strict=True)
    return [text(target, list(prompt), count, params) for prompt, params in pairs]


def phase_by_phase(decoder, rows, grammars=None) -> list[list[int]]:
    step = decoder.phases(rows)
    with torch.no_grad():
        step.begin()
        tree = step.draft()
        if grammars is not None:
            fill_bitmasks(step, rows, grammars)
        logits, features = step.verify(tree)
        kept = logits.clone()
        processed = step.process(tree, logits)
        assert torch.equal(logits, kept), "the target's logits stay as they are"
        accepted = step.accept(tree, processed)
        step.commit(accepted, features)
        step.advance(accepted, step.extend(accepted))
    return [tokens[:count] for count, *tokens in step.packed.tolist()]


@on_cpu(half, "setting", "by")
@pytest.mark.parametrize("by", ["launches", "two in flight", "phases"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_by_hand_write_what_plain_decoding_writes(setting, by):
    run, decoder, rows, texts = prepared(setting)
    want = expected(run, COUNT)
    pending = []
    while min(map(len, texts)) < COUNT:
        if by == "phases":
            gained = phase_by_phase(decoder, rows)
        else:
            pending.append(decoder.step_async(rows, processed=True))
            if by == "two in flight" and len(pending) < 2:
                continue
            gained = pending.pop(0).wait()
        for text, new in zip(texts, gained, strict=True):
            text += new
    decoder.settle()
    assert [text[:COUNT] for text in texts] == want


@pytest.mark.parametrize("by", ["launches", "phases"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_grammars_by_hand(setting, by):
    run, decoder, rows, texts = prepared(setting, constrained=True)
    want = expected(run, COUNT, constrained=True)
    grammars = [live.grammar for live in run.running]
    while min(map(len, texts)) < COUNT:
        if by == "phases":
            gained = phase_by_phase(decoder, rows, grammars)
        else:
            gained = decoder.step_async(rows, grammars=grammars).wait()
        for text, grammar, new in zip(texts, grammars, gained, strict=True):
            grammar.accept(new)
            text += new
    assert [text[:COUNT] for text in texts] == want


def test_what_is_missing_is_named():
    run = engine(SETTINGS["tree"])
    rows, (decoder,) = admitted(run), run.decoders
    with pytest.raises(NotCapturedError, match=r"step \(processed\)"):
        decoder.step(rows, processed=True)
    with pytest.raises(ValueError, match="constrained needs processors"):
        decoder.capture(constrained=True)
    with pytest.raises(ValueError, match="grammars need a step of a decoder with processors"):
        fill_bitmasks(decoder.phases(rows), rows, [None] * len(rows))
    size = len(run.table.req_to_token)
    for shape in ((size - 1, 61), (size, 60)):
        with pytest.raises(ValueError, match=r"processors.history must be \[6, 61\]"):
            decoder.capture(processors=ProcessorStates.alloc(*shape, DEVICE))
    states = ProcessorStates.alloc(size, 61, DEVICE)
    decoder.capture(processors=states, constrained=True)
    with pytest.raises(ValueError, match="processors must be those that were captured"):
        decoder.capture(processors=ProcessorStates.alloc(size, 61, DEVICE))
    with pytest.raises(ValueError, match="grammars must be one per row, 5, got 1"):
        decoder.step_async(rows, grammars=[None])
    decoder.step(rows, processed=True)


def test_states_that_moved_are_noticed():
    """Graphs bake the states' addresses in."""
    _, decoder, rows, _ = prepared("tree")
    launch = decoder.runner._captured[decoder.parts[Level.PROCESSED][0]][5].program
    named = dict(launch.fingerprint())
    states = decoder.processors
    assert {f"processors.{name}" for name in states.tensors()} <= named.keys()
    assert any(tensor is states.history for group in launch.holders() for tensor in group)
    decoder.step(rows, processed=True)


def test_padding_is_never_noted():
    _, decoder, rows, _ = prepared("chain")
    before = {name: tensor[0].clone() for name, tensor in decoder.processors.tensors().items()}
    decoder.step([*rows[:1], 0, 0], processed=True)
    for name, tensor in decoder.processors.tensors().items():
        assert torch.equal(tensor[0], before[name]), name


@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
def test_nothing_is_noted_where_the_second_half_fails(cudagraph, monkeypatch):
    """Of two-batch overlap outside a recording: the draft's extend of the last request."""
    counted = Counted(TinyDraft, monkeypatch)
    run, decoder, rows, texts = prepared("tree", tbo=True, cudagraph=cudagraph, graphs=False)
    began, gained = counted.count, [decoder.step(rows, processed=True)]
    states = decoder.processors.tensors()
    before = {name: tensor.clone() for name, tensor in states.items()}
    counted.fails = 2 * counted.count - began
    with pytest.raises(KeyError, match="a forward failed"):
        decoder.step(rows, processed=True)
    for name, tensor in states.items():
        assert torch.equal(tensor, before[name]), name
    gained += [decoder.step(rows, processed=True) for _ in range(3)]
    assert not torch.equal(states["history"], before["history"])
    for text, news in zip(texts, zip(*gained, strict=True), strict=True):
        for new in news:
            text += new
    count = min(map(len, texts))
    assert [text[:count] for text in texts] == expected(run, count)


@pytest.mark.gpu
def test_admitting_processed_requests_waits_for_nothing_on_the_device():
    """The forward before is still running then, and the host would launch the next one late."""
    asked = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        min_p=0.1,
        logit_bias={3: 1.5, 60: -2.0},
        bad_words=[[4, 5], [6]],
        allowed_tokens=range(3, 50),
        logprobs=2,
        processors={"no 2-gram": None},
    )
    on, host = (
        ProcessorStates.alloc(
            3, 61, torch.device(where), processors=[NoNgram(2)], max_context_len=16
        )
        for where in (DEVICE, "cpu")
    )
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            on.penalties[2] = torch.ones(3)
        on.admit(2, asked, [7, 8, 7], min_new_tokens=4, end_ids=[9, 1], bitmask=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    host.admit(2, asked, [7, 8, 7], min_new_tokens=4, end_ids=[9, 1], bitmask=True)
    for name, table in host.tensors().items():
        assert torch.equal(on.tensors()[name].cpu(), table), name
