"""Log-probabilities of emitted tokens: those that a plain forward of the same text has."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.request import Request, RequestOutput
from specattn.kernels.logprobs import MAX_LOGPROBS
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step.level import Level, StepPart
from specattn.speculative.step.step import Step
from tests.engines import engine as tiny_engine
from tests.processors import GREEDY, dense_logits, drawn_from, processed
from tests.samples import half, on_cpu
from tests.tiny import VOCAB, TinyTarget
from tests.worlds import DEVICE

if TYPE_CHECKING:
    from specattn.engine.engine import Engine

CONFIGS = {
    "plain": SpecConfig(0, 1, 1, 64, 4),
    "chain": SpecConfig(3, 1, 4, 64, 4),
    "tree": SpecConfig(3, 3, 9, 64, 4),
    "drawn chain": SpecConfig(3, 1, 4, 64, 4, draft_sampling=True),
}
PROMPTS = ([3, 14, 15, 9, 14], [35], [2, 7, 1, 8, 2, 8])
COUNT = 24
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=3)
TOLERANCE = 2e-5 if DEVICE.type == "cpu" else 1e-4


def engine(*names: str, **options) -> Engine:
    configs = [CONFIGS[name] for name in names or ["tree"]]
    return tiny_engine(*configs, **options)


@cache
def target() -> TinyTarget:
    return TinyTarget(device=DEVICE)


def logprobs(request: Request, output: list[int]) -> list[float]:
    """The log-probabilities of the token after ``output``, in Python's float64."""
    prompt, params = list(request.prompt), request.sampling
    scores = dense_logits(target(), prompt + output)
    if params.logprobs_of == "processed":
        scores = processed(scores, prompt, output, params)
        if params.temperature:
            scores = [math.log(p) if p else -math.inf for p in drawn_from(scores, params)]
    peak = max(scores)
    total = peak + math.log(math.fsum(math.exp(x - peak) for x in scores))
    return [x - total for x in scores]


def check(request: Request, out) -> None:
    """Every token has its own, and as many alternatives as were asked for, the best first."""
    count = request.sampling.logprobs
    assert len(out.logprobs) == len(out.tokens)
    for at, (token, found) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        want = logprobs(request, out.tokens[:at])
        assert found.value == pytest.approx(want[token], abs=TOLERANCE)
        others = list(found.alternatives.values())
        assert others == sorted(others, reverse=True)
        best = sorted((x for x in want if x > -math.inf), reverse=True)[:count]
        assert others == pytest.approx(best, abs=TOLERANCE)
        named = [want[other] for other in found.alternatives]
        assert others == pytest.approx(named, abs=TOLERANCE)


@on_cpu(half, "of", "config")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("of", ["raw", "processed"])
def test_they_are_those_of_a_plain_forward(config, of):
    """Greedy, drawn and penalised requests in one batch; one of them wants nothing."""
    asked = {"logprobs_of": of}
    three = GREEDY["three"]
    requests = [
        Request(PROMPTS[0], COUNT, SamplingParams(logprobs=5, **asked)),
        Request(PROMPTS[1], COUNT, replace(three, temperature=0.7, seed=5, logprobs=2, **asked)),
        Request(PROMPTS[2], COUNT, DRAWN),
        Request(PROMPTS[2], COUNT, replace(DRAWN, logprobs=MAX_LOGPROBS, **asked)),
        Request(PROMPTS[0], COUNT, replace(GREEDY["bad words"], logprobs=0, **asked)),
    ]
    outs = engine(config, buckets=(2, 4)).generate(requests)
    for request, out in zip(requests, outs, strict=True):
        if request.sampling.logprobs is None:
            assert out.logprobs == []
        else:
            check(request, out)
    if config != "plain":
        assert max(n for out in outs for n in out.accept_lens) > 2
    # the draws are those without them
    assert outs[3].tokens == outs[2].tokens


@pytest.mark.parametrize(
    "options", [{"cudagraph": "piecewise"}, {"tbo": True}, {"validate": "debug"}], ids=str
)
def test_steps_of_any_kind_have_them(options):
    requests = [
        Request(prompt, 9 + at, replace(DRAWN, logprobs=at, logprobs_of="processed"))
        for at, prompt in enumerate((*PROMPTS, *PROMPTS))
    ]
    for request, out in zip(requests, engine(**options).generate(requests), strict=True):
        check(request, out)


def test_a_text_that_ends_within_a_step_has_as_many():
    run = engine()
    (free,) = run.generate([Request(PROMPTS[0], COUNT)])
    gained = 1
    for accepted in free.accept_lens:
        if accepted > 2:  # its second token of several ends the text
            break
        gained += accepted
    ends = free.tokens[gained + 1]
    request = Request(
        PROMPTS[0], COUNT, SamplingParams(logprobs=3), stop_token_ids=[ends], min_new_tokens=gained
    )
    (out,) = run.generate([request])
    assert out.finish_reason == "stop"
    assert 0 < len(out.tokens) < COUNT
    check(request, out)


def test_a_text_that_fills_its_context_has_them_to_the_end():
    """Its last tokens come from decoders of other configs, plain decoding among them."""
    run = engine("tree", "chain")
    request = Request(PROMPTS[0], 90, SamplingParams(logprobs=2))
    (out,) = run.generate([request])
    assert out.finish_reason == "context"
    # the tree, the chain, and plain decoding with and without the draft
    assert len(run.decoders) == 4
    check(request, out)


def test_prompts_that_run_in_chunks_have_their_own():
    run = engine()
    run._admission.prompts.chunk = 4
    kinds = [
        SamplingParams(logprobs=3),
        replace(DRAWN, logprobs=1, logprobs_of="processed"),
        replace(GREEDY["three"], temperature=0.7, seed=5, logprobs=2, logprobs_of="processed"),
        SamplingParams(logprobs=5),
    ]
    prompts = [*PROMPTS, [4, 16]]
    requests = [Request(prompt, 3, kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    for request, out in zip(requests, run.generate(requests), strict=True):
        check(request, out)


def test_two_steps_in_flight_keep_theirs_apart():
    run = engine()
    run.add([Request(prompt, 40, SamplingParams(logprobs=2)) for prompt in PROMPTS])
    running = list(run.running)
    rows = [one.row for one in running]
    run.table.reserve(rows, [64] * 3)
    texts = [[*one.request.prompt, *one.result.tokens] for one in running]
    decoder = run.decoder(run.config)
    pending = [decoder.step_async(rows, processed=True)]
    for _ in range(4):
        pending.append(decoder.step_async(rows, processed=True))
        step = pending.pop(0)
        gained = step.wait()
        for at, (tokens, text) in enumerate(zip(gained, texts, strict=True)):
            request = Request(text, 40, SamplingParams(logprobs=2))
            found = step.logprobs(at, 2)
            check(request, RequestOutput(tokens=tokens, logprobs=found))
            text += tokens
    first = pending[0].logprobs(0, 1)
    assert [one.alternatives for one in first] == [
        dict(list(two.alternatives.items())[:1]) for two in pending[0].logprobs(0, 2)
    ]


def test_a_step_that_was_waited_for_keeps_its_own():
    """Two steps later another one writes where it did."""
    run = engine()
    asked = Request(PROMPTS[0], 40, SamplingParams(logprobs=2))
    run.add([asked])
    (one,) = run.running
    run.table.reserve([one.row], [64])
    decoder = run.decoder(run.config)
    first, *later = (decoder.step_async([one.row], processed=True) for _ in range(2))
    gained = first.wait()[0]
    for _ in range(3):
        later.append(decoder.step_async([one.row], processed=True))
        later.pop(0).wait()
    text = replace(asked, prompt=[*asked.prompt, *one.result.tokens])
    check(text, RequestOutput(tokens=gained, logprobs=first.logprobs(0, 2)))


def test_a_step_that_is_not_processed_has_none():
    run = engine()
    run.add([Request(PROMPTS[0], 40)])
    (one,) = run.running
    run.table.reserve([one.row], [64])
    pending = run.decoder(run.config).step_async([one.row])
    with pytest.raises(ValueError, match="need a step with processed=True"):
        pending.logprobs(0, 1)


def test_phases_of_ones_own_leave_them_in_the_step(monkeypatch):
    """Also where what decides keeps no distribution."""
    run = engine()
    request = Request(PROMPTS[0], 40, replace(DRAWN, logprobs=4, logprobs_of="processed"))
    run.add([request])
    (one,) = run.running
    run.table.reserve([one.row], [64])
    accept = Step.accept
    monkeypatch.setattr(
        Step, "accept", lambda *args, **more: replace(accept(*args, **more), probs=None)
    )
    step = run.decoder(run.config).phases([one.row])
    with torch.no_grad():
        step.run(StepPart(level=Level.PROCESSED))
    (count, *tokens) = step.packed[0].tolist()
    found = step.processing.logprobs.entry(0, 1).read(0, count, 4)
    assert len(found) == count
    result = replace(one.result)
    result.tokens = [*one.result.tokens, *tokens[:count]]
    result.logprobs = [*one.result.logprobs, *found]
    check(request, result)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": 21}, "logprobs must be 0..20, got 21"),
        ({"logprobs": -1}, "logprobs must be 0..20, got -1"),
        ({"logprobs": 1.5}, "logprobs must be a whole number, got 1.5"),
        ({"logprobs": True}, "logprobs must be a whole number, got True"),
        ({"logprobs_of": "all"}, "logprobs_of must be 'raw' or 'processed', got 'all'"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_a_vocabulary_has_no_more_alternatives_than_tokens_that_are_possible():
    params = SamplingParams(allowed_tokens=[3, 5, VOCAB - 1], logprobs=9, logprobs_of="processed")
    request = Request(PROMPTS[0], 6, params)
    (out,) = engine().generate([request])
    assert all(set(one.alternatives) == {3, 5, VOCAB - 1} for one in out.logprobs)
    check(request, out)
