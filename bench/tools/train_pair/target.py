"""The target: a `Qwen3ForCausalLM` and its dense forward, which is faster to train and decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from .layers import rms_norm, rotary, rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sizes import PairSize


class BlockWeights(NamedTuple):
    """One decoder layer as plain tensors, so that all layers share one compiled function."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def new_target(size: PairSize) -> Qwen3ForCausalLM:
    """Build a freshly initialised float32 target; output projections start small, as in GPT-2."""
    config = Qwen3Config(
        **size.shape, intermediate_size=size.intermediate, num_hidden_layers=size.layers,
        rope_theta=size.rope_theta, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        pad_token_id=None, use_cache=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * size.layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * size.layers) ** -0.5)
    return model


def block_weights(layer: torch.nn.Module) -> BlockWeights:
    """Collect the tensors of one `Qwen3DecoderLayer`."""
    attn, mlp = layer.self_attn, layer.mlp
    modules = (
        layer.input_layernorm, attn.q_proj, attn.k_proj, attn.v_proj, attn.q_norm, attn.k_norm,
        attn.o_proj, layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    )  # fmt: skip
    return BlockWeights(*(module.weight for module in modules))


def project(w: BlockWeights, x: Tensor, rope: tuple[Tensor, Tensor], eps: float) -> list[Tensor]:
    """Return rotated q, k and v, each ``[B, heads, T, head_dim]``, for ``x [B, T, H]``."""
    head_dim = w.q_norm.shape[0]
    normed = rms_norm(x, w.input_norm, eps)
    q, k, v = (
        F.linear(normed, weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for weight in (w.q, w.k, w.v)
    )
    return [rotate(rms_norm(q, w.q_norm, eps), *rope), rotate(rms_norm(k, w.k_norm, eps), *rope), v]


def finish(w: BlockWeights, x: Tensor, heads: Tensor, eps: float, dropout: float = 0.0) -> Tensor:
    """Add the attention output ``[B, heads, T, head_dim]`` and then the MLP to the residual."""
    attn = F.linear(heads.transpose(1, 2).flatten(-2), w.o)
    x = x + F.dropout(attn, dropout)
    normed = rms_norm(x, w.post_norm, eps)
    mlp = F.linear(F.silu(F.linear(normed, w.gate)) * F.linear(normed, w.up), w.down)
    return x + F.dropout(mlp, dropout)


def block(
    w: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor, eps: float, dropout: float
) -> Tensor:
    """Run one causal decoder layer over ``x [B, T, H]``."""
    q, k, v = project(w, x, (cos, sin), eps)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return finish(w, x, heads, eps, dropout)


class DenseTarget:
    """The forward passes of training: whole rows with features, and batched generation.

    It reads the parameters of ``model`` in place; ``run_block`` may be a compiled `block`.
    """

    def __init__(
        self, model: Qwen3ForCausalLM, theta: float, run_block: Callable[..., Tensor] = block
    ) -> None:
        self.blocks = [block_weights(layer) for layer in model.model.layers]
        self.embed = model.model.embed_tokens.weight
        self.norm = model.model.norm.weight
        self.head_dim = model.config.head_dim
        self.eps = model.config.rms_norm_eps
        self.theta = theta
        self.run_block = run_block

    def logits(self, x: Tensor) -> Tensor:
        """Map hidden states of the last layer to ``[..., vocab]``."""
        return F.linear(rms_norm(x, self.norm, self.eps), self.embed)

    def forward(
        self, tokens: Tensor, dropout: float = 0.0, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden state ``[B, T, H]`` and the features ``[B, T, len(aux) * H]``."""
        x = F.embedding(tokens, self.embed)
        cos, sin = self.rope(torch.arange(tokens.shape[1], device=tokens.device))
        aux = []
        for index, weights in enumerate(self.blocks):
            x = self.run_block(weights, x, cos, sin, self.eps, dropout)
            if index in aux_layers:
                aux.append(x)
        return x, torch.cat(aux, -1) if aux else None

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for the given positions."""
        return rotary(positions, self.head_dim, self.theta)

    @torch.no_grad()
    def generate(self, prompts: Tensor, length: int, *, temperature: float) -> Tensor:
        """Continue ``prompts [B, P]`` to ``[B, length]``; temperature 0 is greedy.

        An end-of-text token does not stop a row: the next file simply begins.
        """
        rows, prompt_len = prompts.shape
        kv_heads = self.blocks[0].k.shape[0] // self.head_dim
        shape = (len(self.blocks), 2, rows, kv_heads, length, self.head_dim)
        cache = torch.empty(shape, dtype=self.embed.dtype, device=prompts.device)
        out = prompts.new_zeros(rows, length)
        out[:, :prompt_len] = prompts
        begin = 0
        for end in range(prompt_len, length):
            logits = self._decode(out[:, begin:end], cache, begin)
            out[:, end] = choose(logits, temperature)
            begin = end
        return out

    def _decode(self, tokens: Tensor, cache: Tensor, begin: int) -> Tensor:
        end = begin + tokens.shape[1]
        rope = self.rope(torch.arange(begin, end, device=tokens.device))
        x = F.embedding(tokens, self.embed)
        for weights, (k_cache, v_cache) in zip(self.blocks, cache, strict=True):
            q, k_cache[:, :, begin:end], v_cache[:, :, begin:end] = project(
                weights, x, rope, self.eps
            )
            k, v = k_cache[:, :, :end], v_cache[:, :, :end]
            heads = F.scaled_dot_product_attention(
                q, k, v, is_causal=tokens.shape[1] > 1, enable_gqa=True
            )
            x = finish(weights, x, heads, self.eps)
        return self.logits(x[:, -1])


def choose(logits: Tensor, temperature: float) -> Tensor:
    """Pick one token per row of ``logits [B, V]``: the best, or a sample."""
    if temperature == 0:
        return logits.argmax(-1)
    probs = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(probs, 1).squeeze(-1)
