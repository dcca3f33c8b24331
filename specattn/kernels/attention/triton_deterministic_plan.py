"""Cut every request's keys at multiples of a split size.

`triton_plan` makes equal splits of the whole batch, so where a request is cut, and with it how its
sums are rounded, depends on its neighbours. Here the cuts are positions, and what lies between two
of them has a partial result. Which CTA computes it still follows from the whole batch, on the
device, once per step: that does not show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.attention.triton_plan import align_splits, request_tiles

if TYPE_CHECKING:
    from specattn.kernels.attention.tree import Tail

# numbers of a request, and of a split, which repeats those of its first request
REQUEST_FIELDS = tl.constexpr(6)
SPLIT_FIELDS = tl.constexpr(9)


@triton.jit
def _partial_start(
    x,
    tile_ends,
    requests,
    PARTIAL_TILES: tl.constexpr,
    EXTRA: tl.constexpr,
    B: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Find the first partial from place ``x`` of the line on.

    Returns its place on the line, its tile, counted from its request's first, and its request.
    """
    low = tl.zeros_like(x)
    high = tl.full(x.shape, B - 1, tl.int32)
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        right = tl.load(tile_ends + middle) <= x
        low = tl.where(right & (low < high), middle + 1, low)
        high = tl.where(right, high, middle)
    end = tl.load(tile_ends + low)
    before = tl.load(tile_ends + low - 1, mask=low > 0, other=0)
    first = tl.load(requests + low * REQUEST_FIELDS + 2).to(tl.int32)
    tile = tl.minimum(x, end) - before
    whole = (first + tile + PARTIAL_TILES - 1) // PARTIAL_TILES * PARTIAL_TILES - first
    tile = tl.where(tile > 0, whole, 0)
    over = before + tile >= end - EXTRA
    place = tl.where(over, end, before + tile)
    return place, tl.where(over, 0, tile), tl.minimum(low + over.to(tl.int32), B - 1)


@triton.jit
def _deterministic_plan_kernel(
    seq_lens,  # [B] int32; CSR: kv_indptr [B + 1]
    rows,  # [B] int64
    tile_ends,  # [B] int32, out: work up to and including a request's last tile
    requests,  # [B, 6] int64, out
    splits,  # [SPLITS, 9] int64, out
    merges,  # [1 + SPLITS, 4] int32, out
    row_stride,
    B: tl.constexpr,
    B_BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
    PARTIAL_TILES: tl.constexpr,
    EXTRA: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
    CSR: tl.constexpr,
):
    # as in `triton_plan`, but that splits end where partials do, and that a request's last partial
    # is worth EXTRA more tiles: the paths of all its query tokens
    big: tl.constexpr = tl.int64 if WIDE else tl.int32
    lane = tl.arange(0, B_BLOCK)  # [B_BLOCK]
    total = 0
    longest = 0
    for start in tl.range(0, B, B_BLOCK):
        ids = start + lane
        _, _, _, tiles = request_tiles(
            seq_lens, rows, row_stride, ids, ids < B, TAIL, WINDOW, SHIFT, CSR
        )
        work = tl.where(ids < B, tiles + EXTRA, 0)
        total += tl.sum(work, 0)
        longest = tl.maximum(longest, tl.max(work, 0))

    num_splits = tl.minimum(total, SPLITS)
    num_splits = align_splits(num_splits, total, longest, B, SPLITS)
    cuts = num_splits.to(big)

    work_before = 0
    merges_before = 0
    slots_before = 0
    for start in tl.range(0, B, B_BLOCK):
        ids = start + lane
        ok = ids < B
        prefix, base, first, tiles = request_tiles(
            seq_lens, rows, row_stride, ids, ok, TAIL, WINDOW, SHIFT, CSR
        )
        work = tl.where(ok, tiles + EXTRA, 0)
        end = work_before + tl.cumsum(work, 0)
        partials = (first + tiles + PARTIAL_TILES - 1) // PARTIAL_TILES - first // PARTIAL_TILES
        # split c holds the partials that start from c * total // num_splits on; those of the
        # request's first split are folded there, the others kept for the merge
        split = ((end - work + 1).to(big) * cuts - 1) // total
        reach = ((split + 1) * total // cuts).to(tl.int32) - (end - work)
        head = (first + reach + PARTIAL_TILES - 1) // PARTIAL_TILES - first // PARTIAL_TILES
        head = tl.minimum(head, partials)
        kept = tl.where(ok, partials - head, 0)
        cut = (kept > 0).to(tl.int32)
        rank = merges_before + tl.cumsum(cut, 0) - cut
        slot = slots_before + tl.cumsum(kept, 0) - kept
        tl.store(tile_ends + ids, end, mask=ok)
        entry = requests + ids * REQUEST_FIELDS
        tl.store(entry + 0, base, mask=ok)
        tl.store(entry + 1, prefix.to(tl.int64), mask=ok)
        tl.store(entry + 2, first.to(tl.int64), mask=ok)
        tl.store(entry + 3, partials.to(tl.int64), mask=ok)
        tl.store(entry + 4, head.to(tl.int64), mask=ok)
        tl.store(entry + 5, slot.to(tl.int64), mask=ok)
        entry = merges + (1 + rank) * 4
        tl.store(entry + 0, ids, mask=cut != 0)
        tl.store(entry + 1, split.to(tl.int32), mask=cut != 0)
        tl.store(entry + 2, slot, mask=cut != 0)
        tl.store(entry + 3, kept, mask=cut != 0)
        work_before += tl.sum(work, 0)
        merges_before += tl.sum(cut, 0)
        slots_before += tl.sum(kept, 0)
    tl.store(merges, merges_before)

    # the splits read what other threads of this CTA have just written
    tl.debug_barrier()
    c = tl.arange(0, SPLITS_BLOCK)  # [SPLITS_BLOCK]
    ok = c < num_splits
    begin = tl.where(ok, (c.to(big) * total // cuts).to(tl.int32), total)
    stop = tl.where(ok, ((c + 1).to(big) * total // cuts).to(tl.int32), total)
    begin, tile, owner = _partial_start(begin, tile_ends, requests, PARTIAL_TILES, EXTRA, B, STEPS)
    stop, _, _ = _partial_start(stop, tile_ends, requests, PARTIAL_TILES, EXTRA, B, STEPS)
    entry = splits + c * SPLIT_FIELDS
    inside = c < SPLITS
    tl.store(entry + 0, (stop - begin).to(tl.int64), mask=inside)
    tl.store(entry + 1, tile.to(tl.int64), mask=inside)
    tl.store(entry + 2, owner.to(tl.int64), mask=inside)
    for field in tl.static_range(REQUEST_FIELDS):
        number = tl.load(requests + owner * REQUEST_FIELDS + field)
        tl.store(entry + 3 + field, number, mask=inside)


@triton.jit(
    do_not_specialize=[
        "stride_pos",
        "stride_tail",
        "stride_tail_pos",
        "stride_words",
        "stride_words_q",
    ]
)
def _path_kernel(
    requests,  # [B, 6] int64
    indices,  # flat int32: slot of each prefix position
    positions,  # [B, Q_LEN] int64, read under a window
    tail_slots,  # [B, TAIL] int32
    tail_positions,  # [B, TAIL] int64, read under a window
    tail_words,  # [B, Q_LEN, WORDS] int64
    paths,  # [B * Q_LEN, WIDTH] int32, out
    path_lens,  # [B * Q_LEN] int32, out
    stride_pos,
    stride_tail,
    stride_tail_pos,
    stride_words,
    stride_words_q,
    Q_LEN: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CSR: tl.constexpr,
    BN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    req = query // Q_LEN
    base = tl.load(requests + req * REQUEST_FIELDS)
    prefix = tl.load(requests + req * REQUEST_FIELDS + 1).to(tl.int32)
    begin = prefix // BN * BN
    rest = prefix - begin
    # a key that is surely readable stands, complemented, for one that is not visible
    spare_at = indices + base + tl.maximum(prefix - 1, 0)
    if TAIL > 0:
        spare_at = tail_slots + req * stride_tail
    spare = ~tl.load(spare_at)
    pos_q = (prefix - 1).to(tl.int64)
    if WINDOW >= 0 and not CSR:
        pos_q = tl.load(positions + req * stride_pos + query % Q_LEN)

    r = tl.arange(0, BN)  # [BN]
    slots = tl.load(indices + base + begin + r, mask=r < rest, other=0)
    if WINDOW >= 0:
        distance = pos_q - (begin + r)
        slots = tl.where((distance >= 0) & (distance <= WINDOW), slots, spare)
    row = paths + query * WIDTH
    tl.store(row + r, slots, mask=r < rest)
    length = rest
    if TAIL > 0:
        key = tl.arange(0, TAIL_BLOCK)  # [TAIL_BLOCK]
        words = tail_words + req * stride_words + query % Q_LEN * stride_words_q
        word = tl.load(words + key // 64, mask=key < TAIL, other=0)
        seen = ((word >> (key % 64)) & 1) != 0
        slots = tl.load(tail_slots + req * stride_tail + key, mask=seen, other=0)
        if WINDOW >= 0:
            pos_k = tl.load(tail_positions + req * stride_tail_pos + key, mask=seen, other=0)
            distance = pos_q - pos_k
            slots = tl.where((distance >= 0) & (distance <= WINDOW), slots, spare)
        rank = tl.cumsum(seen.to(tl.int32), 0) - 1
        tl.store(row + rest + rank, slots, mask=seen)
        length += tl.sum(seen.to(tl.int32), 0)
    # tokens that share rows of a tile walk as many tiles as the longest path of them
    for start in tl.range(length, WIDTH, BN):
        tl.store(row + start + r, spare + r * 0, mask=start + r < WIDTH)
    tl.store(path_lens + query, length)


class DeterministicPlan:
    """The tables of one bucket, and the launches that fill them.

    A *partial* is what lies between two multiples of ``split_keys``; tiles count from position 0. A
    *path* is what a query token reads from the last full tile of the prefix on: the rest of the
    prefix, then the tail keys it sees, in their order, as if they followed the prefix.

    Attributes
    ----------
    tile_ends : Tensor
        ``[batch]`` int32, work of a request and all before it, in tiles.
    requests : Tensor
        ``[batch, 6]`` int64: start in the index table, prefix length, first tile (above 0 under a
        window), partials, those in the split where the request begins, slot of the first other.
    splits : Tensor
        ``[max_splits, 9]`` int64: work, first tile counted from the request's first, request,
        and the request's six numbers.
    merges : Tensor
        ``[1 + max_splits, 4]`` int32: number of requests in several splits; then request, its
        first split, slot of the first partial after that split, and their number.
    paths : Tensor
        ``[batch * q_len, width]`` int32 slots, whole tiles; the complement of a readable slot
        where no key is visible.
    path_lens : Tensor
        ``[batch * q_len]`` int32.
    """

    def __init__(
        self,
        *,
        batch: int,
        max_splits: int,
        q_len: int,
        tail_len: int,
        window_left: int,
        block_n: int,
        partial_tiles: int,
        extra: int,
        csr: bool,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tile_ends = zeros(batch)
        self.requests = zeros(batch, REQUEST_FIELDS.value, dtype=torch.int64)
        self.splits = zeros(max_splits, SPLIT_FIELDS.value, dtype=torch.int64)
        self.merges = zeros(1 + max_splits, 4)
        self.paths = zeros(batch * q_len, (1 + triton.cdiv(tail_len, block_n)) * block_n)
        self.path_lens = zeros(batch * q_len)
        self.q_len, self.tail_len, self.window_left = q_len, tail_len, window_left
        self.block_n, self.partial_tiles = block_n, partial_tiles
        self.extra, self.csr = extra, csr

    def fill(self, seq_lens: Tensor, rows: Tensor | None, row_stride: int) -> None:
        """Cut the work of these lengths; ``seq_lens`` is ``kv_indptr`` where ``csr``."""
        batch, max_splits = len(self.requests), len(self.splits)
        block = min(max(triton.next_power_of_2(batch), 16), 1024)
        # only then can (work of all requests) * splits pass 2^31
        most = triton.cdiv(row_stride + self.tail_len, self.block_n) + 1 + self.extra
        _deterministic_plan_kernel[(1,)](
            seq_lens,
            rows,
            self.tile_ends,
            self.requests,
            self.splits,
            self.merges,
            row_stride,
            B=batch,
            B_BLOCK=block,
            TAIL=self.tail_len,
            WINDOW=self.window_left,
            SHIFT=self.block_n.bit_length() - 1,
            PARTIAL_TILES=self.partial_tiles,
            EXTRA=self.extra,
            SPLITS=max_splits,
            SPLITS_BLOCK=max(triton.next_power_of_2(max_splits), 16),
            STEPS=(batch - 1).bit_length(),
            WIDE=self.csr or batch * most * max_splits >= 2**31,
            CSR=self.csr,
            num_warps=4 if block <= 32 else 8,
        )

    def trace(self, indices: Tensor, tail: Tail) -> None:
        """List the paths of all query tokens, after `fill`."""
        _path_kernel[(len(self.paths),)](
            self.requests,
            indices,
            *tail,
            self.paths,
            self.path_lens,
            *tail.strides,
            Q_LEN=self.q_len,
            TAIL=self.tail_len,
            TAIL_BLOCK=max(triton.next_power_of_2(self.tail_len), 16),
            WINDOW=self.window_left,
            CSR=self.csr,
            BN=self.block_n,
            WIDTH=self.paths.shape[1],
            num_warps=2,
        )
