"""Cut the keys of a batch into equal chunks of work, on the device, once per step.

Stream-K (Osama et al., 2023) over key tiles: the tiles of all requests stand end to end, and
every group of CTAs takes one chunk of that line. A request cut in two or more parts is listed for
the merge kernel. Lengths are read on the device, so one captured graph serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# a smaller number of chunks is taken when all its cuts are request boundaries, as long as no
# chunk grows by more tiles than this: about the cost of one more segment
ALIGN_SLACK = tl.constexpr(2)


@triton.jit
def request_tiles(
    seq_lens, rows, row_stride, ids, ok,
    TAIL: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr, CSR: tl.constexpr,
):
    """Prefix length, start in the index table, and first and number of key tiles."""
    if CSR:
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
    if WINDOW >= 0:
        first = tl.maximum(newest - WINDOW, 0) // BN
    # at least one tile: a request without keys has an output to write, too
    tiles = tl.maximum((prefix + TAIL + BN - 1) // BN - first, 1)
    return prefix, base, first, tl.where(ok, tiles, 0)


@triton.jit
def _plan_kernel(
    seq_lens,     # [B] int32; CSR: kv_indptr [B + 1]
    rows,         # [B] int64
    requests,     # [B, 8] int64, out
    chunks,       # [NC, 8] int64, out
    splits,       # [1 + NC, 4] int32, out
    row_stride,
    B: tl.constexpr, B_BLOCK: tl.constexpr, TAIL: tl.constexpr, WINDOW: tl.constexpr,
    BN: tl.constexpr, NC: tl.constexpr, NC_BLOCK: tl.constexpr, WIDE: tl.constexpr,
    CSR: tl.constexpr, MIN_TILES: tl.constexpr,
):
    # requests that share a chunk when there are more of them than chunks
    GROUPS: tl.constexpr = B // ((B + NC - 1) // NC)
    big: tl.constexpr = tl.int64 if WIDE else tl.int32
    lane = tl.arange(0, B_BLOCK)                                          # [B_BLOCK]
    total = 0
    longest = 0
    for start in tl.range(0, B, B_BLOCK):
        ids = start + lane
        _, _, _, tiles = request_tiles(
            seq_lens, rows, row_stride, ids, ids < B, TAIL, WINDOW, BN, CSR
        )
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))

    # short chunks cost more to merge than they save; a request has a chunk while there are any
    nc = tl.minimum(tl.maximum((total + MIN_TILES - 1) // MIN_TILES, B), NC)
    # equal lengths: whole chunks per request, or whole requests per chunk
    if B <= NC:
        aligned = nc // B * B
        fits = longest * B == total
    else:
        aligned = nc * 0 + GROUPS
        fits = (longest * B == total) & (B % GROUPS == 0)
    fits &= (total + aligned - 1) // aligned <= (total + nc - 1) // nc + ALIGN_SLACK
    nc = tl.where(fits, aligned, nc)
    cuts = nc.to(big)

    tiles_before = 0
    splits_before = 0
    # requests that end before chunk c begins, but not before chunk c - 1 does
    ended = tl.zeros([NC_BLOCK], tl.int32)
    for start in tl.range(0, B, B_BLOCK):
        ids = start + lane
        ok = ids < B
        prefix, base, first, tiles = request_tiles(
            seq_lens, rows, row_stride, ids, ok, TAIL, WINDOW, BN, CSR
        )
        end = tiles_before + tl.cumsum(tiles, 0)
        # chunk c holds the tiles from c * total // nc on
        first_chunk = ((end - tiles + 1).to(big) * cuts - 1) // total
        next_chunk = (end.to(big) * cuts - 1) // total + 1
        parts = next_chunk - first_chunk
        split = (ok & (parts > 1)).to(tl.int32)
        split_rank = splits_before + tl.cumsum(split, 0) - split
        if B > 1:
            begins = next_chunk.to(tl.int32)
            ended += tl.histogram(begins, NC_BLOCK, mask=ok & (begins < nc))
        entry = requests + ids * 8
        tl.store(entry + 0, base, mask=ok)
        tl.store(entry + 1, prefix.to(tl.int64), mask=ok)
        tl.store(entry + 2, first.to(tl.int64), mask=ok)
        tl.store(entry + 3, parts.to(tl.int64), mask=ok)
        tl.store(entry + 4, split_rank.to(tl.int64), mask=ok)
        tl.store(entry + 5, (end - tiles).to(tl.int64), mask=ok)
        entry = splits + (1 + split_rank) * 4
        tl.store(entry + 0, ids, mask=split != 0)
        tl.store(entry + 1, first_chunk.to(tl.int32) + split_rank, mask=split != 0)
        tl.store(entry + 2, parts.to(tl.int32), mask=split != 0)
        tiles_before += tl.sum(tiles, 0)
        splits_before += tl.sum(split, 0)
    tl.store(splits, splits_before)

    # the chunks read what other threads of this CTA have just written
    tl.debug_barrier()
    c = tl.arange(0, NC_BLOCK)                                            # [NC_BLOCK]
    ok = c < nc
    begin = (c.to(big) * total // cuts).to(tl.int32)
    stop = ((c + 1).to(big) * total // cuts).to(tl.int32)
    # the request of a chunk's first tile: the first that ends after it
    low = tl.cumsum(ended, 0) if B > 1 else ended
    owner = requests + low * 8
    before = tl.load(owner + 5, mask=ok, other=0).to(tl.int32)
    entry = chunks + c * 8
    inside = c < NC
    tl.store(entry + 0, tl.where(ok, stop - begin, 0).to(tl.int64), mask=inside)
    tl.store(entry + 1, (begin - before).to(tl.int64), mask=ok)
    tl.store(entry + 2, low.to(tl.int64), mask=ok)
    for field in tl.static_range(5):
        tl.store(entry + 3 + field, tl.load(owner + field, mask=ok, other=0), mask=ok)


@dataclass(frozen=True)
class TreePlan:
    """The tables of one bucket, and the launch that fills them.

    Parameters
    ----------
    requests : Tensor
        ``[batch, 8]`` int64: start in the index table, prefix length, first tile (above 0 under
        a window), parts, split requests before it, tiles of the requests before it.
    chunks : Tensor
        ``[max_chunks, 8]`` int64: tiles, first tile counted from the request's first, request,
        and the request's first five numbers.
    splits : Tensor
        ``[1 + max_chunks, 4]`` int32: their number; then request, first slot among the partial
        results, parts. Part p of a split request is stored at first slot + p.
    """

    requests: Tensor
    chunks: Tensor
    splits: Tensor
    tail_len: int
    window_left: int
    block_n: int
    csr: bool
    min_tiles: int

    @classmethod
    def alloc(
        cls, *, batch: int, max_chunks: int, tail_len: int, window_left: int, block_n: int,
        csr: bool, device: torch.device, min_tiles: int = 1,
    ) -> TreePlan:
        """Allocate the tables of a bucket of ``batch`` requests.

        A request has no more chunks than leave them ``min_tiles`` key tiles each.
        """
        return cls(
            requests=torch.zeros(batch, 8, dtype=torch.int64, device=device),
            chunks=torch.zeros(max_chunks, 8, dtype=torch.int64, device=device),
            splits=torch.zeros(1 + max_chunks, 4, dtype=torch.int32, device=device),
            tail_len=tail_len, window_left=window_left, block_n=block_n, csr=csr,
            min_tiles=min_tiles,
        )

    def fill(self, seq_lens: Tensor, rows: Tensor | None, row_stride: int) -> None:
        """Cut the work of these lengths; ``seq_lens`` is ``kv_indptr`` where ``csr``."""
        batch, max_chunks = len(self.requests), len(self.chunks)
        block = min(max(triton.next_power_of_2(batch), 16), 1024)
        # only then can (tiles of all requests) * chunks pass 2^31
        most_tiles = batch * (triton.cdiv(row_stride + self.tail_len, self.block_n) + 1)
        _plan_kernel[(1,)](
            seq_lens, rows, self.requests, self.chunks, self.splits, row_stride,
            B=batch, B_BLOCK=block, TAIL=self.tail_len, WINDOW=self.window_left, BN=self.block_n,
            NC=max_chunks, NC_BLOCK=max(triton.next_power_of_2(max_chunks), 16),
            WIDE=self.csr or most_tiles * max_chunks >= 2**31,
            CSR=self.csr, MIN_TILES=self.min_tiles, num_warps=4 if block <= 32 else 8,
        )
