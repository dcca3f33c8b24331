"""What the memory system and the launch path of this GPU allow, measured on the spot."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .timing import median_of, record

ROWS, WIDTH = 2**22, 128  # rows of 256 bytes, 1 GB
SIDE = 8192
LAUNCHES = 64


@triton.jit
def _read(source, sink, count, BLOCK: tl.constexpr):
    """Sum a share of ``source``; a CTA strides over it."""
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total += tl.load(source + at + tl.arange(0, BLOCK))
    tl.store(sink + tl.program_id(0), tl.sum(total))


@triton.jit
def _gather(rows, order, sink, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sum rows in the order of a list; a CTA strides over the list."""
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    step = tl.num_programs(0) * BLOCK
    at = tl.program_id(0) * BLOCK
    slots = tl.load(order + at + tl.arange(0, BLOCK))
    for here in range(at, count, step):
        # the next addresses are on their way while these rows are
        following = tl.load(order + tl.minimum(here + step, count - BLOCK) + tl.arange(0, BLOCK))
        total += tl.load(rows + slots[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
        slots = following
    tl.store(sink + tl.program_id(0), tl.sum(total))


@triton.jit
def _empty(sink):
    pass


def measure(rounds: int) -> dict[str, Any]:
    """Return what this GPU reaches.

    TB/s of a copy (read and write counted), a read and a gather of rows of 256 bytes, TFLOP/s of
    torch's bfloat16 product of square matrices, us of empty kernels of some CTAs.
    """
    device = torch.device("cuda")
    ctas = torch.cuda.get_device_properties(device).multi_processor_count * 8
    source = torch.randn(ROWS * WIDTH // 2, device=device)
    target = torch.empty_like(source)
    sink = torch.empty(ctas, device=device)
    rows = source.view(torch.bfloat16).view(ROWS, WIDTH)
    order = torch.randperm(ROWS, device=device).to(torch.int32)

    def speed(moved: int, call: Any) -> float:
        return moved / median_of(record(call), rounds) / 1e6

    found = {
        # a graph's memcpy node is slower than a kernel that does the same
        "copy_tb_s": speed(2 * source.nbytes, lambda: torch.mul(source, 1.0, out=target)),
        "read_tb_s": speed(
            source.nbytes, lambda: _read[(ctas,)](source, sink, source.numel(), 4096, num_warps=8)
        ),
    }
    found["gather_tb_s"] = speed(
        source.nbytes, lambda: _gather[(ctas,)](rows, order, sink, ROWS, WIDTH, 64, num_warps=8)
    )
    left, right = torch.randn(2, SIDE, SIDE, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    multiply = record(lambda: torch.mm(left, right, out=product))
    found["matmul_tflops"] = 2 * SIDE**3 / median_of(multiply, rounds) / 1e6
    for count in (1, 264, 1056):

        def launches(count: int = count) -> None:
            for _ in range(LAUNCHES):
                _empty[(count,)](sink)

        found[f"empty_{count}_us"] = median_of(record(launches), rounds) / LAUNCHES
    return found
