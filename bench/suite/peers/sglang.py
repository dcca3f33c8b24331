"""SGLang's Triton attention, as its Triton backend calls it (sglang 0.5.15)."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from .base import (
    Contestant,
    branch_lists,
    full_mask,
    int32,
    mask_offsets,
    query_offsets,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch
    from ..cases import Case

#: The most parts of a request, by default.
SPLITS = 8
OPS = "sglang.srt.layers.attention.triton_ops"


class _Sglang(Contestant):
    needs = (f"{OPS}.extend_attention", f"{OPS}.metadata", f"{OPS}.kv_indices")

    def lists(self, lens: Tensor) -> None:
        """Make the buffers of an index list per request."""
        batch = self.batch
        self.list_lens = lens
        self.kv_indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=batch.device)
        total = int(lens.sum())
        self.kv_indices = torch.zeros(max(1, total), dtype=torch.int64, device=batch.device)
        self._fill = import_module(f"{OPS}.kv_indices").create_flashinfer_kv_indices_triton

    def fill_lists(self) -> None:
        batch = self.batch
        torch.cumsum(self.list_lens, 0, out=self.kv_indptr[1:])
        self._fill[(batch.case.batch,)](
            batch.table,
            batch.rows,
            self.list_lens,
            self.kv_indptr,
            None,
            self.kv_indices,
            batch.table.stride(0),
        )


class SglangExtend(_Sglang):
    """Verify, draft extend and prompts: the prompt kernel, with a mask for trees."""

    name = "SGLang extend"
    modes = ("tree", "chain", "extend", "prompt")

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "" if case.mode == "chain" and case.q_len == 1 else super().refuses(case)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.qo_indptr = query_offsets(batch)
        self.lists(batch.lens)
        tails = torch.cat([batch.tails[b, :n] for b, n in enumerate(batch.accepted)]).long()
        # the engine has the new keys and values at hand; those of pool 0, where results count
        self.k_new, self.v_new = batch.k(0)[tails].contiguous(), batch.v(0)[tails].contiguous()
        self.mask = self.mask_indptr = None
        if batch.case.mode == "tree":
            self.mask = full_mask(batch)
            self.mask_indptr = torch.tensor(mask_offsets(batch), device=batch.device)
        self.call: Any = import_module(f"{OPS}.extend_attention").extend_attention_fwd

    def plan(self) -> None:
        self.fill_lists()

    def run(self, pool: int) -> None:
        batch = self.batch
        self.call(
            self.q,
            self.k_new,
            self.v_new,
            self.out,
            batch.k(pool),
            batch.v(pool),
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.mask,
            True,
            self.mask_indptr,
            batch.case.q_len,
            1.0,
            1.0,
            sm_scale=batch.scale,
            page_size=batch.case.page_size,
        )


class SglangDecode(_Sglang):
    """Decode, and draft decode with every branch a request of its own; 8 splits at most."""

    name = "SGLang decode"
    modes = ("chain", "draft")
    needs = (f"{OPS}.decode_attention", *_Sglang.needs[1:])

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        if case.mode not in cls.modes or (case.mode == "chain" and case.q_len > 1):
            return ""
        return super().refuses(replace(case, latent=False))

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        case, device = batch.case, batch.device
        rows, heads = len(self.q), case.heads[0]
        self.group = rows // case.batch
        if case.mode == "draft":
            offsets, slots = branch_lists(batch)
            self.kv_indptr, self.kv_indices = int32(offsets, device), slots.long()
        else:
            self.lists(batch.lens + 1)
        self.split_lens = batch.lens + (1 if case.mode == "chain" else 0)
        self.logits = torch.empty(rows, heads, SPLITS, case.v_dim, device=device)
        self.sums = torch.empty(rows, heads, SPLITS, device=device)
        self.num_splits = torch.zeros(rows, dtype=torch.int32, device=device)
        self.cores = torch.cuda.get_device_properties(device).multi_processor_count
        self.count: Any = import_module(f"{OPS}.metadata").get_num_kv_splits_triton
        self.call: Any = import_module(f"{OPS}.decode_attention").decode_attention_fwd

    def plan(self) -> None:
        """Count the splits; the index lists of a draft are not counted."""
        case = self.batch.case
        if case.mode == "chain":
            self.fill_lists()
        self.count[(1,)](
            self.num_splits,
            self.split_lens,
            case.batch,
            self.group,
            case.heads[0],
            case.heads[1],
            SPLITS,
            self.cores,
            MAX_NUM_SEQ=max(256, 1 << (case.batch - 1).bit_length()),
        )

    def run(self, pool: int) -> None:
        batch = self.batch
        self.call(
            self.q,
            batch.k(pool),
            batch.v(pool),
            self.out,
            self.kv_indptr,
            self.kv_indices,
            self.logits,
            self.sums,
            self.num_splits,
            SPLITS,
            batch.scale,
            1.0,
            1.0,
            has_mla=batch.case.latent,
            use_pdl=True,
            page_size=batch.case.page_size,
        )
