"""Requests with a grammar: plain constrained decoding's tokens, beside any others."""

from __future__ import annotations

import math
from functools import partial

import pytest

from specattn.engine.engine import Request
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.engine.test_processors import CONFIGS, COUNT, PROMPTS, engine
from tests.grammars import Remainders, constrained_text
from tests.processors import GREEDY, dense_logits, greedy_text
from tests.regressions.masks import leave
from tests.samples import half, on_cpu
from tests.tiny import TinyTarget
from tests.worlds import DEVICE


def steps(run, until) -> None:
    while not until.finish_reason:
        run.step(ahead=True)


@on_cpu(half, "config", "options")
@pytest.mark.parametrize("options", [{}, {"cudagraph": "piecewise"}, {"tbo": True}], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_greedy_texts_are_those_of_plain_constrained_decoding(config, options):
    """Beside one with penalties too, one with penalties alone, and one that asks for nothing."""
    target, none = TinyTarget(device=DEVICE), SamplingParams()
    kinds = [(none, True), (none, False), (GREEDY["three"], True), (GREEDY["three"], False)]
    requests = [
        Request(
            PROMPTS[at % 3],
            COUNT - at,
            params,
            grammar=partial(Remainders, PROMPTS[at % 3]) if has else None,
        )
        for at, (params, has) in enumerate(kinds)
    ]
    outs = engine(CONFIGS[config], **options).generate(requests)
    for request, out in zip(requests, outs, strict=True):
        text = constrained_text if request.grammar else greedy_text
        want = text(target, list(request.prompt), request.max_new_tokens, request.sampling)
        assert out.tokens == want
    if config != "plain":
        assert max(n for out in outs for n in out.accept_lens) > 2


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_first_tokens_of_several_forwards_obey_their_own_grammars(chunk):
    """Prompts end in forwards of their own; the second request has no grammar."""
    run, target = engine(CONFIGS["tree"]), TinyTarget(device=DEVICE)
    run._admission.prompts.chunk = chunk
    prompts = [*PROMPTS, [4, 16]]
    requests = [
        Request(prompt, 9, params, grammar=partial(Remainders, prompt) if at != 1 else None)
        for at, (prompt, params) in enumerate(
            zip(prompts, [SamplingParams(), GREEDY["three"]] * 2, strict=True)
        )
    ]
    for request, out in zip(requests, run.generate(requests), strict=True):
        text = constrained_text if request.grammar else greedy_text
        assert out.tokens == text(target, list(request.prompt), 9, request.sampling)


def test_a_grammar_is_told_every_token_once():
    made = []

    def make():
        made.append(Remainders(PROMPTS[0]))
        return made[-1]

    (out,) = engine(CONFIGS["tree"]).generate([Request(PROMPTS[0], COUNT, grammar=make)])
    (grammar,) = made
    assert grammar.accepted == len(out.tokens) == COUNT
    assert grammar.last == out.tokens[-1]


def test_later_requests_of_a_row_are_free_of_its_grammar():
    run, target = engine(CONFIGS["tree"]), TinyTarget(device=DEVICE)
    grammar = partial(Remainders, PROMPTS[0])
    run.generate([Request(PROMPTS[0], 9, grammar=grammar) for _ in range(6)])
    for params in (SamplingParams(), GREEDY["bias"]):
        (out,) = run.generate([Request(PROMPTS[0], COUNT, params)])
        assert out.tokens == greedy_text(target, PROMPTS[0], COUNT, params)


def test_what_a_grammar_raises_loses_no_request():
    """It comes between the parts of a step: the others go on where they were."""

    class Failing(Remainders):
        def fill(self, tokens, parents, bitmask):
            if self.accepted > 3:
                raise RuntimeError("no more")
            super().fill(tokens, parents, bitmask)

    run, target = engine(CONFIGS["tree"]), TinyTarget(device=DEVICE)
    bad, good = run.add(
        [
            Request(PROMPTS[0], COUNT, grammar=partial(Failing, PROMPTS[0])),
            Request(PROMPTS[2], COUNT, GREEDY["three"]),
        ]
    )
    with pytest.raises(RuntimeError, match="no more"):
        steps(run, bad)
    run.drop(bad)
    steps(run, good)
    assert good.tokens == greedy_text(target, PROMPTS[2], COUNT, GREEDY["three"])
    want = constrained_text(target, PROMPTS[0], COUNT, SamplingParams())
    assert bad.tokens == want[: len(bad.tokens)]
    assert len(bad.tokens) > 3
    check_books(run.table)


def test_what_is_no_grammar_is_refused():
    with pytest.raises(ValueError, match="grammar must make a Grammar when it is called, got"):
        Request(PROMPTS[0], grammar=Remainders(PROMPTS[0]))


END, SHORTEST, LONGEST = 60, 3, 8


class Between:
    """Tokens below 30, ``SHORTEST`` to ``LONGEST`` of them, and an end."""

    def __init__(self) -> None:
        self.count = 0

    @staticmethod
    def allowed(count: int) -> set[int]:
        following = set(range(30)) if count < LONGEST else set()
        return following | ({END} if count >= SHORTEST else set())

    def fill(self, tokens, parents, bitmask) -> None:
        counts = []
        for parent in parents:
            counts.append(counts[parent] + 1 if parent >= 0 else self.count)
        for node, count in enumerate(counts):
            # what lies behind the vocabulary is nobody's
            leave(bitmask[node], self.allowed(count) | {61, 62, 63})

    def accept(self, tokens) -> None:
        for token in tokens:
            assert token in self.allowed(self.count)
            self.count += 1


@pytest.fixture
def ending(monkeypatch):
    """Targets end by END, which they rather write than anything else."""
    monkeypatch.setattr(TinyTarget, "eos_token_ids", frozenset([END]))
    return SamplingParams(logit_bias={END: 50.0})


@on_cpu(half, "config", "least")
@pytest.mark.parametrize("least", [0, 5, LONGEST, LONGEST + 1, COUNT])
@pytest.mark.parametrize("config", CONFIGS)
def test_ends_wait_for_the_fewest_tokens_that_a_grammar_has(config, least, ending):
    """But no longer than it has others: then the text is whole, and ends."""
    request = Request(PROMPTS[0], COUNT, ending, grammar=Between, min_new_tokens=least)
    beside = Request(PROMPTS[1], 9)
    run = engine(CONFIGS[config])
    (free,) = run.generate([beside])
    out, other = run.generate([request, beside])
    target, want = TinyTarget(device=DEVICE), []
    while END not in want:
        allowed = Between.allowed(len(want))
        scores = dense_logits(target, [*PROMPTS[0], *want])
        if len(want) >= max(least, SHORTEST) or allowed == {END}:
            want.append(END)
        else:
            want.append(max(allowed - {END}, key=lambda token: scores[token]))
    assert (out.tokens, out.finish_reason) == (want, "eos")
    assert len(want) == min(max(least, SHORTEST), LONGEST) + 1
    assert other.tokens == free.tokens


@on_cpu(half, "config", "asked")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "asked",
    [
        {"sampling": SamplingParams(logit_bias={END: -math.inf})},
        {"sampling": SamplingParams(allowed_tokens=range(30))},
        {"sampling": SamplingParams(bad_words=[[END]])},
        {"min_new_tokens": COUNT, "stop_token_ids": [END], "ignore_eos": True},
    ],
    ids=["bias", "allowed", "bad words", "stop token"],
)
def test_an_end_that_is_forbidden_blocks(config, asked, ending):
    """All that the grammar has comes first, and the reason says what happened."""
    requests = [
        Request(PROMPTS[0], COUNT, grammar=Between, **asked),
        Request(PROMPTS[1], 9),
    ]
    out, other = engine(CONFIGS[config]).generate(requests)
    assert (len(out.tokens), out.finish_reason) == (LONGEST, "blocked")
    assert other.finish_reason == "length"
