"""What both heads are made of, as dense modules in the names of the published checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

if TYPE_CHECKING:
    from transformers import LlamaConfig


class Norm(nn.RMSNorm):
    """A root-mean-square norm that computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return super().forward(x.float()).to(x.dtype)


class Heads(nn.Module):
    """Projections of grouped-query attention, its queries and keys normed or not."""

    def __init__(self, config: LlamaConfig, width: int, *, normed: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q, kv = (
            n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.groups = q // kv
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, size, bias=False) for size in (q, kv, kv)
        )
        self.o_proj = nn.Linear(q, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            Norm(self.head_dim, config.rms_norm_eps) if normed else nn.Identity() for _ in range(2)
        )
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return ``[B, heads, T, head_dim]`` of ``x [B, T, width]`` at ``positions``."""
        return self._rotated(self.q_norm(self._split(self.q_proj(x))), positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each repeated for its group, ``[B, heads, T, head_dim]``."""
        k = self._rotated(self.k_norm(self._split(self.k_proj(x))), positions)
        v = self._split(self.v_proj(x))
        return k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)

    def merged(self, heads: Tensor) -> Tensor:
        """Project the heads' outputs ``[B, heads, T, head_dim]`` to ``[B, T, H]``."""
        return self.o_proj(heads.transpose(1, 2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        wide = x.float()
        cos, sin = (part[:, None] for part in self.rotary_emb(wide, positions))
        return (wide * cos + rotate_half(wide) * sin).to(x.dtype)


class Mixed(nn.Module):
    """Mixes the target's features, whose channels differ by orders of magnitude.

    Training sees them divided by ``scale [F]``, so that the optimiser moves all channels alike.
    """

    scale: Tensor

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, features) * 0.3 * features**-0.5)
        self.register_buffer("scale", torch.ones(features), persistent=False)

    @property
    def weight_as_read(self) -> Tensor:
        """The weight for features that are not divided."""
        return self.weight / self.scale

    def forward(self, features: Tensor) -> Tensor:
        """Map features ``[..., F]`` to ``[..., H]``."""
        return F.linear(features.float() / self.scale, self.weight)


@torch.no_grad()
def start(head: nn.Module, features: Tensor, last: Tensor) -> None:
    """Have a head begin near its target: the last of the states that it reads passes through.

    ``features [B, T, F]`` are some of what its ``fc`` reads, ``last [B, T, H]`` the target's normed
    last states, whose scale its ``norm`` takes. All is by medians: the first token of a row has
    channels thousands of times as large as others, and some channels are large in all.
    """
    sizes = 1.5 * features.flatten(0, 1).float().abs().median(0).values
    head.fc.scale.copy_(sizes.clamp(min=1e-3))
    hidden = last.shape[-1]
    head.fc.weight[:, -hidden:] += torch.eye(hidden, device=last.device)
    head.norm.weight.fill_(last.flatten(0, 1).float().std(0).median())


def draw(head: nn.Module) -> None:
    """Draw the weights of a head's projections, those into the residual stream small."""
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):
            scale = 0.5 if name.endswith(("o_proj", "down_proj")) else 1.0
            nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)
