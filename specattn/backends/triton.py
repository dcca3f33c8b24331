"""Attention in Triton.

One kernel serves every tree mode and is planned on the device. On a machine without CUDA the
kernels run in Triton's interpreter, which is switched on here; it is exact and slow, and meant for
tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import BoundAttention, Capabilities, FunctionAttention
from specattn.backends.triton_bound import (
    bind_kernel,
    float8_reasons,
    interpret,
    platform_reasons,
)
from specattn.buffers import ReadOnly
from specattn.config import FLOAT8
from specattn.kernels.attention import DeterministicSplits, TreeAttention, extend_attention
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import AttnConfig

MAX_HEAD_DIM = 256


class TritonBackend(ReadOnly):
    """The library's own kernels, on CUDA or in the interpreter on CPUs."""

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, kv_dtypes=(FLOAT8,), deterministic=True
    )

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        if device.type == "cpu":
            interpret()
        self.config = config
        self.device = device
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)

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
        if isinstance(plan, ExtendPlan):
            return self._extend(plan)
        return bind_kernel(plan, self._kernel(plan), deterministic=self.config.deterministic)

    def _extend(self, plan: ExtendPlan) -> BoundAttention:
        config = self.config
        options = prompts(plan) | {
            "page_size": plan.page_size,
            "sm_scale": config.sm_scale,
            "window_left": config.window_left,
            "logit_cap": config.logit_cap,
            "deterministic": config.deterministic,
        }
        return FunctionAttention(plan, extend_attention, options)

    def _kernel(self, plan: AttnPlan | CsrPlan) -> TreeAttention:
        config, splits = self.config, None
        if config.deterministic:
            indices = plan.kv_indices if isinstance(plan, CsrPlan) else plan.req_to_token
            splits = DeterministicSplits(indices.shape[-1], config.split_keys)
        return TreeAttention(
            **bucket(plan),
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            v_head_dim=config.v_head_dim,
            dtype=config.dtype,
            device=self.device,
            sm_scale=config.sm_scale,
            window_left=config.window_left,
            logit_cap=config.logit_cap,
            page_size=1 if isinstance(plan, CsrPlan) else plan.layout.page_size,
            workspace=self.workspace,
            kv_dtype=config.kv_dtype,
            deterministic=splits,
        )

    def workspace(self, size: int) -> Tensor:
        """Return at least ``size`` bytes; what was returned before stays valid.

        All that the backend binds shares them: forwards run one after another.
        """
        if len(self._workspace) < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._workspace


def bucket(plan: AttnPlan | CsrPlan) -> dict[str, Any]:
    """Return the numbers of a plan's bucket, as `TreeAttention` takes them."""
    if isinstance(plan, CsrPlan):
        return {"batch": len(plan.kv_indptr) - 1, "q_len": 1, "tail_len": 0, "csr": True}
    return {"batch": plan.batch, "q_len": plan.layout.q_len, "tail_len": plan.layout.tail}


def prompts(plan: ExtendPlan) -> dict[str, Any]:
    """Return the tensors of prompts, as `extend_attention` takes them."""
    return {
        "qo_indptr": plan.qo_indptr,
        "seq_lens": plan.seq_lens,
        "req_pool_indices": plan.req_pool_indices,
        "req_to_token": plan.req_to_token,
        "max_q_len": plan.max_q_len,
    }
