"""The draft phase: how tokens are chosen, and beams grow of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.batch import Candidates, DraftState, Marginals
from specattn.kernels.sampling import DRAFT, draw_tokens, target_probs, top_tokens, uniform
from specattn.kernels.tree import Beams, select_beams
from specattn.plan import mask_words

if TYPE_CHECKING:
    from specattn.attention.multi_step import BoundMultiStep
    from specattn.config import SpecConfig
    from specattn.speculative.model import AnyDraftModel, DraftModel
    from specattn.speculative.sampling import SamplingBatch
    from specattn.speculative.step_buffers import StepBuffers

    #: What holds each request's temperature (0 is greedy) and seed, ``[B]`` each.
    Draws = SamplingBatch | StepBuffers


def choose_tokens(
    draft: AnyDraftModel, logits: Tensor, topk: int, draws: Draws | None, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose each row's draft tokens: the most probable, or a drawn one.

    Among equal logits the lower draft token comes first.

    Parameters
    ----------
    draft : DraftModel or BlockDraftModel
        Maps its vocabulary to the target's; with ``target_ids`` (see `DraftModel.to_target`), in
        the launch that chooses.
    logits : Tensor
        ``[R, Vd]``.
    topk : int
        Tokens per row; 1 where they are drawn.
    draws : SamplingBatch, StepBuffers or None
        How each request draws; None takes the most probable tokens.
    positions : Tensor
        ``[R]`` int64, the target position of the token that each row's proposal follows, or
        ``[B, R / B]`` for several rows of B requests. Only draws read it.

    Returns
    -------
    probs, tokens : Tensor
        ``[R, K]`` float32 and int64: the draft's probabilities, and target token ids.
    draft_probs : Tensor
        ``[R, Vd]`` float32, the distribution that they were drawn from; ``[R, 0]`` unless they are
        drawn.
    """
    if draws is None:
        shape = (len(logits), topk)
        probs = torch.empty(shape, dtype=torch.float32, device=logits.device)
        ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
        named = draft.target_ids
        top_tokens(logits, topk, probs_out=probs, ids_out=ids, target_ids=named)
        tokens = draft.to_target(ids) if named is None else ids
        return probs, tokens, probs[:, :0]
    rows_per_req = positions.shape[1:].numel()
    drawn_from = target_probs(logits, draws.temperature, None, None, rows_per_req=rows_per_req)
    coins = uniform(draws.seeds, positions, DRAFT).flatten()
    ids = draw_tokens(drawn_from, coins)[:, None]
    return drawn_from.gather(1, ids), draft.to_target(ids), drawn_from


def propose(
    draft: DraftModel,
    attention: BoundMultiStep,
    state: DraftState,
    config: SpecConfig,
    buffers: StepBuffers,
) -> Candidates:
    """Grow the beams: every draft forward proposes children of topk nodes.

    The dynamic draft tree of EAGLE-2 (arXiv:2406.16858); with topk 1 a chain.

    Parameters
    ----------
    draft : DraftModel
        The draft head.
    attention : BoundMultiStep
        Its attention for all ``num_steps - 1`` forwards; slots and positions are filled.
    state : DraftState
        The depth-1 proposals, and the hidden state they came from.
    config : SpecConfig
        Depth, branches and ``draft_sampling``.
    buffers : StepBuffers
        The step's: how each request draws, and offsets of positions.

    Returns
    -------
    Candidates
        Every token that the draft looked at, on the device.
    """
    inputs = attention.inputs
    candidates = _candidates(state.topk_probs, config)
    drawn_from = [state.draft_probs]
    probs, tokens = state.topk_probs[:, None], state.topk_tokens[:, None]  # [B, 1, K]
    hidden = state.hidden_states  # [B * beams, H]
    beams: Beams | None = None
    positions = _rotary(inputs.positions, buffers)
    draws = buffers if config.draft_sampling else None
    for step, attend in enumerate(attention.steps):
        # the nodes of this forward
        grown = _beams(state.topk_tokens, inputs.words[:, step])
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


def propose_along_chain(
    draft: DraftModel,
    attention: BoundMultiStep,
    state: DraftState,
    config: SpecConfig,
    buffers: StepBuffers,
) -> Marginals:
    """Follow the most probable tokens; keep the ``ranks`` best of every depth.

    Tokens below the first of a depth are proposed as if they did not depend on it.

    Parameters
    ----------
    draft, attention, state, config, buffers
        As in `propose`, of a chain; its ancestor words are never written.
    """
    positions = _rotary(attention.inputs.positions, buffers)
    probs, tokens, hidden = [state.topk_probs], [state.topk_tokens], state.hidden_states
    for step, attend in enumerate(attention.steps):
        attention.fill_ancestors(step)
        at = positions[step]
        out = draft.forward(tokens[-1][:, 0].contiguous(), hidden, at, attend)
        chosen, ids, _ = choose_tokens(draft, out.logits, config.ranks, None, at)
        probs.append(chosen)
        tokens.append(ids)
        hidden = out.hidden_states
    best = torch.stack(probs, 1)
    return Marginals(best.log_(), torch.stack(tokens, 1), best[..., :0])


def beams_of(marginals: Marginals, config: SpecConfig) -> Candidates:
    """Grow beams of ``topk`` over a block's distributions."""
    best, names = marginals.log_probs.exp(), marginals.tokens
    batch, depth, topk = best.shape
    candidates = _candidates(best, config)
    beams: Beams | None = None
    for step in range(depth):
        width = topk if step else 1
        probs, tokens = (
            x[:, step, None].expand(batch, width, topk).contiguous() for x in (best, names)
        )
        grown = None
        if step < depth - 1:
            words = names.new_empty(batch, topk, mask_words((depth - 1) * topk))
            grown = _beams(names[:, step], words)
        select_beams(step, probs, tokens, beams, candidates=candidates, out=grown)
        beams = grown
    return replace(candidates, draft_probs=marginals.draft_probs)


def _rotary(positions: Tensor, buffers: StepBuffers) -> Tensor:
    """Return ``[steps, B * K]``: what each draft forward rotates by."""
    # all forwards' at once: one's own are not dense for more than one request
    return buffers.rotary(positions).transpose(0, 1).contiguous().flatten(1)


def _beams(tokens: Tensor, words: Tensor) -> Beams:
    """Return beams to be picked: like ``tokens``, over ``words``."""
    scores = tokens.new_empty(tokens.shape, dtype=torch.float32)
    return Beams(scores, tokens.new_empty(tokens.shape), tokens.new_empty(tokens.shape), words)


def _candidates(probs: Tensor, config: SpecConfig) -> Candidates:
    """Return candidates to be written, without what they are drawn from."""
    batch, width = len(probs), config.max_tree_nodes - 1
    groups = 1 + config.num_draft_forwards * config.topk
    return Candidates(
        scores=probs.new_empty(batch, width),
        tokens=probs.new_empty(batch, width, dtype=torch.int64),
        parents=probs.new_empty(batch, groups, dtype=torch.int64),
        draft_probs=probs.new_empty(batch, 0, 0),
    )
