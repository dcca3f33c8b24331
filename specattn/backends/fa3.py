"""FlashAttention-3 (`sgl_kernel`) over page tables of single-slot pages, planned on the device.

FA3 reads KV through ``page_table [rows, width]``, ``cache_seqlens`` and a causal or no mask; it
knows no trees. The pools are viewed as pages of one slot, whatever their own page size, so a page
table is a list of slots and no KV is ever copied:

- where a layout is causal, the list is the prefix followed by the tail, and one call attends;
- a tree is a pass over the prefix, read through ``req_to_token`` itself, and a pass in which every
  query token is a request of its own over the list of its ancestors, merged by their lse;
- index lists and prompts are read where they lie: with a row stride of 1, the "row" of a request
  is the offset at which its list begins.

A window counts list entries from the end of the list. On a causal layout that is the distance in
positions; in a tree it is not, so trees under a window are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import Capabilities
from specattn.errors import UnsupportedError
from specattn.kernels import ops
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig

#: FA3 has more; these are the sizes it is tested with here.
HEAD_DIMS = (64, 128)
HOPPER = (9, 0)


class Fa3Backend:
    """FlashAttention-3 on Hopper.

    Trees under a window (any layout that is not causal, with ``window_left`` of 0 or more) are
    refused at `bind`; every other combination of the capabilities is served.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        A CUDA device of compute capability 9.0.

    Raises
    ------
    UnsupportedError
        If ``sgl_kernel`` is installed but cannot be imported.
    """

    name: ClassVar[str] = "fa3"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, dtypes=(torch.float16, torch.bfloat16)
    )

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        try:
            library = import_module("sgl_kernel.flash_attn")
        except ImportError as error:
            raise UnsupportedError(
                "backend 'fa3'", [f"sgl_kernel is installed but cannot be imported: {error}"]
            ) from error
        self._call = Fa3Call(config, library.flash_attn_with_kvcache)

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = []
        if find_spec("sgl_kernel") is None:
            found.append("sgl_kernel is not installed (pip install sglang-kernel, Linux only)")
        if device.type != "cuda" or not torch.cuda.is_available():
            found.append(f"FA3 needs a CUDA device of compute capability 9.0, got {device}")
        elif (capability := torch.cuda.get_device_capability(device)) != HOPPER:
            found.append(f"FA3 needs compute capability 9.0, got {capability[0]}.{capability[1]}")
        if config is None:
            return found
        if config.dtype not in Fa3Backend.capabilities.dtypes:
            found.append(f"dtype must be float16 or bfloat16, got {config.dtype}")
        if config.head_dim not in HEAD_DIMS:
            found.append(f"head_dim must be 64 or 128, got {config.head_dim}")
        if config.v_head_dim != config.head_dim:
            found.append(
                f"v_head_dim must equal head_dim {config.head_dim}, got {config.v_head_dim}"
            )
        return found

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind.

        Raises
        ------
        UnsupportedError
            For a tree under a window, and for slot tables of 2^31 entries or more.
        """
        if isinstance(plan, CsrPlan):
            return Fa3Lists.over(self._call, plan)
        if isinstance(plan, ExtendPlan):
            return Fa3Extend.over(self._call, plan)
        if plan.layout.causal:
            return Fa3Causal.over(self._call, plan)
        if self.config.window_left >= 0:
            raise UnsupportedError("backend 'fa3' with a tree", [
                f"window_left {self.config.window_left} counts positions (tree depth), "
                "FA3's window counts list entries"
            ])
        return Fa3Tree.over(self._call, plan)


@dataclass(frozen=True)
class Fa3Call:
    """`flash_attn_with_kvcache` with what the layer fixes."""

    config: AttnConfig
    function: Callable[..., Any]

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None = None, *,
        page_table: Tensor, cache_seqlens: Tensor, cache_batch_idx: Tensor | None = None,
        causal: bool = False, window_left: int = -1, **varlen: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend; returns ``out`` and the natural lse.

        q is ``[B, q_len, Hq, D]`` and the lse ``[B, Hq, q_len]``; ragged, ``[T, Hq, D]`` and
        ``[Hq, T]``. ``cache_batch_idx`` names each request's row of ``page_table``.
        """
        result: tuple[Tensor, ...] = self.function(
            q, k_cache[:, None], v_cache[:, None], out=out,
            page_table=page_table, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
            causal=causal, window_size=(window_left, -1 if window_left < 0 else 0),
            softmax_scale=self.config.sm_scale, softcap=self.config.logit_cap,
            return_softmax_lse=True, **varlen,
        )
        return result[0], result[1]


class _PatternA:
    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Nothing to plan on the host."""


@dataclass(frozen=True)
class Fa3Causal(_PatternA):
    """Decode, chains and draft extends: one causal call over prefix and tail."""

    call: Fa3Call
    plan: AttnPlan
    table: Tensor  # [B, width] int32
    lens: Tensor  # [B] int32

    @classmethod
    def over(cls, call: Fa3Call, plan: AttnPlan) -> Fa3Causal:
        """Allocate a table that holds any list."""
        width = plan.req_to_token.shape[1] + plan.layout.tail
        if call.config.window_left >= 0:
            width = min(width, call.config.window_left + plan.layout.q_len)
        table = plan.req_to_token.new_zeros(plan.batch, width)
        return cls(call, plan, table, table.new_zeros(plan.batch))

    def fill(self) -> None:
        """List the slots of every request."""
        plan = self.plan
        ops("page_table", self.table.device).fill_page_table(
            plan.req_to_token, plan.req_pool_indices, plan.seq_lens, plan.tail_slots, self.table,
            self.lens, q_len=plan.layout.q_len, window_left=self.call.config.window_left,
        )

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        shape = (self.plan.batch, self.plan.layout.q_len)
        _, sums = self.call(
            q.unflatten(0, shape), k_cache, v_cache, out.unflatten(0, shape),
            page_table=self.table, cache_seqlens=self.lens, causal=True,
            # the list of a single query token ends at its window already
            window_left=self.call.config.window_left if shape[1] > 1 else -1,
        )
        if lse is not None:
            lse.unflatten(0, shape).copy_(sums.transpose(1, 2))


@dataclass(frozen=True)
class Fa3Tree(_PatternA):
    """Any ancestor words: a pass over the prefixes, one over the ancestors, and their merge."""

    call: Fa3Call
    plan: AttnPlan
    rows: Tensor  # [B] int32
    table: Tensor  # [B * q_len, tail] int32
    keys: Tensor  # [B * q_len] int32

    @classmethod
    def over(cls, call: Fa3Call, plan: AttnPlan) -> Fa3Tree:
        """Allocate the lists of ancestors."""
        queries = plan.batch * plan.layout.q_len
        table = plan.req_to_token.new_zeros(queries, plan.layout.tail)
        return cls(call, plan, table.new_zeros(plan.batch), table, table.new_zeros(queries))

    @property
    def grows(self) -> bool:
        """Whether the tail holds earlier nodes: a draft step, whose words `run` finds written."""
        return self.plan.layout.tail > self.plan.layout.q_len

    def fill(self) -> None:
        """List the ancestors of every query token, if they are known by now."""
        self.rows.copy_(self.plan.req_pool_indices)
        if not self.grows:
            self._list_ancestors()

    def _list_ancestors(self) -> None:
        ops("page_table", self.table.device).fill_ancestor_table(
            self.plan.tail_slots, self.plan.tail_words, self.table, self.keys
        )

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan = self.plan
        shape = (plan.batch, plan.layout.q_len)
        if self.grows:
            self._list_ancestors()
        merged = out.unflatten(0, shape)
        _, prefix_lse = self.call(
            q.unflatten(0, shape), k_cache, v_cache, merged,
            page_table=plan.req_to_token, cache_seqlens=plan.seq_lens, cache_batch_idx=self.rows,
        )
        tail_out, tail_lse = self.call(
            q[:, None], k_cache, v_cache, page_table=self.table, cache_seqlens=self.keys
        )
        ops("merge_lse", q.device).merge_lse(
            merged, prefix_lse.transpose(1, 2), plan.seq_lens,
            tail_out.view(merged.shape), tail_lse.view(*shape, -1), self.keys.view(shape),
            merged, None if lse is None else lse.unflatten(0, shape),
        )


@dataclass(frozen=True)
class Fa3Lists(_PatternA):
    """Draft decode from index lists, read in place."""

    call: Fa3Call
    plan: CsrPlan
    table: Tensor  # [1, width] int32 with row stride 1: row r begins at list entry r
    starts: Tensor  # [rows] int32
    lens: Tensor  # [rows] int32

    @classmethod
    def over(cls, call: Fa3Call, plan: CsrPlan) -> Fa3Lists:
        """View the lists as a table; its width only steers how FA3 splits long lists."""
        rows = len(plan.kv_indptr) - 1
        width = max(1, len(plan.kv_indices) // max(1, rows))
        lens = plan.kv_indptr.new_zeros(rows)
        return cls(call, plan, overlapping_rows(plan.kv_indices, width), lens.clone(), lens)

    def fill(self) -> None:
        """Find where each list begins; the query is its last key, so a window is its end."""
        ends, window = self.plan.kv_indptr[1:], self.call.config.window_left
        torch.sub(ends, self.plan.kv_indptr[:-1], out=self.lens)
        if window >= 0:
            self.lens.clamp_(max=window + 1)
        torch.sub(ends, self.lens, out=self.starts)

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        _, sums = self.call(
            q[:, None], k_cache, v_cache, out[:, None], page_table=self.table,
            cache_seqlens=self.lens, cache_batch_idx=self.starts,
        )
        if lse is not None:
            lse.copy_(sums[:, :, 0])


@dataclass(frozen=True)
class Fa3Extend(_PatternA):
    """A ragged prompt extend: one causal call over the rows of ``req_to_token``, in place."""

    call: Fa3Call
    plan: ExtendPlan
    table: Tensor  # [1, max_seq_len] int32 with row stride 1
    starts: Tensor  # [B] int32
    lens: Tensor  # [B] int32

    @classmethod
    def over(cls, call: Fa3Call, plan: ExtendPlan) -> Fa3Extend:
        """View the slot table as one list."""
        slots = plan.req_to_token
        if slots.numel() >= 2**31:
            raise UnsupportedError("backend 'fa3'", [
                f"req_to_token must have less than 2^31 entries, got {slots.numel()}"
            ])
        table = overlapping_rows(slots, max(1, plan.max_seq_len))
        starts = slots.new_zeros(len(plan.seq_lens))
        return cls(call, plan, table, starts, starts.clone())

    def fill(self) -> None:
        """Find where each request's keys begin: at its row, or at its first query's window."""
        plan, window = self.plan, self.call.config.window_left
        hidden = torch.zeros_like(plan.seq_lens)
        if window >= 0:
            hidden = (plan.seq_lens - window).clamp(min=0)
        self.starts.copy_(plan.req_pool_indices * plan.req_to_token.stride(0) + hidden)
        self.lens.copy_(plan.seq_lens + plan.qo_indptr.diff() - hidden)

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        _, sums = self.call(
            q, k_cache, v_cache, out, page_table=self.table, cache_seqlens=self.lens,
            cache_batch_idx=self.starts, causal=True, window_left=self.call.config.window_left,
            cu_seqlens_q=self.plan.qo_indptr, max_seqlen_q=self.plan.max_q_len,
        )
        if lse is not None:
            lse.copy_(sums.T)


def overlapping_rows(entries: Tensor, width: int) -> Tensor:
    """View dense int32 ``entries`` as a table ``[1, width]`` whose row r begins at entry r.

    FA3 finds a row by its stride alone and reads as many entries as the request has keys, so rows
    past the first are found too.
    """
    return entries.as_strided((1, min(width, entries.numel())), (1, 1))
