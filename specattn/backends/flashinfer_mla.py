"""Absorbed latent attention through FlashInfer's `BatchMLAPagedAttentionWrapper`.

It is host-planned, like `specattn.backends.flashinfer`: a plan is made before every step and
lies in a buffer of fixed address, which a recorded ``run`` reads. Pages are single slots of the
latent pool (DeepSeek-V2, arXiv:2405.04434; see docs/mla.md). The wrapper knows causal or no masks,
so trees are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import BoundAttention, Capabilities, latent_reasons
from specattn.backends.flashinfer_plan import (
    BranchLists,
    FlashInferLayer,
    Lists,
    Planned,
    PromptLists,
    RequestLists,
)
from specattn.checks import require_dense
from specattn.errors import UnsupportedError
from specattn.kernels.mla import check_latent
from specattn.plan import CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import AttnConfig

#: What FlashInfer's kernels are built ahead for: latent and rotated columns of a row.
RANK, ROPE = 512, 64
#: Query rows (tokens times heads) of its larger tile. Its causal kernels end a tile's keys with
#: the last token that is whole, so a token must not straddle two tiles.
TILE = 128
#: Entries FlashInfer reserves for the pieces of a plan, without checking.
MAX_PIECES = 16384
#: Partial results: 128 rows of 512 16-bit numbers per multiprocessor, 17 MB for 132 of them.
FLOAT_BYTES = 64 << 20


class FlashInferMlaBackend(FlashInferLayer):
    """FlashInfer's MLA wrapper: causal ``latent`` layers in bfloat16."""

    name: ClassVar[str] = "flashinfer_mla"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True,
        host_plan=True,
        trees=False,
        window=False,
        cap=False,
        dtypes=(torch.bfloat16,),
    )

    @classmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say which widths, head counts and scales stand in the way."""
        found = latent_reasons(config, [(RANK, ROPE)])
        if config.latent and TILE % config.num_qo_heads:
            found.append(f"num_qo_heads must divide {TILE}, got {config.num_qo_heads}")
        return found + super().geometry(config)

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to a causal plan that FlashInfer can plan; refuse others."""
        if isinstance(plan, CsrPlan):
            return MlaAttention(self, BranchLists(plan, self.name), 1)
        if isinstance(plan, ExtendPlan):
            return MlaAttention(self, PromptLists(plan), plan.max_q_len)
        if not plan.layout.causal:
            raise UnsupportedError(
                "backend 'flashinfer_mla'",
                ["trees are not served: FlashInfer's MLA kernels take no mask but a causal one"],
            )
        lists = RequestLists(plan, plan.batch, -1, self.name)
        return MlaAttention(self, lists, plan.layout.q_len)


class MlaAttention(Planned):
    """One causal call over a list per request.

    Prompts are eager, all else is planned into buffers that a graph may have recorded.
    """

    def __init__(self, backend: FlashInferMlaBackend, lists: Lists, q_len: int) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        super().__init__(backend, lists)
        self._processors, self._q_len = backend.processors(), q_len
        self._eager = isinstance(lists, PromptLists)
        buffers: dict[str, Any] = {}
        if not self._eager:
            self._check_pieces(lists.rows)
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr": torch.zeros_like(lists.indptr),
                "kv_indptr": lists.indptr,
                "kv_indices": lists.indices,
                "kv_len_arr": lists.indptr[1:].clone(),
            }
        self.wrapper = BatchMLAPagedAttentionWrapper(backend.floats(FLOAT_BYTES), **buffers)

    def plan_lists(self, rows: Tensor, offsets: Tensor) -> None:
        """Plan the lists' lengths."""
        config, lens, indices = self.config, offsets.diff(), self.lists.indices
        if self._eager:
            # FlashInfer sizes its tiles by the mean, which requests without tokens would skew
            some = rows.diff() > 0
            if not some.any():
                return
            rows, offsets = (torch.cat([at[:-1][some], at[-1:]]) for at in (rows, offsets))
            lens = lens[some]
        self._check_pieces(rows)
        with self.staging():
            self.wrapper.plan(
                qo_indptr=rows,
                kv_indptr=offsets,
                kv_indices=indices if self._eager else indices[:0],
                kv_len_arr=lens,
                num_heads=config.num_qo_heads,
                head_dim_ckv=RANK,
                head_dim_kpe=ROPE,
                page_size=1,
                causal=self._eager or self._q_len > 1,
                sm_scale=config.sm_scale,
                q_data_type=config.dtype,
                kv_data_type=config.dtype,
            )

    def _check_pieces(self, rows: Tensor) -> None:
        """Raise where FlashInfer would write past what it reserves for a plan."""
        packed = rows.diff().long() * self.config.num_qo_heads
        tile = TILE if int(packed.sum()) // len(packed) > TILE // 2 else TILE // 2
        # every tile is a piece, and its keys are split into one more per multiprocessor at most
        pieces = int(((packed + tile - 1) // tile).sum()) + self._processors
        if pieces > MAX_PIECES:
            raise UnsupportedError(
                "backend 'flashinfer_mla'",
                [
                    f"{int(rows[-1])} query tokens of {self.config.num_qo_heads} heads are "
                    f"{pieces} pieces of work, FlashInfer plans up to {MAX_PIECES}"
                ],
            )

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        if not len(q):
            return
        check_latent(k_cache, v_cache)
        require_dense(out=out, lse=lse)
        self.wrapper.run(
            q[..., :RANK],
            q[..., RANK:],
            k_cache[..., :RANK],
            k_cache[..., RANK:],
            out=out,
            lse=lse,
            return_lse=lse is not None,
            return_lse_base_on_e=True,
        )
