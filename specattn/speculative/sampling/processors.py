"""The logits processors of requests, and what steps do for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specattn.buffers import BufferSet, buf, fingerprint, send
from specattn.kernels.logprobs import DRAWN, PROCESSED, RAW, path_logprobs
from specattn.kernels.processors import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    BITMASK,
    ENDS,
    PENALTIES,
    ProcessorColumns,
    bitmask_words,
    note_tokens,
    process_logits,
)
from specattn.kernels.sampling import target_probs
from specattn.speculative.sampling.logits_processor import OwnProcessors
from specattn.speculative.sampling.params import MAX_BAD_WORD, MAX_BAD_WORDS, MAX_BIAS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from specattn.batch import AcceptResult, DraftTree
    from specattn.buffers import Fingerprint
    from specattn.speculative.sampling.logits_processor import LogitsProcessor
    from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
    from specattn.speculative.step.host_buffers import LogprobBuffers

#: Tokens that a request may end with and that ``min_new_tokens`` makes impossible.
MAX_END_IDS = 64


def _neutral(_: int) -> Tensor:
    return torch.tensor([1.0, 0.0, 0.0])


@dataclass(frozen=True)
class ProcessorStates(BufferSet, ProcessorColumns):
    """Every request's logits processors, and the history that they read.

    ``ProcessorStates.alloc(len(states.seq_lens), vocab_size, device)`` has a row per row of
    `RequestStates`. Row 0 belongs to padding and stays neutral. A row takes ``4.125 V + 8540``
    bytes: 0.51 MiB for a vocabulary of 128 256, so that 65 rows take 33 MiB. Until a request is
    admitted to it, and after a request without processors was, a row changes nothing.

    Parameters
    ----------
    kinds, history, penalties, bias_ids, bias_values, bad_words, recent, allowed : Tensor
        As in `ProcessorColumns`.
    end_ids, ends_from : Tensor
        As in `ProcessorColumns`.
    min_p : Tensor
        ``[R]`` float32, 0 is off.
    logprobs, logprobs_of : Tensor
        ``[R]`` int32, as ``counts`` and ``sources`` in `path_logprobs`.
    own : dict of str to Tensor
        The tables of `OwnProcessors`; none without ``processors``.
    processors : tuple of LogitsProcessor
        The user's own, which come after the others.
    """

    kinds: Tensor = buf(lambda _: (), torch.int32)
    history: Tensor = buf(lambda vocab: (vocab,), torch.int32)
    penalties: Tensor = buf(lambda _: (3,), torch.float32, _neutral)
    bias_ids: Tensor = buf(lambda _: (MAX_BIAS,), torch.int32)
    bias_values: Tensor = buf(lambda _: (MAX_BIAS,), torch.float32)
    bad_words: Tensor = buf(lambda _: (MAX_BAD_WORDS, MAX_BAD_WORD), torch.int32)
    recent: Tensor = buf(lambda _: (MAX_BAD_WORD - 1,), torch.int32)
    allowed: Tensor = buf(lambda vocab: (bitmask_words(vocab),), torch.int32)
    end_ids: Tensor = buf(lambda _: (MAX_END_IDS,), torch.int32)
    ends_from: Tensor = buf(lambda _: (), torch.int32)
    min_p: Tensor = buf(lambda _: (), torch.float32)
    logprobs: Tensor = buf(lambda _: (), torch.int32, lambda _: torch.tensor(-1))
    logprobs_of: Tensor = buf(lambda _: (), torch.int32)
    own: dict[str, Tensor] = field(default_factory=dict)
    processors: tuple[LogitsProcessor, ...] = ()

    @classmethod
    def alloc(
        cls,
        batch: int,
        dims: int,
        device: torch.device,
        *,
        processors: Sequence[LogitsProcessor] = (),
        max_context_len: int = 0,
    ) -> Self:
        """Allocate ``batch`` rows of padding, for a vocabulary of ``dims``.

        Parameters
        ----------
        batch, dims : int
            R and V.
        device : torch.device
            Where the states live.
        processors : sequence of LogitsProcessor
            The user's own, in the order in which they change logits.
        max_context_len : int
            Tokens of a context; only these need it.

        Raises
        ------
        ValueError
            If two processors have one name.
        """
        own = OwnProcessors.alloc(processors, batch, max_context_len, device)
        found = super().alloc(batch, dims, device)
        return replace(found, own=own.tables, processors=own.processors)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return super().tensors() | {f"own.{name}": table for name, table in self.own.items()}

    def admit(
        self,
        row: int,
        sampling: SamplingParams,
        prompt: Sequence[int],
        *,
        min_new_tokens: int = 0,
        end_ids: Collection[int] = (),
        bitmask: bool = False,
    ) -> None:
        """Write a request's row, before its prompt runs.

        Every request has to be admitted here, those without processors too: the row may hold those
        of the request before.

        Parameters
        ----------
        row : int
            The request's row of the table, not 0.
        sampling : SamplingParams
            What it asks for.
        prompt : sequence of int
            The prompt's tokens; empty if penalties are to count the output's alone.
        min_new_tokens : int
            Tokens before which ``end_ids`` are impossible.
        end_ids : collection of int
            Different tokens, at most `MAX_END_IDS` of them if ``min_new_tokens`` is above 0.
        bitmask : bool
            Whether every step brings a bitmask for the request.

        Raises
        ------
        ValueError
            If a token of ``sampling`` or of the prompt lies outside the vocabulary. Nothing is
            written then.
        """
        vocab = self.history.shape[1]
        sampling.check_tokens(vocab)
        if prompt and not 0 <= min(prompt) <= max(prompt) < vocab:
            raise ValueError(
                f"prompt tokens must be 0..{vocab - 1}, got {min(prompt)}..{max(prompt)}"
            )
        kinds = {
            PENALTIES: sampling.penalised,
            BIAS: bool(sampling.logit_bias),
            BAD_WORDS: bool(sampling.bad_words),
            ALLOWED: sampling.allowed_tokens is not None,
            BITMASK: bitmask,
            ENDS: min_new_tokens > 0 and bool(end_ids),
        }
        # a number that is assigned comes from the host, and waits for the forward before
        self.kinds[row].fill_(sum(bit for bit, asked in kinds.items() if asked))
        self.min_p[row].fill_(sampling.min_p)
        self.logprobs[row].fill_(-1 if sampling.logprobs is None else sampling.logprobs)
        drawn = DRAWN if sampling.drawn else PROCESSED
        self.logprobs_of[row].fill_(RAW if sampling.logprobs_of == "raw" else drawn)
        self._own.admit(row, dict(sampling.processors), prompt)
        if kinds[PENALTIES]:
            self._admit_penalties(row, sampling, prompt)
        if kinds[BIAS]:
            bias = dict(sampling.logit_bias)
            self._write(self.bias_ids[row], list(bias))
            self._write(self.bias_values[row], list(bias.values()), 0)
        if kinds[BAD_WORDS]:
            self._admit_bad_words(row, sampling.bad_words, prompt)
        if sampling.allowed_tokens is not None:
            allowed = token_bitmask(sampling.allowed_tokens, vocab)
            self.allowed[row].copy_(send(allowed, self.allowed.device))
        if kinds[ENDS]:
            self._write(self.end_ids[row], sorted(end_ids))
            self.ends_from[row].fill_(len(prompt) + min_new_tokens)

    def _admit_penalties(self, row: int, sampling: SamplingParams, prompt: Sequence[int]) -> None:
        three = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        self._write(self.penalties[row], three)
        tokens = send(torch.tensor(prompt, dtype=torch.int64), self.history.device)
        self.history[row].zero_().index_fill_(0, tokens, 1)

    def _admit_bad_words(
        self, row: int, bad_words: Sequence[Sequence[int]], prompt: Sequence[int]
    ) -> None:
        words = torch.full(self.bad_words.shape[1:], -1, dtype=torch.int32)
        for at, word in enumerate(bad_words):
            words[at, -len(word) :] = torch.tensor(word)
        self.bad_words[row].copy_(send(words, self.bad_words.device))
        self._write(self.recent[row], list(prompt[::-1][: self.recent.shape[1]]), -2)

    @staticmethod
    def _write(out: Tensor, values: Sequence[float], pad: float = -1) -> None:
        """Write numbers, padded to the row's width, without waiting."""
        padding = [pad] * (len(out) - len(values))
        out.copy_(send(torch.tensor([*values, *padding], dtype=out.dtype), out.device))

    def process(
        self, tree: DraftTree, logits: Tensor, rows: Tensor, bitmask: Tensor | None = None
    ) -> Tensor:
        """Return processed logits ``[B, n, V]`` float32; see `process_logits`."""
        logits = process_logits(logits, tree, rows, bitmask, columns=self)
        return self._own.process(tree, logits, rows) if self.processors else logits

    def note(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Add emitted tokens to the history; see `note_tokens`."""
        note_tokens(rows, tokens, lens, columns=self)
        if self.processors:
            self._own.note(rows, tokens, lens)

    @property
    def _own(self) -> OwnProcessors:
        return OwnProcessors(self.processors, self.own)


@dataclass(frozen=True)
class Processing:
    """The processing that requests ask for, over static memory.

    Parameters
    ----------
    processors : ProcessorStates
        What they ask for.
    rows : Tensor
        ``[B]`` int64, their rows of the table.
    logprobs : LogprobBuffers
        Where log-probabilities go.
    entry : Tensor
        ``[1]`` int64, which entry of ``logprobs`` a step writes.
    bitmask : Tensor or None
        ``[B, n, ceil(V / 32)]`` int32: which tokens may follow each node of requests with a
        grammar; None where the host cannot write it.
    """

    processors: ProcessorStates
    rows: Tensor
    logprobs: LogprobBuffers
    entry: Tensor
    bitmask: Tensor | None = None

    def min_p(self) -> Tensor:
        """Return each request's ``[B]`` float32."""
        return self.processors.min_p[self.rows]

    def process(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """Return the logits ``[B, n, V]`` float32 that these requests draw from."""
        return self.processors.process(tree, logits, self.rows, self.bitmask)

    def score(
        self,
        accepted: AcceptResult,
        logits: Tensor,
        processed: Tensor,
        sampling: Callable[[], SamplingBatch],
    ) -> None:
        """Write the log-probabilities of accepted tokens for the host; capturable.

        Parameters
        ----------
        accepted : AcceptResult
            The tokens, and what they were drawn from.
        logits, processed : Tensor
            ``[B, n, V]``: the target's, and processed ones.
        sampling : callable
            Gives how the requests draw, if that is needed.
        """
        if accepted.probs is None:
            nodes = processed.flatten(0, 1)
            by = sampling()
            drawing = by.temperature, by.top_k, by.top_p, processed.shape[1], by.min_p
            probs = target_probs(nodes, *drawing)
            accepted = replace(accepted, probs=probs.view(processed.shape))
        path_logprobs(
            logits,
            accepted,
            self.rows,
            self.entry,
            counts=self.processors.logprobs,
            sources=self.processors.logprobs_of,
            values_out=self.logprobs.values,
            ids_out=self.logprobs.ids,
            processed=processed,
        )

    def note(self, accepted: AcceptResult) -> None:
        """Add accepted tokens to the histories."""
        self.processors.note(self.rows, accepted.accept_tokens, accepted.accept_lens)

    def fingerprint(self) -> Fingerprint:
        """Describe states, bitmask and log-probabilities."""
        logprobs = self.logprobs
        return fingerprint(
            processors=self.processors,
            bitmask=self.bitmask,
            values=logprobs.values,
            ids=logprobs.ids,
        )


def token_bitmask(tokens: Collection[int], vocab: int) -> Tensor:
    """Return the bitmask ``[ceil(V / 32)]`` int32 of tokens."""
    bits = torch.zeros(bitmask_words(vocab) * 32, dtype=torch.int64)
    bits[torch.tensor([*tokens], dtype=torch.int64)] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    # the 32nd bit is int32's sign
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
