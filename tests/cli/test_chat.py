"""Prompts as messages of the tokenizer's chat template."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from specattn.cli import loading
from tests.cli.command import (
    COUNT,
    ON_CPU,
    OTHERS,
    PROMPT,
    generate,
    generated,
    loaded,
    plain_tokens,
    refused,
    tokenizer,
)

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and m.content == 'no' %}{{ raise_exception('no system') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# answer:{% endif %}"
)


@pytest.fixture
def template(monkeypatch):
    """The pair, whose tokenizer has a chat template."""
    device = torch.device("cpu")
    models = loaded(None, None, speculative=True, dtype=torch.float32, device=device)
    chatty = copy.deepcopy(models.tokenizer)
    chatty.chat_template = TEMPLATE
    monkeypatch.setattr(
        loading, "load_models", lambda *args, **kwargs: replace(models, tokenizer=chatty)
    )


def test_a_prompt_is_a_message(template):
    found = generated("--chat", PROMPT)
    assert found["tokens"] == plain_tokens(f"# user: {PROMPT}\n# answer:", COUNT)
    assert found["tokens"] != plain_tokens(PROMPT, COUNT)


def test_a_system_message_comes_first(template, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(text.strip() for text in OTHERS))
    found = generated("--chat", "--system", "be brief", "--prompts", str(file), count=8)
    for one, text in zip(found, OTHERS, strict=True):
        asked = f"# system: be brief\n# user: {text.strip()}\n# answer:"
        assert one["tokens"] == plain_tokens(asked, 8)


def test_without_chat_the_template_is_not_used(template):
    assert generated(PROMPT)["tokens"] == plain_tokens(PROMPT, COUNT)


def test_a_template_that_refuses_a_message(template):
    line = "--system: the target's chat template fails: no system"
    assert refused("generate", *ON_CPU, "--chat", "--system", "no", "p") == line


def test_a_long_chat_is_refused(template):
    used = len(tokenizer()(f"# user: {PROMPT}\n# answer:").input_ids)
    line = f"PROMPT: the prompt has {used} tokens, the context holds {used - 1}"
    options = "--chat", "--max-context", str(used - 1)
    assert refused("generate", *ON_CPU, *options, PROMPT) == line


def test_the_text_is_the_answer_alone(template):
    assert "# user" not in generate("--chat", "x = 1", count=4).stdout


def test_the_end_of_a_turn_ends_the_answer(template, monkeypatch):
    """It is the tokenizer's alone, as in many models for chats."""
    ids = plain_tokens(f"# user: {PROMPT}\n# answer:", COUNT)
    end = ids[9]
    models = loading.load_models()
    chatty = copy.deepcopy(models.tokenizer)
    chatty.eos_token = chatty.convert_ids_to_tokens(end)
    monkeypatch.setattr(
        loading, "load_models", lambda *args, **kwargs: replace(models, tokenizer=chatty)
    )
    want = ids[: ids.index(end)]
    found = generated("--chat", PROMPT)
    assert (found["tokens"], found["finish_reason"]) == ([*want, end], "eos")
    assert generate("--chat", PROMPT, count=COUNT).stdout.strip() == found["text"].strip()
    assert found["text"] == loading.decode(tokenizer(), want)
