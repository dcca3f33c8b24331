"""Fused forwards over SGLang's modules, beside those modules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from specattn.errors import UnsupportedError
from specattn.models.fused.block import GatedFeed
from tests.integrations.sglang import INSTALLED

if INSTALLED:
    from specattn.integrations.sglang.fused import fused_head, fused_target
    from tests.integrations.sglang.modules import build, geometry, run
    from tests.models.conftest import DenseAttend

pytestmark = [pytest.mark.sglang]

IDS = torch.tensor([5, 17, 3, 99, 42, 8, 61, 5, 5])
POSITIONS = torch.arange(40, 49)
CLOSE = {torch.float32: 3e-6, torch.float16: 1e-2}
ODD = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN["original_max_position_embeddings"] = 32


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def weights_of(block):
    products = [block.qkv, block.o]
    if isinstance(block.feed, GatedFeed):
        products += [block.feed.gate_up, block.feed.down]
    return [block.input_norm, block.post_norm, *(one.weight for one in products)]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"attention_bias": True}),
        ("mistral", ODD),
        ("qwen2", {}),
        ("qwen2", ODD | {"tie_word_embeddings": True}),
        ("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
        ("qwen3_moe", EXPERTS),
    ],
)
def test_a_target_is_sglangs_over_the_same_weights(kind, changes, dtype) -> None:
    model = build(kind, dtype, **changes)
    layers = geometry(model, dtype)
    if kind != "mistral":
        model.capture_aux_hidden_states, model.model.layers_to_capture = True, [2, 1]
    if kind == "qwen3_moe":
        # its layers know
        model.model.set_eagle3_layers_to_capture([2, 1])
    target = fused_target(model, layers, max_context_len=128, eos_token_ids=frozenset({2}))
    assert (target.vocab_size, target.eos_token_ids) == (101, {2})
    # what SGLang writes into its weights, the fused forward reads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    want, states = run(model, layers, IDS, POSITIONS)
    rows = torch.tensor([8, 0, 3])
    for wanted in (None, rows):
        attend = DenseAttend(layers).at(POSITIONS)
        got = target.forward(IDS, POSITIONS, attend, wanted)
        assert off(got.logits, want if wanted is None else want[wanted]) < CLOSE[dtype]
        assert off(got.hidden_states, states) < CLOSE[dtype]
    kept = {parameter.data_ptr() for parameter in model.parameters()}
    ends = target.embed_tokens.weight, target.lm_head.weight, target.norm
    blocks = (weight for block in target.blocks for weight in weights_of(block))
    assert {one.data_ptr() for one in (*ends, *blocks)} <= kept
    if dtype == torch.float32:
        table = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
        assert target.blocks[-1].rotation.table.data_ptr() == table.data_ptr()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True}, {"bias": True}])
def test_a_head_is_sglangs_over_the_same_weights(changes, dtype) -> None:
    model = build("eagle3", dtype, num_hidden_layers=1, draft_vocab_size=37, **changes)
    layers = geometry(model, dtype)
    target_ids = torch.randperm(101)[:37]
    head = fused_head(model, layers, target_ids=target_ids)
    assert (head.vocab_size, head.feature_size, head.hidden_size) == (37, 3 * 64, 64)
    assert head.to_target(torch.tensor([3])).equal(target_ids[3:4])
    features = torch.randn(len(IDS), 3 * 64).to(dtype)
    states, rows = features, torch.tensor([8, 3])
    for step in range(2):
        want, wanted_states = run(model, layers, IDS, POSITIONS, hidden_states=states)
        mixed = states if step else head.combine(features)
        attend = DenseAttend(layers).at(POSITIONS)
        got = head.forward(IDS, mixed, POSITIONS, attend, rows)
        assert off(got.logits, want[rows]) < CLOSE[dtype]
        assert off(got.hidden_states, wanted_states[rows]) < CLOSE[dtype]
        states = wanted_states
    kept = {parameter.data_ptr() for parameter in model.parameters()}
    assert {weight.data_ptr() for weight in weights_of(head.blocks[0])} <= kept
    ends = head.embed_tokens.weight, head.lm_head.weight, head.fc.weight
    assert {one.data_ptr() for one in ends} <= kept


def test_a_head_of_the_targets_vocabulary_maps_nothing() -> None:
    model = build("eagle3", torch.float32, num_hidden_layers=1)
    head = fused_head(model, geometry(model, torch.float32))
    assert head.target_ids is None
    assert head.to_target(IDS) is IDS


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"rope_parameters": LLAMA3 | {"rope_type": "dynamic"}}, "rotary_emb is a Dyn"),
        ("llama", {"partial_rotary_factor": 0.5}, "the rotation is not that of two halves"),
        ("eagle3", {"num_hidden_layers": 2}, "the model has 2 layers"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(kind, changes, reason) -> None:
    model = build(kind, torch.float32, **changes)
    layers = geometry(model, torch.float32)
    fuse = fused_head if kind == "eagle3" else partial(fused_target, max_context_len=128)
    with pytest.raises(UnsupportedError, match=reason):
        fuse(model, layers)


def test_changed_modules_are_refused_by_name() -> None:
    """What LoRA, quantisation, other ranks or a subclass put in a module's place."""

    def refusal(layers=None) -> str:
        with pytest.raises(UnsupportedError) as caught:
            fused_target(model, layers or geometry(model, torch.float32), max_context_len=128)
        return str(caught.value)

    model = build("qwen2", torch.float32)
    half = [replace(one, num_qo_heads=2) for one in geometry(model, torch.float32)]
    assert refusal(half).endswith("heads are not this rank's share of the model's")
    layer = model.model.layers[1]
    plain = layer.mlp.down_proj
    layer.mlp.down_proj = torch.nn.Linear(96, 64, bias=False)
    assert refusal().endswith("down_proj is a Linear")
    layer.mlp.down_proj = plain
    plain.quant_method = type("Fp8LinearMethod", (), {})()
    assert refusal().endswith("down_proj has weights of Fp8LinearMethod")
    model.__class__ = type("Derived", (type(model),), {"__module__": "sglang.srt.models.qwen2"})
    assert "model qwen2.Derived is not one of llama.LlamaForCausalLM" in refusal()
    with pytest.raises(UnsupportedError, match="is not one of llama_eagle3"):
        fused_head(model, geometry(model, torch.float32))
