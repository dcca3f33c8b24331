"""Copy an engine's tensors into the inputs of a plan.

Each function is one launch, which neither waits for the device nor allocates on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_dense, require_integers, require_rows
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.indices.tables import table_slots
from specattn.kernels.launch import cdiv, launch_options, power_of_2
from specattn.kernels.masks.layouts import check_mask, visible_nodes
from specattn.kernels.words import pack_words

if TYPE_CHECKING:
    from specattn.kernels.masks.inputs import PlanInputs, Window

launch = TritonModule("specattn.kernels.masks.triton")


def copy_in_rows(
    rows: Tensor,
    seq_lens: Tensor,
    slots: Tensor | None,
    positions: Tensor | None,
    mask: Tensor | None,
    *,
    kind: str,
    counted: int,
    req_to_token: Tensor,
    out: PlanInputs,
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
    out : PlanInputs
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
    require_integers((batch, n), slots=slots, positions=positions)
    row_bytes = check_mask(mask, kind, batch, n)
    require_rows(req_to_token=req_to_token, slots=out.slots, store=out.store)
    require_rows(positions=out.positions)
    require_dense(rows=out.rows, seq_lens=out.seq_lens, words=out.words)
    if window is not None:
        window.check(batch, (batch, n))
    if not batch:
        return
    if on_triton(req_to_token):
        per_program = min(32, power_of_2(n))
        programs = cdiv(n, per_program)
        if window is not None:
            programs = max(programs, min(cdiv(window.table.shape[1], launch.TABLE_BLOCK.value), 8))
        launch.copy_in_rows_kernel[batch, programs](
            rows,
            seq_lens,
            slots,
            positions,
            None if mask is None else mask.view(torch.uint8),
            req_to_token,
            tuple(out),
            None if window is None else window.arguments(),
            n,
            counted,
            req_to_token.shape[1],
            0 if mask is None else mask.numel(),
            row_bytes,
            req_to_token.stride(0),
            *((0, 0) if slots is None else slots.stride()),
            *((0, 0) if positions is None else positions.stride()),
            out.slots.stride(0),
            out.store.stride(0),
            out.positions.stride(0),
            PAGE=1 if window is None else window.page_size,
            PREFIX=kind == "prefix",
            FULL=kind.startswith("full") and mask is not None,
            BITS=kind.endswith("bits"),
            W=out.words.shape[2],
            ROWS=per_program,
            BLOCK_B=128,
            num_warps=4,
            **launch_options(out.rows.device),
        )
        return
    prefix = (seq_lens.long() - counted).clamp(min=0)
    _write_slots(rows, prefix, slots, req_to_token, out)
    node = torch.arange(n, device=rows.device)
    if mask is None:
        seen = (node <= node[:, None]).expand(len(rows), n, n)
    else:
        itself = torch.eye(n, dtype=torch.bool, device=rows.device)
        seen = visible_nodes(mask, kind, prefix, n, row_bytes) | itself
    if kind == "prefix":
        seen = torch.zeros_like(seen)
        out.slots.zero_()
    out.words.copy_(pack_words(seen, out.words.shape[2]))
    if positions is None:
        positions = prefix[:, None] + (seen.sum(2) - 1).clamp(min=0)
    out.positions.copy_(positions)
    if window is not None:
        start = _write_window(out.rows, prefix, None, req_to_token, window)
        window.positions.copy_(out.positions - start[:, None])
        window.store.copy_(_mapped(window.slot_map, out.store))
        window.slots.copy_(0 * out.slots if kind == "prefix" else window.store.clamp(min=0))


def copy_in_steps(
    rows: Tensor,
    seq_lens: Tensor,
    slots: Tensor | None,
    *,
    counted: int,
    req_to_token: Tensor,
    out: PlanInputs,
) -> None:
    """Copy in all steps of a draft.

    Parameters
    ----------
    rows, seq_lens, counted, req_to_token
        As in `copy_in_rows`.
    slots : Tensor or None
        ``[B, steps, topk]``, any strides: slots of all branches. Without, those of the table's
        columns after the prefix, step by step.
    out : PlanInputs
        What is written, of ``[B, steps, topk]``, dense. Words are those of a chain (topk 1): all
        steps before and the step itself. Else they are the node's own bit, to which
        `specattn.kernels.tree.grow_words` adds.

    Raises
    ------
    ValueError
        Before anything is written: if a tensor has another shape or dtype.
    """
    _check_requests(len(out.slots), rows=rows, seq_lens=seq_lens)
    require_integers(tuple(out.slots.shape), slots=slots)
    require_rows(req_to_token=req_to_token)
    require_dense(**out._asdict())
    if not out.slots.numel():
        return
    batch, steps, topk, words = out.words.shape
    nodes = steps * topk
    if on_triton(req_to_token):
        per_program = min(64, power_of_2(nodes))
        launch.copy_in_steps_kernel[batch, cdiv(nodes, per_program)](
            rows,
            seq_lens,
            slots,
            req_to_token,
            tuple(out),
            nodes,
            counted,
            req_to_token.shape[1],
            req_to_token.stride(0),
            *((0, 0, 0) if slots is None else slots.stride()),
            TOPK=topk,
            W=words,
            NODES=per_program,
            BLOCK_W=power_of_2(words),
            num_warps=2,
            **launch_options(out.rows.device),
        )
        return
    prefix = (seq_lens.long() - counted).clamp(min=0)
    _write_slots(rows, prefix, slots, req_to_token, out)
    step = torch.arange(steps, device=rows.device)
    out.positions.copy_((prefix[:, None] + step)[:, :, None])
    node = torch.arange(nodes, device=rows.device)
    seen = node <= node[:, None] if topk == 1 else node == node[:, None]
    out.words.copy_(pack_words(seen[None], words).view(1, *out.words.shape[1:]))


def copy_in_prompts(
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
        As in `copy_in_rows`; its table gets the new tokens, too.

    Raises
    ------
    ValueError
        Before anything is written: if a tensor has another shape or dtype.
    """
    _check_requests(len(rows_out), rows=rows, prefix_lens=prefix_lens, new_lens=new_lens)
    require_integers(tuple(slots_out.shape), slots=slots)
    if window is not None:
        window.check(len(rows), (1, len(slots)))
    if on_triton(rows_out):
        batch, tokens, block = len(rows), len(slots), 256
        programs = cdiv(max(batch, tokens, 1), block)
        # of a window table every request's row has a program
        programs = programs if window is None else max(programs, batch)
        launch.copy_in_prompts_kernel[(programs,)](
            rows,
            prefix_lens,
            new_lens,
            slots,
            rows_out,
            seq_lens_out,
            indptr_out,
            slots_out,
            req_to_token,
            None if window is None else window.arguments(),
            batch,
            tokens,
            req_to_token.shape[1],
            slots.stride(0),
            req_to_token.stride(0),
            PAGE=1 if window is None else window.page_size,
            BLOCK=block,
            num_warps=4,
            **launch_options(rows_out.device),
        )
        return
    rows_out.copy_(rows)
    seq_lens_out.copy_(prefix_lens)
    indptr_out[0] = 0
    indptr_out[1:] = new_lens.cumsum(0)
    slots_out.copy_(slots)
    if window is not None:
        _write_window(rows_out, prefix_lens.long(), new_lens, req_to_token, window)
        window.store.copy_(_mapped(window.slot_map, slots))


def _check_requests(batch: int, **tensors: Tensor) -> None:
    require_integers((batch,), **tensors)
    require_dense(**tensors)


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
    page = window.page_size
    start = (prefix - window.keys).clamp(min=0) // page * page
    window.seq_lens.copy_(prefix - start)
    end = (prefix if new_lens is None else prefix + new_lens)[:, None]
    columns = start[:, None] + torch.arange(window.table.shape[1], device=rows.device)
    slots = table_slots(req_to_token, rows, columns)
    found = _mapped(window.slot_map, slots).clamp(min=0).to(torch.int32)
    window.table.copy_(torch.where(columns < end, found, window.table))
    return start


def _write_slots(
    rows: Tensor, prefix: Tensor, slots: Tensor | None, req_to_token: Tensor, out: PlanInputs
) -> None:
    """Write all but positions and words."""
    out.rows.copy_(rows)
    out.seq_lens.copy_(prefix)
    read, store = out.slots.flatten(1), out.store.flatten(1)
    if slots is None:
        columns = prefix[:, None] + torch.arange(store.shape[1], device=rows.device)
        slots = table_slots(req_to_token, out.rows, columns)
    store.copy_(slots.flatten(1))
    read.copy_(slots.flatten(1).clamp(min=0))
