"""What float8 targets draw, and what the deterministic mode gives them."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.kernels.fused import fp8
from specattn.kernels.fused.fp8 import RowsFormat, ScaledRows, scale_rows
from specattn.models import FusedTarget, HFTarget, fuse
from specattn.models.draft import lm_draft
from specattn.models.fused import projection, scaled
from specattn.models.quantisation import quantise_model
from tests import processors
from tests.models.test_quantised import in_float64
from tests.samples import half, on_cpu
from tests.speculative import three_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# two blocks and a part of one
SHAPE = {"hidden_size": 144, "intermediate_size": 200, "num_hidden_layers": 2}


def pair(tiny: Callable[..., Any], kind: str, device: str = "cpu") -> tuple[Any, Any, Any]:
    """A fused target, a draft that is the same model in another format, and its module."""
    model = tiny("qwen3", **SHAPE).to(device)
    other = deepcopy(model)
    quantise_model(model, kind)
    quantise_model(other, "fp8-channel" if kind == "fp8" else "fp8")
    module = deepcopy(model)
    target = HFTarget.from_model(model)
    target, draft = fuse(target, lm_draft(HFTarget.from_model(other), target))
    assert type(target) is FusedTarget
    return target, draft, module


@on_cpu(half, "kind", "name")
@pytest.mark.parametrize("name", ["chain", "tree", "rejection"])
@pytest.mark.parametrize("kind", ["fp8", "fp8-channel"])
def test_drawn_texts_have_the_law_of_the_quantised_model(tiny, kind, name) -> None:
    target, draft, module = pair(tiny, kind)
    exact = in_float64(module)
    exact.set_attn_implementation("eager")

    def logits(output: list[int]) -> list[float]:
        ids = torch.tensor([[*three_tokens.PROMPT, *output]])
        with torch.no_grad():
            return exact(ids).logits[0, -1].tolist()

    law = processors.three_tokens(logits, three_tokens.DRAWN)
    how = {"backend": "torch_native", "buckets": [250], "graphs": False}
    engine = Engine(target, draft, three_tokens.SETTINGS[name], **how)
    assert three_tokens.drawn_p_value(engine, law, least_gains=100) > 1e-3


@pytest.mark.parametrize("how", [RowsFormat(2), RowsFormat(1), RowsFormat(2, 2)])
@pytest.mark.usefixtures("path")
def test_a_row_is_quantised_alone(how) -> None:
    x = torch.randn(37, 144)
    whole = scale_rows(x, how)
    for at in (0, 16, 36):
        alone = scale_rows(x[at : at + 1], how)
        assert alone.scale.equal(whole.scale[at : at + 1])
        rows = whole.values[:, at : at + 1], alone.values[:, :1]
        assert torch.equal(*(one.view(torch.uint8) for one in rows))


def by_row(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A product whose bits do not depend on the number of rows."""

    def product(x: Any, weight: Any, *rest: Any) -> torch.Tensor:
        if not isinstance(x, ScaledRows):
            return torch.cat([multiply(row[None], weight, *rest) for row in x])
        rows = [
            ScaledRows(x.values[:, at : at + 1], x.scales[:, at : at + 1], 1, x.dtype)
            for at in range(len(x))
        ]
        return torch.cat([multiply(row, weight) for row in rows], dim=1)

    return product


@pytest.mark.parametrize("kind", ["fp8", "fp8-channel"])
def test_with_products_by_row_the_deterministic_mode_has_plain_decodings_logits(
    tiny, kind, monkeypatch
) -> None:
    """Quantisers, norms and attention take the batch out; products take it in, as in 16 bits."""
    monkeypatch.setattr(scaled, "scaled_linear", by_row(fp8.scaled_linear))
    monkeypatch.setattr(projection, "linear", by_row(torch.nn.functional.linear))
    # a stream takes shares of columns by the number of rows
    monkeypatch.setattr(scaled, "streams_scaled", lambda *_, **__: False)
    target, draft, _ = pair(tiny, kind, DEVICE)
    forward, seen = FusedTarget.forward, {}

    def noted(self, ids, positions, attend, rows=None):
        out = forward(self, ids, positions, attend, rows)
        if self.lm_head is target.lm_head and rows is None:
            for key, logits in zip(
                zip(positions.tolist(), ids.tolist(), strict=True), out.logits, strict=True
            ):
                seen.setdefault(key, []).append(logits)
        return out

    monkeypatch.setattr(FusedTarget, "forward", noted)
    found = {}
    for steps in ((0, 1, 1), (2, 2, 5)):
        config = SpecConfig(*steps, max_num_reqs=2, max_context_len=64)
        how = {"backend": "triton", "graphs": False, "deterministic": True}
        engine = Engine(target, draft if steps[0] else None, config, **how)
        seen.clear()
        prompts = [[7, 8, 9, 3, 5], [61, 2, 50]][: 2 if steps[0] else 1]
        results = engine.generate([Request(one, 4, ignore_eos=True) for one in prompts])
        found[steps] = results[0].tokens, {key: list(rows) for key, rows in seen.items()}
    (plain, decoded), (text, verified) = found.values()
    assert plain == text
    for at, token in enumerate(plain[:-1]):
        key = 5 + at, token
        assert any(torch.equal(decoded[key][-1], other) for other in verified[key])
