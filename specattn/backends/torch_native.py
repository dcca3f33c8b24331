"""Attention in plain torch: any device torch has, and the twin of every kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from specattn.backends.base import BoundAttention, Capabilities
from specattn.config import FLOAT8, UNSCALED, KVScales
from specattn.cuda_graph.capture_guard import Settable
from specattn.kernels.attention import naive
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specattn.config import AttnConfig


class TorchNativeBackend(Settable):
    """The reference functions as a backend; eager, because it sizes its gather by the lengths.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        Any.
    """

    name: ClassVar[str] = "torch_native"
    capabilities: ClassVar[Capabilities] = Capabilities(kv_dtypes=(FLOAT8,))

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
class _Bound(BoundAttention):
    config: AttnConfig
    scales: KVScales = field(default=UNSCALED, kw_only=True)

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return the same with a layer's scales; see `BoundAttention.for_layer`."""
        return self if scales is None else replace(self, scales=scales)


@dataclass(frozen=True)
class TorchTree(_Bound):
    """A tree mode."""

    plan: AttnPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, config = self.plan, self.config
        naive.tree_attention(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            seq_lens=plan.seq_lens,
            req_pool_indices=plan.req_pool_indices,
            req_to_token=plan.req_to_token,
            positions=plan.positions,
            tail_slots=plan.tail_slots,
            tail_positions=plan.tail_positions,
            tail_words=plan.tail_words,
            sm_scale=config.sm_scale,
            window_left=config.window_left,
            logit_cap=config.logit_cap,
            k_scale=self.scales.k,
            v_scale=self.scales.v,
        )


@dataclass(frozen=True)
class TorchCsr(_Bound):
    """Draft decode from index lists."""

    plan: CsrPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, config = self.plan, self.config
        naive.csr_attention(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            kv_indptr=plan.kv_indptr,
            kv_indices=plan.kv_indices,
            sm_scale=config.sm_scale,
            window_left=config.window_left,
            logit_cap=config.logit_cap,
            k_scale=self.scales.k,
            v_scale=self.scales.v,
        )


@dataclass(frozen=True)
class TorchExtend(_Bound):
    """A ragged prompt extend."""

    plan: ExtendPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, config = self.plan, self.config
        naive.extend_attention(
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
            sm_scale=config.sm_scale,
            window_left=config.window_left,
            logit_cap=config.logit_cap,
            k_scale=self.scales.k,
            v_scale=self.scales.v,
        )
