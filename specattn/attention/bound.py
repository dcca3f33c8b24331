"""Layers bound to a forward, as models and engines call them."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.attention.state_layer import StateLayer
from specattn.backends.base import CompositeAttention, attending
from specattn.buffers import Fingerprint, fingerprint
from specattn.checks import as_heads, whole_number
from specattn.errors import UnsupportedError
from specattn.kernels.attention import check_sinks
from specattn.kernels.masks import PlanInputs, copy_in_rows
from specattn.plan import AttnPlan, ExtendPlan, check_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specattn.attention.layers import Layer, LayerGroup
    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig
    from specattn.kernels.fused import Rotation
    from specattn.kernels.fused.fp8 import RowsFormat, ScaledRows
    from specattn.kernels.gated_delta import LayerParts, LayerWeights, Nodes
    from specattn.kernels.masks import Window
    from specattn.plan import Plan


@dataclass(eq=False)
class BoundLayers(CompositeAttention):
    """Layers bound to a forward: the `Attend` of a model.

    `Layers.bind` makes it. Layers attend one after another, on one stream. Those after the first
    may read what lies in the caches before the kernel in front of them ends; the first one after
    `fill` waits.

    Parameters
    ----------
    groups : iterable of LayerGroup
        Those for which it is bound at once; a later one when it first attends.
    layers : sequence of Layer or StateLayer
        A model's, in its order.
    plans : tuple of Plan
        One per view.
    stored : tuple of Tensor
        ``[B, q_len]`` int32 per view: where layers store, skipping what is below 0.
    window : Window, optional
        What `copy_in` writes for layers of a window pool, whose view is 1.
    filled : bool
        Whether the plans hold requests from the start, or from the first `fill` on.
    nodes : Nodes, optional
        Where layers with states leave what the commit of a verification reads.
    """

    groups: InitVar[Iterable[LayerGroup]]
    layers: Sequence[Layer | StateLayer]
    plans: tuple[Plan, ...]
    stored: tuple[Tensor, ...]
    window: Window | None = None
    filled: bool = True
    nodes: Nodes | None = None
    _bound: dict[LayerGroup, BoundAttention] = field(default_factory=dict)
    _of_layer: dict[tuple[Layer, bool], BoundAttention] = field(default_factory=dict)
    _ran: set[LayerGroup] = field(default_factory=set)
    _mixed: bool = False

    def __post_init__(self, groups: Iterable[LayerGroup]) -> None:
        self.device: torch.device = self.slots.device
        self.num_tokens = self.slots.numel()
        for plan in self.plans:
            check_plan(plan, self.device)
        for group in groups:
            # a draft has no layers of a window pool, though its target may
            if group.view < len(self.plans):
                self._bind(group)

    def _bind(self, group: LayerGroup) -> BoundAttention:
        if group.view >= len(self.plans):
            raise UnsupportedError("draft steps", ["a window pool of their own is not served"])
        bound = self._bound[group] = group.bind(self.plans[group.view])
        return bound

    @property
    def plan(self) -> Plan:
        """The forward's tensors, as layers of the first view read them."""
        return self.plans[0]

    @property
    def slots(self) -> Tensor:
        """``[B, q_len]`` int32: where the forward's keys and values go."""
        return self.stored[0]

    @property
    def bounds(self) -> tuple[BoundAttention, ...]:
        """What is bound, of each group."""
        return tuple(self._bound.values())

    @property
    def graphs(self) -> bool:
        """Whether all that is bound may be recorded in a CUDA graph."""
        served = (attending(group.backend, self.plans[group.view]) for group in self._bound)
        return all(backend.capabilities.graphs for backend in served)

    def fingerprint(self) -> Fingerprint:
        """Describe the pools and the configs, which a graph bakes in."""
        found: Fingerprint = ()
        attending = (layer for layer in self.layers if not isinstance(layer, StateLayer))
        for pool in dict.fromkeys(layer.pool for layer in attending):
            found += pool.fingerprint()
        mixing = (layer for layer in self.layers if isinstance(layer, StateLayer))
        for states in dict.fromkeys(layer.pool for layer in mixing):
            found += states.fingerprint()
        # by value: what a graph has baked in stays as it was, whatever becomes of the config
        configs = {
            f"AttnConfig[{at}]": dict(vars(group.backend.config))
            for at, group in enumerate(self._bound)
        }
        if self.nodes is not None:
            found += fingerprint(**{f"nodes.{name}": one for name, one in vars(self.nodes).items()})
        return found + fingerprint(**configs)

    def parts(self) -> tuple[BoundAttention, ...]:
        """Begin a forward; return what is to be filled."""
        self._ran.clear()
        self._mixed = False
        self.filled = True
        return self.bounds

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule all that is bound."""
        for bound in self._bound.values():
            bound.schedule(seq_lens_cpu)

    def copy_in(  # noqa: PLR0913 - as its docstring says
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
        rows, seq_lens, slots, positions, mask, kind, counted
            As `specattn.kernels.masks.copy_in_rows` takes them, of ``q_len`` new tokens per
            request; slots and positions may be flat.
        fill : bool
            Whether to fill the backends' own plans, too.

        Raises
        ------
        ValueError
            Before anything is written: if a tensor has another shape or dtype, or a causal layout
            is given a mask. On a CPU also if a row, or a token's place, is outside the table; to
            read them on an accelerator would wait for it.
        """
        plan = self.plan
        if not isinstance(plan, AttnPlan):
            raise ValueError("prompts are copied in by Attention.prompts")
        if plan.layout.causal and (mask is not None or kind == "prefix"):
            raise ValueError("mask must be None with a causal layout, whose rows are causal")
        whole_number("counted", counted, 0)
        shape = tuple(self.slots.shape)
        # nobody sees the new tokens of "prefix", which need no columns
        new = shape[1] if slots is None and kind != "prefix" else 0
        check_places(rows, seq_lens, plan.req_to_token, new - counted)
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
                self.slots,
                plan.positions,
                plan.tail_words,
            ),
            window=self.window,
        )
        if fill:
            self.fill()

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend in the model's layer of that index.

        It takes and raises what `attend` does. A layer with sinks, and no other, takes ``sinks``
        ``[Hq]``.
        """
        own = self._attending(layer)
        config = own.backend.config
        if config.sinks != (sinks is not None):
            wanted = f"[{config.num_qo_heads}] floats" if config.sinks else "None"
            got = None if sinks is None else list(sinks.shape)
            raise ValueError(f"sinks must be {wanted} in layer {layer}, got {got}")
        if sinks is not None:
            check_sinks(sinks, config.num_qo_heads, self.device)
        return self.attend(own, q, k, v, sinks=sinks)

    def mix(self, layer: int, parts: LayerParts, weights: LayerWeights) -> Tensor:
        """Mix tokens along their text, in the model's layer of that index.

        Of a verification, nodes go on from their ancestors and no state changes; of prompts, each
        piece goes on from its row's state and leaves its own there.

        Parameters
        ----------
        layer : int
            Index into the model's ``layers``.
        parts : LayerParts
            What the layer's products give for the forward's T tokens.
        weights : LayerWeights
            The layer's.

        Returns
        -------
        Tensor
            ``[T, HV, V]``.

        Raises
        ------
        ValueError
            Before anything is written: if a tensor has another shape or dtype, the layer has no
            state, or the forward is a draft's.
        """
        own, plan = self.layers[layer], self.plan
        if not isinstance(own, StateLayer):
            raise ValueError(f"layer must have a state, layer {layer} attends: call attend itself")
        if isinstance(plan, ExtendPlan):
            rows, starts = plan.states or (plan.req_pool_indices, plan.qo_indptr)
            return own.pool.read(own.index, parts, weights, rows=rows, qo_indptr=starts)
        if not isinstance(plan, AttnPlan) or self.nodes is None:
            raise ValueError("nodes must be given to bind a verification of layers with states")
        follows, self._mixed = self._mixed, True
        return own.pool.verify(
            own.index,
            parts,
            weights,
            rows=plan.req_pool_indices,
            words=plan.tail_words,
            nodes=self.nodes,
            follows=follows,
        )

    def _attending(self, layer: int) -> Layer:
        own = self.layers[layer]
        if isinstance(own, StateLayer):
            raise ValueError(f"layer must attend, layer {layer} has a state: call attend.mix")
        return own

    def packed(
        self,
        layer: int,
        parts: Tensor,
        positions: Tensor,
        rotation: Rotation,
        how: RowsFormat | None = None,
    ) -> Tensor | ScaledRows:
        """Norm and rotate heads, store keys and values, then attend.

        Parameters
        ----------
        layer : int
            Index into the model's ``layers``.
        parts : Tensor
            ``[S, T, (Hq + 2 Hkv) D]``, of any dtype: they add up to queries, keys and values.
        positions : Tensor
            ``[T]`` int64.
        rotation : Rotation
            The position embedding, and the bias and norms before it.
        how : RowsFormat, optional
            How the product that follows takes its rows, if quantised.

        Returns
        -------
        Tensor or ScaledRows
            ``[T, Hq * D]``, quantised if that is wanted and costs no launch.
        """
        own = self._attending(layer)
        q = own.pool.store_packed(
            own.index,
            self.stored[own.group.view],
            parts,
            positions,
            rotation,
            own.backend.config.num_qo_heads,
            prefetch=bool(self._ran) and all(bound.prefetches for bound in self._bound.values()),
        )
        if how is None or own.backend.config.sinks:
            return self(layer, q).flatten(1)
        return self._bound_of(own).rows_for(how, q, own.k_cache, own.v_cache)

    def attend(  # noqa: PLR0913 - as its docstring says
        self,
        layer: Layer,
        q: Tensor | tuple[Tensor, Tensor],
        k: Tensor | tuple[Tensor, Tensor] | None = None,
        v: Tensor | None = None,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend in a layer, after its new keys and values are stored.

        Heads may be an axis of their own or lie side by side, as ``[T, heads * size]``; the rows of
        q, k and v may have a stride. T is ``B * q_len``, or the new tokens of prompts.

        Parameters
        ----------
        layer : Layer
            Of these `Layers`.
        q : Tensor or tuple of Tensor
            ``[T, Hq, D]``. Of latent layers also the part that meets the latent and the rotated
            one, ``[T, Hq, Dv]`` and ``[T, Hq, D - Dv]``.
        k : Tensor or tuple of Tensor, optional
            ``[T, Hkv, D]``, or of latent layers such a pair. Without k and v nothing is stored: the
            caches have the new tokens already.
        v : Tensor, optional
            ``[T, Hkv, Dv]``; none if ``latent``.
        out : Tensor, optional
            ``[T, Hq, Dv]``, written and returned.
        lse : Tensor, optional
            ``[T, Hq]`` float32, see `BoundAttention.run`.
        sinks : Tensor, optional
            Those of this call, of a layer that has none for good.

        Returns
        -------
        Tensor
            ``out``; a new one has as many axes as q.

        Raises
        ------
        ValueError
            Before anything is written: if a tensor has another shape, dtype or device, k or v is
            missing, nothing was copied in, or the layer's geometry is seen first in a capture.
        """
        config, count, device = layer.backend.config, self.num_tokens, self.device
        heads, size, dtype = config.num_qo_heads, config.v_head_dim, config.dtype
        if not isinstance(q, Tensor):
            q = _joined(q, count, config)
        queries = as_heads("q", q, (count, heads, config.head_dim), dtype, device)
        given = None if out is None else as_heads("out", out, (count, heads, size), dtype, device)
        bound = self._bound_of(layer)
        if sinks is not None:
            bound = bound.with_sinks(sinks)
        if k is not None or v is not None:
            layer.store(self.stored[layer.group.view], k, v)
        if out is None or given is None:
            made = bound.result(queries, layer.k_cache, layer.v_cache, lse)
            return made if q.dim() == 3 else made.flatten(1)
        bound.run(queries, layer.k_cache, layer.v_cache, given, lse)
        return out

    def _bound_of(self, layer: Layer) -> BoundAttention:
        """Return the attention of a layer, as its turn has it."""
        group = layer.group
        if not self.filled:
            raise ValueError("copy_in must come before attend: the forward has no requests yet")
        if group not in self._bound:
            self._bind(group).fill()
        turn = layer, group in self._ran
        self._ran.add(group)
        if turn not in self._of_layer:
            bound = self._bound[group].for_layer(layer.scales, prefetch=turn[1])
            self._of_layer[turn] = bound if layer.sinks is None else bound.with_sinks(layer.sinks)
        return self._of_layer[turn]


def check_places(rows: Tensor, lens: Tensor, req_to_token: Tensor, new: int = 0) -> None:
    """Refuse rows and ``lens + new`` outside a table on a CPU."""
    if req_to_token.device.type != "cpu" or not rows.numel():
        return
    count, context = req_to_token.shape
    if rows.min() < 0 or rows.max() >= count:
        raise ValueError(f"rows must be 0..{count - 1}, got {rows.tolist()}")
    if lens.max() + new > context:
        raise ValueError(
            f"lengths must be at most {context - new}, for a context of {context}, "
            f"got {lens.tolist()}"
        )


def _joined(parts: tuple[Tensor, Tensor], count: int, config: AttnConfig) -> Tensor:
    """Return queries of a latent layer, given in two parts."""
    sizes = config.v_head_dim, config.head_dim - config.v_head_dim
    return torch.cat(
        [
            as_heads("q", part, (count, config.num_qo_heads, size), config.dtype, part.device)
            for part, size in zip(parts, sizes, strict=True)
        ],
        -1,
    )


def _by_request(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """View a tensor of all rows as ``[B, n]``."""
    if tensor is None or tensor.dim() == 2:
        return tensor
    if tensor.numel() != shape[0] * shape[1]:
        raise ValueError(f"{name} must have {shape[0]} x {shape[1]} numbers, got {tensor.numel()}")
    return tensor.reshape(shape)
