"""Grammars: which tokens may follow each node of a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from specattn.kernels.processors import bitmask_words
from specattn.speculative.sampling.processors import token_bitmask

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from specattn.speculative.step.step import Step


class Grammar(Protocol):
    """A grammar that one request's text must match, and its state."""

    def fill(self, tokens: Sequence[int], parents: Sequence[int], bitmask: Tensor) -> None:
        """Say which tokens may follow each node; change nothing else.

        Parameters
        ----------
        tokens : sequence of int
            The nodes. The first is the newest token of the text, which `accept` knows already.
        parents : sequence of int
            Each node's parent, an earlier node; -1 for the first. Nodes that the grammar does not
            allow may be among them: what their rows say does not matter, nor what those of their
            descendants do.
        bitmask : Tensor
            ``[n, ceil(V / 32)]`` int32 on the host, contiguous, all bits set: clear bit v % 32 of
            word v // 32 of a node that token v must not follow (the layout of xgrammar and
            llguidance). At least one token must be left to a node that the grammar allows.
        """

    def accept(self, tokens: Sequence[int]) -> None:
        """Note that the text goes on with these allowed tokens."""


class LateEnds:
    """A grammar whose ends wait until a text has so many tokens.

    A text to which nothing can be added but an end may end before: it is whole.

    Parameters
    ----------
    make : callable
        Makes the grammar.
    ends : collection of int
        Tokens that end a text.
    least : int
        Tokens before which they are to wait.
    vocab : int
        Tokens of the vocabulary.
    """

    def __init__(
        self, make: Callable[[], Grammar], ends: Collection[int], least: int, vocab: int
    ) -> None:
        self._grammar, self._lacking = make(), least
        # bits behind the vocabulary are no tokens that could be added
        behind = range(vocab, 32 * bitmask_words(vocab))
        self._others = ~token_bitmask({*ends, *behind}, vocab)

    def fill(self, tokens: Sequence[int], parents: Sequence[int], bitmask: Tensor) -> None:
        """Say which tokens may follow each node, as `Grammar.fill` has it."""
        self._grammar.fill(tokens, parents, bitmask)
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        early = torch.tensor([depth < self._lacking for depth in depths])
        others = bitmask & self._others
        waits = early & (others != 0).any(1)
        bitmask.copy_(torch.where(waits[:, None], others, bitmask))

    def accept(self, tokens: Sequence[int]) -> None:
        """Note that the text goes on with these tokens."""
        self._grammar.accept(tokens)
        self._lacking -= len(tokens)


def fill_bitmasks(step: Step, rows: Sequence[int], grammars: Sequence[Grammar | None]) -> None:
    """Ask grammars along a step's trees; waits for the trees.

    Comes between `Step.draft` and `Step.verify`.

    Parameters
    ----------
    step : Step
        A step of a decoder with ``processors``.
    rows : sequence of int
        The requests' rows of the table.
    grammars : sequence of Grammar or None
        One per row; those of other requests are None.

    Raises
    ------
    ValueError
        If the step has no bitmask.
    """
    bitmask = None if step.processing is None else step.processing.bitmask
    if bitmask is None:
        raise ValueError("grammars need a step of a decoder with processors, got one without")
    asked = [(at, grammar) for at, grammar in enumerate(grammars) if grammar is not None]
    if not asked:
        return
    tree, where = step.tree, torch.tensor(rows, device=bitmask.device)
    if step.config.num_steps:
        links = tree.tokens, tree.retrieve_next_token, tree.retrieve_next_sibling
        nodes, children, siblings = (one[: len(rows)].tolist() for one in links)
    else:  # of plain decoding, whose root is gathered later
        nodes = step.states.bonus_tokens[where][:, None].tolist()
        children = siblings = [[-1]] * len(rows)
    vocab = step.target.model.vocab_size
    for at, grammar in asked:
        parents = _parents(children[at], siblings[at])
        mask = bitmask_of(grammar, nodes[at], parents, vocab, pin=where.is_cuda)
        bitmask[at].copy_(mask, non_blocking=True)


def bitmask_of(
    grammar: Grammar, tokens: Sequence[int], parents: Sequence[int], vocab: int, *, pin: bool
) -> Tensor:
    """Return a grammar's bitmask ``[n, ceil(V / 32)]`` on the host."""
    mask = open_bitmask(len(tokens), vocab=vocab, pin_memory=pin)
    grammar.fill(tokens, parents, mask)
    return mask


def open_bitmask(*rows: int, vocab: int, **options: Any) -> Tensor:
    """Return a bitmask ``[*rows, ceil(V / 32)]`` that allows every token."""
    return torch.full((*rows, bitmask_words(vocab)), -1, dtype=torch.int32, **options)


def _parents(children: Sequence[int], siblings: Sequence[int]) -> list[int]:
    """Return parents from first children and next siblings; -1 is none.

    Padding, to which no link leads, hangs below the root: nothing is made of its bits.
    """
    parents = [-1] + [0] * (len(children) - 1)
    for node, child in enumerate(children):
        while child >= 0:
            parents[child] = node
            child = siblings[child]
    return parents
