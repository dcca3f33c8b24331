"""Fill index lists, tables and masks of attention libraries, on the device."""

from __future__ import annotations

from torch import Tensor

from specattn.kernels import implementation
from specattn.kernels.checks import require_dense, require_rows
from specattn.kernels.indices import naive


def fill_window(
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    *,
    slots_out: Tensor,
    positions_out: Tensor | None = None,
    accept_lens: Tensor | None = None,
    last_rows_out: Tensor | None = None,
    after_out: Tensor | None = None,
) -> None:
    """Look up the slots and positions after each request's committed tokens.

    Parameters
    ----------
    req_to_token : Tensor
        ``[R, context]`` int32, slot of every token; dense last axis.
    rows, seq_lens : Tensor
        ``[B]`` int64 and int32: each request's row, and its committed tokens.
    slots_out : Tensor
        ``[B, W]`` int32, may have a row stride: of columns length + w; 0 beyond the table.
    positions_out : Tensor, optional
        ``[B, S, K]`` int64 with a dense last axis: length + s.
    accept_lens : Tensor, optional
        ``[B]`` int32, how many of the W tokens are accepted; then the two that follow are needed.
    last_rows_out : Tensor, optional
        ``[B]`` int64: which of all requests' W tokens is the last accepted one, or the first one
        where none is.
    after_out : Tensor, optional
        ``[B]`` int64: length plus accepted.

    Raises
    ------
    ValueError
        Before anything is written: if a shape or a stride is another.
    """
    _check_window(req_to_token, rows, seq_lens, slots_out, positions_out)
    if not len(rows):
        return
    implementation(naive.fill_window, seq_lens.device)(
        req_to_token,
        rows,
        seq_lens,
        slots_out,
        positions_out,
        accept_lens,
        last_rows_out,
        after_out,
    )


def fill_lists(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    tail_slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    window_left: int,
) -> None:
    """Write each request's list of slots: its prefix, then its tail.

    The slots of the prefix come from ``req_to_token``. A list shorter than both holds the last of
    them: a window lets the host leave keys out.

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows, max_len]`` int32; dense last axis.
    req_pool_indices, seq_lens : Tensor
        ``[B]`` int64 and int32: each request's row, and its prefix length.
    positions : Tensor
        ``[B, q_len]`` int64, read with a window only; may have a row stride.
    tail_slots : Tensor
        ``[B, tail]`` int32, tail at least 0 (1 with a window); may have a row stride.
    kv_indptr : Tensor
        ``[at least B + 1]`` int32, read: where each list begins.
    kv_indices : Tensor
        ``[at least kv_indptr[B]]`` int32, written up to there.
    window_left : int
        With a window, a listed prefix key that no query of the request sees is replaced by the
        tail's last: its slot may hold anything, and a weight of 0 times a NaN is NaN. -1 is none.
    """
    require_dense(kv_indptr=kv_indptr, kv_indices=kv_indices)
    implementation(naive.fill_lists, kv_indptr.device)(
        req_to_token,
        req_pool_indices,
        seq_lens,
        positions,
        tail_slots,
        kv_indptr,
        kv_indices,
        window_left,
    )


def pack_masks(
    kv_indptr: Tensor,
    mask_indptr: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    tail_positions: Tensor,
    tail_words: Tensor,
    mask: Tensor,
    window_left: int,
) -> None:
    """Write each request's mask as bits, lowest first.

    The mask has a row of listed keys per query. This is the packed mask of FlashInfer: rows follow
    one another without padding, and each request begins at a whole byte. It comes straight from the
    ancestor words; no bool mask exists.

    Parameters
    ----------
    kv_indptr : Tensor
        ``[at least B + 1]`` int32, as in `fill_lists`.
    mask_indptr : Tensor
        ``[at least B + 1]`` int32, offset of each request's bytes, ``ceil(q_len * keys / 8)`` each.
    seq_lens : Tensor
        ``[B]`` int32, prefix lengths.
    positions, tail_positions : Tensor
        ``[B, q_len]`` and ``[B, tail]`` int64; read with a window only. A prefix key's position
        is its place in the prefix.
    tail_words : Tensor
        ``[B, q_len, ceil(tail / 64)]`` int64; the three may have row strides.
    mask : Tensor
        ``[at least mask_indptr[B]]`` uint8, written up to there.
    window_left : int
        A key is visible iff ``0 <= pos_q - pos_k <= window_left`` as well; -1 is no window.
    """
    require_dense(kv_indptr=kv_indptr, mask_indptr=mask_indptr, mask=mask)
    implementation(naive.pack_masks, kv_indptr.device)(
        kv_indptr, mask_indptr, seq_lens, positions, tail_positions, tail_words, mask, window_left
    )


def fill_block_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    page_size: int,
    lists: int = 1,
) -> None:
    """List every request's pages: its prefix's, then its tail's.

    The slot of key ``p`` must be ``page * page_size + p % page_size``: whole, aligned pages, in
    the order of the keys. Only the first slot of a page is read.

    Parameters
    ----------
    req_to_token, req_pool_indices, seq_lens : Tensor
        As in `fill_lists`: slots, rows and prefix lengths.
    tail_slots : Tensor
        ``[B, tail]`` int32, tail at least ``lists``; may have a row stride.
    table : Tensor
        ``[B * lists, width]`` int32, written whole: columns past a list's pages hold page 0.
        ``ceil((max_len + tail) / page_size)`` columns hold any list.
    lens : Tensor
        ``[B * lists]`` int32, written: the keys of every list.
    page_size : int
        Slots of a page.
    lists : int
        Lists per request. One has all its keys. With more, they are of its last query tokens:
        each ends at its token, for kernels that know neither masks nor several queries.
    """
    implementation(naive.fill_block_table, table.device)(
        req_to_token, req_pool_indices, seq_lens, tail_slots, table, lens, page_size, lists
    )


def fill_slots(
    rows: Tensor,
    block_table: Tensor,
    lens: Tensor,
    req_to_token: Tensor,
    reserved: Tensor,
    *,
    page_size: int,
    block_stride: int,
) -> None:
    """Write the slots of every line's blocks into its row.

    ``reserved`` gets the number of tokens that have slots. Allocates nothing and never waits for
    the device.

    Parameters
    ----------
    rows : Tensor
        ``[B]`` int64, rows of ``req_to_token``, all different; lines of row 0 are skipped.
    block_table : Tensor
        ``[B, blocks]`` int32; may have a row stride. Blocks past a line's length are not read.
    lens : Tensor
        ``[B]`` int32, tokens that get slots; cut to 0..the smaller of context and blocks.
    req_to_token : Tensor
        ``[R, context]`` int32, in place, up to each length; may have a row stride.
    reserved : Tensor
        ``[R]`` int32, in place: the lengths; 0 in row 0.
    page_size : int
        Slots of a block.
    block_stride : int
        Slots from the first of a block to the first of the next.
    """
    if not len(rows):
        return
    implementation(naive.fill_slots, req_to_token.device)(
        rows, block_table, lens, req_to_token, reserved, page_size, block_stride
    )


def fill_page_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    q_len: int,
    window_left: int = -1,
) -> None:
    """List every request's slots: its prefix, then its tail.

    Under a window, keys that the first query token (and so any other) does not see are left out;
    the rest keep their distance to the end of the list, so a causal kernel that counts its window
    from there still sees the right ones, and never loads a key nobody sees.

    Parameters
    ----------
    req_to_token, req_pool_indices, seq_lens : Tensor
        As in `fill_lists`: slots, rows and prefix lengths.
    tail_slots : Tensor
        ``[B, tail]`` int32, tail at least 1; may have a row stride.
    table : Tensor
        ``[B, width]`` int32, written up to each row's length. ``max_len + tail`` columns hold any
        list, under a window ``window_left + q_len`` do; longer lists are cut at the width.
    lens : Tensor
        ``[B]`` int32, written: the length of every list.
    q_len : int
        Query tokens per request, the last of the tail.
    window_left : int
        See `specattn.config.AttnConfig`.
    """
    implementation(naive.fill_page_table, table.device)(
        req_to_token, req_pool_indices, seq_lens, tail_slots, table, lens, q_len, window_left
    )


def fill_ancestor_table(
    tail_slots: Tensor, tail_words: Tensor, table: Tensor, lens: Tensor
) -> None:
    """List the slots of the tail keys each query token sees.

    The slots are in the order of the keys' bits.

    Parameters
    ----------
    tail_slots : Tensor
        ``[B, tail]`` int32; may have a row stride.
    tail_words : Tensor
        ``[B, q_len, ceil(tail / 64)]`` int64, bit j set iff tail key j is seen; bits past the tail
        are ignored. Dense last axis.
    table : Tensor
        ``[B * q_len, tail]`` int32, contiguous, written up to each row's length.
    lens : Tensor
        ``[B * q_len]`` int32, written: how many keys each query token sees.
    """
    implementation(naive.fill_ancestor_table, table.device)(tail_slots, tail_words, table, lens)


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
    req_to_token, req_pool_indices, seq_lens : Tensor
        As in `fill_lists`: slots, rows and prefix lengths.
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
    _check_lists(branch_slots, words, kv_indptr, kv_indices, req_to_token.shape[1])
    require_dense(branch_slots=branch_slots[:1], words=words, kv_indices=kv_indices[:1])
    if not words.shape[0] * words.shape[1]:
        kv_indptr.zero_()
        return
    implementation(naive.fill_draft_kv, words.device)(
        req_to_token, req_pool_indices, seq_lens, branch_slots, words, kv_indptr, kv_indices
    )


def fill_draft_tails(
    step: int,
    seq_lens: Tensor,
    branch_slots: Tensor,
    words: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    """Write the ancestors of one step again; prefixes stay.

    Call it once the step's words are known. `fill_draft_kv` has to have run for the same lengths.

    Parameters
    ----------
    step : int
        The step whose lists are brought up to date.
    seq_lens, branch_slots, words, kv_indptr, kv_indices : Tensor
        As in `fill_draft_kv`; only ``kv_indices[step]`` is written.
    """
    require_dense(branch_slots=branch_slots[:1], words=words, kv_indices=kv_indices[:1])
    if not len(words):
        return
    implementation(naive.fill_draft_tails, words.device)(
        step, seq_lens, branch_slots, words, kv_indptr, kv_indices
    )


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


def _check_window(
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    slots_out: Tensor,
    positions_out: Tensor | None,
) -> None:
    """Raise ValueError, before anything is written, unless the tensors are as documented."""
    batch, dense = len(rows), {"req_to_token": req_to_token, "slots_out": slots_out}
    if len(seq_lens) != batch or slots_out.dim() != 2 or len(slots_out) != batch:
        raise ValueError(
            f"seq_lens and slots_out must be [{batch}] and [{batch}, W], "
            f"got {list(seq_lens.shape)} and {list(slots_out.shape)}"
        )
    if positions_out is not None:
        dense["positions_out"] = positions_out
        if positions_out.dim() != 3 or len(positions_out) != batch:
            raise ValueError(
                f"positions_out must be [{batch}, S, K], got {list(positions_out.shape)}"
            )
    require_rows(**dense)


def _check_lists(
    branch_slots: Tensor, words: Tensor, kv_indptr: Tensor, kv_indices: Tensor, max_len: int
) -> None:
    """Raise ValueError, before anything is written, unless lists of full rows fit."""
    batch, steps, topk, num_words = words.shape
    if branch_slots.shape != (batch, steps, topk) or num_words * 64 < steps * topk:
        raise ValueError(
            f"branch_slots {tuple(branch_slots.shape)} and words {tuple(words.shape)} disagree"
        )
    width = draft_kv_width(batch, topk, max_len, steps)
    if kv_indices.shape[0] != steps or kv_indices.shape[1] < width:
        raise ValueError(
            f"kv_indices must be [{steps}, at least {width}], got {list(kv_indices.shape)}"
        )
    if kv_indptr.shape != (steps, batch * topk + 1):
        raise ValueError(
            f"kv_indptr must be [{steps}, {batch * topk + 1}], got {list(kv_indptr.shape)}"
        )
