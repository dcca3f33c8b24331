"""Multi-step drafting: what all draft steps share, and the layers of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from specattn.attention.bound import check_places
from specattn.backends.base import CompositeAttention
from specattn.checks import one_of, whole_number
from specattn.kernels.indices import (
    KeySlots,
    draft_kv_width,
    fill_draft_kv,
    fill_draft_tails,
    fill_window,
)
from specattn.kernels.masks import PlanInputs, copy_in_steps
from specattn.kernels.tree import grow_words
from specattn.plan import CsrPlan, MultiStepDims, MultiStepInputs

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.attention.bound import BoundLayers
    from specattn.attention.layers import Layers

Indices = Literal["table", "csr"]


class MultiStepDraftBackend:
    """A draft's layers over all its decode forwards, and what these share.

    Step s reads the request's prefix and the draft nodes of steps 0..s that are its ancestors. With
    ``indices="table"`` a step is an `AttnPlan`: the prefix is read once for all branches, through
    ``req_to_token``. With ``indices="csr"`` step s is row s of ``kv_indptr`` and ``kv_indices``: a
    list per branch, for hosts and libraries that know only lists. Both give the same attention.

    Parameters
    ----------
    layers : Layers
        The draft's.
    dims : MultiStepDims
        Steps and branches.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32.
    max_batch : int
        Largest bucket; buffers are allocated once, for it.
    indices : {"table", "csr"}
        What the steps read.
    stored : Tensor, optional
        ``[max_batch, steps, topk]`` int32, where branches store, skipping what is below 0; without,
        in the slots that they read.
    shared : dict of Tensor
        Fields of `MultiStepInputs` that others own.

    Attributes
    ----------
    kv_indptr : Tensor
        ``[steps, max_batch * topk + 1]`` int32 (``indices="csr"``).
    kv_indices : Tensor
        ``[steps, width]`` int32, `draft_kv_width` slots per step (``indices="csr"``).

    Raises
    ------
    ValueError
        If ``indices`` is another word, or a row of ``kv_indices`` would exceed 2^31 entries.
    UnsupportedError
        If a backend serves no index lists, and ``indices`` is ``"csr"``.
    """

    def __init__(
        self,
        layers: Layers,
        dims: MultiStepDims,
        req_to_token: Tensor,
        max_batch: int,
        indices: Indices = "table",
        *,
        stored: Tensor | None = None,
        **shared: Tensor,
    ) -> None:
        layers.check_indices(indices)
        self.layers, self.dims = layers, dims
        self.indices: Indices = indices
        self.req_to_token = req_to_token
        inputs = MultiStepInputs.alloc(max_batch, dims, req_to_token.device)
        self.inputs = inputs.sharing(shared)
        self.stored = self.inputs.branch_slots if stored is None else stored
        width = rows = 0
        if indices == "csr":
            width = draft_kv_width(max_batch, dims.topk, req_to_token.shape[1], dims.steps)
            rows = max_batch * dims.topk + 1
        self.kv_indptr = req_to_token.new_zeros(dims.steps, rows)
        self.kv_indices = req_to_token.new_zeros(dims.steps, width)

    def bind(self, batch: int) -> BoundMultiStep:
        """Bind all steps to the first ``batch`` rows of the shared buffers."""
        dims, inputs, stored = self.dims, self.inputs.bind(batch), self.stored[:batch]
        indptr = self.kv_indptr[:, : batch * dims.topk + 1]
        bound = []
        for index in range(dims.steps):
            table = inputs.step(index, dims, self.req_to_token)
            lists = CsrPlan(table.layout, indptr[index], self.kv_indices[index], table.out_slots)
            step = lists if self.indices == "csr" else table
            bound.append(self.layers.bind(step, slots=stored[:, index]))
        return BoundMultiStep(
            dims,
            self.req_to_token,
            inputs,
            tuple(bound),
            self.indices,
            stored,
            indptr,
            self.kv_indices,
        )


@dataclass(frozen=True)
class BoundMultiStep(CompositeAttention):
    """All draft decode steps of a bucket; `MultiStepDraftBackend.bind` makes it."""

    dims: MultiStepDims
    req_to_token: Tensor
    inputs: MultiStepInputs
    steps: tuple[BoundLayers, ...]
    indices: Indices
    stored: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor

    def parts(self) -> tuple[BoundLayers, ...]:
        """Return the steps."""
        return self.steps

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

        See `BoundLayers.copy_in`.

        A branch sees itself alone until `grow` has run, and the steps before it in a chain.

        Parameters
        ----------
        rows, seq_lens, counted, fill
            As in `BoundLayers.copy_in`.
        slots : Tensor, optional
            The branches' slots, flat or not, of at least as many steps. Without, the table's
            columns after the prefix, step by step.
        order : {"branch", "step"}
            Whether ``slots`` are ``[B, topk, steps]``, as SGLang has them, or
            ``[B, steps, topk]``.

        Raises
        ------
        ValueError
            Before anything is written, as `BoundLayers.copy_in`.
        """
        inputs = self.inputs
        one_of("order", order, "branch", "step")
        whole_number("counted", counted, 0)
        new = self.dims.steps * self.dims.topk if slots is None else 0
        check_places(rows, seq_lens, self.req_to_token, new - counted)
        copy_in_steps(
            rows,
            seq_lens,
            None if slots is None or not len(self.stored) else self._by_step(slots, order),
            counted=counted,
            req_to_token=self.req_to_token,
            out=PlanInputs(
                inputs.req_pool_indices,
                inputs.seq_lens,
                inputs.branch_slots,
                self.stored,
                inputs.positions,
                inputs.words,
            ),
        )
        if fill:
            self.fill()

    def _by_step(self, slots: Tensor, order: str) -> Tensor:
        """View slots as ``[B, steps, topk]``."""
        dims, batch = self.dims, len(self.stored)
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

        At step 0, and in a chain, no word changes. Parameters and errors are those of `grow_words`.
        """
        if step and self.dims.topk > 1:
            grow_words(self.inputs.words, step, parents, flat=flat)
        self.fill_ancestors(step)

    @cached_property
    def _key_slots(self) -> KeySlots:
        inputs = self.inputs
        prefix = self.req_to_token, inputs.req_pool_indices, inputs.seq_lens
        return KeySlots(*prefix, inputs.branch_slots)

    def fill_slots(self) -> None:
        """Fill all steps' slots and positions: the columns after the prefix."""
        keys = self._key_slots
        fill_window(keys._replace(tail=keys.tail.flatten(1)), positions_out=self.inputs.positions)

    def fill(self) -> None:
        """Fill the index lists, then every step's device plan, together.

        Lengths are known for all steps up front; the ancestors of a step are not, so its lists
        end with whatever the words say now, until `fill_ancestors` has run for that step.
        """
        self.fill_lists()
        super().fill()

    def fill_lists(self) -> None:
        """Fill the index lists (``indices="csr"``) from slots, lengths and words."""
        if self.indices == "csr" and self.steps:
            fill_draft_kv(
                self._key_slots,
                self.inputs.words,
                kv_indptr=self.kv_indptr,
                kv_indices=self.kv_indices,
            )

    def fill_ancestors(self, step: int) -> None:
        """Bring step ``step`` up to date with its ancestor words; capturable."""
        if self.indices == "csr":
            fill_draft_tails(
                step,
                self._key_slots,
                self.inputs.words,
                kv_indptr=self.kv_indptr,
                kv_indices=self.kv_indices,
            )

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule every step."""
        for step in self.steps:
            step.schedule(seq_lens_cpu)
