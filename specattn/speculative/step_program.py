"""A whole speculative step over request states: one program, recorded whole or in three parts.

The rows that take part are the step's only input. What it reads besides, it finds on the device
(`RequestStates`), and there it leaves what the next step reads; the host gets a copy of the
accepted tokens. The forwards are those of `ProposeProgram`, `VerifyProgram` and `ExtendProgram`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specattn.batch import DraftTree, ForwardMode
from specattn.speculative.bound_step import Acceptor, BoundStep
from specattn.speculative.draft import ProposeProgram
from specattn.speculative.extend import ExtendProgram
from specattn.speculative.step_buffers import StepAccepted, StepInputs, StepLinks, StepOutput
from specattn.speculative.step_parts import BoundPart, StepPart
from specattn.speculative.verify import accept
from specattn.speculative.verify_program import VerifyProgram

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.multi_step import Indices
    from specattn.config import SpecConfig
    from specattn.speculative.decoder import ModelSlot
    from specattn.speculative.host_buffers import HostBuffers
    from specattn.speculative.model import DraftModel, TargetModel
    from specattn.speculative.states import RequestStates

__all__ = [
    "Acceptor",
    "BoundPart",
    "BoundStep",
    "PartProgram",
    "StepInputs",
    "StepOutput",
    "StepPart",
    "StepProgram",
]


class StepProgram:
    """All programs of a step over shared buffers.

    Parameters
    ----------
    target : ModelSlot
        The target model.
    draft : ModelSlot or None
        The draft model; needed unless ``config.num_steps`` is 0, and then kept up to date, so
        that a later step can draft.
    config : SpecConfig
        Tree width and depth.
    req_to_token, reserved : Tensor
        ``[rows, max_context_len]`` and ``[rows]`` int32; see `specattn.cache.slot_table.SlotTable`.
    states : RequestStates
        What steps leave for each other.
    ring : HostBuffers
        Where steps find their rows, and tell the host what they gained.
    features : int
        Width of the target features the draft reads.
    batch : int
        Largest bucket.
    indices : {"table", "csr"}
        What the draft steps read.
    accept : Acceptor
        What decides how much of a tree is kept.
    """

    def __init__(
        self,
        target: ModelSlot[TargetModel],
        draft: ModelSlot[DraftModel] | None,
        config: SpecConfig,
        req_to_token: Tensor,
        reserved: Tensor,
        states: RequestStates,
        ring: HostBuffers,
        *,
        features: int,
        batch: int,
        indices: Indices = "table",
        accept: Acceptor = accept,
    ) -> None:
        self.target, self.config, self.accept = target, config, accept
        self.reserved, self.states, self.ring = reserved, states, ring
        device = req_to_token.device
        self.inputs = StepInputs.alloc(batch, config, device)
        self.links = StepLinks.alloc(batch, config, device)
        self.accepted = StepAccepted.alloc(batch, config, device)
        self._bound: dict[int, BoundStep] = {}
        self.propose: ProposeProgram | None = None
        self.extend: ExtendProgram | None = None
        inputs, window, depth = self.inputs, self.inputs.window, config.num_steps
        everywhere = {
            name: getattr(inputs, name)
            for name in ("req_pool_indices", "seq_lens", "temperature", "seeds")
        }
        plain = {} if depth else {"tokens": inputs.roots[:, None], "positions": inputs.positions}
        mode = ForwardMode.TARGET_VERIFY if depth else ForwardMode.DECODE
        self.verify = VerifyProgram(
            target.model,
            target.backend,
            config.layout(mode),
            req_to_token,
            batch,
            tail_slots=window[:, : config.num_draft_tokens],
            **everywhere,
            **plain,
        )
        if draft is None:
            return
        if depth:
            drafted = window[:, : config.num_draft_forwards * config.topk]
            self.propose = ProposeProgram(
                draft.model,
                draft.backend,
                config,
                req_to_token,
                batch,
                indices,
                branch_slots=drafted.unflatten(1, (-1, config.topk)),
                **everywhere,
            )
        self.extend = ExtendProgram(
            draft.model,
            draft.backend,
            config,
            req_to_token,
            features,
            batch,
            states.topk_probs.shape[1],
            positions=inputs.positions,
            tail_slots=window[:, : depth + 1],
            tokens=self.accepted.accept_tokens,
            accept_lens=self.accepted.accept_lens,
            **everywhere,
        )

    def part(self, part: StepPart) -> PartProgram:
        """Return one part of the step."""
        return PartProgram(self, part)

    def bind(self, bucket: int) -> BoundStep:
        """Bind to the first ``bucket`` rows; once per bucket, for all parts share what is bound."""
        if bucket not in self._bound:
            self._bound[bucket] = self._bind(bucket)
        return self._bound[bucket]

    def _bind(self, bucket: int) -> BoundStep:
        verify = self.verify.bind(bucket)
        links, accepted = self.links.bind(bucket), self.accepted.bind(bucket)
        inputs = self.inputs.bind(bucket)
        nodes = self.config.num_draft_tokens
        law = inputs.temperature.new_zeros(bucket, 0, 0)
        propose = self.propose.bind(bucket) if self.propose else None
        extend = self.extend.bind(bucket) if self.extend else None
        if propose is not None and self.config.draft_sampling:
            law = law.new_zeros(bucket, self.config.num_steps, propose.draft.vocab_size)
        tree = DraftTree(
            verify.tokens.tokens,
            verify.inputs.positions,
            verify.inputs.tail_words,
            torch.arange(bucket * nodes, device=law.device).view(bucket, nodes),
            links.next_token,
            links.next_sibling,
            law,
        )
        return BoundStep(
            self.target,
            self.config,
            self.reserved,
            self.states,
            self.ring.of(0, bucket),
            inputs,
            accepted,
            links,
            tree,
            propose,
            verify,
            extend,
            self.accept,
        )


@dataclass(frozen=True)
class PartProgram:
    """One part of a step, as `GraphRunner` takes it."""

    step: StepProgram
    part: StepPart

    def bind(self, bucket: int) -> BoundPart:
        """Bind to the first ``bucket`` rows."""
        return BoundPart(self.step.bind(bucket), self.part)
