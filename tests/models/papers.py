"""The papers' heads in plain torch, float64, over one request of T tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.models.heads import Tensors

    Turn = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


# The papers' heads in plain torch, float64, over one request of T tokens.
def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (torch.arange(half).double() / half)  # [T, D / 2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_neighbours(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate dimension 2 i with 2 i + 1, as complex numbers."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (torch.arange(half).double() / half)
    turned = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
    return torch.view_as_real(turned * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(
        -2
    )


def attention(
    x: torch.Tensor,
    w: Tensors,
    positions: torch.Tensor,
    theta: float,
    *,
    turn: Turn = rotate,
    window: float = math.inf,
) -> torch.Tensor:
    def project(name: str) -> torch.Tensor:
        return x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", torch.zeros(()))

    q, k, v = (project(name).unflatten(-1, (-1, 24)) for name in "qkv")
    q, k = turn(q, positions, theta), turn(k, positions, theta)
    out = torch.empty_like(q)
    for head in range(4):
        logits = q[:, head] @ k[:, head // 2].T * 24**-0.5
        back = positions[:, None] - positions
        logits = logits.masked_fill((back < 0) | (back >= window), -torch.inf)
        out[:, head] = logits.softmax(-1) @ v[:, head // 2]
    return out.flatten(1) @ w["o_proj.weight"].T + w.get("o_proj.bias", torch.zeros(()))


def mlp(x: torch.Tensor, w: Tensors, act: str = "silu") -> torch.Tensor:
    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", torch.zeros(()))

    gate = project(x, "gate")
    # that of gelu is the normal distribution's
    share = gate.sigmoid() if act == "silu" else (1 + (gate / 2**0.5).erf()) / 2
    return project(gate * share * project(x, "up"), "down")


def under(tensors: Tensors, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v.double() for k, v in tensors.items() if k.startswith(prefix)}


def eagle_layer(
    x: torch.Tensor, w: Tensors, positions: torch.Tensor, theta: float = 5000.0
) -> torch.Tensor:
    y = rms(x, w["input_layernorm.weight"]) if "input_layernorm.weight" in w else x
    x = x + attention(y, under(w, "self_attn."), positions, theta)
    return x + mlp(rms(x, w["post_attention_layernorm.weight"]), under(w, "mlp."))


def eagle3_layer(
    embeds: torch.Tensor,
    x: torch.Tensor,
    w: Tensors,
    positions: torch.Tensor,
    theta: float,
    *,
    norm_before_residual: bool = False,
    act: str = "silu",
    turn: Turn = rotate,
    window: float = math.inf,
) -> torch.Tensor:
    both = [rms(embeds, w["input_layernorm.weight"]), rms(x, w["hidden_norm.weight"])]
    stream = both[1] if norm_before_residual else x
    x = stream + attention(
        torch.cat(both, -1), under(w, "self_attn."), positions, theta, turn=turn, window=window
    )
    return x + mlp(rms(x, w["post_attention_layernorm.weight"]), under(w, "mlp."), act)
