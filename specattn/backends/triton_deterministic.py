"""Bound attention of the Triton backend's deterministic mode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from specattn.backends.base import BoundAttention

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import KVScales
    from specattn.kernels.attention.deterministic import FixedAttention
    from specattn.plan import AttnPlan, CsrPlan


@dataclass(frozen=True)
class FixedTree(BoundAttention):
    """A tree mode."""

    plan: AttnPlan
    kernel: FixedAttention

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return the same with a layer's scales; see `BoundAttention.for_layer`."""
        if scales is None:
            return self
        return replace(self, kernel=self.kernel.scaled(scales.k, scales.v))

    @property
    def grows(self) -> bool:
        """Whether the tail holds earlier nodes: a draft step, whose words `run` finds written."""
        return self.plan.layout.tail > self.plan.layout.q_len

    def fill(self) -> None:
        """Cut the work, and list the paths if the words are known by now."""
        plan = self.plan
        self.kernel.plan(plan.seq_lens, plan.req_pool_indices, plan.req_to_token.stride(0))
        if not self.grows:
            self._trace()

    def _trace(self) -> None:
        plan = self.plan
        self.kernel.trace(
            indices=plan.req_to_token,
            positions=plan.positions,
            tail_slots=plan.tail_slots,
            tail_positions=plan.tail_positions,
            tail_words=plan.tail_words,
        )

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        if self.grows:
            self._trace()
        named: dict[str, Any] = {
            "indices": self.plan.req_to_token,
            "positions": self.plan.positions,
        }
        self.kernel.run(q, k_cache, v_cache, out, lse, **named)


@dataclass(frozen=True)
class FixedCsr(BoundAttention):
    """Draft decode from index lists, whose ends `run` finds written."""

    plan: CsrPlan
    kernel: FixedAttention

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return the same with a layer's scales; see `BoundAttention.for_layer`."""
        if scales is None:
            return self
        return replace(self, kernel=self.kernel.scaled(scales.k, scales.v))

    def fill(self) -> None:
        """Cut the work, from the lists' lengths on the device."""
        self.kernel.plan_csr(self.plan.kv_indptr)

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        self.kernel.trace(indices=self.plan.kv_indices)
        self.kernel.run(q, k_cache, v_cache, out, lse, indices=self.plan.kv_indices)
