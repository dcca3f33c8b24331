"""Walk the verified trees: one program per request."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter
from specattn.kernels.sampling.triton_residual import sample_residual


@triton.jit
def _matching_child(token, next_token, next_sibling, want, n):
    """Return each node's first child of the wanted token; -1 for none."""
    child = next_token  # [BLOCK_N]
    found = tl.full(child.shape, -1, tl.int32)
    walking = child >= 0
    seen = 0
    while (seen < n - 1) & (tl.max(walking.to(tl.int32), 0) > 0):
        at = tl.maximum(child, 0)
        hit = walking & (tl.gather(token, at, 0) == want)
        found = tl.where(hit, child, found)
        child = tl.gather(next_sibling, at, 0)
        walking = walking & (found < 0) & (child >= 0)
        seen += 1
    return found


@triton.jit
def accept_greedy_kernel(
    tree,  # tokens, links to children and to siblings, [B, n] int64 each
    target_argmax,  # [B, n] int64
    out,  # see `accept.written`
    n,
    steps,
    rounds,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Step all nodes to the target's choices; double steps into paths."""
    tokens, next_token, next_sibling = tree
    accept_index_out, accept_tokens_out, accept_lens_out, bonus_out = out
    req = tl.program_id(0).to(tl.int64)
    enter(PDL)
    # All nodes at once: every row is read once, and all rows together.
    node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    live = node < n
    token = tl.load(tokens + req * n + node, mask=live, other=0)
    first = tl.load(next_token + req * n + node, mask=live, other=-1)
    sibling = tl.load(next_sibling + req * n + node, mask=live, other=-1)
    want = tl.load(target_argmax + req * n + node, mask=live, other=0)
    first = tl.where((first >= 0) & (first < n), first, -1).to(tl.int32)
    sibling = tl.where((sibling >= 0) & (sibling < n), sibling, -1).to(tl.int32)
    # a node after which the target chose nothing accepts no child
    first = tl.where(want >= 0, first, -1)
    step = _matching_child(token, first, sibling, want, n)

    # the node at every depth, by doubling the step
    depth = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    path = tl.zeros([BLOCK_S], tl.int32)
    for bit in range(rounds):
        there = tl.where(path >= 0, tl.gather(step, tl.maximum(path, 0), 0), -1)
        path = tl.where((depth >> bit) & 1 != 0, there, path)
        step = tl.where(step >= 0, tl.gather(step, tl.maximum(step, 0), 0), -1)
    on_path = (path >= 0) & (depth <= steps)
    emitted = tl.where(on_path, tl.gather(want, tl.maximum(path, 0), 0), 0)
    length = tl.sum(on_path.to(tl.int32), 0)
    row = req * (steps + 1) + depth
    tl.store(accept_index_out + row, path, mask=depth <= steps)
    tl.store(accept_tokens_out + row, tl.maximum(emitted, 0), mask=depth <= steps)
    tl.store(accept_lens_out + req, length)
    # written by the lane that holds the path's end
    tl.store(bonus_out + req + tl.zeros_like(depth), emitted, mask=depth == length - 1)


@triton.jit
def _note_children(tree, target_probs, notes, n, vocab, stride_node, BLOCK_N: tl.constexpr):
    """Note each node's p, parent, and first node of its token.

    The probabilities of all nodes arrive together; one by one, the walk would wait for each.
    """
    tokens, next_token, next_sibling = tree
    node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    live = node < n
    tl.store(notes + node, tl.full([BLOCK_N], -1, tl.int64), mask=live)
    tl.debug_barrier()
    child = tl.load(next_token + node, mask=live, other=-1)
    walking = (child >= 0) & (child < n)
    seen = 0
    while (seen < n - 1) & (tl.max(walking.to(tl.int32), 0) > 0):
        tl.store(notes + child, node.to(tl.int64), mask=walking)
        child = tl.load(next_sibling + child, mask=walking, other=-1)
        walking = walking & (child >= 0) & (child < n)
        seen += 1
    tl.debug_barrier()
    parent = tl.load(notes + node, mask=live, other=-1)
    token = tl.load(tokens + node, mask=live, other=-1)
    known = (parent >= 0) & (token >= 0) & (token < vocab)
    p = tl.load(target_probs + parent * stride_node + token, mask=known, other=0)
    same = (token[:, None] == token[None, :]) & live[:, None]  # [BLOCK_N, BLOCK_N]
    first = tl.min(tl.where(same, node[:, None], BLOCK_N - 1), 0)
    note = p.to(tl.int32, bitcast=True).to(tl.int64) << 32
    note |= ((parent + 1) << 16) | first
    tl.debug_barrier()
    tl.store(notes + node, note, mask=live)
    tl.debug_barrier()
    return token, first


# second coins, behind the first ones of any number of requests: no variant for where they lie
@triton.jit(do_not_specialize=["final_coins"])
def accept_sampled_kernel(
    tree,  # tokens, links to children and to siblings, [B, n] int64 each
    target_probs,  # [B, n, V] float32
    coins,  # [B, steps + 1] float32
    final_coins,  # [B, steps + 1] float32
    notes,  # [B, n] int64, scratch
    out,  # see `accept.written`
    n,
    steps,
    vocab,
    stride_req,
    stride_node,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Walk children by a coin per depth; draw the bonus."""
    accept_index_out, accept_tokens_out, accept_lens_out, bonus_out = out
    req = tl.program_id(0).to(tl.int64)
    tokens, next_token, next_sibling = tree[0] + req * n, tree[1] + req * n, tree[2] + req * n
    notes += req * n
    target_probs += req * stride_req
    coins += req * (steps + 1)
    accept_index_out += req * (steps + 1)
    accept_tokens_out += req * (steps + 1)

    tree = tokens, next_token, next_sibling
    node_tokens, first_of_token = _note_children(
        tree, target_probs, notes, n, vocab, stride_node, BLOCK_N
    )
    word = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    dropped = tl.zeros([BLOCK_W], tl.int64)
    node = tl.full([], 0, tl.int64)
    length = tl.full([], 1, tl.int32)
    walking = length > 0
    tl.store(accept_index_out, 0)
    for depth in range(1, steps + 1):
        coin = tl.load(coins + depth - 1)
        child = tl.load(next_token + node, mask=walking, other=-1)
        found = tl.full([], -1, tl.int64)
        token = tl.full([], 0, tl.int64)
        reached = tl.full([], 0.0, tl.float32)
        seen = tl.full([], 0, tl.int32)
        p_row = target_probs + node * stride_node
        while (found < 0) & (child >= 0) & (child < n) & (seen < n - 1):
            token = tl.load(tokens + child)
            note = tl.load(notes + child)
            # a child of two parents was noted for one
            stray = ((note >> 16) & 0xFFFF) != node + 1
            known = stray & (token >= 0) & (token < vocab)
            p = tl.load(p_row + token, mask=known, other=0)
            p = tl.where(stray, p, (note >> 32).to(tl.int32).to(tl.float32, bitcast=True))
            # A token that is listed twice has its probability once.
            bit = tl.full([], 1, tl.int64) << (note & 63)
            bits = tl.where(word == ((note >> 6) & 0x3FF), bit, 0)  # [BLOCK_W]
            again = tl.max(((dropped & bits) != 0).to(tl.int32), 0) > 0
            p = tl.where((p > 0) & (again == 0), p, 0.0)
            reached += p
            accept = (p > 0) & (coin < reached)
            found = tl.where(accept, child, found)
            dropped = tl.where(accept, dropped, dropped | bits)
            child = tl.load(next_sibling + child)
            seen += 1
        stepped = found >= 0
        # nothing is refused at a node whose children were not looked at
        dropped = tl.where(stepped, 0, dropped)
        node = tl.where(stepped, found, node)
        length += stepped.to(tl.int32)
        walking = stepped
        tl.store(accept_index_out + depth, tl.where(stepped, found, -1).to(tl.int32))
        tl.store(accept_tokens_out + depth - 1, tl.where(stepped, token, 0))

    # the refused tokens, each once, take the place of the notes
    slot = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    bits = tl.full([BLOCK_N, BLOCK_W], 1, tl.int64) << (slot % 64)[:, None]
    bits = tl.where((slot // 64)[:, None] == word[None, :], bits, 0)
    refused = (tl.max(((bits & dropped[None, :]) != 0).to(tl.int32), 1) > 0) & (slot < n)
    refused = refused & (first_of_token == slot)
    rank = tl.cumsum(refused.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(notes + rank, node_tokens, mask=refused)
    tl.debug_barrier()
    p_row = target_probs + node * stride_node
    coin = tl.load(final_coins + req * (steps + 1) + length - 1)
    count = tl.sum(refused.to(tl.int32), 0)
    bonus = sample_residual(p_row, None, False, notes, count, coin, vocab, ROWS, SEGMENT, TILES)
    tl.store(accept_tokens_out + steps, 0)
    tl.store(accept_tokens_out + length - 1, tl.maximum(bonus, 0))
    tl.store(accept_lens_out + req, length)
    tl.store(bonus_out + req, bonus)


# second coins, behind the first ones of any number of requests: no variant for where they lie
@triton.jit(do_not_specialize=["final_coins"])
def accept_rejection_kernel(
    tokens,  # [B, n] int64
    draft_probs,  # [B, steps, V] float32
    target_probs,  # [B, n, V] float32
    coins,  # [B, steps + 1] float32
    final_coins,  # [B, steps + 1] float32
    out,  # see `accept.written`
    n,
    steps,
    vocab,
    stride_draft_req,
    stride_draft,
    stride_target_req,
    stride_target,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Judge a chain's tokens at once; the first refusal gives the bonus."""
    accept_index_out, accept_tokens_out, accept_lens_out, bonus_out = out
    req = tl.program_id(0).to(tl.int64)
    tokens += req * n
    draft_probs += req * stride_draft_req
    target_probs += req * stride_target_req
    accept_index_out += req * (steps + 1)
    accept_tokens_out += req * (steps + 1)

    # all tokens are judged at once; the first refusal ends the path
    place = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    drafted = place < steps
    token = tl.load(tokens + 1 + place, mask=drafted, other=-1)
    known = drafted & (token >= 0) & (token < vocab)
    p = tl.load(target_probs + place * stride_target + token, mask=known, other=0)
    q = tl.load(draft_probs + place * stride_draft + token, mask=known, other=0)
    coin = tl.load(coins + req * (steps + 1) + place, mask=drafted, other=0)
    last = tl.min(tl.where(known & (coin * q < p), steps, place), 0)
    last = tl.minimum(last, steps).to(tl.int64)
    p_row = target_probs + last * stride_target
    q_row = draft_probs + last * stride_draft
    coin = tl.load(final_coins + req * (steps + 1) + last)
    bonus = sample_residual(
        p_row, q_row, last < steps, tokens, 0, coin, vocab, ROWS, SEGMENT, TILES
    )
    tl.store(accept_index_out + place, tl.where(place <= last, place, -1), mask=place <= steps)
    emitted = tl.where(place < last, token, tl.where(place == last, bonus, 0))
    tl.store(accept_tokens_out + place, tl.maximum(emitted, 0), mask=place <= steps)
    tl.store(accept_lens_out + req, last.to(tl.int32) + 1)
    tl.store(bonus_out + req, bonus)
