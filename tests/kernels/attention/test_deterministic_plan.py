"""The tables of deterministic attention: partials by position, each once, in any split."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import pytest
import torch

from specattn.kernels.attention.tree import Tail
from specattn.kernels.attention.triton_deterministic_plan import DeterministicPlan
from tests.oracle import make_tree_case, tree_lists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BN, SPLIT = 16, 4


@dataclass
class Work:
    """What a plan is to cut, and what it made of it."""

    lengths: list[int]
    bases: list[int]
    first: list[int]
    stop: list[int]
    plan: DeterministicPlan

    @cached_property
    def partials(self) -> list[list[tuple[int, int]]]:
        """The tiles of every request's partials, counted from position 0."""
        return [
            list(pairwise([first, *(t for t in range(first + 1, stop) if t % SPLIT == 0), stop]))
            for first, stop in zip(self.first, self.stop, strict=True)
        ]

    def walk(self) -> list[list[tuple[int, int]]]:
        """Walk the splits as the kernel does: ``(request, partial)`` each."""
        requests, walks = self.plan.requests.tolist(), []
        for left, tile, req, *numbers in self.plan.splits.tolist():
            walks.append([])
            while left > 0:
                base, prefix, first, partials, _, _ = numbers
                assert (base, prefix) == (self.bases[req], self.lengths[req])
                assert first == self.first[req]
                assert partials == len(self.partials[req])
                low = first + tile
                nth = low // SPLIT - first // SPLIT
                high = min((low // SPLIT + 1) * SPLIT, self.stop[req])
                assert self.partials[req][nth] == (low, high), "a split begins inside a partial"
                walks[-1].append((req, nth))
                left, tile = left - (high - low), tile + high - low
                if high == self.stop[req]:
                    left, tile, req = left - self.plan.extra, 0, req + 1
                if left > 0:
                    numbers = requests[req]
            assert left == 0
        return walks


def make(
    lengths: list[int],
    *,
    splits: int,
    tail: int = 3,
    window: int = -1,
    csr: bool = False,
    extra: int = 2,
    stride: int = 5000,
) -> Work:
    plan = DeterministicPlan(
        batch=len(lengths),
        max_splits=splits,
        q_len=1,
        tail_len=tail,
        window_left=window,
        block_n=BN,
        partial_tiles=SPLIT,
        extra=extra,
        csr=csr,
        device=torch.device(DEVICE),
    )
    for table in (plan.tile_ends, plan.requests, plan.splits, plan.merges):
        table.fill_(-7)
    if csr:
        indptr = torch.tensor([0, *lengths]).cumsum(0)
        plan.fill(indptr.to(torch.int32).to(DEVICE), None, 1)
        bases = [int(b) if n else 0 for b, n in zip(indptr, lengths, strict=False)]
    else:
        rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
        plan.fill(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), rows.to(DEVICE), stride)
        bases = [int(r) * stride for r in rows]
    newest = [n - 1 if csr else n for n in lengths]
    first = [max(0, n - window) // BN if window >= 0 else 0 for n in newest]
    stop = [max(-(-(n + tail) // BN), f + 1) for n, f in zip(lengths, first, strict=True)]
    return Work(lengths, bases, first, stop, plan)


def check(work: Work) -> list[list[tuple[int, int]]]:
    """Check the tables; return the splits."""
    walks, requests = work.walk(), work.plan.requests.tolist()
    line = [item for walk in walks for item in walk]
    batch = range(len(work.lengths))
    assert line == [(req, nth) for req in batch for nth in range(len(work.partials[req]))]
    # the partials of a request's first split are folded there, the others have slots of their own
    slots, listed = 0, []
    for req in batch:
        split = next(c for c, walk in enumerate(walks) if (req, 0) in walk)
        head = sum(item[0] == req for item in walks[split])
        kept = len(work.partials[req]) - head
        assert requests[req][4] == head
        if kept:
            assert requests[req][5] == slots
            listed.append([req, split, slots, kept])
        slots += kept
    count = int(work.plan.merges[0, 0])
    assert work.plan.merges[1 : count + 1].tolist() == listed
    longest = max(len(work.partials[req]) for req in batch)
    assert slots <= min(len(work.lengths), len(walks) - 1) * (longest - 1)
    # no split has more than its share and one partial
    extra = work.plan.extra
    work_of = [
        sum(b - a for req, nth in walk for a, b in [work.partials[req][nth]])
        + sum(extra for req, nth in walk if nth == len(work.partials[req]) - 1)
        for walk in walks
    ]
    used = sum(1 for walk in walks if walk)
    assert max(work_of) <= -(-sum(work_of) // used) + SPLIT + extra + 2
    return walks


RAGGED = {
    "one": ([700], 33),
    "one_short": ([1], 33),
    "one_split": ([700, 3], 1),
    "one_long": ([6000, *[50] * 31], 33),
    "zeros": ([0, 0, 0], 7),
    "zeros_between": ([0, 400, 0, 0, 333, 0], 7),
    "around_cuts": ([63, 64, 65, 61, 62, 60, 128, 125], 5),
    "more_requests_than_splits": ([(37 * i) % 200 for i in range(50)], 7),
    "many_splits": ([900, 77], 264),
    "batch_of_1100": ([(13 * i) % 150 for i in range(1100)], 33),
}


@pytest.mark.parametrize("name", RAGGED)
def test_every_part_is_taken_once(name: str) -> None:
    lengths, splits = RAGGED[name]
    check(make(lengths, splits=splits))


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [int(rng.paretovariate(0.6)) % 5000 for _ in range(rng.choice([2, 3, 17, 40]))]
    check(
        make(
            lengths,
            splits=rng.choice([2, 8, 33]),
            tail=rng.choice([1, 70]),
            window=rng.choice([0, 31, 700]) if seed % 2 else -1,
            extra=rng.choice([0, 15]),
        )
    )


@pytest.mark.parametrize("lengths", [[5, 700, 0, 64], [0], [0, 0, 31]])
@pytest.mark.parametrize("window", [-1, 0, 40])
def test_index_lists(lengths: list[int], window: int) -> None:
    check(make(lengths, splits=5, tail=0, window=window, csr=True, extra=0))


@pytest.mark.parametrize(("batch", "splits"), [(8, 33), (32, 33), (5, 33), (64, 33), (128, 33)])
def test_equal_requests_stay_whole_where_they_can(batch: int, splits: int) -> None:
    """As many as splits, or more: no request is in two splits, so there is nothing to merge."""
    work = make([12 * BN - 3] * batch, splits=splits)
    check(work)
    assert not work.plan.merges[0, 0] or batch * 2 <= splits


def test_wide_products_cut_alike() -> None:
    """Work times splits beyond 2^31 switches to 64-bit products, by the table's row length."""
    narrow, wide = (
        make([3000, 17, 900], splits=33, stride=stride) for stride in (5000, 2**31 // 3)
    )
    check(wide)
    for a, b in zip(narrow.plan.splits.tolist(), wide.plan.splits.tolist(), strict=True):
        assert [*a[:3], *a[4:]] == [*b[:3], *b[4:]]


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize(("mode", "tail"), [("tree", 9), ("any", 70), ("draft", 12)])
def test_a_path_is_the_rest_of_the_prefix_and_the_ancestors(
    mode: str, tail: int, window: int
) -> None:
    q_len = 9 if mode == "tree" else 4
    case = make_tree_case(
        [0, 15, 16, 37], mode=mode, q_len=q_len, tail_len=tail, window_left=window, device=DEVICE
    )
    a = case.args
    plan = DeterministicPlan(
        batch=4,
        max_splits=2,
        q_len=q_len,
        tail_len=tail,
        window_left=window,
        block_n=BN,
        partial_tiles=SPLIT,
        extra=0,
        csr=False,
        device=torch.device(DEVICE),
    )
    plan.paths.fill_(10**6)
    table = a["req_to_token"]
    plan.fill(a["seq_lens"], a["req_pool_indices"], table.stride(0))
    plan.trace(table, Tail(a["positions"], a["tail_slots"], a["tail_positions"], a["tail_words"]))
    seen = tree_lists(case)
    words = a["tail_words"].tolist()
    for row, (path, length) in enumerate(
        zip(plan.paths.tolist(), plan.path_lens.tolist(), strict=True)
    ):
        b, prefix = row // q_len, int(a["seq_lens"][row // q_len])
        whole = prefix // BN * BN
        slots = table[a["req_pool_indices"][b], whole:prefix].tolist() + [
            slot
            for j, slot in enumerate(a["tail_slots"][b].tolist())
            if words[b][row % q_len][j // 64] >> j % 64 & 1
        ]
        assert length == len(slots)
        for at, entry in enumerate(path):
            slot = slots[at] if at < length else None
            if slot in seen[row]:
                assert entry == slot
            else:
                assert ~entry == a["tail_slots"][b, 0]


def test_products_of_work_and_splits_just_beyond_32_bits() -> None:
    """Full rows whose work times splits passes 2^31 by less than a hundredth."""
    tiles, splits = 11_600, 46_400
    lengths = [tiles * BN - 3] * 4
    assert 2**31 < 4 * tiles * splits < 1.01 * 2**31
    check(make(lengths, splits=splits, stride=tiles * BN - 3, extra=0))
