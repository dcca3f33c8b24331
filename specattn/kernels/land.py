"""What a step gained, written from the device to the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.launch import enter, launch_options
from specattn.kernels.reference.land import check_ring

if TYPE_CHECKING:
    from torch import Tensor

# numbers that the one program has under way at a time
BLOCK = 1024


@triton.jit
def _land_step_kernel(
    packed,  # [B, width] int64
    ring,  # [S, B', width] int64, out, in the host's memory
    turn,  # [1] int64, in place
    numbers,
    width,
    slots,
    stride_packed,
    stride_ring,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    at = tl.load(turn)
    for start in tl.range(0, numbers, BLOCK):
        number = start + tl.arange(0, BLOCK)  # [BLOCK]
        ok = number < numbers
        value = tl.load(packed + number // width * stride_packed + number % width, mask=ok)
        tl.store(ring + at * stride_ring + number, value, mask=ok)
    # every thread has read it
    tl.debug_barrier()
    tl.store(turn, (at + 1) % slots)


def write_output(packed: Tensor, ring: Tensor, turn: Tensor) -> None:
    """Write a step's tokens to their turn of a ring in pinned host memory, and count the turn.

    The host finds them there once an event that is recorded after this launch has come; nothing
    is copied besides. The ring is written over PCIe, which does not hold the device up.

    Parameters
    ----------
    packed : Tensor
        ``[B, w]`` int64; may have a row stride.
    ring : Tensor
        ``[S, B', w]`` int64 with B' at least B, dense but for its first axis; pinned, or on the
        device. The first B rows of ``ring[turn]`` are written.
    turn : Tensor
        ``[1]`` int64, at least 0 and below S; becomes the next one, 0 after the last.

    Raises
    ------
    ValueError
        Before anything is written: if the ring has another width, or fewer rows.
    """
    check_ring(packed, ring)
    batch, width = packed.shape
    _land_step_kernel[(1,)](
        packed,
        ring,
        turn,
        batch * width,
        width,
        len(ring),
        packed.stride(0),
        ring.stride(0),
        BLOCK=BLOCK,
        **launch_options(packed.device),
    )
