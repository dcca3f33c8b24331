"""Heads of `bench.tools.train_heads`, as SGLang reads and computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.tools.train_heads.dflash import DFlash
from bench.tools.train_heads.eagle3 import Eagle3
from bench.tools.train_heads.layouts import save
from bench.tools.train_heads.teacher import layers_for
from specattn.models import HFTarget
from tests.integrations.sglang import INSTALLED
from tests.models.conftest import TINY

if TYPE_CHECKING:
    from pathlib import Path

if INSTALLED:
    from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    from tests.integrations.sglang.modules import geometry, run, start

pytestmark = [pytest.mark.sglang]
STATES = (1, 3, 4)


def target() -> HFTarget:
    torch.manual_seed(0)
    settings = TINY | {"head_dim": 16, "num_hidden_layers": 5}
    return HFTarget.from_model(AutoModelForCausalLM.from_config(Qwen2Config(**settings)))


def stored(head: Any, folder: Path) -> None:
    """Store a head that is not as it starts, with weights that bfloat16 has."""
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    save(head, head.settings("sglang", SimpleNamespace(name="a target", layers=5)), folder)


def loaded(model: type, folder: Path) -> Any:
    """Make SGLang's model of its own reading of a folder, no weight left as it was made."""
    start()
    config = get_config(str(folder), trust_remote_code=False)
    assert config.architectures == [model.__name__]
    made = model(config)
    for parameter in made.parameters():
        parameter.data.fill_(torch.nan)
    made.load_weights(safetensors_weights_iterator([str(folder / "model.safetensors")]))
    return made


@torch.no_grad()
def test_sglang_computes_the_eagle3_head(tmp_path) -> None:
    ids = torch.randperm(101)[:37].sort().values
    own, teacher = Eagle3(layers_for(target(), 1, 80), STATES, ids, unroll=2), target()
    stored(own, tmp_path)
    made = loaded(LlamaForCausalLMEagle3, tmp_path)
    # SGLang's draft worker reads it so
    read = made.config.eagle_config["eagle_aux_hidden_state_layer_ids"]
    assert [layer + 1 for layer in read] == list(STATES)
    assert torch.equal(made.get_hot_token_id(), own.draft_ids)
    # the target's embedding is shared; SGLang pads it
    made.model.embed_tokens.weight.data.zero_()[:101] = teacher.embed_tokens.weight
    assert all(parameter.isfinite().all() for parameter in made.parameters())
    tokens, features = torch.randint(0, 101, (1, 12)), torch.randn(1, 12, 3 * 64)
    (first, _) = own.unroll(tokens, teacher.embed_tokens, features)
    got, _ = run(
        made, geometry(made, torch.float32), tokens[0, 1:], torch.arange(11),
        hidden_states=features[0, :11],
    )  # fmt: skip
    want = own.logits(first[0, :11])
    assert (got - want).norm() <= 1e-5 * want.norm()


@torch.no_grad()
def test_sglang_reads_the_dflash_head(tmp_path) -> None:
    own = DFlash(layers_for(target(), 2, 80), STATES, 77, block=6, anchors=2)
    stored(own, tmp_path)
    made = loaded(DFlashDraftModel, tmp_path)
    assert all(parameter.isfinite().all() for parameter in made.parameters())
    settings = parse_dflash_draft_config(draft_hf_config=made.config)
    read = settings.resolve_target_layer_ids(target_num_layers=5)
    assert [layer + 1 for layer in read] == list(STATES)
    assert (made.block_size, settings.mask_token_id, settings.num_target_layers) == (6, 77, 5)
    for layer, block in zip(made.layers, own.layers, strict=True):
        q, k, v = (getattr(block.self_attn, f"{name}_proj").weight for name in "qkv")
        assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat([q, k, v]))
        assert torch.equal(layer.self_attn.k_norm.weight, block.self_attn.k_norm.weight)
        assert torch.equal(layer.mlp.down_proj.weight, block.mlp.down_proj.weight)
    features = torch.randn(7, 3 * 64)
    want = own.hidden_norm(own.fc(features[None]))[0]
    assert (made.project_target_hidden(features) - want).norm() <= 1e-5 * want.norm()
