"""Multi-step drafting: what all draft steps share, and a backend of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specattn.backends.base import fill_all
from specattn.batch import ForwardMode
from specattn.kernels.indices import draft_kv_width, fill_draft_kv, fill_draft_tails
from specattn.plan import CsrPlan, MultiStepDims, MultiStepInputs, MultiStepPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.attention.layers import BoundLayers, LayeredBackend
    from specattn.config import SpecConfig

Indices = Literal["table", "csr"]


class MultiStepDraftBackend:
    """A draft model's backends over all draft steps.

    It wraps them and owns what their ``num_steps - 1`` forwards share. Step s reads the request's
    prefix and the draft nodes of steps 0..s that are its ancestors. With ``indices="table"`` a step
    is an `AttnPlan`: the prefix is read once for all branches, through ``req_to_token``. With
    ``indices="csr"`` step s is row s of ``kv_indptr`` and ``kv_indices``: a list per branch, for
    hosts and libraries that know only lists. Both give the same attention.

    Parameters
    ----------
    backend : LayeredBackend
        The draft model's layers.
    config : SpecConfig
        Steps, branches and context length.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32.
    max_batch : int
        Largest bucket; buffers are allocated once, for it.
    indices : {"table", "csr"}
        What the steps read.
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
        If the backend serves no index lists, and ``indices`` is ``"csr"``.
    """

    def __init__(
        self,
        backend: LayeredBackend,
        config: SpecConfig,
        req_to_token: Tensor,
        max_batch: int,
        indices: Indices = "table",
        **shared: Tensor,
    ) -> None:
        backend.check_indices(indices)
        self.backend, self.config = backend, config
        self.dims = MultiStepDims(config.num_draft_forwards, config.topk)
        self.indices = indices
        self.req_to_token = req_to_token
        inputs = MultiStepInputs.alloc(max_batch, self.dims, req_to_token.device)
        self.inputs = inputs.sharing(shared)
        width = 0
        if indices == "csr":
            width = draft_kv_width(max_batch, config.topk, config.max_context_len, self.dims.steps)
        rows = max_batch * config.topk + 1 if width else 0
        self.kv_indptr = req_to_token.new_zeros(self.dims.steps, rows)
        self.kv_indices = req_to_token.new_zeros(self.dims.steps, width)

    def bind(self, batch: int) -> BoundMultiStep:
        """Bind all steps to the first ``batch`` rows of the shared buffers."""
        layouts = tuple(
            self.config.layout(ForwardMode.DRAFT_DECODE, step) for step in range(self.dims.steps)
        )
        plan = MultiStepPlan(self.dims, self.req_to_token, self.inputs.bind(batch), layouts)
        indptr = self.kv_indptr[:, : batch * self.config.topk + 1]
        steps: list[Plan] = [plan.step(step) for step in range(self.dims.steps)]
        if self.indices == "csr":
            steps = [
                CsrPlan(
                    layouts[step],
                    indptr[step],
                    self.kv_indices[step],
                    plan.inputs.branch_slots[:, step],
                )
                for step in range(self.dims.steps)
            ]
        bound = tuple(self.backend.bind(step) for step in steps)
        return BoundMultiStep(plan, bound, self.indices, indptr, self.kv_indices)


@dataclass(frozen=True)
class BoundMultiStep:
    """All draft decode steps of a bucket."""

    plan: MultiStepPlan
    steps: tuple[BoundLayers, ...]
    indices: Indices
    kv_indptr: Tensor
    kv_indices: Tensor

    def fill(self) -> None:
        """Fill slots, positions, index lists and every step's device plan.

        Lengths are known for all steps up front; the ancestors of a step are not, so its lists
        end with whatever the words say now, until `fill_ancestors` has run for that step.
        """
        self.plan.fill()
        self.fill_lists()
        fill_all(self.steps)

    def fill_lists(self) -> None:
        """Fill the index lists (``indices="csr"``) from slots, lengths and words."""
        if self.indices == "csr" and self.steps:
            plan, inputs = self.plan, self.plan.inputs
            fill_draft_kv(
                plan.req_to_token,
                inputs.req_pool_indices,
                inputs.seq_lens,
                inputs.branch_slots,
                inputs.words,
                self.kv_indptr,
                self.kv_indices,
            )

    def fill_ancestors(self, step: int) -> None:
        """Bring step ``step`` up to date with its ancestor words; capturable."""
        if self.indices == "table":
            return
        inputs = self.plan.inputs
        fill_draft_tails(
            step,
            inputs.seq_lens,
            inputs.branch_slots,
            inputs.words,
            self.kv_indptr,
            self.kv_indices,
        )

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule every step."""
        for step in self.steps:
            step.schedule(seq_lens_cpu)
