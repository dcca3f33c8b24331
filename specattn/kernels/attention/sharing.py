"""Find requests whose prefixes begin in the same slots, on device.

Engines with a radix cache give texts that begin alike the same slots, so equal slots are equal
keys. `match_kernel` has a CTA per request, which looks for the request that it shares most with,
and compares the two slot by slot. `list_work`, a part of the plan kernel, makes groups of them and
lists their keys as work of its own. The attention kernels then read them once for all rows of
a group. Where no two requests agree, the first does one look-up per pair and the second nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

# requests are looked up at LEAST keys, twice as many, and so on
LEVELS = tl.constexpr(16)


@triton.jit
def pick(values, nth):
    """Return the ``nth`` of ``values``, or the only one."""
    found = values[0]
    for i in tl.static_range(1, len(values)):
        found = tl.where(nth == i, values[i], found)
    return found


@triton.jit(do_not_specialize=["batch"])
def match_kernel(
    # a tuple each, an entry per batch (see `pick`)
    seq_lens,  # [B] int32
    rows,  # [B] int64
    table,  # [rows, C] int32
    matches,  # [B, 2] int32, out: whom a request is grouped with, keys that they share
    row_stride,
    batch,  # no tuple if it is one for all
    LEAST: tl.constexpr,
    # for all: requests, keys that are compared at a time, and several batch sizes
    B_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    MIXED: tl.constexpr,
):
    """Find with whom a request shares most, and how many keys.

    A request is looked up at a few positions, LEAST keys from the start and doubling. Many may
    agree at an early one (all texts begin with the same token), few at a late one: it takes the
    position that saves it most, ``keys * (1 - 1 / requests)``. Equal slots there say nothing yet:
    they choose whom to compare with, and how far the two agree is then found slot by slot.
    """
    req = tl.program_id(0)
    nth = tl.program_id(1)
    seq_lens = pick(seq_lens, nth)
    rows = pick(rows, nth)
    table = pick(table, nth)
    matches = pick(matches, nth)
    row_stride = pick(row_stride, nth)
    if MIXED:
        batch = pick(batch, nth)
    least = pick(LEAST, nth)
    if req < batch:
        length = tl.load(seq_lens + req)
        mine = table + tl.load(rows + req) * row_stride
        ids = tl.arange(0, B_BLOCK)  # [B_BLOCK]
        leader = req
        level_of = 0
        saved = 0
        level = 0
        agree = 2
        while (agree > 1) & (level < LEVELS) & ((length >> level) >= least):
            keys = least << level
            slot = tl.load(mine + keys - 1)
            same = tl.load(seq_lens + ids, mask=ids < batch, other=0) >= keys
            theirs = table + tl.load(rows + ids, mask=same, other=0) * row_stride
            same = same & (tl.load(theirs + keys - 1, mask=same, other=-1) == slot)
            agree = tl.sum(same.to(tl.int32), 0)
            first = tl.min(tl.where(same, ids, req), 0)
            better = keys - keys // agree > saved
            saved = tl.where(better, keys - keys // agree, saved)
            leader = tl.where(better, first, leader)
            level_of = tl.where(better, level, level_of)
            level += 1
        common = length
        if leader != req:
            theirs = table + tl.load(rows + leader) * row_stride
            common = tl.minimum(length, tl.load(seq_lens + leader))
            start = 0
            while start < common:
                pos = start + tl.arange(0, KEYS)  # [KEYS]
                ok = pos < common
                found = tl.load(mine + pos, mask=ok, other=0)
                differ = found != tl.load(theirs + pos, mask=ok, other=0)
                common = tl.minimum(common, tl.min(tl.where(differ, pos, common), 0))
                start += KEYS
        # those that chose one request at one position
        tl.store(matches + req * 2, tl.where(saved > 0, leader * LEVELS + level_of, -1))
        tl.store(matches + req * 2 + 1, common)


@triton.jit
def list_work(
    matches,  # [B, 2] int32
    requests,  # [B + entries, 8] int64, out
    members,  # [B] int32, out: the requests of the first group, of the second, ...
    ids,  # [B_BLOCK], and what `request_tiles` says of them
    prefix,
    base,
    tiles_of,
    batch,
    shift,
    least,
    rows,
    tile_rows,
    GROUPS: tl.constexpr,
):
    """Make groups; list their keys behind what requests have left.

    What all of a group share, in whole key tiles, is their shortest match. Its rows, packed, take
    one entry per ``tile_rows``. A group that saves less than half of ``least`` per request is none.

    A request's place is its first row among those of all entries, counted from 1, or 0 in no group.
    Returns the number of entries, all tiles, and the most of a request or entry.
    """
    mine = ids < batch
    key = tl.load(matches + ids * 2, mask=mine, other=-1)
    common = tl.load(matches + ids * 2 + 1, mask=mine, other=0)
    shared_tiles = common * 0
    place = common * 0
    entries = 0
    listed = 0
    total = 0
    longest = 0
    formed = 0
    turn = 0
    last = tl.max(key, 0)
    # most keys are of groups
    while (last >= 0) & (formed < GROUPS) & (turn < 4 * GROUPS):
        inside = key == last
        size = tl.sum(inside.to(tl.int32), 0)
        # none is as long as the largest number
        tiles = tl.min(tl.where(inside, common, 2147483647), 0) >> shift
        count = (size * rows + tile_rows - 1) // tile_rows
        pays = (tiles << shift).to(tl.int64) * (size - count) * 2 >= least * size
        key = tl.where(inside, -1, key)
        last = tl.max(key, 0)
        turn += 1
        inside = inside & pays
        count = tl.where(pays, count, 0)
        size = tl.where(pays, size, 0)
        formed += pays.to(tl.int32)
        nth = tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(members + listed + nth, ids, mask=inside)
        shared_tiles = tl.where(inside, tiles, shared_tiles)
        place = tl.where(inside, entries * tile_rows + nth * rows + 1, place)
        # any member's slots are the group's
        start = tl.sum(tl.where(inside & (nth == 0), base, 0), 0)
        fresh = ids < count
        entry = requests + (batch + entries + ids) * 8
        tl.store(entry + 0, start, mask=fresh)
        tl.store(entry + 1, tiles << shift, mask=fresh)
        tl.store(entry + 2, 0, mask=fresh)
        tl.store(entry + 5, tiles, mask=fresh)
        tl.store(entry + 6, listed * rows + ids * tile_rows, mask=fresh)
        tl.store(entry + 7, (listed + size) * rows, mask=fresh)
        entries += count
        listed += size
        total += count * tiles
        longest = tl.maximum(longest, tl.where(pays, tiles, 0))
    tiles = tl.where(mine, tl.maximum(tiles_of - shared_tiles, 1), 0)
    entry = requests + ids * 8
    tl.store(entry + 0, base, mask=mine)
    tl.store(entry + 1, prefix, mask=mine)
    tl.store(entry + 2, shared_tiles, mask=mine)
    tl.store(entry + 5, tiles, mask=mine)
    tl.store(entry + 6, place, mask=mine)
    # other threads of this CTA read them
    tl.debug_barrier()
    return entries, total + tl.sum(tiles, 0), tl.maximum(longest, tl.max(tiles, 0))
