"""The example backend of docs/adding_a_backend.md keeps every promise, and decodes."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import specattn.backends as registry
from specattn import Engine, Request, SpecConfig
from specattn.testing.plugin import backend_suite
from tests.test_docs import plain_texts
from tests.tiny import TinyDraft, TinyTarget, dense_greedy

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

sys.path.insert(0, str(EXAMPLES))
from tiny_backend import TinyBackend  # noqa: E402

test_conformance = backend_suite(TinyBackend)


@pytest.fixture
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    registry.register_backend("tiny", "tiny_backend:TinyBackend")


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("setting", [SpecConfig(3, 1, 4), SpecConfig(3, 2, 6)], ids=str)
def test_it_decodes_by_name(setting):
    target, prompt = TinyTarget(device=DEVICE, window=9), [3, 1, 4, 1, 5]
    engine = Engine(target, TinyDraft(device=DEVICE), setting, backend="tiny")
    (result,) = engine.generate([Request(prompt, max_new_tokens=12)])
    assert result.tokens == dense_greedy(target, prompt, 12)


def test_the_page_shows_the_file():
    page = (EXAMPLES.parent / "adding_a_backend.md").read_text()
    source = (EXAMPLES / "tiny_backend.py").read_text()
    for shown in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if "# tiny_backend.py" in shown:
            assert shown.split("\n", 1)[1] in source


def test_a_processor_of_ones_own_writes_what_plain_decoding_writes():
    example = runpy.run_path(str(EXAMPLES / "own_processor.py"))
    texts = example["main"](24)
    assert texts == example["main"](24, speculative=False)
    free = plain_texts(example["PROMPTS"], 24)
    assert texts[::2] == free
    assert all(text != other for text, other in zip(texts[1::2], free, strict=True))
