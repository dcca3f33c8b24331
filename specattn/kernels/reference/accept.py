"""Twin of `specattn.kernels.accept`."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels.reference.sampling import draw_tokens


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
) -> None:
    """See `specattn.kernels.accept.accept_greedy`."""
    walk = _Walk(next_token, next_sibling)
    for _ in range(accept_index_out.shape[1] - 1):
        children = walk.children()
        want = target_argmax.gather(1, walk.node[:, None])
        walk.descend(children, _at(tokens, children) == want)
    bonus = target_argmax.gather(1, walk.node[:, None])[:, 0]
    _emit(walk.path(), tokens, bonus, accept_index_out, accept_tokens_out, accept_lens_out)
    bonus_out.copy_(bonus)


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
    """See `specattn.kernels.accept.accept_sampled`."""
    batch, _, vocab = target_probs.shape
    rows = torch.arange(batch, device=tokens.device)
    refused = torch.full((batch, max(tokens.shape[1] - 1, 1)), vocab, device=tokens.device)
    walk = _Walk(next_token, next_sibling)
    for depth in range(accept_index_out.shape[1] - 1):
        children = walk.children()
        token = _at(tokens, children)
        known = (children < walk.none) & (token >= 0) & (token < vocab)
        # vocab stands for what is no token
        token = torch.where(known, token, vocab)
        probs = target_probs[rows[:, None], walk.node[:, None], token.clamp(max=vocab - 1)]
        probs = torch.where(known & (probs > 0) & ~_repeats(token), probs, 0.0)
        below = coins[:, depth, None] * threshold_acc < probs.cumsum(1)
        stopping = walk.descend(children, (probs > 0) & (below | (probs >= threshold_single)))
        refused = torch.where(stopping[:, None], token, refused)
    weights = target_probs[rows, walk.node]
    allowed = torch.ones(batch, vocab + 1, dtype=torch.bool, device=tokens.device)
    residual = weights * allowed.scatter_(1, refused, value=False)[:, :vocab]
    path = walk.path()
    coin = final_coins.gather(1, (path >= 0).sum(1, keepdim=True) - 1)[:, 0]
    bonus = draw_tokens(residual, coin, fallback=weights)
    _emit(path, tokens, bonus, accept_index_out, accept_tokens_out, accept_lens_out)
    bonus_out.copy_(bonus)


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
    """See `specattn.kernels.accept.accept_rejection`."""
    batch, steps, vocab = draft_probs.shape
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
    coin = final_coins.gather(1, taken[:, None])[:, 0]
    bonus = draw_tokens(residual, coin, fallback=weights)
    path = torch.where(depth <= taken[:, None], depth, -1)
    _emit(path, tokens, bonus, accept_index_out, accept_tokens_out, accept_lens_out)
    bonus_out.copy_(bonus)


class _Walk:
    """A walk down every tree of the batch at once; ``none`` stands for a missing child."""

    def __init__(self, next_token: Tensor, next_sibling: Tensor) -> None:
        batch, self.none = next_token.shape
        self._lists = _child_lists(next_token, next_sibling)
        self._walking = torch.ones(batch, dtype=torch.bool, device=next_token.device)
        self.node = torch.zeros(batch, dtype=torch.long, device=next_token.device)
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
        """Return ``[B, depth + 1]`` nodes from the root, -1 past the end."""
        return torch.stack(self._path, dim=1)


def _child_lists(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Return ``[B, n, S]``: the children of every node in link order, n where there are no more.

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
    """Mark entries of ``[B, S]`` that an earlier entry of the row equals."""
    return (token[:, :, None] == token[:, None, :]).tril(-1).any(2)


def _emit(
    path: Tensor,
    tokens: Tensor,
    bonus: Tensor,
    accept_index_out: Tensor,
    accept_tokens_out: Tensor,
    accept_lens_out: Tensor,
) -> None:
    length = (path >= 0).sum(1)
    following = torch.cat([path[:, 1:], torch.full_like(path[:, :1], -1)], dim=1)
    taken = tokens.gather(1, following.clamp(min=0)).masked_fill(following < 0, 0)
    last = torch.arange(path.shape[1], device=path.device) == length[:, None] - 1
    accept_index_out.copy_(path)
    accept_tokens_out.copy_(torch.where(last, bonus[:, None], taken))
    accept_lens_out.copy_(length)
