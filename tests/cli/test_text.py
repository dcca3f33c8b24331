"""Text as it arrives: whole characters, stop strings, batches in order."""

from __future__ import annotations

import pytest

from specattn.cli.text import OrderedText, TextStream, decode
from tests.cli.command import tokenizer


@pytest.mark.parametrize("sizes", [[1], [2, 1], [5], [100]])
def test_text_arrives_in_whole_characters(sizes):
    text = "naïve 💥 日本語 x\u0301 " + "\N{FAMILY}" * 3 + " end"
    prompt = tokenizer()("# prompt: é").input_ids
    ids = tokenizer()(text).input_ids
    assert len(ids) > len(text)  # some characters take several tokens
    stream, pieces, at = TextStream(tokenizer(), prompt), [], 0
    while at < len(ids):
        for size in sizes:
            pieces.append(stream.feed(ids[at : at + size]))
            at += size
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_that_ends_inside_a_character():
    ids = tokenizer()("ok 💥").input_ids
    stream = TextStream(tokenizer(), [])
    shown = "".join(stream.feed([token]) for token in ids[:-1])
    assert shown == "ok "
    assert stream.finish() == decode(tokenizer(), ids[:-1])[3:]
    assert stream.text == decode(tokenizer(), ids[:-1])


def test_what_may_begin_a_stop_string_is_held_back():
    ids = tokenizer()("one two three four").input_ids
    stream = TextStream(tokenizer(), [], ["two thirds", "four!", "three"])
    pieces = [stream.feed([token]) for token in ids]
    assert "".join(pieces) == stream.text == "one two "
    assert stream.stopped
    assert stream.finish() == ""
    ended = TextStream(tokenizer(), [], ["four!"])
    shown = "".join(ended.feed([token]) for token in ids)
    assert shown == "one two three "
    assert ended.finish() == "four"
    assert ended.text == "one two three four"


def test_a_batch_is_shown_in_order_as_early_as_possible():
    words = [tokenizer()(text).input_ids for text in ("a b c", "d e", "f")]
    ordered = OrderedText([TextStream(tokenizer(), []) for _ in words])
    assert ordered.feed(1, words[1], last=False) == [(0, "")]
    assert ordered.feed(0, words[0], last=False) == [(0, "a b c")]
    assert ordered.feed(2, words[2], last=True) == [(0, "")]
    assert ordered.feed(0, words[1], last=True) == [(0, "d e"), (1, "d e")]
    assert ordered.feed(1, words[2], last=True) == [(1, "f"), (2, "f")]
    assert ordered.finish() == []
