"""Attention in plain torch, on any device that torch has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from specattn.backends.base import BoundAttention, Capabilities, FunctionAttention
from specattn.buffers import ReadOnly
from specattn.config import FLOAT8
from specattn.kernels.attention import reference
from specattn.plan import AttnPlan, CsrPlan, Plan

if TYPE_CHECKING:
    import torch

    from specattn.config import AttnConfig


class TorchNativeBackend(ReadOnly):
    """Torch functions; eager, because gathers are sized by the lengths."""

    name: ClassVar[str] = "torch_native"
    capabilities: ClassVar[Capabilities] = Capabilities(kv_dtypes=(FLOAT8,), sinks=True)

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Return nothing: torch serves every configuration on every device it has."""
        return []

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind."""
        config = self.config
        options: dict[str, Any] = {
            "sm_scale": config.sm_scale,
            "window_left": config.window_left,
            "logit_cap": config.logit_cap,
        }
        if isinstance(plan, CsrPlan):
            options |= {"kv_indptr": plan.kv_indptr, "kv_indices": plan.kv_indices}
            return FunctionAttention(plan, reference.csr_attention, options)
        options |= {
            "seq_lens": plan.seq_lens,
            "req_pool_indices": plan.req_pool_indices,
            "req_to_token": plan.req_to_token,
        }
        if isinstance(plan, AttnPlan):
            options |= {
                "positions": plan.positions,
                "tail_slots": plan.tail_slots,
                "tail_positions": plan.tail_positions,
                "tail_words": plan.tail_words,
            }
            return FunctionAttention(plan, reference.tree_attention, options)
        options |= {"qo_indptr": plan.qo_indptr, "max_q_len": plan.max_q_len}
        return FunctionAttention(plan, reference.extend_attention, options)
