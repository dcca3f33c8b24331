"""Weights that SGLang changes after fused forwards have read them."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from specattn.errors import UnsupportedError
from specattn.integrations import sglang
from specattn.integrations.sglang import names
from tests.integrations.sglang import INSTALLED
from tests.integrations.sglang.test_fused import GEMMA3, IDS, POSITIONS, off

if INSTALLED:
    from specattn.integrations.sglang.fused import fused_head, fused_target
    from specattn.integrations.sglang.weights import Weights
    from specattn.models.fused.scaled import FORMATS
    from tests.integrations.sglang.modules import build, geometry, run
    from tests.models.conftest import DenseAttend

pytestmark = [pytest.mark.sglang]
# as in `test_fused`, where SGLang's sums are rounded in another order
CLOSE = 3e-6


def changed(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Other weights of a model's, by name."""
    return [
        (name, one.detach() + 0.5 if "norm" in name else 1.25 * one.detach().flip(0))
        for name, one in model.named_parameters()
    ]


def update(model: Any, weights: list[tuple[str, torch.Tensor]]) -> Any:
    """Write weights as ``update_weights_from_tensor`` of ``load_format="direct"`` does."""
    if names.release() == names.OLD:
        path = f"{names.RUNNER}.update_weights_from_tensor"
        owner = SimpleNamespace(model=model, device="cpu", tp_rank=0)
        write = partial(resolve_name(path), owner, weights, "direct")
    else:
        path = f"{names.WEIGHTS}.end_weight_update"
        module = path.rpartition(".WeightUpdater")[0]
        owner = SimpleNamespace(get_model=lambda: model, device="cpu")
        resolve_name(f"{module}._model_load_weights_direct")(model, weights)
        write = partial(resolve_name(path), owner, run_post_load=False)
    return sglang._hooks()[path](lambda _: write(), owner)


def test_sums_follow_what_is_written_by_name() -> None:
    model = build("gemma3_text", torch.float32, **GEMMA3)
    layers = geometry(model, torch.float32)
    target = fused_target(model, layers, max_context_len=128)

    def logits() -> torch.Tensor:
        return target.forward(IDS, POSITIONS, DenseAttend(layers).at(POSITIONS)).logits

    before, places = logits(), target.blocks[0].input_norm.data_ptr()
    assert update(model, changed(model)) in ((True, "Success"), None)
    want, _ = run(model, layers, IDS, POSITIONS)
    assert off(want, before) > 0.1
    assert off(logits(), want) < CLOSE
    # recorded graphs read them there
    assert target.blocks[0].input_norm.data_ptr() == places


@pytest.mark.parametrize("kind", FORMATS if INSTALLED else [])
def test_heads_that_are_quantised_follow(kind: str) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    model = build("eagle3", torch.float32, **sizes, draft_vocab_size=37)
    layers = geometry(model, torch.float32)
    fuse = partial(fused_head, model, layers, quantization=kind)
    features, head = torch.randn(len(IDS), 3 * 256), fuse()

    def logits(head: Any) -> torch.Tensor:
        attend = DenseAttend(layers).at(POSITIONS)
        return head.forward(IDS, head.combine(features), POSITIONS, attend).logits

    before = logits(head)
    update(model, changed(model))
    assert off(logits(head), before) > 0.1
    assert logits(head).equal(logits(fuse()))


def test_weights_that_are_put_elsewhere_fail_the_update() -> None:
    model = build("llama", torch.float32)
    fused_target(model, geometry(model, torch.float32), max_context_len=128)
    assert update(model, []) in ((True, "Success"), None)
    part = model.model.layers[1].mlp.down_proj
    part.weight = Parameter(part.weight.clone(), requires_grad=False)
    try:
        _, message = update(model, [])
    except UnsupportedError as error:
        # what ends a session of newer releases returns nothing
        message = str(error)
    assert "elsewhere (1, model.layers.1.mlp.down_proj.weight among them)" in message


def test_other_scales_of_keys_fail_the_update() -> None:
    model = build("llama", torch.float32)
    attention = model.model.layers[0].self_attn.attn
    attention.k_scale_float = 0.5
    weights = Weights.of(model)
    assert not weights.follow()
    attention.k_scale_float = 0.25
    assert "model.layers.0.self_attn.attn.k_scale_float among them" in weights.follow()


def test_models_that_no_step_reads_are_left_alone() -> None:
    model = build("llama", torch.float32)
    assert update(model, changed(model)) in ((True, "Success"), None)
    assert not hasattr(model, "specattn_weights")
