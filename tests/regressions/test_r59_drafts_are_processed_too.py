"""R59: vllm#42744, vllm#18902, NVIDIA/TensorRT-LLM#17701.

With speculation, logit bias and min-p acted on the bonus token alone, and penalties were ignored
without a word: frequency penalties of -2 and +2 gave one text.

The logits of every node are processed by that node's own history. Whatever drafts, and however
gladly it drafts what is forbidden, texts are those of plain decoding under the same parameters, and
no token comes that min-p has cut.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.sampling.params import SamplingParams
from tests.processors import dense_logits, drawn_from, greedy_text
from tests.regressions.known import Known
from tests.tiny import TinyBlockDraft, TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPT, NEW = [3, 14, 15, 9, 14], 24
BANNED = 17
PARAMS = {
    "bias": SamplingParams(logit_bias={BANNED: -100}),
    "frequency -2": SamplingParams(frequency_penalty=-2),
    "frequency 2": SamplingParams(frequency_penalty=2),
    "presence -2": SamplingParams(presence_penalty=-2),
    "presence 2": SamplingParams(presence_penalty=2),
    "repetition": SamplingParams(repetition_penalty=1.3),
}


@cache
def free() -> list[int]:
    return dense_greedy(TinyTarget(device=DEVICE), PROMPT, NEW + 8)


@cache
def wanted() -> list[list[int]]:
    target = TinyTarget(device=DEVICE)
    return [greedy_text(target, PROMPT, NEW, params) for params in PARAMS.values()]


DRAFTS = {
    "chain": (lambda: TinyDraft(device=DEVICE), (3, 1, 4), {}),
    "drawn chain": (lambda: TinyDraft(device=DEVICE), (3, 1, 4), {"draft_sampling": True}),
    "beams": (lambda: TinyDraft(device=DEVICE), (3, 3, 9), {}),
    "best first": (
        lambda: TinyDraft(device=DEVICE),
        (4, 1, 12),
        {"tree": "best_first", "ranks": 4},
    ),
    "DFlash": (lambda: TinyBlockDraft(device=DEVICE), (5, 1, 6), {}),
    "lookup": (LookupProposer, (4, 1, 5), {}),
    "what is forbidden": (lambda: Known([[*PROMPT, *free()]]), (8, 1, 9), {}),
    "what is right": (lambda: Known([*PROMPT, *text] for text in wanted()), (8, 1, 9), {}),
}


def engine(name: str) -> Engine:
    make, shape, more = DRAFTS[name]
    config = SpecConfig(*shape, 64, 6, **more)
    return Engine(TinyTarget(device=DEVICE), make(), config, buckets=[6])


@pytest.mark.parametrize("name", DRAFTS)
def test_texts_are_those_of_plain_decoding(name):
    assert BANNED in free()[:NEW]
    texts = dict(zip(PARAMS, wanted(), strict=True))
    assert texts["frequency -2"] != texts["frequency 2"] != free()[:NEW]
    outs = engine(name).generate([Request(PROMPT, NEW, params) for params in PARAMS.values()])
    assert [out.tokens for out in outs] == wanted()
    assert BANNED not in outs[0].tokens
    assert max(n for out in outs for n in out.accept_lens) > 2


@pytest.mark.parametrize("name", ["chain", "drawn chain", "beams", "DFlash", "lookup"])
def test_no_token_comes_that_min_p_has_cut(name):
    """Of a flat distribution, so that drafts are tokens that could be drawn without it."""
    run, cut = engine(name), 0
    drawn = SamplingParams(3.0, min_p=0.4)
    requests = [Request(PROMPT, 12, replace(drawn, seed=seed)) for seed in range(6)]
    for request, out in zip(requests, run.generate(requests), strict=True):
        for at, token in enumerate(out.tokens):
            scores = dense_logits(run.target.model, [*PROMPT, *out.tokens[:at]])
            probs = drawn_from(scores, request.sampling)
            assert probs[token] > 0
            cut += sum(p > 0 for p in probs) < 10
    assert cut > 10, "min-p cuts nothing"
