"""The split tables of tree attention: every tile once, in equal splits, partials in one row."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specattn.kernels.attention import plan as tree_plan
from specattn.kernels.attention.plan import PlanRequest, TreePlan, fill_plans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BN = 32


@dataclass
class Work:
    """What a plan is to cut, and what it made of it."""

    bases: list[int]
    prefixes: list[int]
    firsts: list[int]
    tiles: list[int]
    cut: PlanRequest

    @property
    def plan(self) -> TreePlan:
        return self.cut.plan

    def tables(self) -> list[torch.Tensor]:
        return [self.plan.requests, self.plan.splits, self.plan.merges]

    def segments(self) -> list[list[tuple[int, int, int, int]]]:
        """Walk the splits as the kernel does: ``(request, first tile, end tile, slot)`` each.

        Checks the numbers every segment goes by.
        """
        requests, walks = self.plan.requests.tolist(), []
        for c, (left, tile, req, *numbers) in enumerate(self.plan.splits.tolist()):
            walks.append([])
            while left > 0:
                base, prefix, first, partials, rank = numbers
                assert (base, prefix, first) == (
                    self.bases[req],
                    self.prefixes[req],
                    self.firsts[req],
                )
                stop = min(self.tiles[req], tile + left)
                walks[-1].append((req, tile, stop, c + rank if partials > 1 else -1))
                left -= stop - tile
                tile, req = 0, req + 1
                if left > 0:
                    numbers = requests[req][:5]
        return walks


def prepare(
    lengths: list[int],
    *,
    splits: int,
    tail: int = 3,
    window: int = -1,
    csr: bool = False,
    stride: int = 5000,
    min_tiles: int = 1,
    block: int = BN,
    partial_tiles: int = 0,
    extra: int = 0,
) -> Work:
    """Work whose tables are poisoned, and not filled."""
    plan = TreePlan(
        batch=len(lengths),
        max_splits=splits,
        tail_len=tail,
        window_left=window,
        block_n=block,
        csr=csr,
        device=torch.device(DEVICE),
        min_tiles=min_tiles,
        partial_tiles=partial_tiles,
        extra=extra,
    )
    if csr:
        indptr = torch.tensor([0, *lengths]).cumsum(0)
        cut = PlanRequest(plan, indptr.to(torch.int32).to(DEVICE), None, 1)
        bases = [int(b) if n else 0 for b, n in zip(indptr, lengths, strict=False)]
    else:
        rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
        lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        cut = PlanRequest(plan, lens, rows.to(DEVICE), stride)
        bases = [int(r) * stride for r in rows]
    newest = [n - 1 if csr else n for n in lengths]
    firsts = [max(0, n - window) // block if window >= 0 else 0 for n in newest]
    tiles = [
        max(1, -(-(n + tail) // block) - first) for n, first in zip(lengths, firsts, strict=True)
    ]
    work = Work(bases, lengths, firsts, tiles, cut)
    poison(work)
    return work


def poison(work: Work) -> None:
    for table in work.tables():
        table.fill_(-7)


def make(lengths: list[int], **options: Any) -> Work:
    work = prepare(lengths, **options)
    fill_plans([work.cut])
    return work


def check(work: Work) -> list[int]:
    """Check the tables; return the tiles of the splits in use."""
    walks = work.segments()
    # every tile of every request exactly once, in order
    line = [(req, t) for walk in walks for req, a, b, _ in walk for t in range(a, b)]
    assert line == [(req, t) for req, count in enumerate(work.tiles) for t in range(count)]
    sizes = [sum(b - a for _, a, b, _ in walk) for walk in walks]
    used = [size for size in sizes if size]
    assert sizes[: len(used)] == used, "idle splits come last"
    assert max(used) - min(used) <= 1
    # partials of a request lie in consecutive slots, which nothing else uses
    slots: dict[int, list[int]] = {}
    for walk in walks:
        for req, _, _, slot in walk:
            if slot >= 0:
                slots.setdefault(req, []).append(slot)
    segments = [seg[0] for walk in walks for seg in walk]
    assert all(segments.count(req) == len(s) for req, s in slots.items())
    assert all(segments.count(req) == 1 for req in set(segments) - set(slots))
    flat = [s for row in slots.values() for s in row]
    assert len(set(flat)) == len(flat)
    batch, splits = len(work.tiles), len(work.plan.splits)
    assert max(flat, default=0) < splits + min(batch, splits)
    count, *_ = work.plan.merges[0].tolist()
    listed = work.plan.merges[1 : count + 1].tolist()
    assert [tuple(row[:3]) for row in listed] == [(req, s[0], len(s)) for req, s in slots.items()]
    assert all(s == list(range(s[0], s[0] + len(s))) for s in slots.values())
    return used


RAGGED = {
    "one": ([700], 33),
    "one_short": ([1], 33),
    "one_split": ([700, 3], 1),
    "one_long": ([6000, *[50] * 31], 33),
    "zeros": ([0, 0, 0], 7),
    "zeros_between": ([0, 400, 0, 0, 333, 0], 7),
    "odd": ([33, 64, 65, 1, 500], 5),
    "more_requests_than_splits": ([(37 * i) % 200 for i in range(50)], 7),
    "many_splits": ([900, 77], 264),
    "batch_of_1100": ([(13 * i) % 150 for i in range(1100)], 33),
}


@pytest.mark.parametrize("name", RAGGED)
def test_every_tile_is_taken_once(name: str) -> None:
    lengths, splits = RAGGED[name]
    check(make(lengths, splits=splits))


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [int(rng.paretovariate(0.6)) % 5000 for _ in range(rng.choice([2, 3, 17, 40]))]
    options = {"tail": rng.choice([0, 1, 70])}
    if seed % 2:
        options = {"window": rng.choice([0, 31, 700]), "tail": rng.choice([0, 1, 70])}
    check(make(lengths, splits=rng.choice([2, 8, 33]), **options))


@pytest.mark.parametrize("lengths", [[5, 700, 0, 64], [0], [0, 0, 31]])
@pytest.mark.parametrize("window", [-1, 0, 40])
def test_index_lists(lengths: list[int], window: int) -> None:
    check(make(lengths, splits=5, tail=0, window=window, csr=True))


@pytest.mark.parametrize(
    ("batch", "splits", "tiles", "used"),
    [
        (8, 33, 12, 32),  # whole splits per request
        (32, 33, 4, 32),
        (5, 33, 100, 30),
        (64, 33, 4, 32),  # whole requests per split
        (128, 33, 8, 32),
        (3, 33, 12, 33),  # 33 is a multiple of 3 as it is
        (4, 33, 2, 8),  # fewer tiles than splits
        (50, 33, 4, 25),
        (7, 2, 3, 2),  # 7 requests do not share 2 splits evenly: the cuts stay equal
    ],
)
def test_equal_lengths_are_cut_at_request_boundaries(
    batch: int, splits: int, tiles: int, used: int
) -> None:
    work = make([tiles * BN - 3] * batch, splits=splits)
    sizes = check(work)
    assert len(sizes) == used
    if max(batch, used) % min(batch, used) == 0:
        whole = [walk for walk in work.segments() if walk]
        if used >= batch:
            assert all(len(walk) == 1 for walk in whole)
        else:
            assert not work.plan.merges[0, 0]


def test_alignment_is_dropped_where_it_would_lengthen_splits() -> None:
    """17 requests in 33 splits: one split each would be twice as long."""
    assert len(check(make([50 * BN - 3] * 17, splits=33))) == 33


@pytest.mark.parametrize(
    ("tiles", "splits", "used"),
    [
        ([2], 16, 1),
        ([17], 16, 9),
        ([90], 16, 16),
        ([1, 1, 1], 16, 3),
        ([1] * 20, 7, 7),
        ([1, 1, 6], 16, 4),
    ],
)
def test_small_batches_have_few_splits(tiles: list[int], splits: int, used: int) -> None:
    """Two tiles a split; but every request a split, while there are any."""
    assert len(check(make([n * BN - 3 for n in tiles], splits=splits, min_tiles=2))) == used


def test_wide_products_cut_alike() -> None:
    """Tiles times splits beyond 2^31 switch to 64-bit products, by the table's row length."""
    narrow, wide = (
        make([3000, 17, 900], splits=33, stride=stride) for stride in (5000, 2**31 // 3)
    )
    check(wide)
    for a, b in zip(narrow.plan.splits.tolist(), wide.plan.splits.tolist(), strict=True):
        assert [*a[:3], *a[4:]] == [*b[:3], *b[4:]]


def random_lengths(count: int, rng: random.Random) -> list[int]:
    return [int(rng.paretovariate(0.6)) % 5000 for _ in range(count)]


def step_of(lengths: list[int], *, windows: tuple[int, ...] = (-1,), topk: int = 4) -> list[Work]:
    """Two draft forwards, a verification in wide tiles and a draft extend, on the same lengths."""
    few = {"splits": 16 if len(lengths) <= 8 else 33, "min_tiles": 2 if len(lengths) <= 8 else 1}
    return [
        work
        for window in windows
        for work in (
            *(prepare(lengths, tail=topk * (i + 1), window=window, **few) for i in range(2)),
            prepare(lengths, tail=64, window=window, splits=17, block=128),
            prepare(lengths, tail=6, window=window, **few),
        )
    ]


def lists_of(lengths: list[int]) -> list[Work]:
    """Draft forwards as lists per branch beside a verification, whose products are narrow."""
    branches = [n for n in lengths for _ in range(4)]
    drafts = [prepare([n + i for n in branches], tail=0, csr=True, splits=33) for i in range(2)]
    return [*drafts, prepare(lengths, tail=16, splits=33, block=64)]


def one_kv_head(rng: random.Random) -> list[Work]:
    """One request cut into as many splits as there are CTAs; another batch beside it."""
    return [
        prepare([4999], splits=264),
        prepare([70], splits=264, min_tiles=2, block=64),
        prepare(random_lengths(17, rng), splits=1, tail=0, window=0),
    ]


def batches(rng: random.Random) -> list[Work]:
    """Batches of all sizes, halves of one among them, in one launch."""
    sizes = (1, 2, 7, 33, 150, 150, 300)
    return [
        prepare(
            random_lengths(size, rng),
            splits=rng.choice([5, 33, 132]),
            window=rng.choice([-1, 511]),
            tail=rng.choice([1, 70]),
            stride=5000 + size,
        )
        for size in sizes
    ]


def above_a_block(rng: random.Random) -> list[Work]:
    return [prepare(random_lengths(size, rng), splits=33) for size in (3, 1100, 1024)]


MIXES = {
    "batch_1": lambda rng: step_of(random_lengths(1, rng)),
    "two_windows": lambda rng: step_of(random_lengths(13, rng), windows=(-1, 511)),
    "index_lists": lambda rng: lists_of(random_lengths(5, rng)),
    "one_kv_head": one_kv_head,
    "batches": batches,
    "above_a_block": above_a_block,
    "wide": lambda rng: [
        prepare([3000, 17, 900], splits=33, stride=stride) for stride in (5000, 2**31 // 3, 2**33)
    ],
}


@pytest.mark.parametrize("name", MIXES)
def test_together_is_one_by_one(name: str, plan_launches: list[tuple[int, ...]]) -> None:
    torch.manual_seed(3)
    works = MIXES[name](random.Random(name))
    fill_plans([work.cut for work in works])
    assert plan_launches == [(len(works),)]
    for nth, work in enumerate(works):
        check(work)
        found = [table.clone() for table in work.tables()]
        poison(work)
        fill_plans([work.cut])
        for table, was in zip(work.tables(), found, strict=True):
            assert torch.equal(table, was), (name, nth)


def test_many_plans_take_few_launches(
    plan_launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_plan, "MOST_PLANS", 3)
    works = [prepare([50 * n, 7], splits=5, tail=n) for n in range(1, 8)]
    # a plan given twice is filled once
    fill_plans([work.cut for work in [*works, works[0]]])
    assert plan_launches == [(3,), (3,), (1,)]
    for work in works:
        check(work)
    fill_plans([])
    assert len(plan_launches) == 3


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="so many splits take 256 KiB of shared memory, which no GPU has",
)
def test_products_of_tiles_and_splits_just_beyond_32_bits() -> None:
    """Full rows whose tiles times splits pass 2^31 by less than a hundredth."""
    tiles, splits, block = 11_600, 46_400, 16
    lengths = [tiles * block - 3] * 4
    assert 2**31 < 4 * tiles * splits < 1.01 * 2**31
    check(make(lengths, splits=splits, stride=tiles * block - 3, block=block))
