"""Draft heads whose checkpoints hold FP8 weights."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn.errors import ModelError
from specattn.models import HFTarget, load_dflash, load_draft
from specattn.models.fused import scaled as scaled_models
from specattn.models.fused.projection import Projection
from specattn.models.fused.scaled import ScaledProjection
from tests.models import test_dflash
from tests.models.heads import HT, VD, T, eagle3_tensors, eagle_tensors, write
from tests.models.test_quantised import STATED, generated, off, weight_of

if TYPE_CHECKING:
    from pathlib import Path

F8 = torch.float8_e4m3fn
# two blocks and a part of one
SIZE = 264
COMMON = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(kind: str, *, weights: dict[str, Any] | None = None, **rows: Any) -> dict:
    """What compressed-tensors states."""
    group: dict[str, Any] = {
        "weights": COMMON | {"strategy": kind, "dynamic": False} | (weights or {}),
        "input_activations": COMMON | {"strategy": "token", "dynamic": True} | rows,
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


BLOCKS = compressed(
    "block", weights={"block_structure": [128, 128]}, strategy="group", group_size=128
)
#: What a checkpoint states, what its scales are called, and whether they are of blocks.
KINDS = {
    "blocks": (STATED, "weight_scale_inv", True),
    "compressed blocks": (BLOCKS, "weight_scale", True),
    "channels": (compressed("channel"), "weight_scale", False),
}


def scaled(weight: torch.Tensor, *, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in e4m3 and its scales, and leave what they stand for in it."""
    units = (128, 128) if blocks else (1, weight.shape[1])
    rows, columns = (torch.arange(n) // unit for n, unit in zip(weight.shape, units, strict=True))
    where = rows[:, None], columns[None]
    scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row, column in product(*map(range, scale.shape)):
        scale[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
    values = (weight / scale[where]).to(F8)
    weight.copy_(values.float() * scale[where])
    return values, scale


def quantised(tensors: dict[str, torch.Tensor], kind: str, but: str = "embed") -> dict:
    """Quantise a head's projections; ``tensors`` become what they stand for."""
    _, name, blocks = KINDS[kind]
    found = dict(tensors)
    for key, one in tensors.items():
        if key.endswith("weight") and one.dim() == 2 and but not in key:
            values, scale = scaled(one, blocks=blocks)
            found |= {key: values, f"{key.removesuffix('weight')}{name}": scale}
    return found


def loaded(folder: Path, target: HFTarget, tensors: dict, **settings: Any) -> Any:
    how = settings.pop("quantization", None)
    return load_draft(write(folder, tensors, **settings), target, quantization=how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_a_head_is_what_is_stored(target, dense, tmp_path, kind, layout) -> None:
    if layout == "eagle3":
        settings: dict[str, Any] = {"draft_vocab_size": VD, "hidden_size": SIZE}
        tensors, first = eagle3_tensors(SIZE), "midlayer."
        tensors["embed_tokens.weight"] = torch.randn(101, SIZE) / SIZE**0.5
    else:
        settings, tensors, first = {}, eagle_tensors(("q", "v")), "layers.0."
    stored = quantised(tensors, kind)
    stated = {"quantization_config": KINDS[kind][0]}
    head = loaded(tmp_path, target, stored, **settings, **stated)
    plain = loaded(tmp_path, target, tensors, **settings)
    (block,) = head.blocks
    parts = [tensors[f"{first}self_attn.{name}_proj.weight"] for name in "qkv"]
    gates = [tensors[f"{first}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    wanted = {block.qkv: parts, block.feed.gate_up: gates, head.fc: [tensors["fc.weight"]]}
    if layout == "eagle3":
        wanted[head.lm_head] = [tensors["lm_head.weight"]]
    for one, rows in wanted.items():
        assert type(one) is ScaledProjection
        assert off(weight_of(one), torch.cat(rows)) < 1e-6
    # the same numbers, and rows that are quantised, too
    features = torch.randn(T, head.feature_size)
    alone = loaded(tmp_path, target, stored, quantization="fp8-weights", **settings, **stated)
    found = []
    for one in (plain, head, alone):
        attend = dense(one.layers).at(torch.arange(T))
        ids = torch.arange(3, 3 + T)
        found.append(one.forward(ids, one.combine(features), torch.arange(T), attend).logits)
    assert 1e-3 < off(found[1], found[0]) < 8e-2
    assert off(found[2], found[0]) < 4e-3


@pytest.mark.parametrize(
    ("norms", "plain"),
    [((), []), (("norm_output",), [HT]), (("norm_before_residual",), [2 * HT])],
)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_quantised_in_their_launch(
    target, dense, tmp_path, kind, norms, plain, monkeypatch
) -> None:
    """Unless the residual stream or the next step continues them, too."""
    settings = {"draft_vocab_size": VD} | dict.fromkeys(norms, True)
    stored = quantised(eagle3_tensors(), kind)
    head = loaded(tmp_path, target, stored, quantization_config=KINDS[kind][0], **settings)
    seen, scale_rows = [], scaled_models.scale_rows
    monkeypatch.setattr(
        scaled_models, "scale_rows", lambda x, how: seen.append(x.shape[1]) or scale_rows(x, how)
    )
    attend = dense(head.layers).at(torch.arange(T))
    found = head.forward(torch.arange(T), torch.randn(T, HT), torch.arange(T), attend)
    # those, and what attention leaves
    assert sorted(seen) == sorted([4 * 24, *plain])
    assert found.logits.dtype == found.hidden_states.dtype == torch.float32


def test_a_dflash_head_is_what_is_stored(target, tmp_path) -> None:
    tensors = test_dflash.dflash_tensors()
    stored = quantised(tensors, "blocks")
    folder = test_dflash.write(tmp_path, stored, quantization_config=STATED)
    head = load_dflash(folder, target)
    assert type(head.fc) is ScaledProjection
    assert off(weight_of(head.fc), tensors["fc.weight"]) < 1e-6


def test_a_head_of_16_bits_keeps_weights_and_scales(target, tmp_path) -> None:
    stored = quantised(eagle3_tensors(), "channels")
    # as compressed-tensors stores them beside bfloat16
    half = {key: one.bfloat16() if "scale" in key else one for key, one in stored.items()}
    stated = {"draft_vocab_size": VD, "quantization_config": KINDS["channels"][0]}
    head = load_draft(write(tmp_path, half, **stated), target, dtype=torch.bfloat16)
    assert (head.dtype, head.norm.dtype) == (torch.bfloat16, torch.bfloat16)
    scale = half["fc.weight_scale"].double()
    assert weight_of(head.fc).equal(stored["fc.weight"].double() * scale)
    plain = load_draft(write(tmp_path, stored, **stated), target, dtype=torch.bfloat16)
    assert plain.fc.scale.equal(stored["fc.weight_scale"])


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_targets(tiny, tmp_path, kind) -> None:
    target = HFTarget.from_model(tiny("qwen3", num_hidden_layers=4, hidden_size=HT))
    tensors = quantised(eagle3_tensors(), kind)
    stated = {"draft_vocab_size": VD, "quantization_config": KINDS[kind][0]}
    head = loaded(tmp_path, target, tensors, **stated)
    assert generated(target, head, steps=(3, 3, 9)) == generated(target, steps=None)


def test_pairs_that_are_rotated_may_lie_beside_each_other(target, tmp_path) -> None:
    """Rows of queries and keys are put into another order with their scales."""
    tensors = eagle3_tensors()
    stored = quantised(tensors, "channels")
    settings = {"draft_vocab_size": VD, "rope_interleaved": True}
    head = loaded(tmp_path, target, stored, quantization_config=compressed("channel"), **settings)
    plain = loaded(tmp_path, target, tensors, **settings)
    assert off(weight_of(head.blocks[0].qkv), plain.blocks[0].qkv.weight) < 1e-6


def test_what_is_not_stored_in_fp8_stays_plain_or_is_quantised(target, tmp_path) -> None:
    stored = quantised(eagle3_tensors(), "blocks", but="lm_head")
    settings = {"draft_vocab_size": VD, "quantization_config": STATED}
    kinds = {None: Projection, "fp8": ScaledProjection}
    for how, kind in kinds.items():
        head = loaded(tmp_path, target, stored, quantization=how, **settings)
        assert (type(head.lm_head), type(head.fc)) == (kind, ScaledProjection)
    with pytest.raises(ModelError, match=r"in FP8: 'fp8-channel' is not how it is quantised"):
        loaded(tmp_path, target, stored, quantization="fp8-channel", **settings)
    mixed = quantised(eagle3_tensors(), "blocks", but="v_proj")
    with pytest.raises(ModelError, match=r"q_proj.weight and self_attn.v_proj.weight of different"):
        loaded(tmp_path, target, mixed, **settings)


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        (STATED | {"activation_scheme": "static"}, r"FP8 of static activation scales\)"),
        (STATED | {"weight_block_size": [64, 64]}, r"FP8 of blocks \[64, 64\], not \[128, 128\]\)"),
        ({"quant_method": "fp8"}, r"FP8 of blocks None, not \[128, 128\]\)"),
        (STATED | {"scale_fmt": "ue8m0"}, r"FP8 of ue8m0 scales\)"),
        ({"quant_method": "fbgemm_fp8"}, r"quant_method 'fbgemm_fp8'\)"),
        (compressed("tensor"), "compressed-tensors of weights .*'strategy': 'tensor'"),
        (compressed("channel", dynamic=False), "compressed-tensors of .*'dynamic': False"),
        (compressed("channel", weights={"num_bits": 4}), "compressed-tensors of .*'num_bits': 4"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors of 0 kinds of weights"),
    ],
)
def test_other_formats_are_refused_by_name(target, tmp_path, stated, why) -> None:
    stored = quantised(eagle3_tensors(), "blocks")
    with pytest.raises(ModelError, match=rf"is quantised \({why}"):
        loaded(tmp_path, target, stored, draft_vocab_size=VD, quantization_config=stated)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: found.pop("fc.weight_scale_inv"), r"fc.weight of .*; expected scales for"),
        (
            lambda found: found.update({"fc.weight": found["fc.weight"].float()}),
            r"fc.weight of torch.float32 .*; expected float8",
        ),
        (
            lambda found: found.update({"fc.weight_scale_inv": torch.ones(64, 1)}),
            r"fc.weight_scale of torch.float32 \[64, 1\]",
        ),
        (
            lambda found: found.update({"fc.input_scale": torch.ones(())}),
            "has an unknown tensor fc.input_scale",
        ),
        (
            lambda found: found["fc.weight_scale_inv"].fill_(torch.nan),
            "NaN or infinite weights in fc.weight_scale",
        ),
    ],
)
def test_broken_checkpoints_are_refused_by_name(target, tmp_path, change, why) -> None:
    stored = quantised(eagle3_tensors(), "blocks")
    change(stored)
    with pytest.raises(ModelError, match=why):
        loaded(tmp_path, target, stored, draft_vocab_size=VD, quantization_config=STATED)


def test_float8_without_a_configuration_is_refused(target, tmp_path) -> None:
    stored = quantised(eagle3_tensors(), "blocks")
    found = {key: one for key, one in stored.items() if "scale" not in key}
    with pytest.raises(ModelError, match="expected scales for it"):
        loaded(tmp_path, target, found, draft_vocab_size=VD)
