"""What the memory system and the tensor cores of this GPU allow, measured on the spot."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .timing import median_of, record

COUNT = 2**28  # float32, 1 GB
SIDE = 8192


@triton.jit
def _read(source, sink, count, BLOCK: tl.constexpr):
    """Sum a share of ``source``; a CTA strides over it."""
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total += tl.load(source + at + tl.arange(0, BLOCK))
    tl.store(sink + tl.program_id(0), tl.sum(total))


def measure(rounds: int) -> dict[str, Any]:
    """Return what this GPU reaches.

    TB/s of a copy (read and write counted) and of a read, TFLOP/s of torch's bfloat16 product of
    square matrices.
    """
    device = torch.device("cuda")
    ctas = torch.cuda.get_device_properties(device).multi_processor_count * 8
    source = torch.randn(COUNT, device=device)
    target = torch.empty_like(source)
    sink = torch.empty(ctas, device=device)

    def speed(moved: int, call: Any) -> float:
        return moved / median_of(record(call), rounds) / 1e6

    found = {
        # a graph's memcpy node is slower than a kernel that does the same
        "copy_tb_s": speed(2 * source.nbytes, lambda: torch.mul(source, 1.0, out=target)),
        "read_tb_s": speed(
            source.nbytes, lambda: _read[(ctas,)](source, sink, source.numel(), 4096, num_warps=8)
        ),
    }
    left, right = torch.randn(2, SIDE, SIDE, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    multiply = record(lambda: torch.mm(left, right, out=product))
    found["matmul_tflops"] = 2 * SIDE**3 / median_of(multiply, rounds) / 1e6
    return found
