from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from specattn.models import HFTarget
from tests.implementations import using

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specattn.config import LayerConfig
    from specattn.kernels.gated_delta import LayerParts, LayerWeights

TINY = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class DenseAttend:
    """Attention over everything stored so far, in float64 and without a cache layout."""

    def __init__(self, layers: tuple[LayerConfig, ...]) -> None:
        self.layers = layers
        self.stored: list[list[tuple[int, int, torch.Tensor, torch.Tensor]]] = [[] for _ in layers]
        #: By layer and request: a state and the last inputs of the convolution.
        self.states: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, positions: torch.Tensor, requests: torch.Tensor | None = None) -> DenseAttend:
        self.positions = positions.tolist()
        self.requests = [0] * len(self.positions) if requests is None else requests.tolist()
        return self

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        config, stored = self.layers[layer], self.stored[layer]
        assert config.sinks == (sinks is not None)
        assert q.shape[1:] == (config.num_qo_heads, config.head_dim)
        assert k.shape[1:] == (config.num_kv_heads, config.head_dim)
        assert v.shape[1:] == (config.num_kv_heads, config.v_head_dim)
        assert all(tensor.is_contiguous() and tensor.dtype == config.dtype for tensor in (q, k, v))
        stored.extend(zip(self.requests, self.positions, k.double(), v.double(), strict=True))
        window = config.window_left if config.window_left >= 0 else math.inf
        out = torch.empty(*q.shape[:2], config.v_head_dim, dtype=q.dtype)
        for row, (request, position) in enumerate(zip(self.requests, self.positions, strict=True)):
            seen = [s for s in stored if s[0] == request and 0 <= position - s[1] <= window]
            group = config.num_qo_heads // config.num_kv_heads
            keys = torch.stack([s[2] for s in seen]).repeat_interleave(group, 1)  # [n, Hq, D]
            values = torch.stack([s[3] for s in seen]).repeat_interleave(group, 1)
            logits = torch.einsum("hd,nhd->hn", q[row].double(), keys) * config.sm_scale
            if config.logit_cap:
                logits = config.logit_cap * torch.tanh(logits / config.logit_cap)
            if sinks is not None:
                logits = torch.cat([logits, sinks.double()[:, None]], dim=1)
            weights = logits.softmax(-1)[:, : len(seen)]
            out[row] = torch.einsum("hn,nhd->hd", weights, values).to(q.dtype)
        return out

    def mix(self, layer: int, parts: LayerParts, weights: LayerWeights) -> torch.Tensor:
        """The recurrence, token by token in the order of positions."""
        config = self.layers[layer]
        heads, group = config.num_v_heads, config.num_v_heads // config.num_k_heads
        sizes = [config.num_k_heads * config.head_k_dim] * 2 + [heads * config.head_v_dim]
        qkv, a, b = (one.double().sum(0) for one in (parts.qkv, parts.a, parts.b))
        gate = weights.a_log.double().exp() * F.softplus(a + weights.dt_bias.double())
        out = qkv.new_zeros(len(qkv), heads, config.head_v_dim)
        for at in sorted(range(len(qkv)), key=lambda at: self.positions[at]):
            key = layer, self.requests[at]
            if key not in self.states:
                window = qkv.new_zeros(config.conv_width, qkv.shape[1])
                self.states[key] = out.new_zeros(*out.shape[1:], config.head_k_dim), window
            state, window = self.states[key]
            window = torch.cat([window[1:], qkv[at : at + 1]])
            mixed = F.silu((window.T * weights.conv.double()).sum(1)).split(sizes)
            q, k = (
                F.normalize(one.view(-1, config.head_k_dim), dim=1).repeat_interleave(group, 0)
                for one in mixed[:2]
            )
            state = state * (-gate[at]).exp()[:, None, None]
            lacking = mixed[2].view(heads, -1) - torch.einsum("hvk,hk->hv", state, k)
            lacking = lacking * b[at].sigmoid()[:, None]
            state = state + torch.einsum("hv,hk->hvk", lacking, k)
            self.states[key] = state, window
            out[at] = torch.einsum("hvk,hk->hv", state, q) * config.head_k_dim**-0.5
        return out.to(config.dtype)


@pytest.fixture(params=["naive", "triton"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """The torch functions, and the kernels in Triton's interpreter."""
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    with using(request.param):
        yield


@pytest.fixture
def dense() -> type[DenseAttend]:
    return DenseAttend


@pytest.fixture
def tiny() -> Callable[..., torch.nn.Module]:
    """A tiny random model of a type, without any parameter left at 0 or 1."""

    def build(model_type: str, **changes: object) -> torch.nn.Module:
        torch.manual_seed(0)
        settings = TINY | changes
        if model_type == "falcon":  # derives it
            del settings["head_dim"]
        config = AutoConfig.for_model(model_type, **settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model

    return build


@pytest.fixture
def target(tiny: Callable[..., torch.nn.Module]) -> HFTarget:
    return HFTarget.from_model(tiny("llama", num_hidden_layers=5))


@pytest.fixture(autouse=True)
def _calm() -> None:
    # What transformers says while a test builds a model is not what is under test.
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
