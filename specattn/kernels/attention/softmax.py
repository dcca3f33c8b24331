"""The online-softmax step over a tile of gathered keys that kernels share.

The step follows FlashAttention-2 (Dao, 2023) with the softmax in base 2; ``base2`` is
``sm_scale * log2(e)``, so that ``exp2(base2 * s)`` is ``exp(sm_scale * s)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

# a masked logit; a running maximum starts above it (`FLOOR`), so that a row which has seen
# nothing yet gives a masked key the weight exp2(-huge) = 0 and not exp2(0)
MASKED = tl.constexpr(-1.0e30)
FLOOR = tl.constexpr(-1.0e20)
# base-2 log-sum-exp of a row that saw no key, in partial results
EMPTY = tl.constexpr(-3.0e38)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """Evaluate tanh to 2 ulp, near 0, where exp cancels, too."""
    a = tl.abs(x)
    e = tl.exp2(a * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    s = a * a
    p = 0.02079596694061862 - 0.005895152496586597 * s
    p = -0.05378382889056623 + p * s
    p = 0.13331924110397625 + p * s
    p = -0.33333298001498013 + p * s
    t = tl.where(a < 0.6, a + a * s * p, far)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def start_from_sinks(sinks, first, base2, HAS_CAP: tl.constexpr):
    """Return running maximum and sum of rows before their first key.

    Parameters
    ----------
    sinks
        ``[BM]`` pointers to natural logits.
    first
        Whether the rows' first keys follow: a request's sink joins one of its partial results.
    base2
        As in `attend_tile`: it will multiply the maximum, unless there is a cap.
    """
    sink = tl.load(sinks).to(tl.float32) * LOG2E
    if not HAS_CAP:
        sink = sink / base2
    met = first & (sink > FLOOR)
    return tl.where(met, sink, FLOOR), tl.where(met, 1.0, 0.0)


@triton.jit
def attend_tile(
    q,  # [BM, D_PAD]
    acc,  # [BM, V_PAD] float32, running sum of weighted values
    top,  # [BM] float32, running maximum of the logits
    total,  # [BM] float32, running sum of the weights
    slots,  # [BN] int32
    visible,  # [BM, BN] bool, or None where every key is visible
    k_head,  # first key of this head
    v_head,
    base2,
    cap_in,
    cap_out,
    K_SLOT: tl.constexpr,
    V_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Fold one tile of keys into ``acc, top, total``.

    Products are taken in the dtype of ``q``; float8 keys and values are converted to it, and their
    scales are the caller's: the keys' is a factor of the logits, the values' one of the result.
    With a logit cap the logits become ``cap_out * tanh(cap_in * s)``, already in base 2.
    """
    d = tl.arange(0, D_PAD)  # [D_PAD]
    dv = tl.arange(0, V_PAD)  # [V_PAD]
    row = slots.to(tl.int64)  # [BN]
    k_ptr = k_head + row[:, None] * K_SLOT + d[None, :]  # [BN, D_PAD]
    v_ptr = v_head + row[:, None] * V_SLOT + dv[None, :]  # [BN, V_PAD]
    # no load is masked unless the head is padded: the caller clamps the slots
    k_ok = None if D_PAD == HEAD_DIM else (d < HEAD_DIM)[None, :]
    k = tl.load(k_ptr, mask=k_ok, other=None if D_PAD == HEAD_DIM else 0.0).to(q.dtype)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BM, BN]
    if HAS_CAP:
        s = cap_out * tanh(s * cap_in)
    if visible is not None:
        s = tl.where(visible, s, MASKED)
    new_top = tl.maximum(top, tl.max(s, 1))
    # a cap has scaled the logits already
    if HAS_CAP:
        fade = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
    else:
        fade = tl.exp2((top - new_top) * base2)
        p = tl.exp2(s * base2 - (new_top * base2)[:, None])
    total = total * fade + tl.sum(p, 1)
    v_ok = None if V_PAD == V_DIM else (dv < V_DIM)[None, :]
    v = tl.load(v_ptr, mask=v_ok, other=None if V_PAD == V_DIM else 0.0).to(q.dtype)
    acc = acc * fade[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit
def load_query(rows, row_ok, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr):
    """Load query rows; zeros past the last row and the head."""
    d = tl.arange(0, D_PAD)  # [D_PAD]
    mask = row_ok[:, None]
    if D_PAD != HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    return tl.load(rows[:, None] + d[None, :], mask=mask, other=0.0)  # [BM, D_PAD]


@triton.jit
def as_factor(q, cache):
    """Convert queries to the dtype of products with keys of ``cache``.

    Over float8 keys that is float16: GPUs convert e4m3 to it in one instruction, to bfloat16 in
    several.
    """
    if cache.dtype.element_ty == tl.float8e4nv:
        q = q.to(tl.float16)
    return q


@triton.jit
def store_rows(
    rows,
    acc,
    total,
    row_ok,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    v_scale=None,
):
    """Store normalised values, times ``v_scale``; 0 for rows that saw no key."""
    dv = tl.arange(0, V_PAD)  # [V_PAD]
    mask = row_ok[:, None]
    if V_PAD != V_DIM:
        mask = mask & (dv < V_DIM)[None, :]
    inverse = tl.where(total != 0.0, 1.0 / tl.where(total != 0.0, total, 1.0), 0.0)
    if v_scale is not None:
        inverse *= v_scale
    values = tl.where((total != 0.0)[:, None], acc * inverse[:, None], 0.0)
    tl.store(rows[:, None] + dv[None, :], values.to(rows.dtype.element_ty), mask=mask)
