"""Attention in plain torch: any device torch has, and the twin of every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specattn.backends.base import Capabilities, PatternA
from specattn.kernels.reference import attention
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig


class TorchNativeBackend:
    """The reference functions as a backend; eager, because it sizes its gather by the lengths.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        Any.
    """

    name: ClassVar[str] = "torch_native"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Return nothing: torch serves every configuration on every device it has."""
        return []

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind."""
        if isinstance(plan, AttnPlan):
            return TorchTree(self.config, plan)
        if isinstance(plan, CsrPlan):
            return TorchCsr(self.config, plan)
        return TorchExtend(self.config, plan)


@dataclass(frozen=True)
class TorchTree(PatternA):
    """A tree mode."""

    config: AttnConfig
    plan: AttnPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, config = self.plan, self.config
        attention.tree_attention(
            q, k_cache, v_cache, out, lse,
            seq_lens=plan.seq_lens, req_pool_indices=plan.req_pool_indices,
            req_to_token=plan.req_to_token, positions=plan.positions,
            tail_slots=plan.tail_slots, tail_positions=plan.tail_positions,
            tail_words=plan.tail_words, sm_scale=config.sm_scale,
            window_left=config.window_left, logit_cap=config.logit_cap,
        )


@dataclass(frozen=True)
class TorchCsr(PatternA):
    """Draft decode from index lists."""

    config: AttnConfig
    plan: CsrPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, config = self.plan, self.config
        attention.csr_attention(
            q, k_cache, v_cache, out, lse, kv_indptr=plan.kv_indptr, kv_indices=plan.kv_indices,
            sm_scale=config.sm_scale, window_left=config.window_left, logit_cap=config.logit_cap,
        )


@dataclass(frozen=True)
class TorchExtend(PatternA):
    """A ragged prompt extend."""

    config: AttnConfig
    plan: ExtendPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, config = self.plan, self.config
        attention.extend_attention(
            q, k_cache, v_cache, out, lse,
            qo_indptr=plan.qo_indptr, seq_lens=plan.seq_lens,
            req_pool_indices=plan.req_pool_indices, req_to_token=plan.req_to_token,
            max_q_len=plan.max_q_len, sm_scale=config.sm_scale,
            window_left=config.window_left, logit_cap=config.logit_cap,
        )
