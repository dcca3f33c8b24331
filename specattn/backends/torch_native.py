"""Attention in plain torch, on any device that torch has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from specattn.backends.base import BoundAttention, Capabilities, FunctionAttention
from specattn.buffers import ReadOnly
from specattn.config import FLOAT8
from specattn.kernels.attention import reference
from specattn.plan import CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specattn.config import AttnConfig


class TorchNativeBackend(ReadOnly):
    """Torch functions; eager, because gathers are sized by the lengths."""

    name: ClassVar[str] = "torch_native"
    capabilities: ClassVar[Capabilities] = Capabilities(kv_dtypes=(FLOAT8,), sinks=True)

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config
        self.sight = Sight()

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
            config.window_left,
            self.sight,
        )


class Sight:
    """What the queries of one plan see in the running forward."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of what was found."""
        self.plan: Plan | None = None
        self.views: list[reference.View] = []
        self.layers: set[int] = set()

    def of(self, plan: Plan, window_left: int, keys: Tensor) -> list[reference.View]:
        """Return what a plan's queries see in the layer of these keys.

        A layer that comes again begins another forward, which is looked at whether it was filled
        or not.
        """
        layer = keys.data_ptr()
        if plan is not self.plan or layer in self.layers:
            self.forget()
            self.views = _views(plan, window_left)
            self.plan = plan
        self.layers.add(layer)
        return self.views


@dataclass(frozen=True)
class NativeAttention(FunctionAttention):
    """Attention of layers that share what their queries see.

    The first layer after `fill` finds it: the ancestors of a draft step are written after `fill`.
    """

    window_left: int
    sight: Sight

    def fill(self) -> None:
        """Forget what the last forward's queries saw, of any plan."""
        self.sight.forget()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        views = self.sight.of(self.plan, self.window_left, k_cache)
        self.function(q, k_cache, v_cache, out, lse, views=views, **self.options)


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
