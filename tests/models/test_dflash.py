"""DFlash heads in z-lab's layout, against the method in plain torch; bad ones are refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from specattn.cache.kv_pool import KVPool
from specattn.errors import ModelError
from specattn.models import HFTarget, load_dflash
from specattn.speculative.model import ModelSlot
from specattn.speculative.proposers.block import BlockView, bind_block
from tests.implementations import using
from tests.models.heads import HT, VD, T, V, layer_tensors, norm, rand
from tests.models.papers import mlp, rms, rotate, under

if TYPE_CHECKING:
    from pathlib import Path

    from tests.models.papers import Turn

from tests.models.heads import Tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THETA, WINDOW = 700.0, 4
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HT,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 2,
    "num_target_layers": 5,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
    "vocab_size": V,
    "block_size": 6,
    "dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": V - 1},
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


@pytest.fixture
def target(tiny) -> HFTarget:
    return HFTarget.from_model(tiny("llama", num_hidden_layers=5).to(DEVICE))


def dflash_tensors(layers: int = 2, features: int = 3) -> Tensors:
    torch.manual_seed(4)
    tensors = {
        "fc.weight": rand(HT, features * HT),
        "hidden_norm.weight": norm(HT),
        "norm.weight": norm(HT),
    }
    for layer in range(layers):
        at = f"layers.{layer}."
        tensors |= layer_tensors(at, HT, wide=False)
        tensors |= {f"{at}self_attn.{name}_norm.weight": norm(24) for name in "qk"}
        tensors |= {f"{at}input_layernorm.weight": norm(HT)}
    return tensors


def write(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    kept = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(tensors, folder / "model.safetensors")
    return folder


def heads_of(x: torch.Tensor, w: Tensors, name: str) -> torch.Tensor:
    x = x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", torch.zeros(()))
    heads = x.unflatten(-1, (-1, 24))
    return heads if name == "v" else rms(heads, w[f"{name}_norm.weight"])


def reference(
    tensors: Tensors,
    embeds: torch.Tensor,
    features: torch.Tensor,
    visible: list[torch.Tensor],
    turn: Turn = rotate,
) -> torch.Tensor:
    """Final states of one request's block ``embeds [n, H]`` behind ``features [P, F]``.

    ``visible`` says of every layer which of the P + n keys the block's tokens see.
    """
    context = rms(
        features @ tensors["fc.weight"].double().T, tensors["hidden_norm.weight"].double()
    )
    past, size = len(features), len(embeds)
    at, x = torch.arange(past + size), embeds
    for layer, mask in enumerate(visible):
        w = under(tensors, f"layers.{layer}.")
        a, y = under(w, "self_attn."), rms(x, w["input_layernorm.weight"])
        q = turn(heads_of(y, a, "q"), at[past:], THETA)
        k, v = (torch.cat([heads_of(context, a, name), heads_of(y, a, name)]) for name in "kv")
        k = turn(k, at, THETA)
        out = torch.empty_like(q)
        for head in range(4):
            logits = q[:, head] @ k[:, head // 2].T * 24**-0.5
            out[:, head] = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, head // 2]
        x = x + out.flatten(1) @ a["o_proj.weight"].T
        x = x + mlp(rms(x, w["post_attention_layernorm.weight"]), under(w, "mlp."))
    return rms(x, tensors["norm.weight"].double())


def masks(past: int, size: int, *, causal: bool, window: int | None) -> torch.Tensor:
    """Which keys are seen, as transformers' masks have it: a window holds the token itself."""
    query, key = torch.arange(past, past + size)[:, None], torch.arange(past + size)
    seen = (key <= query) if causal else torch.ones(size, past + size, dtype=torch.bool)
    return seen if window is None else seen & (query - key < window)


def run(head: Any, features: torch.Tensor, pasts: list[int], *, backend: str) -> torch.Tensor:
    """Draft a block behind every past, over poisoned pools; ``[B * n, Vd]`` logits."""
    batch, size, text = len(pasts), head.block.size, len(features)
    features = features.to(DEVICE)
    pool = KVPool(head.layers, 300, DEVICE)
    pool.k.fill_(torch.nan), pool.v.fill_(torch.nan)
    slots = 1 + torch.randperm(299)[: text + batch * size].to(DEVICE, torch.int32)
    table = torch.zeros(batch + 1, text + size, dtype=torch.int32, device=DEVICE)
    table[1:, :text] = slots[:text]
    lens = torch.tensor(pasts, device=DEVICE)
    positions = lens[:, None] + torch.arange(size, device=DEVICE)
    with using("naive" if backend == "torch_native" else "triton"):
        states, places = head.combine(features), torch.arange(text, device=DEVICE)
        head.write_context(states, places, pool, slots[None, :text])
        attention = bind_block(
            ModelSlot.of(head, pool, backend).backend,
            head.block.views,
            table,
            req_pool_indices=torch.arange(1, batch + 1, device=DEVICE),
            seq_lens=lens.to(torch.int32),
            positions=positions,
            anchors=positions[:, :1].repeat(1, size),
            slots=slots[text:].view(batch, size),
        )
        attention.fill()
        ids = torch.full((batch, size), head.block.mask_token_id, device=DEVICE)
        ids[:, 0] = torch.arange(batch, device=DEVICE)
        return head.forward_block(ids.flatten(), positions.flatten(), attention).cpu()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.double() - want).norm() <= 3e-6 * want.norm()


CASES = [
    ({}, (False, None), (False, None)),
    ({"dflash_config": CONFIG["dflash_config"] | {"causal": True}}, (True, None), (True, None)),
    ({"is_causal": True}, (True, None), (True, None)),
    (MIXED, (True, WINDOW), (False, None)),
    (MIXED | {"is_causal": True}, (True, WINDOW), (True, None)),
    ({"block_size": 70}, (False, None), (False, None)),
    (
        {"architectures": ["Other"], "dflash_config": ...} | CONFIG["dflash_config"],
        (False, None),
        (False, None),
    ),
]


RUNS = [
    (*case, backend)
    for at, case in enumerate(CASES)
    for backend in ("torch_native", *(["triton"] if at in (0, 3, 4) else []))
]


@pytest.mark.parametrize(("changes", "first", "second", "backend"), RUNS)
def test_blocks_are_those_of_the_method(target, tmp_path, changes, first, second, backend) -> None:
    tensors = dflash_tensors()
    head = load_dflash(write(tmp_path, tensors, **changes), target)
    # z-lab counts the layers that a state leaves
    assert head.features == (1, 3, 5)
    assert (head.feature_size, head.vocab_size, head.block.first_draft) == (3 * HT, V, 1)
    assert head.target_ids is None
    features = torch.randn(T, 3 * HT)
    pasts = [0, 1, 3, T] if head.block.size < 64 else [3]
    got = run(head, features, pasts, backend=backend)
    got = got.unflatten(0, (len(pasts), -1))
    ids = torch.full((head.block.size,), head.block.mask_token_id)
    for row, past in enumerate(pasts):
        ids[0] = row
        views = [
            masks(past, head.block.size, causal=causal, window=window)
            for causal, window in (first, second)
        ]
        embeds = target.embed_tokens.weight.cpu()[ids].double()
        want = reference(tensors, embeds, features[:past].double(), views)
        close(got[row], want @ target.lm_head.weight.cpu().double().T)


def test_a_head_with_ends_and_a_vocabulary_of_its_own(target, tmp_path) -> None:
    chosen = torch.randperm(V)[:VD].sort().values
    tensors = dflash_tensors() | {
        "embed_tokens.weight": rand(V, HT),
        "lm_head.weight": rand(VD, HT),
        "d2t": chosen - torch.arange(VD),
    }
    stored = {f"model.{key}": tensor for key, tensor in tensors.items()}
    head = load_dflash(write(tmp_path, stored), target)
    assert torch.equal(head.to_target(torch.arange(VD, device=DEVICE)).cpu(), chosen)
    features = torch.randn(T, 3 * HT)
    got = run(head, features, [T], backend="torch_native")
    embeds = tensors["embed_tokens.weight"][[0, *[V - 1] * 5]].double()
    seen = masks(T, 6, causal=False, window=None)
    want = reference(tensors, embeds, features.double(), [seen, seen])
    close(got, want @ tensors["lm_head.weight"].double().T)


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
def test_a_head_adds_its_biases(target, tmp_path, backend) -> None:
    sizes = {"q": 4 * 24, "k": 2 * 24, "v": 2 * 24}
    tensors = dflash_tensors() | {
        f"layers.0.self_attn.{one}_proj.bias": rand(size) for one, size in sizes.items()
    }
    head = load_dflash(write(tmp_path, tensors), target)
    features = torch.randn(T, 3 * HT)
    got = run(head, features, [T], backend=backend)
    embeds = target.embed_tokens.weight.cpu()[[0, *[V - 1] * 5]].double()
    seen = masks(T, 6, causal=False, window=None)
    want = reference(tensors, embeds, features.double(), [seen, seen])
    close(got, want @ target.lm_head.weight.cpu().double().T)


def test_a_window_that_looks_ahead_is_refused(target, tmp_path) -> None:
    head = load_dflash(write(tmp_path, dflash_tensors(), **MIXED), target)
    pool = KVPool(head.layers, 8, "cpu")
    some = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be causal or anchored"):
        bind_block(
            ModelSlot.of(head, pool, "torch_native").backend,
            [BlockView(causal=False, anchored=False)] * 2,
            some,
            req_pool_indices=some[:, 0].long(),
            seq_lens=some[:, 0],
            positions=some.long(),
            anchors=some.long(),
            slots=some,
        )


def refusal(folder: Path, target: HFTarget) -> str:
    with pytest.raises(ModelError) as caught:
        load_dflash(folder, target)
    assert caught.value.argument == "draft"
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder} ")


def nested(**changes: Any) -> dict[str, Any]:
    settings = CONFIG["dflash_config"] | changes
    return {"dflash_config": {key: value for key, value in settings.items() if value is not ...}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": ...}, "no block_size in config.json"),
        ({"block_size": 257}, "block_size 257 in config.json; expected a whole number of 2..256"),
        ({"block_size": 1}, "block_size 1 in config.json; expected a whole number of 2..256"),
        (nested(block_size=0), "block_size 0 in config.json; expected"),
        (nested(mask_token_id=...), "no mask_token_id in config.json"),
        (nested(mask_token_id=V), f"mask_token_id {V} in config.json; expected a whole number of "),
        (nested(mask_token_id=-1), "mask_token_id -1 in config.json; expected a whole number"),
        (nested(mask_token_id="<mask>"), "mask_token_id '<mask>' in config.json; expected"),
        (nested(target_layer_ids=...), "no target_layer_ids in config.json"),
        (nested(target_layer_ids=[]), "target_layer_ids [] in config.json; expected a list"),
        (nested(target_layer_ids=[0, 2, 5]), "target_layer_ids [0, 2, 5] in config.json; the targ"),
        (nested(target_layer_ids=[-1, 2, 3]), "target_layer_ids [-1, 2, 3] in config.json; the t"),
        (nested(target_layer_ids=[0.0, 2, 3]), "target_layer_ids [0.0, 2, 3] in config.json; exp"),
        (
            {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [0, 2, 5]},
            "aux_hidden_state_layer_ids [0, 2, 5] in config.json; the target can be read before",
        ),
        ({"num_target_layers": 36}, "num_target_layers 36 in config.json; the target has 5"),
        ({"layer_types": ["full_attention"]}, "layer_types ['full_attention'] in config.json; exp"),
        ({"layer_types": ["full_attention", "x"]}, "layer_types ['full_attention', 'x'] in conf"),
        ({"layer_types": 2}, "layer_types 2 in config.json; expected 2 of full_attention and"),
        ({"layer_types": MIXED["layer_types"]}, "no sliding_window in config.json"),
        (MIXED | {"sliding_window": 0}, "sliding_window 0 in config.json; expected a whole number"),
        (nested(selector_rank=4), "selector_rank 4 in config.json, which no DFlash head here has"),
        (nested(projector_type="domino"), "projector_type 'domino' in config.json, which no"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type 'dspark' in config.json; k"),
        ({"dflash_config": [1]}, "dflash_config [1] in config.json; expected an object"),
        ({"hidden_size": ...}, "no hidden_size in config.json"),
    ],
)
def test_settings_that_are_none(target, tmp_path, changes, reason) -> None:
    folder = write(tmp_path, dflash_tensors(), **changes)
    assert refusal(folder, target).startswith(f"has {reason}")


@pytest.mark.gpu
def test_a_replay_reads_lengths_and_context_of_then(target, tmp_path) -> None:
    head = load_dflash(write(tmp_path, dflash_tensors(), **MIXED), target)
    batch, size, width = 3, head.block.size, 40
    pool = KVPool(head.layers, 1 + batch * width, "cuda")
    table = torch.arange(1, 1 + batch * width, dtype=torch.int32, device="cuda").view(batch, width)
    lens = torch.tensor([3, 9, 20], dtype=torch.int32, device="cuda")
    positions = lens.long()[:, None] + torch.arange(size, device="cuda")
    slots, anchors = table.gather(1, positions), positions[:, :1].repeat(1, size)
    attention = bind_block(
        ModelSlot.of(head, pool, "triton").backend,
        head.block.views,
        table,
        req_pool_indices=torch.arange(batch, device="cuda"),
        seq_lens=lens,
        positions=positions,
        anchors=anchors,
        slots=slots,
    )
    features = torch.randn(batch * size, 3 * HT, device="cuda")
    ids = torch.randint(0, V, (batch * size,), device="cuda")

    def step() -> torch.Tensor:
        attention.fill()
        logits = head.forward_block(ids, positions.flatten(), attention)
        head.write_context(
            head.combine(features),
            positions.flatten(),
            pool,
            slots,
        )
        return logits

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for seed in range(4):
        torch.manual_seed(seed)
        start = torch.randint(0, width - size, (batch,), device="cuda")
        lens.copy_(start)
        positions.copy_(start[:, None] + torch.arange(size, device="cuda"))
        slots.copy_(table.gather(1, positions))
        anchors.copy_(start[:, None].expand_as(anchors))
        features.normal_()
        pool.k.normal_(), pool.v.normal_()
        before = pool.k.clone(), pool.v.clone()
        graph.replay()
        got, after = recorded.clone(), (pool.k.clone(), pool.v.clone())
        pool.k.copy_(before[0]), pool.v.copy_(before[1])
        close(got, step().double())
        close(after[0], pool.k.double())
        close(after[1], pool.v.double())
