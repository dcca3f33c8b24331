"""Forwards of an engine: they copy its tensors in, then attend."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.attention.layer import as_heads
from specattn.backends.base import fill_all, recordable
from specattn.checks import one_of, whole_number
from specattn.errors import UnsupportedError
from specattn.kernels.masks import PlanInputs, copy_in_rows, copy_in_steps
from specattn.kernels.tree import grow_words
from specattn.plan import ExtendPlan, check_plan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from specattn.attention.layer import Layer, LayerGroup
    from specattn.attention.window import WindowPlan
    from specattn.backends.base import BoundAttention
    from specattn.plan import AttnPlan, MultiStepPlan


@dataclass(eq=False)
class Forward:
    """One forward of an engine over a plan; `Attention` makes it.

    Parameters
    ----------
    groups : collection of LayerGroup
        The engine's so far, for which it is bound at once; a later one when it first attends.
    plan : AttnPlan or ExtendPlan
        Its inputs.
    store_slots : Tensor
        ``[B, q_len]`` int32: where `attend` stores, skipping what is below 0.
    window : WindowPlan, optional
        What layers of the window pool read.
    """

    groups: InitVar[Collection[LayerGroup]]
    plan: AttnPlan | ExtendPlan
    store_slots: Tensor
    window: WindowPlan | None = None
    _bound: dict[LayerGroup, BoundAttention] = field(default_factory=dict)
    _of_layer: dict[tuple[Layer, bool], tuple[BoundAttention, Tensor]] = field(default_factory=dict)
    _ran: set[LayerGroup] = field(default_factory=set)

    def __post_init__(self, groups: Collection[LayerGroup]) -> None:
        check_plan(self.plan, self.plan.req_to_token.device)
        for group in groups:
            # a draft has no layers of a window pool, though its target may
            if self.window is not None or not group.windowed:
                self._bind(group)

    def _bind(self, group: LayerGroup) -> BoundAttention:
        plan = self.plan
        if group.windowed:
            if self.window is None:
                raise UnsupportedError("draft steps", ["a window pool of their own is not served"])
            plan = self.window.plan
        bound = self._bound[group] = group.bind(plan)
        return bound

    @property
    def graphs(self) -> bool:
        """Whether all that is bound may be recorded in a CUDA graph."""
        return all(recordable(group.backend, self.plan) for group in self._bound)

    def copy_in(
        self,
        rows: Tensor,
        seq_lens: Tensor,
        slots: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        kind: str = "qlen",
        counted: int = 0,
        fill: bool = True,
    ) -> None:
        """Copy in what the engine knows of the forward, then `fill`.

        Both are one launch each, neither waits for the device, and both can be recorded in a CUDA
        graph, which then reads what these tensors hold at each replay. Integers are int32 or int64.

        Parameters
        ----------
        rows, seq_lens : Tensor
            ``[B]``: table rows, and lengths.
        slots : Tensor, optional
            ``[B, q_len]`` or flat: where the new tokens go, below 0 for nowhere. Without, the
            table's columns after the prefix.
        positions : Tensor, optional
            ``[B, q_len]`` or flat. Without, the prefix plus the token's depth: how many other new
            tokens it sees.
        mask : Tensor, optional
            Which new tokens see which, see ``kind``; without, those before and themselves.
        kind : str
            How the mask lies, see `specattn.kernels.masks.copy_in_rows`: ``"qlen"``,
            ``"qlen_bits"``, ``"full"``, ``"full_bits"``; or ``"prefix"``, without a mask.
        counted : int
            How many of the new tokens ``seq_lens`` count.
        fill : bool
            Whether to fill the backends' own plans, too.

        Raises
        ------
        ValueError
            Before anything is written: if a tensor has another shape or dtype, or a causal layout
            is given a mask.
        """
        plan = self.plan
        if isinstance(plan, ExtendPlan):
            raise ValueError("prompts are copied in by Attention.prompts")
        if plan.layout.causal and (mask is not None or kind == "prefix"):
            raise ValueError("mask must be None with a causal layout, whose rows are causal")
        whole_number("counted", counted, 0)
        shape = plan.tail_slots.shape
        copy_in_rows(
            rows,
            seq_lens,
            _by_request("slots", slots, shape),
            _by_request("positions", positions, shape),
            mask,
            kind=kind,
            counted=counted,
            req_to_token=plan.req_to_token,
            out=PlanInputs(
                plan.req_pool_indices,
                plan.seq_lens,
                plan.tail_slots,
                self.store_slots,
                plan.positions,
                plan.tail_words,
            ),
            window=None if self.window is None else self.window.inputs,
        )
        bounds = self._start()
        if fill:
            fill_all(bounds)

    def fill(self) -> None:
        """Fill the backends' own plans, in one launch where they allow it."""
        fill_all(self._start())

    def _start(self) -> Iterable[BoundAttention]:
        """Begin a forward; return what is to be filled."""
        self._ran.clear()
        return self._bound.values()

    def attend(
        self,
        layer: Layer,
        q: Tensor | tuple[Tensor, Tensor],
        k: Tensor | tuple[Tensor, Tensor] | None = None,
        v: Tensor | None = None,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend in a layer, after its new keys and values are stored.

        Heads may be an axis of their own or lie side by side, as ``[T, heads * size]``; the rows of
        q, k and v may have a stride. T is ``B * q_len``, or the new tokens of prompts.

        Parameters
        ----------
        layer : Layer
            Of this `Attention`.
        q : Tensor or tuple of Tensor
            ``[T, Hq, D]``. Of latent layers also the part that meets the latent and the rotated
            one, ``[T, Hq, Dv]`` and ``[T, Hq, D - Dv]``.
        k : Tensor or tuple of Tensor, optional
            ``[T, Hkv, D]``, or of latent layers such a pair. Without, nothing is stored: the caches
            have the new tokens already.
        v : Tensor, optional
            ``[T, Hkv, Dv]``; none if ``latent``.
        out : Tensor, optional
            ``[T, Hq, Dv]``, written and returned.
        lse : Tensor, optional
            ``[T, Hq]`` float32, see `BoundAttention.run`.

        Returns
        -------
        Tensor
            ``out``; a new one has as many axes as q.

        Raises
        ------
        ValueError
            Before anything is written: if a tensor has another shape or dtype, or the layer's
            geometry is seen first in a capture.
        """
        config, count = layer.backend.config, self.store_slots.numel()
        heads, size = config.num_qo_heads, config.v_head_dim
        if not isinstance(q, Tensor):
            sizes = size, config.head_dim - size
            parts = zip(q, sizes, strict=True)
            q = torch.cat(
                [as_heads("q", part, count, heads, dim, config.dtype) for part, dim in parts], -1
            )
        if out is None:
            shape = (count, heads, size) if q.dim() == 3 else (count, heads * size)
            out = q.new_empty(shape)
        queries = as_heads("q", q, count, heads, config.head_dim, config.dtype)
        found = as_heads("out", out, count, heads, size, config.dtype)
        bound, slots = self._bound_of(layer)
        if k is not None:
            layer.store(slots, k, v)
        bound.run(queries, layer.k_cache, layer.v_cache, found, lse)
        return out

    def _bound_of(self, layer: Layer) -> tuple[BoundAttention, Tensor]:
        """Return the attention of a layer, and where it stores."""
        group = layer.group
        if group not in self._bound:
            self._bind(group).fill()
        prefetch = group in self._ran
        self._ran.add(group)
        if (layer, prefetch) not in self._of_layer:
            bound = self._bound[group].for_layer(layer.scales, prefetch=prefetch)
            if layer.sinks is not None:
                bound = bound.with_sinks(layer.sinks)
            slots = self.store_slots
            if self.window is not None and group.windowed:
                slots = self.window.inputs.store
            self._of_layer[layer, prefetch] = bound, slots
        return self._of_layer[layer, prefetch]


class DraftForwards:
    """The forwards of all steps of a draft, over shared inputs.

    Parameters
    ----------
    groups : collection of LayerGroup
        As in `Forward`.
    plan : MultiStepPlan
        All steps.
    store : Tensor
        ``[B, steps, topk]`` int32: where branches store, skipping what is below 0.

    Attributes
    ----------
    steps : tuple of Forward
        One per step; only their `Forward.attend` is needed.
    """

    def __init__(self, groups: Collection[LayerGroup], plan: MultiStepPlan, store: Tensor) -> None:
        self.plan, self._store = plan, store
        self.steps = tuple(
            Forward(groups, plan.step(step), store[:, step]) for step in range(plan.dims.steps)
        )

    def copy_in(
        self,
        rows: Tensor,
        seq_lens: Tensor,
        slots: Tensor | None = None,
        *,
        order: str = "branch",
        counted: int = 0,
        fill: bool = True,
    ) -> None:
        """Copy in what the engine knows of all steps, then `fill`.

        See `Forward.copy_in`.

        A branch sees itself alone until `grow` has run, and the steps before it in a chain.

        Parameters
        ----------
        rows, seq_lens, counted, fill
            As in `Forward.copy_in`.
        slots : Tensor, optional
            The branches' slots, flat or not, of at least as many steps. Without, the table's
            columns after the prefix, step by step.
        order : {"branch", "step"}
            Whether ``slots`` are ``[B, topk, steps]``, as SGLang has them, or
            ``[B, steps, topk]``.

        Raises
        ------
        ValueError
            Before anything is written: if a tensor has another shape or dtype.
        """
        inputs, plan = self.plan.inputs, self.plan
        one_of("order", order, "branch", "step")
        whole_number("counted", counted, 0)
        copy_in_steps(
            rows,
            seq_lens,
            None if slots is None or not len(self._store) else self._by_step(slots, order),
            counted=counted,
            req_to_token=plan.req_to_token,
            out=PlanInputs(
                inputs.req_pool_indices,
                inputs.seq_lens,
                inputs.branch_slots,
                self._store,
                inputs.positions,
                inputs.words,
            ),
        )
        bounds = self._start()
        if fill:
            fill_all(bounds)

    def _by_step(self, slots: Tensor, order: str) -> Tensor:
        """View slots as ``[B, steps, topk]``."""
        dims, batch = self.plan.dims, len(self._store)
        width = slots.numel() // (batch * dims.topk)
        if slots.numel() != batch * dims.topk * width or width < dims.steps:
            raise ValueError(
                f"slots must be those of {batch} requests, {dims.topk} branches and at least "
                f"{dims.steps} steps, got {list(slots.shape)}"
            )
        if order == "step":
            return slots.view(batch, width, dims.topk)[:, : dims.steps]
        return slots.view(batch, dims.topk, width)[:, :, : dims.steps].transpose(1, 2)

    def grow(self, step: int, parents: Tensor | None, *, flat: bool = False) -> None:
        """Write a step's ancestor words once its branches are chosen.

        At step 0, and in a chain, there is nothing to do. Parameters and errors are those of
        `grow_words`.
        """
        if step and self.plan.dims.topk > 1:
            grow_words(self.plan.inputs.words, step, parents, flat=flat)

    def fill(self) -> None:
        """Fill all steps' plans, in one launch where backends allow it."""
        fill_all(self._start())

    def _start(self) -> Iterable[BoundAttention]:
        return [bound for step in self.steps for bound in step._start()]


def _by_request(name: str, tensor: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """View a tensor of all rows as ``[B, n]``."""
    if tensor is None or tensor.dim() == 2:
        return tensor
    if tensor.numel() != shape[0] * shape[1]:
        raise ValueError(f"{name} must have {shape[0]} x {shape[1]} numbers, got {tensor.numel()}")
    return tensor.reshape(tuple(shape))
