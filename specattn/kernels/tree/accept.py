"""Accepted paths of draft trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_dense, require_rows, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import cdiv, launch_options, power_of_2
from specattn.kernels.sampling import sample_weights, vocab_tiles

if TYPE_CHECKING:
    from specattn.batch import AcceptResult, DraftTree

launch = TritonModule("specattn.kernels.tree.triton_accept")


def accept_greedy(
    tree: DraftTree,
    target_argmax: Tensor,
    *,
    out: AcceptResult,
) -> None:
    """Follow the target's own choice down each tree.

    The walk goes as far as the tree has the target's choice.
    A link that leaves its row ends the walk, which is at most ``num_steps`` deep and looks at n - 1
    siblings at most, so a malformed tree neither hangs nor reads elsewhere.

    Parameters
    ----------
    tree : DraftTree
        Tokens and links are read; dense.
    target_argmax : Tensor
        ``[B, n]`` int64, the target's choice after each node; -1 for none, as `argmax_tokens`
        gives for NaN.
    out : AcceptResult
        What is written, but for ``probs``; dense.

    Raises
    ------
    ValueError
        If a tensor is not contiguous.
    """
    _check_path(tree, out)
    require_dense(target_argmax=target_argmax)
    if not len(tree.tokens):
        return
    (batch, n), steps = tree.tokens.shape, out.accept_index.shape[1] - 1
    if on_triton(tree.tokens):
        launch.accept_greedy_kernel[(batch,)](
            (tree.tokens, tree.retrieve_next_token, tree.retrieve_next_sibling),
            target_argmax,
            written(out),
            n,
            steps,
            steps.bit_length(),
            BLOCK_N=power_of_2(n),
            BLOCK_S=power_of_2(steps + 1),
            # one warp needs no barriers, but passes wide rows around lane by lane
            num_warps=1 if n <= 64 else 4,
            **launch_options(tree.tokens.device),
        )
        return
    walk = _Walk(tree)
    for _ in range(steps):
        children = walk.children()
        want = target_argmax.gather(1, walk.node[:, None])
        walk.descend(children, (_at(tree.tokens, children) == want) & (want >= 0))
    _emit(walk.path(), tree.tokens, target_argmax.gather(1, walk.node[:, None])[:, 0], out)


def accept_sampled(
    tree: DraftTree,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    *,
    out: AcceptResult,
) -> None:
    """Sample from the target down each tree; tokens follow the target exactly.

    At a node one coin goes over the children in link order: a child of a probability above 0 is
    taken if the coin is below the probability so far. If none is, a token is drawn from the target
    without those children, with the final coin of that depth. A token listed twice among siblings
    counts once. The scheme is SGLang's ``tree_speculative_sampling_target_only`` with thresholds of
    1, half-open intervals and separate coins.

    Parameters
    ----------
    tree : DraftTree
        Tokens and links are read; dense.
    target_probs : Tensor
        ``[B, n, V]`` float32, the target's distribution after each node; dense last axis.
        A node whose row is NaN, as `target_probs` marks it, or without mass accepts no child and
        gives no token.
    coins, final_coins : Tensor
        ``[B, num_steps + 1]`` float32 in [0, 1), by depth.
    out : AcceptResult
        As in `accept_greedy`.

    Raises
    ------
    ValueError
        If a tensor is not contiguous, or there is not one coin per depth.
    """
    tokens = tree.tokens
    _check_sampled(tree, target_probs, coins, final_coins, out)
    if not len(tokens):
        return
    (batch, n, vocab), steps = target_probs.shape, out.accept_index.shape[1] - 1
    if on_triton(tokens):
        launch.accept_sampled_kernel[(batch,)](
            (tokens, tree.retrieve_next_token, tree.retrieve_next_sibling),
            target_probs,
            coins,
            final_coins,
            torch.empty_like(tokens),
            written(out),
            n,
            steps,
            vocab,
            *target_probs.stride()[:2],
            BLOCK_N=power_of_2(n),
            BLOCK_W=power_of_2(cdiv(n, 64)),
            **vocab_tiles(vocab, 64),
        )
        return
    rows = torch.arange(batch, device=tokens.device)
    refused = torch.full((batch, max(n - 1, 1)), vocab, device=tokens.device)
    walk = _Walk(tree)
    for depth in range(steps):
        children = walk.children()
        token = _at(tokens, children)
        known = (children < walk.none) & (token >= 0) & (token < vocab)
        # vocab stands for what is no token
        token = torch.where(known, token, vocab)
        probs = target_probs[rows[:, None], walk.node[:, None], token.clamp(max=vocab - 1)]
        probs = torch.where(known & (probs > 0) & ~_repeats(token), probs, 0.0)
        below = coins[:, depth, None] < probs.cumsum(1)
        stopping = walk.descend(children, (probs > 0) & below)
        refused = torch.where(stopping[:, None], token, refused)
    weights = target_probs[rows, walk.node]
    allowed = torch.ones(batch, vocab + 1, dtype=torch.bool, device=tokens.device)
    residual = weights * allowed.scatter_(1, refused, value=False)[:, :vocab]
    path = walk.path()
    _emit(path, tokens, _draw_bonus(path, residual, weights, final_coins), out)


def accept_rejection(
    tree: DraftTree,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    *,
    out: AcceptResult,
) -> None:
    """Verify a drawn chain by rejection sampling; tokens follow the target exactly.

    Node i + 1 is taken with probability ``min(1, p / q)``. At the first refusal a token is drawn
    from ``relu(p - q)``, after the last node from p (Leviathan et al., arXiv:2211.17192; Chen et
    al., arXiv:2302.01318).

    Parameters
    ----------
    tree : DraftTree
        A chain of num_steps + 1 nodes. Row i of its ``draft_probs``, ``[B, num_steps, V]`` float32
        with a dense last axis, is what node i + 1 was drawn from.
    target_probs, coins, final_coins, out
        As in `accept_sampled`.

    Raises
    ------
    ValueError
        If a tensor is not contiguous, or there is not one coin per depth.
    """
    tokens, draft_probs = tree.tokens, tree.draft_probs
    require_rows(draft_probs=draft_probs)
    _check_sampled(tree, target_probs, coins, final_coins, out)
    if not len(tokens):
        return
    batch, steps, vocab = draft_probs.shape
    if on_triton(tokens):
        launch.accept_rejection_kernel[(batch,)](
            tokens,
            draft_probs,
            target_probs,
            coins,
            final_coins,
            written(out),
            tokens.shape[1],
            steps,
            vocab,
            *draft_probs.stride()[:2],
            *target_probs.stride()[:2],
            BLOCK_S=power_of_2(steps + 1),
            **vocab_tiles(vocab, 32),
        )
        return
    rows = torch.arange(batch, device=tokens.device)
    depth = torch.arange(steps + 1, device=tokens.device)
    token = tokens[:, 1 : steps + 1, None]
    known = (token >= 0) & (token < vocab)
    index = token.clamp(0, vocab - 1)
    p = torch.where(known, target_probs[:, :steps].gather(2, index), 0.0)[:, :, 0]
    q = draft_probs.gather(2, index)[:, :, 0]
    taken = (coins[:, :steps] * q < p).long().cumprod(1).sum(1)  # [B]
    weights = residual = target_probs[rows, taken]
    if steps:
        refuted = draft_probs[rows, taken.clamp(max=steps - 1)]
        residual = weights - torch.where(taken[:, None] < steps, refuted, 0.0)
    path = torch.where(depth <= taken[:, None], depth, -1)
    _emit(path, tokens, _draw_bonus(path, residual, weights, final_coins), out)


def written(out: AcceptResult) -> tuple[Tensor, ...]:
    """Return what accepting writes: paths and tokens ``[B, D]``, lengths, bonus tokens."""
    return out.accept_index, out.accept_tokens, out.accept_lens, out.bonus_tokens


def _check_path(tree: DraftTree, out: AcceptResult) -> None:
    require_dense(
        tokens=tree.tokens,
        next_token=tree.retrieve_next_token,
        next_sibling=tree.retrieve_next_sibling,
        accept_index=out.accept_index,
        accept_tokens=out.accept_tokens,
    )


def _check_sampled(
    tree: DraftTree, target_probs: Tensor, coins: Tensor, final_coins: Tensor, out: AcceptResult
) -> None:
    _check_path(tree, out)
    require_rows(target_probs=target_probs)
    require_dense(coins=coins, final_coins=final_coins)
    require_shape(tuple(out.accept_index.shape), coins=coins, final_coins=final_coins)


def _draw_bonus(path: Tensor, residual: Tensor, weights: Tensor, final_coins: Tensor) -> Tensor:
    """Draw by the last coin; from ``weights`` if the residual is empty."""
    coin = final_coins.gather(1, (path >= 0).sum(1, keepdim=True) - 1)[:, 0]
    bonus = sample_weights(residual, coin)
    return torch.where(bonus < 0, sample_weights(weights, coin), bonus)


class _Walk:
    """A walk down all trees at once; ``none`` is a missing child."""

    def __init__(self, tree: DraftTree) -> None:
        batch, self.none = tree.tokens.shape
        self._lists = _child_lists(tree.retrieve_next_token, tree.retrieve_next_sibling)
        self._walking = torch.ones(batch, dtype=torch.bool, device=tree.tokens.device)
        self.node = torch.zeros(batch, dtype=torch.long, device=tree.tokens.device)
        self._path = [self.node]

    def children(self) -> Tensor:
        """Return ``[B, S]`` children of the current nodes in link order."""
        index = self.node[:, None, None].expand(-1, 1, self._lists.shape[2])
        return self._lists.gather(1, index)[:, 0]

    def descend(self, children: Tensor, accept: Tensor) -> Tensor:
        """Step to the first accepted child; return ``[B]``: who just found none."""
        accept = accept & (children < self.none) & self._walking[:, None]
        found = accept.any(1)
        child = children.gather(1, accept.int().argmax(1, keepdim=True))[:, 0]
        stopping = self._walking & ~found
        self._walking = found
        self.node = torch.where(found, child, self.node)
        self._path.append(torch.where(found, child, -1))
        return stopping

    def path(self) -> Tensor:
        """Return paths ``[B, depth + 1]`` of nodes; -1 past the end."""
        return torch.stack(self._path, dim=1)


def _child_lists(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Return children ``[B, n, S]`` in link order; n for none.

    Links outside the row end a list, and lists are bounded, so malformed links do no harm.
    """
    n = next_token.shape[1]
    lists = next_token.masked_fill((next_token < 0) | (next_token >= n), n)[:, :, None]
    jump = next_sibling.masked_fill((next_sibling < 0) | (next_sibling >= n), n)
    jump = torch.cat([jump, torch.full_like(jump[:, :1], n)], dim=1)  # [B, n + 1]
    while lists.shape[2] < n - 1:
        lists = torch.cat([lists, jump.gather(1, lists.flatten(1)).view_as(lists)], dim=2)
        jump = jump.gather(1, jump)
    return lists[:, :, : max(n - 1, 1)]


def _at(tokens: Tensor, nodes: Tensor) -> Tensor:
    return tokens.gather(1, nodes.clamp(max=tokens.shape[1] - 1))


def _repeats(token: Tensor) -> Tensor:
    """Mark entries ``[B, S]`` that an earlier entry of the row equals."""
    return (token[:, :, None] == token[:, None, :]).tril(-1).any(2)


def _emit(path: Tensor, tokens: Tensor, bonus: Tensor, out: AcceptResult) -> None:
    length = (path >= 0).sum(1)
    following = torch.cat([path[:, 1:], torch.full_like(path[:, :1], -1)], dim=1)
    taken = tokens.gather(1, following.clamp(min=0)).masked_fill(following < 0, 0)
    last = torch.arange(path.shape[1], device=path.device) == length[:, None] - 1
    out.accept_index.copy_(path)
    out.accept_tokens.copy_(torch.where(last, bonus[:, None].clamp(min=0), taken))
    out.accept_lens.copy_(length)
    out.bonus_tokens.copy_(bonus)
