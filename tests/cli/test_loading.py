"""What is shown while models load."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from specattn.cli import loading
from tests.cli.command import PAIR, load_models


def test_a_terminal_shows_how_many_weights_are_loaded(monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(loading, "stderr", lambda: console)
    options = {"speculative": True, "dtype": torch.float32, "device": torch.device("cpu")}
    load_models(None, None, **options)
    with safe_open(PAIR / "target" / "model.safetensors", "torch") as file:
        count = len(file.keys())
    assert f"{count}/{count}" in shown.getvalue()
    # it is gone from the screen, and from transformers
    assert shown.getvalue().endswith("\x1b[2K")
    assert transformers_logging.set_tqdm_hook(None) is None


def test_no_terminal_shows_nothing(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(loading, "stderr", lambda: Console(file=shown))
    load_models(
        str(PAIR / "target"),
        None,
        speculative=False,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert shown.getvalue() == ""
