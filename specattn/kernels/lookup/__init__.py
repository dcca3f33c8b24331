"""Prompt lookup: drafts out of the requests' own text, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.checks import require_dense, require_rows, require_shape, whole_number
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import cdiv, launch_options, power_of_2, programs_per_row
from specattn.kernels.tree.build import MAX_NODES

launch = TritonModule("specattn.kernels.lookup.triton")

#: Most tokens of a text: a match's length and place are one int32.
MAX_CONTEXT = 2**24
#: Most tokens of a match, and most matches of a tree.
MAX_NGRAM, MAX_MATCHES = 64, 32
# places that a program compares at a time
_BLOCK = 1024
# programs that share a text; the request's merge reads the matches of all of them
_SLICES = 128


def lookup_tree(
    text: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    *,
    matches: int,
    min_ngram: int,
    max_ngram: int,
    num_steps: int,
    tokens_out: Tensor,
    parents_out: Tensor,
    ngrams_out: Tensor,
) -> None:
    """Find each text's last tokens earlier on; merge what followed.

    It is prompt lookup (Saxena, 2023; n-gram speculation in vLLM) with several matches. A place of
    the text matches by the most last tokens, up to ``max_ngram``, that it has in common with the
    text's end, and not at all below ``min_ngram``. A longer match comes before a shorter one, and a
    later one before an earlier one of the same length. The first ``matches`` of them count.

    A match proposes the ``num_steps`` tokens that followed it. Where they reach the end of the
    text, they go on as from the match: a text that repeats itself goes on repeating itself.

    The proposals become one tree of shared prefixes. Node 0 is the newest token. Proposals are
    inserted in the order of their matches, token by token, as long as there is room: so the first
    one is nodes 1, 2, 3, and one match gives a chain. Nodes that are not needed have token 0 and
    parent -1.

    Two launches, which can be recorded in a CUDA graph.

    Parameters
    ----------
    text : Tensor
        ``[R, context]`` int32, each request's tokens by position; rows may have a stride.
    rows : Tensor
        ``[B]`` int64, rows of ``text``.
    seq_lens : Tensor
        ``[B]`` int32, the position of each request's newest token, inside ``text``.
    matches : int
        Most matches, 1 to 32.
    min_ngram, max_ngram : int
        Fewest and most tokens of a match, 1 to 64.
    num_steps : int
        Tokens that a match proposes, and so the depth of the tree: 1 to 255.
    tokens_out, parents_out : Tensor
        ``[B, n]`` int64, dense: a node's token, and its parent, which comes before it; -1 for the
        root and for nodes that are not needed. n is 1 to 256.
    ngrams_out : Tensor
        ``[B]`` int32, the tokens of each request's first match; 0 without one.

    Raises
    ------
    ValueError
        If a number is outside its range, or a tensor of another shape, dtype or layout.
    """
    whole_number("matches", matches, 1, MAX_MATCHES)
    whole_number("max_ngram", max_ngram, 1, MAX_NGRAM)
    whole_number("min_ngram", min_ngram, 1, max_ngram)
    whole_number("num_steps", num_steps, 1, MAX_NODES - 1)
    _check_text(text, rows, seq_lens)
    whole_number("nodes", tokens_out.shape[1], 1, MAX_NODES)
    shape = len(rows), tokens_out.shape[1]
    require_shape(shape, torch.int64, tokens_out=tokens_out, parents_out=parents_out)
    require_shape(shape[:1], torch.int32, ngrams_out=ngrams_out)
    require_dense(tokens_out=tokens_out, parents_out=parents_out, ngrams_out=ngrams_out)
    if not len(rows):
        return
    batch, nodes = shape
    if on_triton(text):
        blocks = cdiv(text.shape[1], _BLOCK)
        slices = min(programs_per_row(batch, blocks), _SLICES)
        block_m, block_s = (power_of_2(size) for size in (matches, num_steps))
        keys = torch.empty(batch, slices, matches, dtype=torch.int32, device=text.device)
        options = launch_options(text.device)
        launch.search_kernel[slices, batch](
            text,
            rows,
            seq_lens,
            keys,
            matches,
            min_ngram,
            max_ngram,
            text.stride(0),
            BLOCK=_BLOCK,
            BLOCK_M=block_m,
            num_warps=4,
            **options,
        )
        launch.merge_kernel[(batch,)](
            text,
            rows,
            seq_lens,
            keys,
            tokens_out,
            parents_out,
            ngrams_out,
            slices * matches,
            matches,
            num_steps,
            nodes,
            text.stride(0),
            BLOCK_K=power_of_2(slices * matches),
            BLOCK_M=block_m,
            BLOCK_S=block_s,
            BLOCK_N=power_of_2(nodes),
            # one warp needs no barriers, but holds little
            num_warps=1 if block_m * block_s <= 256 and slices * matches <= 1024 else 8,
            **options,
        )
        return
    own, last = text[rows], seq_lens[:, None].long()  # [B, context], [B, 1]
    keys = _match_keys(own, last, min_ngram, max_ngram)
    found = keys.topk(min(matches, keys.shape[1])).values  # [B, M]
    ngrams_out.copy_(found[:, 0] >> 24)
    after = (found & 0xFFFFFF) + 1  # [B, M]
    period = last - after + 1
    ahead = torch.arange(num_steps, device=text.device)
    places = after[:, :, None] + ahead % period.clamp(min=1)[:, :, None]
    places = places.clamp(max=text.shape[1] - 1)  # of what is no match
    proposed = own.gather(1, places.flatten(1)).view_as(places).long()  # [B, M, N]
    tokens, parents = _merge(proposed, found > 0, nodes)
    tokens[:, :1] = own.gather(1, last).long()
    tokens_out.copy_(tokens)
    parents_out.copy_(parents)


def append_text(text: Tensor, rows: Tensor, seq_lens: Tensor, tokens: Tensor, lens: Tensor) -> None:
    """Write each request's new tokens behind its newest one; one launch.

    Parameters
    ----------
    text : Tensor
        ``[R, context]`` int32, in place; rows may have a stride.
    rows : Tensor
        ``[B]`` int64, all different but for 0, which is padding and is not written.
    seq_lens : Tensor
        ``[B]`` int32, the position of each request's newest token before these.
    tokens : Tensor
        ``[B, D]`` int64; may have a row stride.
    lens : Tensor
        ``[B]`` int32, how many of them are new. What lies past the context is dropped.

    Raises
    ------
    ValueError
        If a tensor is of another shape, dtype or layout.
    """
    _check_text(text, rows, seq_lens)
    require_shape((len(rows), tokens.shape[-1]), torch.int64, tokens=tokens)
    require_shape((len(rows),), torch.int32, lens=lens)
    require_rows(tokens=tokens)
    require_dense(lens=lens)
    if not tokens.numel():
        return
    if on_triton(text):
        launch.append_kernel[(len(tokens),)](
            text,
            rows,
            seq_lens,
            tokens,
            lens,
            text.shape[1],
            tokens.shape[1],
            text.stride(0),
            tokens.stride(0),
            BLOCK_D=power_of_2(tokens.shape[1]),
            num_warps=1,
            **launch_options(text.device),
        )
        return
    for at in range(tokens.shape[1]):
        place = seq_lens.long() + 1 + at
        new = (rows != 0) & (at < lens) & (place < text.shape[1])
        # the others write what is there
        place = torch.where(new, place, 0)
        old = text[rows, place]
        text[rows, place] = torch.where(new, tokens[:, at].int(), old)


def _check_text(text: Tensor, rows: Tensor, seq_lens: Tensor) -> None:
    if text.dim() != 2 or text.dtype != torch.int32 or not 1 <= text.shape[1] <= MAX_CONTEXT:
        raise ValueError(
            f"text must be [R, 1..{MAX_CONTEXT}] {torch.int32}, got {list(text.shape)} {text.dtype}"
        )
    require_shape((len(rows),), torch.int64, rows=rows)
    require_shape((len(rows),), torch.int32, seq_lens=seq_lens)
    require_rows(text=text)
    require_dense(rows=rows, seq_lens=seq_lens)


def _match_keys(own: Tensor, last: Tensor, min_ngram: int, max_ngram: int) -> Tensor:
    """Return ``length << 24 | place`` of every place's match, or 0."""
    place = torch.arange(own.shape[1], device=own.device)
    alive = place < last  # [B, context]
    length = torch.zeros_like(own)
    for back in range(max_ngram):
        want = own.gather(1, (last - back).clamp(min=0))
        shifted = own[:, (place - back).clamp(min=0)]
        alive = alive & (place >= back) & (shifted == want)
        length += alive
    return torch.where(length >= min_ngram, length.long() << 24 | place, 0)


def _merge(proposed: Tensor, live: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return tokens and parents ``[B, nodes]`` of the tree of live proposals."""
    batch, count, steps = proposed.shape
    device = proposed.device
    depth = torch.arange(steps, device=device)
    row = torch.arange(count, device=device)
    # a column more takes what has no room
    tokens = proposed.new_zeros(batch, nodes + 1)
    parents = torch.full_like(tokens, -1)
    numbers = proposed.new_zeros(batch, count, steps)
    size = proposed.new_ones(batch)  # [B], nodes so far
    for i in range(count):
        same = (proposed == proposed[:, i : i + 1]) & live[:, :, None]
        shared = same.long().cumprod(2).sum(2)  # [B, M]
        shared = torch.where(row < i, shared, 0)
        depth_shared, nearest = shared.max(1)
        old = depth < depth_shared[:, None]  # [B, N]
        own = size[:, None] + depth - depth_shared[:, None]
        number = torch.where(old, numbers[torch.arange(batch, device=device), nearest], own)
        numbers[:, i] = number
        above = torch.cat([torch.zeros_like(number[:, :1]), number[:, :-1]], 1)
        new = ~old & live[:, i : i + 1] & (number < nodes)
        where = torch.where(new, number, nodes)
        tokens.scatter_(1, where, proposed[:, i])
        parents.scatter_(1, where, above)
        size = size + torch.where(live[:, i], steps - depth_shared, 0)
    return tokens[:, :nodes], parents[:, :nodes]
