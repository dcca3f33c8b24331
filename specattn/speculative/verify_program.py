"""Target verify and plain decoding as a captured forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.buffers import BufferSet, Fingerprint, buf
from specattn.plan import AttnInputs, AttnPlan
from specattn.speculative.programs import ROWS, copy_in_all, describe

if TYPE_CHECKING:
    from specattn.backends.layers import BoundLayers, LayeredBackend
    from specattn.batch import RowLayout
    from specattn.speculative.model import TargetModel


@dataclass(frozen=True)
class VerifyOutput:
    """What a verify (or plain decode) forward leaves.

    Parameters
    ----------
    logits : Tensor
        ``[B, n, V]``, the target's logits after every node.
    features : Tensor
        ``[B, n, F]``, the target hidden states the draft model reads; F is 0 without one.
    tail_slots : Tensor
        ``[B, n]`` int32, where the nodes' KV was written.
    """

    logits: Tensor
    features: Tensor
    tail_slots: Tensor


@dataclass(frozen=True)
class _Tokens(BufferSet):
    """One token per query; the dimensions are the layout."""

    tokens: Tensor = buf(lambda d: (d.q_len,), torch.int64)


class VerifyProgram:
    """One target forward over the nodes of each request's tree (plain decoding: over one).

    Parameters
    ----------
    target : TargetModel
        The model.
    backend : LayeredBackend
        Its attention.
    layout : RowLayout
        Of `ForwardMode.TARGET_VERIFY` or `ForwardMode.DECODE`.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32.
    batch : int
        Largest bucket.
    shared : dict of Tensor
        Buffers that others own and this program reads in place of its own, by name.
    """

    def __init__(
        self,
        target: TargetModel,
        backend: LayeredBackend,
        layout: RowLayout,
        req_to_token: Tensor,
        batch: int,
        **shared: Tensor,
    ) -> None:
        self.target, self.backend = target, backend
        self.layout, self.req_to_token = layout, req_to_token
        device = req_to_token.device
        self.inputs = AttnInputs.alloc(batch, layout, device).sharing(shared)
        self.tokens = _Tokens.alloc(batch, layout, device).sharing(shared)

    def bind(self, bucket: int) -> BoundVerify:
        """Bind to the first ``bucket`` rows."""
        inputs = self.inputs.bind(bucket)
        plan = AttnPlan.over(self.layout, self.req_to_token, inputs)
        return BoundVerify(
            self.target, plan, inputs, self.tokens.bind(bucket), self.backend.bind(plan)
        )


@dataclass(frozen=True)
class BoundVerify:
    """`VerifyProgram` over a bucket."""

    target: TargetModel
    plan: AttnPlan
    inputs: AttnInputs
    tokens: _Tokens
    attend: BoundLayers

    @property
    def graphs(self) -> bool:
        """Whether the attention may be recorded."""
        return self.attend.graphs

    @property
    def takes(self) -> frozenset[str]:
        """Tokens and positions of the nodes, their words, rows and lengths."""
        return frozenset({"tokens", "positions", "tail_words", *ROWS})

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Take ``tokens, positions [count, n]``, ``tail_words``, rows and lengths."""
        layout = self.plan.layout
        copy_in_all(values, (self.inputs, layout), (self.tokens, layout))

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule the attention."""
        self.attend.schedule(seq_lens_cpu)

    def fill(self) -> None:
        """Look up the tail's slots, then let the backend derive what it needs."""
        self.plan.fill()
        self.attend.fill()

    def run(self) -> VerifyOutput:
        """Run the target."""
        batch, nodes = self.tokens.tokens.shape
        out = self.target.forward(
            self.tokens.tokens.flatten(), self.inputs.positions.flatten(), self.attend, None
        )
        features = out.hidden_states
        if features is None:
            features = out.logits.new_empty(batch * nodes, 0)
        return VerifyOutput(
            out.logits.unflatten(0, (batch, nodes)),
            features.unflatten(0, (batch, nodes)),
            self.inputs.tail_slots,
        )

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers, the request table and the pool."""
        found = describe(self.plan.layout, self.plan.req_to_token, self.inputs, self.tokens)
        return found + self.attend.fingerprint()

    def watched(self) -> tuple[object, ...]:
        """Return the objects whose attributes `fingerprint` reads, and tensors others can reach."""
        own = (self, self.plan, self.plan.req_to_token, self.inputs, self.tokens)
        return *own, *self.attend.watched()
