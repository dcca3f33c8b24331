"""Copy an engine's tensors into the inputs of a plan.

Each function is one launch, which neither waits for the device nor allocates on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.kernels import TritonModule, on_triton
from specattn.kernels.adopt.outputs import Adopted, Window
from specattn.kernels.checks import require_dense, require_rows

if TYPE_CHECKING:
    from specattn.kernels.adopt import triton as launch
else:
    launch = TritonModule("specattn.kernels.adopt.triton")

__all__ = ["KINDS", "Adopted", "Window", "adopt_prompts", "adopt_rows", "adopt_steps"]

#: Layouts of a mask in memory, by the name that `adopt_rows` takes.
KINDS = ("qlen", "qlen_bits", "full", "full_bits", "prefix")


def adopt_rows(
    rows: Tensor,
    seq_lens: Tensor,
    slots: Tensor | None,
    positions: Tensor | None,
    mask: Tensor | None,
    *,
    kind: str,
    counted: int,
    req_to_token: Tensor,
    out: Adopted,
    window: Window | None = None,
) -> None:
    """Copy in n rows per request: decode, verify or draft extend.

    Integers may be int32 or int64. What is of shape ``[B, n]`` may have any strides if it is read,
    and a row stride if it is written.

    Parameters
    ----------
    rows, seq_lens : Tensor
        ``[B]``: table rows, and lengths.
    slots : Tensor or None
        ``[B, n]`` slots of the new tokens, below 0 where there is none. Without, they come from the
        table's columns after the prefix; 0 beyond the table.
    positions : Tensor or None
        ``[B, n]``; without, the prefix plus how many other keys of the tail a row sees.
    mask : Tensor or None
        Flat bool or uint8; what is not 0 is visible. Without, rows are causal. A row always sees
        itself, unless the kind is ``"prefix"``.
    kind : str
        ``"qlen"``: ``[B, n, n]``. ``"qlen_bits"``: ``[B, n, bytes]``, the lowest bit first.
        ``"full"``: per request n rows of prefix and n cells, of which the last n are read.
        ``"full_bits"``: the same in bits, every request from a whole byte on. ``"prefix"``: rows
        see the prefix alone, and no mask is given.
    counted : int
        New tokens that ``seq_lens`` count; the prefix is the rest, at least 0.
    req_to_token : Tensor
        ``[R, context]`` int32; dense last axis.
    out : Adopted
        What is written; rows may have a stride, but for words.
    window : Window, optional
        What layers with a window and a pool of their own read, whose words are the same.

    Raises
    ------
    ValueError
        Before anything is written: if a tensor has another shape or dtype.
    """
    batch, n = out.slots.shape
    _check_requests(batch, rows=rows, seq_lens=seq_lens)
    _check_tokens((batch, n), slots=slots, positions=positions)
    row_bytes = _check_mask(mask, kind, batch, n)
    require_rows(req_to_token=req_to_token, slots=out.slots, store=out.store)
    require_rows(positions=out.positions)
    require_dense(rows=out.rows, seq_lens=out.seq_lens, words=out.words)
    if window is not None:
        window.check(batch, (batch, n))
    if not batch:
        return
    if on_triton(req_to_token):
        return launch.adopt_rows(
            rows=rows,
            seq_lens=seq_lens,
            slots=slots,
            positions=positions,
            mask=mask,
            kind=kind,
            counted=counted,
            req_to_token=req_to_token,
            out=out,
            window=window,
            row_bytes=row_bytes,
        )
    n = out.slots.shape[1]
    prefix = (seq_lens.long() - counted).clamp(min=0)
    out.rows.copy_(rows)
    out.seq_lens.copy_(prefix)
    _write_slots(out.rows, prefix, slots, req_to_token, out.slots, out.store)
    node = torch.arange(n, device=rows.device)
    if mask is None:
        seen = (node <= node[:, None]).expand(len(rows), n, n)
    else:
        seen = _visible(mask, kind, prefix, n, row_bytes) | torch.eye(n, device=rows.device).bool()
    if kind == "prefix":
        seen = torch.zeros_like(seen)
        out.slots.zero_()
    out.words.copy_(_words(seen, out.words.shape[2]))
    if positions is None:
        positions = prefix[:, None] + (seen.sum(2) - 1).clamp(min=0)
    out.positions.copy_(positions)
    if window is not None:
        start = _write_window(out.rows, prefix, None, req_to_token, window)
        window.positions.copy_(out.positions - start[:, None])
        window.store.copy_(_mapped(window.slot_map, out.store))
        window.slots.copy_(0 * out.slots if kind == "prefix" else window.store.clamp(min=0))


def adopt_steps(
    rows: Tensor,
    seq_lens: Tensor,
    slots: Tensor | None,
    *,
    counted: int,
    req_to_token: Tensor,
    out: Adopted,
) -> None:
    """Copy in all steps of a draft.

    Parameters
    ----------
    rows, seq_lens, counted, req_to_token
        As in `adopt_rows`.
    slots : Tensor or None
        ``[B, steps, topk]``, any strides: slots of all branches. Without, those of the table's
        columns after the prefix, step by step.
    out : Adopted
        What is written, of ``[B, steps, topk]``, dense. Words are those of a chain (topk 1): all
        steps before and the step itself. Else they are the node's own bit, to which
        `specattn.kernels.tree.grow_words` adds.

    Raises
    ------
    ValueError
        Before anything is written: if a tensor has another shape or dtype.
    """
    _check_requests(len(out.slots), rows=rows, seq_lens=seq_lens)
    _check_tokens(tuple(out.slots.shape), slots=slots)
    require_rows(req_to_token=req_to_token)
    require_dense(**vars(out))
    if not out.slots.numel():
        return
    if on_triton(req_to_token):
        return launch.adopt_steps(
            rows=rows,
            seq_lens=seq_lens,
            slots=slots,
            counted=counted,
            req_to_token=req_to_token,
            out=out,
        )
    steps, topk = out.slots.shape[1:]
    prefix = (seq_lens.long() - counted).clamp(min=0)
    out.rows.copy_(rows)
    out.seq_lens.copy_(prefix)
    given = None if slots is None else slots.flatten(1)
    _write_slots(out.rows, prefix, given, req_to_token, out.slots.flatten(1), out.store.flatten(1))
    step = torch.arange(steps, device=rows.device)
    out.positions.copy_((prefix[:, None] + step)[:, :, None])
    node = torch.arange(steps * topk, device=rows.device)
    seen = node <= node[:, None] if topk == 1 else node == node[:, None]
    out.words.copy_(_words(seen[None], out.words.shape[3]).view(1, *out.words.shape[1:]))


def adopt_prompts(
    rows: Tensor,
    prefix_lens: Tensor,
    new_lens: Tensor,
    slots: Tensor,
    *,
    req_to_token: Tensor,
    rows_out: Tensor,
    seq_lens_out: Tensor,
    indptr_out: Tensor,
    slots_out: Tensor,
    window: Window | None = None,
) -> None:
    """Copy in ragged prompts.

    Parameters
    ----------
    rows, prefix_lens, new_lens : Tensor
        ``[B]`` int32 or int64: table rows, cached tokens, and new ones.
    slots : Tensor
        ``[T]`` int32 or int64, slots of the new tokens.
    req_to_token : Tensor
        ``[R, context]`` int32; read for a window alone.
    rows_out, seq_lens_out : Tensor
        ``[B]`` int64 and int32.
    indptr_out : Tensor
        ``[B + 1]`` int32, offsets of the requests' new tokens.
    slots_out : Tensor
        ``[T]`` int32.
    window : Window, optional
        As in `adopt_rows`; its table gets the new tokens, too.

    Raises
    ------
    ValueError
        Before anything is written: if a tensor has another shape or dtype.
    """
    _check_requests(len(rows_out), rows=rows, prefix_lens=prefix_lens, new_lens=new_lens)
    _check_tokens(tuple(slots_out.shape), slots=slots)
    if window is not None:
        window.check(len(rows), (1, len(slots)))
    if on_triton(rows_out):
        return launch.adopt_prompts(
            rows=rows,
            prefix_lens=prefix_lens,
            new_lens=new_lens,
            slots=slots,
            req_to_token=req_to_token,
            rows_out=rows_out,
            seq_lens_out=seq_lens_out,
            indptr_out=indptr_out,
            slots_out=slots_out,
            window=window,
        )
    rows_out.copy_(rows)
    seq_lens_out.copy_(prefix_lens)
    indptr_out[0] = 0
    indptr_out[1:] = new_lens.cumsum(0)
    slots_out.copy_(slots)
    if window is not None:
        _write_window(rows_out, prefix_lens.long(), new_lens, req_to_token, window)
        window.store.copy_(_mapped(window.slot_map, slots))


def _check_requests(batch: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        _check_integers(name, tensor, (batch,))
    require_dense(**tensors)


def _check_tokens(shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            _check_integers(name, tensor, shape)


def _check_integers(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be {list(shape)} int32 or int64, got {list(tensor.shape)} {tensor.dtype}"
        )


def _check_mask(mask: Tensor | None, kind: str, batch: int, n: int) -> int:
    """Check a mask; return the bytes of a row of ``"qlen_bits"``."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
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


def _mapped(slot_map: Tensor, slots: Tensor) -> Tensor:
    return torch.where(slots < 0, -1, slot_map[slots.clamp(min=0).long()])


def _write_window(
    rows: Tensor,
    prefix: Tensor,
    new_lens: Tensor | None,
    req_to_token: Tensor,
    window: Window,
) -> Tensor:
    """Write the table and its lengths; return where each request's begins."""
    page, context = window.page_size, req_to_token.shape[1]
    start = (prefix - window.keys).clamp(min=0) // page * page
    window.seq_lens.copy_(prefix - start)
    end = (prefix if new_lens is None else prefix + new_lens)[:, None]
    columns = start[:, None] + torch.arange(window.table.shape[1], device=rows.device)
    slots = req_to_token[rows[:, None], columns.clamp(max=context - 1)]
    slots = torch.where(columns < context, slots, 0)
    found = _mapped(window.slot_map, slots).clamp(min=0).to(torch.int32)
    window.table.copy_(torch.where(columns < end, found, window.table))
    return start


def _write_slots(
    rows: Tensor,
    prefix: Tensor,
    slots: Tensor | None,
    req_to_token: Tensor,
    slots_out: Tensor,
    store_out: Tensor,
) -> None:
    if slots is None:
        columns = prefix[:, None] + torch.arange(slots_out.shape[1], device=rows.device)
        context = req_to_token.shape[1]
        found = req_to_token[rows[:, None], columns.clamp(max=context - 1)]
        slots = torch.where(columns < context, found, 0)
    store_out.copy_(slots)
    slots_out.copy_(slots.clamp(min=0))


def _visible(mask: Tensor, kind: str, prefix: Tensor, n: int, row_bytes: int) -> Tensor:
    """Return ``[B, n, n]`` bool: what the mask says of the tail."""
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


def _words(seen: Tensor, count: int) -> Tensor:
    """Write ``[B, n, n]`` bool as ``[B, n, count]`` words."""
    node = torch.arange(seen.shape[2], device=seen.device)
    words = torch.zeros(*seen.shape[:2], count, dtype=torch.int64, device=seen.device)
    # distinct bits: their sum is their union, and the sign bit wraps into place
    return words.index_add_(2, node // 64, seen.long() << node % 64)
