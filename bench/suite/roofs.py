"""What the memory system and the tensor cores of this GPU allow, measured on the spot."""

from __future__ import annotations

from typing import Any

import torch

from .timing import median_of, record

COUNT = 2**28  # float32, 1 GB
SIDE = 8192


def measure(rounds: int) -> dict[str, Any]:
    """Return what this GPU reaches.

    TB/s of a copy (read and write counted), TFLOP/s of torch's bfloat16 product of square matrices.
    """
    device = torch.device("cuda")
    source = torch.randn(COUNT, device=device)
    target = torch.empty_like(source)
    # a graph's memcpy node is slower than a kernel that does the same
    copy = record(lambda: torch.mul(source, 1.0, out=target))
    left, right = torch.randn(2, SIDE, SIDE, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    multiply = record(lambda: torch.mm(left, right, out=product))
    return {
        "copy_tb_s": 2 * source.nbytes / median_of(copy, rounds) / 1e6,
        "matmul_tflops": 2 * SIDE**3 / median_of(multiply, rounds) / 1e6,
    }
