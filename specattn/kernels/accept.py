"""Walk the verified tree: which nodes the target keeps, and the token it adds."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specattn.kernels.accept_kernel import (
    accept_greedy_kernel,
    accept_rejection_kernel,
    accept_sampled_kernel,
)
from specattn.kernels.checks import require_dense
from specattn.kernels.launch import launch_options
from specattn.kernels.residual import vocab_tiles


def accept_greedy(
    tokens: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    target_argmax: Tensor,
    *,
    accept_index_out: Tensor,
    accept_tokens_out: Tensor,
    accept_lens_out: Tensor,
    bonus_out: Tensor,
    num_warps: int | None = None,
) -> None:
    """Follow the target's own choice down each tree as far as the tree has it.

    Links that leave their row end the walk, which is at most ``num_steps`` deep and looks at most
    at n - 1 siblings, so a malformed tree neither hangs nor reads elsewhere.

    Parameters
    ----------
    tokens, next_token, next_sibling : Tensor
        ``[B, n]`` int64, of the `specattn.batch.DraftTree`.
    target_argmax : Tensor
        ``[B, n]`` int64, the target's choice after each node.
    accept_index_out, accept_tokens_out, accept_lens_out, bonus_out : Tensor
        ``[B, num_steps + 1]`` int32 and int64, ``[B]`` int32 and int64: the
        `specattn.batch.AcceptResult`, written in place.
    num_warps : int, optional
        Warps per request, a power of two; chosen by the number of nodes otherwise.

    Raises
    ------
    ValueError
        If a tensor is not contiguous.
    """
    require_dense(
        tokens=tokens,
        next_token=next_token,
        next_sibling=next_sibling,
        target_argmax=target_argmax,
        accept_index_out=accept_index_out,
        accept_tokens_out=accept_tokens_out,
    )
    batch, n = tokens.shape
    steps = accept_index_out.shape[1] - 1
    if not batch:
        return
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
        num_warps=num_warps or (1 if n <= 64 else 4),
        **launch_options(tokens.device),
    )


def accept_sampled(
    tokens: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    *,
    accept_index_out: Tensor,
    accept_tokens_out: Tensor,
    accept_lens_out: Tensor,
    bonus_out: Tensor,
) -> None:
    """Sample from the target down each tree; with thresholds (1, 1) exactly by its law.

    At a node one coin u is spread over its children in link order: a child of probability p > 0 is
    taken if ``u * threshold_acc`` is below the probability so far, or if ``p >= threshold_single``.
    If none is, a token is drawn from the target without those children, with the final coin
    of that depth. A token listed twice among siblings counts once. The scheme is SGLang's
    ``tree_speculative_sampling_target_only``, with half-open intervals and separate coins.

    Parameters
    ----------
    tokens, next_token, next_sibling : Tensor
        ``[B, n]`` int64, of the `specattn.batch.DraftTree`.
    target_probs : Tensor
        ``[B, n, V]`` float32, the target's distribution after each node; dense last axis.
    coins, final_coins : Tensor
        ``[B, num_steps + 1]`` float32 in [0, 1), by depth.
    threshold_single, threshold_acc : float
        Below 1 they accept more than the law allows.
    accept_index_out, accept_tokens_out, accept_lens_out, bonus_out : Tensor
        As in `accept_greedy`.

    Raises
    ------
    ValueError
        If a tensor is not contiguous, or there is not one coin per depth.
    """
    require_dense(
        tokens=tokens,
        next_token=next_token,
        next_sibling=next_sibling,
        coins=coins,
        final_coins=final_coins,
        accept_index_out=accept_index_out,
        accept_tokens_out=accept_tokens_out,
    )
    batch, n, vocab = target_probs.shape
    _check_coins(coins, final_coins, accept_index_out)
    if not batch:
        return
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
    *,
    accept_index_out: Tensor,
    accept_tokens_out: Tensor,
    accept_lens_out: Tensor,
    bonus_out: Tensor,
) -> None:
    """Verify a sampled chain by rejection sampling; the tokens follow the target's law exactly.

    Leviathan et al. (arXiv:2211.17192), Chen et al. (arXiv:2302.01318): node i + 1 is taken with
    probability ``min(1, p / q)``; at the first refusal a token is drawn from ``relu(p - q)``, after
    the last node from p.

    Parameters
    ----------
    tokens : Tensor
        ``[B, n]`` int64, n = num_steps + 1, a chain.
    draft_probs : Tensor
        ``[B, num_steps, V]`` float32; row i is what node i + 1 was drawn from; dense last axis.
    target_probs : Tensor
        ``[B, n, V]`` float32, the target's distribution after each node; dense last axis.
    coins, final_coins : Tensor
        ``[B, num_steps + 1]`` float32 in [0, 1), by depth.
    accept_index_out, accept_tokens_out, accept_lens_out, bonus_out : Tensor
        As in `accept_greedy`.

    Raises
    ------
    ValueError
        If a tensor is not contiguous, or there is not one coin per depth.
    """
    require_dense(
        tokens=tokens,
        coins=coins,
        final_coins=final_coins,
        accept_index_out=accept_index_out,
        accept_tokens_out=accept_tokens_out,
    )
    batch, steps, vocab = draft_probs.shape
    _check_coins(coins, final_coins, accept_index_out)
    if not batch:
        return
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


def _check_coins(coins: Tensor, final_coins: Tensor, accept_index_out: Tensor) -> None:
    for name, tensor in (("coins", coins), ("final_coins", final_coins)):
        if tensor.shape != accept_index_out.shape:
            raise ValueError(
                f"{name} must be {list(accept_index_out.shape)}, got {list(tensor.shape)}"
            )
