"""The EAGLE-3 head as a dense module, in the names and shapes of the published checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import rms_norm, rotary, rotate

if TYPE_CHECKING:
    from collections.abc import Iterator


class Norm(nn.Module):
    """A root-mean-square norm that computes in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a projection without bias."""
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Grouped-query attention of inputs of any width, its queries and keys normed or not."""

    def __init__(self, config: dict, width: int, theta: float, *, normed: bool) -> None:
        super().__init__()
        head_dim, eps = config["head_dim"], config["rms_norm_eps"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.theta, self.groups = head_dim, theta, heads // kv_heads
        self.q_proj = linear(width, heads * head_dim)
        self.k_proj = linear(width, kv_heads * head_dim)
        self.v_proj = linear(width, kv_heads * head_dim)
        self.o_proj = linear(heads * head_dim, config["hidden_size"])
        self.q_norm, self.k_norm = (
            Norm(head_dim, eps) if normed else nn.Identity() for _ in range(2)
        )

    def forward(
        self, x: Tensor, keyed: Tensor, positions: Tensor, mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Attend ``x [B, Q, width]``, the last of ``keyed [B, T, width]``, to these and the past.

        ``positions [..., T]`` are those of the keys, and ``mask [..., Q, past + T]`` says which of
        them a query sees. The second value is the keys and values so far.
        """
        q, k, v = (
            proj(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj, inputs in ((self.q_proj, x), (self.k_proj, keyed), (self.v_proj, keyed))
        )
        # [.., 1, T, head_dim]; one row of positions may serve the whole batch
        cos, sin = (part.unsqueeze(-3) for part in rotary(positions, self.head_dim, self.theta))
        first = keyed.shape[1] - x.shape[1]
        q = rotate(self.q_norm(q), cos[..., first:, :], sin[..., first:, :])
        k = rotate(self.k_norm(k), cos, sin)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        wide_k, wide_v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        heads = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask)
        return self.o_proj(heads.transpose(1, 2).flatten(-2)), (k, v)


class Mlp(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The single decoder layer; its residual stream is the feature, not the embedding."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = Norm(hidden, eps)
        self.hidden_norm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden, config["rope_theta"], normed=False)
        self.mlp = Mlp(hidden, config["intermediate_size"])

    def forward(
        self, embed: Tensor, feature: Tensor, positions: Tensor, mask: Tensor,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Return the new feature ``[B, T, H]`` and the keys and values seen so far."""
        both = torch.cat([self.input_layernorm(embed), self.hidden_norm(feature)], -1)
        attn, kv = self.self_attn(both, both, positions, mask, past)
        x = feature + attn
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class DenseHead(nn.Module):
    """EAGLE-3 draft head (arXiv:2503.01840), computed densely over whole rows.

    At position p it reads token ``t[p + 1]`` and a feature of position p, and predicts
    ``t[p + 2]``. The feature is `fuse` of three target layers, or in later draft steps the head's
    own hidden state. ``target_embed [vocab, H]`` is the target's embedding; it is not saved.
    """

    d2t: Tensor
    t2d: Tensor
    embed: Tensor

    def __init__(self, config: dict, target_embed: Tensor) -> None:
        super().__init__()
        hidden, draft_vocab = config["hidden_size"], config["draft_vocab_size"]
        self.fc = linear(3 * hidden, hidden)
        self.midlayer = MidLayer(config)
        self.norm = Norm(hidden, config["rms_norm_eps"])
        self.lm_head = linear(hidden, draft_vocab)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))
        self.register_buffer("embed", target_embed.detach(), persistent=False)

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, ``[draft_vocab] int64``."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, aux: Tensor) -> Tensor:
        """Map the three concatenated target layers ``[B, T, 3H]`` to features ``[B, T, H]``."""
        return self.fc(aux)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states ``[..., H]`` to draft logits ``[..., draft_vocab]``."""
        return self.lm_head(self.norm(hidden))

    def unroll(self, tokens: Tensor, aux: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield the hidden states ``[B, T, H]`` of ``steps`` chained draft steps.

        Row position p is the base of its own chain: step s reads ``tokens[:, p + s]`` (the token
        after position p + s) at rotary position p + s, and sees the step-0 keys of positions up
        to p and its own chain's keys of steps 1 to s. So one dense call per step stands for a
        chain drafted after every position (the training-time test of the paper).

        ``tokens`` is ``[B, >= T + steps - 1]`` and ``aux`` is ``[B, T, 3H]``.
        """
        rows = aux.shape[1]
        positions = torch.arange(rows, device=aux.device)
        own = torch.eye(rows, dtype=torch.bool, device=aux.device)
        mask = own.cumsum(0).bool()
        feature, past = self.fuse(aux), None
        for step in range(steps):
            embed = F.embedding(tokens[:, step : step + rows], self.embed)
            feature, past = self.midlayer(embed, feature, positions + step, mask, past)
            yield feature
            mask = torch.cat([mask, own], 1)
