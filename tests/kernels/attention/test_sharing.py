"""Which requests share which keys, and how these become work."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
import torch

from specattn.kernels.attention.plan import PlanRequest, Sharing, TreePlan, fill_plans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BN, LEAST, TAIL = 32, 32, 3
# requests, and the keys that all of them have in common
Groups = list[tuple[list[int], int]]


def work(
    lengths: list[int],
    groups: Groups,
    *,
    splits: int = 7,
    rows: int = 4,
    tile_rows: int = 16,
    least: int = LEAST,
    shares: bool = True,
    seed: int = 0,
) -> PlanRequest:
    """A plan of a batch whose requests share slots, not filled, with tables of nonsense."""
    generator = torch.Generator().manual_seed(seed)
    width, batch = max(lengths) + TAIL, len(lengths)
    slots = torch.randperm((batch + 3) * width, generator=generator).to(torch.int32)
    table = slots.view(-1, width)
    order = torch.randperm(batch + 3, generator=generator)[:batch]
    for (first, *others), keys in groups:
        for b in others:
            table[order[b], :keys] = table[order[first], :keys]
    tables = TreePlan(
        batch=batch,
        max_splits=splits,
        tail_len=TAIL,
        window_left=-1,
        block_n=BN,
        csr=False,
        device=torch.device(DEVICE),
        sharing=Sharing(least, rows, tile_rows) if shares else None,
    )
    made = PlanRequest(
        tables,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        order.to(DEVICE),
        width,
        table.to(DEVICE),
    )
    nonsense(made)
    return made


def all_tables(made: PlanRequest) -> list[torch.Tensor]:
    return [one for one in vars(made.plan).values() if isinstance(one, torch.Tensor)]


def nonsense(made: PlanRequest) -> None:
    for one in all_tables(made):
        one.fill_(-7)


def segments(made: PlanRequest) -> list[tuple[int, int, int]]:
    """Walk the splits as the kernel does: ``(split, request or entry, tiles)`` each.

    Checks the numbers that a segment goes by.
    """
    requests, batch, walk = made.plan.requests.tolist(), made.plan.batch, []
    for split, (left, tile, at, *numbers) in enumerate(made.plan.splits.tolist()):
        while left > 0:
            assert numbers == requests[at][:5]
            _, prefix, first, _, _ = numbers
            keys = prefix + (TAIL if at < batch else 0)
            stop = min(max(1, -(-keys // BN) - first), tile + left)
            walk.append((split, at, stop - tile))
            left -= stop - tile
            at, tile = at + 1, 0
            if left > 0:
                numbers = requests[at][:5]
    return walk


def found(made: PlanRequest) -> Groups:
    """Return the groups of a filled plan, after what must hold of any.

    All tiles are in the splits once. The entries of a group cover its rows once; its keys are the
    first of every member, who starts after them; whoever is in no group starts at key 0.
    """
    plan, own = made.plan, made.plan.sharing
    assert own is not None
    assert made.table is not None
    assert made.rows is not None
    requests, batch, lens = plan.requests.tolist(), plan.batch, made.seq_lens.tolist()
    slots, flat = made.table[made.rows].tolist(), made.table.flatten().tolist()
    parts: dict[int, list[int]] = {}
    tiles = [0] * len(requests)
    for split, at, count in segments(made):
        parts.setdefault(at, []).append(split)
        tiles[at] += count
    assert list(parts) == list(range(len(parts)))
    assert batch <= len(parts) <= len(requests)
    for at, (_, prefix, first, *_) in enumerate(requests[: len(parts)]):
        keys = prefix + (TAIL if at < batch else 0)
        assert tiles[at] == max(1, -(-keys // BN) - first)

    groups: Groups = []
    places, begin, entries = [0] * batch, 0, requests[batch : len(parts)]
    for end, some in groupby(entries, lambda entry: entry[3] >> 32):
        blocks, before = (
            list(some),
            sum(-(-len(ids) * own.rows // own.tile_rows) for ids, _ in groups),
        )
        assert [one[4] >> 32 for one in blocks] == list(range(begin, end, own.tile_rows))
        [(base, keys, first)] = {tuple(one[:3]) for one in blocks}
        ids = plan.members[begin // own.rows : end // own.rows].tolist()
        assert first == 0
        for nth, b in enumerate(ids):
            assert slots[b][:keys] == flat[base : base + keys]
            assert requests[b][2] * BN == keys <= lens[b]
            places[b] = before * own.tile_rows + nth * own.rows + 1
        groups.append((ids, keys))
        begin = end
    assert all(requests[b][2] == 0 for b in range(batch) if not places[b])
    check_slots(made, parts, places)
    return sorted(groups)


def check_slots(made: PlanRequest, parts: dict[int, list[int]], places: list[int]) -> None:
    """Every partial result has a slot of its own, where the merge looks for it."""
    plan, batch = made.plan, made.plan.batch
    listed, shares = plan.merges[1 : 1 + int(plan.merges[0, 0])].tolist(), plan.shares.tolist()
    merged = [b for b in range(batch) if places[b] or len(parts[b]) > 1]
    assert [row[0] for row in listed] == merged
    taken = []
    for at, splits in parts.items():
        count, rank = (plan.requests[at, column].item() & 2**32 - 1 for column in (3, 4))
        assert (count == 1) == (at < batch and at not in merged)
        if count == 1:
            continue
        mine = [split + rank for split in splits]
        assert mine == list(range(mine[0], mine[0] + len(mine)))
        taken += [(at < batch, slot) for slot in mine]
        if at < batch:
            assert listed[merged.index(at)] == [at, mine[0], len(mine), places[at]]
        else:
            assert shares[at - batch] == [mine[0], len(mine)]
    assert len(set(taken)) == len(taken)
    most = {True: batch, False: len(plan.shares)}
    assert all(slot < len(plan.splits) + most[owned] for owned, slot in taken)


# lengths, what is made equal, and what is to be found; slots are equal for that long and no longer
BATCHES: dict[str, tuple[list[int], Groups, Groups]] = {
    "nothing": ([200, 150, 90], [], []),
    "one_request": ([200], [], []),
    "part_of_a_tile": ([200, 150, 130], [([0, 1, 2], 100)], [([0, 1, 2], 96)]),
    "interleaved": (
        [200] * 6,
        [([0, 2, 4], 128), ([1, 3, 5], 70)],
        [([0, 2, 4], 128), ([1, 3, 5], 64)],
    ),
    "less_than_a_tile": ([200] * 3, [([0, 1, 2], 31)], []),
    "a_key_less_than_tiles": ([200] * 3, [([0, 1, 2], 95)], [([0, 1, 2], 64)]),
    "whole_context_of_one": ([64, 200, 190], [([0, 1, 2], 64)], [([0, 1, 2], 64)]),
    "all_equal": ([128] * 5, [([0, 1, 2, 3, 4], 128)], [([0, 1, 2, 3, 4], 128)]),
    "padded": ([0, 96, 0, 99, 0], [([1, 3], 96)], [([1, 3], 96)]),
    "one_first_token": ([200] * 5, [([0, 1, 2, 3, 4], 1), ([1, 2, 4], 128)], [([1, 2, 4], 128)]),
    "one_leaves_early": ([200] * 4, [([0, 1, 2, 3], 40), ([0, 1, 2], 160)], [([0, 1, 2], 160)]),
    "pairs_of_a_group": (
        [200] * 4,
        [([0, 1, 2, 3], 32), ([0, 1], 192), ([2, 3], 160)],
        [([0, 1], 192), ([2, 3], 160)],
    ),
    "first_in_another_group": (
        [220] * 7,
        [([0, 1, 2, 3, 4, 5, 6], 64), ([0, 6], 200)],
        [([0, 6], 192), ([1, 2, 3, 4, 5], 64)],
    ),
    "long": ([9000, 8400, 50], [([0, 1], 8333)], [([0, 1], 8320)]),
    "many": (
        [128 + b % 9 for b in range(40)],
        [([*range(k, 40, 8)], 96 + k) for k in range(8)],
        [([*range(k, 40, 8)], 96) for k in range(8)],
    ),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("sizes", [(4, 16, 7), (12, 16, 2), (48, 64, 40)])
def test_groups_are_found(name: str, sizes: tuple[int, int, int]) -> None:
    """In blocks that rows of a request fill, or lie across; in few splits and many."""
    lengths, equal, expected = BATCHES[name]
    rows, tile_rows, splits = sizes
    made = work(lengths, equal, rows=rows, tile_rows=tile_rows, splits=splits)
    fill_plans([made])
    pay = [(ids, n) for ids, n in expected if saves(len(ids), n, rows, tile_rows)]
    assert found(made) == pay


def saves(size: int, keys: int, rows: int, tile_rows: int) -> bool:
    """Whether a group of ``size`` saves every request half of ``LEAST`` keys, on average."""
    return 2 * keys * (size + -size * rows // tile_rows) >= LEAST * size


def test_groups_that_save_nothing_are_none() -> None:
    """A tile has room for the rows of one request."""
    made = work([200] * 4, [([0, 1, 2, 3], 192)], rows=16, tile_rows=16)
    fill_plans([made])
    assert found(made) == []


def test_equal_slots_at_the_place_of_a_look_up_are_not_enough() -> None:
    made = work([200] * 3, [])
    assert made.table is not None
    for position in (31, 63, 127):
        made.table[made.rows, position] = made.table[made.rows[0], position].item()  # type: ignore[index]
    fill_plans([made])
    assert found(made) == []


def test_as_many_groups_as_there_is_room_for() -> None:
    pairs: Groups = [([b, b + 1], 96) for b in range(0, 40, 2)]
    made = work([100] * 40, pairs)
    fill_plans([made])
    assert len(found(made)) == 16
    assert all(pair in pairs for pair in found(made))


@pytest.mark.parametrize("seed", range(4))
def test_random_texts(seed: int) -> None:
    """Branches of random trees of texts; what is found holds, and is not nothing."""
    rng = random.Random(seed)
    batch = rng.choice([5, 17, 33])
    lengths = [rng.randrange(200, 400) for _ in range(batch)]
    equal: Groups = []
    for keys in (rng.randrange(20, 100), rng.randrange(128, 200)):
        members = rng.sample(range(batch), batch // 2 if equal else batch)
        equal.append((sorted(members), keys))
    made = work(lengths, equal, rows=rng.choice([4, 7]), splits=rng.choice([1, 33]), seed=seed)
    fill_plans([made])
    assert found(made)


def test_plans_of_one_launch_are_those_of_their_own() -> None:
    """Forwards of a step, of two batches, with and without sharing."""
    equal: Groups = [([0, 2, 4], 128), ([1, 3], 70)]
    made = [
        work([200] * 6, equal, rows=r, tile_rows=t, splits=s)
        for r, t, s in ((4, 16, 7), (20, 32, 5), (4, 64, 7))
    ]
    # the same tensors
    made += [made[0]._replace(plan=work([200] * 6, equal, rows=8).plan)]
    made += [work([150, 90, 170], [([0, 2], 140)]), work([200] * 6, equal, shares=False)]
    fill_plans(made)
    together = [[one.clone() for one in all_tables(each)] for each in made]
    for each, tables in zip(made, together, strict=True):
        nonsense(each)
        fill_plans([each])
        for one, was in zip(all_tables(each), tables, strict=True):
            # only the first of plans over the same tensors has matches
            if one is not each.plan.matches:
                assert torch.equal(one, was)


@pytest.mark.parametrize("lengths", [[200, 0, 33, 700], [96] * 8, [5]])
def test_plans_without_common_prefixes_are_those_without_sharing(lengths: list[int]) -> None:
    with_it, without = work(lengths, []), work(lengths, [], shares=False)
    fill_plans([with_it, without])
    batch, count = len(lengths), 1 + int(without.plan.merges[0, 0])
    assert torch.equal(with_it.plan.splits[:, :3], without.plan.splits[:, :3])
    for column in (0, 1, 2, 4, 5):
        assert torch.equal(with_it.plan.requests[:batch, column], without.plan.requests[:, column])
    assert torch.equal(with_it.plan.merges[:count, :1], without.plan.merges[:count, :1])
    assert torch.equal(with_it.plan.merges[1:count, :3], without.plan.merges[1:count, :3])
