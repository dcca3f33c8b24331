"""Attention over an engine's request table."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.attention.bound import BoundLayers, check_places
from specattn.attention.layers import Layer, Layers
from specattn.attention.multi_step import BoundMultiStep, MultiStepDraftBackend
from specattn.attention.window import WindowTables
from specattn.backends import choose_backend
from specattn.cache.kv_pool import KVPool
from specattn.checks import expect, whole_number
from specattn.errors import UnsupportedError
from specattn.kernels.attention import check_sinks
from specattn.kernels.masks import copy_in_prompts
from specattn.plan import AttnInputs, AttnPlan, ExtendPlan, MultiStepDims

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specattn.attention.window import WindowPool
    from specattn.backends.base import BackendFactory
    from specattn.batch import RowLayout
    from specattn.config import AttnConfig, KVScales

log = logging.getLogger(__name__)


class Attention(Layers):
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
        super().__init__(req_to_token.device)
        self.req_to_token = req_to_token
        self.max_batch = whole_number("max_batch", max_batch, 1)
        self._backend = backend
        self.window_pool = window_pool
        self._windows = (
            None if window_pool is None else WindowTables(window_pool, req_to_token, self.max_batch)
        )
        self._inputs: dict[RowLayout, tuple[AttnInputs, Tensor]] = {}
        self._forwards: dict[tuple[RowLayout, int], BoundLayers] = {}
        self._drafts: dict[MultiStepDims, MultiStepDraftBackend] = {}
        self._draft_forwards: dict[tuple[MultiStepDims, int], BoundMultiStep] = {}

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
        if sinks is not None:
            check_sinks(sinks, config.num_qo_heads, self.device)
            config = replace(config, sinks=True)
        elif config.sinks:
            raise ValueError(f"sinks must be [{config.num_qo_heads}] floats, got None")
        most = -1 if self.window_pool is None else self.window_pool.window_left
        if windowed and not 0 <= config.window_left <= most:
            raise ValueError(
                f"window_left must be 0..{most} (that of window_pool), got {config.window_left}"
            )
        return Layer(self.group(config, int(windowed)), pool, 0, sinks)

    def made_by(self, config: AttnConfig) -> BackendFactory:
        """Choose the backend of a geometry, which must plan on the device."""
        chosen = choose_backend(self._backend, [config], self.device)
        if chosen.capabilities.host_plan:
            raise UnsupportedError(f"backend {chosen.name!r}", ["it plans on the host"])
        return chosen

    def forward(self, layout: RowLayout, batch: int) -> BoundLayers:
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

    def _made_forward(self, layout: RowLayout, batch: int) -> BoundLayers:
        if layout not in self._inputs:
            inputs = AttnInputs.alloc(self.max_batch, layout, self.device)
            self._inputs[layout] = inputs, torch.zeros_like(inputs.tail_slots)
        inputs, store = self._inputs[layout]
        plan = AttnPlan.over(layout, self.req_to_token, inputs.bind(batch))
        return self._bound(plan, store[:batch])

    def _bound(self, plan: AttnPlan | ExtendPlan, slots: Tensor) -> BoundLayers:
        if self._windows is None:
            return self.bind(plan, slots=slots)
        other, window = self._windows.over(plan)
        stored = slots, window.store
        return BoundLayers(self.groups.values(), (), (plan, other), stored, window, filled=False)

    def draft(self, steps: int, topk: int, batch: int, *, page_size: int = 1) -> BoundMultiStep:
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
        steps, topk = whole_number("steps", steps, 1), whole_number("topk", topk, 1)
        dims = MultiStepDims(steps, topk, page_size)
        if (dims, batch) not in self._draft_forwards:
            with self._logged(f"draft of {batch} x {topk}, {steps} steps"):
                self._draft_forwards[dims, batch] = self._draft_of(dims).bind(batch)
        return self._draft_forwards[dims, batch]

    def _draft_of(self, dims: MultiStepDims) -> MultiStepDraftBackend:
        if dims not in self._drafts:
            stored = self.req_to_token.new_zeros(self.max_batch, dims.steps, dims.topk)
            self._drafts[dims] = MultiStepDraftBackend(
                self, dims, self.req_to_token, self.max_batch, stored=stored
            )
        return self._drafts[dims]

    @contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Log what a new forward adds to an accelerator's memory."""
        if self.device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self.device)
        yield
        if (grown := torch.cuda.memory_allocated(self.device) - before) > 0:
            log.info("specattn: %.1f MiB for %s", grown / 2**20, what)

    def prompts(  # noqa: PLR0913 - as its docstring says
        self,
        rows: Tensor,
        prefix_lens: Tensor,
        new_lens: Tensor,
        slots: Tensor,
        *,
        max_q_len: int,
        max_seq_len: int | None = None,
        page_size: int = 1,
    ) -> BoundLayers:
        """Return the forward of ragged prompts over cached prefixes; one launch, eager.

        Parameters
        ----------
        rows, prefix_lens, new_lens : Tensor
            ``[B]`` int32 or int64: table rows, cached tokens, and new ones.
        slots : Tensor
            ``[T]`` int32 or int64: slots of the new tokens, which the table has, too.
        max_q_len : int
            Most new tokens of a request.
        max_seq_len : int, optional
            Most cached and new tokens of a request, or more; a context by default. Libraries size
            their work by it.
        page_size : int
            As in `ExtendPlan`.

        Raises
        ------
        ValueError
            If a tensor has another shape or dtype; on a CPU also if a row or a token's place is
            outside the table.
        """
        if self.device.type == "cpu":  # elsewhere the sum is a launch
            check_places(rows, prefix_lens + new_lens, self.req_to_token)
        batch, tokens = rows.numel(), slots.numel()
        whole = torch.empty(batch, dtype=torch.int64, device=self.device)
        # each with memory of its own: kernels are compiled for how it is aligned
        lens, indptr, out_slots = (
            torch.empty(size, dtype=torch.int32, device=self.device)
            for size in (batch, batch + 1, tokens)
        )
        plan = ExtendPlan(
            self.req_to_token,
            whole,
            lens,
            indptr,
            out_slots[None],
            max_q_len=max_q_len,
            max_seq_len=self.req_to_token.shape[1] if max_seq_len is None else max_seq_len,
            page_size=page_size,
        )
        forward = self._bound(plan, plan.out_slots)
        copy_in_prompts(
            rows,
            prefix_lens,
            new_lens,
            slots,
            req_to_token=self.req_to_token,
            window=forward.window,
            rows_out=whole,
            seq_lens_out=lens,
            indptr_out=indptr,
            slots_out=out_slots,
        )
        forward.fill()
        return forward
