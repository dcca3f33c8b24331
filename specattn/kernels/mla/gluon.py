"""Where the Gluon kernel serves, and its check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specattn.kernels.attention.plain import tree_attention
from specattn.kernels.gluon_guard import gluon_ok
from specattn.kernels.mla.tiles import GLUON

if TYPE_CHECKING:
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


def check_mla_gluon(device: torch.device) -> None:
    """Raise an ArithmeticError unless the kernel agrees with torch.

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
    rows = torch.arange(batch, device=device)
    # the second and the third node are children of the first
    words = torch.tensor([[1], [3], [5]], device=device).repeat(batch, 1, 1)
    tail: dict[str, Any] = {"tail_slots": slots[:, longest:], "tail_words": words}
    out = torch.full_like(q[..., :512], torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    want, want_lse = out.float(), lse.clone()
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
        tile=GLUON,
    )
    attention.plan(lens, rows, slots.stride(0))
    attention.run(q, pool, pool[..., :512], out, lse, indices=slots, **tail)
    tree_attention(
        q,
        pool,
        pool[..., :512],
        want,
        want_lse,
        seq_lens=lens,
        req_pool_indices=rows,
        req_to_token=slots,
        positions=None,
        tail_positions=None,
        sm_scale=scale,
        max_prefix_len=longest,
        **tail,
    )
    off = ((out.float() - want).norm() / want.norm()).item()
    lse_off = (lse - want_lse).abs().max().item()
    if not (off < 1e-2 and lse_off < 1e-3):
        raise ArithmeticError(f"relative error {off:.1e}, log-sum-exp off by {lse_off:.1e}")
