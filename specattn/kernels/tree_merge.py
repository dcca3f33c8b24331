"""Combine the parts of requests whose keys were cut between chunks of work."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.attention_tile import EMPTY, LN2


@triton.jit
def merge_kernel(
    splits,       # [1 + NC, 4] int32
    partial_out,  # [slots, NUM_KV, MT, BM, V_DIM]
    partial_lse,  # [slots, NUM_KV, MT, BM] float32, base 2
    out,          # [B * Q_LEN, Hq, V_DIM], out
    lse,          # [B * Q_LEN, Hq] float32, out, or None
    stride_out, stride_out_head, stride_lse, stride_lse_head,
    Q_LEN: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, V_DIM: tl.constexpr,
    V_PAD: tl.constexpr, BM: tl.constexpr, MT: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """Weigh the parts of ``ROWS`` rows by their log-sum-exp, ``PARTS`` parts at a time."""
    head = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    nth = tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if nth < tl.load(splits):
        req = tl.load(splits + (nth + 1) * 4)
        slot = tl.load(splits + (nth + 1) * 4 + 1)
        parts = tl.load(splits + (nth + 1) * 4 + 2)
        dv = tl.arange(0, V_PAD)                                          # [V_PAD]
        packed = first_row + tl.arange(0, ROWS)                           # [ROWS]
        ok = packed < Q_LEN * GROUP
        # ROWS divides BM: the rows of this program lie in one M tile
        m_tile = first_row // BM
        row = tl.minimum(packed, Q_LEN * GROUP - 1) % BM
        column_ok = (dv < V_DIM)[None, :]

        top = tl.full([ROWS], EMPTY, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, V_PAD], tl.float32)
        for p0 in tl.range(0, parts, PARTS):
            logs = ()
            outs = ()
            # all loads first; absent parts repeat the last one and get weight 0, since
            # predicated loads would be sunk behind the arithmetic
            for p in tl.static_range(PARTS):
                at = ((slot + tl.minimum(p0 + p, parts - 1)) * NUM_KV + head) * MT + m_tile
                at = at.to(tl.int64) * BM + row
                log = tl.load(partial_lse + at, cache_modifier=".cg")
                ptr = partial_out + at[:, None] * V_DIM + dv[None, :]
                if V_PAD == V_DIM:
                    part = tl.load(ptr, cache_modifier=".cg")
                else:
                    part = tl.load(ptr, mask=column_ok, other=0.0, cache_modifier=".cg")
                # Triton knows tuple addition, not unpacking; mypy knows empty tuples by length
                logs = logs + (log,)  # type: ignore[assignment]  # noqa: RUF005
                outs = outs + (part,)  # type: ignore[assignment]  # noqa: RUF005
            new_top = top
            for p in tl.static_range(PARTS):
                new_top = tl.maximum(new_top, logs[p])
            fade = tl.exp2(top - new_top)
            total = total * fade
            acc = acc * fade[:, None]
            for p in tl.static_range(PARTS):
                weight = tl.where(p0 + p < parts, tl.exp2(logs[p] - new_top), 0.0)
                total += weight
                acc += outs[p].to(tl.float32) * weight[:, None]
            top = new_top

        q_row = (req * Q_LEN + packed // GROUP).to(tl.int64)
        q_head = head * GROUP + packed % GROUP
        ptr = out + (q_row * stride_out + q_head * stride_out_head)[:, None] + dv[None, :]
        # rows without any key: their parts are all 0, and so is the result
        tl.store(ptr, (acc / total[:, None]).to(out.dtype.element_ty), mask=ok[:, None] & column_ok)
        if lse is not None:
            value = tl.where(top > 0.5 * EMPTY, (top + tl.log2(total)) * LN2, float("-inf"))
            tl.store(lse + q_row * stride_lse + q_head * stride_lse_head, value, mask=ok)
