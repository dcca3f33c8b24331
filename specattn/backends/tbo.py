"""Two-batch overlap: one half computes while the other communicates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from specattn.backends import load_backend
from specattn.backends.base import (
    BoundAttention,
    Capabilities,
    CompositeAttention,
    CompositeBackend,
    IdleAttention,
    named_reasons,
)
from specattn.batch import halves
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specattn.backends.base import AttentionBackend, BackendFactory
    from specattn.config import AttnConfig, KVScales


def tbo(
    primary: str | BackendFactory, children: tuple[str | BackendFactory, ...] = ()
) -> TboBackend:
    """Return a composite with a backend for each half batch.

    Parameters
    ----------
    primary : str or BackendFactory
        Serves what is not split: prompts.
    children : tuple of two str or BackendFactory, optional
        Serve the halves; two of ``primary`` if omitted.

    Raises
    ------
    UnsupportedError
        If there is no backend of one of the names.
    """
    first, *others = map(load_backend, (primary, *(children or (primary, primary))))
    return TboBackend(first, tuple(others))


@dataclass(frozen=True)
class TboBackend:
    """Backends for the whole of a batch and for its halves.

    Every bucket is split at a request boundary (`specattn.batch.halves`), and the halves' plans
    are views of the whole's.

    Parameters
    ----------
    primary : BackendFactory
        Serves prompts, unsplit.
    children : sequence of BackendFactory
        Two, one per half; equal ones are still made twice, so that the halves, and the primary,
        share no metadata and no workspace and may run at the same time.

    Raises
    ------
    ValueError
        If there are not two children.
    """

    primary: BackendFactory
    children: tuple[BackendFactory, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", tuple(self.children))
        if len(self.children) != 2:
            raise ValueError(f"children must be 2 backends, got {len(self.children)}")

    @property
    def name(self) -> str:
        """``tbo(a)``, or ``tbo(a; b, c)`` where the children differ from the primary."""
        primary, first, second = (part.name for part in (self.primary, *self.children))
        alike = primary == first == second
        return f"tbo({primary})" if alike else f"tbo({primary}; {first}, {second})"

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of all parts; prompts are the primary's alone."""
        parts = [part.capabilities for part in (self.primary, *self.children)]
        return replace(Capabilities.merged(parts), extend=self.primary.capabilities.extend)

    def reasons(self, config: AttnConfig | None, device: torch.device) -> list[str]:
        """Say which part stands in the way, and why."""
        roles = ("primary", "first half", "second half")
        parts: dict[BackendFactory, str] = {}
        for role, part in zip(roles, (self.primary, *self.children), strict=True):
            parts.setdefault(part, role)
        return named_reasons([(role, part) for part, role in parts.items()], config, device)

    def __call__(self, config: AttnConfig, device: torch.device) -> TboLayer:
        """Make the primary and both children, each with buffers of its own."""
        first, second = (child(config, device) for child in self.children)
        return TboLayer(config, self.capabilities, self.primary(config, device), (first, second))


@dataclass(frozen=True)
class TboLayer(CompositeBackend):
    """`TboBackend` for one layer geometry.

    An engine that overlaps two micro-batches binds this once per forward and calls the bound
    ``children`` with their own rows (`BoundTbo`); it may bind ``primary`` to the same plan for
    layers that it runs unsplit.
    """

    config: AttnConfig
    capabilities: Capabilities
    primary: AttentionBackend
    children: tuple[AttentionBackend, AttentionBackend]

    def serving(self, plan: Plan) -> tuple[AttentionBackend, ...]:
        """Return both children, or the primary for prompts."""
        return (self.primary,) if isinstance(plan, ExtendPlan) else self.children

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind the children to the halves; a half without requests binds nothing."""
        if isinstance(plan, ExtendPlan):
            return self.primary.bind(plan)
        plans = split(plan)
        first, second = (
            IdleAttention() if half.idle else child.bind(half)
            for child, half in zip(self.children, plans, strict=True)
        )
        return BoundTbo(plans, (first, second))


def split(plan: AttnPlan | CsrPlan) -> tuple[AttnPlan | CsrPlan, AttnPlan | CsrPlan]:
    """Split a plan at `halves`' request boundary, over the same memory.

    The second part's ``kv_indptr`` starts where the first one's ends, not at 0.
    """
    first, second = (some_requests(plan, half) for half in halves(len(plan.out_slots)))
    return first, second


def some_requests(plan: AttnPlan | CsrPlan, which: slice) -> AttnPlan | CsrPlan:
    """Return the plan of some requests, over the same memory."""
    if isinstance(plan, CsrPlan):
        branches = plan.layout.q_len
        offsets = plan.kv_indptr[which.start * branches : which.stop * branches + 1]
        return replace(plan, kv_indptr=offsets, out_slots=plan.out_slots[which])
    return replace(
        plan,
        req_pool_indices=plan.req_pool_indices[which],
        seq_lens=plan.seq_lens[which],
        positions=plan.positions[which],
        tail_slots=plan.tail_slots[which],
        tail_positions=plan.tail_positions[which],
        tail_words=plan.tail_words[which],
    )


@dataclass(frozen=True)
class BoundTbo(CompositeAttention, BoundAttention):
    """Attention over both halves of a batch, the ``children``'s.

    ``fill`` and ``schedule`` here serve both; then an engine may call `run` with all rows, or each
    child's ``run`` with the rows of its half, ``q[rows]`` for ``rows`` in `rows`.
    """

    plans: tuple[AttnPlan | CsrPlan, AttnPlan | CsrPlan]
    children: tuple[BoundAttention, BoundAttention]

    @property
    def requests(self) -> tuple[slice, slice]:
        """The requests of each half."""
        return halves(sum(len(plan.out_slots) for plan in self.plans))

    @property
    def rows(self) -> tuple[slice, slice]:
        """The rows of q, out and lse of each half."""
        middle = self.plans[0].out_slots.numel()
        return slice(0, middle), slice(middle, None)

    def parts(self) -> tuple[BoundAttention, BoundAttention]:
        """Return both halves."""
        return self.children

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule both halves from their part of the lengths."""
        for child, which in zip(self.children, self.requests, strict=True):
            child.schedule(None if seq_lens_cpu is None else seq_lens_cpu[which])

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return the same with a layer's scales; neither half prefetches."""
        first, second = (child.for_layer(scales, prefetch=False) for child in self.children)
        return replace(self, children=(first, second))

    def with_sinks(self, sinks: Tensor) -> Self:
        """Return the same with a layer's sinks, in both halves."""
        first, second = (child.with_sinks(sinks) for child in self.children)
        return replace(self, children=(first, second))

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend, one half after the other; see `BoundAttention.run`."""
        for child, rows in zip(self.children, self.rows, strict=True):
            child.run(q[rows], k_cache, v_cache, out[rows], None if lse is None else lse[rows])
