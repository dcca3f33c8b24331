"""An engine's own caches and request table, as specattn reads them: views and checks, no memory."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.cache.slot_table import count_pages
from specattn.checks import expect, whole_number
from specattn.cuda_graph.capture_guard import Settable
from specattn.kernels.indices import fill_slots


def block_stride(pages: Tensor) -> int:
    """Return how many slots lie from one page's first to the next one's, in what `as_slots` views.

    Parameters
    ----------
    pages : Tensor
        ``[num_pages, page_size, heads, dim]``, any strides.

    Returns
    -------
    int
        ``page_size`` if pages follow each other; a multiple, if other things lie in between.

    Raises
    ------
    ValueError
        If it is no multiple, so that no numbering has all slots one distance apart, and pages
        begin at multiples of ``page_size``.
    """
    if pages.dim() != 4 or not pages.numel():
        raise ValueError(
            f"pages must be [num_pages, page_size, heads, dim], not empty, got {list(pages.shape)}"
        )
    count, page_size = pages.shape[:2]
    slot = pages.stride(1)
    # the stride of an axis of length 1 means nothing
    if count == 1 or page_size == 1:
        return page_size
    if not slot or pages.stride(0) % (slot * page_size) or not pages.stride(0):
        raise ValueError(
            f"pages must begin a multiple of page_size ({page_size}) slots apart, got pages "
            f"{pages.stride(0)} and slots {slot} elements apart"
        )
    return pages.stride(0) // slot


def as_slots(pages: Tensor) -> Tensor:
    """View a layer's paged keys, or values, as slots: ``pages[p, i]`` is slot ``p * s + i``.

    ``s`` is `block_stride`. Where it is more than ``page_size``, slots in between are other
    things: the values between the keys of ``[num_pages, 2, page_size, heads, dim]``, whose halves
    ``cache[:, 0]`` and ``cache[:, 1]`` can be viewed so, other layers, or other heads of
    ``[num_pages, heads, page_size, dim]``, which is viewed as ``cache.transpose(1, 2)``. No table
    names them, so no step reads or writes them; but do not fill such a view whole.

    Parameters
    ----------
    pages : Tensor
        ``[num_pages, page_size, heads, dim]``, with strides that `block_stride` takes.

    Returns
    -------
    Tensor
        ``[num_slots, heads, dim]``, a view, up to the last page's last slot.

    Raises
    ------
    ValueError
        As `block_stride`.
    """
    stride = block_stride(pages)
    count, page_size = pages.shape[:2]
    slot = pages.stride(1) if page_size > 1 else pages.stride(0)
    shape = ((count - 1) * stride + page_size, *pages.shape[2:])
    return pages.as_strided(shape, (slot, *pages.stride()[2:]))


class ExternalTable(Settable):
    """An engine's request table, in place of a `SlotTable`: the engine keeps the books.

    `StepDecoder` and `Prefill` take it, and only read. The engine writes the slots of its requests
    and then how many there are, itself or with `fill`, on the stream of the steps, so that steps
    in flight still find what they were launched over. Slots of row r are its own from the
    committed length on, ``SpecConfig.reserve_len`` of them for a step.

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows + 1, max_context_len]`` int32, slot of every token; rows may have a stride. Row 0
        is padding's, and is set to 0 here.
    reserved : Tensor
        ``[rows + 1]`` int32, contiguous: how many tokens of every row have slots. A row of which
        they are too few for a step sits it out: 0 for rows without a request. Entry 0 is set to 0
        here.
    num_slots : int
        Slots in the pools (``KVPool.num_slots``), rounded down to whole pages. The table never
        names slots of page 0.
    page_size : int
        Slots per page, a power of two: slots of tokens ``[i * page_size, (i + 1) * page_size)`` of
        a row follow each other, from a multiple of ``page_size`` on.
    block_stride : int, optional
        Slots from an engine's block to the next, as `block_stride` counts them; ``page_size`` by
        default. Only `fill` reads it.

    Raises
    ------
    ValueError
        If a tensor is not as described, or a number is out of range.

    Attributes
    ----------
    num_pages, max_context_len : int
        What follows from the above.
    """

    def __init__(
        self,
        req_to_token: Tensor,
        reserved: Tensor,
        *,
        num_slots: int,
        page_size: int = 1,
        block_stride: int | None = None,
    ) -> None:
        self.num_pages = count_pages(num_slots, page_size)
        self.page_size = page_size
        self.block_stride = (
            page_size if block_stride is None else whole_number("block_stride", block_stride)
        )
        if self.block_stride < 1 or self.block_stride % page_size:
            raise ValueError(
                f"block_stride must be a multiple of page_size ({page_size}), got {block_stride}"
            )
        shape = tuple(req_to_token.shape)
        if len(shape) != 2 or shape[0] < 2 or not shape[1]:
            raise ValueError(f"req_to_token must be [rows + 1, max_context_len], got {list(shape)}")
        expect("req_to_token", req_to_token, shape, torch.int32, req_to_token.device)
        if req_to_token.stride(1) != 1 or req_to_token.stride(0) < shape[1]:
            raise ValueError(
                "req_to_token must have rows that are dense and apart, got strides "
                f"{req_to_token.stride()} of {list(shape)}"
            )
        expect("reserved", reserved, shape[:1], torch.int32, req_to_token.device)
        if reserved.stride(0) != 1:
            raise ValueError(f"reserved must be contiguous, got stride {reserved.stride(0)}")
        self.req_to_token, self.reserved = req_to_token, reserved
        self.max_context_len = shape[1]
        req_to_token[0].zero_()
        reserved[:1].zero_()

    def fill(self, rows: Tensor, block_table: Tensor, lens: Tensor) -> None:
        """Write the slots of the engine's blocks into ``req_to_token``, and ``reserved``.

        One launch; it neither waits for the device nor allocates on it, and can be recorded in a
        CUDA graph. Only blocks of the first ``lens`` tokens are read.

        Parameters
        ----------
        rows : Tensor
            ``[B]`` int64: table rows, all different, and 0 for lines to skip.
        block_table : Tensor
            ``[B, blocks]`` int32: line i has the blocks of row ``rows[i]``, in the order of its
            tokens; lines may have a stride. Block b begins at slot ``b * block_stride``.
        lens : Tensor
            ``[B]`` int32: tokens that have slots, what ``reserved`` becomes; cut at
            ``max_context_len``, and at what the line has room for.

        Raises
        ------
        ValueError
            Before anything is written: if a tensor is not of this shape, dtype and device. Rows
            outside the table, rows named twice and negative lengths are refused on a CPU alone:
            to read them on an accelerator would wait for it.
        """
        for name, tensor in (("rows", rows), ("block_table", block_table), ("lens", lens)):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} must be a tensor, got {tensor!r}")
        device, batch = self.req_to_token.device, rows.numel()
        expect("rows", rows, (batch,), torch.int64, device)
        blocks = block_table.shape[-1:].numel()
        expect("block_table", block_table, (batch, blocks), torch.int32, device)
        expect("lens", lens, (batch,), torch.int32, device)
        for name, tensor in (("rows", rows), ("block_table", block_table), ("lens", lens)):
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise ValueError(f"{name} must be dense in its last axis, got {tensor.stride()}")
        if device.type == "cpu":
            self._check_contents(rows.tolist(), lens.tolist())
        fill_slots(
            rows,
            block_table,
            lens,
            self.req_to_token,
            self.reserved,
            page_size=self.page_size,
            block_stride=self.block_stride,
        )

    def _check_contents(self, rows: list[int], lens: list[int]) -> None:
        most = len(self.reserved) - 1
        named = [row for row in rows if row]
        if len(set(named)) < len(named) or not set(named) <= set(range(1, most + 1)):
            raise ValueError(
                f"rows must be distinct rows 1..{most}, or 0 for lines to skip, got {rows}"
            )
        if min(lens, default=0) < 0:
            raise ValueError(f"lens must be 0 or more, got {lens}")
