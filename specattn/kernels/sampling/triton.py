"""Launches of the kernels of distributions and of the best tokens."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specattn.kernels.launch import launch_options, programs_per_row
from specattn.kernels.sampling.histogram import count_kernel, gather_kernel
from specattn.kernels.sampling.topk_topp_threshold import threshold_kernel
from specattn.kernels.sampling.triton_choose import top_merge_kernel, top_splits_kernel
from specattn.kernels.sampling.triton_probs import min_p_kernel, peaks_kernel, probs_kernel

# tokens that a program reads at a time
BLOCK = 2048

THRESHOLD_BLOCK = 4096

# tokens that a threshold is searched among in registers
KEPT = 4096

# classes of distances from the peak; twice as many for few rows, whose time is not their work's
BINS = 256

FEW_ROWS = 16

# tokens of a split: it hands on its best, and with more than 16 of them it is larger
TOP_BLOCKS = (1024, 4096)


def top_tokens(
    *, logits: Tensor, topk: int, probs_out: Tensor, ids_out: Tensor, target_ids: Tensor | None
) -> None:
    rows, vocab = logits.shape
    block = TOP_BLOCKS[topk > 16]
    block_k = triton.next_power_of_2(topk)
    splits = triton.cdiv(vocab, block)
    keys = torch.empty(rows, splits, topk, dtype=torch.int64, device=logits.device)
    masses = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
    options = launch_options(logits.device)
    # what a last split smaller than topk lacks ranks below all tokens
    top_splits_kernel[(rows, splits)](
        logits,
        keys,
        masses,
        vocab,
        logits.stride(0),
        TOPK=topk,
        BLOCK_K=block_k,
        BLOCK=block,
        BF16=logits.dtype == torch.bfloat16,
        num_warps=max(1, block // 1024),
        **options,
    )
    width = triton.next_power_of_2(splits * topk)
    top_merge_kernel[(rows,)](
        keys,
        masses,
        target_ids,
        probs_out,
        ids_out,
        splits,
        TOPK=topk,
        BLOCK_K=block_k,
        BLOCK=width,
        BLOCK_P=triton.next_power_of_2(splits),
        num_warps=max(1, min(8, width // 512)),
        **options,
    )


def target_probs(
    *,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    rows_per_req: int,
    min_p: Tensor | None,
) -> Tensor:
    rows, vocab = logits.shape
    probs = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if not rows:
        return probs
    splits = programs_per_row(rows, triton.cdiv(vocab, BLOCK))
    keys = torch.empty(rows, splits, dtype=torch.int64, device=logits.device)
    masses = probs.new_empty(rows, splits)
    common = (vocab, logits.stride(0), rows_per_req)
    block_p = triton.next_power_of_2(splits)
    # of one token there is nothing to cut, and Triton 3.6 does not compile the kernel for it
    truncate = vocab > 1 and (top_k is not None or top_p is not None)
    thresholds, lasts = masses, keys
    levels, counts, notes = masses, keys, keys
    bins = BINS * 2 if rows <= FEW_ROWS else BINS
    if truncate:
        thresholds, lasts = probs.new_empty(rows, 2), keys.new_empty(rows, dtype=torch.int32)
        levels, notes = torch.empty_like(masses), keys.new_empty(rows, 8)
        counts = lasts.new_empty(rows, bins)
    peaks_kernel[(rows, splits)](
        logits,
        temperature,
        keys,
        masses,
        levels,
        counts,
        notes,
        *common,
        TRUNCATE=truncate,
        BINS=bins,
        BLOCK=BLOCK,
    )
    if truncate:
        shared = (
            logits,
            temperature,
            temperature if top_k is None else top_k,
            temperature if top_p is None else top_p,
            keys,
            masses,
        )
        settings = {"HAS_K": top_k is not None, "HAS_P": top_p is not None, "BLOCK_P": block_p}
        lists = lasts.new_empty(rows, sum(by is not None for by in (top_k, top_p)), KEPT)
        count_kernel[(rows, splits)](
            *shared,
            levels,
            thresholds,
            counts,
            *common,
            **settings,
            BINS=bins,
            BLOCK=BLOCK,
            num_warps=4 if bins == BINS else 8,
        )
        gather_kernel[(rows, splits)](
            *shared,
            thresholds,
            counts,
            lists,
            notes,
            *common,
            **settings,
            BINS=bins,
            KEPT=KEPT,
            BLOCK=BLOCK // 2,
            num_warps=8,
        )
        threshold_kernel[(rows,)](
            *shared,
            thresholds,
            lasts,
            lists,
            notes,
            *common,
            splits,
            **settings,
            KEPT=KEPT,
            BLOCK=THRESHOLD_BLOCK,
            num_warps=16,
        )
    kept = logits, temperature, keys, masses, thresholds, lasts
    tiles = {"TRUNCATE": truncate, "BLOCK_P": block_p, "BLOCK": BLOCK}
    left = masses
    if min_p is not None:
        left = torch.empty_like(masses)
        min_p_kernel[(rows, splits)](*kept, min_p, left, *common, **tiles)
    probs_kernel[(rows, splits)](
        *kept, min_p, left, probs, *common, HAS_M=min_p is not None, **tiles
    )
    return probs
