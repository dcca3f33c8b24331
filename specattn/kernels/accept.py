"""Walk the verified tree: which nodes the target keeps, and the token it adds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.dense import require_dense

# tokens whose weights are summed before they are chosen among
SEGMENT = 512


@triton.jit
def _matching_child(token, next_token, next_sibling, want, n):
    """Return each node's first child, in link order, of the wanted token; -1 for none."""
    child = next_token                                                       # [BLOCK_N]
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
def _accept_greedy_kernel(
    tokens,             # [B, n] int64
    next_token,         # [B, n] int64
    next_sibling,       # [B, n] int64
    target_argmax,      # [B, n] int64
    accept_index_out,   # [B, steps + 1] int32, out
    accept_tokens_out,  # [B, steps + 1] int64, out
    accept_lens_out,    # [B] int32, out
    bonus_out,          # [B] int64, out
    n, steps, rounds,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    # All nodes at once: every row is read once, and all rows together.
    node = tl.arange(0, BLOCK_N)                                             # [BLOCK_N]
    live = node < n
    token = tl.load(tokens + req * n + node, mask=live, other=0)
    first = tl.load(next_token + req * n + node, mask=live, other=-1)
    sibling = tl.load(next_sibling + req * n + node, mask=live, other=-1)
    want = tl.load(target_argmax + req * n + node, mask=live, other=0)
    first = tl.where((first >= 0) & (first < n), first, -1).to(tl.int32)
    sibling = tl.where((sibling >= 0) & (sibling < n), sibling, -1).to(tl.int32)
    step = _matching_child(token, first, sibling, want, n)

    # the node at every depth, by doubling the step
    depth = tl.arange(0, BLOCK_S)                                            # [BLOCK_S]
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
    tl.store(accept_tokens_out + row, emitted, mask=depth <= steps)
    tl.store(accept_lens_out + req, length)
    # written by the lane that holds the path's end
    tl.store(bonus_out + req + tl.zeros_like(depth), emitted, mask=depth == length - 1)


@triton.jit
def _weights(
    p_row, q_row, q_on, refused, num_refused, segment, vocab,
    ROWS: tl.constexpr, SEGMENT: tl.constexpr, HAS_Q: tl.constexpr,
):
    """Return what of the target's probabilities is left: less q, without the refused tokens."""
    lane = tl.arange(0, SEGMENT)                                             # [SEGMENT]
    token = segment[:, None] * SEGMENT + lane[None, :]                       # [ROWS, SEGMENT]
    rest = tl.load(p_row + token, mask=token < vocab, other=0)
    if HAS_Q:
        rest -= tl.load(q_row + token, mask=(token < vocab) & q_on, other=0)
    rest = tl.where(rest > 0, rest, 0.0)
    for first in range(0, num_refused, 32):
        # a token is refused where its row and its column name the same entry of the list
        rows = tl.zeros([ROWS], tl.int32)
        columns = tl.zeros([SEGMENT], tl.int32)
        for i in range(first, tl.minimum(first + 32, num_refused)):
            gone = tl.load(refused + i)
            rows |= tl.where(segment == gone // SEGMENT, 1 << (i - first), 0)
            columns |= tl.where(lane == gone % SEGMENT, 1 << (i - first), 0)
        rest = tl.where((rows[:, None] & columns[None, :]) != 0, 0.0, rest)
    return rest


@triton.jit
def invert(
    p_row, q_row, q_on, refused, num_refused, coin, vocab, ROWS: tl.constexpr,
    SEGMENT: tl.constexpr, TILES: tl.constexpr, HAS_Q: tl.constexpr,
):
    """Return the first token whose cumulative weight exceeds coin * total; -1 if there is none."""
    row = tl.arange(0, ROWS)                                                 # [ROWS]
    tile = tl.arange(0, TILES)[:, None]                                      # [TILES, 1]
    masses = tl.zeros([TILES, ROWS], tl.float32)
    for i in range(tl.cdiv(vocab, ROWS * SEGMENT)):
        rest = _weights(
            p_row, q_row, q_on, refused, num_refused, i * ROWS + row, vocab, ROWS, SEGMENT, HAS_Q
        )
        masses = tl.where(tile == i, tl.sum(rest, 1)[None, :], masses)
    mass = tl.reshape(masses, [TILES * ROWS])
    segment = tl.arange(0, TILES * ROWS)
    reached = tl.cumsum(mass, 0)
    goal = coin * tl.max(reached, 0)
    # Rounding may leave nothing above the goal: then the last token with weight.
    last = tl.max(tl.where(mass > 0, segment, -1), 0)
    hit = tl.min(tl.where((mass > 0) & (reached > goal), segment, TILES * ROWS), 0)
    chosen = tl.where(hit < TILES * ROWS, hit, last)
    below = tl.max(tl.where(segment == chosen - 1, reached, 0.0), 0)

    here = tl.maximum(chosen, 0) + tl.arange(0, 1)
    rest = _weights(
        p_row, q_row, q_on, refused, num_refused, here, vocab, 1, SEGMENT, HAS_Q
    )
    rest = tl.reshape(rest, [SEGMENT])
    token = tl.maximum(chosen, 0) * SEGMENT + tl.arange(0, SEGMENT)
    past = (rest > 0) & (below + tl.cumsum(rest, 0) > goal)
    hit = tl.min(tl.where(past, token, vocab), 0)
    return tl.where(hit < vocab, hit, tl.max(tl.where(rest > 0, token, -1), 0))


@triton.jit
def _draw(
    p_row, q_row, q_on, refused, num_refused, coin, vocab, ROWS: tl.constexpr,
    SEGMENT: tl.constexpr, TILES: tl.constexpr, HAS_Q: tl.constexpr,
):
    """Draw from the residual; from the target itself if rounding left no residual."""
    token = -1
    tries = 0
    while (token < 0) & (tries < 2):
        first = tries == 0
        token = invert(
            p_row, q_row, q_on & first, refused, tl.where(first, num_refused, 0), coin, vocab,
            ROWS, SEGMENT, TILES, HAS_Q,
        )
        tries += 1
    return tl.maximum(token, 0).to(tl.int64)


@triton.jit
def _note_children(
    tokens, next_token, next_sibling, target_probs, notes, n, vocab, stride_node,
    BLOCK_N: tl.constexpr,
):
    """Write what the walk asks of every node: p as its parent's child, parent, first of its token.

    The probabilities of all nodes arrive together; one by one, the walk would wait for each.
    """
    node = tl.arange(0, BLOCK_N)                                             # [BLOCK_N]
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
    same = (token[:, None] == token[None, :]) & live[:, None]                # [BLOCK_N, BLOCK_N]
    first = tl.min(tl.where(same, node[:, None], BLOCK_N - 1), 0)
    note = p.to(tl.int32, bitcast=True).to(tl.int64) << 32
    note |= ((parent + 1) << 16) | first
    tl.debug_barrier()
    tl.store(notes + node, note, mask=live)
    tl.debug_barrier()
    return token, first


@triton.jit
def _accept_sampled_kernel(
    tokens,             # [B, n] int64
    next_token,         # [B, n] int64
    next_sibling,       # [B, n] int64
    target_probs,       # [B, n, V] float32
    coins,              # [B, steps + 1] float32
    final_coins,        # [B, steps + 1] float32
    notes,              # [B, n] int64, scratch
    accept_index_out,   # [B, steps + 1] int32, out
    accept_tokens_out,  # [B, steps + 1] int64, out
    accept_lens_out,    # [B] int32, out
    bonus_out,          # [B] int64, out
    n, steps, vocab, stride_req, stride_node, threshold_single, threshold_acc,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr, SEGMENT: tl.constexpr, TILES: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    tokens += req * n
    next_token += req * n
    next_sibling += req * n
    notes += req * n
    target_probs += req * stride_req
    coins += req * (steps + 1)
    accept_index_out += req * (steps + 1)
    accept_tokens_out += req * (steps + 1)

    node_tokens, first_of_token = _note_children(
        tokens, next_token, next_sibling, target_probs, notes, n, vocab, stride_node, BLOCK_N
    )
    word = tl.arange(0, BLOCK_W)                                             # [BLOCK_W]
    dropped = tl.zeros([BLOCK_W], tl.int64)
    node = tl.full([], 0, tl.int64)
    length = tl.full([], 1, tl.int32)
    walking = length > 0
    tl.store(accept_index_out, 0)
    for depth in range(1, steps + 1):
        coin = tl.load(coins + depth - 1) * threshold_acc
        child = tl.load(next_token + node, mask=walking, other=-1)
        dropped = tl.where(walking, 0, dropped)
        found = tl.full([], -1, tl.int64)
        token = tl.full([], 0, tl.int64)
        reached = tl.full([], 0.0, tl.float32)
        seen = tl.full([], 0, tl.int32)
        while (found < 0) & (child >= 0) & (child < n) & (seen < n - 1):
            token = tl.load(tokens + child)
            note = tl.load(notes + child)
            # a child of two parents was noted for one
            stray = ((note >> 16) & 0xFFFF) != node + 1
            known = stray & (token >= 0) & (token < vocab)
            p = tl.load(target_probs + node * stride_node + token, mask=known, other=0)
            p = tl.where(stray, p, (note >> 32).to(tl.int32).to(tl.float32, bitcast=True))
            # A token that is listed twice has its probability once.
            bit = tl.full([], 1, tl.int64) << (note & 63)
            bits = tl.where(word == ((note >> 6) & 0x3FF), bit, 0)           # [BLOCK_W]
            again = tl.max(((dropped & bits) != 0).to(tl.int32), 0) > 0
            p = tl.where((p > 0) & (again == 0), p, 0.0)
            reached += p
            accept = (p > 0) & ((coin < reached) | (p >= threshold_single))
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
    slot = tl.arange(0, BLOCK_N)                                             # [BLOCK_N]
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
    bonus = _draw(
        p_row, p_row, False, notes, tl.sum(refused.to(tl.int32), 0), coin, vocab, ROWS, SEGMENT,
        TILES, False,
    )
    tl.store(accept_tokens_out + steps, 0)
    tl.store(accept_tokens_out + length - 1, bonus)
    tl.store(accept_lens_out + req, length)
    tl.store(bonus_out + req, bonus)


@triton.jit
def _accept_rejection_kernel(
    tokens,             # [B, n] int64
    draft_probs,        # [B, steps, V] float32
    target_probs,       # [B, n, V] float32
    coins,              # [B, steps + 1] float32
    final_coins,        # [B, steps + 1] float32
    accept_index_out,   # [B, steps + 1] int32, out
    accept_tokens_out,  # [B, steps + 1] int64, out
    accept_lens_out,    # [B] int32, out
    bonus_out,          # [B] int64, out
    n, steps, vocab, stride_draft_req, stride_draft, stride_target_req, stride_target,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr, SEGMENT: tl.constexpr, TILES: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    tokens += req * n
    draft_probs += req * stride_draft_req
    target_probs += req * stride_target_req
    accept_index_out += req * (steps + 1)
    accept_tokens_out += req * (steps + 1)

    # all tokens are judged at once; the first refusal ends the path
    place = tl.arange(0, BLOCK_S)                                            # [BLOCK_S]
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
    bonus = _draw(
        p_row, q_row, last < steps, tokens, 0, coin, vocab, ROWS, SEGMENT, TILES, True
    )
    tl.store(accept_index_out + place, tl.where(place <= last, place, -1), mask=place <= steps)
    emitted = tl.where(place < last, token, tl.where(place == last, bonus, 0))
    tl.store(accept_tokens_out + place, emitted, mask=place <= steps)
    tl.store(accept_lens_out + req, last.to(tl.int32) + 1)
    tl.store(bonus_out + req, bonus)


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
        tokens=tokens, next_token=next_token, next_sibling=next_sibling,
        target_argmax=target_argmax, accept_index_out=accept_index_out,
        accept_tokens_out=accept_tokens_out,
    )
    batch, n = tokens.shape
    steps = accept_index_out.shape[1] - 1
    if not batch:
        return
    _accept_greedy_kernel[(batch,)](
        tokens, next_token, next_sibling, target_argmax,
        accept_index_out, accept_tokens_out, accept_lens_out, bonus_out,
        n, steps, steps.bit_length(), BLOCK_N=triton.next_power_of_2(n),
        # one warp needs no barriers, but passes wide rows around lane by lane
        BLOCK_S=triton.next_power_of_2(steps + 1), num_warps=num_warps or (1 if n <= 64 else 4),
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
        tokens=tokens, next_token=next_token, next_sibling=next_sibling, coins=coins,
        final_coins=final_coins, accept_index_out=accept_index_out,
        accept_tokens_out=accept_tokens_out,
    )
    batch, n, vocab = target_probs.shape
    _check_coins(coins, final_coins, accept_index_out)
    if not batch:
        return
    _accept_sampled_kernel[(batch,)](
        tokens, next_token, next_sibling, target_probs, coins, final_coins,
        torch.empty_like(tokens),
        accept_index_out, accept_tokens_out, accept_lens_out, bonus_out,
        n, accept_index_out.shape[1] - 1, vocab, target_probs.stride(0), target_probs.stride(1),
        threshold_single, threshold_acc,
        BLOCK_N=triton.next_power_of_2(n), BLOCK_W=triton.next_power_of_2(triton.cdiv(n, 64)),
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
        tokens=tokens, coins=coins, final_coins=final_coins, accept_index_out=accept_index_out,
        accept_tokens_out=accept_tokens_out,
    )
    batch, steps, vocab = draft_probs.shape
    _check_coins(coins, final_coins, accept_index_out)
    if not batch:
        return
    _accept_rejection_kernel[(batch,)](
        tokens, draft_probs, target_probs, coins, final_coins,
        accept_index_out, accept_tokens_out, accept_lens_out, bonus_out,
        tokens.shape[1], steps, vocab,
        draft_probs.stride(0), draft_probs.stride(1),
        target_probs.stride(0), target_probs.stride(1),
        BLOCK_S=triton.next_power_of_2(steps + 1), **vocab_tiles(vocab, 32),
    )


def _check_coins(coins: Tensor, final_coins: Tensor, accept_index_out: Tensor) -> None:
    for name, tensor in (("coins", coins), ("final_coins", final_coins)):
        if tensor.shape != accept_index_out.shape:
            raise ValueError(
                f"{name} must be {list(accept_index_out.shape)}, got {list(tensor.shape)}"
            )


def vocab_tiles(vocab: int, most_rows: int) -> dict[str, int]:
    """Tiles of ``ROWS`` segments: all of one tile's loads are under way together."""
    segments = triton.cdiv(vocab, SEGMENT)
    rows = min(most_rows, triton.next_power_of_2(segments))
    tiles = triton.next_power_of_2(triton.cdiv(segments, rows))
    return {
        "ROWS": rows, "SEGMENT": SEGMENT, "TILES": tiles, "num_warps": max(4, min(16, rows // 2)),
    }
