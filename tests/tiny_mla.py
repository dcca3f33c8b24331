"""A small DeepSeek-style model: latent attention, absorbed for the library, expanded to check it.

Both forms share the weights; the target and draft are otherwise those of `tests.tiny`.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from specattn.config import AttnConfig
from tests.tiny import TinyDraft, TinyTarget, rotate

HEADS, NOPE, ROPE, VALUE = 3, 16, 16, 24


class MlaBlock(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); ``q_rank`` 0: no query LoRA."""

    def __init__(self, inputs: int, hidden: int, rank: int, q_rank: int, dtype) -> None:
        super().__init__()
        scale = (NOPE + ROPE) ** -0.5
        self.absorbed = AttnConfig(
            HEADS, 1, rank + ROPE, v_head_dim=rank, dtype=dtype, sm_scale=scale, latent=True
        )
        self.expanded = AttnConfig(
            HEADS, HEADS, NOPE + ROPE, v_head_dim=VALUE, dtype=dtype, sm_scale=scale
        )
        self.config = self.absorbed
        self.q_a = nn.Linear(inputs, q_rank, bias=False) if q_rank else None
        self.q_b = nn.Linear(q_rank or inputs, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(inputs, rank + ROPE, bias=False)
        self.w_uk = nn.Parameter(torch.randn(HEADS, NOPE, rank) * rank**-0.5)
        self.w_uv = nn.Parameter(torch.randn(HEADS, rank, VALUE) * rank**-0.5)
        self.o = nn.Linear(HEADS * VALUE, hidden, bias=False)

    def forward(self, x: Tensor, turned: tuple[Tensor, Tensor], layer: int, attend) -> Tensor:
        x = nn.functional.layer_norm(x, x.shape[-1:])
        low = x if self.q_a is None else nn.functional.layer_norm(y := self.q_a(x), y.shape[-1:])
        q = 2 * self.q_b(low).view(-1, HEADS, NOPE + ROPE)
        q_pe = rotate(q[..., NOPE:], turned)  # [T, H, ROPE]
        compressed = self.kv_a(x)
        latent = nn.functional.layer_norm(c := compressed[:, :-ROPE], c.shape[-1:])
        k_pe = rotate(compressed[:, None, -ROPE:], turned)  # [T, 1, ROPE]
        form = self._absorbed if self.config.latent else self._expanded
        return self.o(form(layer, attend, q[..., :NOPE], q_pe, latent, k_pe).flatten(1))

    def _absorbed(self, layer, attend, q_nope, q_pe, latent, k_pe):
        q_latent = torch.einsum("thn,hnr->thr", q_nope, self.w_uk)
        row = torch.cat([latent[:, None], k_pe], -1)  # [T, 1, rank + ROPE]
        out = attend(layer, torch.cat([q_latent, q_pe], -1), row, row[..., : latent.shape[-1]])
        return torch.einsum("thr,hrv->thv", out, self.w_uv)

    def _expanded(self, layer, attend, q_nope, q_pe, latent, k_pe):
        k_nope = torch.einsum("tr,hnr->thn", latent, self.w_uk)
        v = torch.einsum("tr,hrv->thv", latent, self.w_uv)
        k = torch.cat([k_nope, k_pe.expand(-1, HEADS, -1)], -1)
        return attend(layer, torch.cat([q_nope, q_pe], -1), k, v)


class TinyMlaTarget(TinyTarget):
    def __init__(self, *, layers=2, rank=64, q_rank=24, dtype=torch.float32, device="cpu") -> None:
        super().__init__(layers=1)
        self.half = ROPE // 2
        self.blocks = nn.ModuleList(MlaBlock(64, 64, rank, q_rank, dtype) for _ in range(layers))
        self.layers = tuple(block.config for block in self.blocks)
        self.to(device=device, dtype=dtype).requires_grad_(False)


class TinyMlaDraft(TinyDraft):
    def __init__(self, *, rank=64, q_rank=0, dtype=torch.float32, device="cpu") -> None:
        super().__init__()
        self.half = ROPE // 2
        self.block = MlaBlock(128, 64, rank, q_rank, dtype)
        self.layers = (self.block.config,)
        self.to(device=device, dtype=dtype).requires_grad_(False)


def expand(target: TinyMlaTarget) -> TinyMlaTarget:
    """The same weights with every head's keys and values written out, in float64."""
    target = copy.deepcopy(target).double()
    for block in target.blocks:
        block.config = block.expanded
    target.layers = tuple(block.config for block in target.blocks)
    return target
