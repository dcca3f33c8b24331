"""Launches of the kernels of draft trees."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specattn.kernels.launch import launch_options
from specattn.kernels.sampling.triton_residual import vocab_tiles
from specattn.kernels.tree.triton_accept import (
    accept_greedy_kernel,
    accept_rejection_kernel,
    accept_sampled_kernel,
)
from specattn.kernels.tree.triton_beam import append_kernel, grow_words_kernel, select_kernel
from specattn.kernels.tree.triton_best_first import best_first_kernel
from specattn.kernels.tree.triton_build import build_tree_kernel, link_tree_kernel


def append_candidates(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor | None,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    start: int,
) -> None:
    batch, beams, topk = child_probs.shape
    append_kernel[(batch,)](
        child_probs,
        child_tokens,
        path_scores,
        candidate_scores,
        candidate_tokens,
        candidate_parents,
        start,
        candidate_scores.stride(0),
        candidate_parents.stride(0),
        BEAMS=beams,
        TOPK=topk,
        BLOCK=triton.next_power_of_2(beams * topk),
        num_warps=1,
        **launch_options(child_probs.device),
    )


def select_beams(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor | None,
    path_words: Tensor | None,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    scores_out: Tensor,
    tokens_out: Tensor,
    rows_out: Tensor,
    words_out: Tensor,
    start: int,
) -> None:
    batch, beams, topk = child_probs.shape
    num_words = words_out.shape[-1]
    block = triton.next_power_of_2(beams * topk)
    select_kernel[(batch,)](
        child_probs,
        child_tokens,
        path_scores,
        path_words,
        candidate_scores,
        candidate_tokens,
        candidate_parents,
        scores_out,
        tokens_out,
        rows_out,
        words_out,
        step,
        start,
        candidate_scores.stride(0),
        candidate_parents.stride(0),
        0 if path_words is None else path_words.stride(0),
        words_out.stride(0),
        W=num_words,
        BEAMS=beams,
        TOPK=topk,
        BLOCK=block,
        BLOCK_W=triton.next_power_of_2(num_words),
        num_warps=1 if block <= 16 else 4 if block <= 128 else 8,
        **launch_options(child_probs.device),
    )


def grow_words(words: Tensor, step: int, parents: Tensor | None, flat: bool) -> None:
    batch, _, topk, count = words.shape
    grow_words_kernel[(batch,)](
        words,
        parents,
        step,
        words.stride(0),
        *((0, 0) if parents is None else parents.stride()),
        FLAT=flat,
        TOPK=topk,
        W=count,
        BLOCK=triton.next_power_of_2(topk),
        BLOCK_W=triton.next_power_of_2(count),
        num_warps=1,
        **launch_options(words.device),
    )


def build_tree(
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    bonus_tokens: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_draft_tokens: int,
    tokens_out: Tensor,
    positions_out: Tensor,
    words_out: Tensor,
    next_token_out: Tensor,
    next_sibling_out: Tensor,
    steps: int,
) -> None:
    batch, count = scores.shape
    num_words = words_out.shape[2]
    block_n = triton.next_power_of_2(num_draft_tokens)
    build_tree_kernel[(batch,)](
        scores,
        tokens,
        parents,
        bonus_tokens,
        seq_lens,
        tokens_out,
        positions_out,
        words_out,
        next_token_out,
        next_sibling_out,
        count,
        parents.shape[1],
        max(steps - 2, 0).bit_length(),
        steps.bit_length(),
        scores.stride(0),
        tokens.stride(0),
        parents.stride(0),
        N=num_draft_tokens,
        W=num_words,
        TOPK=topk,
        BLOCK_C=triton.next_power_of_2(max(count, 1)),
        BLOCK_G=triton.next_power_of_2(max(parents.shape[1], 1)),
        BLOCK_N=block_n,
        BLOCK_W=triton.next_power_of_2(num_words),
        BLOCK_S=min(block_n, 64),
        num_warps=_warps(count, num_draft_tokens),
        **launch_options(scores.device),
    )


def _warps(count: int, nodes: int) -> int:
    """Return warps per request: one avoids barriers, wide tables want more."""
    if count <= 128 and nodes <= 64:
        return 1
    return 4 if count <= 2048 else 16


def best_first_tree(
    log_probs: Tensor,
    tokens: Tensor,
    bonus_tokens: Tensor,
    seq_lens: Tensor,
    tokens_out: Tensor,
    positions_out: Tensor,
    words_out: Tensor,
    next_token_out: Tensor,
    next_sibling_out: Tensor,
    scores_out: Tensor | None,
) -> None:
    batch, length, ranks = log_probs.shape
    nodes, num_words = words_out.shape[1:]
    best_first_kernel[(batch,)](
        log_probs,
        tokens,
        bonus_tokens,
        seq_lens,
        tokens_out,
        positions_out,
        words_out,
        next_token_out,
        next_sibling_out,
        scores_out,
        length.bit_length(),
        log_probs.stride(0),
        tokens.stride(0),
        N=nodes,
        L=length,
        K=ranks,
        W=num_words,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_W=triton.next_power_of_2(num_words),
        # nodes are found one by one, and between warps every reduction would wait for a barrier
        num_warps=1,
        **launch_options(log_probs.device),
    )


def link_tree(
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    chosen: Tensor | None,
    tokens_out: Tensor,
    positions_out: Tensor,
    words_out: Tensor,
    next_token_out: Tensor,
    next_sibling_out: Tensor,
) -> None:
    batch, nodes, num_words = words_out.shape
    block_n = triton.next_power_of_2(nodes)
    link_tree_kernel[(batch,)](
        tokens,
        parents,
        seq_lens,
        chosen,
        tokens_out,
        positions_out,
        words_out,
        next_token_out,
        next_sibling_out,
        (nodes - 1).bit_length(),
        tokens.stride(0),
        parents.stride(0),
        N=nodes,
        W=num_words,
        BLOCK_N=block_n,
        BLOCK_W=triton.next_power_of_2(num_words),
        BLOCK_S=min(block_n, 64),
        num_warps=1 if nodes <= 64 else 4,
        **launch_options(tokens.device),
    )


def accept_greedy(
    tokens: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    target_argmax: Tensor,
    accept_index_out: Tensor,
    accept_tokens_out: Tensor,
    accept_lens_out: Tensor,
    bonus_out: Tensor,
) -> None:
    batch, n = tokens.shape
    steps = accept_index_out.shape[1] - 1
    accept_greedy_kernel[(batch,)](
        tokens,
        next_token,
        next_sibling,
        target_argmax,
        accept_index_out,
        accept_tokens_out,
        accept_lens_out,
        bonus_out,
        n,
        steps,
        steps.bit_length(),
        BLOCK_N=triton.next_power_of_2(n),
        # one warp needs no barriers, but passes wide rows around lane by lane
        BLOCK_S=triton.next_power_of_2(steps + 1),
        num_warps=1 if n <= 64 else 4,
        **launch_options(tokens.device),
    )


def accept_sampled(
    tokens: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    threshold_single: float,
    threshold_acc: float,
    accept_index_out: Tensor,
    accept_tokens_out: Tensor,
    accept_lens_out: Tensor,
    bonus_out: Tensor,
) -> None:
    batch, n, vocab = target_probs.shape
    accept_sampled_kernel[(batch,)](
        tokens,
        next_token,
        next_sibling,
        target_probs,
        coins,
        final_coins,
        torch.empty_like(tokens),
        accept_index_out,
        accept_tokens_out,
        accept_lens_out,
        bonus_out,
        n,
        accept_index_out.shape[1] - 1,
        vocab,
        target_probs.stride(0),
        target_probs.stride(1),
        threshold_single,
        threshold_acc,
        BLOCK_N=triton.next_power_of_2(n),
        BLOCK_W=triton.next_power_of_2(triton.cdiv(n, 64)),
        **vocab_tiles(vocab, 64),
    )


def accept_rejection(
    tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    accept_index_out: Tensor,
    accept_tokens_out: Tensor,
    accept_lens_out: Tensor,
    bonus_out: Tensor,
) -> None:
    batch, steps, vocab = draft_probs.shape
    accept_rejection_kernel[(batch,)](
        tokens,
        draft_probs,
        target_probs,
        coins,
        final_coins,
        accept_index_out,
        accept_tokens_out,
        accept_lens_out,
        bonus_out,
        tokens.shape[1],
        steps,
        vocab,
        draft_probs.stride(0),
        draft_probs.stride(1),
        target_probs.stride(0),
        target_probs.stride(1),
        BLOCK_S=triton.next_power_of_2(steps + 1),
        **vocab_tiles(vocab, 32),
    )
