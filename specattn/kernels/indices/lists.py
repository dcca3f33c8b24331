"""Index lists and packed masks of attention libraries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specattn.checks import require_dense, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import cdiv, power_of_2, programs_per_row
from specattn.kernels.words import seen_slots

launch = TritonModule("specattn.kernels.indices.triton_lists")


class KeySlots(NamedTuple):
    """The slots of requests' keys: a prefix in a table, a tail.

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows, max_len]`` int32, slots of the prefixes; dense last axis.
    rows, seq_lens : Tensor
        ``[B]`` int64 and int32: each request's row, and its prefix length.
    tail : Tensor
        ``[B, tail]`` int32, or ``[B, steps, topk]`` of a draft; may have a stride between requests.
    """

    req_to_token: Tensor
    rows: Tensor
    seq_lens: Tensor
    tail: Tensor

    def arguments(self) -> tuple[Tensor | int, ...]:
        """Return what kernels take: the tensors, row strides of table and tail."""
        return *self, self.req_to_token.stride(0), self.tail.stride(0)

    def at(self, place: Tensor) -> Tensor:
        """Return slots ``[B, n]`` of keys at places ``[B, n]``."""
        (batch, tail), longest = self.tail.shape, self.req_to_token.shape[1]
        prefix = self.seq_lens.clamp(0, longest).long()[:, None]
        place = place.expand(batch, -1)
        cached = self.req_to_token[self.rows[:, None], place.clamp(max=longest - 1)]
        own = self.tail.gather(1, (place - prefix).clamp(0, tail - 1))
        return torch.where(place < prefix, cached, own)


def fill_lists(
    keys: KeySlots, *, positions: Tensor, kv_indptr: Tensor, kv_indices: Tensor, window_left: int
) -> None:
    """Write each request's list of slots: its prefix, then its tail.

    A list shorter than both holds the last of them: a window lets the host leave keys out.

    Parameters
    ----------
    keys : KeySlots
        The slots; a tail of at least 0, or 1 with a window.
    positions : Tensor
        ``[B, q_len]`` int64, read with a window only; may have a row stride.
    kv_indptr : Tensor
        ``[at least B + 1]`` int32, read: where each list begins.
    kv_indices : Tensor
        ``[at least kv_indptr[B]]`` int32, written up to there.
    window_left : int
        With a window, a listed prefix key that no query of the request sees is replaced by the
        tail's last: its slot may hold anything, and a weight of 0 times a NaN is NaN. -1 is none.
    """
    require_dense(kv_indptr=kv_indptr, kv_indices=kv_indices)
    req_to_token, rows, seq_lens, tail_slots = keys
    (batch, tail), width = tail_slots.shape, req_to_token.shape[1]
    if on_triton(kv_indptr):
        block = 512
        programs = programs_per_row(batch, cdiv(width + tail, block))
        launch.fill_lists_kernel[batch, programs](
            keys.arguments(),
            positions,
            kv_indptr,
            kv_indices,
            positions.shape[1],
            tail,
            window_left,
            positions.stride(0),
            WINDOW=window_left >= 0,
            BLOCK=block,
            BLOCK_Q=power_of_2(positions.shape[1]),
            num_warps=4,
        )
        return
    begin, end = kv_indptr[:batch].long(), kv_indptr[1 : batch + 1].long()
    entry = torch.arange(len(kv_indices), device=kv_indices.device)
    request = torch.searchsorted(end, entry, right=True)
    used, request = request < batch, request.clamp(max=batch - 1)
    length, prefix = (end - begin)[request], seq_lens.long()[request]
    key = entry - begin[request] + prefix + tail - length
    slots = req_to_token[rows[request], key.clamp(0, width - 1)]
    if tail:
        late = tail_slots[request, (key - prefix).clamp(0, tail - 1)]
        slots = torch.where(key < prefix, slots, late)
    if window_left >= 0:
        unseen = key < torch.minimum(positions.amin(1)[request] - window_left, prefix)
        slots = torch.where(unseen, tail_slots[request, -1], slots)
    kv_indices.copy_(torch.where(used, slots, kv_indices))


def fill_draft_kv(keys: KeySlots, words: Tensor, *, kv_indptr: Tensor, kv_indices: Tensor) -> None:
    """Write the KV lists of every draft decode step in one launch.

    At step s, branch k of request b reads the request's prefix, then the slots of its s + 1
    ancestors (itself the last), so that drafting a node equals drafting its path as a chain::

        kv_indices[s]: | prefix 0, path of (0, 0) | prefix 0, path of (0, 1) | prefix 1, ...

    Parameters
    ----------
    keys : KeySlots
        The slots; of the tail, ``[B, steps, topk]``, those of every draft node.
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
    req_to_token, rows, seq_lens, branch_slots = keys
    (batch, steps, topk, num_words), max_len = words.shape, req_to_token.shape[1]
    width = draft_kv_width(batch, topk, max_len, steps)
    require_shape((batch, steps, topk), tail=branch_slots)
    require_shape((steps, batch * topk + 1), kv_indptr=kv_indptr)
    require_shape((steps, max(width, kv_indices.shape[1])), kv_indices=kv_indices)
    if num_words * 64 < steps * topk:
        raise ValueError(f"words must have a bit for each of {steps * topk} nodes")
    require_dense(words=words)
    require_dense(1, tail=branch_slots, kv_indices=kv_indices)
    if not batch * steps:
        kv_indptr.zero_()
        return
    if on_triton(words):
        block = min(1024, power_of_2(max_len))
        programs = programs_per_row(batch * topk * steps, cdiv(max_len, block))
        launch.fill_draft_kv_kernel[batch * topk, programs, steps](
            keys.arguments(),
            words,
            kv_indptr,
            kv_indices,
            steps,
            max_len,
            kv_indices.shape[1],
            kv_indptr.stride(0),
            kv_indices.stride(0),
            TOPK=topk,
            W=num_words,
            BLOCK=block,
            BLOCK_B=128,
            BLOCK_J=power_of_2(steps * topk),
            BLOCK_S=power_of_2(steps),
        )
        return
    lens = seq_lens.clamp(0, max_len).long().repeat_interleave(topk)  # [B * topk]
    rows = rows.repeat_interleave(topk)
    entry = torch.arange(batch * topk * (max_len + steps), device=lens.device)
    for step in range(steps):
        kv_indptr[step, 0] = 0
        kv_indptr[step, 1:] = (lens + step + 1).cumsum(0)
        branch = torch.searchsorted(kv_indptr[step, 1:].contiguous(), entry, right=True)
        used = branch < len(lens)
        branch = branch.clamp(max=len(lens) - 1)
        column = entry - kv_indptr[step].long()[branch]
        prefix = req_to_token[rows[branch], column.clamp(0, max_len - 1)]
        line = kv_indices[step, : len(entry)]
        line.copy_(torch.where(used & (column < lens[branch]), prefix, line))
        fill_draft_tails(step, keys, words, kv_indptr=kv_indptr, kv_indices=kv_indices)


def fill_draft_tails(
    step: int, keys: KeySlots, words: Tensor, *, kv_indptr: Tensor, kv_indices: Tensor
) -> None:
    """Write the ancestors of one step again; prefixes stay.

    Call it once the step's words are known. `fill_draft_kv` has to have run for the same lengths.

    Parameters
    ----------
    step : int
        The step whose lists are brought up to date.
    keys, words, kv_indptr, kv_indices
        As in `fill_draft_kv`; only ``kv_indices[step]`` is written.
    """
    _, _, seq_lens, branch_slots = keys
    require_dense(words=words)
    require_dense(1, tail=branch_slots, kv_indices=kv_indices)
    if not len(words):
        return
    batch, _, topk, num_words = words.shape
    if on_triton(words):
        launch.fill_draft_tails_kernel[(batch * topk,)](
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
            BLOCK_J=power_of_2((step + 1) * topk),
            BLOCK_S=power_of_2(step + 1),
            num_warps=1,
        )
        return
    drafted = branch_slots.flatten(1)[:, : (step + 1) * topk]
    tails = seen_slots(words[:, step], drafted, drafted.new_zeros(batch, topk, step + 1))
    begin, end = kv_indptr[step, :-1].long(), kv_indptr[step, 1:].long()
    lens = seq_lens.long().clamp(min=0).repeat_interleave(topk)
    at = begin + torch.minimum(lens, end - begin - step - 1)
    at = at[:, None] + torch.arange(step + 1, device=at.device)
    kv_indices[step].index_copy_(0, at.flatten(), tails.flatten())


def draft_kv_width(batch: int, topk: int, max_context_len: int, step_count: int) -> int:
    """Return how many entries a row of ``kv_indices`` needs for any lengths.

    Raises
    ------
    ValueError
        If that is more than int32 offsets can address.
    """
    width = batch * topk * (max_context_len + step_count)
    if width >= 2**31:
        raise ValueError(
            f"kv_indices of {batch} requests x {topk} branches x {max_context_len} tokens needs "
            f"{width} entries per step, int32 offsets reach {2**31 - 1}"
        )
    return width
