"""Texts of batches are written in order."""

from __future__ import annotations

import io
import re
import sys

import pytest
import torch
from rich.console import Console

from specattn.cli.output import TextOutput
from specattn.cli.prompts import Prompts
from specattn.cli.report import table
from specattn.engine.request import Request
from tests.cli.command import loaded, tokenizer


def test_a_batch_is_written_in_order_as_early_as_possible(capsys):
    models = loaded(None, None, speculative=True, dtype=torch.float32, device=torch.device("cpu"))
    words = [tokenizer()(text).input_ids for text in ("a b c", "d e", "f")]
    requests = [
        Request([1], len(words[0]) + len(words[1])),
        Request([1], len(words[1]) + len(words[2])),
        Request([1], 99, stop=["f~"]),  # "f" may be its beginning, until the text ends
    ]
    output = TextOutput(models, requests, Prompts(("p",) * 3, batch=True), live=True)
    for index, tokens, written in (
        (1, words[1], "==> 1 <==\n"),
        (0, words[0], "a b c"),
        (2, [*words[0], *words[2]], ""),
        (0, words[1], "d e\n\n==> 2 <==\nd e"),
        (1, words[2], "f\n\n==> 3 <==\na b c"),
    ):
        output.take(index, tokens)
        assert capsys.readouterr().out == written
    output.finish()
    assert capsys.readouterr().out == "f\n"
    assert output.texts == ("a b cd e", "d ef", "a b cf")


@pytest.mark.parametrize(("chat", "shown"), [(False, "p?a b c\n"), (True, "p?\na b c\n")])
def test_on_a_terminal_an_answer_begins_below_its_message(capsys, monkeypatch, chat, shown):
    models = loaded(None, None, speculative=True, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = TextOutput(models, [Request([1], 99)], Prompts(("p?",), False, chat), live=True)
    output.take(0, tokenizer()("a b c").input_ids)
    output.finish()
    # without the colours of the prompt
    assert re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out) == shown


@pytest.mark.parametrize("width", [12, 60])
def test_tables_cut_no_name(width):
    """Where there is no room, it goes on in the next line."""
    console = Console(file=io.StringIO(), width=width)
    console.print(table(["accepted/step"], [["triton_sharing"], [0.5]], left=()))
    shown = "".join(console.file.getvalue().split())
    assert shown == "accepted/steptriton_sharing0.50"
