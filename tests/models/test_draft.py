"""EAGLE heads of any published layout compute what the papers say."""

from __future__ import annotations

import json

import pytest
import torch

from specattn.config import AttnConfig
from specattn.models import Eagle3Head, EagleHead, HFTarget, load_draft
from tests.models.heads import (
    CONFIG,
    HT,
    SPECULATORS_NORMS,
    VD,
    T,
    V,
    eagle3_tensors,
    eagle_tensors,
    layer_tensors,
    norm,
    rand,
    speculators_norms,
    write,
)
from tests.models.papers import eagle3_layer, eagle_layer, rms, under

ROWS = torch.tensor([10, 3])


def inputs(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randint(0, V, (T,)), torch.randn(T, width), torch.arange(4, 4 + T)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", ["safetensors", "bin", "sharded"])
def test_eagle_is_the_papers_head(target, dense, tmp_path, layout) -> None:
    tensors = eagle_tensors(biases=("q", "k", "v"))
    head = load_draft(write(tmp_path, tensors, layout=layout), target)
    assert isinstance(head, EagleHead)
    ids, hidden, positions = inputs(HT)
    assert head.combine(hidden) is hidden
    assert head.features == (5,)
    assert (head.hidden_size, head.vocab_size, head.feature_size) == (HT, V, HT)
    assert head.layers == (AttnConfig(4, 2, 24),)
    assert head.to_target(ids) is ids

    x = torch.cat([tensors["embed_tokens.weight"][ids].double(), hidden.double()], -1)
    x = x @ tensors["fc.weight"].double().T + tensors["fc.bias"].double()
    want = eagle_layer(x, under(tensors, "layers.0."), positions)
    for rows in (None, ROWS):
        out = head.forward(ids, hidden, positions, dense(head.layers).at(positions), rows)
        wanted = want if rows is None else want[rows]
        close(out.hidden_states, wanted)
        close(out.logits, wanted @ target.lm_head.weight.double().T)


def test_eagle_with_two_layers_its_own_lm_head_and_the_targets_embedding(
    target, dense, tmp_path
) -> None:
    tensors = eagle_tensors() | layer_tensors("layers.1.", HT, wide=False)
    del tensors["embed_tokens.weight"], tensors["fc.bias"]
    for layer in (0, 1):
        tensors[f"layers.{layer}.input_layernorm.weight"] = norm(HT)
    tensors["lm_head.weight"] = rand(V, HT)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)  # written by old libraries
    stored = {f"model.{key}": tensor for key, tensor in tensors.items()}
    head = load_draft(write(tmp_path, stored, num_hidden_layers=2), target)

    ids, hidden, positions = inputs(HT)
    x = torch.cat([target.embed_tokens.weight[ids].double(), hidden.double()], -1)
    x = x @ tensors["fc.weight"].double().T
    for layer in (0, 1):
        x = eagle_layer(x, under(tensors, f"layers.{layer}."), positions)
    out = head.forward(ids, hidden, positions, dense(head.layers).at(positions), ROWS)
    close(out.hidden_states, x[ROWS])
    close(out.logits, x[ROWS] @ tensors["lm_head.weight"].double().T)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", ["safetensors", "bin", "sharded"])
@pytest.mark.parametrize("hidden_size", [HT, 48])
def test_eagle3_is_the_papers_head(target, dense, tmp_path, layout, hidden_size) -> None:
    tensors = eagle3_tensors(hidden_size)
    if hidden_size != HT:
        tensors["embed_tokens.weight"] = rand(V, hidden_size)
    changes = {"hidden_size": hidden_size, "draft_vocab_size": VD, "rope_theta": 700.0}
    head = load_draft(write(tmp_path, tensors, layout=layout, **changes), target)
    assert isinstance(head, Eagle3Head)
    assert (head.hidden_size, head.vocab_size, head.feature_size) == (hidden_size, VD, 3 * HT)
    assert head.layers == (AttnConfig(4, 2, 24),)

    ids, features, positions = inputs(3 * HT)
    combined = head.combine(features)
    x = features.double() @ tensors["fc.weight"].double().T
    close(combined, x)
    table = tensors.get("embed_tokens.weight", target.embed_tokens.weight).double()
    want = eagle3_layer(table[ids], x, under(tensors, "midlayer."), positions, 700.0)
    logits = rms(want, tensors["norm.weight"].double()) @ tensors["lm_head.weight"].double().T
    for rows in (None, ROWS):
        attend = dense(head.layers).at(positions)
        out = head.forward(ids, combined, positions, attend, rows)
        close(out.hidden_states, want if rows is None else want[rows])
        close(out.logits, logits if rows is None else logits[rows])

    kept = tensors["t2d"].nonzero()[:, 0]
    assert torch.equal(head.to_target(torch.arange(VD)), kept)
    assert torch.equal(head.to_target(torch.tensor([[3, 0]])), kept[torch.tensor([[3, 0]])])


BIASES = {
    "fc.bias": HT,
    "lm_head.bias": VD,
    **{f"midlayer.self_attn.{one}_proj.bias": size for one, size in (("q", 96), ("o", HT))},
    **{f"midlayer.mlp.{one}_proj.bias": size for one, size in (("up", 80), ("down", HT))},
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_eagle3_with_biases_and_other_activations(target, dense, tmp_path, act) -> None:
    tensors = eagle3_tensors() | {name: rand(size) for name, size in BIASES.items()}
    head = load_draft(write(tmp_path, tensors, hidden_act=act), target)
    ids, features, positions = inputs(3 * HT)
    combined = head.combine(features)
    x = features.double() @ tensors["fc.weight"].double().T + tensors["fc.bias"].double()
    close(combined, x)
    embeds = target.embed_tokens.weight[ids].double()
    want = eagle3_layer(embeds, x, under(tensors, "midlayer."), positions, 5000.0, act=act)
    out = head.forward(ids, combined, positions, dense(head.layers).at(positions), ROWS)
    close(out.hidden_states, want[ROWS])
    logits = rms(want, tensors["norm.weight"].double()) @ tensors["lm_head.weight"].double().T
    close(out.logits, (logits + tensors["lm_head.bias"].double())[ROWS])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("norms", SPECULATORS_NORMS, ids=" ".join)
def test_eagle3_with_the_norms_of_vllms_speculators(target, dense, tmp_path, norms) -> None:
    tensors = eagle3_tensors() | speculators_norms(norms)
    ids, features, positions = inputs(3 * HT)
    x = features.double()
    if "norm_before_fc" in norms:
        x = rms(x, tensors["input_norm.weight"].double())
    if "fc_norm" in norms:
        parts = [
            rms(part, tensors[f"fc_norm.{i}.weight"].double())
            for i, part in enumerate(x.chunk(3, -1))
        ]
        x = torch.cat(parts, -1)
    head = load_draft(write(tmp_path, tensors, **dict.fromkeys(norms, True)), target)
    combined = head.combine(features)
    x = x @ tensors["fc.weight"].double().T
    close(combined, x)
    states = eagle3_layer(
        target.embed_tokens.weight[ids].double(),
        x,
        under(tensors, "midlayer."),
        positions,
        5000.0,
        norm_before_residual="norm_before_residual" in norms,
    )
    normed = rms(states, tensors["norm.weight"].double())
    want = normed if "norm_output" in norms else states
    out = head.forward(ids, combined, positions, dense(head.layers).at(positions), ROWS)
    close(out.hidden_states, want[ROWS])
    close(out.logits, normed[ROWS] @ tensors["lm_head.weight"].double().T)


@pytest.mark.parametrize("tensors", [eagle_tensors, eagle3_tensors])
def test_tokens_may_share_the_state_they_continue(target, dense, tmp_path, tensors) -> None:
    head = load_draft(write(tmp_path, tensors()), target)
    ids, hidden, positions = inputs(HT)
    sources = torch.tensor([1, 0, 1, 2] * T)[:T]
    got = head.forward(
        ids, hidden[:3], positions, dense(head.layers).at(positions), ROWS, sources=sources
    )
    want = head.forward(ids, hidden[sources], positions, dense(head.layers).at(positions), ROWS)
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.hidden_states, want.hidden_states)


def test_eagle3_under_other_names_shares_lm_head_and_vocabulary(target, dense, tmp_path) -> None:
    tensors = eagle3_tensors()
    for key in ("lm_head.weight", "d2t", "t2d"):
        del tensors[key]
    stored = {f"model.{k.replace('midlayer.', 'layers.0.')}": t for k, t in tensors.items()}
    head = load_draft(write(tmp_path / "other", stored), target)
    assert head.vocab_size == V
    assert torch.equal(head.to_target(torch.arange(V)), torch.arange(V))
    plain = load_draft(write(tmp_path / "plain", tensors), target)
    ids, hidden, positions = inputs(HT)
    a, b = (h.forward(ids, hidden, positions, dense(h.layers).at(positions)) for h in (head, plain))
    assert torch.equal(a.logits, b.logits)
    normed = rms(a.hidden_states.double(), tensors["norm.weight"].double())
    close(a.logits, normed @ target.lm_head.weight.double().T)


@pytest.mark.parametrize(("ids", "want"), [(None, (2, 2, 2)), ([0, 3, 4], (0, 3, 4))])
def test_eagle3_in_the_format_of_vllms_speculators(target, dense, tmp_path, ids, want) -> None:
    """Its settings are nested, and its ids are of layers that hidden states enter."""
    tensors = eagle3_tensors()
    plain = load_draft(write(tmp_path / "plain", tensors), target)
    layer = {"transformer_layer_config": {**CONFIG, "torch_dtype": "bfloat16"}}
    top = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": VD,
        "eagle_aux_hidden_state_layer_ids": ids,
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
    }
    stored = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
    folder = write(tmp_path / "other", stored)
    (folder / "config.json").write_text(json.dumps(top | layer))
    head = load_draft(folder, target)
    assert head.features == want
    tokens, hidden, positions = inputs(HT)
    a, b = (
        h.forward(tokens, hidden, positions, dense(h.layers).at(positions)) for h in (head, plain)
    )
    assert torch.equal(a.logits, b.logits)


def test_which_of_a_checkpoints_settings_win(target, tmp_path) -> None:
    """Its own over those of a nested layer, and those of ``eagle_config`` over both."""
    ids = "eagle_aux_hidden_state_layer_ids"
    changes = {
        "rope_theta": 700.0,
        "rms_norm_eps": 1e-5,
        ids: [0, 1, 2],
        "transformer_layer_config": {"rope_theta": 9.0, "rms_norm_eps": 0.1, "hidden_act": "gelu"},
        "eagle_config": {ids: [1, 2, 3], "rms_norm_eps": 1e-3},
    }
    head = load_draft(write(tmp_path, eagle3_tensors(), **changes), target)
    config = head.blocks[0].rotary.rotary.config
    assert config.rope_parameters["rope_theta"] == 700.0
    assert config.rms_norm_eps == 1e-3
    assert config.hidden_act == "gelu"
    assert head.blocks[0].feed.activation is not None
    assert head.features == (2, 3, 4)


@pytest.mark.parametrize(
    ("layers", "settings", "want"),
    [
        (5, {}, (2, 2, 2)),
        (12, {}, (2, 6, 9)),
        (3, {}, (2, 1, 0)),
        (2, {}, (1, 1, 0)),
        (12, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}, (2, 6, 9)),
        (12, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 10]}}, (1, 11)),
        (12, {"eagle_aux_hidden_state_layer_ids": [10, 0, 5]}, (11, 1, 6)),
        (12, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 6, 9)),
        (12, {"eagle_config": {"use_aux_hidden_state": False}}, (12,)),
    ],
)
def test_features(tiny, tmp_path, layers, settings, want) -> None:
    target = HFTarget.from_model(tiny("llama", num_hidden_layers=layers))
    folder = write(tmp_path, eagle3_tensors(features=len(want)), **settings)
    assert load_draft(folder, target).features == want


def test_head_without_fc_over_the_last_hidden_state(target, tmp_path) -> None:
    tensors = eagle3_tensors()
    del tensors["fc.weight"]
    folder = write(tmp_path, tensors, eagle_config={"use_aux_hidden_state": False})
    hidden = torch.randn(T, HT)
    assert torch.equal(load_draft(folder, target).combine(hidden), hidden)


def test_scaled_rope_and_dtype(target, dense, tmp_path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    folder = write(tmp_path, eagle_tensors(), rope_scaling=scaling)
    head, plain = load_draft(folder, target), load_draft(write(tmp_path, eagle_tensors()), target)
    ids, hidden, positions = inputs(HT)
    attend = dense(head.layers)
    scaled = head.forward(ids, hidden, positions * 4, attend.at(positions))
    want = plain.forward(ids, hidden, positions, dense(head.layers).at(positions))
    torch.testing.assert_close(scaled.logits, want.logits)

    half = load_draft(folder, target, dtype=torch.bfloat16)
    assert half.layers[0].dtype == half.combine(hidden).dtype == torch.bfloat16
    attend = dense(half.layers).at(positions)
    out = half.forward(ids, half.combine(hidden), positions, attend)
    assert out.hidden_states.dtype == torch.bfloat16
    assert out.logits.dtype == target.dtype
