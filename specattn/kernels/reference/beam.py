"""Twin of `specattn.kernels.beam`, and the shape checks of both."""

from __future__ import annotations

import torch
from torch import Tensor


def score_key(scores: Tensor) -> Tensor:
    """Map float32 to int32 keys of the same order, NaN below everything, -0 equal to 0."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return keys.masked_fill(scores.isnan(), -(2**31))


def candidate_offset(
    step: int, child_probs: Tensor, candidate_scores: Tensor, candidate_parents: Tensor
) -> int:
    """Return the flat index of the first candidate of ``step``.

    Raises
    ------
    ValueError
        If the number of beams is wrong for the step, or the candidates have no room for it.
    """
    _, beams, topk = child_probs.shape
    if beams != (topk if step else 1):
        raise ValueError(
            f"child_probs must have {topk if step else 1} beams at step {step}, got {beams}"
        )
    start = topk + (step - 1) * topk**2 if step else 0
    if start + beams * topk > candidate_scores.shape[1] or not candidate_parents.shape[1]:
        raise ValueError(
            f"candidates end at column {candidate_scores.shape[1]}, before those of step {step} "
            f"({start}..{start + beams * topk - 1})"
        )
    return start


def check_beams(
    step: int, child_probs: Tensor, candidate_parents: Tensor, words_out: Tensor
) -> None:
    """Raise ValueError if ``step`` is the last, which has no beams, or its words do not fit."""
    nodes = (step + 1) * child_probs.shape[2]
    if candidate_parents.shape[1] < 1 + nodes:
        raise ValueError(
            f"step {step} has no beams to pick: candidates have {candidate_parents.shape[1]} groups"
        )
    if words_out.shape[2] * 64 < nodes:
        raise ValueError(f"words_out must have a bit for each of {nodes} nodes")


def append_candidates(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor | None,
    *,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
) -> None:
    """See `specattn.kernels.beam.append_candidates`."""
    start = candidate_offset(step, child_probs, candidate_scores, candidate_parents)
    scores = _path_scores(child_probs, path_scores)
    columns = slice(start, start + scores.shape[1])
    candidate_scores[:, columns] = scores
    candidate_tokens[:, columns] = child_tokens.flatten(1)
    if not step:
        candidate_parents[:, 0] = -1


def select_beams(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor | None,
    path_words: Tensor | None,
    *,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    scores_out: Tensor,
    tokens_out: Tensor,
    rows_out: Tensor,
    words_out: Tensor,
) -> None:
    """See `specattn.kernels.beam.select_beams`."""
    start = candidate_offset(step, child_probs, candidate_scores, candidate_parents)
    check_beams(step, child_probs, candidate_parents, words_out)
    append_candidates(
        step,
        child_probs,
        child_tokens,
        path_scores,
        candidate_scores=candidate_scores,
        candidate_tokens=candidate_tokens,
        candidate_parents=candidate_parents,
    )
    batch, beams, topk = child_probs.shape
    scores = _path_scores(child_probs, path_scores)
    order = score_key(scores).sort(dim=1, descending=True, stable=True).indices
    picks = order[:, :topk]
    scores_out.copy_(scores.gather(1, picks))
    tokens_out.copy_(child_tokens.flatten(1).gather(1, picks))
    rows_out.copy_(torch.arange(batch, device=picks.device)[:, None] * beams + picks // topk)
    candidate_parents[:, 1 + step * topk : 1 + (step + 1) * topk] = start + picks

    nodes = step * topk + torch.arange(topk, device=picks.device)
    own = node_bits(nodes, words_out.shape[2])
    above = 0 if path_words is None else path_words.flatten(0, 1)[rows_out]
    words_out.copy_(own | above)


def _path_scores(child_probs: Tensor, path_scores: Tensor | None) -> Tensor:
    """Return the scores ``[B, beams * topk]`` of the paths down to all children."""
    above = 1.0 if path_scores is None else path_scores[:, :, None]
    return (child_probs * above).flatten(1)


def node_bits(nodes: Tensor, num_words: int) -> Tensor:
    """Return ``[..., num_words]`` int64 words with just the bit of each node set."""
    words = torch.arange(num_words, device=nodes.device)
    bits = torch.ones_like(nodes) << nodes % 64
    return torch.where(words == nodes[..., None] // 64, bits[..., None], 0)
