"""Add up the parts of a product whose next reader is not one of the `glue` kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.glue import sum_parts
from specattn.kernels.launch import enter, launch_options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# columns per program
SPAN = 512


@triton.jit
def _add_parts_kernel(
    parts,  # [SPLIT, T, SIZE]
    out,  # [T, SIZE], out
    stride_part,
    stride_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    enter(PDL)
    x = sum_parts(parts, row * stride_row + column, ok, stride_part, SPLIT)
    tl.store(out + row * SIZE + column, x.to(out.dtype.element_ty), mask=ok)


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum ``[T, N]`` of ``parts [S, T, N]``, dense in their last axis, in ``dtype``."""
    split, count, size = parts.shape
    out = parts.new_empty(count, size, dtype=dtype)
    if count:
        _add_parts_kernel[(count, triton.cdiv(size, SPAN))](
            parts,
            out,
            parts.stride(0),
            parts.stride(1),
            SIZE=size,
            BLOCK=SPAN,
            SPLIT=split,
            num_warps=2,
            **launch_options(parts.device),
        )
    return out
