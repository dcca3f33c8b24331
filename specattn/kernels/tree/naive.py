"""Draft trees in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels.sampling import sample_weights, score_key


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
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    scores_out: Tensor,
    tokens_out: Tensor,
    rows_out: Tensor,
    words_out: Tensor,
    start: int,
) -> None:
    append_candidates(
        step,
        child_probs,
        child_tokens,
        path_scores,
        candidate_scores,
        candidate_tokens,
        candidate_parents,
        start,
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
    own = _node_bits(nodes, words_out.shape[2])
    above = 0 if path_words is None else path_words.flatten(0, 1)[rows_out]
    words_out.copy_(own | above)


def grow_words(words: Tensor, step: int, parents: Tensor | None, flat: bool) -> None:
    topk, count = words.shape[2:]
    own = _node_bits(step * topk + torch.arange(topk, device=words.device), count)
    if parents is None:
        words[:, step] = own
        return
    if flat:
        parents = (parents - topk - (step - 1) * topk**2).div(topk, rounding_mode="floor")
    index = parents.long().clamp(0, topk - 1)[:, :, None].expand(-1, -1, count)
    words[:, step] = own | words[:, step - 1].gather(1, index)


def _path_scores(child_probs: Tensor, path_scores: Tensor | None) -> Tensor:
    """Return scores ``[B, beams * topk]`` of paths down to all children."""
    above = 1.0 if path_scores is None else path_scores[:, :, None]
    return (child_probs * above).flatten(1)


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
    device = scores.device
    parent = torch.full((len(scores), num_draft_tokens), -1, device=device)  # [B, n]
    tokens_out[:, 0] = bonus_tokens
    if num_draft_tokens > 1:
        upper, orphan = _parent_candidates(parents, topk)
        kept = _keep_best(scores, upper, orphan, steps, num_draft_tokens - 1)  # [B, n - 1]
        tokens_out[:, 1:] = tokens.gather(1, kept)
        nodes = torch.arange(1, num_draft_tokens, device=device).expand_as(kept)
        node_of = torch.zeros_like(upper).scatter_(1, kept, nodes)  # [B, C + 1], root beyond C
        parent[:, 1:] = node_of.gather(1, upper.gather(1, kept))
    words, depth = _ancestors(parent, words_out.shape[2], steps)
    words_out.copy_(words)
    positions_out.copy_(seq_lens[:, None] + depth)
    next_token, next_sibling = _child_links(parent)
    next_token_out.copy_(next_token)
    next_sibling_out.copy_(next_sibling)


def _parent_candidates(parents: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return parents ``[B, C + 1]``, C for the root, and orphans."""
    batch, groups = parents.shape
    count = groups * topk
    group = torch.arange(groups, device=parents.device)
    # a parent lies in a shallower step than its children
    depth_start = torch.where(group > 0, topk + (group - 1) // topk * topk**2, 0)
    bad = ((parents < 0) | (parents >= depth_start)) & (group > 0)
    upper = torch.where(bad | (group == 0), count, parents).repeat_interleave(topk, dim=1)
    root = torch.full((batch, 1), count, device=parents.device)
    return torch.cat([upper, root], dim=1), bad.repeat_interleave(topk, dim=1)


def _keep_best(scores: Tensor, upper: Tensor, orphan: Tensor, steps: int, keep: int) -> Tensor:
    """Return ``[B, keep]`` ascending flat indices of an ancestor-closed best set."""
    keys = score_key(scores).masked_fill(orphan, -(2**31))
    keys = torch.cat([keys, torch.full_like(keys[:, :1], 2**31 - 1)], dim=1)  # [B, C + 1]
    jump = upper
    for _ in range(steps.bit_length()):
        keys = torch.minimum(keys, keys.gather(1, jump))
        jump = jump.gather(1, jump)
    order = keys[:, :-1].sort(dim=1, descending=True, stable=True).indices
    return order[:, :keep].sort(dim=1).values


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
    nodes, device = words_out.shape[1], log_probs.device
    log_probs = log_probs.nan_to_num(nan=-1e30).clamp(-1e30, 0)
    score = log_probs.new_zeros(batch, 1)
    first, width = 0, 1  # of the prefixes one shorter
    scores, parents, drafted = [score], [torch.full((batch, 1), -1, device=device)], []
    for position in range(length):
        # prefixes of a length, in the order of their parents and ranks: the sort keeps it
        longer = (score[:, :, None] + log_probs[:, position, None]).flatten(1)
        score, order = longer.sort(dim=1, descending=True, stable=True)
        score, order = score[:, : nodes - 1], order[:, : nodes - 1]
        scores.append(score)
        parents.append(first + order // ranks)
        drafted.append(tokens[:, position].gather(1, order % ranks))
        first, width = first + width, order.shape[1]
    # shorter prefixes come first among equals
    score, order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True)
    score, order = score[:, :nodes], order[:, :nodes]  # the empty prefix, the root, is best
    number = torch.zeros(batch, first + width, dtype=torch.long, device=device)
    number.scatter_(1, order, torch.arange(nodes, device=device).expand_as(order))
    parent = number.gather(1, torch.cat(parents, 1).gather(1, order).clamp(min=0))
    parent[:, 0] = -1

    tokens_out.copy_(torch.cat([bonus_tokens[:, None], *drafted], 1).gather(1, order))
    words, depth = _ancestors(parent, words_out.shape[2], length)
    words_out.copy_(words)
    positions_out.copy_(seq_lens[:, None] + depth)
    next_token, next_sibling = _child_links(parent)
    next_token_out.copy_(next_token)
    next_sibling_out.copy_(next_sibling)
    if scores_out is not None:
        scores_out.copy_(score)


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
    count = parents.shape[1]
    node = torch.arange(count, device=parents.device)
    known = (parents >= 0) & (parents < node)
    words, depth = _ancestors(torch.where(known, parents, -1), words_out.shape[2], count - 1)
    words = torch.where(known[:, :, None], words, _node_bits(node, words_out.shape[2]))
    depth = torch.where(known, depth, 0)
    # no two nodes of padding are siblings
    next_token, next_sibling = _child_links(torch.where(known, parents, -1 - node))
    made = (tokens, seq_lens[:, None] + depth, words, next_token, next_sibling)
    outs = (tokens_out, positions_out, words_out, next_token_out, next_sibling_out)
    for new, out in zip(made, outs, strict=True):
        if chosen is not None:
            taken = (chosen != 0).view(-1, *(1,) * (out.dim() - 1))
            new = torch.where(taken, new, out)
        out.copy_(new)


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
    walk = _Walk(next_token, next_sibling)
    for _ in range(accept_index_out.shape[1] - 1):
        children = walk.children()
        want = target_argmax.gather(1, walk.node[:, None])
        walk.descend(children, (_at(tokens, children) == want) & (want >= 0))
    bonus, path = target_argmax.gather(1, walk.node[:, None])[:, 0], walk.path()
    _emit(path, tokens, bonus, accept_index_out, accept_tokens_out, accept_lens_out, bonus_out)


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
    bonus = _draw_bonus(path, residual, weights, final_coins)
    _emit(path, tokens, bonus, accept_index_out, accept_tokens_out, accept_lens_out, bonus_out)


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
    bonus = _draw_bonus(path, residual, weights, final_coins)
    _emit(path, tokens, bonus, accept_index_out, accept_tokens_out, accept_lens_out, bonus_out)


def _draw_bonus(path: Tensor, residual: Tensor, weights: Tensor, final_coins: Tensor) -> Tensor:
    """Draw by the last coin; from ``weights`` if the residual is empty."""
    coin = final_coins.gather(1, (path >= 0).sum(1, keepdim=True) - 1)[:, 0]
    bonus = sample_weights(residual, coin)
    return torch.where(bonus < 0, sample_weights(weights, coin), bonus)


class _Walk:
    """A walk down all trees at once; ``none`` is a missing child."""

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


def _emit(
    path: Tensor,
    tokens: Tensor,
    bonus: Tensor,
    accept_index_out: Tensor,
    accept_tokens_out: Tensor,
    accept_lens_out: Tensor,
    bonus_out: Tensor,
) -> None:
    length = (path >= 0).sum(1)
    following = torch.cat([path[:, 1:], torch.full_like(path[:, :1], -1)], dim=1)
    taken = tokens.gather(1, following.clamp(min=0)).masked_fill(following < 0, 0)
    last = torch.arange(path.shape[1], device=path.device) == length[:, None] - 1
    accept_index_out.copy_(path)
    accept_tokens_out.copy_(torch.where(last, bonus[:, None].clamp(min=0), taken))
    accept_lens_out.copy_(length)
    bonus_out.copy_(bonus)


def _node_bits(nodes: Tensor, num_words: int) -> Tensor:
    """Return words ``[..., num_words]`` with just each node's bit."""
    words = torch.arange(num_words, device=nodes.device)
    bits = torch.ones_like(nodes) << nodes % 64
    return torch.where(words == nodes[..., None] // 64, bits[..., None], 0)


def _ancestors(parent: Tensor, num_words: int, depth_limit: int) -> tuple[Tensor, Tensor]:
    """Return ancestor words ``[B, n, W]`` and depths ``[B, n]`` of parents.

    Node 0 is the root, of parent -1; no node is deeper than ``depth_limit``.
    """
    nodes = torch.arange(parent.shape[1], device=parent.device)
    words = _node_bits(nodes, num_words).expand(len(parent), -1, -1)
    depth = (nodes > 0).long().expand_as(parent)
    jump = parent.clamp(min=0)
    for _ in range(depth_limit.bit_length()):
        words = words | words.gather(1, jump[:, :, None].expand(-1, -1, num_words))
        depth = depth + depth.gather(1, jump)
        jump = jump.gather(1, jump)
    return words, depth


def _child_links(parent: Tensor) -> tuple[Tensor, Tensor]:
    """Return first-child and next-sibling links ``[B, n]`` of parent tables, children ascending."""
    count = parent.shape[1]
    node = torch.arange(count, device=parent.device)
    child_of = parent[:, None, :] == node[:, None]  # [B, n, n]: column is a child of row
    later = (parent[:, None, :] == parent[:, :, None]) & (node > node[:, None])
    first = torch.where(child_of, node, count).amin(2)
    sibling = torch.where(later, node, count).amin(2)
    return first.masked_fill(first == count, -1), sibling.masked_fill(sibling == count, -1)
