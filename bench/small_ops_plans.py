"""Attention plans of a step's forwards, in one launch and apart, for `bench.small_ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bench.small_ops_step import DIM, HEADS, Step, size
from bench.small_ops_timing import measure

if TYPE_CHECKING:
    from specattn.kernels.attention import TreeAttention


def planned(s: Step, q_len: int, tail_len: int) -> TreeAttention:
    """Attention of one forward."""
    from specattn.kernels.attention import TreeAttention

    return TreeAttention(
        batch=s.batch,
        q_len=q_len,
        tail_len=tail_len,
        num_qo_heads=4 * HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.bfloat16,
        device="cuda",
        sm_scale=DIM**-0.5,
    )


def plans(
    name: str, s: Step, kernels: list[TreeAttention], apart: bool, rounds: int, count: bool
) -> dict[str, Any]:
    """Attention plans, in one launch or ``with_own_workspace``.

    They have no twin: the tiles they hand out must be those there are.
    """
    from specattn.kernels.attention.triton_plan import fill_plans

    cuts = [kernel.plan_request(s.lens, s.rows, s.table.stride(0)) for kernel in kernels]

    def fill(_: int) -> None:
        for group in ([cut] for cut in cuts) if apart else (cuts,):
            fill_plans(group)

    fill(0)
    for kernel in kernels:
        tiles = -(-(s.lens + kernel.tail_len) // kernel.tables.block_n)
        if not torch.equal(kernel.tables.requests[:, 5], tiles.cumsum(0) - tiles):
            raise ArithmeticError(f"{name}: wrong tiles")
        if int(kernel.tables.splits[:, 0].sum()) != int(tiles.sum()):
            raise ArithmeticError(f"{name}: splits do not hold all tiles")
    moved = sum(
        size(kernel.tables.requests, kernel.tables.splits, s.lens, s.rows) for kernel in kernels
    )
    return measure(name, moved, fill, 1, rounds, count)


def planning(s: Step) -> dict[str, tuple[list[TreeAttention], bool]]:
    """Verification alone; then all forwards of a step: drafts, verification, draft extend."""
    verify = planned(s, s.nodes, s.nodes)
    step = [planned(s, s.topk, s.topk * (i + 1)) for i in range(s.steps - 1)]
    step += [verify, planned(s, s.steps + 1, s.steps + 1)]
    return {
        "plan": ([verify], True),
        "plans of a step": (step, False),
        "plans of a step, apart": (step, True),
    }
