"""FlashInfer's FA2 kernels over pages, as SGLang's FlashInfer backend calls them, and better.

A plan is made on the host, for the batch at hand: it does not change while a stack is timed, so
it can be captured. How engines plan for graphs (``use_cuda_graph``), with tiles for the most uneven
batch that could follow, was at most 0.5 % faster in any cell, and up to twice as slow.
"""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .base import Contestant, ancestor_lists, branch_lists, full_mask, int32, total_lens

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch
    from ..cases import Case

WORKSPACE = 2**31


class Workspace:
    """One float workspace for all wrappers: they never run at the same time."""

    _held: ClassVar[dict[torch.device, Tensor]] = {}

    @classmethod
    def of(cls, device: torch.device) -> Tensor:
        if device not in cls._held:
            cls._held[device] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        return cls._held[device]


def page_lists(batch: Batch, lens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets, pages and filling of the last page of every request's first ``lens`` keys."""
    size, device = batch.case.page_size, batch.device
    counts = [-(-n // size) for n in lens]
    pages = torch.cat([batch.page_table[b, :count] for b, count in enumerate(counts)])
    offsets = [0, *accumulate(counts)]
    last = [n - (count - 1) * size for n, count in zip(lens, counts, strict=True)]
    return int32(offsets, device), pages, int32(last, device)


class _FlashInfer(Contestant):
    needs = ("flashinfer",)
    device_plan = False
    backend: ClassVar[str] = "fa2"

    def pools(self, pool: int) -> tuple[Tensor, Tensor]:
        batch = self.batch
        return batch.pages(batch.k(pool)), batch.pages(batch.v(pool))

    def heads(self) -> dict[str, Any]:
        batch, case = self.batch, self.batch.case
        return {
            "num_qo_heads": case.heads[0],
            "num_kv_heads": case.heads[1],
            "sm_scale": batch.scale,
            "q_data_type": batch.dtype,
            "kv_data_type": batch.kv_dtype,
        }

    def scales(self) -> dict[str, float]:
        """Return what `run` takes besides, for float8 pools."""
        scale = self.batch.kv_scale
        return {"k_scale": scale, "v_scale": scale} if self.batch.case.stored else {}


class _Planned(_FlashInfer):
    """One call of the prefill wrapper: a mask for trees, causal for the rest."""

    float8 = True

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.queries = int32(batch.offsets, batch.device)
        self.lists = page_lists(batch, total_lens(batch))
        self.mask = full_mask(batch) if batch.case.mode == "tree" else None
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self.wrapper = wrapper(Workspace.of(batch.device), "NHD", backend=self.backend)

    def plan(self) -> None:
        case = self.batch.case
        self.wrapper.plan(
            self.queries,
            *self.lists,
            head_dim_qk=case.head_dim,
            page_size=case.page_size,
            custom_mask=self.mask,
            causal=self.mask is None,
            **self.heads(),
        )

    def run(self, pool: int) -> None:
        self.wrapper.run(self.q, self.pools(pool), out=self.out, **self.scales())


class FlashInferMask(_Planned):
    """Tree verify with its custom mask, planned for the batch at hand."""

    name = "FlashInfer mask"
    setting = "plan for this batch"
    modes = ("tree",)


class FlashInferCausal(_Planned):
    """Chains, draft extend and prompts: one causal call."""

    name = "FlashInfer causal"
    setting = "plan for this batch"
    modes = ("chain", "extend", "prompt")

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "" if case.mode == "chain" and case.q_len == 1 else super().refuses(case)


class FlashInferDecode(_FlashInfer):
    """Decode, and draft decode with every branch a request of its own."""

    name = "FlashInfer decode"
    setting = "tensor cores from 4 heads per KV head on"
    modes = ("chain", "draft")
    float8 = True

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        if case.mode == "chain" and case.q_len > 1:
            return ""
        if case.mode == "draft" and case.page_size > 1:
            return "branches share pages"
        return super().refuses(case)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        case, device = batch.case, batch.device
        if case.mode == "draft":
            offsets, slots = branch_lists(batch)
            last = torch.ones(len(self.q), dtype=torch.int32, device=device)
            self.lists = (int32(offsets, device), slots, last)
        else:
            self.lists = page_lists(batch, total_lens(batch))
        wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
        self.wrapper = wrapper(
            Workspace.of(device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=case.heads[0] // case.heads[1] >= 4,
            paged_kv_indptr_buffer=self.lists[0].clone(),
            paged_kv_indices_buffer=self.lists[1].clone(),
            paged_kv_last_page_len_buffer=self.lists[2].clone(),
        )

    def plan(self) -> None:
        case = self.batch.case
        self.wrapper.plan(
            *self.lists, head_dim=case.head_dim, page_size=case.page_size, **self.heads()
        )

    def run(self, pool: int) -> None:
        self.wrapper.run(self.q, self.pools(pool), out=self.out, **self.scales())


class FlashInferCascade(_FlashInfer):
    """Draft decode in two levels: the shared prefix, then every branch's own keys."""

    name = "FlashInfer cascade"
    setting = "2 levels"
    modes = ("draft",)
    needs = ("flashinfer.cascade",)

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "branches share pages" if case.page_size > 1 else super().refuses(case)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        device, topk = batch.device, batch.case.q_len
        slots, counts = ancestor_lists(batch)
        branches = [0, *accumulate(counts.tolist())]
        own = torch.cat([slots[row, :n] for row, n in enumerate(counts.tolist())])
        prefix = page_lists(batch, list(batch.case.lengths))
        ones = torch.ones(len(self.q), dtype=torch.int32, device=device)
        self.levels: tuple[list[Tensor], ...] = (
            [
                int32(list(range(0, len(self.q) + 1, topk)), device),
                int32(list(range(len(self.q) + 1)), device),
            ],
            [prefix[0], int32(branches, device)],
            [prefix[1], own],
            [prefix[2], ones],
        )
        wrapper = import_module("flashinfer.cascade").MultiLevelCascadeAttentionWrapper
        self.wrapper = wrapper(2, Workspace.of(device), "NHD")
        # "auto" picks FA3 for a level without a mask; that module may not be built
        for level in self.wrapper._batch_prefill_wrappers:
            level._backend = self.backend

    def plan(self) -> None:
        case = self.batch.case
        self.wrapper.plan(
            *self.levels, head_dim=case.head_dim, page_size=1, causal=False, **self.heads()
        )

    def run(self, pool: int) -> None:
        self.out = self.wrapper.run(self.q, self.pools(pool))
