"""Tree masks in the layouts of other libraries.

Inside the library, visibility is ancestor words: ``[B, n, W]`` int64, bit j of row i set iff node
j is i or an ancestor of i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.checks import expect, require_dense, whole_number
from specattn.kernels.masks.layouts import pack_masks, visible_nodes
from specattn.kernels.words import pack_words, unpack_words
from specattn.plan import mask_words

__all__ = [
    "full_mask",
    "mask_indptr",
    "mask_words",
    "packed_indptr",
    "packed_mask",
    "qlen_from_full",
    "qlen_mask",
    "words_from_mask",
]


def qlen_mask(words: Tensor, keys: int | None = None) -> Tensor:
    """Write words as one bool per query and tail key: SGLang's ``QLEN_ONLY``.

    Parameters
    ----------
    words : Tensor
        ``[B, n, W]`` int64.
    keys : int, optional
        Tail keys, at most ``64 * W``; n if omitted.

    Returns
    -------
    Tensor
        ``[B, n, keys]`` bool.

    Raises
    ------
    ValueError
        If ``words`` have another kind, or ``keys`` another range.
    """
    _check_words(words)
    if keys is None:
        keys = words.shape[1]
    return unpack_words(words, whole_number("keys", keys, 0, 64 * words.shape[2]))


def words_from_mask(mask: Tensor) -> Tensor:
    """Write a bool mask as words; undoes `qlen_mask`.

    Parameters
    ----------
    mask : Tensor
        ``[B, n, keys]`` bool.

    Returns
    -------
    Tensor
        ``[B, n, ceil(keys / 64)]`` int64.

    Raises
    ------
    ValueError
        If ``mask`` has other axes or another dtype.
    """
    if mask.dim() != 3 or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be [B, n, keys] {torch.bool}, got {list(mask.shape)} {mask.dtype}"
        )
    return pack_words(mask, mask_words(mask.shape[2]))


def mask_indptr(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Return where each request's cells start in `full_mask`.

    Parameters
    ----------
    seq_lens : Tensor
        ``[B]`` int32, prefix lengths.
    num_draft_tokens : int
        Nodes of each tree.

    Returns
    -------
    Tensor
        ``[B + 1]`` int64.

    Raises
    ------
    ValueError
        If ``num_draft_tokens`` is below 1, or a length on the host is negative. Lengths on an
        accelerator are not read.
    """
    return _offsets(_cells(seq_lens, num_draft_tokens))


def full_mask(words: Tensor, seq_lens: Tensor) -> Tensor:
    """Write words and prefix as flat bools: SGLang's ``FULL_MASK``, FlashInfer's custom mask.

    Request b has n rows of ``seq_lens[b] + n`` cells. The prefix comes first and is always
    visible. Waits for the device.

    Parameters
    ----------
    words : Tensor
        ``[B, n, W]`` int64.
    seq_lens : Tensor
        ``[B]`` int32, prefix lengths.

    Returns
    -------
    Tensor
        ``[mask_indptr[-1]]`` bool.

    Raises
    ------
    ValueError
        If a tensor has another kind, or a length is negative.
    """
    packed, n = packed_mask(words, seq_lens), words.shape[1]
    starts = mask_indptr(seq_lens, n)
    cell = torch.arange(int(starts[-1]), device=words.device)
    request = torch.searchsorted(starts[1:], cell, right=True)
    bit = cell - starts[request] + 8 * packed_indptr(seq_lens, n)[request]
    return (packed[bit // 8] >> bit % 8 & 1) != 0


def qlen_from_full(mask: Tensor, seq_lens: Tensor, num_draft_tokens: int, *, out: Tensor) -> Tensor:
    """Copy the part of a `full_mask` that concerns the tree, a `qlen_mask`.

    Nothing waits for an accelerator; a few launches do it.

    Parameters
    ----------
    mask : Tensor
        `full_mask` as bool or uint8. One of ``B * n * n`` cells is a `qlen_mask` already.
    seq_lens : Tensor
        ``[B]`` int32 or int64, prefix lengths.
    num_draft_tokens : int
        n, nodes of each tree.
    out : Tensor
        ``[at least B * n * n]`` bool; what comes after is left as it is.

    Returns
    -------
    Tensor
        ``[B * n * n]``, a view of ``out``.

    Raises
    ------
    ValueError
        If ``out`` is too small, or as `mask_indptr`.
    """
    _cells(seq_lens, num_draft_tokens)
    n, batch = num_draft_tokens, seq_lens.numel()
    if out.dim() != 1 or len(out) < batch * n * n:
        raise ValueError(f"out must be [at least {batch * n * n}], got {list(out.shape)}")
    cells = out[: batch * n * n]
    if mask.numel() == len(cells):
        return cells.copy_(mask)
    return cells.copy_(visible_nodes(mask, "full", seq_lens.long(), n, 0).flatten())


def packed_indptr(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Return where each request's bytes start in `packed_mask`.

    Parameters
    ----------
    seq_lens, num_draft_tokens
        As in `mask_indptr`.

    Returns
    -------
    Tensor
        ``[B + 1]`` int64, in bytes.

    Raises
    ------
    ValueError
        As `mask_indptr`.
    """
    return _offsets((_cells(seq_lens, num_draft_tokens) + 7) // 8)


def packed_mask(words: Tensor, seq_lens: Tensor, out: Tensor | None = None) -> Tensor:
    """Write `full_mask` as bits: FlashInfer's packed mask.

    Each request begins at a whole byte, and the first cell of eight is the lowest bit. Waits for
    the device unless ``out`` is given.

    Parameters
    ----------
    words : Tensor
        ``[B, n, W]`` int64.
    seq_lens : Tensor
        ``[B]`` int32, prefix lengths.
    out : Tensor, optional
        ``[at least packed_indptr[-1]]`` uint8, dense; bytes past the mask become 0.

    Returns
    -------
    Tensor
        ``out``, or a new ``[packed_indptr[-1]]`` uint8.

    Raises
    ------
    ValueError
        If a tensor has another kind, a length is negative, or ``out`` is too small. With ``out``,
        lengths on an accelerator are not read: ``out`` must hold masks without prefixes there,
        and the end of a mask that does not fit is left out.
    """
    _check_words(words)
    batch, n, _ = words.shape
    on_host = seq_lens.device.type == "cpu"
    _check_lens(seq_lens, batch, wait=out is None)
    starts = packed_indptr(seq_lens, n)
    if out is None:
        out = torch.empty(int(starts[-1]), dtype=torch.uint8, device=words.device)
    _check_packed(out, int(starts[-1]) if on_host else batch * ((n * n + 7) // 8))
    require_dense(out=out)
    out.zero_()
    if batch:
        pack_masks(
            kv_indptr=_offsets(seq_lens.long() + n),
            # the end of a mask that does not fit is left out
            mask_indptr=starts.clamp(max=len(out)),
            seq_lens=seq_lens.contiguous(),
            positions=words[..., 0],  # not read without a window
            tail_positions=words[..., 0],
            tail_words=words.contiguous(),
            mask=out,
            window_left=-1,
        )
    return out


def _check_words(words: Tensor) -> None:
    shape = list(words.shape)
    if words.dim() != 3 or words.dtype != torch.int64 or 64 * shape[2] < shape[1]:
        raise ValueError(
            f"words must be [B, n, at least ceil(n / 64)] {torch.int64}, got {shape} {words.dtype}"
        )


def _check_lens(seq_lens: Tensor, batch: int, *, wait: bool = False) -> None:
    """Check prefix lengths; those on an accelerator are read only if ``wait``."""
    # int64 holds them just as well
    dtype = torch.int64 if seq_lens.dtype == torch.int64 else torch.int32
    expect("seq_lens", seq_lens, (batch,), dtype, seq_lens.device)
    if (wait or seq_lens.device.type == "cpu") and (seq_lens < 0).any():
        raise ValueError(f"seq_lens must be 0 or more, got {seq_lens.tolist()}")


def _check_packed(out: Tensor, least: int) -> None:
    if out.dim() != 1 or out.dtype != torch.uint8 or len(out) < least:
        raise ValueError(
            f"out must be [at least {least}] {torch.uint8}, got {list(out.shape)} {out.dtype}"
        )


def _cells(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Return how many cells each request's mask has."""
    _check_lens(seq_lens, seq_lens.numel())
    num_draft_tokens = whole_number("num_draft_tokens", num_draft_tokens, 1)
    return num_draft_tokens * (seq_lens.long() + num_draft_tokens)


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
