"""Float8 targets that two processes share (gloo, on a CPU)."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specattn import Engine, Request, SpecConfig
from specattn.errors import ModelError
from specattn.models import FusedTarget, HFTarget, fuse
from specattn.models.fused.projection import Projection
from specattn.models.fused.readers import projection_of
from specattn.models.fused.scaled import FORMATS, ScaledLinear, quantise
from specattn.models.quantisation import quantise_model
from tests.models.conftest import TINY, DenseAttend
from tests.models.test_quantised import fp8_folder
from tests.ranks import LIMIT, SIZE, needs_shards, on_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs_shards, pytest.mark.slow, pytest.mark.timeout(2 * LIMIT)]

# a rank has two blocks of hidden columns and more of others, and a part of none
WHOLE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
WHOLE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100}
BIASES = {"attention_bias": True, "mlp_bias": True}
#: Ways to load: the folder, and how its weights are quantised.
WAYS = {"stored": ("fp8", None), "weights alone": ("fp8", "fp8-weights")}
WAYS |= {kind: ("plain", kind) for kind in FORMATS}
IDS = torch.arange(3, 12)


def logits_of(target) -> torch.Tensor:
    return target.forward(IDS, IDS, DenseAttend(target.layers).at(IDS)).logits


def tokens_of(target) -> list[int]:
    engine = Engine(target, None, SpecConfig(0, 1, 1, max_context_len=64, max_num_reqs=1))
    return engine.generate([Request(IDS.tolist(), 8, ignore_eos=True)])[0].tokens


def work(rank: int, folder: Path) -> dict:
    found: dict = {}
    for name, (home, kind) in WAYS.items():
        target = HFTarget.from_pretrained(folder / home, tp_plan="auto", quantization=kind)
        parts = [one for one in target.module.modules() if isinstance(one, ScaledLinear)]
        held = sum(one.weight.to_local().numel() for one in parts)
        own = logits_of(target)
        fused, _ = fuse(target)
        assert type(fused) is FusedTarget
        found[name] = {
            "held": (held, len(parts)),
            "logits": [own.tolist(), logits_of(fused).tolist(), logits_of(target).tolist()],
            "tokens": tokens_of(fused),
        }
    for name, kind in (("cut fp8", None), ("cut plain", "fp8")):
        with pytest.raises(ModelError) as caught:
            HFTarget.from_pretrained(folder / name, tp_plan="auto", quantization=kind)
        found[name] = str(caught.value)
    cut = HFTarget.from_pretrained(folder / "cut plain", tp_plan="auto", quantization="fp8-channel")
    found["cut channels"] = type(fuse(cut)[0]).__name__
    return found


def write(folder: Path) -> None:
    for name, sizes in {"": {}, "cut ": {"intermediate_size": 128 * 3}}.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **(TINY | WHOLE | BIASES | sizes))
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder / f"{name}plain")
        fp8_folder(folder / f"{name}fp8", model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    write(found)
    return found


@pytest.fixture(scope="module")
def found(folder):
    codes, found = on_ranks(work, folder)
    assert codes == [0] * SIZE
    assert found[0] == found[1]
    return found[0]


class Halves(nn.Module):
    """A product of a scale per row and rank, and the bias once."""

    def __init__(self, plain: Projection) -> None:
        super().__init__()
        self.bias = plain.bias
        halves = (Projection(half.contiguous()) for half in plain.weight.chunk(SIZE, 1))
        self.halves = [quantise(half, "fp8-channel") for half in halves]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.halves, x[0].chunk(SIZE, 1), strict=True)
        return sum(half.product(part) for half, part in pairs)[None] + self.bias


@pytest.fixture(scope="module")
def whole(folder):
    @cache
    def load(name: str) -> HFTarget:
        home, kind = WAYS[name]
        if kind != "fp8-channel":
            return HFTarget.from_pretrained(folder / home, quantization=kind)
        target = HFTarget.from_pretrained(folder / home)
        for layer in target.module.model.layers:
            layer.self_attn.o_proj = Halves(projection_of(layer.self_attn.o_proj))
            layer.mlp.down_proj = Halves(projection_of(layer.mlp.down_proj))
        quantise_model(target.module, kind)
        return target

    return load


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", WAYS)
def test_ranks_compute_what_one_process_computes(found, whole, name) -> None:
    own, fused, after = map(torch.tensor, found[name]["logits"])
    want = logits_of(whole(name))
    for one in (own, fused, after):
        # a sum that rounds the other way may move a number to the next one of e4m3
        assert sorted(map(off, one, want))[len(want) // 2] < 4e-3
    # its weights are views of the fused ones
    assert off(after, own) < 1e-5
    assert sorted(map(off, fused, own))[len(want) // 2] < 4e-3


@pytest.mark.parametrize("name", WAYS)
def test_ranks_write_what_one_process_writes(found, whole, name) -> None:
    assert found[name]["tokens"] == tokens_of(whole(name))


def test_a_rank_holds_its_share(found, whole) -> None:
    parts = [one for one in whole("stored").module.modules() if isinstance(one, ScaledLinear)]
    held = sum(one.weight.numel() for one in parts) // SIZE
    assert {tuple(found[name]["held"]) for name in WAYS} == {(held, len(parts))}


def test_blocks_that_ranks_would_cut_are_refused(found) -> None:
    for name in ("cut fp8", "cut plain"):
        assert re.search(
            r"model.layers.0.mlp.\w+ is shared by ranks, whose parts of its 384 rows or columns "
            r"are no whole blocks of 128; use fewer ranks",
            found[name],
        )
    assert found["cut channels"] == "FusedTarget"
