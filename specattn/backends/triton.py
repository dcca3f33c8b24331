"""Attention in Triton: one kernel for every tree mode, planned on the device.

On a machine without CUDA the kernels run in Triton's interpreter, which is switched on here; it
is exact and slow, and meant for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from specattn.backends.base import BoundAttention, Capabilities
from specattn.backends.triton_bound import (
    Scratch,
    TritonCsr,
    TritonTree,
    float8_reasons,
    interpret,
    platform_reasons,
)
from specattn.backends.triton_deterministic import FixedCsr, FixedTree
from specattn.config import FLOAT8, UNSCALED, KVScales
from specattn.cuda_graph.capture_guard import Settable
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specattn.config import AttnConfig
    from specattn.kernels.attention.deterministic import FixedAttention
    from specattn.kernels.attention.tree import TreeAttention

MAX_HEAD_DIM = 256


class TritonBackend(Settable):
    """The library's own kernels.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        A CUDA device, or the CPU (interpreter).
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, kv_dtypes=(FLOAT8,), deterministic=True
    )

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        if device.type == "cpu":
            interpret()
        self.config = config
        self.device = device
        self._scratch = Scratch(device)

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = platform_reasons(config, device)
        if config is None:
            return found
        if max(config.head_dim, config.v_head_dim) > MAX_HEAD_DIM:
            found.append(f"head_dim is limited to {MAX_HEAD_DIM}, got {config.head_dim}")
        return found + float8_reasons(config, device)

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind."""
        if isinstance(plan, AttnPlan):
            layout = plan.layout
            if self.config.deterministic:
                fixed = self._fixed(plan.batch, layout.q_len, layout.tail, plan.req_to_token)
                return FixedTree(plan, fixed)
            kernel = self._kernel(
                plan.batch, layout.q_len, layout.tail, csr=False, page_size=layout.page_size
            )
            return TritonTree(plan, kernel)
        if isinstance(plan, CsrPlan):
            lists = len(plan.kv_indptr) - 1
            if self.config.deterministic:
                return FixedCsr(plan, self._fixed(lists, 1, 0, plan.kv_indices))
            kernel = self._kernel(lists, 1, 0, csr=True)
            return TritonCsr(plan, kernel)
        return TritonExtend(self.config, plan)

    def _kernel(
        self, batch: int, q_len: int, tail_len: int, *, csr: bool, page_size: int = 1
    ) -> TreeAttention:
        from specattn.kernels.attention.tree import TreeAttention

        config = self.config
        shape: dict[str, Any] = {
            "batch": batch,
            "q_len": q_len,
            "num_qo_heads": config.num_qo_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "v_head_dim": config.v_head_dim,
            "dtype": config.dtype,
            "device": self.device,
            "logit_cap": config.logit_cap,
            "page_size": page_size,
            "kv_dtype": config.kv_dtype,
        }
        return TreeAttention(
            **shape,
            tail_len=tail_len,
            sm_scale=config.sm_scale,
            window_left=config.window_left,
            csr=csr,
            workspace=self._scratch.of(TreeAttention.workspace_bytes(**shape)),
        )

    def _fixed(self, batch: int, q_len: int, tail_len: int, indices: Tensor) -> FixedAttention:
        from specattn.kernels.attention.deterministic import FixedAttention

        config = self.config
        shape: dict[str, Any] = {
            "batch": batch,
            "q_len": q_len,
            "tail_len": tail_len,
            "num_qo_heads": config.num_qo_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "v_head_dim": config.v_head_dim,
            "dtype": config.dtype,
            "device": self.device,
            "max_keys": indices.shape[-1],
            "csr": not tail_len,
            "split_keys": config.split_keys,
            "kv_dtype": config.kv_dtype,
        }
        return FixedAttention(
            **shape,
            sm_scale=config.sm_scale,
            window_left=config.window_left,
            logit_cap=config.logit_cap,
            workspace=self._scratch.of(FixedAttention.workspace_bytes(**shape)),
        )


@dataclass(frozen=True)
class TritonExtend(BoundAttention):
    """A ragged prompt extend."""

    config: AttnConfig
    plan: ExtendPlan
    scales: KVScales = UNSCALED

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return the same with a layer's scales; see `BoundAttention.for_layer`."""
        return self if scales is None else replace(self, scales=scales)

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        from specattn.kernels.attention.extend import extend_attention

        plan, config = self.plan, self.config
        extend_attention(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            qo_indptr=plan.qo_indptr,
            seq_lens=plan.seq_lens,
            req_pool_indices=plan.req_pool_indices,
            req_to_token=plan.req_to_token,
            max_q_len=plan.max_q_len,
            page_size=plan.page_size,
            sm_scale=config.sm_scale,
            window_left=config.window_left,
            logit_cap=config.logit_cap,
            k_scale=self.scales.k,
            v_scale=self.scales.v,
            deterministic=config.deterministic,
        )
