"""The draft phase: the beams that the tree is built of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.batch import Candidates, DraftState
from specattn.kernels.tree import append_candidates, select_beams
from specattn.speculative.draft_tokens import choose_tokens

if TYPE_CHECKING:
    from specattn.backends.multi_step import BoundMultiStep
    from specattn.config import SpecConfig
    from specattn.speculative.draft_tokens import Draws
    from specattn.speculative.model import DraftModel


def propose(
    draft: DraftModel,
    attention: BoundMultiStep,
    state: DraftState,
    config: SpecConfig,
    draws: Draws,
) -> Candidates:
    """Grow the beams: every draft forward proposes children of topk nodes.

    The dynamic draft tree of EAGLE-2 (arXiv:2406.16858); with topk 1 a chain. ``state`` has the
    depth-1 proposals, and the hidden state they came from. Slots and positions of ``attention`` are
    filled. ``draws`` is read with ``config.draft_sampling`` only.
    """
    inputs = attention.plan.inputs
    tables = _candidates(state.topk_probs, config)
    named = {f"candidate_{name}": value for name, value in tables.items()}
    drawn_from = [state.draft_probs]
    probs, tokens = state.topk_probs[:, None], state.topk_tokens[:, None]  # [B, 1, K]
    hidden = state.hidden_states  # [B * beams, H]
    # the root has no path, and is no draft node
    scores: Tensor | None = None
    words: Tensor | None = None
    # all forwards' at once: one's own are not dense for more than one request
    positions = inputs.positions.transpose(0, 1).contiguous().flatten(1)  # [steps, B * K]
    for step, attend in enumerate(attention.steps):
        # the nodes of this forward: path scores, tokens, extended rows
        paths = torch.empty_like(state.topk_tokens, dtype=torch.float32)
        nodes, rows = torch.empty_like(state.topk_tokens), torch.empty_like(state.topk_tokens)
        select_beams(
            step,
            probs,
            tokens,
            scores,
            words,
            **named,
            scores_out=paths,
            tokens_out=nodes,
            rows_out=rows,
            words_out=inputs.words[:, step],
        )
        attention.fill_ancestors(step)
        at = positions[step]
        out = draft.forward(nodes.flatten(), hidden, at, attend, sources=rows.flatten())
        # drafts run one position behind the target
        chosen = (
            choose_tokens(draft, out.logits, config.topk, draws, at + 1)
            if config.draft_sampling
            else choose_tokens(draft, out.logits, config.topk, None, at)
        )
        probs = chosen.probs.unflatten(0, nodes.shape)
        tokens = chosen.tokens.unflatten(0, nodes.shape)
        drawn_from.append(chosen.draft_probs.unflatten(0, nodes.shape)[:, 0])
        hidden, scores, words = out.hidden_states, paths, inputs.words[:, step]
    append_candidates(len(attention.steps), probs, tokens, scores, **named)
    return Candidates(**tables, draft_probs=torch.stack(drawn_from, 1))


def _candidates(probs: Tensor, config: SpecConfig) -> dict[str, Tensor]:
    """Return empty tensors for all that `Candidates` keeps but the probs."""
    batch, width = len(probs), config.max_tree_nodes - 1
    groups = 1 + config.num_draft_forwards * config.topk
    return {
        "scores": probs.new_empty(batch, width),
        "tokens": probs.new_empty(batch, width, dtype=torch.int64),
        "parents": probs.new_empty(batch, groups, dtype=torch.int64),
    }
