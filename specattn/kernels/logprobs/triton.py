"""Log-probabilities along accepted paths: of splits by programs, then merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.launch import launch_options
from specattn.kernels.pdl import enter
from specattn.kernels.sampling.keys import best_keys, finite, ranked, score_of, token_of

if TYPE_CHECKING:
    from specattn.batch import AcceptResult

# tokens of a split, which hands on its best
BLOCK = 4096


@triton.jit
def _scores(inputs, req, node, nodes, kind, token, vocab):
    """Load what one node's request wants, as logits; NaN is +inf.

    The inputs are logits ``[B, n, V]`` and two of their strides, processed logits and
    probabilities, ``[B, n, V]`` or None each.
    """
    logits, stride_req, stride_node, processed, probs = inputs
    live = token < vocab
    row = (req * nodes + node) * vocab + token
    at = req * stride_req + node * stride_node + token
    score = tl.load(logits + at, mask=live & (kind == 0), other=-float("inf")).to(tl.float32)
    if processed is not None:
        other = tl.load(processed + row, mask=live & (kind == 1), other=-float("inf"))
        score = tl.where(kind == 1, other.to(tl.float32), score)
    if probs is not None:
        prob = tl.load(probs + row, mask=live & (kind == 2), other=0).to(tl.float32)
        score = tl.where(kind == 2, tl.log(prob), score)
    # no row that holds it has a softmax
    return tl.where(score == score, score, float("inf"))


@triton.jit
def logprobs_splits_kernel(
    inputs,  # see `_scores`
    paths,  # nodes [B, D] int32, lengths [B] int32, rows [B] int64, counts, sources [R] int32
    keys,  # [B * D, splits, K] int64, out: the best tokens of each split
    sums,  # [B * D, splits, 2] float32, out: the split's largest logit, its mass relative to it
    depth,
    nodes,
    vocab,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the best tokens and mass of one split."""
    accept_index, accept_lens, rows, counts, sources = paths
    place, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    enter(PDL)
    req, rank = place // depth, place % depth
    row = tl.load(rows + req)
    count = tl.load(counts + row)
    if (count >= 0) & (rank < tl.load(accept_lens + req)):
        node = tl.load(accept_index + place).to(tl.int64)
        token = split * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        score = _scores(inputs, req, node, nodes, tl.load(sources + row), token, vocab)
        cell = place * tl.num_programs(1) + split
        peak = finite(tl.max(score, 0))
        tl.store(sums + cell * 2, peak)
        tl.store(sums + cell * 2 + 1, tl.sum(tl.exp(score - peak), 0))
        if K > 0:
            key = tl.where(token < vocab, ranked(score, token), -0x8000000000000000)
            nth = tl.arange(0, BLOCK_K)  # [BLOCK_K]
            best = best_keys(key, -0x8000000000000000, tl.minimum(count, K), BLOCK_K)
            tl.store(keys + cell * K + nth, best, mask=nth < K)


@triton.jit
def logprobs_merge_kernel(
    inputs,  # see `_scores`
    paths,  # nodes [B, D] int32, lengths [B] int32, rows [B] int64, counts, sources [R] int32
    accept_tokens,  # [B, D] int64
    entry,  # [1] int64
    keys,  # [B * D, splits, K] int64
    sums,  # [B * D, splits, 2] float32
    values_out,  # [S, B', D, 1 + K] float32, out, perhaps in the host's memory
    ids_out,  # [S, B', D, 1 + K] int64, out, perhaps in the host's memory
    depth,
    nodes,
    vocab,
    splits,
    stride_values,
    stride_values_req,
    stride_ids,
    stride_ids_req,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge an entry's splits; write the entry."""
    accept_index, accept_lens, rows, counts, sources = paths
    place = tl.program_id(0).to(tl.int64)
    enter(PDL)
    req, rank = place // depth, place % depth
    row = tl.load(rows + req)
    count = tl.load(counts + row)
    if (count >= 0) & (rank < tl.load(accept_lens + req)):
        part = tl.arange(0, BLOCK_P)  # [BLOCK_P]
        cell = (place * splits + part) * 2
        peak = tl.load(sums + cell, mask=part < splits, other=-3.0e38)
        mass = tl.load(sums + cell + 1, mask=part < splits, other=0)
        top = tl.max(peak, 0)
        total = tl.log(tl.sum(mass * tl.exp(peak - top), 0))
        at = tl.load(entry)
        values = values_out + at * stride_values + req * stride_values_req + rank * (1 + K)
        ids = ids_out + at * stride_ids + req * stride_ids_req + rank * (1 + K)
        token = tl.load(accept_tokens + place)
        node = tl.load(accept_index + place).to(tl.int64)
        score = _scores(inputs, req, node, nodes, tl.load(sources + row), token, vocab)
        # the peak first: the difference of logits is exact where it matters
        tl.store(values, (score - top) - total)
        tl.store(ids, token)
        if K > 0:
            flat = tl.arange(0, BLOCK)  # [BLOCK]
            key = tl.load(
                keys + place * splits * K + flat,
                mask=flat < splits * K,
                other=-0x8000000000000000,
            )
            best = best_keys(key, -0x8000000000000000, tl.minimum(count, K), BLOCK_K)
            none = best == -0x8000000000000000
            value = tl.where(none, -float("inf"), (score_of(best) - top) - total)
            nth = tl.arange(0, BLOCK_K)  # [BLOCK_K]
            wanted = nth < tl.minimum(count, K)
            tl.store(values + 1 + nth, value, mask=wanted)
            tl.store(ids + 1 + nth, tl.where(none, -1, token_of(best)), mask=wanted)


def path_logprobs(
    *,
    logits: Tensor,
    accepted: AcceptResult,
    rows: Tensor,
    entry: Tensor,
    counts: Tensor,
    sources: Tensor,
    values_out: Tensor,
    ids_out: Tensor,
    processed: Tensor | None,
) -> None:
    nodes, vocab = logits.shape[1:]
    batch, depth = accepted.accept_tokens.shape
    most = values_out.shape[3] - 1
    splits = triton.cdiv(vocab, BLOCK)
    keys = torch.empty(batch * depth, splits, most, dtype=torch.int64, device=logits.device)
    sums = torch.empty(batch * depth, splits, 2, dtype=torch.float32, device=logits.device)
    inputs = logits, *logits.stride()[:2], processed, accepted.probs
    paths = accepted.accept_index, accepted.accept_lens, rows, counts, sources
    sizes = {"K": most, "BLOCK_K": triton.next_power_of_2(max(most, 1))}
    options = launch_options(logits.device)
    logprobs_splits_kernel[(batch * depth, splits)](
        inputs,
        paths,
        keys,
        sums,
        depth,
        nodes,
        vocab,
        **sizes,
        BLOCK=BLOCK,
        **options,
    )
    width = triton.next_power_of_2(max(splits * most, 1))
    logprobs_merge_kernel[(batch * depth,)](
        inputs,
        paths,
        accepted.accept_tokens,
        entry,
        keys,
        sums,
        values_out,
        ids_out,
        depth,
        nodes,
        vocab,
        splits,
        *values_out.stride()[:2],
        *ids_out.stride()[:2],
        **sizes,
        BLOCK=width,
        BLOCK_P=triton.next_power_of_2(splits),
        num_warps=max(1, min(8, width // 512)),
        **options,
    )
