"""How drafts choose tokens, and what beams grow of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.batch import Candidates, Marginals
from specattn.kernels.sampling import DRAFT, draw_tokens, target_probs, top_tokens, uniform
from specattn.kernels.tree import Beams, select_beams
from specattn.plan import mask_words

if TYPE_CHECKING:
    from specattn.config import SpecConfig
    from specattn.speculative.model import AnyDraftModel
    from specattn.speculative.sampling.params import SamplingBatch
    from specattn.speculative.step.buffers import StepBuffers

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


def beams_of(marginals: Marginals, config: SpecConfig) -> Candidates:
    """Grow beams of ``topk`` over a block's distributions."""
    best, names = marginals.log_probs.exp(), marginals.tokens
    batch, depth, topk = best.shape
    candidates = new_candidates(best, config)
    beams: Beams | None = None
    for step in range(depth):
        width = topk if step else 1
        probs, tokens = (
            x[:, step, None].expand(batch, width, topk).contiguous() for x in (best, names)
        )
        grown = None
        if step < depth - 1:
            words = names.new_empty(batch, topk, mask_words((depth - 1) * topk))
            grown = new_beams(names[:, step], words)
        select_beams(step, probs, tokens, beams, candidates=candidates, out=grown)
        beams = grown
    return replace(candidates, draft_probs=marginals.draft_probs)


def new_beams(tokens: Tensor, words: Tensor) -> Beams:
    """Return beams to be picked: like ``tokens``, over ``words``."""
    scores = tokens.new_empty(tokens.shape, dtype=torch.float32)
    return Beams(scores, tokens.new_empty(tokens.shape), tokens.new_empty(tokens.shape), words)


def new_candidates(probs: Tensor, config: SpecConfig) -> Candidates:
    """Return candidates to be written, without what they are drawn from."""
    batch, width = len(probs), config.max_tree_nodes - 1
    groups = 1 + config.num_draft_forwards * config.topk
    return Candidates(
        scores=probs.new_empty(batch, width),
        tokens=probs.new_empty(batch, width, dtype=torch.int64),
        parents=probs.new_empty(batch, groups, dtype=torch.int64),
        draft_probs=probs.new_empty(batch, 0, 0),
    )
