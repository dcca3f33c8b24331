"""FlashAttention-3 from `sgl_kernel`, as SGLang's FA3 backend calls it (sglang 0.5.15)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .base import Contestant, ancestor_lists, int32, query_offsets, total_lens

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch
    from ..cases import Case

#: What is called. FA3 ends the process where its library lacks a kernel's device code, as the
#: slimmed one does that these results were made with.
BUILT = {(64, "bfloat16"), (128, "bfloat16"), (128, "float16")}


class _Fa3(Contestant):
    needs = ("sgl_kernel.flash_attn", "sgl_kernel")
    float8 = True

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        found = super().refuses(case)
        if found is None and case.stored:
            return "float8 keys need float8 queries"
        if found is None and (case.head_dim, case.dtype) not in BUILT:
            return f"head_dim {case.head_dim} in {case.dtype} is not tried: see BUILT"
        return found

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        library = import_module("sgl_kernel.flash_attn")
        self.attend: Any = library.flash_attn_with_kvcache
        self.schedule: Any = library.get_scheduler_metadata
        self.queries = query_offsets(batch)
        self.page_table = torch.zeros_like(batch.page_table)
        self.starts = torch.arange(
            0, batch.table.shape[1], batch.case.page_size, device=batch.device
        )

    def fill_pages(self) -> None:
        """Derive the page table from the slot table, as the engine does every step."""
        batch = self.batch
        slots = batch.table[batch.rows[:, None], self.starts]
        torch.div(slots, batch.case.page_size, rounding_mode="floor", out=self.page_table)

    def schedule_of(
        self, table: Tensor, lens: Tensor, queries: Tensor, most: int, page_size: int, causal: bool
    ) -> Tensor:
        case = self.batch.case
        found: Tensor = self.schedule(
            batch_size=len(lens),
            max_seqlen_q=most,
            max_seqlen_k=table.shape[1] * page_size,
            num_heads=case.heads[0],
            num_heads_k=case.heads[1],
            headdim=case.head_dim,
            cache_seqlens=lens,
            qkv_dtype=self.batch.dtype,
            cu_seqlens_q=queries,
            page_size=page_size,
            causal=causal,
            has_softcap=False,
            num_splits=0,
        )
        return found


class Fa3(_Fa3):
    """Decode, chains, draft extend and prompts: one causal call.

    For a decode the engine makes the tile schedule once per step, otherwise every layer does.
    """

    name = "FA3"
    setting = "schedule per layer, for a decode per step"
    modes = ("chain", "extend", "prompt")
    #: Whether the tile schedule is made once per step in place of once per layer.
    ahead: ClassVar[bool] = False

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.lens = int32(total_lens(batch), batch.device)
        self.keys = torch.nn.functional.pad(self.lens.cumsum(0, dtype=torch.int32), (1, 0))
        self.metadata: Tensor | None = None
        self.early = self.ahead or batch.case.q_len == 1

    def plan(self) -> None:
        case = self.batch.case
        self.fill_pages()
        if self.early:
            self.metadata = self.schedule_of(
                self.page_table, self.lens, self.queries, case.q_len, case.page_size, causal=True
            )

    def run(self, pool: int) -> None:
        batch = self.batch
        more = (
            {"scheduler_metadata": self.metadata} if self.early else {"cu_seqlens_k_new": self.keys}
        )
        self.attend(
            q=self.q,
            k_cache=batch.pages(batch.k(pool)),
            v_cache=batch.pages(batch.v(pool)),
            page_table=self.page_table,
            cache_seqlens=self.lens,
            cu_seqlens_q=self.queries,
            max_seqlen_q=batch.case.q_len,
            softmax_scale=batch.scale,
            causal=True,
            num_splits=0,
            out=self.out,
            **more,
        )


class Fa3Ahead(Fa3):
    """The same with the tile schedule made once per step, for chains, too."""

    name = "FA3, schedule ahead"
    setting = "schedule per step"
    modes = ("chain", "extend")
    ahead = True

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "" if case.q_len == 1 else super().refuses(case)


class Fa3Tree(_Fa3):
    """Trees and draft decode: the prefix, then every query token over its ancestors, merged.

    Both tile schedules are made once per step; the engine's, once per layer, were never faster.
    """

    name = "FA3 tree, schedule ahead"
    setting = "2 calls and a merge, schedule per step"
    modes = ("tree", "draft")

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        case, device = batch.case, batch.device
        self.merge: Any = import_module("sgl_kernel").merge_state_v2
        self.singles = torch.arange(len(self.q) + 1, dtype=torch.int32, device=device)
        self.visible = torch.cat([batch.visible(b) for b in range(case.batch)])
        self.table, self.counts = ancestor_lists(batch)
        self.metadata: list[Tensor] = []

    def plan(self) -> None:
        """List pages and ancestors with the operations of the engine."""
        batch, case = self.batch, self.batch.case
        self.fill_pages()
        columns = torch.arange(case.tail, device=batch.device).expand_as(self.visible)
        order = torch.where(self.visible, columns, columns + case.tail).sort(dim=1)[1]
        slots = batch.tails.repeat_interleave(case.q_len, 0)
        torch.gather(slots, 1, order, out=self.table)
        self.counts.copy_(self.visible.sum(1))
        self.metadata = [
            self.schedule_of(
                self.page_table, batch.lens, self.queries, case.q_len, case.page_size, False
            ),
            self.schedule_of(self.table, self.counts, self.singles, 1, 1, False),
        ]

    def run(self, pool: int) -> None:
        batch = self.batch
        k, v = batch.k(pool), batch.v(pool)
        shared: dict[str, Any] = {
            "softmax_scale": batch.scale,
            "causal": False,
            "num_splits": 0,
            "return_softmax_lse": True,
        }
        prefix, prefix_lse, *_ = self.attend(
            q=self.q,
            k_cache=batch.pages(k),
            v_cache=batch.pages(v),
            page_table=self.page_table,
            cache_seqlens=batch.lens,
            cu_seqlens_q=self.queries,
            max_seqlen_q=batch.case.q_len,
            scheduler_metadata=self.metadata[0],
            **shared,
        )
        own, own_lse, *_ = self.attend(
            q=self.q,
            k_cache=k[:, None],
            v_cache=v[:, None],
            page_table=self.table,
            cache_seqlens=self.counts,
            cu_seqlens_q=self.singles,
            max_seqlen_q=1,
            scheduler_metadata=self.metadata[1],
            **shared,
        )
        self.merge(prefix, prefix_lse.T.contiguous(), own, own_lse.T.contiguous(), self.out)
