"""Under ``torch.autocast`` everything runs as outside of it, to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import specattn
from specattn import Engine, Request, SpecConfig
from specattn.kernels.attention.reference import attend, csr_views
from specattn.models import HFTarget, fuse, load_dflash, load_draft
from specattn.models.hub import PAIR, PAIR_HEADS
from tests.samples import half, on_cpu

PROMPT = [5, 6, 7]


def target(dtype: torch.dtype = torch.float32) -> HFTarget:
    return HFTarget.from_pretrained(PAIR / "target", dtype=dtype)


@on_cpu(half, "fused", "kind")
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("fused", [False, True])
def test_engines(kind, fused) -> None:
    tokens = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model = target()
            load = load_draft if kind == "eagle3" else load_dflash
            head = load(PAIR_HEADS[kind], model)
            model = model.with_features(head.features)
            model, head = fuse(model, head) if fused else (model, head)
            engine = Engine(model, head, SpecConfig(4, 1, 5, 128, 1), graphs=False)
            (result,) = engine.generate([Request(PROMPT, 12)])
            tokens.append((result.tokens, result.accept_lens))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)]
)
def test_forwards(fused, dtype, cast) -> None:
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", cast, enabled=enabled):
            model = target(dtype)
            assert {layer.dtype for layer in model.layers} == {dtype}
            forward = (fuse(model, None)[0] if fused else model).forward
            seen: list[torch.Tensor] = []

            def attend(layer, q, k, v, seen=seen):
                seen += [q, k, v]
                return v.repeat_interleave(2, dim=1)

            ids = torch.tensor(PROMPT)
            logits = forward(ids, torch.arange(3), attend).logits
            assert {one.dtype for one in seen} == {dtype}
            found.append(logits)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("dtype", "cast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)]
)
def test_inside_transformers(dtype, cast) -> None:
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=dtype).eval()
    ids, how = torch.tensor([PROMPT]), {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(ids, **how)
    with torch.autocast("cpu", cast):
        assert torch.equal(specattn.generate(model, ids, draft="shipped", **how), want)
        # the model is given back, and transformers goes on under autocast
        assert model.generate(ids, **how).shape == want.shape


def test_attention_alone() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    outs = []
    for enabled in (False, True):
        out, lse = torch.empty_like(q), torch.empty(2, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            views = csr_views(
                kv_indptr=torch.tensor([0, 4, 8], dtype=torch.int32),
                kv_indices=torch.arange(1, 9, dtype=torch.int32),
            )
            attend(q, k, v, out, lse, views=views, sm_scale=0.25)
        outs.append(out)
    assert torch.equal(*outs)
