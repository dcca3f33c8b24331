"""Sampling: distributions, coins, draws, and the best tokens; nothing is sorted."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels import implementation
from specattn.kernels.checks import require_dense, require_rows
from specattn.kernels.sampling import naive

# what a coin decides: the draw index of `uniform`
ACCEPT, FINAL, DRAFT = 0, 1, 2


def top_tokens(
    logits: Tensor,
    topk: int,
    *,
    probs_out: Tensor,
    ids_out: Tensor,
    target_ids: Tensor | None = None,
) -> None:
    """Write each row's ``topk`` most probable tokens, the most probable first.

    Among equal logits the lower token comes first. NaN counts as -inf, +inf is not allowed; a row
    of -inf has the probabilities 0. Two launches.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``, any float dtype; dense last axis.
    topk : int
        Tokens per row, 1 to V.
    probs_out : Tensor
        ``[R, topk]`` float32, written in place: their probabilities in the whole vocabulary.
    ids_out : Tensor
        ``[R, topk]`` int64, written in place.
    target_ids : Tensor, optional
        ``[V]`` int64, contiguous: what each token is called in ``ids_out``; itself if None.

    Raises
    ------
    ValueError
        If V is smaller than ``topk``, or a layout does not fit.
    """
    vocab = logits.shape[1]
    if not 1 <= topk <= vocab:
        raise ValueError(f"topk must be in 1..{vocab}, the vocabulary, got {topk}")
    if target_ids is not None and (
        target_ids.dtype != torch.int64
        or target_ids.shape != (vocab,)
        or not target_ids.is_contiguous()
    ):
        raise ValueError(
            f"target_ids must be contiguous int64 [{vocab}], "
            f"got {target_ids.dtype} {list(target_ids.shape)}"
        )
    require_rows(logits=logits)
    require_dense(probs_out=probs_out, ids_out=ids_out)
    if not len(logits):
        return
    implementation(naive.top_tokens, logits.device)(logits, topk, probs_out, ids_out, target_ids)


def argmax_tokens(logits: Tensor) -> Tensor:
    """Return each row's most probable token, the lowest among equals.

    A row with NaN or +inf, or of -inf alone, gives -1. One launch for many rows, two for few,
    which are split among programs.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``, any float dtype; dense last axis.

    Returns
    -------
    Tensor
        ``[R]`` int64.

    Raises
    ------
    ValueError
        If the last axis of ``logits`` is not dense.
    """
    require_rows(logits=logits)
    return implementation(naive.argmax_tokens, logits.device)(logits)


def target_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    rows_per_req: int,
    min_p: Tensor | None = None,
) -> Tensor:
    """Return the distributions that sampling with these settings draws from.

    Temperature comes first, then top-k, then top-p on what top-k left, then min-p, as in Hugging
    Face. Tokens tie if their logits are equally far below the largest, in float32. A row with NaN
    or +inf, or of -inf alone, has no distribution: all its probabilities are NaN.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``, any float dtype, R = B * rows_per_req.
    temperature : Tensor
        ``[B]`` float32. 0 is greedy: all mass on the largest logit, the lowest token among equals.
    top_k : Tensor, optional
        ``[B]`` int32: keep that many tokens, the lower token at a tie; all of them if 0 or at least
        V. None switches it off for the batch.
    top_p : Tensor, optional
        ``[B]`` float32: keep the fewest most likely tokens that reach this mass, at least one; all
        of them from 1 on. None switches it off for the batch; without top-k too, two launches do.
    rows_per_req : int
        Consecutive rows that share a request's settings.
    min_p : Tensor, optional
        ``[B]`` float32: of what the others left, keep tokens at least that many times as probable
        as the most probable one; all of them if 0. None switches it off for the batch; else one
        launch more reads the rows of requests that use it.

    Returns
    -------
    Tensor
        ``[R, V]`` float32; every other row sums to 1.

    Raises
    ------
    ValueError
        If the last axis of ``logits`` is not dense.
    """
    require_rows(logits=logits)
    return implementation(naive.target_probs, logits.device)(
        logits, temperature, top_k, top_p, rows_per_req, min_p
    )


def uniform(seeds: Tensor, positions: Tensor, draw: int) -> Tensor:
    """Return the coin of each (seed, position, draw), in one launch.

    The coin does not depend on the batch or the device: the generator is counter-based, SplitMix64
    (Steele, Lea, Flood 2014) chained over the three numbers.

    Parameters
    ----------
    seeds : Tensor
        ``[B]`` int64, one per request.
    positions : Tensor
        ``[B, ...]`` int64.
    draw : int
        ``ACCEPT``, ``FINAL`` or ``DRAFT``; more are free to use.

    Returns
    -------
    Tensor
        Shape of ``positions``, float32 multiples of 2^-24 in [0, 1).

    Raises
    ------
    ValueError
        If ``seeds`` is not contiguous.
    """
    require_dense(seeds=seeds)
    return implementation(naive.uniform, seeds.device)(seeds, positions, draw)


def path_coins(seeds: Tensor, seq_lens: Tensor, depths: int, draws: int) -> Tensor:
    """Return a step's coins, `uniform` at ``seq_lens + depth``, in one launch.

    Parameters
    ----------
    seeds, seq_lens : Tensor
        ``[B]`` int64 and int32.
    depths : int
        Depths per request, from 0.
    draws : int
        Draws per depth, from ``ACCEPT``, which is 0.

    Returns
    -------
    Tensor
        ``[draws, B, depths]`` float32.

    Raises
    ------
    ValueError
        If a tensor is not contiguous.
    """
    require_dense(seeds=seeds, seq_lens=seq_lens)
    return implementation(naive.path_coins, seeds.device)(seeds, seq_lens, depths, draws)


def draw_tokens(weights: Tensor, coins: Tensor) -> Tensor:
    """Draw one token per row by inverting its distribution function.

    One launch draws all rows.
    The token is the first of positive weight whose cumulative weight exceeds ``coin * total``:
    half-open, so no coin in [0, 1) can pick a token of weight 0.

    Parameters
    ----------
    weights : Tensor
        ``[B, V]`` float32, need not sum to 1; negative weights count as 0.
    coins : Tensor
        ``[B]`` float32 in [0, 1).

    Returns
    -------
    Tensor
        ``[B]`` int64; 0, which may be embedded, for a row without weight or with one that is NaN
        or infinite.

    Raises
    ------
    ValueError
        If a last axis, or ``coins``, is not dense.
    """
    require_dense(coins=coins)
    require_rows(weights=weights)
    return implementation(naive.draw_tokens, weights.device)(weights, coins)
