"""Draft extend as a captured forward: the draft model over the accepted path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.batch import DraftState, ForwardMode, RowLayout
from specattn.buffers import BufferSet, Fingerprint, buf
from specattn.kernels.indices import fill_window
from specattn.plan import AttnInputs, AttnPlan
from specattn.speculative.draft_tokens import Coins, choose_tokens, drawing_names
from specattn.speculative.programs import ROWS, copy_in_all, describe

if TYPE_CHECKING:
    from specattn.backends.layers import BoundLayers, LayeredBackend
    from specattn.config import SpecConfig
    from specattn.speculative.model import DraftModel


@dataclass(frozen=True)
class _ExtendDims:
    layout: RowLayout
    features: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Accepted(BufferSet):
    """The accepted path, padded to the tree's depth, and what follows from its length.

    ``last_rows`` is the flat row of the last accepted token, ``after`` its position plus one.
    """

    tokens: Tensor = buf(lambda d: (d.layout.q_len,), torch.int64)
    features: Tensor = buf(lambda d: (d.layout.q_len, d.features), lambda d: d.dtype)
    accept_lens: Tensor = buf(lambda _: (), torch.int32)
    last_rows: Tensor = buf(lambda _: (), torch.int64)
    after: Tensor = buf(lambda _: (), torch.int64)


class ExtendProgram:
    """The draft model over the accepted path, on the lengths before the step's commit.

    Row i reads the token that follows path node i, with the target's features at that node.

    Parameters
    ----------
    draft : DraftModel
        The draft head.
    backend : LayeredBackend
        Its attention.
    config : SpecConfig
        Depth and branches.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32.
    features : int
        Width of the target's features.
    batch : int
        Largest bucket.
    topk : int, optional
        Tokens to propose for the next step; ``config.topk`` if None.
    shared : dict of Tensor
        Buffers that others own and this program reads in place of its own, by name.
    """

    def __init__(
        self,
        draft: DraftModel,
        backend: LayeredBackend,
        config: SpecConfig,
        req_to_token: Tensor,
        features: int,
        batch: int,
        topk: int | None = None,
        **shared: Tensor,
    ) -> None:
        self.draft, self.backend = draft, backend
        # any depth will do to say how many are proposed; one step fits wherever this one does
        self.config = (
            config if topk is None else replace(config, num_steps=1, topk=topk, num_draft_tokens=2)
        )
        self.req_to_token = req_to_token
        layout = config.layout(ForwardMode.DRAFT_EXTEND)
        self.dims = _ExtendDims(layout, features, draft.layers[0].dtype)
        device = req_to_token.device
        self.inputs = AttnInputs.alloc(batch, layout, device).sharing(shared)
        self.accepted = _Accepted.alloc(batch, self.dims, device).sharing(shared)
        self.coins = Coins.alloc(batch, None, device).sharing(shared)

    def bind(self, bucket: int) -> BoundExtend:
        """Bind to the first ``bucket`` rows."""
        inputs = self.inputs.bind(bucket)
        plan = AttnPlan.over(self.dims.layout, self.req_to_token, inputs)
        return BoundExtend(
            self.draft,
            self.config,
            self.dims,
            plan,
            inputs,
            self.accepted.bind(bucket),
            self.coins.bind(bucket),
            self.backend.bind(plan),
        )


@dataclass(frozen=True)
class BoundExtend:
    """`ExtendProgram` over a bucket."""

    draft: DraftModel
    config: SpecConfig
    dims: _ExtendDims
    plan: AttnPlan
    inputs: AttnInputs
    accepted: _Accepted
    coins: Coins
    attend: BoundLayers

    @property
    def graphs(self) -> bool:
        """Whether the attention may be recorded."""
        return self.attend.graphs

    @property
    def takes(self) -> frozenset[str]:
        """The accepted path with its features, rows and lengths, and what sampled drafts need."""
        path = ("tokens", "features", "accept_lens")
        return frozenset({*path, *ROWS, *drawing_names(self.config)})

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Take ``tokens [count, N + 1]``, ``features``, ``accept_lens``, rows and lengths."""
        copy_in_all(
            values, (self.inputs, self.dims.layout), (self.accepted, self.dims), (self.coins, None)
        )

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule the attention."""
        self.attend.schedule(seq_lens_cpu)

    def fill(self) -> None:
        """Derive positions and slots of the window after the committed context."""
        inputs, accepted = self.inputs, self.accepted
        fill_window(
            self.plan.req_to_token,
            inputs.req_pool_indices,
            inputs.seq_lens,
            slots_out=inputs.tail_slots,
            positions_out=inputs.positions[:, :, None],
            accept_lens=accepted.accept_lens,
            last_rows_out=accepted.last_rows,
            after_out=accepted.after,
        )
        self.attend.fill()

    def run(self) -> DraftState:
        """Run the draft model; only the last accepted row reaches ``lm_head``."""
        accepted = self.accepted
        out = self.draft.forward(
            accepted.tokens.flatten(),
            self.draft.combine(accepted.features.flatten(0, 1)),
            self.inputs.positions.flatten(),
            self.attend,
            accepted.last_rows,
        )
        # the token proposed here follows the bonus token
        chosen = choose_tokens(self.draft, out.logits, self.config, self.coins, accepted.after)
        return DraftState(chosen.probs, chosen.tokens, out.hidden_states, chosen.law)

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers, the request table and the pool."""
        found = describe(
            self.config, self.plan.req_to_token, self.inputs, self.accepted, self.coins
        )
        return found + self.attend.fingerprint()

    def watched(self) -> tuple[object, ...]:
        """Return the objects whose attributes `fingerprint` reads, and tensors others can reach."""
        plan = self.plan
        own = (self, plan, plan.req_to_token, self.inputs, self.accepted, self.coins)
        return *own, *self.attend.watched()
