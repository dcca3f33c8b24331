"""Beams of a draft: its candidates, and the ancestors of their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specattn.checks import require_dense, require_integers, whole_number
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import launch_options, power_of_2
from specattn.kernels.sampling import score_key
from specattn.kernels.words import node_bits

if TYPE_CHECKING:
    from specattn.batch import Candidates

launch = TritonModule("specattn.kernels.tree.triton_beams")


class Beams(NamedTuple):
    """The best paths of a draft step, the best first.

    Parameters
    ----------
    scores : Tensor
        ``[B, topk]`` float32, probability of each path.
    tokens : Tensor
        ``[B, topk]`` int64, its last token.
    rows : Tensor
        ``[B, topk]`` int64, the row of ``[B * beams]`` of the step before that it extends.
    words : Tensor
        ``[B, topk, W]`` int64, its nodes: bit ``step * topk + branch``. May have a row stride.
    """

    scores: Tensor
    tokens: Tensor
    rows: Tensor
    words: Tensor


def select_beams(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    beams: Beams | None,
    *,
    candidates: Candidates,
    out: Beams | None,
) -> None:
    """Score the beams' children, record them as candidates, keep the best ``topk``.

    By the rule of EAGLE-2 (arXiv:2406.16858) a path scores the product of its probabilities. Ties
    go to the lower flat index ``beam * topk + child``; NaN ranks last. The outputs may not overlap
    the inputs.

    Parameters
    ----------
    step : int
        Draft step, from 0. Step 0 has one beam, the root.
    child_probs, child_tokens : Tensor
        ``[B, beams, topk]`` float32 and int64: what the draft model proposes after each beam.
        ``beams`` is 1 at step 0 and ``topk`` later.
    beams : Beams or None
        Those of the step before, of which scores and words are read. None at step 0: the root has
        probability 1, and is no draft node.
    candidates : Candidates
        Those of all steps; the columns of this step are written, but for ``draft_probs``.
    out : Beams or None
        The beams to write; dense but for the words. None in the last step, which keeps none.

    Raises
    ------
    ValueError
        If the candidates have no room for this step, or a tensor is not laid out as above.
    """
    start = _candidate_offset(step, child_probs, candidates)
    (batch, width, topk), scores, words, count = child_probs.shape, None, None, 0
    if beams is not None:
        scores = beams.scores
    require_dense(child_probs=child_probs, child_tokens=child_tokens, scores=scores)
    if out is not None:
        words = None if beams is None else beams.words
        nodes, groups = (step + 1) * topk, candidates.parents.shape[1]
        if groups < 1 + nodes:
            raise ValueError(f"candidates must have {1 + nodes} groups to pick beams, got {groups}")
        count = out.words.shape[2]
        if count * 64 < nodes:
            raise ValueError(f"out.words must have a bit for each of {nodes} nodes")
        require_dense(scores_out=out.scores, tokens_out=out.tokens, rows_out=out.rows)
        require_dense(1, words=words, words_out=out.words)
    if not batch:
        return
    if on_triton(child_probs):
        block = power_of_2(width * topk)
        launch.select_kernel[(batch,)](
            child_probs,
            child_tokens,
            scores,
            words,
            candidates.scores,
            candidates.tokens,
            candidates.parents,
            *((None,) * 4 if out is None else out),
            step,
            start,
            candidates.scores.stride(0),
            candidates.parents.stride(0),
            0 if words is None else words.stride(0),
            0 if out is None else out.words.stride(0),
            W=count,
            BEAMS=width,
            TOPK=topk,
            BLOCK=block,
            BLOCK_W=power_of_2(count),
            num_warps=1 if out is None or block <= 16 else 4 if block <= 128 else 8,
            **launch_options(child_probs.device),
        )
        return
    paths = (child_probs * (1.0 if scores is None else scores[:, :, None])).flatten(1)
    recorded = slice(start, start + paths.shape[1])
    candidates.scores[:, recorded] = paths
    candidates.tokens[:, recorded] = child_tokens.flatten(1)
    if not step:
        candidates.parents[:, 0] = -1
    if out is None:
        return
    picks = score_key(paths).sort(dim=1, descending=True, stable=True).indices[:, :topk]
    out.scores.copy_(paths.gather(1, picks))
    out.tokens.copy_(child_tokens.flatten(1).gather(1, picks))
    out.rows.copy_(torch.arange(batch, device=picks.device)[:, None] * width + picks // topk)
    candidates.parents[:, 1 + step * topk : 1 + (step + 1) * topk] = start + picks

    own = node_bits(step * topk + torch.arange(topk, device=picks.device), count)
    out.words.copy_(own if words is None else own | words.flatten(0, 1)[out.rows])


def grow_words(words: Tensor, step: int, parents: Tensor | None, *, flat: bool = False) -> None:
    """Write a draft step's ancestor words from those of its parents.

    It is what `select_beams` does to words, for drafts whose branches others choose. One launch,
    which can be recorded in a CUDA graph.

    Parameters
    ----------
    words : Tensor
        ``[B, steps, topk, W]`` int64, in place: row ``step`` is written, the row before is read.
        Bit ``s * topk + k`` is branch k of step s. May have a stride between requests.
    step : int
        From 0. The branches of step 0 hang below the root, which is no node: they get their own
        bits.
    parents : Tensor or None
        ``[B, topk]`` int32 or int64, the branch of the step before that each branch extends; cut
        to 0..topk - 1. Any strides. Not read at step 0.
    flat : bool
        Whether ``parents`` are the branches' own flat indices among all candidates, as in
        `specattn.batch.Candidates` and in EAGLE's code, from which their parents follow.

    Raises
    ------
    ValueError
        If the step is outside ``words``, or a tensor has another shape or dtype.
    """
    shape = tuple(words.shape)
    if len(shape) != 4 or words.dtype != torch.int64 or shape[3] * 64 < shape[1] * shape[2]:
        raise ValueError(
            f"words must be [B, steps, topk, at least ceil(steps * topk / 64)] {torch.int64}, "
            f"got {list(shape)} {words.dtype}"
        )
    whole_number("step", step, 0, shape[1] - 1)
    require_dense(1, words=words)
    if not step:
        parents = None
    elif parents is None:
        raise ValueError("parents must be a tensor after step 0, got None")
    require_integers((shape[0], shape[2]), parents=parents)
    if not words.numel():
        return
    topk, count = words.shape[2:]
    if on_triton(words):
        launch.grow_words_kernel[(len(words),)](
            words,
            parents,
            step,
            words.stride(0),
            *((0, 0) if parents is None else parents.stride()),
            FLAT=flat,
            TOPK=topk,
            W=count,
            BLOCK=power_of_2(topk),
            BLOCK_W=power_of_2(count),
            num_warps=1,
            **launch_options(words.device),
        )
        return
    own = node_bits(step * topk + torch.arange(topk, device=words.device), count)
    if parents is None:
        words[:, step] = own
        return
    if flat:
        parents = (parents - topk - (step - 1) * topk**2).div(topk, rounding_mode="floor")
    index = parents.long().clamp(0, topk - 1)[:, :, None].expand(-1, -1, count)
    words[:, step] = own | words[:, step - 1].gather(1, index)


def _candidate_offset(step: int, child_probs: Tensor, candidates: Candidates) -> int:
    """Return the first candidate's flat index; raise ValueError for lack of room."""
    _, beams, topk = child_probs.shape
    if beams != (topk if step else 1):
        raise ValueError(
            f"child_probs must have {topk if step else 1} beams at step {step}, got {beams}"
        )
    start, end = topk + (step - 1) * topk**2 if step else 0, candidates.scores.shape[1]
    if start + beams * topk > end or not candidates.parents.shape[1]:
        raise ValueError(
            f"candidates end at column {end}, before those of step {step} "
            f"({start}..{start + beams * topk - 1})"
        )
    return start
