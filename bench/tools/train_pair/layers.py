"""The three functions that target and head share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in float32 and return it in the dtype of ``x``."""
    wide = x.float()
    return (F.rms_norm(wide, (x.shape[-1],), eps=eps) * weight.float()).to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine ``[..., head_dim]`` float32 for rotate-half rotary embeddings."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[..., None].float() * theta**-exponent
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to ``x [..., T, head_dim]``, in float32, keeping its dtype."""
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)
