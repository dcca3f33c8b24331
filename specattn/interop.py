"""The edge of the library: masks as other libraries spell them, and trees that users bring.

Inside, visibility is ancestor words: ``[B, n, W]`` int64, bit j of row i set iff node j is i or an
ancestor of i. Functions here that size their result by the lengths wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.errors import TreeError
from specattn.kernels.reference.tree import ancestors, child_links
from specattn.plan import mask_words

__all__ = [
    "full_mask",
    "links_from_parents",
    "mask_indptr",
    "mask_words",
    "packed_indptr",
    "packed_mask",
    "qlen_mask",
    "validate_tree",
    "words_from_mask",
    "words_from_parents",
]


def qlen_mask(words: Tensor, keys: int | None = None) -> Tensor:
    """Spell words as one bool per (query, tail key): SGLang's ``QLEN_ONLY``.

    Parameters
    ----------
    words : Tensor
        ``[B, n, W]`` int64.
    keys : int, optional
        Tail keys; n if omitted.

    Returns
    -------
    Tensor
        ``[B, n, keys]`` bool.
    """
    key = torch.arange(words.shape[1] if keys is None else keys, device=words.device)
    return (words[:, :, key // 64] >> key % 64 & 1) != 0


def words_from_mask(mask: Tensor) -> Tensor:
    """Spell a ``[B, n, keys]`` bool mask as ``[B, n, W]`` int64 words; undoes `qlen_mask`."""
    keys = mask.shape[2]
    key = torch.arange(keys, device=mask.device)
    bits = mask.long() << key % 64  # [B, n, keys]
    words = bits.new_zeros(*mask.shape[:2], mask_words(keys))
    # distinct bits: their sum is their union, and the sign bit wraps into place
    return words.index_add_(2, key // 64, bits)


def mask_indptr(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Return ``[B + 1]`` int64: where each request's cells start in `full_mask`."""
    return _offsets(num_draft_tokens * (seq_lens.long() + num_draft_tokens))


def full_mask(words: Tensor, seq_lens: Tensor) -> Tensor:
    """Spell words and prefix as flat bools: SGLang's ``FULL_MASK``, FlashInfer's custom mask.

    Request b has n rows of ``seq_lens[b] + n`` cells, the prefix first and always visible.

    Parameters
    ----------
    words : Tensor
        ``[B, n, W]`` int64.
    seq_lens : Tensor
        ``[B]`` int32, prefix lengths.

    Returns
    -------
    Tensor
        ``[mask_indptr[-1]]`` bool.
    """
    starts = mask_indptr(seq_lens, words.shape[1])
    cell = torch.arange(int(starts[-1]), device=words.device)
    request = torch.searchsorted(starts[1:], cell, right=True)
    return _visible(words, seq_lens.long(), request, cell - starts[request])


def packed_indptr(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Return ``[B + 1]`` int64: where each request's bytes start in `packed_mask`."""
    cells = num_draft_tokens * (seq_lens.long() + num_draft_tokens)
    return _offsets((cells + 7) // 8)


def packed_mask(words: Tensor, seq_lens: Tensor, out: Tensor | None = None) -> Tensor:
    """Spell `full_mask` as bits, each request padded to whole bytes: FlashInfer's packed mask.

    The first cell of eight is the lowest bit. With ``out`` nothing waits for the device.

    Parameters
    ----------
    words : Tensor
        ``[B, n, W]`` int64.
    seq_lens : Tensor
        ``[B]`` int32, prefix lengths.
    out : Tensor, optional
        ``[at least packed_indptr[-1]]`` uint8; bytes past the mask become 0.

    Returns
    -------
    Tensor
        ``out``, or a new ``[packed_indptr[-1]]`` uint8.

    Raises
    ------
    ValueError
        If ``out`` is of another kind or too small. Lengths on an accelerator are not looked at:
        there it is refused if it is too small for masks without prefixes, and a mask that does not
        fit is cut.
    """
    batch, n, _ = words.shape
    starts = packed_indptr(seq_lens, n)
    if out is not None:
        on_host = seq_lens.device.type == "cpu"
        _check_packed(out, int(starts[-1]) if on_host else batch * ((n * n + 7) // 8))
        if not batch:
            return out.zero_()
    size = int(starts[-1]) if out is None else len(out)
    byte = torch.arange(size, device=words.device)
    request = torch.searchsorted(starts[1:], byte, right=True)
    used, request = request < batch, request.clamp(max=batch - 1)
    cell = (byte - starts[request])[:, None] * 8 + torch.arange(8, device=words.device)
    lens = seq_lens.long()
    inside = used[:, None] & (cell < (n * (lens + n))[request, None])
    bits = inside & _visible(words, lens, request[:, None], torch.where(inside, cell, 0))
    packed = (bits << torch.arange(8, device=words.device)).sum(1).to(torch.uint8)
    return packed if out is None else out.copy_(packed)


def _check_packed(out: Tensor, least: int) -> None:
    if out.dim() != 1 or out.dtype != torch.uint8 or len(out) < least:
        raise ValueError(
            f"out must be [at least {least}] {torch.uint8}, got {list(out.shape)} {out.dtype}"
        )


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _visible(words: Tensor, lens: Tensor, request: Tensor, cell: Tensor) -> Tensor:
    """Whether a cell of a request's rows of ``lens + n`` is visible."""
    width = lens[request] + words.shape[1]
    key = cell % width - lens[request]
    word = words[request, cell // width, key.clamp(min=0) // 64]
    return (key < 0) | ((word >> key.clamp(min=0) % 64 & 1) != 0)


def links_from_parents(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Link a tree given by its parents.

    Parameters
    ----------
    parents : Tensor
        ``[n]`` or ``[B, n]`` int64, parent of every node in any order; node 0 is the root, of
        parent -1.

    Returns
    -------
    tuple of Tensor
        ``retrieve_next_token`` and ``retrieve_next_sibling``, like ``parents``; children ascending.

    Raises
    ------
    TreeError
        Naming the first node whose parent is missing, outside the row, or below the node itself;
        if there is no root.
    """
    _check_parents(parents)
    first, sibling = child_links(parents.reshape(-1, parents.shape[-1]))
    return first.view_as(parents), sibling.view_as(parents)


def words_from_parents(parents: Tensor) -> Tensor:
    """Return the ancestor words ``[..., n, W]`` of a tree given as in `links_from_parents`."""
    _check_parents(parents)
    n = parents.shape[-1]
    words, _ = ancestors(parents.reshape(-1, n), mask_words(n), n)
    return words.reshape(*parents.shape, mask_words(n))


def validate_tree(
    next_token: Tensor,
    next_sibling: Tensor,
    words: Tensor | None = None,
    num_steps: int | None = None,
) -> None:
    """Check trees that did not come from `specattn.speculative.tree`. Waits for the device.

    Parameters
    ----------
    next_token, next_sibling : Tensor
        ``[B, n]`` int64 first-child and next-sibling links, -1 for none.
    words : Tensor, optional
        ``[B, n, W]`` int64 ancestor words that have to agree with the links.
    num_steps : int, optional
        Depth the trees have to stay within.

    Raises
    ------
    TreeError
        Naming request, node and defect: a link outside the row, a cycle, a node with two parents,
        a missing parent, too deep a node, or words that disagree. If a tensor has another shape.
    """
    shape = next_token.shape
    if len(shape) != 2 or not shape[1] or next_sibling.shape != shape:
        raise TreeError(
            "next_token and next_sibling must be [B, n] with n at least 1, "
            f"got {list(shape)} and {list(next_sibling.shape)}"
        )
    rows = zip(next_token.tolist(), next_sibling.tolist(), strict=True)
    parents = [_walk(f"request {b}", *links) for b, links in enumerate(rows)]
    table = torch.tensor(parents, dtype=torch.int64).reshape(shape)
    wanted, depth = ancestors(table, mask_words(shape[1]), shape[1])
    if num_steps is not None and (depth > num_steps).any():
        request, node = (depth > num_steps).nonzero()[0].tolist()
        raise TreeError(
            f"request {request}, node {node}: depth {int(depth[request, node])} exceeds "
            f"num_steps {num_steps}"
        )
    if words is None:
        return
    if words.shape != wanted.shape:
        raise TreeError(f"words must be {list(wanted.shape)}, got {list(words.shape)}")
    wrong = (words.cpu() != wanted).any(2)
    if wrong.any():
        request, node = wrong.nonzero()[0].tolist()
        both = torch.stack([words[request].cpu(), wanted[request]])
        mask = qlen_mask(both, keys=64 * wanted.shape[2])[:, node]
        got, want = (row.nonzero()[:, 0].tolist() for row in mask)
        raise TreeError(
            f"request {request}, node {node}: words name nodes {got}, its path is {want}"
        )


def _check_parents(parents: Tensor) -> None:
    if parents.dim() not in (1, 2) or not parents.shape[-1]:
        raise TreeError(
            f"parents must be [n] or [B, n] with n at least 1, got {list(parents.shape)}"
        )
    n = parents.shape[-1]
    for b, row in enumerate(parents.reshape(-1, n).tolist()):
        where = f"request {b}, " if parents.dim() > 1 else ""
        if row[0] != -1:
            raise TreeError(f"{where}node 0 is the root, its parent must be -1, got {row[0]}")
        for node, parent in enumerate(row[1:], 1):
            if parent == -1:
                raise TreeError(f"{where}node {node} has no parent, and only node 0 is a root")
            if not 0 <= parent < n:
                raise TreeError(f"{where}node {node}: parent {parent} is outside its row (n {n})")
        _check_acyclic(where, row)


def _check_acyclic(where: str, row: list[int]) -> None:
    rooted = {0}
    for node in range(1, len(row)):
        path = [node]
        while path[-1] not in rooted:
            path.append(row[path[-1]])
            if path[-1] in path[:-1]:
                raise TreeError(f"{where}node {node} is in or below a cycle: {path}")
        rooted.update(path)


def _walk(where: str, next_token: list[int], next_sibling: list[int]) -> list[int]:
    """Follow all links of a row from its root; return every node's parent."""
    n = len(next_token)
    for name, links in (("next_token", next_token), ("next_sibling", next_sibling)):
        for node, link in enumerate(links):
            if not -1 <= link < n:
                raise TreeError(f"{where}, node {node}: {name} {link} is outside its row (n {n})")
    if next_sibling[0] != -1:
        raise TreeError(f"{where}, node 0 is the root and has no sibling, got {next_sibling[0]}")
    parents: dict[int, int] = {0: -1}
    todo = [0]
    while todo:
        parent = todo.pop()
        child = next_token[parent]
        while child != -1:
            if child in parents:
                raise TreeError(
                    f"{where}, node {child} is reached a second time, below node {parent}: "
                    "a cycle, or a second parent"
                )
            parents[child] = parent
            todo.append(child)
            child = next_sibling[child]
    missing = sorted(set(range(n)) - parents.keys())
    if missing:
        raise TreeError(f"{where}, nodes {missing}: missing parent, no link leads to them")
    return [parents[node] for node in range(n)]
