"""Texts go in and come out where an engine has a tokenizer."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.serving import AsyncEngine
from specattn.speculative.sampling.params import SamplingParams
from tests.tiny import TinyTarget, dense_greedy
from tests.worlds import DEVICE


class Words:
    """Tokens are numbers, and 60 is special; a text begins with 1."""

    def encode(self, text: str) -> list[int]:
        return [1, *map(int, text.split())]

    def decode(self, token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=None):
        assert clean_up_tokenization_spaces is False
        return "".join(
            f"{token} " for token in token_ids if not (skip_special_tokens and token == 60)
        )


PROMPT, COUNT = "3 14 15", 20
IDS = Words().encode(PROMPT)


@pytest.fixture(scope="module")
def target():
    return TinyTarget(device=DEVICE)


@pytest.fixture(scope="module")
def greedy(target):
    return dense_greedy(target, IDS, COUNT)


def engine(target, **options) -> Engine:
    settings = {"tokenizer": Words(), "backend": "torch_native"} | options
    return Engine(target, None, SpecConfig(0, 1, 1, 64, 3), **settings)


def said(tokens) -> str:
    return "".join(f"{token} " for token in tokens)


def test_texts_go_in_and_come_out(target, greedy):
    run = engine(target)
    asked = [PROMPT, Request(PROMPT, 9), Request(IDS, 5)]
    whole, *others = run.generate(asked)
    # the context ends before 128 tokens
    assert whole.finish_reason == "context"
    assert whole.tokens[:COUNT] == greedy
    assert [out.tokens for out in others] == [greedy[:9], greedy[:5]]
    for out in (whole, *others):
        assert out.text == said(out.tokens)
    (added,) = run.add([PROMPT])
    assert (added.tokens, added.text) == (greedy[:1], "")
    run.clear()
    with AsyncEngine(run) as server:
        assert "".join(out.text for out in server.stream(PROMPT)) == whole.text


@pytest.mark.parametrize("many", [False, True], ids=["a text", "texts"])
def test_a_stop_string_is_not_in_the_text(target, greedy, many):
    end = next(at for at in range(6, COUNT) if greedy.index(greedy[at]) == at)
    stop = f" {greedy[end]} "
    (out,) = engine(target).generate([Request(IDS, COUNT, stop=[stop, "-"] if many else stop)])
    assert (out.tokens, out.finish_reason) == (greedy[: end + 1], "stop")
    assert out.text == said(greedy[:end]).removesuffix(" ")


def test_a_token_that_ends_a_request_is_not_in_the_text(target, greedy, monkeypatch):
    """Be it a stop token or one of the target's; streams agree."""
    end = next(at for at in range(6, COUNT) if greedy.index(greedy[at]) == at)
    by_stop = Request(IDS, COUNT, stop_token_ids=[greedy[end]])
    found = []
    for request, eos in ((by_stop, ()), (Request(IDS, COUNT), (greedy[end],))):
        monkeypatch.setattr(target, "eos_token_ids", frozenset(eos))
        run = engine(target)
        found += run.generate([request, Request(IDS, end + 1, ignore_eos=True)])
        with AsyncEngine(run) as server:
            assert "".join(out.text for out in server.stream(request)) == said(greedy[:end])
    assert [out.finish_reason for out in found] == ["stop", "length", "eos", "length"]
    assert {tuple(out.tokens) for out in found} == {tuple(greedy[: end + 1])}
    # one that came by itself is
    assert [out.text for out in found] == [said(greedy[:end]), said(greedy[: end + 1])] * 2


def test_a_detokenizer_of_ones_own_is_asked(target, greedy):
    run = engine(target, detokenize=lambda tokens: "".join(f"<{token}>" for token in tokens))
    (out,) = run.generate([Request(PROMPT, 3, stop=f"<{greedy[1]}>")])
    assert out.text == f"<{greedy[0]}>"
    (out,) = engine(target, tokenizer=None).generate([Request(IDS, 3)])
    assert (out.tokens, out.text) == (greedy[:3], "")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (PROMPT, "requests must be a sequence of Request, got the one '3 14 15'"),
        ([PROMPT], "prompt must be token ids in an engine without a tokenizer, got '3 14 15'"),
        ([Request(PROMPT)], "prompt must be token ids in an engine without a tokenizer, got '3"),
    ],
    ids=["a single text", "texts", "a request"],
)
def test_texts_that_nothing_makes_tokens_of_are_refused(target, asked, message):
    run = engine(target, tokenizer=None)
    for call in (run.generate, run.add):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(asked)
    assert run.num_running == 0


def test_parameters_in_the_place_of_a_function_are_refused(target):
    with pytest.raises(
        ValueError, match=r"on_tokens must be callable, got SamplingParams\(.*sampl"
    ):
        engine(target).generate([PROMPT], SamplingParams())
    with pytest.raises(ValueError, match="tokenizer must encode and decode, got 'gpt2'"):
        engine(target, tokenizer="gpt2")


def test_a_character_that_begins_in_the_prompt_is_the_texts(target, greedy):
    """Its three bytes are the prompt's last token and the first two that come."""
    places = dict(zip((IDS[-1], *greedy[:2]), "살".encode(), strict=True))
    assert len(places) == 3

    def detokenize(tokens):
        return bytes(places.get(token, 97 + token % 26) for token in tokens).decode(
            errors="replace"
        )

    run = engine(target, tokenizer=None, detokenize=detokenize)
    free, stopped = run.generate([Request(IDS, 5), Request(IDS, 5, stop="살")])
    assert free.text == "살" + detokenize(greedy[2:5])
    assert (stopped.tokens, stopped.finish_reason, stopped.text) == (greedy[:2], "stop", "")
    with AsyncEngine(run) as server:
        assert "".join(out.text for out in server.stream(Request(IDS, 5))) == free.text


@pytest.mark.parametrize("name", ["eos_token_id", "eot_token_id"])
def test_the_tokenizers_ends_end_texts(target, greedy, name):
    """As the target's own do, and not those of a token that the target cannot write."""
    end = greedy[6]
    words = Words()
    setattr(words, name, end)
    want = greedy[: greedy.index(end) + 1]
    run = engine(target, tokenizer=words)
    asked = Request(IDS, COUNT)
    found, whole, later = run.generate(
        [asked, replace(asked, ignore_eos=True), replace(asked, min_new_tokens=len(want))]
    )
    assert (found.tokens, found.finish_reason) == (want, "eos")
    assert found.text == said(want[:-1])
    assert whole.tokens == greedy
    assert end not in later.tokens[: len(want)]
    setattr(words, name, target.vocab_size)
    outside = replace(asked, min_new_tokens=9)
    assert engine(target, tokenizer=words).generate([outside])[0].tokens == greedy
