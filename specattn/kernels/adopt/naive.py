"""Inputs of plans from an engine's tensors, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specattn.kernels.adopt.outputs import Adopted, Window


def adopt_rows(
    rows: Tensor,
    seq_lens: Tensor,
    slots: Tensor | None,
    positions: Tensor | None,
    mask: Tensor | None,
    kind: str,
    counted: int,
    req_to_token: Tensor,
    out: Adopted,
    window: Window | None,
    row_bytes: int,
) -> None:
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
    counted: int,
    req_to_token: Tensor,
    out: Adopted,
) -> None:
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
    req_to_token: Tensor,
    rows_out: Tensor,
    seq_lens_out: Tensor,
    indptr_out: Tensor,
    slots_out: Tensor,
    window: Window | None,
) -> None:
    rows_out.copy_(rows)
    seq_lens_out.copy_(prefix_lens)
    indptr_out[0] = 0
    indptr_out[1:] = new_lens.cumsum(0)
    slots_out.copy_(slots)
    if window is not None:
        _write_window(rows_out, prefix_lens.long(), new_lens, req_to_token, window)
        window.store.copy_(_mapped(window.slot_map, slots))


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
