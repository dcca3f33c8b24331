"""Tree masks in the layouts of other libraries, and trees of users.

Inside the library, visibility is ancestor words: ``[B, n, W]`` int64, bit j of row i set iff node
j is i or an ancestor of i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.checks import expect, whole_number
from specattn.errors import TreeError
from specattn.plan import mask_words, words_of

__all__ = [
    "full_mask",
    "links_from_parents",
    "mask_indptr",
    "mask_words",
    "packed_indptr",
    "packed_mask",
    "qlen_from_full",
    "qlen_mask",
    "validate_tree",
    "words_from_mask",
    "words_from_parents",
]


def qlen_mask(words: Tensor, keys: int | None = None) -> Tensor:
    """Write words as one bool per query and tail key: SGLang's ``QLEN_ONLY``.

    Parameters
    ----------
    words : Tensor
        ``[B, n, W]`` int64.
    keys : int, optional
        Tail keys, at most ``64 * W``; n if omitted.

    Returns
    -------
    Tensor
        ``[B, n, keys]`` bool.

    Raises
    ------
    ValueError
        If ``words`` have another kind, or ``keys`` another range.
    """
    _check_words(words)
    if keys is None:
        keys = words.shape[1]
    key = torch.arange(whole_number("keys", keys, 0, 64 * words.shape[2]), device=words.device)
    return (words[:, :, key // 64] >> key % 64 & 1) != 0


def words_from_mask(mask: Tensor) -> Tensor:
    """Write a bool mask as words; undoes `qlen_mask`.

    Parameters
    ----------
    mask : Tensor
        ``[B, n, keys]`` bool.

    Returns
    -------
    Tensor
        ``[B, n, ceil(keys / 64)]`` int64.

    Raises
    ------
    ValueError
        If ``mask`` has other axes or another dtype.
    """
    if mask.dim() != 3 or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be [B, n, keys] {torch.bool}, got {list(mask.shape)} {mask.dtype}"
        )
    keys = mask.shape[2]
    key = torch.arange(keys, device=mask.device)
    bits = mask.long() << key % 64  # [B, n, keys]
    words = bits.new_zeros(*mask.shape[:2], mask_words(keys))
    # distinct bits: their sum is their union, and the sign bit wraps into place
    return words.index_add_(2, key // 64, bits)


def mask_indptr(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Return where each request's cells start in `full_mask`.

    Parameters
    ----------
    seq_lens : Tensor
        ``[B]`` int32, prefix lengths.
    num_draft_tokens : int
        Nodes of each tree.

    Returns
    -------
    Tensor
        ``[B + 1]`` int64.

    Raises
    ------
    ValueError
        If ``num_draft_tokens`` is below 1, or a length on the host is negative. Lengths on an
        accelerator are not read.
    """
    return _offsets(_cells(seq_lens, num_draft_tokens))


def full_mask(words: Tensor, seq_lens: Tensor) -> Tensor:
    """Write words and prefix as flat bools: SGLang's ``FULL_MASK``, FlashInfer's custom mask.

    Request b has n rows of ``seq_lens[b] + n`` cells. The prefix comes first and is always
    visible. Waits for the device.

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

    Raises
    ------
    ValueError
        If a tensor has another kind, or a length is negative.
    """
    _check_words(words)
    _check_lens(seq_lens, len(words), wait=True)
    starts = mask_indptr(seq_lens, words.shape[1])
    cell = torch.arange(int(starts[-1]), device=words.device)
    request = torch.searchsorted(starts[1:], cell, right=True)
    return _visible(words, seq_lens.long(), request, cell - starts[request])


def qlen_from_full(mask: Tensor, seq_lens: Tensor, num_draft_tokens: int, *, out: Tensor) -> Tensor:
    """Copy the part of a `full_mask` that concerns the tree, a `qlen_mask`.

    Nothing waits for an accelerator; a few launches do it.

    Parameters
    ----------
    mask : Tensor
        `full_mask` as bool or uint8. One of ``B * n * n`` cells is a `qlen_mask` already.
    seq_lens : Tensor
        ``[B]`` int32 or int64, prefix lengths.
    num_draft_tokens : int
        n, nodes of each tree.
    out : Tensor
        ``[at least B * n * n]`` bool; what comes after is left as it is.

    Returns
    -------
    Tensor
        ``[B * n * n]``, a view of ``out``.

    Raises
    ------
    ValueError
        If ``out`` is too small, or as `mask_indptr`.
    """
    n, batch = num_draft_tokens, seq_lens.numel()
    starts = mask_indptr(seq_lens, n)[:-1]
    if out.dim() != 1 or len(out) < batch * n * n:
        raise ValueError(f"out must be [at least {batch * n * n}], got {list(out.shape)}")
    cells = out[: batch * n * n]
    if mask.numel() == len(cells):
        return cells.copy_(mask)
    lens, node = seq_lens.long(), torch.arange(n, device=mask.device)
    first = (starts + lens)[:, None] + node * (lens[:, None] + n)  # [B, n]
    return cells.copy_(mask[(first[:, :, None] + node).flatten()] != 0)


def packed_indptr(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Return where each request's bytes start in `packed_mask`.

    Parameters
    ----------
    seq_lens, num_draft_tokens
        As in `mask_indptr`.

    Returns
    -------
    Tensor
        ``[B + 1]`` int64, in bytes.

    Raises
    ------
    ValueError
        As `mask_indptr`.
    """
    return _offsets((_cells(seq_lens, num_draft_tokens) + 7) // 8)


def packed_mask(words: Tensor, seq_lens: Tensor, out: Tensor | None = None) -> Tensor:
    """Write `full_mask` as bits: FlashInfer's packed mask.

    Each request begins at a whole byte, and the first cell of eight is the lowest bit. Waits for
    the device unless ``out`` is given.

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
        If a tensor has another kind, a length is negative, or ``out`` is too small. With ``out``,
        lengths on an accelerator are not read: ``out`` must hold masks without prefixes there,
        and the end of a mask that does not fit is left out.
    """
    _check_words(words)
    batch, n, _ = words.shape
    on_host = seq_lens.device.type == "cpu"
    _check_lens(seq_lens, batch, wait=out is None)
    starts = packed_indptr(seq_lens, n)
    if out is not None:
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


def _check_words(words: Tensor) -> None:
    shape = list(words.shape)
    if words.dim() != 3 or words.dtype != torch.int64 or 64 * shape[2] < shape[1]:
        raise ValueError(
            f"words must be [B, n, at least ceil(n / 64)] {torch.int64}, got {shape} {words.dtype}"
        )


def _check_lens(seq_lens: Tensor, batch: int, *, wait: bool = False) -> None:
    """Check prefix lengths; those on an accelerator are read only if ``wait``."""
    # int64 holds them just as well
    dtype = torch.int64 if seq_lens.dtype == torch.int64 else torch.int32
    expect("seq_lens", seq_lens, (batch,), dtype, seq_lens.device)
    if (wait or seq_lens.device.type == "cpu") and (seq_lens < 0).any():
        raise ValueError(f"seq_lens must be 0 or more, got {seq_lens.tolist()}")


def _check_packed(out: Tensor, least: int) -> None:
    if out.dim() != 1 or out.dtype != torch.uint8 or len(out) < least:
        raise ValueError(
            f"out must be [at least {least}] {torch.uint8}, got {list(out.shape)} {out.dtype}"
        )


def _cells(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Return how many cells each request's mask has."""
    _check_lens(seq_lens, seq_lens.numel())
    num_draft_tokens = whole_number("num_draft_tokens", num_draft_tokens, 1)
    return num_draft_tokens * (seq_lens.long() + num_draft_tokens)


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _visible(words: Tensor, lens: Tensor, request: Tensor, cell: Tensor) -> Tensor:
    """Return which cells of the requests' masks are visible."""
    width = lens[request] + words.shape[1]
    key = cell % width - lens[request]
    word = words[request, cell // width, key.clamp(min=0) // 64]
    return (key < 0) | ((word >> key.clamp(min=0) % 64 & 1) != 0)


def links_from_parents(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the links of a tree given by its parents.

    Waits for the device.

    Parameters
    ----------
    parents : Tensor
        ``[n]`` or ``[B, n]`` int64, parent of every node in any order; node 0 is the root, of
        parent -1.

    Returns
    -------
    tuple of Tensor
        ``retrieve_next_token`` and ``retrieve_next_sibling``, like ``parents``. The children of a
        node are linked in ascending order.

    Raises
    ------
    TreeError
        If there is no root, or a node's parent is missing, outside the row, or below the node.
    """
    links = [_links(row) for row, _ in _trees(parents)]
    first, sibling = (
        torch.tensor([pair[at] for pair in links], dtype=torch.int64, device=parents.device)
        for at in range(2)
    )
    return first.view(parents.shape), sibling.view(parents.shape)


def words_from_parents(parents: Tensor) -> Tensor:
    """Return the ancestor words of a tree given by its parents.

    Waits for the device.

    Parameters
    ----------
    parents : Tensor
        As in `links_from_parents`.

    Returns
    -------
    Tensor
        ``[n, W]`` or ``[B, n, W]`` int64.

    Raises
    ------
    TreeError
        As in `links_from_parents`.
    """
    n = parents.shape[-1] if parents.dim() else 0
    words = words_of([path for _, paths in _trees(parents) for path in paths], n)
    return words.view(*parents.shape, mask_words(n)).to(parents.device)


def validate_tree(
    next_token: Tensor,
    next_sibling: Tensor,
    words: Tensor | None = None,
    num_steps: int | None = None,
) -> None:
    """Check trees that the library did not build.

    Waits for the device.

    Parameters
    ----------
    next_token, next_sibling : Tensor
        ``[B, n]`` int64 first-child and next-sibling links, -1 for none.
    words : Tensor, optional
        ``[B, n, W]`` int64 ancestor words that have to agree with the links. A node that sees
        itself alone is padding: no link has to lead to it.
    num_steps : int, optional
        Depth the trees have to stay within.

    Raises
    ------
    TreeError
        Naming request, node and defect: a link outside the row, a cycle, a node with two parents,
        a missing parent, too deep a node, or words that disagree; or a tensor of another shape.
    """
    shape = next_token.shape
    if len(shape) != 2 or not shape[1] or next_sibling.shape != shape:
        raise TreeError(
            "next_token and next_sibling must be [B, n] with n at least 1, "
            f"got {list(shape)} and {list(next_sibling.shape)}"
        )
    if next_token.is_floating_point() or next_sibling.is_floating_point():
        raise TreeError(
            f"next_token and next_sibling must be {torch.int64}, "
            f"got {next_token.dtype} and {next_sibling.dtype}"
        )
    wanted_shape = [*shape, mask_words(shape[1])]
    if words is not None and list(words.shape) != wanted_shape:
        raise TreeError(f"words must be {wanted_shape}, got {list(words.shape)}")
    rows = zip(next_token.tolist(), next_sibling.tolist(), strict=True)
    for b, links in enumerate(rows):
        padding = _padding(words[b]) if words is not None else set()
        paths = _paths(f"request {b}, ", _parents(f"request {b}", *links, padding))
        for node, path in enumerate(paths):
            depth = path.bit_count() - 1
            if num_steps is not None and depth > num_steps:
                raise TreeError(
                    f"request {b}, node {node}: depth {depth} exceeds num_steps {num_steps}"
                )
        if words is not None:
            _check_paths(b, words[b].cpu(), paths)


def _check_paths(request: int, words: Tensor, paths: list[int]) -> None:
    wrong = (words != words_of(paths, len(paths))).any(1)
    if wrong.any():
        node = int(wrong.nonzero()[0])
        named = int.from_bytes(words[node].numpy().tobytes(), "little")
        raise TreeError(
            f"request {request}, node {node}: words name nodes {_members(named)}, its path is "
            f"{_members(paths[node])}"
        )


def _members(bits: int) -> list[int]:
    return [node for node in range(bits.bit_length()) if bits >> node & 1]


def _trees(parents: Tensor) -> list[tuple[list[int], list[int]]]:
    """Return the parents of every tree and, as bits, every node's path."""
    if parents.dim() not in (1, 2) or not parents.shape[-1] or parents.is_floating_point():
        raise TreeError(
            f"parents must be [n] or [B, n] {torch.int64} with n at least 1, "
            f"got {list(parents.shape)} {parents.dtype}"
        )
    found = []
    for b, row in enumerate(parents.reshape(-1, parents.shape[-1]).tolist()):
        where = f"request {b}, " if parents.dim() > 1 else ""
        _check_parents(where, row)
        found.append((row, _paths(where, row)))
    return found


def _check_parents(where: str, row: list[int]) -> None:
    if row[0] != -1:
        raise TreeError(f"{where}node 0 is the root, its parent must be -1, got {row[0]}")
    for node, parent in enumerate(row[1:], 1):
        if parent == -1:
            raise TreeError(f"{where}node {node} has no parent, and only node 0 is a root")
        if not 0 <= parent < len(row):
            raise TreeError(
                f"{where}node {node}: parent {parent} is outside its row (n {len(row)})"
            )


def _paths(where: str, row: list[int]) -> list[int]:
    """Return every node's path as bits: the node and its ancestors."""
    paths = {-1: 0, 0: 1}
    for node in range(len(row)):
        below: list[int] = []
        at = node
        while at not in paths:
            if at in below:
                raise TreeError(f"{where}node {node} is in or below a cycle: {[*below, at]}")
            below.append(at)
            at = row[at]
        for child in reversed(below):
            paths[child] = paths[at] | 1 << child
            at = child
    return [paths[node] for node in range(len(row))]


def _links(row: list[int]) -> tuple[list[int], list[int]]:
    """Return every node's first child and next sibling, -1 for none."""
    first, sibling = [-1] * len(row), [-1] * len(row)
    newest: dict[int, int] = {}
    for node, parent in enumerate(row[1:], 1):
        if parent in newest:
            sibling[newest[parent]] = node
        else:
            first[parent] = node
        newest[parent] = node
    return first, sibling


def _padding(words: Tensor) -> set[int]:
    """Return the nodes that see themselves alone, but for the root."""
    nodes = range(len(words))
    alone = words.cpu() == words_of([1 << node for node in nodes], len(words))
    return {node for node in nodes if node and alone[node].all()}


def _parents(
    where: str, next_token: list[int], next_sibling: list[int], padding: set[int]
) -> list[int]:
    """Follow a tree's links; return every node's parent, -1 for none."""
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
    parents = dict.fromkeys(padding, -1) | parents
    missing = sorted(set(range(n)) - parents.keys())
    if missing:
        raise TreeError(f"{where}, nodes {missing}: missing parent, no link leads to them")
    return [parents[node] for node in range(n)]
