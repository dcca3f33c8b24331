"""Whole models of Hugging Face as drafts: loaded, compared with the target, and fused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from specattn import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import ModelError
from specattn.models import FusedTarget, HFTarget, LMDraft, fuse, load_lm_draft
from tests.models.test_checkpoints import save_tokenizer
from tests.models.test_end_to_end import NEW, PROMPTS, greedy
from tests.samples import half, sampled

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = {"a": 0, "b": 1, "c": 2}


def save(model: torch.nn.Module, folder: Path, tokens: dict[str, int] | None) -> Path:
    model.save_pretrained(folder)
    if tokens is not None:
        save_tokenizer(folder, tokens)
    return folder


@sampled(
    half,
    kind=["llama", "gpt_neox", "qwen3"],
    tree={"chain": (3, 1, 4), "tree": (3, 3, 9)},
    fused={"modules": False, "fused": True},
)
def test_a_loaded_model_drafts_what_transformers_generates(
    tiny, tmp_path, kind, tree, fused
) -> None:
    model = tiny("llama", num_hidden_layers=4)
    want = [greedy(model, prompt) for prompt in PROMPTS]
    target = HFTarget.from_model(model)
    draft = load_lm_draft(save(tiny(kind, vocab_size=101), tmp_path, None), target)
    models = fuse(target, draft) if fused else (target, draft)
    assert isinstance(models[1], LMDraft)
    assert isinstance(models[1].model, FusedTarget) == (fused and kind != "gpt_neox")
    engine = Engine(*models, SpecConfig(*tree, 64, 4), backend="torch_native", graphs=False)
    results = engine.generate([Request(p, max_new_tokens=NEW, ignore_eos=True) for p in PROMPTS])
    assert [result.tokens for result in results] == want


def test_a_model_that_drafts_for_itself_is_always_right(tiny, tmp_path) -> None:
    target = HFTarget.from_model(tiny("llama", num_hidden_layers=4))
    draft = load_lm_draft(save(target.module, tmp_path, None), target)
    for models in ((target, draft), fuse(target, draft)):
        engine = Engine(*models, SpecConfig(3, 1, 4, 64, 4), backend="torch_native", graphs=False)
        results = engine.generate([Request(p, 13, ignore_eos=True) for p in PROMPTS])
        assert [result.accept_lens for result in results] == [[4, 4, 4]] * 3


def test_vocabularies_may_be_padded(tiny, tmp_path) -> None:
    target = HFTarget.from_pretrained(save(tiny("llama"), tmp_path / "target", TOKENS))
    wide = tiny("llama", vocab_size=128)
    for more in ({}, {"d": 3}):
        draft = load_lm_draft(save(wide, tmp_path / "same", TOKENS | more), target)
        assert (draft.vocab_size, draft.model.vocab_size) == (101, 128)


def test_without_tokenizers_vocabularies_must_be_of_one_size(tiny, tmp_path) -> None:
    target = HFTarget.from_model(tiny("llama"))
    folder = save(tiny("llama", vocab_size=128), tmp_path, None)
    with pytest.raises(ModelError, match=r"vocab_size 128 in config\.json; the target has 101, a"):
        load_lm_draft(folder, target)


def test_what_cannot_be_loaded_is_the_drafts_fault(tiny, tmp_path) -> None:
    with pytest.raises(ModelError, match="no such folder") as caught:
        load_lm_draft(tmp_path / "absent", HFTarget.from_model(tiny("llama")))
    assert caught.value.argument == "draft"
