"""Where the Gluon kernel serves, and its check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.kernels.gluon_guard import gluon_ok
from specattn.kernels.mla.tiles import GLUON

if TYPE_CHECKING:
    from specattn.kernels.attention.tiles import GluonTile
    from specattn.kernels.attention.tree import TreeAttention


def serves(bucket: TreeAttention) -> bool:
    """Whether the kernel takes these rows, and runs right on their device.

    The first call finds out, so that it must not be made while a graph is captured.
    """
    return (
        bucket.dtype in (torch.float16, torch.bfloat16)
        and (bucket.head_dim, bucket.v_head_dim) == (576, 512)
        and gluon_ok("mla_gluon", check_mla_gluon, bucket.device)
    )


def copies_16_bytes(*tensors: Tensor) -> bool:
    """Check that every row of every head is 16-byte aligned."""
    return all(
        t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0 for t in tensors
    )


def check_mla_gluon(device: torch.device, tile: GluonTile = GLUON) -> None:
    """Raise an ArithmeticError unless the kernel agrees with float32 products.

    The problem has a tree, and short and cut requests.
    """
    from specattn.kernels.mla import MlaAttention

    lengths, q_len, heads, scale = [0, 3000, 61, 130], 3, 16, 576**-0.5
    batch, longest = len(lengths), max(lengths)
    random = torch.Generator(device).manual_seed(0)
    pool = torch.randn(4096, 1, 576, generator=random, device=device).bfloat16()
    q = torch.randn(batch * q_len, heads, 576, generator=random, device=device).bfloat16()
    slots = torch.randint(
        4096, (batch, longest + q_len), generator=random, device=device, dtype=torch.int32
    )
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    # the second and the third node are children of the first
    tail = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], device=device)
    out = torch.full_like(q[..., :512], torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    attention = MlaAttention(
        batch=batch,
        q_len=q_len,
        tail_len=q_len,
        num_qo_heads=heads,
        num_kv_heads=1,
        head_dim=576,
        v_head_dim=512,
        dtype=q.dtype,
        device=device,
        sm_scale=scale,
        tile=tile,
    )
    attention.plan(lens, torch.arange(batch, device=device), slots.stride(0))
    attention.run(
        q,
        pool,
        pool[..., :512],
        out,
        lse,
        indices=slots,
        tail_slots=slots[:, longest:],
        tail_words=(tail << torch.arange(q_len, device=device)).sum(1).repeat(batch, 1)[..., None],
    )
    keys = pool[slots.long(), 0].float()
    logits = torch.einsum("bthd,bnd->bthn", q.unflatten(0, (batch, q_len)).float(), keys) * scale
    prefix = torch.arange(longest, device=device) < lens[:, None]
    visible = torch.cat(
        [prefix[:, None].expand(-1, q_len, -1), tail.bool().expand(batch, -1, -1)], 2
    )
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    want = (logits.softmax(-1) @ keys[:, None, :, :512]).flatten(0, 1)
    off = ((out.float() - want).norm() / want.norm()).item()
    lse_off = (lse - logits.logsumexp(-1).flatten(0, 1)).abs().max().item()
    if not (off < 1e-2 and lse_off < 1e-3):
        raise ArithmeticError(f"relative error {off:.1e}, log-sum-exp off by {lse_off:.1e}")
