"""Attention alone, for engines with caches and tables of their own.

An engine makes one `Attention` over its request table and a `Layer` per layer of its model. Before
a forward it adopts what it knows (`Forward.adopt`): one launch, and one for the plans of all
layers. In every layer it then attends. Nothing waits for the device, and what has been made before
a capture can be recorded in it.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.backends import choose_backend
from specattn.backends.base import BoundAttention, IdleAttention, fill_all, recordable
from specattn.batch import Phase, RowLayout
from specattn.cache.kv_pool import KVPool
from specattn.checks import expect, one_of, whole_number
from specattn.config import FLOAT8, AttnConfig, KVScales
from specattn.cuda_graph.recorder import is_recording
from specattn.errors import UnsupportedError
from specattn.interop import words_from_mask
from specattn.kernels.adopt import Adopted, Window, adopt_prompts, adopt_rows, adopt_steps
from specattn.kernels.attention import check_sinks
from specattn.kernels.cache import store_kv
from specattn.kernels.tree import grow_words
from specattn.plan import (
    AttnInputs,
    AttnPlan,
    ExtendPlan,
    MultiStepDims,
    MultiStepInputs,
    MultiStepPlan,
    causal_words,
    check_plan,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from specattn.backends.base import AttentionBackend, BackendFactory

log = logging.getLogger(__name__)

__all__ = [
    "FLOAT8",
    "Attention",
    "AttnConfig",
    "AttnInputs",
    "AttnPlan",
    "DraftForwards",
    "ExtendPlan",
    "Forward",
    "KVScales",
    "Layer",
    "MultiStepDims",
    "MultiStepInputs",
    "MultiStepPlan",
    "Phase",
    "RowLayout",
    "WindowPool",
    "causal_words",
    "fill_all",
    "grow_words",
    "store_kv",
    "words_from_mask",
]


@dataclass(frozen=True)
class WindowPool:
    """A pool of their own that an engine's sliding-window layers have.

    Parameters
    ----------
    slot_map : Tensor
        ``[slots]`` int32 or int64: for every slot that the request table names, the one in that
        pool; below 0 for none. Only the last ``window_left`` tokens of a request need one.
    window_left : int
        The largest of these layers, at least 0.
    """

    slot_map: Tensor
    window_left: int


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's geometry and caches; `Attention.layer` makes it.

    Parameters
    ----------
    backend : AttentionBackend
        That of its geometry, ``backend.config``.
    k_cache, v_cache : Tensor
        ``[num_slots, num_kv_heads, head_dim]`` and the same with ``v_head_dim``; of ``latent``
        layers ``v_cache`` is a view of ``k_cache``.
    scales : KVScales or None
        Of float8 caches.
    sinks : Tensor or None
        ``[num_qo_heads]`` floats, if the layer has sinks.
    """

    backend: AttentionBackend
    k_cache: Tensor
    v_cache: Tensor
    scales: KVScales | None
    sinks: Tensor | None

    def store(self, slots: Tensor, k: Tensor | tuple[Tensor, Tensor], v: Tensor | None) -> None:
        """Write keys and values, as `Forward.attend` takes them.

        Parameters
        ----------
        slots : Tensor
            ``[B, q]`` int32 or int64; those below 0 are skipped.
        k : Tensor or tuple of Tensor
            ``[T, Hkv, D]``, T being ``B * q``; of latent layers also the latent and the rotated
            part, ``[T, 1, Dv]`` and ``[T, 1, D - Dv]``.
        v : Tensor or None
            ``[T, Hkv, Dv]``; None if ``latent``.

        Raises
        ------
        ValueError
            Before anything is written: if ``v`` is missing, or a tensor has another shape or dtype.
        """
        config, k_cache, count = self.backend.config, self.k_cache, slots.numel()
        if config.latent:
            size = config.v_head_dim
            if isinstance(k, Tensor):
                k = _heads("k", k, count, 1, config.head_dim, config.dtype)
                k = k[..., :size], k[..., size:]
            # with its values a latent key has every number once
            v, k = k
            k_cache = k_cache[..., size:]
        if not isinstance(k, Tensor) or v is None:
            raise ValueError("k and v must be a tensor each, unless the layer is latent")
        heads = config.num_kv_heads
        k = _heads("k", k, count, heads, k_cache.shape[2], config.dtype)
        v = _heads("v", v, count, heads, config.v_head_dim, config.dtype)
        scales = self.scales or KVScales()
        store_kv(k, v, k_cache, self.v_cache, slots, k_scale=scales.k, v_scale=scales.v)


class Attention:
    """Attention over an engine's request table.

    Every geometry has one backend, which all forwards share: they run one after another.

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32, slot of every token; only read. Row 0 and slot 0 belong
        to padding.
    max_batch : int
        Most requests of a forward; inputs are allocated once, for so many.
    backend : str or BackendFactory
        What `specattn.choose_backend` takes.
    window_pool : WindowPool, optional
        That of layers with a window, if they have one of their own.

    Raises
    ------
    ValueError
        If the table is not as described.
    """

    def __init__(
        self,
        req_to_token: Tensor,
        *,
        max_batch: int,
        backend: str | BackendFactory = "auto",
        window_pool: WindowPool | None = None,
    ) -> None:
        shape = tuple(req_to_token.shape)
        if len(shape) != 2:
            raise ValueError(f"req_to_token must be [rows, max_context_len], got {list(shape)}")
        expect("req_to_token", req_to_token, shape, torch.int32, req_to_token.device)
        self.req_to_token, self.device = req_to_token, req_to_token.device
        self.max_batch = whole_number("max_batch", max_batch, 1)
        self._backend = backend
        if window_pool is not None:
            whole_number("window_left", window_pool.window_left, 0)
        self.window_pool = window_pool
        self._backends: dict[tuple[AttnConfig, bool], AttentionBackend] = {}
        self._made_by: dict[AttentionBackend, BackendFactory] = {}
        self._windowed: set[AttentionBackend] = set()
        # a request's row of a window table
        most = max(self.max_batch, len(req_to_token)) if window_pool is not None else 0
        self._order = torch.arange(most, device=self.device)
        self._tables: dict[int, Tensor] = {}
        self._inputs: dict[RowLayout, tuple[AttnInputs, Tensor, Window | None]] = {}
        self._forwards: dict[tuple[RowLayout, int], Forward] = {}
        self._draft_inputs: dict[MultiStepDims, tuple[MultiStepInputs, Tensor]] = {}
        self._drafts: dict[tuple[MultiStepDims, int, int], DraftForwards] = {}

    def layer(
        self,
        config: AttnConfig,
        k_cache: Tensor,
        v_cache: Tensor | None = None,
        scales: KVScales | None = None,
        *,
        windowed: bool = False,
        sinks: Tensor | None = None,
    ) -> Layer:
        """Return a layer over its caches, as layers come.

        Parameters
        ----------
        config : AttnConfig
            The geometry. Caches of float8 (e4m3) make it one of that ``kv_dtype``.
        k_cache, v_cache : Tensor
            ``[num_slots, num_kv_heads, head_dim]`` and the same with ``v_head_dim``, any strides
            with a dense last axis; no ``v_cache`` if ``latent``. Pages are viewed by
            `specattn.cache.external.as_slots`.
        scales : KVScales, optional
            Of float8 caches.
        windowed : bool
            Whether the caches are those of ``window_pool``.
        sinks : Tensor, optional
            ``[num_qo_heads]`` float32, float16 or bfloat16, see `BoundAttention.with_sinks`. They
            make the geometry one with ``sinks``.

        Raises
        ------
        ValueError
            If a cache or the sinks are not as described, or missing, or the pool's window is
            smaller than the layer's.
        UnsupportedError
            If the backend cannot serve the layer, or plans on the host.
        """
        pool = KVPool.from_external(
            [config],
            [k_cache],
            None if v_cache is None else [v_cache],
            scales=None if scales is None else [scales],
        )
        (config,) = pool.layers
        stored = pool.scales[0] if config.kv_dtype is not None else None
        if sinks is not None:
            check_sinks(sinks, config.num_qo_heads, self.device)
            config = replace(config, sinks=True)
        elif config.sinks:
            raise ValueError(f"sinks must be [{config.num_qo_heads}] floats, got None")
        return Layer(self._backend_of(config, windowed), pool.k[0], pool.v[0], stored, sinks)

    def _backend_of(self, config: AttnConfig, windowed: bool) -> AttentionBackend:
        most = -1 if self.window_pool is None else self.window_pool.window_left
        if windowed and not 0 <= config.window_left <= most:
            raise ValueError(
                f"window_left must be 0..{most} (that of window_pool), got {config.window_left}"
            )
        if (config, windowed) not in self._backends:
            chosen = choose_backend(self._backend, [config], self.device)
            if chosen.capabilities.host_plan:
                raise UnsupportedError(f"backend {chosen.name!r}", ["it plans on the host"])
            backend = self._backends[config, windowed] = chosen(config, self.device)
            self._made_by[backend] = chosen
            if windowed:
                self._windowed.add(backend)
        return self._backends[config, windowed]

    def _window(
        self, batch: int, tokens: tuple[int, ...], page_size: int, columns: int
    ) -> Window | None:
        """Return what forwards write for layers of the window pool.

        With ``columns``, those of new tokens, the table is not shared.
        """
        if self.window_pool is None:
            return None
        keys, n = self.window_pool.window_left, math.prod(tokens)
        # zeros are padding
        whole = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        width = max(keys + page_size - 1 + columns, 1)
        table = None if columns else self._tables.get(page_size)
        if table is None:
            table = self.req_to_token.new_zeros(batch, width)
        if not columns:
            # every forward adopts before it attends, so that layouts share one
            self._tables[page_size] = table
        lens, slots, store = self.req_to_token.new_zeros(batch + 2 * n).split([batch, n, n])
        return Window(
            self.window_pool.slot_map,
            keys,
            page_size,
            table,
            lens,
            slots.view(tokens),
            store.view(tokens),
            whole,
        )

    def forward(self, layout: RowLayout, batch: int) -> Forward:
        """Return the forward of ``q_len`` rows per request of ``batch`` requests.

        There is one per layout and batch. The batches of a layout share their inputs, as buckets
        do. Make what a capture needs before it.

        Parameters
        ----------
        layout : RowLayout
            Its tail is its own query tokens: ``tail == q_len``.
        batch : int
            At most ``max_batch``.

        Raises
        ------
        ValueError
            If the tail is another, or the batch is out of range.
        UnsupportedError
            If the backend of a layer refuses the layout, by its pages or its tree.
        """
        if (layout, batch) not in self._forwards:
            if layout.tail != layout.q_len:
                raise ValueError(f"tail must be q_len, {layout.q_len}, got {layout.tail}")
            whole_number("batch", batch, 0, self.max_batch)
            with self._logged(f"{layout.phase.value} of {batch} x {layout.q_len}"):
                self._forwards[layout, batch] = self._made_forward(layout, batch)
        return self._forwards[layout, batch]

    def _made_forward(self, layout: RowLayout, batch: int) -> Forward:
        if layout not in self._inputs:
            inputs = AttnInputs.alloc(self.max_batch, layout, self.device)
            shape = tuple(inputs.tail_slots.shape)
            window = self._window(self.max_batch, shape, layout.page_size, 0)
            self._inputs[layout] = inputs, torch.zeros_like(inputs.tail_slots), window
        inputs, store, window = self._inputs[layout]
        plan = AttnPlan.over(layout, self.req_to_token, inputs.bind(batch))
        return Forward(self, plan, store[:batch], None if window is None else window.first(batch))

    def draft(self, steps: int, topk: int, batch: int, *, page_size: int = 1) -> DraftForwards:
        """Return the forwards of all steps of a draft.

        Parameters
        ----------
        steps, topk : int
            Forwards, and branches of each.
        batch : int
            At most ``max_batch``.
        page_size : int
            As in `specattn.batch.RowLayout`.

        Raises
        ------
        ValueError
            If a number is out of range.
        UnsupportedError
            If the backend of a layer refuses the layout, by its pages or its tree.
        """
        dims = MultiStepDims(whole_number("steps", steps, 1), whole_number("topk", topk, 1))
        key = dims, batch, page_size
        if key not in self._drafts:
            whole_number("batch", batch, 0, self.max_batch)
            with self._logged(f"draft of {batch} x {topk}, {steps} steps"):
                self._drafts[key] = self._made_draft(dims, batch, page_size)
        return self._drafts[key]

    def _made_draft(self, dims: MultiStepDims, batch: int, page_size: int) -> DraftForwards:
        if dims not in self._draft_inputs:
            inputs = MultiStepInputs.alloc(self.max_batch, dims, self.device)
            self._draft_inputs[dims] = inputs, torch.zeros_like(inputs.branch_slots)
        inputs, store = self._draft_inputs[dims]
        topk = dims.topk
        layouts = tuple(
            RowLayout(topk, topk * (step + 1), Phase.DRAFT, topk == 1, page_size)
            for step in range(dims.steps)
        )
        plan = MultiStepPlan(dims, self.req_to_token, inputs.bind(batch), layouts)
        return DraftForwards(self, plan, store[:batch])

    @contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Log what a new forward adds to an accelerator's memory."""
        before = self._allocated()
        yield
        if (grown := self._allocated() - before) > 0:
            log.info("specattn: %.1f MiB for %s", grown / 2**20, what)

    def _allocated(self) -> int:
        cuda = self.device.type == "cuda"
        return torch.cuda.memory_allocated(self.device) if cuda else 0

    def prompts(
        self,
        rows: Tensor,
        prefix_lens: Tensor,
        new_lens: Tensor,
        slots: Tensor,
        *,
        max_q_len: int,
        page_size: int = 1,
    ) -> Forward:
        """Return the forward of ragged prompts over cached prefixes; one launch, eager.

        Parameters
        ----------
        rows, prefix_lens, new_lens : Tensor
            ``[B]`` int32 or int64: table rows, cached tokens, and new ones.
        slots : Tensor
            ``[T]`` int32 or int64: slots of the new tokens, which the table has, too.
        max_q_len : int
            Most new tokens of a request.
        page_size : int
            As in `ExtendPlan`.

        Raises
        ------
        ValueError
            If a tensor has another shape or dtype.
        """
        batch, tokens = rows.numel(), slots.numel()
        whole = torch.empty(batch, dtype=torch.int64, device=self.device)
        numbers = torch.empty(2 * batch + 1 + tokens, dtype=torch.int32, device=self.device)
        lens, indptr, out_slots = numbers.split([batch, batch + 1, tokens])
        window = self._window(batch, (1, tokens), page_size, max_q_len)
        adopt_prompts(
            rows,
            prefix_lens,
            new_lens,
            slots,
            req_to_token=self.req_to_token,
            window=window,
            rows_out=whole,
            seq_lens_out=lens,
            indptr_out=indptr,
            slots_out=out_slots,
        )
        plan = ExtendPlan(
            self.req_to_token,
            whole,
            lens,
            indptr,
            out_slots[None],
            max_q_len=max_q_len,
            max_seq_len=self.req_to_token.shape[1],
            page_size=page_size,
        )
        forward = Forward(self, plan, plan.out_slots, window)
        forward.fill()
        return forward


@dataclass(eq=False)
class Forward:
    """One forward of an engine over a plan; `Attention` makes it.

    Parameters
    ----------
    attention : Attention
        Whose geometries it is bound for.
    plan : AttnPlan or ExtendPlan
        Its inputs.
    store_slots : Tensor
        ``[B, q_len]`` int32: where `attend` stores, skipping what is below 0.
    window : Window, optional
        What layers of the window pool read.
    """

    attention: Attention
    plan: AttnPlan | ExtendPlan
    store_slots: Tensor
    window: Window | None = None
    _bound: dict[AttentionBackend, BoundAttention] = field(default_factory=dict)
    _of_layer: dict[tuple[Layer, bool], tuple[BoundAttention, Tensor]] = field(default_factory=dict)
    _ran: set[AttentionBackend] = field(default_factory=set)

    def __post_init__(self) -> None:
        check_plan(self.plan, self.attention.device)
        for backend in self.attention._made_by:
            # a draft has no layers of a window pool, though its target may
            if self.window is not None or backend not in self.attention._windowed:
                self._bind(backend)

    def _plan_of(self, backend: AttentionBackend) -> AttnPlan | ExtendPlan:
        plan, window = self.plan, self.window
        if backend not in self.attention._windowed:
            return plan
        if window is None:
            raise UnsupportedError("draft steps", ["a window pool of their own is not served"])
        plan = replace(
            plan,
            req_to_token=window.table,
            req_pool_indices=self.attention._order[: len(window.table)],
            seq_lens=window.seq_lens,
        )
        if isinstance(plan, ExtendPlan):
            return replace(plan, out_slots=window.store, max_seq_len=window.table.shape[1])
        where = window.positions
        return replace(plan, tail_slots=window.slots, positions=where, tail_positions=where)

    def _bind(self, backend: AttentionBackend) -> BoundAttention:
        plan, made_by = self._plan_of(backend), self.attention._made_by[backend]
        if is_recording(self.attention.device):
            raise ValueError(
                "a forward must meet a geometry before a capture: make the layer, then the "
                f"forward, or run it once: {backend.config}"
            )
        have = plan.page_size if isinstance(plan, ExtendPlan) else plan.layout.page_size
        need = made_by.capabilities.page_size
        if have % need:
            reason = f"page_size must be a multiple of {need}, got {have}"
            raise UnsupportedError(f"backend {made_by.name!r}", [reason])
        bound = self._bound[backend] = IdleAttention() if plan.idle else backend.bind(plan)
        return bound

    @property
    def graphs(self) -> bool:
        """Whether all that is bound may be recorded in a CUDA graph."""
        return all(recordable(backend, self.plan) for backend in self._bound)

    def adopt(
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
        """Adopt what the engine knows of the forward, then `fill`.

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
            How the mask lies, see `specattn.kernels.adopt.adopt_rows`: ``"qlen"``,
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
            raise ValueError("prompts are adopted by Attention.prompts")
        if plan.layout.causal and (mask is not None or kind == "prefix"):
            raise ValueError("mask must be None with a causal layout, whose rows are causal")
        whole_number("counted", counted, 0)
        shape = plan.tail_slots.shape
        adopt_rows(
            rows,
            seq_lens,
            _by_request("slots", slots, shape),
            _by_request("positions", positions, shape),
            mask,
            kind=kind,
            counted=counted,
            req_to_token=plan.req_to_token,
            out=Adopted(
                plan.req_pool_indices,
                plan.seq_lens,
                plan.tail_slots,
                self.store_slots,
                plan.positions,
                plan.tail_words,
            ),
            window=self.window,
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
                [_heads("q", part, count, heads, dim, config.dtype) for part, dim in parts], -1
            )
        if out is None:
            shape = (count, heads, size) if q.dim() == 3 else (count, heads * size)
            out = q.new_empty(shape)
        queries = _heads("q", q, count, heads, config.head_dim, config.dtype)
        found = _heads("out", out, count, heads, size, config.dtype)
        bound, slots = self._bound_of(layer)
        if k is not None:
            layer.store(slots, k, v)
        bound.run(queries, layer.k_cache, layer.v_cache, found, lse)
        return out

    def _bound_of(self, layer: Layer) -> tuple[BoundAttention, Tensor]:
        """Return the attention of a layer, and where it stores."""
        backend = layer.backend
        if backend not in self._bound:
            self._bind(backend).fill()
        prefetch = backend in self._ran
        self._ran.add(backend)
        if (layer, prefetch) not in self._of_layer:
            bound = self._bound[backend].for_layer(layer.scales, prefetch=prefetch)
            if layer.sinks is not None:
                bound = bound.with_sinks(layer.sinks)
            slots = self.store_slots
            if self.window is not None and backend in self.attention._windowed:
                slots = self.window.store
            self._of_layer[layer, prefetch] = bound, slots
        return self._of_layer[layer, prefetch]


class DraftForwards:
    """The forwards of all steps of a draft, over shared inputs.

    Parameters
    ----------
    attention : Attention
        Whose geometries they are bound for.
    plan : MultiStepPlan
        All steps.
    store : Tensor
        ``[B, steps, topk]`` int32: where branches store, skipping what is below 0.

    Attributes
    ----------
    steps : tuple of Forward
        One per step; only their `Forward.attend` is needed.
    """

    def __init__(self, attention: Attention, plan: MultiStepPlan, store: Tensor) -> None:
        self.plan, self._store = plan, store
        self.steps = tuple(
            Forward(attention, plan.step(step), store[:, step]) for step in range(plan.dims.steps)
        )

    def adopt(
        self,
        rows: Tensor,
        seq_lens: Tensor,
        slots: Tensor | None = None,
        *,
        order: str = "branch",
        counted: int = 0,
        fill: bool = True,
    ) -> None:
        """Adopt what the engine knows of all steps, then `fill`; see `Forward.adopt`.

        A branch sees itself alone until `grow` has run, and the steps before it in a chain.

        Parameters
        ----------
        rows, seq_lens, counted, fill
            As in `Forward.adopt`.
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
        adopt_steps(
            rows,
            seq_lens,
            None if slots is None or not len(self._store) else self._by_step(slots, order),
            counted=counted,
            req_to_token=plan.req_to_token,
            out=Adopted(
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


def _heads(
    name: str, tensor: Tensor, count: int, heads: int, size: int, dtype: torch.dtype
) -> Tensor:
    """View a tensor as ``[T, heads, size]``."""
    flat = tensor.dim() == 2
    expect(
        name,
        tensor,
        (count, heads * size) if flat else (count, heads, size),
        dtype,
        tensor.device,
    )
    return tensor.unflatten(1, (heads, size)) if flat else tensor
