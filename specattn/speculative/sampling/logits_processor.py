"""Logits processors of the user's own, recorded in the step's graph.

Shapes: B requests, n nodes of a tree, V tokens of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.buffers import send
from specattn.checks import expect, instance, listed
from specattn.speculative.states import StateField, alloc_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.batch import DraftTree

__all__ = ["LogitsProcessor", "NodeHistory", "OwnProcessors", "StateField"]


class LogitsProcessor(ABC):
    """A change of logits that a request may ask for by name.

    A request asks with ``SamplingParams(processors={name: params})``. Logits and states of others
    stay as they are, whatever a processor returns for them. Three rules hold:

    - `process` and `note` read no value on the host, so that a CUDA graph can record them.
    - They change nothing in place, and keep nothing but what `note` returns: an attribute would be
      recorded once, and be every request's.
    - What `process` returns for a node depends on the node's own history and its request's states.

    Attributes
    ----------
    name : str
        What requests ask for.
    """

    name: str

    def state_fields(self) -> Mapping[str, StateField]:
        """Return what it keeps per request: names, widths and dtypes."""
        return {}

    # empty on purpose: few processors need it
    def admit(  # noqa: B027
        self, states: Mapping[str, Tensor], params: Any, prompt: Sequence[int]
    ) -> None:
        """Write a request's states, before its prompt runs.

        Parameters
        ----------
        states : mapping of str to Tensor
            ``[width]`` for every field, zeros: write them in place.
        params : object
            What the request has given.
        prompt : sequence of int
            The prompt's tokens.

        Raises
        ------
        ValueError
            If ``params`` are wrong; the request is not admitted then.
        """

    @abstractmethod
    def process(self, logits: Tensor, nodes: NodeHistory, states: Mapping[str, Tensor]) -> Tensor:
        """Return other logits: no sync, capturable.

        Parameters
        ----------
        logits : Tensor
            ``[B, n, V]`` float32, of what may follow each node; -inf is impossible.
        nodes : NodeHistory
            The text before and at each node.
        states : mapping of str to Tensor
            ``[B, width]`` for every field.

        Returns
        -------
        Tensor
            ``[B, n, V]`` float32.
        """

    def note(
        self, states: Mapping[str, Tensor], tokens: Tensor, lens: Tensor
    ) -> Mapping[str, Tensor]:
        """Return states that tokens have changed: no sync, capturable.

        Parameters
        ----------
        states : mapping of str to Tensor
            ``[B, width]`` for every field.
        tokens : Tensor
            ``[B, D]`` int64, what requests have emitted.
        lens : Tensor
            ``[B]`` int32, how many of them.

        Returns
        -------
        mapping of str to Tensor
            ``[B, width]``, of fields that change.
        """
        return {}


@dataclass(frozen=True)
class NodeHistory:
    """The text of each node: its request's, then its path.

    Node 0 is the newest token that its request has emitted. Only requests that ask for a processor
    have a text here.

    Parameters
    ----------
    tokens, positions : Tensor
        ``[B, n]`` int64: the nodes, and their places in the text.
    path : Tensor
        ``[B, n, n]`` bool: which nodes lie on each node's path, itself and node 0 included.
    text : Tensor
        ``[B, C]`` int64, the request's text up to node 0; what lies behind may be anything.
    vocab_size : int
        V.
    """

    tokens: Tensor
    positions: Tensor
    path: Tensor
    text: Tensor
    vocab_size: int

    @classmethod
    def of(cls, tree: DraftTree, text: Tensor, vocab_size: int) -> NodeHistory:
        """Read a tree below texts."""
        nodes = tree.tokens.shape[1]
        bits = tree.words[..., None] >> torch.arange(64, device=text.device) & 1
        root = text.gather(1, tree.positions[:, :1].clamp(0, text.shape[1] - 1))
        tokens = torch.cat([root, tree.tokens[:, 1:]], 1)
        path = bits.flatten(2)[..., :nodes].bool()
        return cls(tokens, tree.positions, path, text, vocab_size)

    @property
    def depth(self) -> Tensor:
        """The depth of each node below node 0, ``[B, n]``."""
        return self.positions - self.positions[:, :1]

    @cached_property
    def _below(self) -> Tensor:
        """Each node's path by depth, ``[B, n, n]``; 0 past the node."""
        size = self.tokens.shape[1]
        where = self.depth[:, None].clamp(0, size - 1).expand_as(self.path)
        own = torch.where(self.path, self.tokens[:, None], 0)
        return torch.zeros_like(own).scatter_add_(2, where, own)

    def last(self, count: int) -> Tensor:
        """Return each node's last tokens, ``[B, n, count]`` int64.

        They are in the order of the text: the node itself comes last. -1 is before its begin.
        """
        back = torch.arange(1 - count, 1, device=self.text.device)
        at = self.positions[..., None] + back
        depth = self.depth[..., None] + back
        text = self.text[:, None].expand(*self.tokens.shape, -1)
        before = text.gather(2, at.clamp(0, self.text.shape[1] - 1))
        below = self._below.gather(2, depth.clamp(0, self.tokens.shape[1] - 1))
        return torch.where(at < 0, -1, torch.where(depth > 0, below, before))

    def followers(self, count: int) -> Tensor:
        """Return which tokens have come after each node's last ones.

        ``[B, n, V]`` bool. With ``count`` 0 these are all tokens of the node's text. It takes some
        16 bytes per node and token of a context.
        """
        last, (batch, nodes) = self.last(count), self.tokens.shape
        place = torch.arange(self.text.shape[1], device=self.text.device)
        found = torch.zeros(batch, nodes, self.vocab_size + 1, dtype=torch.bool, device=last.device)
        self._mark(found, last, self.text[:, None], place <= self.positions[:, :1, None])
        # windows that end below node 0
        below = torch.cat([last[:, :1].expand(-1, nodes, -1), self._below[:, :, 1:]], 2)
        depth = torch.arange(below.shape[2], device=last.device) - count + 1
        self._mark(found, last, below, (depth > 0) & (depth <= self.depth[..., None]))
        return found[..., : self.vocab_size]

    def _mark(self, found: Tensor, last: Tensor, texts: Tensor, valid: Tensor) -> None:
        """Mark what follows ``last`` in texts, where it is valid."""
        count = last.shape[2]
        kept = texts.shape[2] - count
        if kept < 1:
            return
        same = valid[..., count:].expand(*last.shape[:2], -1)
        for at in range(count):
            same = same & (texts[..., at : at + kept] == last[..., at, None])
        after = texts[..., count:].expand_as(same)
        found.scatter_(2, torch.where(same, after, self.vocab_size), True)


@dataclass(frozen=True)
class OwnProcessors:
    """Processors and their tables, a row per request.

    Parameters
    ----------
    processors : tuple of LogitsProcessor
        In the order in which they change logits.
    tables : dict of str to Tensor
        ``asked [R, P]`` bool, ``text [R, C]`` and ``length [R]`` int64, and ``[R, width]`` for
        every field of a processor, under its name and the field's.
    """

    processors: tuple[LogitsProcessor, ...]
    tables: dict[str, Tensor]

    @classmethod
    def alloc(
        cls,
        processors: Sequence[LogitsProcessor],
        rows: int,
        max_context_len: int,
        device: torch.device,
    ) -> OwnProcessors:
        """Allocate tables of zeros.

        Raises
        ------
        ValueError
            If one is no `LogitsProcessor`, or two have one name.
        """
        processors = as_processors(processors)
        names = [one.name for one in processors]
        if len(set(names)) < len(names):
            raise ValueError(f"processors must have different names, got {names}")
        if not names:
            return cls((), {})
        fields = {
            "asked": StateField(len(names), torch.bool),
            # the newest token has no slot
            "text": StateField(max_context_len + 1, torch.int64),
            "length": StateField(1, torch.int64),
        }
        for one in processors:
            fields |= {f"{one.name}.{key}": field for key, field in one.state_fields().items()}
        return cls(tuple(processors), alloc_fields(fields, rows, device))

    def admit(self, row: int, asked: Mapping[str, Any], prompt: Sequence[int]) -> None:
        """Write a request's row, whatever the one before has left.

        Raises
        ------
        ValueError
            If a name is no processor's, or a processor refuses its parameters.
        """
        check_names(asked, self.processors)
        for table in self.tables.values():
            table[row].zero_()
        if not asked:
            return
        text = self.tables["text"]
        text[row, : len(prompt)].copy_(send(torch.tensor(prompt), text.device))
        self.tables["length"][row].fill_(len(prompt))
        for at, one in enumerate(self.processors):
            if one.name in asked:
                one.admit(self._of(one, row), asked[one.name], prompt)
                self.tables["asked"][row, at].fill_(True)

    def process(self, tree: DraftTree, logits: Tensor, rows: Tensor) -> Tensor:
        """Return logits ``[B, n, V]``, changed where requests asked for that.

        Raises
        ------
        ValueError
            If a processor returns anything but logits of the same shape, dtype and device.
        """
        nodes = NodeHistory.of(tree, self.tables["text"][rows], logits.shape[2])
        asked = self.tables["asked"][rows][:, None, None]  # [B, 1, 1, P]
        for at, one in enumerate(self.processors):
            changed = one.process(logits, nodes, self._of(one, rows))
            # torch would take one node's logits for all; a recorded step is checked once
            expect(f"what {one.name!r} returns for logits", changed, *_kind_of(logits))
            logits = torch.where(asked[..., at], changed, logits)
        return logits

    def note(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Add emitted tokens to the texts, and let processors note them.

        Raises
        ------
        ValueError
            If a processor returns anything but states, of their shapes, dtypes and device.
        """
        asked, text = self.tables["asked"][rows] & (lens > 0)[:, None], self.tables["text"]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        new = asked.any(1)[:, None] & (place < lens[:, None]) & (tokens >= 0)
        at = (self.tables["length"][rows] + place).clamp(max=text.shape[1] - 1)
        # what is not new goes to a place of padding that nobody reads
        text[torch.where(new, rows[:, None], 0), torch.where(new, at, 0)] = tokens
        length = {"length": self.tables["length"][rows] + new.sum(1, keepdim=True)}
        self._write(self.tables, rows, length, asked.any(1, keepdim=True))
        for index, one in enumerate(self.processors):
            states = self._of(one, rows)
            changed = one.note(states, tokens, lens)
            _check_states(one.name, states, changed)
            tables = {key: self.tables[f"{one.name}.{key}"] for key in changed}
            self._write(tables, rows, changed, asked[:, index, None])

    def _of(self, one: LogitsProcessor, rows: Tensor | int) -> dict[str, Tensor]:
        return {key: self.tables[f"{one.name}.{key}"][rows] for key in one.state_fields()}

    @staticmethod
    def _write(
        tables: Mapping[str, Tensor], rows: Tensor, new: Mapping[str, Tensor], where: Tensor
    ) -> None:
        for name, value in new.items():
            tables[name][rows] = torch.where(where, value, tables[name][rows])


def as_processors(processors: Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Return processors as a tuple; refuse classes and functions."""
    found = tuple(listed("processors", processors, "LogitsProcessor"))
    for one in found:
        instance("every processor", one, LogitsProcessor, "a LogitsProcessor")
        instance(f"{type(one).__name__}.name", getattr(one, "name", None), str, "a text")
    return found


def _kind_of(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Return what `expect` compares."""
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _check_states(name: str, states: Mapping[str, Tensor], changed: Mapping[str, Tensor]) -> None:
    """Refuse what is no mapping of a processor's fields to their states."""
    if not isinstance(changed, Mapping) or not changed.keys() <= states.keys():
        got = sorted(changed) if isinstance(changed, Mapping) else repr(changed)
        raise ValueError(f"what {name!r} notes must be states of {sorted(states)}, got {got}")
    for key, value in changed.items():
        expect(f"what {name!r} notes of {key!r}", value, *_kind_of(states[key]))


def check_names(asked: Mapping[str, Any], processors: Sequence[LogitsProcessor]) -> None:
    """Raise a ValueError for a name that is no processor's."""
    known = [one.name for one in processors]
    if unknown := sorted(asked.keys() - set(known)):
        raise ValueError(f"processors must be among the engine's {known}, got {unknown}")
