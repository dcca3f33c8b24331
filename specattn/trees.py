"""Trees of users: their links, their ancestor words, and their defects."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.errors import TreeError
from specattn.kernels.tree.build import child_links
from specattn.plan import mask_words, words_of

__all__ = ["links_from_parents", "validate_tree", "words_from_parents"]


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
    _trees(parents)
    first, sibling = child_links(parents.reshape(-1, parents.shape[-1]))
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
    words = words_of([path for paths in _trees(parents) for path in paths], n)
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


def _trees(parents: Tensor) -> list[list[int]]:
    """Check trees; return every node's path, as bits."""
    if parents.dim() not in (1, 2) or not parents.shape[-1] or parents.is_floating_point():
        raise TreeError(
            f"parents must be [n] or [B, n] {torch.int64} with n at least 1, "
            f"got {list(parents.shape)} {parents.dtype}"
        )
    found = []
    for b, row in enumerate(parents.reshape(-1, parents.shape[-1]).tolist()):
        where = f"request {b}, " if parents.dim() > 1 else ""
        _check_parents(where, row)
        found.append(_paths(where, row))
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
