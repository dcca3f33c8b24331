"""What the cases of `bench.tools.sanitize` run on: trees over a pool, small tensors, checks."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
NAN = float("nan")


def finite(*results: Tensor | None) -> None:
    for result in results:
        if result is not None and not torch.isfinite(result.float()).all():
            raise ArithmeticError(f"not finite: {list(result.shape)}")


def same(name: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want):
        raise ArithmeticError(f"{name}: {list(got.shape)} differ")


def put(values: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def noise(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def poison(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    value = NAN if dtype.is_floating_point else -77
    return torch.full(shape, value).to(dtype).to(DEVICE)


class World:
    """A batch of trees over a pool of which every slot that nobody uses holds NaN."""

    def __init__(
        self, q_len: int, tail: int, *, lens: tuple[int, ...] = (0, 7, 130, 300), page: int = 1
    ) -> None:
        rng = random.Random(q_len)
        self.batch, self.q_len, self.tail, self.page = len(lens), q_len, tail, page
        pages = [-(-(n + tail) // page) for n in lens]
        order = rng.sample(range(1, sum(pages) + 3), sum(pages))
        self.slots = (sum(pages) + 3) * page
        self.width = max(pages) * page
        table = torch.zeros(self.batch + 1, self.width, dtype=torch.int32)
        tails = torch.zeros(self.batch, tail, dtype=torch.int32)
        self.used = torch.zeros(self.slots, dtype=torch.bool)
        at = 0
        for b, n in enumerate(lens):
            firsts = torch.tensor(order[at : at + pages[b]]) * page
            own = (firsts[:, None] + torch.arange(page)).flatten()
            at += pages[b]
            table[b + 1, : len(own)] = own
            tails[b] = own[n : n + tail]
            self.used[own] = True
        parent = [rng.randrange(max(0, j - 4), j) if j else -1 for j in range(tail)]
        seen = torch.eye(tail, dtype=torch.bool)
        depth = [0] * tail
        for j in range(1, tail):
            seen[j] |= seen[parent[j]]
            depth[j] = depth[parent[j]] + 1
        words = torch.zeros(tail, -(-tail // 64), dtype=torch.int64)
        for j in range(tail):
            for k in seen[j].nonzero().flatten().tolist():
                words[j, k // 64] |= (1 << k % 64) - (2**64 if k % 64 == 63 else 0)
        self.lens = torch.tensor(lens, dtype=torch.int32).to(DEVICE)
        self.rows = torch.arange(1, self.batch + 1).to(DEVICE)
        self.table, self.tails = table.to(DEVICE), tails.to(DEVICE)
        # the last nodes are the query tokens
        self.words = words[-q_len:].expand(self.batch, -1, -1).contiguous().to(DEVICE)
        places = torch.tensor(lens)[:, None] + torch.tensor(depth)
        self.tail_positions = places.to(DEVICE)
        self.positions = places[:, -q_len:].contiguous().to(DEVICE)

    def pool(self, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        pool = torch.randn(self.slots, heads, dim)
        pool[~self.used] = float("nan")
        # float8 knows NaN, and no assignment through a mask
        return pool.to(dtype).to(DEVICE)
