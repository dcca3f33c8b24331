"""Texts of batches are shown in order."""

from __future__ import annotations

from functools import partial

from specattn.cli.text import OrderedText, decode
from specattn.engine.detokenizer import TextStream
from tests.cli.command import tokenizer


def test_a_batch_is_shown_in_order_as_early_as_possible():
    words = [tokenizer()(text).input_ids for text in ("a b c", "d e", "f")]
    ordered = OrderedText([TextStream(partial(decode, tokenizer()), []) for _ in words])
    assert ordered.feed(1, words[1], last=False) == [(0, "")]
    assert ordered.feed(0, words[0], last=False) == [(0, "a b c")]
    assert ordered.feed(2, words[2], last=True) == [(0, "")]
    assert ordered.feed(0, words[1], last=True) == [(0, "d e"), (1, "d e")]
    assert ordered.feed(1, words[2], last=True) == [(1, "f"), (2, "f")]
    assert ordered.finish() == []
