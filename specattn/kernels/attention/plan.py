"""Cut a batch's keys into equal splits, on device, once a step.

Stream-K (Osama et al., 2023) over key tiles: the tiles of all requests stand end to end, and
every group of CTAs takes one split of that line. A request that lies in two or more splits has a
partial result in each, and is listed for the merge kernel. Lengths are read on the device, so one
captured graph serves all of them.

The forwards of a step differ in tail and tile, but their lengths are known together: `fill_plans`
cuts them in one launch, a CTA each.

Where requests share prefixes (`Sharing`), tiles that a group has in common stand behind those of
the requests, once per block of the group's rows (an *entry*), and a request begins after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.attention.sharing import list_work, match_kernel, pick

# plans of one launch: a program chooses each of its arguments among as many
MOST_PLANS = 32
# groups of a batch that share a prefix: they bound what the plan kernel goes through, and the room
# for partial results
MOST_GROUPS = 16
# keys of two requests that are compared at a time
COMPARED = 4096
# a smaller number of splits is taken when all its cuts are request boundaries, as long as no
# split grows by more tiles than this: about the cost of one more segment
ALIGN_SLACK = tl.constexpr(2)


@triton.jit
def request_tiles(
    seq_lens,
    rows,
    row_stride,
    ids,
    ok,
    tail,
    window,
    shift,
    csr,
    extra,
):
    """Return prefixes, starts of indices, first key tiles, tiles and ``extra``."""
    if csr:
        begin = tl.load(seq_lens + ids, mask=ok, other=0)
        prefix = tl.load(seq_lens + ids + 1, mask=ok, other=0) - begin
        # an empty list reads entry 0, and throws it away, rather than one past the end
        base = tl.where(prefix > 0, begin, 0).to(tl.int64)
        newest = prefix - 1
    else:
        prefix = tl.load(seq_lens + ids, mask=ok, other=0)
        base = tl.load(rows + ids, mask=ok, other=0).to(tl.int64) * row_stride
        newest = prefix
    first = tl.zeros_like(prefix)
    if window >= 0:
        first = tl.maximum(newest - window, 0) >> shift
    # at least one tile: a request without keys has an output to write, too
    tiles = tl.maximum(((prefix + tail - 1) >> shift) + 1 - first, 1) + extra
    return prefix, base, first, tl.where(ok, tiles, 0)


@triton.jit
def align_splits(num_splits, total, longest, batch, most):
    """Return how many splits cut at requests, where their work is equal."""
    # whole splits per request, or, if there are more requests than splits, whole requests per split
    fits = longest * batch == total
    if batch <= most:
        aligned = num_splits // batch * batch
    else:
        groups = batch // ((batch + most - 1) // most)
        aligned = num_splits * 0 + groups
        fits &= batch % groups == 0
    fits &= (total + aligned - 1) // aligned <= (total + num_splits - 1) // num_splits + ALIGN_SLACK
    return tl.where(fits, aligned, num_splits)


@triton.jit(do_not_specialize=["batch"])
def _plan_kernel(
    # a tuple each, an entry per plan (see `pick`), and so are the constants of a plan
    seq_lens,  # [B] int32; CSR: kv_indptr [B + 1]
    rows,  # [B] int64; CSR: not read
    requests,  # [B, 8] int64, out
    splits,  # [SPLITS, 8] int64, out
    merges,  # [1 + SPLITS, 4] int32, out
    # of shared prefixes, else not read
    matches,  # [B, 2] int32
    members,  # [B] int32, out
    shares,  # [ENTRIES, 2] int32, out
    row_stride,
    batch,  # no tuple if it is one for all, so that none is compiled for its value
    TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CSR: tl.constexpr,
    PARTIAL_TILES: tl.constexpr,
    EXTRA: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    # for all plans: whether they have partial tiles, or share prefixes; the largest B, entries
    # included, in whole blocks unless it is 1; products in 64 bits; several batch sizes
    FIXED: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    B_BLOCK: tl.constexpr,
    B_MOST: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    MIXED: tl.constexpr,
):
    nth = tl.program_id(0)
    seq_lens = pick(seq_lens, nth)
    rows = pick(rows, nth)
    requests = pick(requests, nth)
    splits = pick(splits, nth)
    merges = pick(merges, nth)
    row_stride = pick(row_stride, nth)
    if MIXED:
        batch = pick(batch, nth)
    tail = pick(TAIL, nth)
    window = pick(WINDOW, nth)
    shift = pick(SHIFT, nth)
    most = pick(SPLITS, nth)
    min_tiles = pick(MIN_TILES, nth)
    csr = pick(CSR, nth)
    partial_tiles = pick(PARTIAL_TILES, nth)
    extra = pick(EXTRA, nth)

    big: tl.constexpr = tl.int64 if WIDE else tl.int32
    lane = tl.arange(0, B_BLOCK)  # [B_BLOCK]
    total = 0
    longest = 0
    # requests, then entries
    count = batch
    if SHARED:
        shares = pick(shares, nth)
        prefix, base, _, tiles = request_tiles(
            seq_lens, rows, row_stride, lane, lane < batch, tail, -1, shift, False, 0
        )
        entries, total, longest = list_work(
            pick(matches, nth),
            requests,
            pick(members, nth),
            lane,
            prefix,
            base,
            tiles,
            batch,
            shift,
            pick(LEAST, nth),
            pick(ROWS, nth),
            pick(TILE_ROWS, nth),
            GROUPS,
        )
        count += entries
    else:
        for start in tl.range(0, B_MOST, B_BLOCK):
            ids = start + lane
            _, _, _, tiles = request_tiles(
                seq_lens, rows, row_stride, ids, ids < batch, tail, window, shift, csr, extra
            )
            total += tl.sum(tiles, 0)
            longest = tl.maximum(longest, tl.max(tiles, 0))

    # short splits cost more to merge than they save; a request has a split while there are any
    num_splits = tl.minimum(tl.maximum((total + min_tiles - 1) // min_tiles, batch), most)
    num_splits = align_splits(num_splits, total, longest, batch, most)
    cuts = num_splits.to(big)

    tiles_before = 0
    merges_before = 0
    slots_before = 0
    # requests that end before split c begins, but not before split c - 1 does
    ended = tl.zeros([SPLITS_BLOCK], tl.int32)
    for start in tl.range(0, B_MOST, B_BLOCK):
        ids = start + lane
        ok = ids < count
        entry = requests + ids * 8
        if SHARED:
            base = tl.load(entry + 0, mask=ok, other=0)
            prefix = tl.load(entry + 1, mask=ok, other=0).to(tl.int32)
            first = tl.load(entry + 2, mask=ok, other=0).to(tl.int32)
            tiles = tl.load(entry + 5, mask=ok, other=0).to(tl.int32)
            place = tl.load(entry + 6, mask=ok, other=0).to(tl.int32)
            rows_end = tl.load(entry + 7, mask=ok & (ids >= batch), other=0)
        else:
            prefix, base, first, tiles = request_tiles(
                seq_lens, rows, row_stride, ids, ok, tail, window, shift, csr, extra
            )
        end = tiles_before + tl.cumsum(tiles, 0)
        # split c holds the tiles from ceil(c * total / num_splits) on: a request's last one, whose
        # newest keys come late, is none of the longer ones
        first_split = (end - tiles).to(big) * cuts // total
        next_split = (end - 1).to(big) * cuts // total + 1
        partials = next_split - first_split
        cut = ok & (partials > 1)
        if SHARED:
            # whoever shares has a result of its own and those of its group
            cut = (cut | (place > 0)) & (ids < batch)
        cut = cut.to(tl.int32)
        merge_rank = merges_before + tl.cumsum(cut, 0) - cut
        if B_MOST > 1:
            begins = next_split.to(tl.int32)
            ended += tl.histogram(begins, SPLITS_BLOCK, mask=ok & (begins < num_splits))
        if FIXED:
            # what lies between two multiples, wherever the splits are; all of it is merged
            cut = ok.to(tl.int32)
            merge_rank = ids
            partials = (first + tiles - extra - 1) // partial_tiles - first // partial_tiles + 1
            partials = tl.where(ok, partials, 0)
            first_slot = slots_before + tl.cumsum(partials, 0) - partials
            slots_before += tl.sum(partials, 0)
        rank = first_slot if FIXED else merge_rank
        if SHARED:
            # several threads have read a number that one of them writes
            tl.debug_barrier()
            owned = ids < batch
            nth_entry = ids - batch
            tl.store(shares + nth_entry * 2, first_split.to(tl.int32) + nth_entry, mask=ok & ~owned)
            tl.store(shares + nth_entry * 2 + 1, partials.to(tl.int32), mask=ok & ~owned)
            # more than one: none is the whole result. The high halves are the entry's rows
            counted = partials + 1 + (rows_end << 32)
            first_row = tl.where(owned, 0, place).to(tl.int64) << 32
            tl.store(entry + 3, tl.where((cut != 0) | ~owned, counted, partials), mask=ok)
            tl.store(entry + 4, tl.where(owned, merge_rank, nth_entry) + first_row, mask=ok)
        else:
            tl.store(entry + 0, base, mask=ok)
            tl.store(entry + 1, prefix.to(tl.int64), mask=ok)
            tl.store(entry + 2, first.to(tl.int64), mask=ok)
            tl.store(entry + 3, partials.to(tl.int64), mask=ok)
            tl.store(entry + 4, rank.to(tl.int64), mask=ok)
        tl.store(entry + 5, (end - tiles).to(tl.int64), mask=ok)
        entry = merges + (1 + merge_rank) * 4
        tl.store(entry + 0, ids, mask=cut != 0)
        tl.store(
            entry + 1,
            first_slot if FIXED else first_split.to(tl.int32) + merge_rank,
            mask=cut != 0,
        )
        tl.store(entry + 2, partials.to(tl.int32), mask=cut != 0)
        if SHARED:
            tl.store(entry + 3, place, mask=cut != 0)
        tiles_before += tl.sum(tiles, 0)
        merges_before += tl.sum(cut, 0)
    tl.store(merges, merges_before)

    # the splits read what other threads of this CTA have just written
    tl.debug_barrier()
    c = tl.arange(0, SPLITS_BLOCK)  # [SPLITS_BLOCK]
    ok = c < num_splits
    begin = ((c.to(big) * total + cuts - 1) // cuts).to(tl.int32)
    stop = (((c + 1).to(big) * total + cuts - 1) // cuts).to(tl.int32)
    # the request of a split's first tile: the first that ends after it
    low = tl.cumsum(ended, 0) if B_MOST > 1 else ended
    owner = requests + low * 8
    before = tl.load(owner + 5, mask=ok, other=0).to(tl.int32)
    if FIXED:
        # down to where a partial begins; the last one ends with its request
        first = tl.load(owner + 2, mask=ok, other=0).to(tl.int32)
        last = first // partial_tiles + tl.load(owner + 3, mask=ok, other=1).to(tl.int32) - 1
        part = tl.minimum((first + begin - before) // partial_tiles, last)
        begin = before + tl.maximum(part * partial_tiles - first, 0)
        stop = tl.gather(begin, tl.minimum(c + 1, SPLITS_BLOCK - 1), 0)
        stop = tl.where(c + 1 < num_splits, stop, total)
    entry = splits + c * 8
    inside = c < most
    tl.store(entry + 0, tl.where(ok, stop - begin, 0).to(tl.int64), mask=inside)
    tl.store(entry + 1, (begin - before).to(tl.int64), mask=ok)
    tl.store(entry + 2, low.to(tl.int64), mask=ok)
    for field in tl.static_range(5):
        tl.store(entry + 3 + field, tl.load(owner + field, mask=ok, other=0), mask=ok)


@dataclass(frozen=True)
class Sharing:
    """What is shared in a bucket whose requests read common prefixes once.

    Parameters
    ----------
    least : int
        Keys of the shortest shared prefix. A group saves half as many per request at least.
    rows : int
        Packed rows of a request and KV head.
    tile_rows : int
        Rows of an entry: as many as a request's M tiles have together.
    """

    least: int
    rows: int
    tile_rows: int

    def entries(self, batch: int) -> int:
        """Return the most entries: full ones, and one more per group."""
        return batch * self.rows // self.tile_rows + min(batch // 2, MOST_GROUPS)


class TreePlan:
    """The tables of a bucket of ``batch`` requests, which `fill_plans` fills.

    A request has no more splits than leave them ``min_tiles`` key tiles each.

    Attributes
    ----------
    requests : Tensor
        ``[batch, 8]`` int64: start in the index table, prefix length, first tile (above 0 under
        a window, or behind shared tiles), partial results, merged requests before it (or, with
        partial tiles, the slot of its first partial result), tiles of the requests before it.
        With `Sharing` entries follow, ``[batch + entries, 8]``: the prefix is what is shared, and
        the upper halves of the fourth and fifth number are where the entry's rows end and begin,
        among the packed rows of all ``members``; a request's are 0.
    splits : Tensor
        ``[max_splits, 8]`` int64: tiles, first tile counted from the request's first, request or
        entry, and the first five numbers of that.
    merges : Tensor
        ``[1 + max_splits, 4]`` int32: number of merged requests; then request, first slot among
        the partial results, and their number. Result p of a request is at first slot + p. With
        `Sharing` ``[1 + batch, 4]``: the last number says where a request's rows begin among those
        of all entries, counted from 1, or 0.
    members : Tensor
        ``[batch]`` int32: the requests of all groups, group by group. Empty without `Sharing`.
    shares : Tensor
        ``[entries, 2]`` int32: an entry's first slot among the partial results of entries, and
        their number.
    matches : Tensor
        ``[batch, 2]`` int32: whom a request is grouped with, -1 for nobody, and the keys that they
        have in common.
    """

    def __init__(
        self,
        *,
        batch: int,
        max_splits: int,
        tail_len: int,
        window_left: int,
        block_n: int,
        csr: bool,
        device: torch.device,
        min_tiles: int = 1,
        partial_tiles: int = 0,
        extra: int = 0,
        sharing: Sharing | None = None,
    ) -> None:
        entries, sharers = (sharing.entries(batch), batch) if sharing else (0, 0)
        numbers = partial(torch.zeros, dtype=torch.int32, device=device)
        self.batch, self.sharing = batch, sharing
        self.requests = torch.zeros(batch + entries, 8, dtype=torch.int64, device=device)
        self.splits = torch.zeros(max_splits, 8, dtype=torch.int64, device=device)
        self.merges = numbers(1 + (batch if partial_tiles or sharing else max_splits), 4)
        self.members, self.matches = numbers(sharers), numbers(sharers, 2)
        self.shares = numbers(entries, 2)
        self.tail_len, self.window_left, self.block_n = tail_len, window_left, block_n
        self.csr, self.min_tiles = csr, min_tiles
        self.partial_tiles, self.extra = partial_tiles, extra


class PlanRequest(NamedTuple):
    """A plan and what to fill it from.

    Parameters
    ----------
    plan : TreePlan
        Whose tables are written.
    seq_lens : Tensor
        ``[batch]`` int32, prefix lengths; where the plan is ``csr``, ``kv_indptr [batch + 1]``.
    rows : Tensor or None
        ``[batch]`` int64, the requests' rows in the index table; None where ``csr``.
    row_stride : int
        Elements between two rows of that table; 1 where ``csr``.
    table : Tensor, optional
        ``[rows, C]`` int32, the index table, where the plan shares prefixes.
    """

    plan: TreePlan
    seq_lens: Tensor
    rows: Tensor | None
    row_stride: int
    table: Tensor | None = None

    def fill(self) -> None:
        """Fill the plan alone."""
        fill_plans([self])

    @property
    def wide(self) -> bool:
        """Whether (tiles of all requests) * splits can pass 2^31."""
        plan = self.plan
        tiles = triton.cdiv(self.row_stride + plan.tail_len, plan.block_n) + 1 + plan.extra
        return plan.csr or len(plan.requests) * tiles * len(plan.splits) >= 2**31

    @property
    def prefixes(self) -> tuple[int | None, ...]:
        """What matches depend on; plans of a step have it in common."""
        plan, tensors = self.plan, (self.seq_lens, self.rows, self.table)
        least = plan.sharing.least if plan.sharing else None
        return least, plan.batch, *(None if t is None else t.data_ptr() for t in tensors)


def fill_plans(requests: Sequence[PlanRequest]) -> None:
    """Fill plans, each once, up to `MOST_PLANS` in one launch.

    The tables are the same, bit for bit, whatever else is in the launch. Plans that share prefixes
    take a launch before, which finds these.
    """
    distinct = list({id(request.plan): request for request in requests}.values())
    kinds: dict[tuple[bool, bool], list[PlanRequest]] = {}
    for request in distinct:
        plan = request.plan
        kinds.setdefault((plan.partial_tiles > 0, plan.sharing is not None), []).append(request)
    for alike in kinds.values():
        for start in range(0, len(alike), MOST_PLANS):
            _launch(alike[start : start + MOST_PLANS])


def _match(requests: list[PlanRequest]) -> list[Tensor]:
    """Match every batch once; return the matches of each plan."""
    distinct = list({request.prefixes: request for request in requests}.values())
    found = {request.prefixes: request.plan.matches for request in distinct}
    batches = [request.plan.batch for request in distinct]
    match_kernel[(max(batches), len(distinct))](
        _tensors([r.seq_lens for r in distinct]),
        _tensors([r.rows for r in distinct if r.rows is not None]),
        _tensors([r.table for r in distinct if r.table is not None]),
        tuple(found.values()),
        _numbers([r.row_stride for r in distinct]),
        _batch(batches),
        LEAST=_numbers([r.plan.sharing.least for r in distinct if r.plan.sharing]),
        B_BLOCK=triton.next_power_of_2(max(batches)),
        KEYS=COMPARED,
        MIXED=len(set(batches)) > 1,
        num_warps=8,
    )
    return [found[request.prefixes] for request in requests]


def _launch(requests: list[PlanRequest]) -> None:
    plans = [request.plan for request in requests]
    batches, max_splits = [p.batch for p in plans], [len(p.splits) for p in plans]
    sharing = [plan.sharing or Sharing(0, 1, 1) for plan in plans]
    shared = plans[0].sharing is not None
    block = min(max(triton.next_power_of_2(max(batches)), 16), 1024)
    most = max(len(plan.requests) for plan in plans)
    _plan_kernel[(len(requests),)](
        _tensors([r.seq_lens for r in requests]),
        # index lists have no rows, and none are read there
        _tensors([r.plan.requests if r.rows is None else r.rows for r in requests]),
        _tensors([p.requests for p in plans]),
        _tensors([p.splits for p in plans]),
        _tensors([p.merges for p in plans]),
        _tensors(_match(requests)) if shared else None,
        _tensors([p.members for p in plans]) if shared else None,
        _tensors([p.shares for p in plans]) if shared else None,
        _numbers([r.row_stride for r in requests]),
        _batch(batches),
        TAIL=_numbers([p.tail_len for p in plans]),
        WINDOW=_numbers([p.window_left for p in plans]),
        SHIFT=_numbers([p.block_n.bit_length() - 1 for p in plans]),
        SPLITS=_numbers(max_splits),
        MIN_TILES=_numbers([p.min_tiles for p in plans]),
        CSR=_numbers([p.csr for p in plans]),
        PARTIAL_TILES=_numbers([p.partial_tiles for p in plans]),
        EXTRA=_numbers([p.extra for p in plans]),
        LEAST=_numbers([one.least for one in sharing]),
        ROWS=_numbers([one.rows for one in sharing]),
        TILE_ROWS=_numbers([one.tile_rows for one in sharing]),
        FIXED=plans[0].partial_tiles > 0,
        SHARED=shared,
        GROUPS=MOST_GROUPS,
        B_BLOCK=block,
        B_MOST=1 if most == 1 else triton.cdiv(most, block) * block,
        SPLITS_BLOCK=max(triton.next_power_of_2(max(max_splits)), 16),
        WIDE=any(r.wide for r in requests),
        MIXED=len(set(batches)) > 1,
        num_warps=4 if block <= 32 else 8,
    )


def _numbers(values: list[int]) -> tuple[int, ...]:
    """Return what `pick` takes: just one of equal values."""
    return tuple(values[:1] if len(set(values)) == 1 else values)


def _batch(sizes: list[int]) -> int | tuple[int, ...]:
    """Return batch sizes, or the one that all plans have."""
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


def _tensors(values: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(values[:1] if len({t.data_ptr() for t in values}) == 1 else values)
