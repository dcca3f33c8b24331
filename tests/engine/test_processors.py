"""Requests with logits processors: plain decoding's tokens, in any batch, tree and kind of step."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.engines import engine as tiny_engine
from tests.grammars import Remainders, constrained_text
from tests.processors import GREEDY, greedy_text, no_path
from tests.samples import sampled, star
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

CONFIGS = {
    "plain": SpecConfig(0, 1, 1, 64, 4),
    "chain": SpecConfig(3, 1, 4, 64, 4),
    "tree": SpecConfig(3, 3, 9, 64, 4),
}
PROMPTS = ([3, 14, 15, 9, 14], [35], [2, 7, 1, 8, 2, 8])
COUNT = 30


engine = partial(tiny_engine, device=DEVICE)


@sampled(star, name=["three", *list(GREEDY)[:-1]], config=["tree", "chain", "plain"])
def test_greedy_texts_are_those_of_plain_decoding(name, config):
    """Beside a request without processors, whose text is as without the others."""
    target, params = TinyTarget(device=DEVICE), GREEDY[name]
    requests = [Request(prompt, COUNT, params) for prompt in PROMPTS]
    requests.insert(1, Request([5, 5], COUNT))
    outs = engine(CONFIGS[config]).generate(requests)
    for request, out in zip(requests, outs, strict=True):
        want = greedy_text(target, list(request.prompt), COUNT, request.sampling)
        assert out.tokens == want
        unprocessed = greedy_text(target, list(request.prompt), COUNT, SamplingParams())
        assert (out.tokens == unprocessed) == (not request.levels)
    if config != "plain":
        assert max(n for out in outs for n in out.accept_lens) > 2


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_first_tokens_of_several_forwards_are_their_own_requests(chunk):
    run, target = engine(CONFIGS["chain"]), TinyTarget(device=DEVICE)
    run._admission.prompts.chunk = chunk
    kinds = [GREEDY["allowed"], SamplingParams(), GREEDY["bias"], GREEDY["repetition"]]
    prompts = [*PROMPTS, [4, 16]]
    requests = [Request(prompt, 5, kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    for request, out in zip(requests, run.generate(requests), strict=True):
        assert out.tokens == greedy_text(target, list(request.prompt), 5, request.sampling)


def test_repeats_within_one_steps_path(monkeypatch):
    """Tokens that a step itself emits count in that step; without the path the text differs."""
    monkeypatch.setattr("specattn.kernels.uses_triton", lambda device: False)
    target, params, count = TinyTarget(), SamplingParams(frequency_penalty=0.2), 60

    def text():
        run = Engine(target, TinyDraft(), SpecConfig(7, 1, 8, 128, 2), buckets=[1])
        (out,) = run.generate([Request(PROMPTS[0], count, params)])
        return out

    out, at, repeats = text(), 1, 0
    for kept in out.accept_lens:
        step = out.tokens[at : at + kept]
        at += kept
        repeats += len(set(step)) < len(step)
    assert repeats
    assert out.tokens == greedy_text(target, PROMPTS[0], count, params)
    monkeypatch.setattr("specattn.kernels.processors._path", no_path)
    assert text().tokens != out.tokens


@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
def test_rows_are_reused_by_requests_of_every_kind(cudagraph):
    """More requests than rows: none reads what the request before it has left."""
    kinds = [*GREEDY.values(), SamplingParams()]
    requests = [Request(PROMPTS[i % 3], 9 + i % 4, kinds[i % len(kinds)]) for i in range(16)]
    outs = engine(CONFIGS["tree"], cudagraph=cudagraph, buckets=(2, 4)).generate(requests)
    target = TinyTarget(device=DEVICE)
    for request, out in zip(requests, outs, strict=True):
        count = request.max_new_tokens
        assert out.tokens == greedy_text(target, list(request.prompt), count, request.sampling)


@pytest.mark.parametrize("constrained", [False, True])
def test_processors_hold_to_the_contexts_end_and_across_configs(constrained):
    """The last tokens come by plain decoding, whose decoder is made late; trees change before."""
    rng, target = random.Random(5), TinyTarget(device=DEVICE)
    run = engine(
        CONFIGS["tree"],
        CONFIGS["chain"],
        policy=lambda observed: rng.choice(observed.configs),
    )
    prompt, params = PROMPTS[2], GREEDY["three"]
    grammar = (lambda: Remainders(prompt)) if constrained else None
    (out,) = run.generate([Request(prompt, 99, params, grammar=grammar)])
    assert out.finish_reason == "context"
    assert len(run.decoders) == 3
    text = constrained_text if constrained else greedy_text
    assert out.tokens == text(target, prompt, len(out.tokens), params)


@pytest.mark.parametrize("config", CONFIGS)
def test_processors_that_leave_no_token_end_a_request(config):
    """By a reason of their own, also where a step ahead has gone on."""
    beside = Request(PROMPTS[1], 9)
    run, allowed = engine(CONFIGS[config]), SamplingParams(allowed_tokens=[4, 14])
    (free,) = run.generate([Request(PROMPTS[1], 9)])
    stuck = replace(allowed, bad_words=[[4, 4], [4, 14], [14, 4], [14, 14, 14]])
    out, other = run.generate([Request(PROMPTS[0], 9, stuck), beside])
    assert out.finish_reason == "blocked"
    assert 1 <= len(out.tokens) <= 3
    assert (run.metrics().finished["blocked"], run.num_running) == (1, 0)
    assert other.tokens == free.tokens


@pytest.mark.parametrize("config", ["chain", "tree"])
def test_a_bias_of_minus_infinity_forbids(config):
    """As allowed tokens do; if it forbids all, no token is left."""
    target, run = TinyTarget(device=DEVICE), engine(CONFIGS[config])
    free = greedy_text(target, PROMPTS[0], COUNT, SamplingParams())
    forbidden = set(free[::3])
    params = SamplingParams(logit_bias=dict.fromkeys(forbidden, -math.inf))
    allowed = SamplingParams(allowed_tokens=set(range(target.vocab_size)) - forbidden)
    nothing = SamplingParams(logit_bias=dict.fromkeys(range(target.vocab_size), -math.inf))
    requests = [Request(PROMPTS[0], COUNT, one) for one in (params, allowed, nothing)]
    out, same, none = run.generate(requests)
    assert out.tokens == same.tokens == greedy_text(target, PROMPTS[0], COUNT, params)
    assert forbidden.isdisjoint(out.tokens)
    assert (none.tokens, none.finish_reason) == ([], "blocked")


def test_steps_that_are_checked_write_the_same():
    run, target = engine(CONFIGS["tree"], validate="debug"), TinyTarget(device=DEVICE)
    requests = [
        Request(PROMPTS[0], COUNT, GREEDY["three"]),
        Request(PROMPTS[1], COUNT, replace(GREEDY["three"], temperature=1.0, min_p=0.2)),
    ]
    out, _ = run.generate(requests)
    assert out.tokens == greedy_text(target, PROMPTS[0], COUNT, GREEDY["three"])


def test_ends_come_after_the_least_number_of_tokens():
    run, target = engine(CONFIGS["tree"]), TinyTarget(device=DEVICE)
    (free,) = run.generate([Request(PROMPTS[0], COUNT)])
    ends = (free.tokens[2], free.tokens[0])
    for least in (0, 1, 3, 8):
        (out,) = run.generate(
            [Request(PROMPTS[0], COUNT, min_new_tokens=least, stop_token_ids=ends)]
        )
        text = greedy_text(
            target, PROMPTS[0], COUNT, SamplingParams(), min_new_tokens=least, ends=ends
        )
        stop = min((at for at, token in enumerate(text) if token in ends), default=COUNT - 1)
        assert out.tokens == text[: stop + 1]
        assert len(out.tokens) >= max(least, 1)


def test_more_ends_than_a_row_holds_are_refused(monkeypatch):
    """Only where they are to be made impossible."""
    monkeypatch.setattr("specattn.engine.intake.MAX_END_IDS", 3)
    run = engine(CONFIGS["chain"])
    ends = {"stop_token_ids": [5, 6, 7, 8]}
    with pytest.raises(ValueError, match="with min_new_tokens must be at most 3, got 4"):
        run.add([Request(PROMPTS[0], COUNT, min_new_tokens=2, **ends)])
    run.generate([Request(PROMPTS[0], 5, **ends)])


def test_without_processors_nothing_is_captured_or_allocated(captures):
    run = engine(CONFIGS["chain"])
    (before,) = run.generate([Request(PROMPTS[0], COUNT)])
    assert captures == ["step"]
    run.generate([Request(PROMPTS[0], COUNT, GREEDY["bias"])])
    assert captures == ["step", "step (processed)"]
    (after,) = run.generate([Request(PROMPTS[0], COUNT)])
    assert after.tokens == before.tokens
    assert captures == ["step", "step (processed)"]
    captures.clear()
    engine(CONFIGS["chain"], processed=True).generate(
        [Request(PROMPTS[0], 5, replace(GREEDY["bias"], temperature=0.5))]
    )
    assert captures[:2] == ["step", "step (processed)"]
