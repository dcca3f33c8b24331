"""Attention in plain torch, on any device that torch has."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from specattn.backends.base import BoundAttention, Capabilities, FunctionAttention
from specattn.buffers import ReadOnly
from specattn.config import FLOAT8
from specattn.kernels.attention import reference
from specattn.plan import CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

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
        return NativeAttention(
            plan,
            reference.attend,
            {"sm_scale": config.sm_scale, "logit_cap": config.logit_cap},
            partial(_views, plan, config.window_left),
        )


@dataclass(frozen=True)
class NativeAttention(FunctionAttention):
    """Attention of layers that share what their queries see.

    The first layer after `fill` finds it: the ancestors of a draft step are written after `fill`.
    """

    find: Callable[[], list[reference.View]]
    found: list[reference.View] = field(default_factory=list)

    def fill(self) -> None:
        """Forget what the last forward's queries saw."""
        self.found.clear()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        if not self.found:
            self.found.extend(self.find())
        self.function(q, k_cache, v_cache, out, lse, views=self.found, **self.options)


def _views(plan: Plan, window_left: int) -> list[reference.View]:
    """Find what a plan's queries see in a window."""
    if isinstance(plan, CsrPlan):
        return reference.csr_views(
            kv_indptr=plan.kv_indptr, kv_indices=plan.kv_indices, window_left=window_left
        )
    by_row: dict[str, Any] = {
        "seq_lens": plan.seq_lens,
        "req_pool_indices": plan.req_pool_indices,
        "req_to_token": plan.req_to_token,
        "window_left": window_left,
    }
    if isinstance(plan, ExtendPlan):
        return reference.extend_views(qo_indptr=plan.qo_indptr, **by_row)
    return reference.tree_views(
        positions=plan.positions,
        tail_slots=plan.tail_slots,
        tail_positions=plan.tail_positions,
        tail_words=plan.tail_words,
        **by_row,
    )
