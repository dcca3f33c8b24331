"""transformers' logits processors as this library's own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import (
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specattn.speculative.sampling.logits_processor import LogitsProcessor, NodeHistory, StateField
from specattn.speculative.sampling.processors import token_bitmask

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from specattn.speculative.sampling.grammar import Grammar

    Allowed = Callable[[int, Tensor], Collection[int]]


@dataclass(frozen=True)
class NoRepeatNgram(LogitsProcessor):
    """No sequence of ``size`` tokens comes twice in a text."""

    size: int
    name: str = "no_repeat_ngram_size"

    def process(self, logits: Tensor, nodes: NodeHistory, states: Mapping[str, Tensor]) -> Tensor:
        """Make impossible what would complete one."""
        return logits.masked_fill(nodes.followers(self.size - 1), -torch.inf)


@dataclass(frozen=True)
class SequenceBias(LogitsProcessor):
    """Adds numbers to logits of tokens that complete sequences.

    Requests give pairs of a sequence and its number: ``count`` of them, of at most ``width``
    tokens.
    """

    count: int
    width: int
    name: str = "sequence_bias"

    def state_fields(self) -> dict[str, StateField]:
        """Return sequences, -1 for any token before them, and their numbers."""
        return {
            "sequences": StateField(self.count * self.width, torch.int64),
            "bias": StateField(self.count, torch.float32),
        }

    def admit(self, states: Mapping[str, Tensor], params: Any, prompt: Sequence[int]) -> None:
        """Write the sequences."""
        rows = [[-1] * (self.width - len(tokens)) + [*tokens] for tokens, _ in params]
        states["sequences"].copy_(torch.tensor(rows).flatten())
        states["bias"].copy_(torch.tensor([bias for _, bias in params]))

    def process(self, logits: Tensor, nodes: NodeHistory, states: Mapping[str, Tensor]) -> Tensor:
        """Add the numbers of all sequences that a token would complete."""
        sequences = states["sequences"].unflatten(1, (1, self.count, self.width))  # [B, 1, S, M]
        before = nodes.last(self.width - 1)[:, :, None]  # [B, n, 1, M - 1]
        prefix = sequences[..., :-1]
        complete = ((prefix == -1) | (prefix == before)).all(3)  # [B, n, S]
        bias = torch.where(complete, states["bias"][:, None], 0.0)
        return logits.scatter_add(2, sequences[..., -1].expand_as(complete), bias)


@dataclass(frozen=True)
class Suppress(LogitsProcessor):
    """Makes ``count`` tokens impossible: everywhere, or as one token of the output.

    Requests give the tokens and None, or how many tokens come before that one.
    """

    count: int
    name: str

    def state_fields(self) -> dict[str, StateField]:
        """Return the tokens, and the position before the one; -1 is all."""
        fields = {"tokens": self.count, "at": 1}
        return {name: StateField(width, torch.int64) for name, width in fields.items()}

    def admit(self, states: Mapping[str, Tensor], params: Any, prompt: Sequence[int]) -> None:
        """Write the tokens, and where."""
        tokens, after = params
        states["tokens"].copy_(torch.tensor(tokens))
        states["at"].fill_(-1 if after is None else len(prompt) - 1 + after)

    def process(self, logits: Tensor, nodes: NodeHistory, states: Mapping[str, Tensor]) -> Tensor:
        """Make them impossible."""
        here = (states["at"] == -1) | (states["at"] == nodes.positions)  # [B, n]
        tokens = states["tokens"][:, None].expand(*here.shape, -1)
        kept = torch.where(here[..., None], -torch.inf, logits.gather(2, tokens))
        return logits.scatter(2, tokens, kept)


def own_processors(
    processors: Sequence[Any], prompt_len: int, vocab_size: int
) -> dict[LogitsProcessor, Any]:
    """Return the processors of a call, and what requests give them.

    Parameters
    ----------
    processors : sequence of LogitsProcessor
        Those of the call; others of transformers than the four of this module are left out.
    prompt_len : int
        Tokens of a row, its padding included.
    vocab_size : int
        V; tokens beyond are never written.
    """
    own: dict[LogitsProcessor, Any] = {}
    for one in processors:
        if type(one) is NoRepeatNGramLogitsProcessor:
            own[NoRepeatNgram(one.ngram_size)] = None
        elif type(one) is SequenceBiasLogitsProcessor:
            pairs = tuple(one.sequence_bias.items())
            own[SequenceBias(len(pairs), max(len(tokens) for tokens, _ in pairs))] = pairs
        elif type(one) in (SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor):
            begin = type(one) is SuppressTokensAtBeginLogitsProcessor
            name = "begin_suppress_tokens" if begin else "suppress_tokens"
            given = {*getattr(one, name).tolist()}
            if tokens := sorted(token for token in given if token in range(vocab_size)):
                after = one.begin_index - prompt_len if begin else None
                own[Suppress(len(tokens), name)] = tokens, after
        elif isinstance(one, LogitsProcessor):
            own[one] = None
    return own


def grammars_of(
    processors: Sequence[Any], rows: Tensor, ends: Collection[int]
) -> list[Callable[[], Grammar] | None]:
    """Return what makes each row's grammar, None without a ``prefix_allowed_tokens_fn``."""
    for one in processors:
        if type(one) is PrefixConstrainedLogitsProcessor:
            allowed, beams = one._prefix_allowed_tokens_fn, one._num_beams
            return [
                partial(PrefixGrammar, partial(allowed, at // beams), row, ends)
                for at, row in enumerate(rows)
            ]
    return [None] * len(rows)


class PrefixGrammar:
    """The texts of which a function allows every token.

    Parameters
    ----------
    allowed : callable
        Maps a text, ``[L]`` int64, to the tokens that may follow.
    text : Tensor
        ``[L]`` int64, the prompt and its padding.
    ends : collection of int
        Tokens that end a text: nobody asks what follows them.
    """

    def __init__(
        self, allowed: Callable[[Tensor], Collection[int]], text: Tensor, ends: Collection[int]
    ) -> None:
        self._allowed, self._text, self._ends = allowed, text, ends

    def fill(self, tokens: Sequence[int], parents: Sequence[int], bitmask: Tensor) -> None:
        """Ask along the tree, at the nodes that the function itself allows."""
        texts: dict[int, Tensor] = {}
        known: dict[int, set[int]] = {}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent < 0:
                texts[node] = self._text
            elif token in known.get(parent, ()) and token not in self._ends:
                texts[node] = torch.cat([texts[parent], self._text.new_tensor([token])])
            else:
                continue
            known[node] = set(torch.as_tensor(self._allowed(texts[node])).tolist())
            if parent < 0 and not known[node]:
                raise ValueError(f"prefix_allowed_tokens_fn allows no token after {token}")
            # a draft that leads nowhere may be refused; else it ends the call
            bitmask[node] = token_bitmask(known[node], 32 * bitmask.shape[1])

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on with these tokens."""
        self._text = torch.cat([self._text, self._text.new_tensor(tokens)])
