"""Ancestor words in the layouts of masks elsewhere, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.checks import one_of, require_dense
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import cdiv, programs_per_row

launch = TritonModule("specattn.kernels.masks.triton")

#: Layouts of a mask in memory, by the name that `copy_in_rows` takes.
KINDS = ("qlen", "qlen_bits", "full", "full_bits", "prefix")


def pack_masks(
    *,
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
        ``[at least B + 1]`` int32 or int64, offset of each request's keys.
    mask_indptr : Tensor
        As ``kv_indptr``, of each request's bytes, ``ceil(q_len * keys / 8)`` each.
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
    batch, q_len, _ = tail_words.shape
    if on_triton(kv_indptr):
        block = 256
        programs = programs_per_row(batch, cdiv(len(mask), block * batch))
        launch.pack_masks_kernel[batch, programs](
            kv_indptr,
            mask_indptr,
            seq_lens,
            positions,
            tail_positions,
            tail_words,
            mask,
            q_len,
            tail_positions.shape[1],
            window_left,
            positions.stride(0),
            tail_positions.stride(0),
            *tail_words.stride()[:2],
            WINDOW=window_left >= 0,
            BLOCK=block,
            num_warps=4,
        )
        return
    begin, end = mask_indptr[:batch].long(), mask_indptr[1 : batch + 1].long()
    byte = torch.arange(len(mask), device=mask.device)
    request = torch.searchsorted(end, byte, right=True)
    used, request = request < batch, request.clamp(max=batch - 1)[:, None]
    cell = (byte - begin[request[:, 0]])[:, None] * 8 + torch.arange(8, device=mask.device)
    length = (kv_indptr[1:] - kv_indptr[:-1]).long()[request]  # [bytes, 1]
    query, column = cell // length, cell % length
    inside = used[:, None] & (query < q_len)
    query = torch.where(inside, query, 0)
    node = column - (length - tail_positions.shape[1])
    place = seq_lens.long()[request] + node  # a prefix key's position is its place
    key = node.clamp(min=0)
    seen = (node < 0) | ((tail_words[request, query, key // 64] >> key % 64 & 1) != 0)
    if window_left >= 0:
        there = torch.where(node < 0, place, tail_positions[request, key])
        ago = positions[request, query] - there
        seen &= (ago >= 0) & (ago <= window_left)
    bits = (seen & inside) << torch.arange(8, device=mask.device)
    mask.copy_(torch.where(used, bits.sum(1).to(torch.uint8), mask))


def check_mask(mask: Tensor | None, kind: str, batch: int, n: int) -> int:
    """Check a mask of `copy_in_rows`; return a row's bytes."""
    one_of("kind", kind, *KINDS)
    if mask is None:
        return 0
    if kind == "prefix":
        raise ValueError("mask must be None with kind 'prefix', whose rows see no tail")
    bits = kind.endswith("bits")
    if mask.dtype != torch.uint8 and (bits or mask.dtype != torch.bool):
        wanted = torch.uint8 if bits else f"{torch.bool} or {torch.uint8}"
        raise ValueError(f"mask must be {wanted} with kind {kind!r}, got {mask.dtype}")
    require_dense(mask=mask)
    row_bytes = -(-n // 8)
    if kind == "qlen_bits":
        if mask.dim() == 3:
            row_bytes = mask.shape[2]
        least = batch * n * max(row_bytes, -(-n // 8))
    else:
        # the prefixes of "full" are known on the device alone
        least = batch * (-(-n * n // 8) if bits else n * n)
    if mask.numel() < least:
        raise ValueError(
            f"mask of kind {kind!r} must have at least {least} numbers for {batch} requests of "
            f"{n} rows, got {list(mask.shape)}"
        )
    return row_bytes


def visible_nodes(mask: Tensor, kind: str, prefix: Tensor, n: int, row_bytes: int) -> Tensor:
    """Return what a mask says of tails, ``[B, n, n]`` bool."""
    flat, node = mask.flatten(), torch.arange(n, device=mask.device)
    bits = kind.endswith("bits")
    if kind.startswith("qlen"):
        request = torch.arange(len(prefix), device=mask.device)[:, None, None]
        row = request * n + node[:, None]
        start, cell = row * (row_bytes if bits else n), node
    else:
        cells = n * (prefix + n)
        sizes = (cells + 7) // 8 if bits else cells
        start = (sizes.cumsum(0) - sizes)[:, None, None]
        cell = node[:, None] * (prefix + n)[:, None, None] + prefix[:, None, None] + node
    at = start + (cell // 8 if bits else cell)
    found = torch.where(at < len(flat), flat[at.clamp(max=len(flat) - 1)].long(), 0)
    return (found >> cell % 8 & 1 if bits else found) != 0
