"""The logits processors' part of the conformance kit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.batch import DraftTree
from specattn.speculative.sampling.logits_processor import NodeHistory, OwnProcessors
from specattn.testing.kit import Check
from specattn.testing.no_reads import NoReads
from specattn.testing.oracle import require
from specattn.trees import words_from_parents

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specattn.speculative.sampling.logits_processor import LogitsProcessor

#: Error that the order of sums may cause in float32.
TOLERANCE = 2e-5
# a chain of three and what branches from it: each node's parent and depth
_PARENTS, _DEPTHS = (-1, 0, 1, 2, 0, 1, 4), (0, 1, 2, 3, 1, 2, 2)
_CONTEXT = 32
_TRIALS = 8


def processor_conformance(
    processor: LogitsProcessor,
    params: Sequence[Any] = (None,),
    *,
    vocab_size: int = 61,
    tokens: Sequence[int] = (3, 4, 5),
    device: torch.device | str = "cpu",
) -> Iterator[Check]:
    """Yield a check per rule.

    Parameters
    ----------
    processor : LogitsProcessor
        What is tested.
    params : sequence
        What requests give it; they take turns.
    vocab_size : int
        Tokens of the vocabulary.
    tokens : sequence of int
        What texts are made of: few tokens, so that they repeat, and those that ``params`` name.
    device : torch.device or str
        Where it runs.
    """
    rules = {
        "effect": ("changes something", _effect),
        "host": ("host reads", _host_reads),
        "in_place": ("inputs unchanged", _in_place),
        "path": ("each node's own history", _path),
        "batch": ("states of its own", _batch),
        "lens": ("tokens past the emitted", _lens),
    }
    world = _World(processor, tuple(params), vocab_size, tuple(tokens), torch.device(device))
    for rule, (broken, body) in rules.items():
        yield Check(rule, broken, processor.name, partial(_run, body, world), role="processor")


def _run(body: Any, world: _World) -> None:
    for _ in range(_TRIALS):
        body(world)


@dataclass(frozen=True)
class _World:
    """Requests that ask for one processor, without models."""

    processor: LogitsProcessor
    params: tuple[Any, ...]
    vocab: int
    alphabet: tuple[int, ...]
    device: torch.device

    def text(self, *shape: int) -> Tensor:
        """Return random tokens of the alphabet."""
        at = torch.randint(len(self.alphabet), shape)
        return torch.tensor(self.alphabet)[at].to(self.device)

    def logits(self, batch: int) -> Tensor:
        return torch.randn(batch, len(_PARENTS), self.vocab).to(self.device)

    def admitted(self, prompts: Tensor) -> OwnProcessors:
        """Return requests in rows from 1 on, which asked in turn."""
        own = OwnProcessors.alloc([self.processor], len(prompts) + 1, _CONTEXT, device=self.device)
        for at, prompt in enumerate(prompts.tolist()):
            asked = self.params[at % len(self.params)]
            own.admit(at + 1, {self.processor.name: asked}, prompt)
        return own

    def emit(self, own: OwnProcessors, tokens: Tensor, lens: Sequence[int] = ()) -> None:
        """Note ``tokens [B, D]`` of the first rows; ``lens`` count."""
        rows = torch.arange(1, len(tokens) + 1, device=self.device)
        gained = torch.tensor(lens or [tokens.shape[1]] * len(tokens), dtype=torch.int32)
        own.note(rows, tokens, gained.to(self.device))

    def tree(self, own: OwnProcessors, tokens: Tensor, rows: Tensor) -> DraftTree:
        """Return trees of ``tokens [B, n]`` below the texts of rows."""
        size, nodes = tokens.shape
        words = words_from_parents(torch.tensor(_PARENTS[:nodes]).expand(size, -1))
        depth = torch.tensor(_DEPTHS[:nodes], device=self.device)
        positions = own.tables["length"][rows] - 1 + depth
        none, probs = torch.full_like(tokens, -1), torch.empty(size, 0, 0, device=self.device)
        return DraftTree(tokens, positions, words.to(self.device), none, none, probs)

    def process(self, own: OwnProcessors, tokens: Tensor, logits: Tensor, *rows: int) -> Tensor:
        """Return the logits of nodes below the texts of rows."""
        where = torch.tensor(rows, device=self.device)
        return own.process(self.tree(own, tokens, where), logits.clone(), where)


def _effect(world: _World) -> None:
    """Some node's logits are others; else no other rule says anything."""
    changed, count = False, len(world.params)
    for _ in range(_TRIALS):
        own, logits = world.admitted(world.text(count, 6)), world.logits(count)
        world.emit(own, world.text(count, 3))
        nodes = world.text(count, len(_PARENTS))
        found = world.process(own, nodes, logits, *range(1, count + 1))
        changed |= not torch.equal(found, logits)
    require(changed, "no logit changed: give other tokens")


def _host_reads(world: _World) -> None:
    """Neither call reads a value on the host."""
    own, nodes, logits = world.admitted(world.text(2, 6)), world.text(2, 7), world.logits(2)
    world.emit(own, world.text(2, 1))
    rows = torch.arange(1, 3, device=world.device)
    tree, lens = world.tree(own, nodes, rows), torch.ones_like(rows)
    with NoReads():
        own.process(tree, logits, rows)
        own.note(rows, nodes, lens)


def _in_place(world: _World) -> None:
    """What is given stays as it was, other requests' logits too."""
    one, own = world.processor, world.admitted(world.text(2, 6))
    rows, nodes, logits = torch.arange(1, 3, device=world.device), world.text(2, 7), world.logits(2)
    states = {key: own.tables[f"{one.name}.{key}"][rows] for key in one.state_fields()}
    history = NodeHistory.of(
        world.tree(own, nodes, rows), own.tables["text"][rows], logits.shape[2]
    )
    lens = torch.ones_like(rows)
    given = [logits, nodes, history.tokens, history.text, history.positions, lens, *states.values()]
    before = [tensor.clone() for tensor in given]
    one.process(logits, history, states)
    one.note(states, nodes, lens)
    same = all(map(torch.equal, given, before))
    require(same, "logits, texts or states changed in place")


def _path(world: _World) -> None:
    """A node's logits are those after its path was emitted."""
    prompts, root, nodes = world.text(1, 6), world.text(1, 1), world.text(1, len(_PARENTS))
    nodes[:, :1], logits = root, world.logits(1)
    own = world.admitted(prompts)
    world.emit(own, root)
    found = world.process(own, nodes, logits, 1)
    for node in range(len(_PARENTS)):
        path, at = [node], node
        while (at := _PARENTS[at]) >= 0:
            path.insert(0, at)
        own = world.admitted(prompts)
        world.emit(own, nodes[:, path])
        want = world.process(own, nodes[:, node, None], logits[:, node, None], 1)
        _compare(want, found[:, node, None])


def _batch(world: _World) -> None:
    """A request's logits depend on no other, of now or before."""
    count = max(3, len(world.params))
    prompts, emitted = world.text(count, 6), world.text(count, 2)
    nodes, logits = world.text(count, len(_PARENTS)), world.logits(count)
    own = world.admitted(prompts)
    world.emit(own, emitted)
    found = world.process(own, nodes, logits, *range(1, count + 1))
    for at in range(count):
        alone = OwnProcessors.alloc([world.processor], 2, _CONTEXT, world.device)
        # whoever had the row before
        for asked, prompt in ((at + 1, prompts.flip(1)[at]), (at, prompts[at])):
            given = {world.processor.name: world.params[asked % len(world.params)]}
            alone.admit(1, given, prompt.tolist())
            world.emit(alone, emitted[at, None])
        want = world.process(alone, nodes[at, None], logits[at, None], 1)
        _compare(want, found[at, None])


def _lens(world: _World) -> None:
    """Tokens past those that were emitted are none."""
    prompts, tokens, nodes = world.text(2, 6), world.text(2, 4), world.text(2, len(_PARENTS))
    logits, found = world.logits(2), []
    for past in (world.text(2, 4), world.text(2, 4)):
        own = world.admitted(prompts)
        past[0, :1], past[1, :3] = tokens[0, :1], tokens[1, :3]
        world.emit(own, past, [1, 3])
        found.append(world.process(own, nodes, logits, 1, 2))
    _compare(*found)


def _compare(want: Tensor, got: Tensor) -> None:
    require(torch.allclose(want, got, rtol=TOLERANCE, atol=TOLERANCE), "logits differ")
