"""Give rows of the slot table more pages, or fewer: one launch for all rows of an upload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024


# one compilation whatever the number of pieces: some step would wait for another one
@triton.jit(do_not_specialize=["pieces"])
def _write_slots_kernel(
    packed,  # [5, pieces] int32, then the pages
    req_to_token,  # [rows, columns] int32, in place
    reserved,  # [rows] int32, in place
    pieces,
    stride_row,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0)
    row = tl.load(packed + piece).to(tl.int64)
    column = tl.load(packed + pieces + piece)
    count = tl.load(packed + 2 * pieces + piece)
    first = tl.load(packed + 3 * pieces + piece)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    page = tl.load(packed + first + at // PAGE, mask=at < count, other=0)  # [BLOCK]
    slots = page * PAGE + at % PAGE
    tl.store(req_to_token + row * stride_row + column + at, slots, mask=at < count)
    if tl.program_id(1) == 0:
        tl.store(reserved + row, tl.load(packed + 4 * pieces + piece))


def write_slots(
    packed: Tensor,
    req_to_token: Tensor,
    reserved: Tensor,
    *,
    pieces: int,
    longest: int,
    page_size: int,
) -> None:
    """Write the slots of pages into rows of ``req_to_token``, and the rows' new room.

    Allocates nothing and never waits for the device.

    Parameters
    ----------
    packed : Tensor
        Flat int32. First five numbers per piece, all pieces' first numbers first: row, first
        column, how many slots to write, where in ``packed`` the piece's pages begin, and what
        ``reserved`` becomes. Then the pages; a piece's last page may be written in part.
    req_to_token : Tensor
        ``[rows, columns]`` int32, in place; may have a row stride.
    reserved : Tensor
        ``[rows]`` int32, in place.
    pieces : int
        How many; no two of one row.
    longest : int
        Slots of the longest piece.
    page_size : int
        Slots per page.
    """
    if not pieces:
        return
    _write_slots_kernel[(pieces, max(1, triton.cdiv(longest, BLOCK)))](
        packed,
        req_to_token,
        reserved,
        pieces,
        req_to_token.stride(0),
        PAGE=page_size,
        BLOCK=BLOCK,
    )
