"""The heads that come with the package, over random targets of their models' sizes."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specattn import Engine, Request, SpecConfig
from specattn.errors import ModelError
from specattn.models import HFTarget, fuse, load_draft
from specattn.models.hub import HEADS

NAMES = sorted(folder.name for folder in HEADS.iterdir())


def random_target(**sizes) -> HFTarget:
    torch.manual_seed(0)
    return HFTarget.from_model(LlamaForCausalLM(LlamaConfig(**sizes)).eval())


@pytest.mark.parametrize("name", NAMES)
def test_a_head_drafts_for_a_target_of_its_sizes(name):
    config = json.loads((HEADS / name / "config.json").read_text())
    same = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    layers = max(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) + 4
    target = random_target(
        **{size: config[size] for size in same}, intermediate_size=8, num_hidden_layers=layers
    )
    head = load_draft(name, target)
    prompt = list(range(5, 12))
    plain = Engine(target, None, SpecConfig(0, 1, 1, 64)).generate([Request(prompt, 6)])
    models = fuse(target.with_features(head.features), head)
    drafted = Engine(*models, SpecConfig(2, 1, 3, 64)).generate([Request(prompt, 6)])
    assert drafted[0].tokens == plain[0].tokens


def test_a_head_refuses_another_target():
    other = random_target(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, vocab_size=97,
        intermediate_size=8, num_hidden_layers=30,
    )  # fmt: skip
    with pytest.raises(ModelError, match="smollm2-135m"):
        load_draft("smollm2-135m", other)


def test_a_folder_comes_before_a_name(tmp_path, monkeypatch):
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_draft("smollm2-135m", random_target(
            hidden_size=64, num_attention_heads=2, num_key_value_heads=1, vocab_size=97,
            intermediate_size=8, num_hidden_layers=2,
        ))  # fmt: skip
