"""Texts of batches are written in order."""

from __future__ import annotations

import torch

from specattn.cli.output import TextOutput
from specattn.engine.request import Request
from tests.cli.command import loaded, tokenizer


def test_a_batch_is_written_in_order_as_early_as_possible(capsys):
    models = loaded(None, None, speculative=True, dtype=torch.float32, device=torch.device("cpu"))
    words = [tokenizer()(text).input_ids for text in ("a b c", "d e", "f")]
    totals = [len(words[0]) + len(words[1]), len(words[1]) + len(words[2]), len(words[2])]
    requests = [Request([1], total) for total in totals]
    output = TextOutput(models, requests, ["p"] * 3, live=True)
    for index, tokens, written in (
        (1, words[1], "==> 1 <==\n"),
        (0, words[0], "a b c"),
        (2, words[2], ""),  # has ended, and waits
        (0, words[1], "d e\n\n==> 2 <==\nd e"),
        (1, words[2], "f\n\n==> 3 <==\nf"),
    ):
        output.take(index, tokens)
        assert capsys.readouterr().out == written
    output.finish()
    assert capsys.readouterr().out == "\n"
    assert output.texts == ("a b cd e", "d ef", "f")
