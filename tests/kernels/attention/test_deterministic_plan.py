"""Plans with partial tiles: cuts by position, each part once, in any split; and the paths."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn.kernels.attention.plan import fill_plans
from specattn.testing.oracle import visible_slots
from tests.kernels.attention import test_plan
from tests.kernels.attention.calls import make_deterministic, plan, poison
from tests.oracle import make_tree_case

if TYPE_CHECKING:
    from tests.kernels.attention.test_plan import Work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BN, PART, EXTRA = 16, 4, 2


def make(lengths: list[int], **options: Any) -> Work:
    return test_plan.make(lengths, **{"block": BN, "partial_tiles": PART, "extra": EXTRA} | options)


def partials(work: Work) -> list[list[tuple[int, int]]]:
    """The tiles of every request's partials, counted from its first."""
    cuts = [
        [0, *(t for t in range(1, tiles) if (first + t) % PART == 0), tiles]
        for first, tiles in zip(work.firsts, work.tiles, strict=True)
    ]
    return [list(pairwise(row)) for row in cuts]


def walk(work: Work) -> list[list[tuple[int, int, int]]]:
    """Walk the splits as the kernel does: ``(request, partial, slot)`` each."""
    requests, parts, walks = work.plan.requests.tolist(), partials(work), []
    for left, tile, req, *numbers in work.plan.splits.tolist():
        walks.append([])
        while left > 0:
            base, prefix, first, count, slot = numbers
            assert (base, prefix, first) == (
                work.bases[req],
                work.prefixes[req],
                work.firsts[req],
            )
            assert count == len(parts[req])
            nth = (first + tile) // PART - first // PART
            stop = min(work.tiles[req], ((first + tile) // PART + 1) * PART - first)
            assert parts[req][nth] == (tile, stop), "a split begins inside a partial"
            walks[-1].append((req, nth, slot + nth))
            left, tile = left - (stop - tile), stop
            if stop == work.tiles[req]:
                left, tile, req = left - work.plan.extra, 0, req + 1
            if left > 0:
                numbers = requests[req][:5]
        assert left == 0
    return walks


def check(work: Work) -> None:
    walks, parts = walk(work), partials(work)
    line = [item for walk in walks for item in walk]
    # every part once, in order, at a place of its own
    places = [(req, nth) for req, row in enumerate(parts) for nth in range(len(row))]
    assert line == [(*place, slot) for slot, place in enumerate(places)]
    firsts = [slot for _, nth, slot in line if nth == 0]
    listed = [[req, slot, len(parts[req])] for req, slot in enumerate(firsts)]
    count = int(work.plan.merges[0, 0])
    assert [row[:3] for row in work.plan.merges[1 : count + 1].tolist()] == listed
    # no split has more than its share and one partial
    sizes = [
        sum(
            parts[req][nth][1] - parts[req][nth][0] + work.plan.extra * (nth + 1 == len(parts[req]))
            for req, nth, _ in walk
        )
        for walk in walks
    ]
    splits = min(len(walks), sum(sizes))
    assert max(sizes) <= -(-sum(sizes) // splits) + PART + work.plan.extra + 2


@pytest.mark.parametrize("name", test_plan.RAGGED)
def test_every_part_is_taken_once(name: str) -> None:
    lengths, splits = test_plan.RAGGED[name]
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


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="so many splits take 256 KiB of shared memory, which no GPU has",
)
def test_products_of_work_and_splits_just_beyond_32_bits() -> None:
    """Full rows whose work times splits passes 2^31 by less than a hundredth."""
    tiles, splits = 11_600, 46_400
    lengths = [tiles * BN - 3] * 4
    assert 2**31 < 4 * tiles * splits < 1.01 * 2**31
    check(make(lengths, splits=splits, stride=tiles * BN - 3, extra=0))


def test_plans_with_partial_tiles_and_without_fill_together() -> None:
    lengths = [130, 0, 700]
    fixed, equal = (
        test_plan.prepare(lengths, splits=9, partial_tiles=part, block=BN) for part in (PART, 0)
    )
    fill_plans([fixed.cut, equal.cut])
    check(fixed)
    test_plan.check(equal)


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize(("mode", "tail"), [("tree", 9), ("any", 70), ("draft", 12)])
def test_a_path_is_the_rest_of_the_prefix_and_the_ancestors(
    mode: str, tail: int, window: int
) -> None:
    q_len = 9 if mode == "tree" else 4
    case = make_tree_case(
        [0, 15, 32, 69], mode=mode, q_len=q_len, tail_len=tail, window_left=window, device=DEVICE
    )
    a, kernel = case.args, make_deterministic(case)
    poison(kernel)
    plan(kernel, case)
    table, tile = a["req_to_token"], kernel.tile.block_n
    tails = ("positions", "tail_slots", "tail_positions", "tail_words")
    kernel.trace(indices=table, **{name: a[name] for name in tails})
    seen, words = visible_slots(case.kind, a, window), a["tail_words"].tolist()
    paths, path_lens = (
        kernel.kernels.path_options[name].tolist() for name in ("paths", "path_lens")
    )
    for row, (path, length) in enumerate(zip(paths, path_lens, strict=True)):
        b, prefix = row // q_len, int(a["seq_lens"][row // q_len])
        slots = table[a["req_pool_indices"][b], prefix // tile * tile : prefix].tolist() + [
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
