"""R60: ggml-org/llama.cpp#27972, sglang#14046, sglang#17349, sglang#19779, vllm#38711.

Of a step's tokens only the first had a log-probability, or every accepted one had 0; near the
context's end drafts were skipped and stale ones left in place, with wrong log-probabilities.

Every token has its own, that of a plain forward over the text before it: the prompt's, accepted
ones and bonus tokens, whoever reads the stream and when, up to the last slot of the context.
"""

from __future__ import annotations

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.serving import AsyncEngine
from specattn.speculative.sampling.params import SamplingParams
from tests.processors import processed
from tests.regressions.known import Known
from tests.tiny import DenseAttend, TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPT, NEW, STEPS, CONTEXT = [3, 14, 15, 9], 20, 6, 48
TOLERANCE = 1e-5 if DEVICE.type == "cpu" else 1e-4
ALL = {"raw": {}, "processed": {"logprobs_of": "processed", "logit_bias": {4: -2.0, 22: 1.5}}}


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget(device=DEVICE)


def engine(target, draft, rows=4) -> Engine:
    return Engine(target, draft, SpecConfig(STEPS, 1, STEPS + 1, CONTEXT, rows), buckets=[rows])


def check(target, request: Request, tokens: list[int], logprobs) -> None:
    """As the softmax of a forward over the whole text has them."""
    text, params = [*request.prompt, *tokens], request.sampling
    positions = torch.arange(len(text), device=DEVICE)
    ids = torch.tensor(text, device=DEVICE)
    rows = target(ids, positions, DenseAttend(target.layers)).logits.double().cpu()
    assert len(logprobs) == len(tokens)
    for at, (token, found) in enumerate(zip(tokens, logprobs, strict=True)):
        scores = rows[len(request.prompt) - 1 + at].tolist()
        if params.logprobs_of == "processed":
            scores = processed(scores, list(request.prompt), tokens[:at], params)
        want = torch.tensor(scores).log_softmax(-1)
        assert abs(found.value - float(want[token])) < TOLERANCE
        best = want.topk(params.logprobs)
        assert list(found.alternatives) == best.indices.tolist()
        torch.testing.assert_close(
            list(found.alternatives.values()), best.values.tolist(), rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("of", ALL)
def test_accepted_tokens_have_theirs_and_so_have_bonus_tokens(target, of):
    request = Request(PROMPT, NEW, SamplingParams(logprobs=5, **ALL[of]))
    (plain,) = engine(target, TinyDraft(device=DEVICE)).generate([request])
    run = engine(target, Known([[*PROMPT, *plain.tokens]]))
    (out,) = run.generate([request])
    assert out.tokens == plain.tokens
    assert max(out.accept_lens) == STEPS + 1
    check(target, request, out.tokens, out.logprobs)
    drawn = Request(PROMPT, NEW, SamplingParams(1.0, seed=4, logprobs=5))
    (out,) = run.generate([drawn])
    check(target, drawn, out.tokens, out.logprobs)


@pytest.mark.parametrize("slow", [False, True])
def test_a_stream_has_them_with_their_tokens(target, slow):
    """A slow reader gets the tokens of several steps at once."""
    run = engine(target, TinyDraft(device=DEVICE))
    request = Request(PROMPT, NEW, SamplingParams(logprobs=2))
    with AsyncEngine(run) as server:
        stream = server.stream(request)
        if slow:
            # read first, and ends in a later step
            list(server.stream(Request(PROMPT, NEW + STEPS + 2)))
        pieces = list(stream)
    assert not slow or len(pieces) == 1
    assert all(len(piece.logprobs) == len(piece.tokens) for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    check(target, request, tokens, [one for piece in pieces for one in piece.logprobs])


def test_they_are_right_up_to_the_contexts_end(target):
    """Beside a request that is far from it, and drafts on."""
    lens = [CONTEXT - short for short in (1, 6, 8)]
    prompts = [[7 * at % 61 for at in range(length)] for length in lens] + [PROMPT]
    texts = [[*prompt, *dense_greedy(target, prompt, NEW)] for prompt in prompts]
    run = engine(target, Known(texts))
    requests = [Request(prompt, NEW, SamplingParams(logprobs=1)) for prompt in prompts]
    outs = run.generate(requests)
    for request, out in zip(requests, outs, strict=True):
        check(target, request, out.tokens, out.logprobs)
    assert [out.finish_reason for out in outs] == ["context"] * 3 + ["length"]
    assert max(outs[-1].accept_lens) == STEPS + 1
