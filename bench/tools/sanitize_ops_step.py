"""One speculative step's tensors, as the sanitizer's operations find them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch import Tensor

from specattn.batch import AcceptResult, Candidates, DraftTree
from specattn.kernels import tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import ModuleType

# heads and width of a KV row, layers of a target, committed tokens at most, table width
HEADS, DIM, LAYERS, CONTEXT, WIDTH = 8, 128, 32, 2048, 8192
VOCAB = 32000


@dataclass(frozen=True)
class Op:
    """One operation on one batch.

    Parameters
    ----------
    module : str
        The package under ``specattn.kernels``.
    run : callable
        Runs it with the functions of the package; the number picks a set of slots.
    sets : int
        How many sets of slots there are.
    """

    module: str
    run: Callable[[ModuleType, int], None]
    sets: int = 1


@dataclass
class Step:
    """The tensors of one speculative step, as every stage would find them."""

    batch: int
    topk: int
    steps: int
    nodes: int
    device: str
    context: int = CONTEXT
    vocab: int = VOCAB
    layers: int = LAYERS
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        batch, topk, steps = self.batch, self.topk, self.steps
        generator = torch.Generator(self.device).manual_seed(0)
        self.generator = generator
        self.lens = self.ints(self.context, batch, low=self.context // 2).int()
        self.rows = torch.randperm(batch, device=self.device, generator=generator)
        self.table = self.ints(2**24, batch, max(WIDTH, self.context)).int()
        self.count = topk + (steps - 1) * topk**2
        self.scores = torch.rand(batch, self.count, device=self.device, generator=generator)
        self.candidate_tokens = self.ints(self.vocab, batch, self.count)
        # every beam of a step continues a candidate of the step before
        parents = [torch.full((batch, 1), -1, device=self.device)]
        for step in range(steps - 1):
            start = 0 if step == 0 else topk + (step - 1) * topk**2
            width = topk if step == 0 else topk**2
            order = torch.rand(batch, width, device=self.device, generator=generator).argsort(1)
            parents.append(start + order[:, :topk])
        self.parents = torch.cat(parents, 1)
        # deep trees: a child scores a little less than its parent
        for step in range(1, steps):
            first = topk + (step - 1) * topk**2
            above = self.scores.gather(1, self.parents[:, 1 + (step - 1) * topk : 1 + step * topk])
            fade = 1 - 0.3 * torch.rand(batch, topk, topk, device=self.device, generator=generator)
            self.scores[:, first : first + topk**2] = (above[:, :, None] * fade).flatten(1)
        self.bonus = self.ints(self.vocab, batch)
        self.tree = self.new_tree()
        self.accepted = AcceptResult(
            self.empty(batch, steps + 1).int(),
            self.empty(batch, steps + 1),
            self.empty(batch).int(),
            self.empty(batch),
        )
        with by_torch():
            self.build(tree)
        self.argmax = self.deepest()

    def ints(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def empty(self, *shape: int) -> Tensor:
        return torch.full(shape, -77, device=self.device)

    def new_tree(self) -> DraftTree:
        tokens, positions, index, first, sibling = self.empty(5, self.batch, self.nodes)
        words = self.empty(self.batch, self.nodes, -(-self.nodes // 64))
        none = self.scores.new_empty(self.batch, 0, 0)
        return DraftTree(tokens, positions, words, index, first, sibling, none)

    @property
    def candidates(self) -> Candidates:
        none = self.scores.new_empty(self.batch, 0, 0)
        return Candidates(self.scores, self.candidate_tokens, self.parents, none)

    def build(self, ops: ModuleType) -> None:
        ops.build_tree(self.candidates, self.bonus, self.lens, topk=self.topk, out=self.tree)

    def follow(self, ops: ModuleType) -> None:
        ops.accept_greedy(self.tree, self.argmax, out=self.accepted)

    def deepest(self) -> Tensor:
        """A target that follows the last child everywhere: the longest walk there is."""
        node = torch.arange(self.nodes, device=self.device)
        shift = torch.arange(64, device=self.device)
        bits = self.tree.words[..., None] >> shift  # [B, n, W, 64]
        above = (bits & 1).flatten(2)[:, :, : self.nodes].bool()
        above &= node != node[:, None]
        parent = torch.where(above, node, -1).amax(2)  # [B, n]
        choice = self.ints(self.vocab, self.batch, self.nodes)
        for child in range(1, self.nodes):
            choice.scatter_(1, parent[:, child : child + 1], self.tree.tokens[:, child : child + 1])
        return choice


def by_torch() -> AbstractContextManager[object]:
    """Run the operations of ``specattn.kernels`` by torch."""
    return mock.patch("specattn.kernels.uses_triton", return_value=False)
