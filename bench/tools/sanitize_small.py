"""What `sanitize` runs of the small operations, and of stores and moves of every dtype."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch

from bench.tools.sanitize_ops import GROUPS
from bench.tools.sanitize_ops_step import Step
from bench.tools.sanitize_world import BF16, DEVICE, F8, F16, F32, finite

if TYPE_CHECKING:
    from collections.abc import Callable


def small() -> None:
    """The operations of `bench.tools.sanitize_ops`, on two trees."""
    for topk, steps, nodes in ((3, 3, 7), (8, 7, 64)):
        step = Step(3, topk, steps, nodes, DEVICE, context=90, vocab=1201, layers=2)
        for group in GROUPS:
            for op in group(step):
                op.run(import_module(f"specattn.kernels.{op.module}"), op.sets - 1)


def pool_dtypes() -> None:
    """Stores and moves of elements of every size, at widths that are no power of two."""
    from specattn.kernels.attention import merge_lse
    from specattn.kernels.cache import commit_kv, store_kv, write_slots

    slots = torch.tensor([[5, 2, 7], [1, 4, 8]], dtype=torch.int32).to(DEVICE)
    path = torch.tensor([[0, 2, -1], [0, 1, 2]], dtype=torch.int32).to(DEVICE)
    for dtype in (F32, F16, BF16, F8):
        pools = [torch.zeros(2, 9, 3, 40).to(dtype).to(DEVICE) for _ in range(2)]
        new = torch.randn(6, 3, 40).to(BF16 if dtype == F8 else dtype).to(DEVICE)
        store_kv(new, new, pools[0][0], pools[1][0], slots)
        commit_kv(*pools, slots, path)
        finite(*pools)
    table = torch.zeros(3, 1500, dtype=torch.int32).to(DEVICE)
    pieces = [[2, 1], [0, 1496], [1030, 4], [10, 20], [1030, 1500], *[[p, p + 1] for p in range(9)]]
    packed = torch.tensor(pieces, dtype=torch.int32).view(-1).to(DEVICE)
    write_slots(packed, table, table[0], pieces=2, longest=1030, page_size=128)
    parts = [torch.randn(2, 3, 5, 40).to(DEVICE) for _ in range(2)]
    logs = [torch.randn(2, 3, 5).to(DEVICE) for _ in range(2)]
    keys = slots[:, 0].contiguous()
    merge_lse(parts[0], logs[0], keys, parts[1], logs[1], slots, parts[0], logs[0])
    finite(parts[0], logs[0])


SMALL: dict[str, Callable[[], None]] = {"operations": small, "dtypes": pool_dtypes}
