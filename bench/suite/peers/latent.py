"""Peers for absorbed latent attention: FlashInfer MLA, FlashMLA and FA3 with its ``qv`` input."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .base import Contestant, int32, query_offsets, total_lens
from .flashinfer import Workspace, page_lists

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch
    from ..cases import Case

RANK = 512


class _Latent(Contestant):
    modes = ("chain",)
    pages: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        if case.mode not in cls.modes or not case.latent:
            return ""
        if cls.pages and case.page_size not in cls.pages:
            return f"pages of {', '.join(map(str, cls.pages))} only"
        return None

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.lens = int32(total_lens(batch), batch.device)

    def latent(self, pool: int) -> Tensor:
        """``[pages, page size, 1, 576]``."""
        return self.batch.pages(self.batch.k(pool))


class FlashInferMla(_Latent):
    """Its MLA wrapper with the FA3 kernels, which it prefers on Hopper."""

    name = "FlashInfer MLA"
    setting = "backend fa3"
    needs = ("flashinfer.mla",)
    device_plan = False

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.queries = query_offsets(batch)
        self.lists = page_lists(batch, total_lens(batch))[:2]
        self.q_parts = batch.q[..., :RANK].contiguous(), batch.q[..., RANK:].contiguous()
        wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        self.wrapper = wrapper(
            Workspace.of(batch.device),
            use_cuda_graph=True,
            qo_indptr=self.queries.clone(),
            kv_indptr=self.lists[0].clone(),
            kv_indices=self.lists[1].clone(),
            kv_len_arr=self.lens.clone(),
            backend="fa3",
        )

    def plan(self) -> None:
        batch, case = self.batch, self.batch.case
        self.wrapper.plan(
            self.queries,
            *self.lists,
            self.lens,
            case.heads[0],
            RANK,
            64,
            case.page_size,
            case.q_len > 1,
            batch.scale,
            batch.dtype,
            batch.dtype,
        )

    def run(self, pool: int) -> None:
        rows = self.latent(pool).squeeze(2)
        self.wrapper.run(*self.q_parts, rows[..., :RANK], rows[..., RANK:], out=self.out)


class FlashMla(_Latent):
    """DeepSeek's kernels as `sgl_kernel` ships them."""

    name = "FlashMLA"
    needs = ("sgl_kernel.flash_mla",)
    pages = (64,)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.library: Any = import_module("sgl_kernel.flash_mla")
        self.shape = (batch.case.batch, batch.case.q_len)
        self.schedule: tuple[Tensor, Tensor] | None = None

    def plan(self) -> None:
        case = self.batch.case
        self.schedule = self.library.get_mla_metadata(self.lens, case.q_len * case.heads[0], 1)

    def run(self, pool: int) -> None:
        assert self.schedule is not None
        found, _ = self.library.flash_mla_with_kvcache(
            self.q.unflatten(0, self.shape),
            self.latent(pool),
            self.batch.page_table,
            self.lens,
            RANK,
            *self.schedule,
            softmax_scale=self.batch.scale,
            causal=self.shape[1] > 1,
        )
        self.out = found.flatten(0, 1)


class Fa3Latent(_Latent):
    """FA3 over the rotated columns with the latent ones as ``qv``, as SGLang's FA3 backend."""

    name = "FA3 MLA"
    needs = ("sgl_kernel.flash_attn",)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.attend: Any = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
        self.queries = query_offsets(batch)
        self.keys = torch.nn.functional.pad(self.lens.cumsum(0, dtype=torch.int32), (1, 0))
        self.q_parts = batch.q[..., :RANK].contiguous(), batch.q[..., RANK:].contiguous()

    def run(self, pool: int) -> None:
        rows = self.latent(pool)
        self.out = self.attend(
            q=self.q_parts[1],
            qv=self.q_parts[0],
            k_cache=rows[..., RANK:],
            v_cache=rows[..., :RANK],
            page_table=self.batch.page_table,
            cache_seqlens=self.lens,
            cu_seqlens_q=self.queries,
            cu_seqlens_k_new=self.keys,
            max_seqlen_q=self.batch.case.q_len,
            softmax_scale=self.batch.scale,
            causal=True,
            num_splits=0,
        )
