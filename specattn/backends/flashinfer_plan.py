"""What FlashInfer is told on the host, and the buffers it then reads on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specattn.errors import UnsupportedError
from specattn.kernels import ops

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import AttnConfig
    from specattn.plan import AttnPlan, CsrPlan

#: The largest float workspace that is spent on right-sized query tiles.
MAX_TILING = 512 << 20
MIN_INTS = 256 << 10


@dataclass(frozen=True)
class Grid:
    """How FlashInfer's scheduler cuts a prefill (its ``PrefillSplitQOKVIndptr``).

    A grid that is recorded has to serve any lengths, so the query tile is sized for the longest
    request that the rows could hold beside ``requests - 1`` others of one row. Requests without
    rows take that worst case down to the ``q_len`` all requests really have.

    Parameters
    ----------
    requests : int
        Requests to plan for, those past the batch being without rows.
    tile : int
        Query rows (times group) of a tile.
    ctas : int
        Thread blocks per KV head, which bounds all partial results.
    float_bytes, int_bytes : int
        Workspace.
    """

    requests: int
    tile: int
    ctas: int
    float_bytes: int
    int_bytes: int

    @classmethod
    def recorded(cls, config: AttnConfig, batch: int, q_len: int, processors: int) -> Grid:
        """Cut equal requests: by the tile that ``q_len`` needs, if its workspace is in bounds."""
        group, rows = config.num_qo_heads // config.num_kv_heads, batch * q_len
        tile = _tile(q_len * group, config.head_dim)
        if tile < _tile((rows - batch + 1) * group, config.head_dim):
            fitted = cls._over(config, rows, rows + 1 - tile // group, processors)
            if fitted.float_bytes <= MAX_TILING:
                return fitted
        return cls._over(config, rows, batch, processors)

    @classmethod
    def eager(cls, config: AttnConfig, batch: int, tokens: int, processors: int) -> Grid:
        """Cut any requests of ``tokens`` altogether, planned once: only split work has partials."""
        group = config.num_qo_heads // config.num_kv_heads
        return cls._sized(
            config,
            tokens,
            batch,
            128,
            2 * processors // config.num_kv_heads,
            tiles=tokens * group // 16 + batch,
        )

    @classmethod
    def _over(cls, config: AttnConfig, rows: int, requests: int, processors: int) -> Grid:
        group = config.num_qo_heads // config.num_kv_heads
        tile = _tile((rows - requests + 1) * group, config.head_dim)
        tiles = -(-rows * group // tile) + requests - 1
        ctas = max(2 * processors // config.num_kv_heads, tiles)
        return cls._sized(config, rows, requests, tile, ctas, tiles)

    @classmethod
    def _sized(
        cls, config: AttnConfig, rows: int, requests: int, tile: int, ctas: int, tiles: int
    ) -> Grid:
        floats = config.num_qo_heads * ctas * tile * (config.head_dim + 1) * 4
        ints = 13 * max(ctas, tiles) + 8 * (rows + requests)
        return cls(requests, tile, ctas, floats + 4096, ints + MIN_INTS)


def _tile(rows: int, head_dim: int) -> int:
    """Return FlashInfer's query tile for a request of ``rows`` rows times group."""
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16


def host_lens(seq_lens_cpu: Tensor | None, batch: int, longest: int, backend: str) -> Tensor:
    """Check the host's prefix lengths: everything after this trusts them."""
    if seq_lens_cpu is None:
        raise UnsupportedError(
            f"backend {backend!r}", ["it plans on the host and needs seq_lens_cpu, got None"]
        )
    if seq_lens_cpu.shape != (batch,) or seq_lens_cpu.device.type != "cpu":
        raise ValueError(
            f"seq_lens_cpu must be [{batch}] on the host, got {list(seq_lens_cpu.shape)} on "
            f"{seq_lens_cpu.device}"
        )
    low, high = int(seq_lens_cpu.min()), int(seq_lens_cpu.max())
    if low < 0 or high > longest:
        raise ValueError(f"seq_lens_cpu must be 0..{longest}, got {low}..{high}")
    return seq_lens_cpu


def list_offsets(sizes: Tensor, count: int) -> Tensor:
    """Return ``[count + 1]`` int32 offsets of ``sizes`` and of nothing after them, on the host."""
    offsets = torch.zeros(count + 1, dtype=torch.int32)
    offsets[1 : len(sizes) + 1] = sizes.cumsum(0)
    offsets[len(sizes) + 1 :] = offsets[len(sizes)]
    return offsets


def require_addressable(size: int, what: str, backend: str) -> None:
    """Raise an UnsupportedError for more than FlashInfer's offsets reach."""
    if size >= 2**31:
        raise UnsupportedError(
            f"backend {backend!r}", [f"its int32 offsets cannot address {size} {what}"]
        )


class RequestLists:
    """A list per request: the prefix through the table, then the tail.

    Parameters
    ----------
    plan : AttnPlan
        What is listed.
    requests : int
        Lists, those past the batch being empty.
    window_left : int
        Keys before any query's window are not listed; -1 is no window.
    backend : str
        Who lists, for errors.
    prefix_only : bool
        Leave the tail out; not with a window.

    Attributes
    ----------
    longest : int
        The most keys a list can have.
    """

    def __init__(
        self,
        plan: AttnPlan,
        requests: int,
        window_left: int,
        backend: str,
        *,
        prefix_only: bool = False,
    ) -> None:
        table, batch, layout = plan.req_to_token, plan.batch, plan.layout
        assert window_left < 0 or not prefix_only
        # How much of the prefix the first query can see. It is at the prefix's end in a tree, whose
        # depths the host does not know, and further on in a chain that draft steps have begun;
        # below 0, it does not see all of those steps.
        self._reach = table.shape[1]
        if window_left >= 0:
            self._reach = window_left - (layout.tail - layout.q_len if layout.causal else 0)
        self._tail_slots = plan.tail_slots[:, : 0 if prefix_only else layout.tail]
        self.longest = self._tail_slots.shape[1] + max(min(table.shape[1], self._reach), 0)
        size = batch * self.longest
        require_addressable(size, "list entries", backend)
        self.plan, self.requests, self.backend = plan, requests, backend
        self.window_left = window_left
        self.indptr = table.new_zeros(requests + 1)
        self.indices = table.new_zeros(size)

    def offsets(self, seq_lens_cpu: Tensor | None) -> Tensor:
        """Return where each list begins, on the host."""
        plan = self.plan
        lens = host_lens(seq_lens_cpu, plan.batch, plan.req_to_token.shape[1], self.backend)
        tail = self._tail_slots.shape[1]
        return list_offsets(lens.clamp(max=self._reach) + tail, self.requests)

    def fill(self) -> None:
        """Write the lists where the host has planned them."""
        plan = self.plan
        ops("csr", self.indices.device).fill_lists(
            plan.req_to_token,
            plan.req_pool_indices,
            plan.seq_lens,
            plan.positions,
            self._tail_slots,
            self.indptr,
            self.indices,
            self.window_left,
        )


class BranchLists:
    """A list per branch, written by whoever owns the plan.

    Parameters
    ----------
    plan : CsrPlan
        One draft decode step.
    backend : str
        Who reads them, for errors.
    """

    def __init__(self, plan: CsrPlan, backend: str) -> None:
        self.plan, self.requests, self.backend = plan, len(plan.kv_indptr) - 1, backend
        self.indptr = torch.zeros_like(plan.kv_indptr)
        self.indices = plan.kv_indices

    def offsets(self, seq_lens_cpu: Tensor | None) -> Tensor:
        """Return where each list begins, on the host, counted from the plan's first."""
        layout, room = self.plan.layout, len(self.indices)
        path = layout.tail // layout.q_len  # ancestors of a branch, itself included
        lens = host_lens(seq_lens_cpu, self.requests // layout.q_len, room, self.backend)
        offsets = list_offsets((lens + path).repeat_interleave(layout.q_len), self.requests)
        if offsets[-1] > room:
            raise ValueError(
                f"kv_indices must hold {int(offsets[-1])} entries for these lengths, got {room}"
            )
        return offsets

    def fill(self) -> None:
        """Take the offsets as they are: a part of a larger batch does not begin at 0."""
        self.indptr.copy_(self.plan.kv_indptr)


class PackedMasks:
    """A bit per query token and listed key, where FlashInfer reads it.

    Its own windows count list entries, ours positions: siblings share one. So a window is a part
    of the mask.

    Parameters
    ----------
    lists : RequestLists
        The keys.

    Attributes
    ----------
    late : bool
        Whether the words name ancestors of earlier draft steps, which become known after ``fill``.
    """

    def __init__(self, lists: RequestLists) -> None:
        plan, layout = lists.plan, lists.plan.layout
        self.lists = lists
        self.late = layout.tail > layout.q_len
        cells = layout.q_len * lists.longest
        self.indptr = torch.zeros_like(lists.indptr)
        size = plan.batch * (cells // 8 + 1)
        require_addressable(max(cells, size), "mask bits or bytes", lists.backend)
        self.bits = torch.zeros(size, dtype=torch.uint8, device=lists.indices.device)

    def schedule(self, offsets: Tensor) -> None:
        """Say where each request's bytes begin; FlashInfer's own plan counts cells there."""
        cells = (offsets[1:] - offsets[:-1]).long() * self.lists.plan.layout.q_len
        self.indptr.copy_(list_offsets((cells + 7) // 8, len(cells)), non_blocking=True)

    def fill(self) -> None:
        """Pack the words."""
        plan, lists = self.lists.plan, self.lists
        ops("csr", self.bits.device).pack_masks(
            lists.indptr,
            self.indptr,
            plan.seq_lens,
            plan.positions,
            plan.tail_positions,
            plan.tail_words,
            self.bits,
            lists.window_left,
        )
