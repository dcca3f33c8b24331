"""Views of the caches and the request table that an engine has."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.buffers import ReadOnly
from specattn.cache.slot_table import SlotTable, count_pages
from specattn.checks import expect, require_rows, whole_number
from specattn.kernels.indices import fill_slots


def block_stride(pages: Tensor) -> int:
    """Return how many slots `as_slots` counts from page to page.

    Parameters
    ----------
    pages : Tensor
        ``[num_pages, page_size, heads, dim]``, any strides.

    Returns
    -------
    int
        ``page_size`` if pages follow each other, a multiple of it if other things lie in between.

    Raises
    ------
    ValueError
        If pages do not begin a multiple of ``page_size`` slots apart, or ``pages`` are empty or
        have other axes.
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
    """View a layer's pages of keys, or of values, as slots.

    ``pages[p, i]`` is slot ``p * block_stride(pages) + i``. Where the stride is more than
    ``page_size``, other things lie between the pages: the values of ``[num_pages, 2, page_size,
    heads, dim]``, of which ``cache[:, 0]`` is viewed, other layers, or other heads of ``[num_pages,
    heads, page_size, dim]``, which is viewed as ``cache.transpose(1, 2)``. No table names their
    slots, so no step reads or writes them. Do not fill such a view as a whole.

    Parameters
    ----------
    pages : Tensor
        ``[num_pages, page_size, heads, dim]``, with strides that `block_stride` takes.

    Returns
    -------
    Tensor
        ``[num_slots, heads, dim]``, a view that ends with the last page.

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


class ExternalTable(ReadOnly):
    """An engine's request table, in place of a `SlotTable`.

    `StepDecoder` and `Prefill` only read it. The engine writes the slots of its requests and then
    their number, itself or with `fill`. It does so on the stream of the steps, so that steps in
    flight find the slots that they were launched with. No other row may hold the slots of a row
    past its committed length; a step needs ``SpecConfig.reserve_len`` of them.

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows + 1, max_context_len]`` int32, slot of every token; rows may have a stride. Row 0
        belongs to padding and is set to 0 here.
    reserved : Tensor
        ``[rows + 1]`` int32, contiguous: how many tokens of every row have slots, 0 for rows
        without a request. A row with too few for a step sits it out. Entry 0 is set to 0 here.
    num_slots : int
        Slots in the pools (``KVPool.num_slots``), rounded down to whole pages. The table may not
        name slots of page 0.
    page_size : int
        Slots per page, a power of two. The slots of tokens ``[i * page_size, (i + 1) * page_size)``
        of a row follow each other, from a multiple of ``page_size`` on.
    block_stride : int, optional
        Slots from one block of the engine to the next (`block_stride`); ``page_size`` by default.
        Only `fill` reads it.

    Raises
    ------
    ValueError
        If a tensor is not as described, or a number is out of range.

    Attributes
    ----------
    num_pages, max_context_len : int
        Whole pages in the pools, and columns of ``req_to_token``.
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
        """Write rows of ``req_to_token`` and ``reserved`` from a block table.

        This is one launch, which neither waits for the device nor allocates on it and can be
        recorded in a CUDA graph. It reads only the blocks of the first ``lens`` tokens.

        Parameters
        ----------
        rows : Tensor
            ``[B]`` int64: table rows, all different, or 0 for lines to skip.
        block_table : Tensor
            ``[B, blocks]`` int32: line i has the blocks of row ``rows[i]``, in the order of its
            tokens; lines may have a stride. Block b begins at slot ``b * block_stride``.
        lens : Tensor
            ``[B]`` int32: tokens with slots, which ``reserved`` becomes; at most
            ``max_context_len`` and what the line's blocks hold.

        Raises
        ------
        ValueError
            Before anything is written: if a tensor has another shape, dtype or device. On a CPU
            also if a row is outside the table or named twice, a length is negative, or a block is
            outside the pools or padding's; to read them on an accelerator would wait for it, and
            a block outside the pools is taken for block 0 there.
        """
        given = {"rows": rows, "block_table": block_table, "lens": lens}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} must be a tensor, got {tensor!r}")
        device, batch = self.req_to_token.device, rows.numel()
        blocks = block_table.shape[-1:].numel()
        expect("rows", rows, (batch,), torch.int64, device)
        expect("block_table", block_table, (batch, blocks), torch.int32, device)
        expect("lens", lens, (batch,), torch.int32, device)
        require_rows(**given)
        if device.type == "cpu":
            self._check_contents(rows.tolist(), lens.tolist())
            self._check_blocks(rows, block_table, lens)
        fill_slots(
            rows,
            block_table,
            lens,
            req_to_token=self.req_to_token,
            reserved=self.reserved,
            page_size=self.page_size,
            block_stride=self.block_stride,
            num_blocks=self._num_blocks,
        )

    @property
    def _num_blocks(self) -> int:
        """The engine's blocks that lie in the pools, block 0 included."""
        return (self.num_pages - 1) * self.page_size // self.block_stride + 1

    def _check_blocks(self, rows: Tensor, block_table: Tensor, lens: Tensor) -> None:
        first = torch.arange(block_table.shape[1]) * self.page_size
        used = block_table[(first < lens[:, None]) & (rows != 0)[:, None]]
        if ((used < 1) | (used >= self._num_blocks)).any():
            raise ValueError(f"blocks must be 1..{self._num_blocks - 1}, got {used.tolist()}")

    def _check_contents(self, rows: list[int], lens: list[int]) -> None:
        most = len(self.reserved) - 1
        named = [row for row in rows if row]
        if len(set(named)) < len(named) or not set(named) <= set(range(1, most + 1)):
            raise ValueError(
                f"rows must be distinct rows 1..{most}, or 0 for lines to skip, got {rows}"
            )
        if min(lens, default=0) < 0:
            raise ValueError(f"lens must be 0 or more, got {lens}")


#: Rows and slots of requests, as steps read them.
RequestTable = SlotTable | ExternalTable
