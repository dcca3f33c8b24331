"""EAGLE heads and their kin grow a tree forward by forward.

The draft runs one position behind the target: it reads a token with the target's features at the
token before. So its first proposals come from the extend of the step before, and N - 1 forwards
give a tree of depth N.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.batch import Candidates, DraftState, ForwardMode, Marginals, Phase, RowLayout
from specattn.buffers import fingerprint
from specattn.kernels.tree import Beams, select_beams
from specattn.plan import AttnInputs, AttnPlan, MultiStepDims, causal_words
from specattn.speculative.proposers.draft import choose_tokens, new_beams, new_candidates
from specattn.speculative.proposers.proposer import BoundPrompt, BoundProposer, ModelProposer
from specattn.speculative.states import StateField

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from specattn.attention.multi_step import BoundMultiStep
    from specattn.batch import AcceptResult
    from specattn.buffers import Fingerprint
    from specattn.config import SpecConfig
    from specattn.speculative.model import DraftModel, DraftOutput
    from specattn.speculative.prompts.buffers import ChunkViews
    from specattn.speculative.proposers.draft import Draws
    from specattn.speculative.proposers.proposer import PromptChunk, Proposer
    from specattn.speculative.step.buffers import StepViews


class EagleProposer(ModelProposer):
    """Proposes the beams of a draft model, by EAGLE-2 (arXiv:2406.16858).

    Parameters
    ----------
    draft : ModelSlot or DraftModel
        As in `ModelProposer`.
    """

    model: DraftModel

    def at_rest(self, nothing: Proposer) -> Proposer:
        """Return nothing: what it proposes follows from its states, whatever they are."""
        return nothing

    def draft_len(self, config: SpecConfig) -> int:
        """Return the columns of all draft forwards, or of the extend."""
        return self.read_ahead + max(config.num_draft_forwards * config.topk, config.num_steps + 1)

    def state_fields(self, config: SpecConfig) -> Mapping[str, StateField]:
        """Return the fields of `DraftState`."""
        topk, drawn_of = config.proposals, self.vocab_size if config.draft_sampling else 0
        return {
            "topk_probs": StateField(topk, torch.float32),
            "topk_tokens": StateField(topk, torch.int64),
            "hidden_states": StateField(self.model.hidden_size, self.dtype),
            "draft_probs": StateField(drawn_of, torch.float32),
        }

    def bind(self, step: StepViews) -> BoundEagle:
        """Return the draft forwards and the extend of so many requests."""
        return BoundEagle(self, step)

    def prompt(self, chunk: PromptChunk) -> Mapping[str, Tensor]:
        """Run the draft over the prompts, with the target's features."""
        draft, last = self.model, chunk.last
        assert chunk.features is not None
        states, attend = draft.combine(chunk.features), chunk.bind(self.slot.backend)
        out = draft.forward(chunk.next_ids, states, chunk.positions, attend, last)
        return self.started(out, chunk)

    def bind_prompt(self, chunk: ChunkViews) -> BoundPrompt:
        """Return the draft's forward over chunks of so many tokens."""
        return BoundEaglePrompt(self, chunk)

    def started(self, out: DraftOutput, chunk: PromptChunk) -> dict[str, Any]:
        """Return the `DraftState` after prompts that end in a chunk."""
        draws = chunk.sampling if chunk.config.draft_sampling else None
        after = chunk.positions[chunk.last] + 1
        return self.proposed(out, chunk.config.proposals, draws, after)

    def proposed(
        self, out: DraftOutput, topk: int, draws: Draws | None, after: Tensor
    ) -> dict[str, Any]:
        """Return the `DraftState` of a forward.

        ``after``, ``[R]`` int64, are the places of the tokens that its proposals follow.
        """
        # the token proposed here follows the bonus token
        probs, tokens, drawn_from = choose_tokens(self.model, out.logits, topk, draws, after)
        return vars(DraftState(probs, tokens, out.hidden_states, drawn_from))


class BoundEaglePrompt(BoundPrompt):
    """The draft's forward over a chunk."""

    proposer: EagleProposer

    def __init__(self, proposer: EagleProposer, chunk: ChunkViews) -> None:
        super().__init__(proposer, chunk)
        self._attend = proposer.slot.backend.bind(chunk.plan)
        self.attending = (self._attend,)

    def read(self, features: Tensor | None) -> Mapping[str, Tensor]:
        """Run the draft over the chunk, with the target's features."""
        assert features is not None
        draft, tokens, pieces = self.proposer.model, self.chunk.tokens, self.chunk.pieces
        # 0 at the ends of prompts, until here
        ids = tokens.next_ids.index_add(0, pieces.last, self.chunk.bonus)
        states = draft.combine(features)
        return self._started(
            draft.forward(ids, states, tokens.positions, self._attend, pieces.last)
        )

    def _started(self, out: DraftOutput) -> Mapping[str, Tensor]:
        chunk, pieces = self.chunk, self.chunk.pieces
        draws = pieces.sampling(sampled=True) if chunk.config.draft_sampling else None
        after = chunk.tokens.positions[pieces.last] + 1
        return self.proposer.proposed(out, chunk.config.proposals, draws, after)


class BoundEagle(BoundProposer):
    """The draft forwards of a step, and its extend.

    Attributes
    ----------
    multi_step : BoundMultiStep or None
        The attention of all draft forwards; None in plain decoding.
    extend_words : Tensor
        ``[B, N + 1, W]`` int64, causal; never written.
    extend_positions : Tensor
        ``[B, N + 1]`` int64: the places after what the draft has read.
    """

    proposer: EagleProposer

    def __init__(self, proposer: EagleProposer, step: StepViews) -> None:
        super().__init__(proposer, step)
        config, buffers, read_ahead = step.config, step.buffers, proposer.read_ahead
        layout = config.layout(ForwardMode.DRAFT_EXTEND)
        self.extend_words = step.buffer("extend_words", causal_words(layout))
        self.extend_positions, lens = buffers.positions, buffers.seq_lens
        if read_ahead:
            self.seq_lens = lens = step.buffer("draft_lens", lens.new_zeros(()))
            self.extend_positions = step.buffer(
                "draft_positions", torch.zeros_like(buffers.positions[0])
            )
        self.multi_step: BoundMultiStep | None = None
        if config.num_steps:
            fields = proposer.state_fields(config)
            self.gathers = {
                name: step.buffer(name, torch.zeros(width, dtype=dtype))
                for name, (width, dtype) in fields.items()
            }
            drafting = step.shared("drafting", partial(_drafting, proposer, step, lens))
            self.multi_step = drafting.bind(len(step))
            self.positions = self.multi_step.inputs.positions
            self.proposing = self.multi_step.steps
        width = self.extend_positions.shape[1]
        inputs = AttnInputs(
            buffers.req_pool_indices,
            lens,
            self.extend_positions,
            buffers.window[:, read_ahead : read_ahead + width],
            self.extend_words,
        )
        plan = AttnPlan.over(layout, step.table.req_to_token, inputs)
        self.extend_attention = proposer.slot.backend.bind(plan)
        self.absorbing = (self.extend_attention,)

    def begin(self) -> None:
        """Fill the index lists and the positions of what is read ahead."""
        if self.proposer.read_ahead:
            torch.add(
                self.step.buffers.positions, self.proposer.read_ahead, out=self.extend_positions
            )
        if self.multi_step is not None:
            self.multi_step.fill_lists()

    def propose(self) -> Candidates | Marginals:
        """Run the draft forwards; return every token that the draft looked at."""
        assert self.multi_step is not None
        positions = self.step.buffers.rotary(self.multi_step.inputs.positions)
        # all forwards' at once: one's own are not dense for more than one request
        positions = positions.transpose(0, 1).contiguous().flatten(1)  # [steps, B * K]
        best_first = self.step.config.tree == "best_first"
        grow = self._follow_chain if best_first else self._grow_beams
        return grow(self.multi_step, DraftState(**self.gathers), positions)

    def _grow_beams(
        self, attention: BoundMultiStep, state: DraftState, positions: Tensor
    ) -> Candidates:
        """Grow the beams: every draft forward proposes children of topk nodes.

        The dynamic draft tree of EAGLE-2 (arXiv:2406.16858); with topk 1 a chain.
        """
        draft, config, buffers = self.proposer.model, self.step.config, self.step.buffers
        candidates = new_candidates(state.topk_probs, config)
        drawn_from = [state.draft_probs]
        probs, tokens = state.topk_probs[:, None], state.topk_tokens[:, None]  # [B, 1, K]
        hidden = state.hidden_states  # [B * beams, H]
        beams: Beams | None = None
        draws = buffers if config.draft_sampling else None
        for step, attend in enumerate(attention.steps):
            # the nodes of this forward
            grown = new_beams(state.topk_tokens, attention.inputs.words[:, step])
            select_beams(step, probs, tokens, beams, candidates=candidates, out=grown)
            attention.fill_ancestors(step)
            nodes, sources = grown.tokens, grown.rows.flatten()
            out = draft.forward(nodes.flatten(), hidden, positions[step], attend, sources=sources)
            # a coin belongs to the place of the token that the proposal follows
            places = buffers.positions[:, step + 1]
            chosen = choose_tokens(draft, out.logits, config.topk, draws, places)
            probs, tokens, dense = (one.unflatten(0, nodes.shape) for one in chosen)
            drawn_from.append(dense[:, 0])
            hidden, beams = out.hidden_states, grown
        select_beams(len(attention.steps), probs, tokens, beams, candidates=candidates, out=None)
        return replace(candidates, draft_probs=torch.stack(drawn_from, 1))

    def _follow_chain(
        self, attention: BoundMultiStep, state: DraftState, positions: Tensor
    ) -> Marginals:
        """Follow the most probable tokens; keep the ``ranks`` best of every depth.

        Tokens below the first of a depth are proposed as if they did not depend on it. Ancestor
        words are never written.
        """
        draft, ranks = self.proposer.model, self.step.config.ranks
        probs, tokens, hidden = [state.topk_probs], [state.topk_tokens], state.hidden_states
        for step, attend in enumerate(attention.steps):
            attention.fill_ancestors(step)
            at = positions[step]
            out = draft.forward(tokens[-1][:, 0].contiguous(), hidden, at, attend)
            chosen, ids, _ = choose_tokens(draft, out.logits, ranks, None, at)
            probs.append(chosen)
            tokens.append(ids)
            hidden = out.hidden_states
        best = torch.stack(probs, 1)
        return Marginals(best.log_(), torch.stack(tokens, 1), best[..., :0])

    def absorb(self, accepted: AcceptResult) -> dict[str, Any]:
        """Run the draft over the accepted path; return where drafting goes on.

        Row i reads the token that follows path node i, with the target's features at that node.
        Only the last accepted row reaches ``lm_head``.
        """
        buffers, draft = self.step.buffers, self.proposer.model
        out = draft.forward(
            accepted.accept_tokens.flatten(),
            draft.combine(buffers.features.flatten(0, 1)),
            buffers.rotary(self.extend_positions).flatten(),
            self.extend_attention,
            buffers.last_rows,
        )
        # steps of other configs may start from it
        topk = self.step.states.drafting["topk_probs"].shape[1]
        draws = buffers if self.step.config.draft_sampling else None
        return self.proposer.proposed(out, topk, draws, buffers.after)

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers of the draft forwards."""
        found = super().fingerprint() + fingerprint(
            extend_words=self.extend_words, extend_positions=self.extend_positions
        )
        if self.multi_step is not None:
            drafts = self.multi_step
            found += fingerprint(
                drafting=drafts.inputs,
                kv_indptr=drafts.kv_indptr,
                kv_indices=drafts.kv_indices,
            )
        return found


def _drafting(proposer: EagleProposer, step: StepViews, lens: Tensor) -> MultiStepDraftBackend:
    """Return what the draft forwards of all batch sizes share."""
    config, buffers, read_ahead = step.config, step.buffers, proposer.read_ahead
    width = config.num_draft_forwards * config.topk
    slots = buffers.window[:, read_ahead : read_ahead + width]
    drafting = MultiStepDraftBackend(
        proposer.slot.backend,
        MultiStepDims.of(config),
        step.table.req_to_token,
        len(step),
        step.indices,
        req_pool_indices=buffers.req_pool_indices,
        seq_lens=lens,
        branch_slots=slots.unflatten(1, (-1, config.topk)),
    )
    if config.tree == "best_first":
        # the forwards are a chain, whatever the tree is made of
        chain = RowLayout(config.num_draft_forwards, config.num_draft_forwards, Phase.DRAFT)
        drafting.inputs.words.copy_(causal_words(chain)[:, None])
    return drafting
