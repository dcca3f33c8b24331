"""FlashAttention-3 (`sgl_kernel`) over page tables, planned on the device.

`flash_attn_with_kvcache` reads KV through ``page_table`` and ``cache_seqlens``, under a causal mask
or none; it knows no trees. Tables say what it reads, so no KV is ever copied:

- a causal layout is one call over the prefix followed by the tail;
- a tree is a pass over the prefix, and a pass in which every query token is a request of its own
  over the list of its ancestors, merged by their lse;
- prompts are one causal call.

Keys that lie in pages are listed page by page. Tails of trees, and whatever a window cuts, are
listed slot by slot, over the same pool seen as pages of one slot.

A window counts list entries from the end of the list. On a causal layout that is the distance in
positions; in a tree it is not, so trees under a window are refused.

Which tiles each multiprocessor takes follows from lengths. FA3 would find that out in every layer;
here it does once per `fill`, for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from specattn.backends.base import BoundAttention, Capabilities, head_reasons
from specattn.backends.paged import BoundPages, Keys, PagedBackend
from specattn.errors import UnsupportedError
from specattn.kernels.attention import merge_lse
from specattn.kernels.indices import fill_ancestor_table, fill_page_table
from specattn.plan import AttnPlan, ExtendPlan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.paged import Place
    from specattn.config import AttnConfig

#: FA3 has more; these are the sizes it is tested with here.
HEAD_DIMS = (64, 128)
#: Where a page is whole tiles of its kernels' keys (128), FA3 may load it past the request's last
#: key, and memory that nobody wrote may hold NaN. Larger pages are read in parts of this size.
MAX_PAGE = 64
#: Entries of a slot table that FA3 can be shown as one row.
MAX_ENTRIES = 2**31


class Fa3Backend(PagedBackend):
    """FlashAttention-3 on Hopper, over pages of any size.

    `bind` refuses trees under a window (any layout that is not causal, with ``window_left`` of 0 or
    more), index lists, and prompts that are read slot by slot through a table of 2^31 entries or
    more; every other combination of the capabilities is served.
    """

    name: ClassVar[str] = "fa3"
    capabilities: ClassVar[Capabilities] = replace(
        PagedBackend.capabilities, trees=True, extend=True
    )
    module: ClassVar[str] = "sgl_kernel.flash_attn"
    page_sizes: ClassVar[tuple[int, ...]] = (1,)
    page_size: ClassVar[int] = 1

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        super().__init__(config, device)
        if not hasattr(self.library, "get_scheduler_metadata"):
            raise UnsupportedError(
                f"backend {self.name!r}",
                [f"{self.module} must have get_scheduler_metadata (sglang-kernel 0.4.4 does)"],
            )

    @classmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        return head_reasons(config, HEAD_DIMS)

    def refusals(self, plan: AttnPlan | ExtendPlan) -> list[str]:
        """Say why `bind` refuses a plan; empty means that it serves."""
        window = self.config.window_left
        if isinstance(plan, ExtendPlan):
            entries = plan.req_to_token.numel()
            if page_of(plan.page_size, window) == 1 and entries >= MAX_ENTRIES:
                return [f"req_to_token must have less than 2^31 entries, got {entries}"]
        elif not plan.layout.causal and window >= 0:
            left = f"window_left {window} counts positions (tree depth)"
            return [f"{left}, FA3's window counts list entries"]
        return []

    def attention(self, plan: AttnPlan | ExtendPlan) -> BoundAttention:
        """Bind to the plan's kind."""
        window = self.config.window_left
        if isinstance(plan, ExtendPlan):
            keys = keys_of_prompts(plan, window)
        elif plan.layout.causal:
            keys = keys_of_chains(plan, window)
        else:
            return Fa3Tree.over(self, plan)
        return BoundPages(self, plan, keys, (self.schedule(keys, Queries.of(plan, window)),))

    def plan(self, bound: BoundPages) -> None:
        """Schedule the tiles anew, where the plan was bound."""
        queries = Queries.of(bound.plan, self.config.window_left)
        bound.scratch[0].copy_(self.schedule(bound.keys, queries))

    def attend(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, out: Place, lse: Place
    ) -> Tensor:
        """Attend in one causal call: to chains, or ragged prompts."""
        plan = bound.plan
        shape = (len(q),) if isinstance(plan, ExtendPlan) else bound.shape
        found, sums = self.call(
            q.unflatten(0, shape),
            k,
            v,
            None if out is None else out.unflatten(0, shape),
            bound.keys,
            queries=Queries.of(plan, self.config.window_left),
            schedule=bound.scratch[0],
        )
        if lse is not None:
            lse.unflatten(0, shape).copy_(sums.transpose(-1, -2))
        return found.flatten(0, -3) if out is None else out

    def schedule(self, keys: Keys, queries: Queries) -> Tensor:
        """Let FA3 share out a call's tiles, on the device.

        Returns numbers of FA3's own, int32. Every `call` with the same lengths may be given them:
        FA3 puts back what a call changes.
        """
        config = self.config
        found: Tensor = self.library.get_scheduler_metadata(
            batch_size=len(keys.lens),
            max_seqlen_q=queries.most,
            # as `call` shows the table
            max_seqlen_k=keys.most,
            num_heads=config.num_qo_heads,
            num_heads_k=config.num_kv_heads,
            headdim=config.head_dim,
            cache_seqlens=keys.lens,
            qkv_dtype=config.dtype,
            cu_seqlens_q=queries.indptr,
            page_size=keys.page_size,
            causal=queries.causal,
            window_size=queries.window,
            has_softcap=config.logit_cap > 0,
        )
        return found

    def call(  # noqa: PLR0913 - as its docstring says
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor | None,
        keys: Keys,
        *,
        queries: Queries,
        schedule: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Call FA3; returns ``out`` and the natural lse.

        q is ``[B, q_len, Hq, D]`` and the lse ``[B, Hq, q_len]``; where ``queries`` are ragged,
        they are ``[T, Hq, D]`` and ``[Hq, T]``.
        """
        result: tuple[Tensor, ...] = self.library.flash_attn_with_kvcache(
            q,
            keys.pages(k_cache),
            keys.pages(v_cache),
            out=out,
            page_table=keys.table,
            cache_seqlens=keys.lens,
            cache_batch_idx=keys.rows,
            cu_seqlens_q=queries.indptr,
            max_seqlen_q=None if queries.indptr is None else queries.most,
            causal=queries.causal,
            window_size=queries.window,
            softmax_scale=self.config.sm_scale,
            softcap=self.config.logit_cap,
            scheduler_metadata=schedule,
            return_softmax_lse=True,
        )
        return result[0], result[1]


class Queries(NamedTuple):
    """The query tokens of a call, and what they see.

    Parameters
    ----------
    most : int
        Of a list of keys, at most.
    indptr : Tensor or None
        ``[lists + 1]`` int32, offsets of each list's; None if each has ``most``.
    causal : bool
        Whether the last one sees the whole list, each one before it a key less; else all do.
    window_left : int
        As in `AttnConfig`, by entries of the list.
    """

    most: int
    indptr: Tensor | None = None
    causal: bool = False
    window_left: int = -1

    @classmethod
    def of(cls, plan: AttnPlan | ExtendPlan, window_left: int) -> Queries:
        """Return those of a causal plan."""
        if isinstance(plan, ExtendPlan):
            return cls(plan.max_q_len, plan.qo_indptr, causal=True, window_left=window_left)
        most = plan.layout.q_len
        # the list of a single query token ends at its window already
        return cls(most, causal=True, window_left=window_left if most > 1 else -1)

    @property
    def window(self) -> tuple[int, int]:
        """The window as FA3 takes it."""
        return self.window_left, -1 if self.window_left < 0 else 0


def page_of(page_size: int, window_left: int = -1) -> int:
    """Return a table entry's slots: 1 where a window cuts pages."""
    return 1 if window_left >= 0 else min(page_size, MAX_PAGE)


def keys_of_chains(plan: AttnPlan, window_left: int) -> Keys:
    """List prefix and tail of every request, from its window on."""
    if (page := page_of(plan.layout.page_size, window_left)) > 1:
        return Keys.in_pages(plan, page)
    width = plan.req_to_token.shape[1] + plan.layout.tail
    if window_left >= 0:
        width = min(width, window_left + plan.layout.q_len)
    table = plan.req_to_token.new_zeros(plan.batch, width)
    lens = table.new_zeros(plan.batch)

    def fill() -> None:
        fill_page_table(
            plan.key_slots,
            table=table,
            lens=lens,
            q_len=plan.layout.q_len,
            window_left=window_left,
        )

    return Keys(table, lens, fill)


def keys_of_prefixes(plan: AttnPlan) -> Keys:
    """List the keys before a tail, by pages or ``req_to_token`` itself."""
    if (page := page_of(plan.layout.page_size)) > 1:
        # what the table says of the tail is not read
        return replace(Keys.in_pages(plan, page), lens=plan.seq_lens)
    rows = plan.req_to_token.new_zeros(plan.batch)

    def fill() -> None:
        rows.copy_(plan.req_pool_indices)

    return Keys(plan.req_to_token, plan.seq_lens, fill, rows=rows)


def keys_of_prompts(plan: ExtendPlan, window_left: int) -> Keys:
    """List every prompt's keys, by pages or in ``req_to_token`` itself."""
    slots, page = plan.req_to_token, page_of(plan.page_size, window_left)
    lens = slots.new_zeros(len(plan.seq_lens))
    if page > 1:
        table = slots.new_zeros(len(lens), -(-max(1, plan.max_seq_len) // page))

        def fill_pages() -> None:
            # the page of the first of every ``page`` keys
            firsts = slots[:, : table.shape[1] * page : page]
            table.copy_(firsts[plan.req_pool_indices] // page)
            torch.add(plan.seq_lens, plan.qo_indptr.diff(), out=lens)

        return Keys(table, lens, fill_pages, page)
    # The slot table as one row, whose "row" r begins at entry r: FA3 finds a row by its stride
    # alone and reads as many entries as the request has keys.
    width = min(max(1, plan.max_seq_len), slots.numel())
    starts = torch.zeros_like(lens)

    def fill_slots() -> None:
        # each of these is a launch
        torch.mul(plan.req_pool_indices, slots.stride(0), out=starts)
        torch.sub(plan.qo_indptr[1:], plan.qo_indptr[:-1], out=lens)
        lens.add_(plan.seq_lens)
        if window_left >= 0:
            hidden = (plan.seq_lens - window_left).clamp(min=0)
            starts.add_(hidden)
            lens.sub_(hidden)

    return Keys(slots.as_strided((1, width), (1, 1)), lens, fill_slots, rows=starts)


@dataclass(frozen=True)
class Pass:
    """Query tokens that all see their lists, in every layer.

    Parameters
    ----------
    backend : Fa3Backend
        What attends.
    keys : Keys
        The lists.
    queries : Queries
        As many for each list.
    schedule : Tensor
        What `Fa3Backend.schedule` returns of them.
    """

    backend: Fa3Backend
    keys: Keys
    queries: Queries
    schedule: Tensor

    @classmethod
    def over(cls, backend: Fa3Backend, keys: Keys, q_len: int) -> Pass:
        """Allocate its schedule."""
        queries = Queries(q_len)
        return cls(backend, keys, queries, backend.schedule(keys, queries))

    def fill(self) -> None:
        """List the keys, and schedule the tiles."""
        self.keys.fill()
        self.schedule.copy_(self.backend.schedule(self.keys, self.queries))

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend; see `Fa3Backend.call`."""
        queries, schedule = self.queries, self.schedule
        return self.backend.call(
            q, k_cache, v_cache, out, self.keys, queries=queries, schedule=schedule
        )


@dataclass(frozen=True)
class Fa3Tree(BoundAttention):
    """A tree in two passes, over prefixes and ancestors, then merged."""

    plan: AttnPlan
    prefixes: Pass
    ancestors: Pass  # of every query token, as if it were a request

    @classmethod
    def over(cls, backend: Fa3Backend, plan: AttnPlan) -> Fa3Tree:
        """Allocate the lists of ancestors."""
        queries = plan.batch * plan.layout.q_len
        table = plan.req_to_token.new_zeros(queries, plan.layout.tail)
        lens = table.new_zeros(queries)

        def fill() -> None:
            fill_ancestor_table(plan.tail_slots, plan.tail_words, table=table, lens=lens)

        prefixes = Pass.over(backend, keys_of_prefixes(plan), plan.layout.q_len)
        return cls(plan, prefixes, Pass.over(backend, Keys(table, lens, fill), 1))

    def fill(self) -> None:
        """List the prefixes, and the ancestors unless `run` will know them."""
        self.prefixes.fill()
        if not self.plan.grows:
            self.ancestors.fill()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, ancestors = self.plan, self.ancestors
        shape = (plan.batch, plan.layout.q_len)
        if plan.grows:
            ancestors.fill()
        merged = out.unflatten(0, shape)
        _, prefix_lse = self.prefixes.run(q.unflatten(0, shape), k_cache, v_cache, merged)
        tail_out, tail_lse = ancestors.run(q[:, None], k_cache, v_cache, None)
        merge_lse(
            merged,
            prefix_lse.transpose(1, 2),
            plan.seq_lens,
            tail_out.view(merged.shape),
            tail_lse.view(*shape, -1),
            ancestors.keys.lens.view(shape),
            merged,
            None if lse is None else lse.unflatten(0, shape),
        )
