"""The online-softmax step over a tile of latent rows that kernels share.

Absorbed multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.2): all heads
read one row per token, of RANK latent and ROPE rotated numbers. The whole row is the key and its
latent part the value, so a tile is loaded once and used twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.attention.softmax import MASKED, load_query


@triton.jit
def load_latent_query(rows, row_ok, WIDTHS: tl.constexpr):
    """Load query rows as latent ``[BM, RANK_PAD]`` and rotated ``[BM, ROPE_PAD]``."""
    RANK: tl.constexpr = WIDTHS[0]
    latent = load_query(rows, row_ok, RANK, WIDTHS[2])
    rotated = load_query(rows + RANK, row_ok, WIDTHS[1], WIDTHS[3])
    return latent, rotated


@triton.jit
def _load_columns(rows, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Load ``WIDTH`` numbers of every row, unmasked where nothing is padded."""
    d = tl.arange(0, PAD)[None, :]  # [1, PAD]
    if PAD == WIDTH:
        return tl.load(rows[:, None] + d)
    return tl.load(rows[:, None] + d, mask=d < WIDTH, other=0.0)


@triton.jit
def attend_latent_tile(
    query,  # of `load_latent_query`
    acc,  # [BM, RANK_PAD] float32, running sum of weighted values
    top,  # [BM] float32, running maximum of the logits
    total,  # [BM] float32, running sum of the weights
    slots,  # [BN] int32
    visible,  # [BM, BN] bool, or None where every key is visible
    cache,  # [slots, RANK + ROPE]
    base2,  # sm_scale * log2(e)
    SLOT: tl.constexpr,
    WIDTHS: tl.constexpr,  # see `latent_widths`
):
    """Fold one tile of latent rows into ``acc, top, total``; see `attend_tile`."""
    q_latent, q_rotated = query
    RANK: tl.constexpr = WIDTHS[0]
    rows = cache + slots.to(tl.int64) * SLOT  # [BN]
    latent = _load_columns(rows, RANK, WIDTHS[2])  # [BN, RANK_PAD]
    rotated = _load_columns(rows + RANK, WIDTHS[1], WIDTHS[3])  # [BN, ROPE_PAD]
    s = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")  # [BM, BN]
    s = tl.dot(q_rotated, tl.trans(rotated), s, input_precision="ieee")
    if visible is not None:
        s = tl.where(visible, s, MASKED)
    new_top = tl.maximum(top, tl.max(s, 1))
    fade = tl.exp2((top - new_top) * base2)
    p = tl.exp2(s * base2 - (new_top * base2)[:, None])
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")
    return acc, new_top, total
