"""Fused forwards over SGLang's modules, beside those modules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from specattn.cache.kv_pool import KVPool
from specattn.errors import UnsupportedError
from specattn.models.fused.block import GatedFeed
from specattn.speculative.proposers.block import BlockShape, BlockView
from tests.integrations.sglang import INSTALLED

if INSTALLED:
    from specattn.integrations.sglang.blocks import BlockHead
    from specattn.integrations.sglang.fused import fused_block_head, fused_head, fused_target
    from specattn.integrations.sglang.modules import join_states
    from specattn.integrations.sglang.weights import Weights
    from tests.integrations.sglang.modules import build, geometry, run, run_block
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
#: Windows of five tokens, a base of rotations for each kind of layer, one of them scaled.
GEMMA3 = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 50,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
BY_LENGTH = {
    "rope_parameters": {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN["original_max_position_embeddings"] = 32


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def weights_of(block):
    products = [block.qkv, block.o]
    if isinstance(block.feed, GatedFeed):
        products += [block.feed.gate_up, block.feed.down]
    weights = [one.weight for one in products]
    # a family's sums are its own
    return (
        weights
        if block.added_norms[0] is not None
        else [block.input_norm, block.post_norm, *weights]
    )


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
        ("gemma3_text", GEMMA3),
    ],
)
def test_a_target_is_sglangs_over_the_same_weights(kind, changes, dtype) -> None:
    model = build(kind, dtype, **changes)
    layers = geometry(model, dtype)
    join_states(model)
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
    # after which sums are made anew
    assert not Weights.of(model).follow()
    want, states = run(model, layers, IDS, POSITIONS)
    rows = torch.tensor([8, 0, 3])
    for wanted in (None, rows):
        attend = DenseAttend(layers).at(POSITIONS)
        got = target.forward(IDS, POSITIONS, attend, wanted)
        assert off(got.logits, want if wanted is None else want[wanted]) < CLOSE[dtype]
        assert off(got.hidden_states, states) < CLOSE[dtype]
    kept = {parameter.data_ptr() for parameter in model.parameters()}
    ends = [target.embed_tokens.weight, target.lm_head.weight]
    ends += [] if kind == "gemma3_text" else [target.norm]
    blocks = (weight for block in target.blocks for weight in weights_of(block))
    assert {one.data_ptr() for one in (*ends, *blocks)} <= kept
    if dtype == torch.float32 and kind != "gemma3_text":
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


def block_head(size: int = 9, windows: tuple[int, ...] = (-1, -1)) -> BlockHead:
    views = (BlockView(False, True),) * len(windows)
    return BlockHead(BlockShape(size, 7, 1, views), (1, 2), windows, 0.25)


BLOCKS = {"num_hidden_layers": 2, "layer_types": None, "block_size": 9}
BLOCKS |= {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1]}}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}])
def test_a_block_head_is_sglangs_over_the_same_weights(changes, dtype) -> None:
    model, target = build("dflash", dtype, **BLOCKS | changes), build("qwen3", dtype)
    layers = geometry(model, dtype)
    head = fused_block_head(model, target, layers, block_head())
    assert (head.vocab_size, head.feature_size, head.hidden_size) == (101, 2 * 64, 64)
    embeds, rows = target.get_input_embeddings()(IDS), torch.tensor([8, 0, 3])
    states = run_block(model, layers, POSITIONS, embeds)[rows]
    want = 0.25 * states.float() @ target.lm_head.weight[:101].float().T
    attend = DenseAttend(layers).at(POSITIONS)
    assert off(head.forward_block(IDS, POSITIONS, attend, rows), want) < CLOSE[dtype]
    features, pool = torch.randn(9, 2 * 64).to(dtype), KVPool(layers, 10, "cpu")
    context, slots = model.project_target_hidden(features), torch.arange(1, 10).int()[None]
    head.write_context(head.combine(features), POSITIONS, pool, slots)
    for at, layer in enumerate(model.layers):
        keys, values = layer.self_attn.kv_proj_only(context)
        keys = layer.self_attn.apply_k_rope(POSITIONS, layer.self_attn.apply_k_norm(keys))
        assert off(pool.k[at, 1:].flatten(1), keys) < CLOSE[dtype]
        assert off(pool.v[at, 1:].flatten(1), values) < CLOSE[dtype]
    kept = {one.data_ptr() for owner in (model, target) for one in owner.parameters()}
    ends = head.embed_tokens.weight, head.lm_head.weight, head.norm, head.hidden_norm
    blocks = (weight for block in head.blocks for weight in weights_of(block))
    assert {one.data_ptr() for one in (*ends, head.fc.weight, *blocks)} <= kept


def test_a_block_head_that_does_not_fit_is_refused() -> None:
    model, target = build("dflash", torch.float32, **BLOCKS), build("qwen3", torch.float32)
    layers = geometry(model, torch.float32)
    windows = r"SGLang's layers have windows \(-1, -1\), and config.json means \(-1, 6\)"
    with pytest.raises(UnsupportedError, match=windows):
        fused_block_head(model, target, layers, block_head(windows=(-1, 6)))
    wide = build("qwen3", torch.float32, hidden_size=72)
    with pytest.raises(
        UnsupportedError, match="hidden states have 64 numbers, and the target's 72"
    ):
        fused_block_head(model, wide, layers, block_head())
    with pytest.raises(UnsupportedError, match=r"qwen3.Qwen3ForCausalLM is not one of dflash\."):
        fused_block_head(target, target, layers, block_head())


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
        ("gemma3_text", GEMMA3 | {"tie_word_embeddings": False}, "lm_head is not the embedding"),
        ("gemma3_text", GEMMA3 | BY_LENGTH, r"rotary_emb rotates by length \(dynamic\)"),
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
    plain.quant_method = type("AWQLinearMethod", (), {})()
    assert refusal().endswith("down_proj has weights of AWQLinearMethod")
    model.__class__ = type("Derived", (type(model),), {"__module__": "sglang.srt.models.qwen2"})
    assert "model qwen2.Derived is not one of llama.LlamaForCausalLM" in refusal()
    with pytest.raises(UnsupportedError, match="is not one of llama_eagle3"):
        fused_head(model, geometry(model, torch.float32))
