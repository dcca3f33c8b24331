"""R74: huggingface/transformers#46936.

An assistant with another tokenizer crashed in the midst of decoding, at the first token that the
target has not.

Before anything runs, a draft of another vocabulary is refused: whole models and heads by the first
token that differs, or by their sizes, and drafts that are made by hand by the first id that the
target has not.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specattn
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.errors import ModelError
from specattn.models import HFTarget, load_draft, load_lm_draft
from tests.models.conftest import TINY
from tests.models.heads import eagle3_tensors, eagle_tensors, write
from tests.models.test_checkpoints import save_tokenizer
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

TOKENS = {"a": 0, "b": 1, "c": 2}
OTHERS = {"a": 0, "c": 1, "b": 2}
NAMED = "has another tokenizer than the target.* has 'c' as token 1, the target has 'b'"


def model(**changes) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY | changes)).eval()


@pytest.fixture
def target(tmp_path) -> HFTarget:
    model(num_hidden_layers=4).save_pretrained(tmp_path / "target")
    save_tokenizer(tmp_path / "target", TOKENS)
    return HFTarget.from_pretrained(tmp_path / "target")


def test_a_whole_model_with_another_tokenizer(target, tmp_path):
    """Of the same size, and of another."""
    for size in (101, 1200):
        folder = tmp_path / f"model {size}"
        model(vocab_size=size).save_pretrained(folder)
        if size != 101:
            with pytest.raises(
                ModelError, match=r"has vocab_size 1200 in config\.json.* the target"
            ):
                load_lm_draft(folder, target)
        save_tokenizer(folder, OTHERS)
        with pytest.raises(ModelError, match=NAMED) as caught:
            load_lm_draft(folder, target)
        assert caught.value.argument == "draft"


@pytest.mark.parametrize("tensors", [eagle_tensors, eagle3_tensors])
def test_a_head_with_another_tokenizer(target, tmp_path, tensors):
    folder = write(tmp_path / "head", tensors())
    assert load_draft(folder, target).vocab_size
    save_tokenizer(folder, OTHERS)
    with pytest.raises(ModelError, match=NAMED) as caught:
        load_draft(folder, target)
    assert caught.value.argument == "draft"
    # inside transformers, too
    ids = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 4}
    target.module.name_or_path = str(tmp_path / "target")
    with pytest.raises(ModelError, match=NAMED):
        specattn.generate(target.module, **ids, draft=folder)


def test_an_assistant_with_another_tokenizer(target, tmp_path):
    """Of transformers' own `generate`."""
    target.module.name_or_path = str(tmp_path / "target")
    ids = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 4}
    assistant = model()
    assistant.save_pretrained(tmp_path / "assistant")
    save_tokenizer(tmp_path / "assistant", OTHERS)
    assistant.name_or_path = str(tmp_path / "assistant")
    with pytest.raises(ModelError, match="^assistant_model: .*" + NAMED):
        specattn.generate(target.module, **ids, assistant_model=assistant)
    with pytest.raises(ModelError, match=r"^assistant_model: .*vocab_size 1200 in config\.json"):
        specattn.generate(target.module, **ids, assistant_model=model(vocab_size=1200))


@pytest.mark.parametrize("shift", [1, -1])
def test_a_draft_by_hand_whose_tokens_the_target_has_not(shift):
    draft = TinyDraft(device=DEVICE)
    draft.to_target = lambda ids: ids + shift
    with pytest.raises(ValueError, match=r"tokens 0\.\.60, got " + ("61" if shift > 0 else "-1")):
        Engine(TinyTarget(device=DEVICE), draft, SpecConfig(3, 1, 4, 64, 2))
