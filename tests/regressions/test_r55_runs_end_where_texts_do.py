"""R55: sglang#31599, sglang#33758, sglang#30291, sglang#33045, sglang#23802, sglang#37450,
sglang#39826, vllm#47616.

A run of accepted tokens that held the end of a text and also crossed its longest length ended as
"length", with the tokens behind the end; stop strings were looked for in as many characters as
they have themselves, which missed those early in a long run; text was cut, and token ids,
log-probabilities and counters were not.

Tokens are taken one by one: the first that ends the text, completes a stop string or reaches the
longest length is the last, and says why. Log-probabilities, lengths of steps, counters and streams
have what the text has.
"""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.serving import AsyncEngine
from specattn.speculative.sampling.params import SamplingParams
from tests.regressions.known import Known
from tests.samples import half, on_cpu
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPT, LIMITS, STEPS = [3, 14, 15, 9], range(1, 21), 16
SCORED = SamplingParams(logprobs=2)
# what asks for the end, and why the text ends then
ASKED = {
    "eos": lambda token: ({}, "eos"),
    "stop token": lambda token: ({"stop_token_ids": [token]}, "stop"),
    "stop string": lambda token: ({"stop": [f"<{token}>"]}, "stop"),
}


def text_of(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


@pytest.fixture(scope="module")
def text() -> list[int]:
    """What plain decoding writes, further than any run goes."""
    return dense_greedy(TinyTarget(device=DEVICE), PROMPT, max(LIMITS) + STEPS + 1)


def engine(text: list[int], steps: int = STEPS, ends: int | None = None) -> Engine:
    target = TinyTarget(device=DEVICE)
    target.eos_token_ids = frozenset() if ends is None else frozenset([ends])
    config = SpecConfig(steps, 1, steps + 1, 64, len(LIMITS))
    return Engine(target, Known([[*PROMPT, *text]]), config, buckets=[20], detokenize=text_of)


def agrees(out, tokens: list[int], reason: str) -> None:
    """All that is told of a text ends with it."""
    assert (out.tokens, out.finish_reason) == (tokens, reason)
    assert len(out.logprobs) == len(tokens)
    # the first token comes from the prompt
    assert sum(out.accept_lens) == len(tokens) - 1
    assert 0 not in out.accept_lens
    assert out.steps == len(out.accept_lens)
    assert out.accepted_per_step == (sum(out.accept_lens) / out.steps if out.steps else 0)


@pytest.mark.parametrize("at", [0, 1, 7, 16])
@pytest.mark.parametrize("kind", ASKED)
def test_an_end_in_a_run_comes_before_the_limit_behind_it(text, kind, at):
    end = text[at]
    assert text.index(end) == at
    asked, reason = ASKED[kind](end)
    run = engine(text, ends=end if kind == "eos" else None)
    outs = run.generate([Request(PROMPT, limit, SCORED, **asked) for limit in LIMITS])
    for limit, out in zip(LIMITS, outs, strict=True):
        if at < limit:
            agrees(out, text[: at + 1], reason)
        else:
            agrees(out, text[:limit], "length")
    assert run.configs.gained[run.config] == sum(len(out.tokens) - 1 for out in outs)
    # but for the first token, all came in one run
    assert max(out.steps for out in outs) == min(at, 1)


@pytest.mark.parametrize("kind", ASKED)
def test_a_stream_ends_with_its_text(text, kind):
    asked, reason = ASKED[kind](text[7])
    run = engine(text, ends=text[7] if kind == "eos" else None)
    with AsyncEngine(run) as server:
        for limit in (7, 8, 9, 20):
            pieces = list(server.stream(Request(PROMPT, limit, SCORED, **asked)))
            tokens = text[: min(limit, 8)]
            assert [token for piece in pieces for token in piece.tokens] == tokens
            assert sum(len(piece.logprobs) for piece in pieces) == len(tokens)
            assert sum(sum(piece.accept_lens) for piece in pieces) == len(tokens) - 1
            assert pieces[-1].finish_reason == (reason if limit > 7 else "length")
            # what ended the text is no part of it
            assert "".join(piece.text for piece in pieces) == text_of(tokens[:7])


def test_a_step_that_was_launched_ahead_adds_nothing():
    """Drafts are always right here: the next run is on its way when the end is read."""
    models = TinyTarget(device=DEVICE, sharp=20.0), TinyDraft(device=DEVICE, sharp=20.0)
    text = dense_greedy(models[0], PROMPT, 20)
    run = Engine(*models, SpecConfig(4, 1, 5, 64, 8), buckets=[8])
    outs = run.add([Request(PROMPT, n, SCORED, stop_token_ids=[text[3]]) for n in range(1, 9)])
    while run.num_running:
        run.step(ahead=True)
    for limit, out in zip(range(1, 9), outs, strict=True):
        agrees(out, text[: min(limit, 4)], "stop" if limit > 3 else "length")
    assert max(out.steps for out in outs) == 1


@on_cpu(half, "stops", "steps")
@pytest.mark.parametrize("steps", [1, 4, STEPS])
@pytest.mark.parametrize(
    ("stops", "count"),
    [
        # the second token of the first run of 17
        (["<50>"], 3),
        # two in one run: the first in the text
        (["<39>", "<3>"], 4),
        (["<3>", "<39>"], 4),
        # one that begins earlier and is complete later
        (["<50><3><39>", "<3>"], 4),
        # from the prompt's token into a run, and across runs of 5
        (["1><34"], 2),
        (["4><1"], 7),
        # within a token, and within the prompt's text alone
        (["7"], 7),
        (["<15>"], 20),
    ],
    ids=str,
)
def test_stop_strings_anywhere_in_a_run_are_found(text, stops, count, steps):
    assert text[:8] == [1, 34, 50, 3, 39, 4, 17, 45]
    run = engine(text, steps)
    (out,) = run.generate([Request(PROMPT, 20, SCORED, stop=stops)])
    agrees(out, text[:count], "length" if count == 20 else "stop")
    assert max(out.accept_lens) == min(steps + 1, count - 1)
