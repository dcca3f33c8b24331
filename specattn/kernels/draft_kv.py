"""Index lists of all draft decode steps: the prefix, then each branch's true ancestors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.checks import require_dense
from specattn.kernels.launch import programs_per_row
from specattn.kernels.reference.draft_kv import check_lists, draft_kv_width

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["draft_kv_width", "fill_draft_kv", "fill_draft_tails"]


@triton.jit
def _store_tail(
    branch_slots,
    words,
    kv_indices,
    at,
    step,
    width,
    TOPK: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write the step + 1 slots of a branch's set bits at ``kv_indices + at``, ascending."""
    node = tl.arange(0, BLOCK_J)  # [BLOCK_J]
    drafted = node < (step + 1) * TOPK
    word = tl.load(words + node // 64, mask=drafted, other=0)
    seen = ((word >> (node % 64)) & 1) != 0
    rank = tl.cumsum(seen.to(tl.int32), 0) - 1
    fits = seen & (rank <= step) & (at + rank < width)
    tl.store(kv_indices + at + rank, tl.load(branch_slots + node, mask=fits, other=0), mask=fits)
    # A branch whose words name fewer ancestors, such as padding, reads slot 0 instead.
    rank = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    short = (rank >= tl.sum(seen.to(tl.int32), 0)) & (rank <= step) & (at + rank < width)
    tl.store(kv_indices + at + rank, tl.zeros([BLOCK_S], tl.int32), mask=short)


@triton.jit
def _fill_draft_kv_kernel(
    req_to_token,  # [rows, max_len] int32
    req_pool_indices,  # [B] int64
    seq_lens,  # [B] int32
    branch_slots,  # [B, steps, TOPK] int32
    words,  # [B, steps, TOPK, W] int64
    kv_indptr,  # [steps, B * TOPK + 1] int32, out
    kv_indices,  # [steps, width] int32, out
    num_steps,
    max_len,
    width,
    stride_table,
    stride_slots,
    stride_indptr,
    stride_indices,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    branch = tl.program_id(0).to(tl.int64)
    step = tl.program_id(2).to(tl.int64)
    req = branch // TOPK

    before = tl.full([], 0, tl.int64)
    for first in range(0, req, BLOCK_B):
        other = first + tl.arange(0, BLOCK_B)  # [BLOCK_B]
        lens = tl.load(seq_lens + other, mask=other < req, other=0)
        before += tl.sum(tl.minimum(tl.maximum(lens, 0), max_len).to(tl.int64), 0)
    length = tl.minimum(tl.maximum(tl.load(seq_lens + req), 0), max_len).to(tl.int64)
    begin = TOPK * before + branch % TOPK * length + branch * (step + 1)

    row = req_to_token + tl.load(req_pool_indices + req) * stride_table
    kv_indices += step * stride_indices
    end = tl.minimum(length, width - begin).to(tl.int32)
    for first in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        column = first + tl.arange(0, BLOCK)  # [BLOCK]
        slots = tl.load(row + column, mask=column < end, other=0)
        tl.store(kv_indices + begin + column, slots, mask=column < end)

    if tl.program_id(1) == 0:
        kv_indptr += step * stride_indptr
        tl.store(kv_indptr, 0, mask=branch == 0)
        tl.store(kv_indptr + branch + 1, (begin + length + step + 1).to(tl.int32))
        node = (req * num_steps + step) * TOPK + branch % TOPK
        _store_tail(
            branch_slots + req * stride_slots,
            words + node * W,
            kv_indices,
            begin + length,
            step,
            width,
            TOPK,
            BLOCK_J,
            BLOCK_S,
        )


@triton.jit
def _fill_draft_tails_kernel(
    seq_lens,  # [B] int32
    branch_slots,  # [B, steps, TOPK] int32
    words,  # [B, TOPK, W] int64, of this step
    kv_indptr,  # [B * TOPK + 1] int32, of this step
    kv_indices,  # [width] int32, of this step, out
    step,
    width,
    stride_slots,
    stride_words,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    branch = tl.program_id(0).to(tl.int64)
    req = branch // TOPK
    begin = tl.load(kv_indptr + branch).to(tl.int64)
    room = tl.load(kv_indptr + branch + 1) - begin - (step + 1)
    length = tl.minimum(tl.maximum(tl.load(seq_lens + req), 0), room)
    _store_tail(
        branch_slots + req * stride_slots,
        words + req * stride_words + branch % TOPK * W,
        kv_indices,
        begin + length,
        step,
        width,
        TOPK,
        BLOCK_J,
        BLOCK_S,
    )


def fill_draft_kv(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    branch_slots: Tensor,
    words: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    """Write the KV lists of every draft decode step in one launch.

    At step s, branch k of request b reads the request's prefix, then the slots of its s + 1
    ancestors (itself the last), so that drafting a node equals drafting its path as a chain::

        kv_indices[s]: | prefix 0, path of (0, 0) | prefix 0, path of (0, 1) | prefix 1, ...

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows, max_len]`` int32, slot of every prefix token; dense last axis.
    req_pool_indices, seq_lens : Tensor
        ``[B]`` int64 and int32: each request's row, and its prefix length.
    branch_slots : Tensor
        ``[B, steps, topk]`` int32, slot of every draft node; may have a stride between requests.
    words : Tensor
        ``[B, steps, topk, W]`` int64, bit ``s * topk + k`` for each ancestor and the node itself.
        Where fewer than s + 1 bits are set, the list ends with slot 0; more are ignored.
    kv_indptr : Tensor
        ``[steps, B * topk + 1]`` int32, written, the leading 0 too; may have a row stride.
    kv_indices : Tensor
        ``[steps, width]`` int32, written up to each row's ``kv_indptr[-1]``; `draft_kv_width`
        says how wide it must be.

    Raises
    ------
    ValueError
        If the lists of full rows would not fit, or a tensor is not laid out as above. Nothing has
        been written then.
    """
    batch, steps, topk, num_words = words.shape
    max_len = req_to_token.shape[1]
    check_lists(branch_slots, words, kv_indptr, kv_indices, max_len)
    require_dense(branch_slots=branch_slots[:1], words=words, kv_indices=kv_indices[:1])
    if not batch * steps:
        kv_indptr.zero_()
        return
    block = min(1024, triton.next_power_of_2(max_len))
    programs = programs_per_row(batch * topk * steps, triton.cdiv(max_len, block))
    _fill_draft_kv_kernel[(batch * topk, programs, steps)](
        req_to_token,
        req_pool_indices,
        seq_lens,
        branch_slots,
        words,
        kv_indptr,
        kv_indices,
        steps,
        max_len,
        kv_indices.shape[1],
        req_to_token.stride(0),
        branch_slots.stride(0),
        kv_indptr.stride(0),
        kv_indices.stride(0),
        TOPK=topk,
        W=num_words,
        BLOCK=block,
        BLOCK_B=128,
        BLOCK_J=triton.next_power_of_2(steps * topk),
        BLOCK_S=triton.next_power_of_2(steps),
    )


def fill_draft_tails(
    step: int,
    seq_lens: Tensor,
    branch_slots: Tensor,
    words: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    """Write the ancestors of one step again, once its words are known; prefixes stay.

    `fill_draft_kv` has to have run for the same lengths.

    Parameters
    ----------
    step : int
        The step whose lists are brought up to date.
    seq_lens, branch_slots, words, kv_indptr, kv_indices : Tensor
        As in `fill_draft_kv`; only ``kv_indices[step]`` is written.
    """
    batch, _, topk, num_words = words.shape
    require_dense(branch_slots=branch_slots[:1], words=words, kv_indices=kv_indices[:1])
    if not batch:
        return
    _fill_draft_tails_kernel[(batch * topk,)](
        seq_lens,
        branch_slots,
        words[:, step],
        kv_indptr[step],
        kv_indices[step],
        step,
        kv_indices.shape[1],
        branch_slots.stride(0),
        words.stride(0),
        TOPK=topk,
        W=num_words,
        BLOCK_J=triton.next_power_of_2((step + 1) * topk),
        BLOCK_S=triton.next_power_of_2(step + 1),
        num_warps=1,
    )
