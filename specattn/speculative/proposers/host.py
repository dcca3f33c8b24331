"""Drafts that the host looks up: in suffix trees, datastores, other processes.

A step's tree hangs below tokens that the host has read, so it is made before the step is launched.
One copy brings the nodes to the device, and the step links them there (`link_tree`): it stays one
graph. In return the host cannot launch a step before it has read the last one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from specattn.batch import ForwardMode, Linked
from specattn.checks import whole_numbers
from specattn.errors import TreeError
from specattn.speculative.proposers.proposer import BoundProposer, Proposer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.config import SpecConfig
    from specattn.speculative.step.buffers import StepViews


class HostTree(NamedTuple):
    """A tree of tokens that may follow a text.

    Parameters
    ----------
    tokens : sequence of int
        A node's token each. Without any, the request gains one token in the step.
    parents : sequence of int, optional
        Each node's parent, an earlier node; -1 for what follows the text itself. By default every
        node follows the one before it.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None


class HostRequest(Protocol):
    """A request, as a `HostProposer` sees it.

    It is the same object in every step, and compares by identity: it may be a key, of a
    ``WeakKeyDictionary``, too.
    """

    @property
    def tokens(self) -> Sequence[int]:
        """Its text so far, prompt first.

        The same list grows from step to step; it is not to be changed.
        """

    @property
    def prompt_len(self) -> int:
        """The number of these that are the prompt's."""

    @property
    def ended(self) -> bool:
        """Whether it has ended: ``tokens`` stays as it is."""


class HostProposer(Proposer):
    """A proposer that works on the host: `draft` is all it needs.

    `Engine` takes one as its draft, and asks it before every step. In a loop of one's own, what it
    returns is ``trees`` of `StepDecoder.step_async`.
    """

    @abstractmethod
    def draft(self, requests: Sequence[HostRequest], config: SpecConfig) -> Sequence[HostTree]:
        """Propose a tree for every request.

        What it raises ends the step before anything was launched for these requests. Of the ranks
        of a sharded target, the first one's proposes for all.

        Parameters
        ----------
        requests : sequence of HostRequest
            Those that take part in the next step. A request that ended since the last call is not
            among them, nor is one that sits the step out.
        config : SpecConfig
            The step's: a tree has at most ``num_draft_tokens - 1`` nodes and is at most
            ``num_steps`` deep. With ``topk`` 1 and ``tree="beam"``, it is a chain.

        Returns
        -------
        sequence of HostTree
            One per request, in their order.
        """

    def check(self, config: SpecConfig) -> None:
        """Refuse drafts that are to be drawn."""
        if config.draft_sampling:
            raise ValueError(
                "draft_sampling must be off with a HostProposer: its trees have no distribution"
            )

    def bind(self, step: StepViews) -> BoundHostTrees:
        """Return the nodes of so many requests."""
        return BoundHostTrees(self, step)


class BoundHostTrees(BoundProposer):
    """The nodes that the host has proposed, on the device."""

    def __init__(self, proposer: HostProposer, step: StepViews) -> None:
        super().__init__(proposer, step)
        # each request's tokens, then their parents, [B, 2, n]
        self._nodes = step.buffer("nodes", _no_nodes(1, step.config)[0])

    def write(self, trees: Sequence[HostTree]) -> None:
        """Copy trees to the device, before the step and in its stream.

        Parameters
        ----------
        trees : sequence of HostTree
            Of the first requests, from `checked_trees`; the others get none.
        """
        pin = self._nodes.is_cuda
        pinned = _no_nodes(len(self._nodes), self.step.config, pin_memory=pin)
        for (tokens, parents), tree in zip(pinned.numpy(), trees, strict=False):
            nodes = slice(1, len(tree.tokens) + 1)
            tokens[nodes], parents[nodes] = tree
            parents[nodes] += 1
        self._nodes.copy_(pinned, non_blocking=True)

    def propose(self) -> Linked:
        """Put the roots above what was proposed."""
        tokens, parents = self._nodes.unbind(1)
        tokens[:, 0] = self.step.buffers.roots
        return Linked(tokens, parents)


def _no_nodes(batch: int, config: SpecConfig, **options: Any) -> Tensor:
    """Return nodes without a tree, ``[batch, 2, n]`` int64."""
    nodes = torch.zeros(batch, 2, config.num_draft_tokens, dtype=torch.int64, **options)
    nodes[:, 1] = -1
    return nodes


def checked_trees(
    proposer: Proposer, trees: Sequence[HostTree], config: SpecConfig, vocab_size: int
) -> list[HostTree]:
    """Return trees as lists of int, all with parents.

    Raises
    ------
    TreeError
        If a tree is no tree of the config, or holds a token outside the vocabulary; the message
        names proposer, request and entry.
    ValueError
        If one is no `HostTree`, or holds something else than whole numbers.
    """
    most, found = config.num_draft_tokens - 1, []
    chain = config.layout(ForwardMode.TARGET_VERIFY).causal
    for at, tree in enumerate(trees):
        where = f"{type(proposer).__name__}, request {at}:"
        if not isinstance(tree, HostTree):
            raise ValueError(f"{where} a draft must be a HostTree, got {type(tree).__name__}")
        whole_numbers(f"{where} every token", tree.tokens)
        given = tree.parents
        if given is None:
            given = range(-1, len(tree.tokens) - 1)
        whole_numbers(f"{where} every parent", given)
        tokens, parents = list(map(int, tree.tokens)), list(map(int, given))
        if len(tokens) > most:
            raise TreeError(f"{where} tokens must be at most {most}, got {len(tokens)}")
        if len(parents) != len(tokens):
            raise TreeError(
                f"{where} parents must be one per token, {len(tokens)}, got {len(parents)}"
            )
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            node = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
            raise TreeError(
                f"{where} tokens[{node}] must be 0..{vocab_size - 1}, got {tokens[node]}"
            )
        _check_parents(where, parents, config.num_steps, chain=chain)
        found.append(HostTree(tokens, parents))
    return found


def _check_parents(where: str, parents: Sequence[int], num_steps: int, *, chain: bool) -> None:
    """Refuse what is no tree, no ``chain``, or too deep."""
    # the root's comes last, where -1 finds it
    depths = [0] * (len(parents) + 1)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node or (chain and parent != node - 1):
            wanted = node - 1 if chain else f"-1..{node - 1}"
            raise TreeError(f"{where} parents[{node}] must be {wanted}, got {parent}")
        depths[node] = depths[parent] + 1
    if (deepest := max(depths)) > num_steps:
        raise TreeError(
            f"{where} tokens[{depths.index(deepest)}] must be at most {num_steps} deep, "
            f"got {deepest}"
        )
