"""Acceptors that keep as much of a tree as they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from specattn.kernels.sampling import argmax_tokens
from specattn.kernels.tree import accept_greedy

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.batch import AcceptResult, DraftTree
    from specattn.config import SpecConfig
    from specattn.speculative.sampling.params import SamplingBatch


@triton.jit
def _force_kernel(
    best,  # [B, N] int64: the target's choices, changed in place
    tokens,  # [B, N] int64
    positions,  # [B, N] int64
    words,  # [B, N, W] int64
    lens,  # [B] int32
    shallow,  # [B] int32, in place
    lowest,
    nodes,
    stride_best,
    stride_tokens,
    stride_positions,
    stride_words,
    stride_node,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)  # [BLOCK]
    ok = at < nodes
    # tokens that no node has: nothing is accepted by chance
    choice = tl.maximum(tl.load(best + row * stride_best + at, mask=ok, other=0), lowest)
    token = tl.load(tokens + row * stride_tokens + at, mask=ok, other=0)
    depth = tl.load(positions + row * stride_positions + at, mask=ok, other=-1)
    depth -= tl.load(positions + row * stride_positions)
    depth = tl.where(ok, depth, -1)
    last = tl.argmax(depth, 0).to(tl.int64)
    seen = words + row * stride_words + last * stride_node + at // 64
    path = ok & (((tl.load(seen, mask=ok, other=0) >> (at % 64)) & 1) != 0)
    length = tl.load(lens + row)
    too_shallow = tl.max(depth, 0) < length - 1
    tl.store(shallow + row, tl.load(shallow + row) + too_shallow.to(tl.int32))
    for d in range(DEPTH):
        child = path & (depth == d + 1) & (d < length - 1)
        goes_on = tl.sum(child.to(tl.int32), 0) > 0
        wanted = tl.sum(tl.where(child, token, 0), 0)
        choice = tl.where(path & (depth == d) & goes_on, wanted, choice)
    tl.store(best + row * stride_best + at, choice, mask=ok)


def launch(
    best: Tensor, tree: DraftTree, lens: Tensor, shallow: Tensor, lowest: int, steps: int
) -> None:
    """Let ``best [B, n]`` choose the first ``lens - 1`` nodes towards a deepest one.

    Where that one is nearer to the root, ``shallow [B]`` counts it.
    """
    nodes, words = best.shape[1], tree.words
    _force_kernel[(len(best),)](
        best,
        tree.tokens,
        tree.positions,
        words,
        lens,
        shallow,
        lowest,
        nodes,
        best.stride(0),
        tree.tokens.stride(0),
        tree.positions.stride(0),
        words.stride(0),
        words.stride(1),
        DEPTH=steps,
        BLOCK=triton.next_power_of_2(nodes),
        num_warps=1,
    )


def twin(
    best: Tensor, tree: DraftTree, lens: Tensor, shallow: Tensor, lowest: int, steps: int
) -> None:
    """Do what `launch` does, in torch."""
    node = torch.arange(best.shape[1], device=best.device)
    depth = tree.positions - tree.positions[:, :1]
    words = tree.words[torch.arange(len(best), device=best.device), depth.argmax(1)]
    path = ((words[:, node // 64] >> (node % 64)) & 1) != 0  # [B, n]
    shallow[: len(best)] += (depth.amax(1) < lens[: len(best)] - 1).int()
    after = path[:, None] & (depth[:, None] == depth[:, :, None] + 1)
    after &= depth[:, None] < lens[: len(best), None, None]  # [B, n, child]
    wanted = torch.where(after, tree.tokens[:, None], 0).sum(-1)
    best.copy_(torch.where(path & after.any(-1), wanted, best.clamp(min=lowest)))


class Forced:
    """An `Acceptor` that keeps paths of given lengths, on the way to a deepest node.

    A tree that is not so deep is kept as far as it goes, and counted. It does all that the greedy
    one does, and one short kernel more.

    Parameters
    ----------
    lens : Tensor
        ``[B]`` int32, tokens to gain, the bonus included; by place in the batch. May be changed
        between steps.
    lowest : int
        A token of the target from which on the draft proposes none.

    Attributes
    ----------
    shallow : Tensor
        ``[B]`` int32, trees so far that were not so deep; by place in the batch.
    """

    def __init__(self, lens: Tensor, lowest: int) -> None:
        self.lens, self.lowest = lens, lowest
        self.shallow = torch.zeros_like(lens)

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        seq_lens: Tensor,
        config: SpecConfig,
        sampling: SamplingBatch,
        out: AcceptResult,
    ) -> AcceptResult:
        """Write ``out``."""
        best = argmax_tokens(logits.flatten(0, 1))
        best = best.view(tree.tokens.shape)
        force = launch if logits.is_cuda else twin
        force(best, tree, self.lens, self.shallow, self.lowest, config.num_steps)
        accept_greedy(tree, best, out=out)
        return out


class Watched(Forced):
    """One that also keeps what it saw; for eager steps."""

    def __call__(self, tree: DraftTree, logits: Tensor, *more: Any, **named: Any) -> AcceptResult:
        """Write ``out``."""
        self.seen = tree.tokens.clone(), tree.positions.clone(), tree.words.clone(), logits.clone()
        return super().__call__(tree, logits, *more, **named)
