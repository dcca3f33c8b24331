"""Pick beams, build draft trees, and accept paths of them."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels import implementation
from specattn.kernels.checks import require_dense, require_rows
from specattn.kernels.tree import naive

# candidates that one program holds in registers; wider tables are sorted by torch
MAX_CANDIDATES = 16384
# nodes, positions and ranks that a byte can number
MAX_NODES = 256


def append_candidates(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor | None,
    *,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
) -> None:
    """Record the children that the last draft step proposes, without picking beams.

    Parameters are those of `select_beams`, of which this is the first half.
    """
    start = _candidate_offset(step, child_probs, candidate_scores, candidate_parents)
    require_dense(child_probs=child_probs, child_tokens=child_tokens, path_scores=path_scores)
    if not len(child_probs):
        return
    implementation(naive.append_candidates, child_probs.device)(
        step,
        child_probs,
        child_tokens,
        path_scores,
        candidate_scores,
        candidate_tokens,
        candidate_parents,
        start,
    )


def select_beams(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor | None,
    path_words: Tensor | None,
    *,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    scores_out: Tensor,
    tokens_out: Tensor,
    rows_out: Tensor,
    words_out: Tensor,
) -> None:
    """Score the beams' children, record them as candidates, keep the best ``topk``.

    By the rule of EAGLE-2 (arXiv:2406.16858) a path scores the product of its probabilities. Ties
    go to the lower flat index ``beam * topk + child``; NaN ranks last. The outputs may not overlap
    the inputs.

    Parameters
    ----------
    step : int
        Draft step, from 0. Step 0 has one beam, the root.
    child_probs, child_tokens : Tensor
        ``[B, beams, topk]`` float32 and int64: what the draft model proposes after each beam.
        ``beams`` is 1 at step 0 and ``topk`` later.
    path_scores : Tensor or None
        ``[B, beams]`` float32, probability of the path down to each beam; 1 if None.
    path_words : Tensor or None
        ``[B, beams, W]`` int64, its ancestors and itself: bit ``step * topk + branch``; no bits if
        None, as of the root, which is no draft node. May have a row stride.
    candidate_scores, candidate_tokens, candidate_parents : Tensor
        The `specattn.batch.Candidates` of all steps; the columns of this step are written.
    scores_out, tokens_out, rows_out : Tensor
        ``[B, topk]`` float32, int64, int64, best first: path score, token, and the row of
        ``[B * beams]`` that it extends.
    words_out : Tensor
        ``[B, topk, W]`` int64, the words of the new beams. May have a row stride.

    Raises
    ------
    ValueError
        If the candidates have no room for this step, or a tensor is not laid out as above.
    """
    start = _candidate_offset(step, child_probs, candidate_scores, candidate_parents)
    nodes = (step + 1) * child_probs.shape[2]
    if candidate_parents.shape[1] < 1 + nodes:
        raise ValueError(
            f"step {step} has no beams to pick: candidates have {candidate_parents.shape[1]} groups"
        )
    if words_out.shape[2] * 64 < nodes:
        raise ValueError(f"words_out must have a bit for each of {nodes} nodes")
    require_dense(
        child_probs=child_probs,
        child_tokens=child_tokens,
        path_scores=path_scores,
        path_words=None if path_words is None else path_words[:1],
        scores_out=scores_out,
        tokens_out=tokens_out,
        rows_out=rows_out,
        words_out=words_out[:1],
    )
    if not len(child_probs):
        return
    implementation(naive.select_beams, child_probs.device)(
        step,
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
        start,
    )


def grow_words(words: Tensor, step: int, parents: Tensor | None, *, flat: bool = False) -> None:
    """Write a draft step's ancestor words from those of its parents.

    It is what `select_beams` does to words, for drafts whose branches others choose. One launch,
    which can be recorded in a CUDA graph.

    Parameters
    ----------
    words : Tensor
        ``[B, steps, topk, W]`` int64, in place: row ``step`` is written, the row before is read.
        Bit ``s * topk + k`` is branch k of step s. May have a stride between requests.
    step : int
        From 0. The branches of step 0 hang below the root, which is no node: they get their own
        bits.
    parents : Tensor or None
        ``[B, topk]`` int32 or int64, the branch of the step before that each branch extends; cut
        to 0..topk - 1. Any strides. Not read at step 0.
    flat : bool
        Whether ``parents`` are the branches' own flat indices among all candidates, as in
        `specattn.batch.Candidates` and in EAGLE's code, from which their parents follow.

    Raises
    ------
    ValueError
        If the step is outside ``words``, or a tensor has another shape or dtype.
    """
    shape = tuple(words.shape)
    if len(shape) != 4 or words.dtype != torch.int64 or shape[3] * 64 < shape[1] * shape[2]:
        raise ValueError(
            f"words must be [B, steps, topk, at least ceil(steps * topk / 64)] {torch.int64}, "
            f"got {list(shape)} {words.dtype}"
        )
    if not 0 <= step < shape[1]:
        raise ValueError(f"step must be 0..{shape[1] - 1}, got {step}")
    require_dense(words=words[:1])
    if step:
        wanted = f"[{shape[0]}, {shape[2]}] int32 or int64"
        if parents is None:
            raise ValueError(f"parents must be {wanted} after step 0, got None")
        kinds = (torch.int32, torch.int64)
        if tuple(parents.shape) != (shape[0], shape[2]) or parents.dtype not in kinds:
            raise ValueError(f"parents must be {wanted}, got {list(parents.shape)} {parents.dtype}")
    if not words.numel():
        return
    above = parents if step else None
    implementation(naive.grow_words, words.device)(words, step, above, flat)


def build_tree(
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    bonus_tokens: Tensor,
    seq_lens: Tensor,
    *,
    topk: int,
    num_draft_tokens: int,
    tokens_out: Tensor,
    positions_out: Tensor,
    words_out: Tensor,
    next_token_out: Tensor,
    next_sibling_out: Tensor,
) -> None:
    """Build each request's tree of its best ``num_draft_tokens - 1`` candidates.

    This is the reranking of EAGLE-2 (arXiv:2406.16858), exact at ties and NaN. A candidate ranks
    by the lowest score on its path, equals go to the lower flat index, and NaN ranks last, so
    every node's parent is kept too. Nodes are numbered in ascending flat index after the root.

    A candidate whose parent entry does not point to a shallower step is an orphan: it ranks last,
    and hangs below the root if it is needed to fill the tree.

    Parameters
    ----------
    scores, tokens, parents : Tensor
        The `specattn.batch.Candidates`; rows may have a stride. C = 0 for plain decoding.
    bonus_tokens, seq_lens : Tensor
        ``[B]`` int64 and int32: the root's token and position.
    topk, num_draft_tokens : int
        Children per group, and the nodes wanted, the root included.
    tokens_out, positions_out, next_token_out, next_sibling_out : Tensor
        ``[B, num_draft_tokens]`` int64, dense: the `specattn.batch.DraftTree`.
    words_out : Tensor
        ``[B, num_draft_tokens, W]`` int64, dense: its ancestor words.

    Raises
    ------
    ValueError
        If the candidates are fewer than the nodes, or scores and parents disagree, or an output
        is not dense.
    """
    steps = _tree_steps(scores, parents, topk, num_draft_tokens)
    require_dense(
        tokens_out=tokens_out,
        positions_out=positions_out,
        words_out=words_out,
        next_token_out=next_token_out,
        next_sibling_out=next_sibling_out,
    )
    batch, count = scores.shape
    if not batch:
        return
    sort = count > MAX_CANDIDATES
    build = naive.build_tree if sort else implementation(naive.build_tree, scores.device)
    build(
        scores,
        tokens,
        parents,
        bonus_tokens,
        seq_lens,
        topk,
        num_draft_tokens,
        tokens_out,
        positions_out,
        words_out,
        next_token_out,
        next_sibling_out,
        steps,
    )


def best_first_tree(
    log_probs: Tensor,
    tokens: Tensor,
    bonus_tokens: Tensor,
    seq_lens: Tensor,
    *,
    tokens_out: Tensor,
    positions_out: Tensor,
    words_out: Tensor,
    next_token_out: Tensor,
    next_sibling_out: Tensor,
    scores_out: Tensor | None = None,
) -> None:
    """Build each request's tree of most probable prefixes, by a block's marginals.

    A draft that writes a whole block in one forward gives a distribution per position. If the
    positions are taken as independent, a prefix has the product of its tokens' probabilities. The
    tree holds the root and the n - 1 prefixes of the highest products, best first, as in DDTree.
    So the first m nodes are the best tree of m nodes.

    Among equal products the shorter prefix comes first, then the one whose parent comes first,
    then the one of the lower rank. Log-probabilities are added up in float32 from the root down.
    A number above 0 counts as 0, and NaN and what is below -1e30 as -1e30.

    One launch, which can be recorded in a CUDA graph.

    Parameters
    ----------
    log_probs : Tensor
        ``[B, L, K]`` float32, of the K most probable tokens at each of L positions, descending.
        Requests may have a stride.
    tokens : Tensor
        ``[B, L, K]`` int64, those tokens. Requests may have a stride.
    bonus_tokens, seq_lens : Tensor
        ``[B]`` int64 and int32: the root's token and position.
    tokens_out, positions_out, next_token_out, next_sibling_out : Tensor
        ``[B, n]`` int64, dense: the `specattn.batch.DraftTree`, n of 1 to 256.
    words_out : Tensor
        ``[B, n, W]`` int64, dense: its ancestor words.
    scores_out : Tensor, optional
        ``[B, n]`` float32, dense: the log-probability of the prefix down to each node.

    Raises
    ------
    ValueError
        If the block has fewer prefixes than the tree nodes, or more than 255 positions or ranks;
        or if a tensor of the block is of another shape or dtype, or one is not dense.
    """
    _check_marginals(log_probs, tokens, tokens_out.shape[1])
    require_dense(log_probs=log_probs[:1], tokens=tokens[:1])
    require_dense(
        tokens_out=tokens_out,
        positions_out=positions_out,
        words_out=words_out,
        next_token_out=next_token_out,
        next_sibling_out=next_sibling_out,
        scores_out=scores_out,
    )
    if not len(log_probs):
        return
    implementation(naive.best_first_tree, log_probs.device)(
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
    )


def link_tree(
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    chosen: Tensor | None = None,
    *,
    tokens_out: Tensor,
    positions_out: Tensor,
    words_out: Tensor,
    next_token_out: Tensor,
    next_sibling_out: Tensor,
) -> None:
    """Make draft trees of nodes and their parents.

    Node 0 is the root. A node whose parent is not a node before it is padding, which has no
    children: it is as deep as the root, sees itself alone, and no link leads to it. Children are
    linked in ascending order.

    One launch, which can be recorded in a CUDA graph.

    Parameters
    ----------
    tokens, parents : Tensor
        ``[B, n]`` int64, n of 1 to 256: every node's token, and its parent; may have a row stride.
    seq_lens : Tensor
        ``[B]`` int32, the position of each request's root.
    chosen : Tensor, optional
        ``[B]`` int32: the outputs of requests with a 0 stay as they are.
    tokens_out, positions_out, next_token_out, next_sibling_out : Tensor
        ``[B, n]`` int64, dense: the `specattn.batch.DraftTree`. ``tokens_out`` may be ``tokens``.
    words_out : Tensor
        ``[B, n, W]`` int64, dense: its ancestor words.

    Raises
    ------
    ValueError
        If the trees have more than 256 nodes, or a tensor is of another shape, dtype or layout.
    """
    shape = tuple(tokens.shape)
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_NODES:
        raise ValueError(f"tokens must be [B, 1..{MAX_NODES}], got {list(shape)}")
    given = {"tokens": tokens, "parents": parents}
    outs = {"tokens_out": tokens_out, "positions_out": positions_out}
    outs |= {"next_token_out": next_token_out, "next_sibling_out": next_sibling_out}
    for name, tensor in (given | outs).items():
        if tensor.shape != shape or tensor.dtype != torch.int64:
            raise ValueError(
                f"{name} must be {list(shape)} {torch.int64}, got {list(tensor.shape)} "
                f"{tensor.dtype}"
            )
    if words_out.shape[:2] != shape or words_out.shape[2] * 64 < shape[1]:
        raise ValueError(
            f"words_out must be {[*shape, -(-shape[1] // 64)]}, got {list(words_out.shape)}"
        )
    require_rows(**given)
    require_dense(**outs, words_out=words_out, seq_lens=seq_lens, chosen=chosen)
    if not len(tokens):
        return
    implementation(naive.link_tree, tokens.device)(
        tokens,
        parents,
        seq_lens,
        chosen,
        tokens_out,
        positions_out,
        words_out,
        next_token_out,
        next_sibling_out,
    )


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
    """Follow the target's own choice down each tree.

    The walk goes as far as the tree has the target's choice.
    A link that leaves its row ends the walk, which is at most ``num_steps`` deep and looks at n - 1
    siblings at most, so a malformed tree neither hangs nor reads elsewhere.

    Parameters
    ----------
    tokens, next_token, next_sibling : Tensor
        ``[B, n]`` int64, of the `specattn.batch.DraftTree`.
    target_argmax : Tensor
        ``[B, n]`` int64, the target's choice after each node; -1 for none, as `argmax_tokens`
        gives for NaN.
    accept_index_out, accept_tokens_out, accept_lens_out, bonus_out : Tensor
        ``[B, num_steps + 1]`` int32 and int64, ``[B]`` int32 and int64: the
        `specattn.batch.AcceptResult`, written in place. Where the target has no choice at the
        last node, ``bonus_out`` is -1, and ``accept_tokens_out`` holds token 0 in its place.

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
    if not len(tokens):
        return
    implementation(naive.accept_greedy, tokens.device)(
        tokens,
        next_token,
        next_sibling,
        target_argmax,
        accept_index_out,
        accept_tokens_out,
        accept_lens_out,
        bonus_out,
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
    """Sample from the target down each tree; exactly, with thresholds (1, 1).

    At a node one coin u goes over the children in link order: a child of probability p > 0 is
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
        A node whose row is NaN, as `target_probs` marks it, or without mass accepts no child and
        gives no token.
    coins, final_coins : Tensor
        ``[B, num_steps + 1]`` float32 in [0, 1), by depth.
    threshold_single, threshold_acc : float
        Below 1 they accept more than the target's probabilities allow.
    accept_index_out, accept_tokens_out, accept_lens_out, bonus_out : Tensor
        As in `accept_greedy`.

    Raises
    ------
    ValueError
        If a tensor is not contiguous, or there is not one coin per depth.
    """
    require_dense(tokens=tokens, next_token=next_token, next_sibling=next_sibling)
    _check_sampled(target_probs, coins, final_coins, accept_index_out, accept_tokens_out)
    if not len(tokens):
        return
    implementation(naive.accept_sampled, tokens.device)(
        tokens,
        next_token,
        next_sibling,
        target_probs,
        coins,
        final_coins,
        threshold_single,
        threshold_acc,
        accept_index_out,
        accept_tokens_out,
        accept_lens_out,
        bonus_out,
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
    """Verify a drawn chain by rejection sampling; tokens follow the target exactly.

    Node i + 1 is taken with probability ``min(1, p / q)``. At the first refusal a token is drawn
    from ``relu(p - q)``, after the last node from p (Leviathan et al., arXiv:2211.17192; Chen et
    al., arXiv:2302.01318).

    Parameters
    ----------
    tokens : Tensor
        ``[B, n]`` int64, n = num_steps + 1, a chain.
    draft_probs : Tensor
        ``[B, num_steps, V]`` float32; row i is what node i + 1 was drawn from; dense last axis.
    target_probs : Tensor
        ``[B, n, V]`` float32, the target's distribution after each node; dense last axis.
        A node whose row is NaN, as `target_probs` marks it, or without mass accepts no child and
        gives no token.
    coins, final_coins : Tensor
        ``[B, num_steps + 1]`` float32 in [0, 1), by depth.
    accept_index_out, accept_tokens_out, accept_lens_out, bonus_out : Tensor
        As in `accept_greedy`.

    Raises
    ------
    ValueError
        If a tensor is not contiguous, or there is not one coin per depth.
    """
    require_dense(tokens=tokens)
    require_rows(draft_probs=draft_probs)
    _check_sampled(target_probs, coins, final_coins, accept_index_out, accept_tokens_out)
    if not len(tokens):
        return
    implementation(naive.accept_rejection, tokens.device)(
        tokens,
        draft_probs,
        target_probs,
        coins,
        final_coins,
        accept_index_out,
        accept_tokens_out,
        accept_lens_out,
        bonus_out,
    )


def _candidate_offset(
    step: int, child_probs: Tensor, candidate_scores: Tensor, candidate_parents: Tensor
) -> int:
    """Return the first candidate's flat index; raise ValueError for lack of room."""
    _, beams, topk = child_probs.shape
    if beams != (topk if step else 1):
        raise ValueError(
            f"child_probs must have {topk if step else 1} beams at step {step}, got {beams}"
        )
    start = topk + (step - 1) * topk**2 if step else 0
    if start + beams * topk > candidate_scores.shape[1] or not candidate_parents.shape[1]:
        raise ValueError(
            f"candidates end at column {candidate_scores.shape[1]}, before those of step {step} "
            f"({start}..{start + beams * topk - 1})"
        )
    return start


def _tree_steps(scores: Tensor, parents: Tensor, topk: int, num_draft_tokens: int) -> int:
    """Return the tree's depth by its candidates' shapes; raise ValueError if unfit."""
    count, groups = scores.shape[1], parents.shape[1]
    if not count and num_draft_tokens == 1:
        return 0
    if count != groups * topk or (groups - 1) % topk:
        raise ValueError(
            f"{count} scores and {groups} parents are not the candidates of topk {topk}: expected "
            "topk + (num_steps - 1) * topk² and (num_steps - 1) * topk + 1"
        )
    if not 1 <= num_draft_tokens <= count + 1:
        raise ValueError(f"num_draft_tokens must be 1..{count + 1}, got {num_draft_tokens}")
    return (groups - 1) // topk + 1


def _check_marginals(log_probs: Tensor, tokens: Tensor, nodes: int) -> None:
    """Raise ValueError unless they give so many nodes."""
    if log_probs.dim() != 3 or log_probs.dtype != torch.float32:
        raise ValueError(
            f"log_probs must be [B, L, K] {torch.float32}, got {list(log_probs.shape)} "
            f"{log_probs.dtype}"
        )
    if tokens.shape != log_probs.shape or tokens.dtype != torch.int64:
        raise ValueError(
            f"tokens must be {list(log_probs.shape)} {torch.int64}, got {list(tokens.shape)} "
            f"{tokens.dtype}"
        )
    _, length, ranks = log_probs.shape
    if length >= MAX_NODES or ranks >= MAX_NODES:
        raise ValueError(
            f"log_probs must have at most {MAX_NODES - 1} positions and ranks, got {length} and "
            f"{ranks}"
        )
    prefixes = 0
    for depth in range(1, length + 1):
        prefixes = min(prefixes + ranks**depth, MAX_NODES)
    if not 1 <= nodes <= min(prefixes + 1, MAX_NODES):
        raise ValueError(f"the tree must have 1..{min(prefixes + 1, MAX_NODES)} nodes, got {nodes}")


def _check_sampled(
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    accept_index_out: Tensor,
    accept_tokens_out: Tensor,
) -> None:
    require_rows(target_probs=target_probs)
    require_dense(
        coins=coins,
        final_coins=final_coins,
        accept_index_out=accept_index_out,
        accept_tokens_out=accept_tokens_out,
    )
    for name, tensor in (("coins", coins), ("final_coins", final_coins)):
        if tensor.shape != accept_index_out.shape:
            raise ValueError(
                f"{name} must be {list(accept_index_out.shape)}, got {list(tensor.shape)}"
            )
