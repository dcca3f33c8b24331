"""FlashInfer's plans on the host, and the buffers that it reads."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from specattn.backends.base import BoundAttention
from specattn.backends.paged import LibraryBackend
from specattn.errors import UnsupportedError
from specattn.kernels.indices import KeySlots, fill_lists
from specattn.kernels.masks import pack_masks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from specattn.config import AttnConfig
    from specattn.plan import AttnPlan, CsrPlan, ExtendPlan

#: FlashInfer's masked logit is -5e4 before scaling; a smaller scale would let it weigh something.
MIN_SCALE = 1e-3
#: The smallest workspaces, and the largest one of floats that right-sized query tiles may take.
MIN_FLOATS, MIN_INTS, MAX_TILING = 128 << 20, 256 << 10, 512 << 20


class FlashInferLayer(LibraryBackend):
    """A layer geometry, and the workspace of all bound to it."""

    module: ClassVar[str] = "flashinfer"
    package: ClassVar[str] = "flashinfer-python, Linux only"

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._floats: Tensor | None = None

    @classmethod
    def device_reasons(cls, device: torch.device) -> list[str]:
        """Say why FlashInfer cannot run on ``device``."""
        if device.type != "cuda":
            return [f"FlashInfer needs a CUDA device, got {device.type}"]
        if not torch.cuda.is_available():
            return ["torch finds no CUDA device"]
        if torch.cuda.get_device_capability(device) < (8, 0):
            return ["FlashInfer's FA2 kernels need compute capability 8.0"]
        return []

    @classmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say why FlashInfer cannot mask at the layer's scale."""
        if config.sm_scale < MIN_SCALE:
            return [f"sm_scale must be at least {MIN_SCALE}, got {config.sm_scale}"]
        return []

    def processors(self) -> int:
        """Return the device's streaming multiprocessors: FlashInfer cuts its work by them."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def floats(self, size: int) -> Tensor:
        """Return workspace that everything bound here shares: forwards run one after another."""
        size = max(size, MIN_FLOATS)
        if self._floats is None or len(self._floats) < size:
            self._floats = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._floats


class Planned(BoundAttention):
    """A planned wrapper; its plans wait in pinned memory for the device."""

    def __init__(self, backend: FlashInferLayer, lists: Lists) -> None:
        self.config, self.lists = backend.config, lists
        # neither the next plan nor another owner of the memory may write there before
        self._fetched = torch.cuda.Event()
        weakref.finalize(self, self._fetched.synchronize).atexit = False

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Plan inside, on the host; copies are under way afterwards."""
        self._fetched.synchronize()
        yield
        self._fetched.record()

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan the lists' lengths."""
        offsets = self.lists.offsets(seq_lens_cpu)
        self.plan_lists(self.lists.rows, offsets)

    @abstractmethod
    def plan_lists(self, rows: Tensor, offsets: Tensor) -> None:
        """Plan from ``[B + 1]`` host offsets of query tokens and lists."""

    def fill(self) -> None:
        """Fill the lists; prompts may have skipped ``schedule``."""
        if isinstance(self.lists, PromptLists) and not self.lists.planned:
            self.schedule(None)
        self.lists.fill()


@dataclass(frozen=True)
class Grid:
    """The cut that FlashInfer's scheduler makes (its ``PrefillSplitQOKVIndptr``).

    A grid that is recorded has to serve any lengths, so the query tile is sized for the longest
    request that the rows could hold beside ``requests - 1`` others of one row. Requests without
    rows take that worst case down to the ``q_len`` all requests really have.

    ``tile`` counts query rows (times group), ``ctas`` thread blocks per KV head, which bounds all
    partial results.
    """

    requests: int
    tile: int
    ctas: int
    float_bytes: int
    int_bytes: int

    @classmethod
    def recorded(cls, config: AttnConfig, batch: int, q_len: int, processors: int) -> Grid:
        """Cut by the tile of ``q_len``, if its workspace is in bounds."""
        group, rows = config.num_qo_heads // config.num_kv_heads, batch * q_len
        tile = _tile(q_len * group, config.head_dim)
        if tile < _tile((rows - batch + 1) * group, config.head_dim):
            fitted = cls._over(config, rows, rows + 1 - tile // group, processors)
            if fitted.float_bytes <= MAX_TILING:
                return fitted
        return cls._over(config, rows, batch, processors)

    @classmethod
    def eager(cls, config: AttnConfig, batch: int, tokens: int, processors: int) -> Grid:
        """Cut requests that are planned once: only split work has partials."""
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
    """Return ``[count + 1]`` int32 host offsets; later lists are empty."""
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

    Like the other lists here it has ``rows``, where every request's query tokens begin, on the
    host, and ``indptr`` and ``indices``, which FlashInfer reads on the device. Lists past the batch
    are empty, and keys before any query's window are not listed. ``longest`` is the most keys that
    a list can have.
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
        self.rows = list_offsets(torch.full((batch,), layout.q_len), requests)
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
        fill_lists(
            plan.key_slots._replace(tail=self._tail_slots),
            positions=plan.positions,
            kv_indptr=self.indptr,
            kv_indices=self.indices,
            window_left=self.window_left,
        )


class BranchLists:
    """A list per branch, written by whoever owns the plan."""

    def __init__(self, plan: CsrPlan, backend: str) -> None:
        self.plan, self.requests, self.backend = plan, len(plan.kv_indptr) - 1, backend
        self.rows = torch.arange(self.requests + 1, dtype=torch.int32)
        self.indptr = torch.zeros_like(plan.kv_indptr)
        self.indices = plan.kv_indices

    def offsets(self, seq_lens_cpu: Tensor | None) -> Tensor:
        """Return where each list begins, on the host."""
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
        """Take the offsets as they are: the lists follow."""
        self.indptr.copy_(self.plan.kv_indptr)


class PromptLists:
    """A list of cached and new keys per prompt."""

    def __init__(self, plan: ExtendPlan, window_left: int = -1) -> None:
        self._plan, self._window_left = plan, window_left
        self._none = plan.req_to_token.new_empty(len(plan.req_pool_indices), 0)
        self._lens = plan.seq_lens
        self.planned = False
        self.rows = self.indptr = plan.qo_indptr
        self.indices = plan.req_to_token.new_empty(0)

    def offsets(self, seq_lens_cpu: Tensor | None) -> Tensor:
        """Return where lists begin, and find ``rows``: reads the device."""
        plan = self._plan
        rows, prefix = plan.qo_indptr.cpu(), plan.seq_lens.cpu()
        if self._window_left >= 0:
            prefix = prefix.clamp(max=self._window_left)
        offsets = list_offsets(prefix + rows.diff(), len(rows) - 1)
        self.indptr = offsets.to(plan.seq_lens.device)
        self._lens = plan.seq_lens + plan.qo_indptr.diff()
        self.indices = plan.req_to_token.new_empty(int(offsets[-1]))
        self.rows, self.planned = rows, True
        return offsets

    def fill(self) -> None:
        """Write the lists where `offsets` has put them."""
        plan = self._plan
        fill_lists(
            KeySlots(plan.req_to_token, plan.req_pool_indices, self._lens, self._none),
            positions=self._none,
            kv_indptr=self.indptr,
            kv_indices=self.indices,
            window_left=-1,
        )


class TailLists:
    """The tail of every request, as long as the layout's; planned once."""

    def __init__(self, plan: AttnPlan) -> None:
        self._slots, begin = plan.tail_slots, torch.arange(plan.batch + 1, dtype=torch.int32)
        self._offsets = begin * plan.layout.tail
        self.rows = begin * plan.layout.q_len
        self.indptr = self._offsets.to(plan.tail_slots.device)
        self.indices = plan.tail_slots.new_zeros(plan.batch * plan.layout.tail)

    def offsets(self, seq_lens_cpu: Tensor | None) -> Tensor:
        """Return where each list begins, on the host."""
        return self._offsets

    def fill(self) -> None:
        """List the tails' slots."""
        self.indices.view(self._slots.shape).copy_(self._slots)


#: What `Planned` reads.
Lists = RequestLists | BranchLists | PromptLists | TailLists


class PackedMasks:
    """A bit per query token and listed key, where FlashInfer reads it.

    Its own windows count list entries, ours positions: siblings share one. So a window is a part of
    the mask. ``late`` says that the words name ancestors of earlier draft steps, which become known
    after ``fill``.
    """

    def __init__(self, plan: AttnPlan, lists: RequestLists | TailLists, backend: str) -> None:
        layout = plan.layout
        self.plan, self.lists = plan, lists
        self.late = plan.grows
        if isinstance(lists, TailLists):
            # planned once: FlashInfer begins a request's bytes where it counts its cells
            size = cells = plan.batch * layout.q_len * layout.tail
            self.indptr, self.window_left = lists.indptr * layout.q_len, -1
        else:
            cells = layout.q_len * lists.longest
            size = plan.batch * (cells // 8 + 1)
            self.indptr, self.window_left = torch.zeros_like(lists.indptr), lists.window_left
        require_addressable(max(cells, size), "mask bits or bytes", backend)
        self.bits = torch.zeros(size, dtype=torch.uint8, device=lists.indices.device)

    def schedule(self, offsets: Tensor) -> None:
        """Say where each request's bytes begin; FlashInfer's own plan counts cells there."""
        cells = (offsets[1:] - offsets[:-1]).long() * self.plan.layout.q_len
        self.indptr.copy_(list_offsets((cells + 7) // 8, len(cells)), non_blocking=True)

    def fill(self) -> None:
        """Pack the words."""
        plan = self.plan
        pack_masks(
            kv_indptr=self.lists.indptr,
            mask_indptr=self.indptr,
            seq_lens=plan.seq_lens,
            positions=plan.positions,
            tail_positions=plan.tail_positions,
            tail_words=plan.tail_words,
            mask=self.bits,
            window_left=self.window_left,
        )
