"""Where FA3 finds a request's keys: page tables over single slots, and over whole pages.

Everything here can be filled on the device, and names the arguments that a call of
`flash_attn_with_kvcache` takes for it. A table of slots lists any keys at all; a table of pages,
of one entry per page, lists those that lie in the order of ``req_to_token``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specattn.backends.paged import BlockTable, whole_pages
from specattn.errors import UnsupportedError
from specattn.kernels import ops

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.plan import AttnPlan, CsrPlan, ExtendPlan

#: Where a page is whole tiles of its kernels' keys (128), FA3 may load it past the request's last
#: key, and memory that nobody wrote may hold NaN. Larger pages are read in parts of this size.
MAX_PAGE = 64

Arguments = dict[str, Any]


class Keys(Protocol):
    """A page table, the number of keys of every request, and the pool as the table sees it."""

    def fill(self) -> None:
        """Write table and lengths, on the device."""

    def pages(self, pool: Tensor) -> Tensor:
        """View ``[num_slots, heads, dim]`` as ``[num_pages, page_size, heads, dim]``."""

    def arguments(self) -> Arguments:
        """Return ``page_table``, ``cache_seqlens`` and what chooses rows of the table."""


def page_of(page_size: int, window_left: int) -> int:
    """Return the slots of an entry of a table over keys in order.

    A list under a window begins at its first visible key, which need not begin a page: 1.
    """
    return 1 if window_left >= 0 else min(page_size, MAX_PAGE)


def keys_of(plan: AttnPlan, window_left: int) -> Keys:
    """Return the keys of a causal plan: prefix and tail."""
    page = page_of(plan.layout.page_size, window_left)
    if page > 1:
        return Pages(BlockTable.over(plan, page))
    return Slots.over(plan, window_left)


def prefix_of(plan: AttnPlan) -> Keys:
    """Return the keys before a tail."""
    page = page_of(plan.layout.page_size, -1)
    if page > 1:
        return PrefixPages(BlockTable.over(plan, page))
    return PrefixSlots(plan, plan.req_to_token.new_zeros(plan.batch))


def prompt_of(plan: ExtendPlan, window_left: int) -> Keys:
    """Return the keys of prompts: cached ones and new ones."""
    page = page_of(plan.page_size, window_left)
    if page > 1:
        return PromptPages.over(plan, page)
    return PromptSlots.over(plan, window_left)


class OfSlots:
    """What tables of slots share: the pool is pages of one slot."""

    def pages(self, pool: Tensor) -> Tensor:
        """View ``[num_slots, heads, dim]`` as ``[num_slots, 1, heads, dim]``."""
        return pool[:, None]


@dataclass(frozen=True)
class Slots(OfSlots):
    """Prefix and tail of every request, under a window from its first visible key on."""

    plan: AttnPlan
    window_left: int
    table: Tensor  # [B, width] int32
    lens: Tensor  # [B] int32

    @classmethod
    def over(cls, plan: AttnPlan, window_left: int) -> Slots:
        """Allocate a table that holds any list."""
        width = plan.req_to_token.shape[1] + plan.layout.tail
        if window_left >= 0:
            width = min(width, window_left + plan.layout.q_len)
        table = plan.req_to_token.new_zeros(plan.batch, width)
        return cls(plan, window_left, table, table.new_zeros(plan.batch))

    def fill(self) -> None:
        """List the slots of every request."""
        plan = self.plan
        ops("page_table", self.table.device).fill_page_table(
            plan.req_to_token,
            plan.req_pool_indices,
            plan.seq_lens,
            plan.tail_slots,
            self.table,
            self.lens,
            q_len=plan.layout.q_len,
            window_left=self.window_left,
        )

    def arguments(self) -> Arguments:
        """Return the table and its lengths."""
        return {"page_table": self.table, "cache_seqlens": self.lens}


@dataclass(frozen=True)
class Pages:
    """Prefix and tail of every request, page by page."""

    blocks: BlockTable

    def fill(self) -> None:
        """List the pages of every request."""
        self.blocks.fill()

    def pages(self, pool: Tensor) -> Tensor:
        """See `Keys.pages`."""
        return self.blocks.pages(pool)

    def arguments(self) -> Arguments:
        """Return the table and its lengths."""
        return {"page_table": self.blocks.table, "cache_seqlens": self.blocks.lens}


@dataclass(frozen=True)
class PrefixPages(Pages):
    """The prefix of every request, page by page; what the table says of the tail is not read."""

    def arguments(self) -> Arguments:
        """Return the table and the prefixes' lengths."""
        return super().arguments() | {"cache_seqlens": self.blocks.plan.seq_lens}


@dataclass(frozen=True)
class PrefixSlots(OfSlots):
    """The prefix of every request, read through ``req_to_token`` itself."""

    plan: AttnPlan
    rows: Tensor  # [B] int32

    def fill(self) -> None:
        """Name every request's row."""
        self.rows.copy_(self.plan.req_pool_indices)

    def arguments(self) -> Arguments:
        """Return the slot table, and which rows of it."""
        plan = self.plan
        return {
            "page_table": plan.req_to_token,
            "cache_seqlens": plan.seq_lens,
            "cache_batch_idx": self.rows,
        }


@dataclass(frozen=True)
class Lists(OfSlots):
    """Index lists, read in place; under a window, their ends."""

    plan: CsrPlan
    window_left: int
    table: Tensor  # [1, width] int32 with row stride 1: row r begins at list entry r
    starts: Tensor  # [rows] int32
    lens: Tensor  # [rows] int32

    @classmethod
    def over(cls, plan: CsrPlan, window_left: int) -> Lists:
        """View the lists as a table; its width only steers how FA3 splits long lists."""
        rows = len(plan.kv_indptr) - 1
        width = max(1, len(plan.kv_indices) // max(1, rows))
        lens = plan.kv_indptr.new_zeros(rows)
        table = overlapping_rows(plan.kv_indices, width)
        return cls(plan, window_left, table, lens.clone(), lens)

    def fill(self) -> None:
        """Find where each list begins; the query is its last key, so a window is its end."""
        ends = self.plan.kv_indptr[1:]
        torch.sub(ends, self.plan.kv_indptr[:-1], out=self.lens)
        if self.window_left >= 0:
            self.lens.clamp_(max=self.window_left + 1)
        torch.sub(ends, self.lens, out=self.starts)

    def arguments(self) -> Arguments:
        """Return the overlapping rows, and which of them."""
        return {
            "page_table": self.table,
            "cache_seqlens": self.lens,
            "cache_batch_idx": self.starts,
        }


@dataclass(frozen=True)
class PromptSlots(OfSlots):
    """Prompts over the rows of ``req_to_token``, in place."""

    plan: ExtendPlan
    window_left: int
    table: Tensor  # [1, max_seq_len] int32 with row stride 1
    starts: Tensor  # [B] int32
    lens: Tensor  # [B] int32

    @classmethod
    def over(cls, plan: ExtendPlan, window_left: int) -> PromptSlots:
        """View the slot table as one list."""
        slots = plan.req_to_token
        if slots.numel() >= 2**31:
            raise UnsupportedError(
                "backend 'fa3'",
                [f"req_to_token must have less than 2^31 entries, got {slots.numel()}"],
            )
        table = overlapping_rows(slots, max(1, plan.max_seq_len))
        starts = slots.new_zeros(len(plan.seq_lens))
        return cls(plan, window_left, table, starts, starts.clone())

    def fill(self) -> None:
        """Find where each request's keys begin: at its row, or at its first query's window."""
        plan, hidden = self.plan, torch.zeros_like(self.plan.seq_lens)
        if self.window_left >= 0:
            hidden = (plan.seq_lens - self.window_left).clamp(min=0)
        self.starts.copy_(plan.req_pool_indices * plan.req_to_token.stride(0) + hidden)
        self.lens.copy_(plan.seq_lens + plan.qo_indptr.diff() - hidden)

    def arguments(self) -> Arguments:
        """Return the overlapping rows, and which of them."""
        return {
            "page_table": self.table,
            "cache_seqlens": self.lens,
            "cache_batch_idx": self.starts,
        }


@dataclass(frozen=True)
class PromptPages:
    """Prompts page by page."""

    plan: ExtendPlan
    page_size: int
    table: Tensor  # [B, width] int32
    lens: Tensor  # [B] int32

    @classmethod
    def over(cls, plan: ExtendPlan, page_size: int) -> PromptPages:
        """Allocate a table of the pages of the longest prompt."""
        width = -(-max(1, plan.max_seq_len) // page_size)
        table = plan.req_to_token.new_zeros(len(plan.seq_lens), width)
        return cls(plan, page_size, table, table.new_zeros(len(table)))

    def fill(self) -> None:
        """Find the page of the first of every ``page_size`` keys."""
        plan, slots = self.plan, self.plan.req_to_token
        firsts = slots[:, : self.table.shape[1] * self.page_size : self.page_size]
        self.table.copy_(firsts[plan.req_pool_indices] // self.page_size)
        self.lens.copy_(plan.seq_lens + plan.qo_indptr.diff())

    def pages(self, pool: Tensor) -> Tensor:
        """See `Keys.pages`."""
        return whole_pages(pool, self.page_size)

    def arguments(self) -> Arguments:
        """Return the table and its lengths."""
        return {"page_table": self.table, "cache_seqlens": self.lens}


def overlapping_rows(entries: Tensor, width: int) -> Tensor:
    """View dense int32 ``entries`` as a table ``[1, width]`` whose row r begins at entry r.

    FA3 finds a row by its stride alone and reads as many entries as the request has keys, so rows
    past the first are found too.
    """
    return entries.as_strided((1, min(width, entries.numel())), (1, 1))
