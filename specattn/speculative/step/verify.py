"""Verification: walk the tree along the target's choices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.batch import AcceptResult, DraftTree
from specattn.kernels.sampling import ACCEPT, FINAL, argmax_tokens, path_coins, target_probs
from specattn.kernels.tree import accept_greedy, accept_rejection, accept_sampled

if TYPE_CHECKING:
    from specattn.config import SpecConfig
    from specattn.speculative.proposers.proposer import Proposer
    from specattn.speculative.sampling.params import SamplingBatch


def accept(
    tree: DraftTree,
    logits: Tensor,
    seq_lens: Tensor,
    config: SpecConfig,
    sampling: SamplingBatch,
    out: AcceptResult | None = None,
) -> AcceptResult:
    """Return the path that the target itself would have taken.

    Greedy requests follow the target's argmax, the lowest token among equals. Sampled ones follow
    target-only tree sampling (the verification of SGLang and of EAGLE's released code): a child is
    accepted with its target probability given that its elder siblings were not, and the token after
    the path is drawn from what is left, so that every emitted token has exactly the target's
    distribution. Chains that the draft drew (``config.draft_sampling``) are verified by rejection
    sampling (Leviathan et al., arXiv:2211.17192), with the same guarantee. Plain decoding has no
    drafts to refuse, whatever ``draft_sampling`` says.

    Parameters
    ----------
    tree : DraftTree
        The verified nodes.
    logits : Tensor
        ``[B, n, V]``, the target's logits after every node, processed where requests have
        processors.
    seq_lens : Tensor
        ``[B]`` int32, lengths before the commit; with depth they give each coin its position.
    config : SpecConfig
        Depth of the tree, and how it was drafted.
    sampling : SamplingBatch
        How each request draws.
    out : AcceptResult, optional
        Tensors to write; new ones if None.
    """
    result = out or _empty(tree, config.num_steps)
    # without drafts there is nothing to reject
    rejecting = config.draft_sampling and config.num_steps > 0
    if sampling.greedy and not rejecting:
        best = argmax_tokens(logits.flatten(0, 1))
        accept_greedy(tree, best.view(tree.tokens.shape), out=result)
        return result
    probs = target_probs(
        logits.flatten(0, 1),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        rows_per_req=logits.shape[1],
        min_p=sampling.min_p,
    )
    probs = probs.view(logits.shape)
    by_draw = path_coins(sampling.seeds, seq_lens, config.num_steps + 1, 2)
    coins = by_draw[ACCEPT], by_draw[FINAL]
    if rejecting:
        accept_rejection(tree, probs, *coins, out=result)
    else:
        accept_sampled(tree, probs, *coins, out=result)
    return replace(result, probs=probs)


def over_target_vocabulary(draft: Proposer, probs: Tensor, vocab_size: int) -> Tensor:
    """Map probs over the draft's vocabulary, ``[..., Vd]``, to ``[..., V]``."""
    ids = draft.to_target(torch.arange(probs.shape[-1], device=probs.device))
    return probs.new_zeros(*probs.shape[:-1], vocab_size).index_copy_(-1, ids, probs)


def _empty(tree: DraftTree, num_steps: int) -> AcceptResult:
    size, device = len(tree.tokens), tree.tokens.device
    path = (size, num_steps + 1)
    return AcceptResult(
        accept_index=torch.empty(path, dtype=torch.int32, device=device),
        accept_tokens=torch.empty(path, dtype=torch.int64, device=device),
        accept_lens=torch.empty(size, dtype=torch.int32, device=device),
        bonus_tokens=torch.empty(size, dtype=torch.int64, device=device),
    )
