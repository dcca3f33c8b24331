"""Tokens and texts that end one request, and not the others of its engine."""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.detokenizer import TextStream
from specattn.engine.engine import Engine, Request
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPT, NEW = [3, 1, 4, 1, 5], 20


@pytest.fixture(scope="module")
def target():
    return TinyTarget(device=DEVICE)


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, TinyDraft(device=DEVICE), SpecConfig(3, 2, 6, 64, 2))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_its_own_request(engine, target, ignore_eos):
    text = dense_greedy(target, PROMPT, NEW)
    stop = text[7]
    stopped, free = engine.generate(
        [
            Request(PROMPT, NEW, ignore_eos=ignore_eos, stop_token_ids=[stop]),
            Request(PROMPT, NEW, ignore_eos=ignore_eos),
        ]
    )
    assert stopped.tokens == text[: text.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert free.tokens == text


def test_the_targets_end_is_told_from_a_stop_token():
    """Where both are one token, it is the end of the text, unless that is to be ignored."""
    target = TinyTarget(device=DEVICE)
    text = dense_greedy(target, PROMPT, NEW)
    end = text[7]
    target.eos_token_ids = frozenset([end])
    engine = Engine(target, TinyDraft(device=DEVICE), SpecConfig(3, 2, 6, 64, 4))
    kinds = [{}, {"stop_token_ids": [end]}, {"stop_token_ids": [end], "ignore_eos": True}]
    results = engine.generate([Request(PROMPT, NEW, **kind) for kind in kinds])
    assert [result.finish_reason for result in results] == ["eos", "eos", "stop"]
    for result in results:
        assert result.tokens == text[: text.index(end) + 1]


@pytest.mark.parametrize("call", ["add", "generate"])
@pytest.mark.parametrize("ids", [[61], [5, -1]])
def test_stop_tokens_are_of_the_vocabulary(engine, call, ids):
    with pytest.raises(ValueError, match=r"stop tokens must be 0\.\.60, got"):
        getattr(engine, call)([Request(PROMPT), Request(PROMPT, stop_token_ids=ids)])
    assert engine.num_running == 0


def test_stop_tokens_are_whole_numbers():
    assert Request(PROMPT, stop_token_ids=[5, 5]).stop_token_ids == {5}
    with pytest.raises(ValueError, match="every stop token"):
        Request(PROMPT, stop_token_ids=[1.5])
    with pytest.raises(ValueError, match="stop_token_ids must be a sequence of tokens, got 5"):
        Request(PROMPT, stop_token_ids=5)


@pytest.mark.parametrize("count", [-1, 21])
def test_a_least_length_is_at_most_the_longest(count):
    assert Request(PROMPT, NEW, min_new_tokens=NEW).min_new_tokens == NEW
    with pytest.raises(ValueError, match=rf"min_new_tokens must be 0\.\.20, got {count}"):
        Request(PROMPT, NEW, min_new_tokens=count)


@pytest.mark.parametrize("least", [0, 3, 9])
def test_stop_strings_are_looked_for_after_the_least_length(target, least):
    """Steps of several tokens straddle it."""
    tokens = dense_greedy(target, PROMPT, NEW)
    engine = Engine(
        target,
        TinyDraft(device=DEVICE),
        SpecConfig(3, 2, 6, 64, 2),
        detokenize=lambda ids: "".join(f"<{id_}>" for id_ in ids),
    )
    # every token is a stop string
    stops = [f"<{id_}>" for id_ in set(tokens)]
    (result,) = engine.generate([Request(PROMPT, NEW, stop=stops, min_new_tokens=least)])
    assert result.tokens == tokens[: least + 1]
    assert result.finish_reason == "stop"
    assert result.text == "".join(f"<{id_}>" for id_ in tokens[:least])


@pytest.mark.parametrize("sizes", [[1] * 8, [8], [3, 5], [2, 4, 2]])
def test_no_stop_string_is_looked_for_in_a_texts_first_tokens(sizes):
    """Nor one that begins there."""
    words = ["a ", "stop ", "b ", "st", "op ", "stop ", "c ", "stop "]
    stream = TextStream(
        lambda tokens: "".join(words[token] for token in tokens), [], ["stop "], min_new_tokens=4
    )
    at, pieces = 0, []
    for size in sizes:
        pieces.append(stream.feed(range(at, at + size)))
        at += size
    assert "".join(pieces) == stream.text == "a stop b stop "
    assert stream.stopped
