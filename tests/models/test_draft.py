from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from specattn.config import AttnConfig
from specattn.errors import ModelError
from specattn.models import Eagle3Head, EagleHead, FeatureSpec, HFTarget, load_draft

if TYPE_CHECKING:
    from pathlib import Path

V, VD, HT, T = 101, 37, 64, 11  # target vocabulary and hidden size as in conftest; draft; tokens
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HT,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": V,
    "torch_dtype": "float32",
}
ROWS = torch.tensor([10, 3])

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def target(tiny) -> HFTarget:
    return HFTarget.from_model(tiny("llama", num_hidden_layers=5))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)


def norm(size: int) -> torch.Tensor:
    return 1 + 0.3 * torch.randn(size)


def layer_tensors(prefix: str, hidden: int, *, wide: bool, biases: tuple[str, ...] = ()) -> Tensors:
    width = 2 * hidden if wide else hidden
    sizes = {
        "q": (4 * 24, width),
        "k": (2 * 24, width),
        "v": (2 * 24, width),
        "o": (hidden, 4 * 24),
    }
    tensors = {f"self_attn.{n}_proj.weight": rand(*size) for n, size in sizes.items()}
    tensors |= {f"self_attn.{n}_proj.bias": rand(sizes[n][0]) for n in biases}
    tensors |= {f"mlp.{n}_proj.weight": rand(80, hidden) for n in ("gate", "up")}
    tensors |= {"mlp.down_proj.weight": rand(hidden, 80)}
    tensors |= {"post_attention_layernorm.weight": norm(hidden)}
    return {prefix + key: tensor for key, tensor in tensors.items()}


def eagle_tensors(biases: tuple[str, ...] = ()) -> Tensors:
    torch.manual_seed(1)
    return {
        "embed_tokens.weight": rand(V, HT),
        "fc.weight": rand(HT, 2 * HT),
        "fc.bias": rand(HT),
    } | layer_tensors("layers.0.", HT, wide=False, biases=biases)


def eagle3_tensors(hidden: int = HT, features: int = 3) -> Tensors:
    torch.manual_seed(2)
    chosen = torch.randperm(V)[:VD].sort().values
    return {
        "fc.weight": rand(hidden, features * HT),
        "norm.weight": norm(hidden),
        "lm_head.weight": rand(VD, hidden),
        "d2t": chosen - torch.arange(VD),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, chosen, True),
        "midlayer.input_layernorm.weight": norm(hidden),
        "midlayer.hidden_norm.weight": norm(hidden),
    } | layer_tensors("midlayer.", hidden, wide=True)


def write(folder: Path, tensors: Tensors, *, layout: str = "safetensors", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if layout == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif layout == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        names = sorted(tensors)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, keys in shards.items():
            save_file({key: tensors[key] for key in keys}, folder / file)
        where = {key: file for file, keys in shards.items() for key in keys}
        index = json.dumps({"metadata": {}, "weight_map": where})
        (folder / "model.safetensors.index.json").write_text(index)
    return folder


# The papers' heads in plain torch, float64, over one request of T tokens.


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (torch.arange(half).double() / half)  # [T, D / 2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(x: torch.Tensor, w: Tensors, positions: torch.Tensor, theta: float) -> torch.Tensor:
    def project(name: str) -> torch.Tensor:
        return x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", torch.zeros(()))

    q, k, v = (project(name).unflatten(-1, (-1, 24)) for name in "qkv")
    q, k = rotate(q, positions, theta), rotate(k, positions, theta)
    out = torch.empty_like(q)
    for head in range(4):
        logits = q[:, head] @ k[:, head // 2].T * 24**-0.5
        logits = logits.masked_fill(positions[:, None] < positions, -torch.inf)
        out[:, head] = logits.softmax(-1) @ v[:, head // 2]
    return out.flatten(1) @ w["o_proj.weight"].T + w.get("o_proj.bias", torch.zeros(()))


def mlp(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    gate = x @ w["gate_proj.weight"].T
    return (gate * gate.sigmoid() * (x @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T


def under(tensors: Tensors, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v.double() for k, v in tensors.items() if k.startswith(prefix)}


def eagle_layer(
    x: torch.Tensor, w: Tensors, positions: torch.Tensor, theta: float = 5000.0
) -> torch.Tensor:
    y = rms(x, w["input_layernorm.weight"]) if "input_layernorm.weight" in w else x
    x = x + attention(y, under(w, "self_attn."), positions, theta)
    return x + mlp(rms(x, w["post_attention_layernorm.weight"]), under(w, "mlp."))


def eagle3_layer(
    embeds: torch.Tensor, x: torch.Tensor, w: Tensors, positions: torch.Tensor, theta: float
) -> torch.Tensor:
    both = [rms(embeds, w["input_layernorm.weight"]), rms(x, w["hidden_norm.weight"])]
    x = x + attention(torch.cat(both, -1), under(w, "self_attn."), positions, theta)
    return x + mlp(rms(x, w["post_attention_layernorm.weight"]), under(w, "mlp."))


def inputs(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randint(0, V, (T,)), torch.randn(T, width), torch.arange(4, 4 + T)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def refusal(folder: Path, target: HFTarget) -> str:
    with pytest.raises(ModelError) as caught:
        load_draft(folder, target)
    assert caught.value.argument == "draft"
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder} ")


@pytest.mark.parametrize("layout", ["safetensors", "bin", "sharded"])
def test_eagle_is_the_papers_head(target, dense, tmp_path, layout) -> None:
    tensors = eagle_tensors(biases=("q", "k", "v"))
    head = load_draft(write(tmp_path, tensors, layout=layout), target)
    assert isinstance(head, EagleHead)
    ids, hidden, positions = inputs(HT)
    assert head.combine(hidden) is hidden
    assert head.features == FeatureSpec((5,))
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


def test_eagle3_steps_one_by_one_like_all_at_once(target, dense, tmp_path) -> None:
    head = load_draft(write(tmp_path, eagle3_tensors()), target)
    ids, hidden, positions = inputs(HT)
    want = head.forward(ids, hidden, positions, dense(head.layers).at(positions))
    attend = dense(head.layers)
    for i in range(T):
        one = slice(i, i + 1)
        out = head.forward(ids[one], hidden[one], positions[one], attend.at(positions[one]))
        torch.testing.assert_close(out.logits, want.logits[one], atol=1e-5, rtol=1e-5)


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
    assert torch.equal(a.logits, target.lm_head(head.weights.norm(a.hidden_states)))


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
        (12, {"eagle_config": {"use_aux_hidden_state": False}}, (12,)),
    ],
)
def test_features(tiny, tmp_path, layers, settings, want) -> None:
    target = HFTarget.from_model(tiny("llama", num_hidden_layers=layers))
    folder = write(tmp_path, eagle3_tensors(features=len(want)), **settings)
    assert load_draft(folder, target).features.hidden_states == want


def test_head_without_fc_over_the_last_hidden_state(target, tmp_path) -> None:
    tensors = eagle3_tensors()
    del tensors["fc.weight"]
    folder = write(tmp_path, tensors, eagle_config={"use_aux_hidden_state": False})
    hidden = torch.randn(T, HT)
    assert torch.equal(load_draft(folder, target).combine(hidden), hidden)


def test_features_come_from_the_target(target, dense, tmp_path) -> None:
    head = load_draft(write(tmp_path, eagle3_tensors()), target)
    ids, positions = torch.arange(T), torch.arange(T)
    reading = target.with_features(head.features)
    out = reading.forward(ids, positions, dense(target.layers).at(positions))
    assert out.hidden_states.shape == (T, head.feature_size)
    assert head.combine(out.hidden_states).shape == (T, head.hidden_size)


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


def test_missing_files(target, tmp_path) -> None:
    assert refusal(tmp_path / "absent", target) == f"no such folder: {tmp_path / 'absent'}"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert refusal(tmp_path, target) == "has neither model.safetensors nor pytorch_model.bin"
    (tmp_path / "config.json").unlink()
    assert refusal(tmp_path, target) == "has no config.json"
    write(tmp_path, eagle3_tensors(), layout="sharded")
    (tmp_path / "b.safetensors").unlink()
    assert refusal(tmp_path, target) == "lacks the file b.safetensors"


def test_corrupt_files(target, tmp_path) -> None:
    write(tmp_path, eagle3_tensors())
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert refusal(tmp_path, target) == "has corrupt weight files"
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": HFTarget}, tmp_path / "pytorch_model.bin")  # a class: code, in effect
    assert "corrupt or hold more than tensors" in refusal(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path, target).startswith("cannot be loaded: Expecting property name")


def test_every_wrong_tensor_is_named(target, tmp_path) -> None:
    tensors = eagle3_tensors()

    def message(**changes: torch.Tensor | None) -> str:
        kept = {k: v for k, v in (tensors | changes).items() if v is not None}
        return refusal(write(tmp_path, kept), target)

    up, gate = "midlayer.mlp.up_proj.weight", "midlayer.mlp.gate_proj.weight"
    assert message(**{up: None}) == f"lacks the tensor {up}"
    assert message(**{up: None, gate: None}) == f"lacks the tensor {gate} and 1 more"
    assert message(**{"layers.1.x": rand(3)}) == "has an unknown tensor layers.1.x"
    assert message(**{"model.norm.weight": rand(3)}) == "holds the tensor norm.weight twice"
    assert message(**{up: rand(80, 65)}) == (
        f"has a tensor {up} of torch.float32 [80, 65]; expected floating point [80, 64]"
    )
    assert up in message(**{up: torch.zeros(80, 64, dtype=torch.int8)})
    assert "fc.weight of torch.float32 [64, 128]; expected floating point [64, 192]" in message(
        **{"fc.weight": rand(64, 128)}
    )
    assert "lm_head.weight" in message(**{"lm_head.weight": rand(V, HT)})


def test_vocabulary_and_d2t_are_checked(target, tmp_path) -> None:
    tensors = eagle3_tensors()

    def message(d2t: torch.Tensor | None, **changes: Any) -> str:
        kept = {k: v for k, v in (tensors | {"d2t": d2t}).items() if v is not None}
        return refusal(write(tmp_path, kept, **changes), target)

    good = tensors["d2t"]
    beyond, twice = good.clone(), good.clone()
    beyond[-1], twice[1] = V - (VD - 1), good[0] - 1
    assert message(beyond) == f"maps a draft token to {V} by d2t; the target has {V} tokens"
    assert "maps a draft token to -1" in message(torch.full((VD,), -1))
    assert message(twice) == "maps two draft tokens to one target token by d2t"
    assert "d2t of torch.float32 [37]" in message(good.float())
    assert "d2t of torch.int64 [37]; expected integers [36]" in message(good, draft_vocab_size=36)
    assert message(None, draft_vocab_size=VD) == (
        f"has {VD} tokens and no tensor d2t that maps them to the target's {V}"
    )
    assert message(good, vocab_size=90) == (
        f"was made for a vocabulary of 90 tokens; the target has {V}"
    )
    eagle = write(tmp_path, eagle_tensors(), vocab_size=90)
    assert "vocabulary of 90 tokens" in refusal(eagle, target)


def test_heads_that_do_not_fit_the_target(target, tmp_path) -> None:
    folder = write(tmp_path, eagle_tensors(), hidden_size=48)
    assert "has hidden_size 48, but EAGLE continues the target's" in refusal(folder, target)
    tensors = eagle3_tensors(48)
    folder = write(tmp_path, tensors, hidden_size=48)
    assert "has no embed_tokens.weight, and its hidden_size 48" in refusal(folder, target)
    del tensors["lm_head.weight"]
    tensors["embed_tokens.weight"] = rand(V, 48)
    folder = write(tmp_path, tensors, hidden_size=48)
    assert refusal(folder, target) == (
        f"has no lm_head.weight, and the target's [{V}, {HT}] is not [{VD}, 48], "
        "so the two cannot share one"
    )
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    folder = write(tmp_path, eagle3_tensors(), eagle_config=ids)
    assert refusal(folder, target).endswith("(eagle_aux_hidden_state_layer_ids); 0..3 can be read")
    folder = write(tmp_path, eagle3_tensors(), norm_before_residual=True)
    assert refusal(folder, target).startswith("sets norm_before_residual")
    folder = write(tmp_path, eagle3_tensors(), intermediate_size=None)
    assert refusal(folder, target) == "has no intermediate_size in config.json"
    folder = write(tmp_path, eagle3_tensors(), num_key_value_heads=3)
    assert "midlayer.self_attn.k_proj.weight" in refusal(folder, target)
