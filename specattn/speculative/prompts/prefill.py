"""Prompts: both models over them, and their first tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from specattn.autocast import without_autocast
from specattn.batch import DraftTree
from specattn.buffers import send_parts
from specattn.cache.external import ExternalTable
from specattn.cache.slot_table import SlotTable
from specattn.checks import expect, instance, whole_number
from specattn.config import SpecConfig
from specattn.plan import ExtendPlan
from specattn.speculative.prompts.prompt import Prompt, check_prompts, check_slots
from specattn.speculative.proposers.drafts import as_proposer
from specattn.speculative.proposers.proposer import PromptChunk
from specattn.speculative.sampling.params import SamplingBatch
from specattn.speculative.sampling.processors import Processing
from specattn.speculative.states import check_kept
from specattn.speculative.step.host_buffers import LogprobBuffers
from specattn.speculative.step.setup import StepSetup
from specattn.speculative.step.validation import (
    check_logits,
    check_pools,
    check_target,
)
from specattn.speculative.step.verify import accept

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from specattn.batch import AcceptResult
    from specattn.cache.external import RequestTable
    from specattn.speculative.model import DraftModel, ModelSlot, TargetModel, TargetOutput
    from specattn.speculative.proposers.proposer import Proposer
    from specattn.speculative.sampling.processors import ProcessorStates


@dataclass(frozen=True)
class PrefillResult:
    """Every prompt's first token, and where drafting starts.

    Parameters
    ----------
    bonus_tokens : Tensor
        ``[B]`` int64, in the order of the prompts.
    state : mapping of str to Tensor
        What the next step proposes from, for `RequestStates.admit`.
    logprobs : LogprobBuffers or None
        One step's, of one token per request; None without processors.
    """

    bonus_tokens: Tensor
    state: Mapping[str, Tensor]
    logprobs: LogprobBuffers | None = None


@dataclass(frozen=True)
class _Piece:
    """Tokens ``[start, stop)`` of prompt ``index``."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class _LaidOut:
    """A chunk on the device: T tokens, E ends of prompts.

    ``[T]`` int64: tokens, those that follow them, and positions. ``[E]`` int64: where prompts end
    among the tokens, which prompts they are, the tokens before their last ones, and their rows.
    """

    plan: ExtendPlan
    tokens: Tensor
    following: Tensor
    positions: Tensor
    last: Tensor
    which: Tensor
    lens: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Prefill:
    """Runs prompts, a bounded number of tokens at a time.

    Parameters
    ----------
    target : ModelSlot
        The target model.
    draft : ModelSlot, Proposer or None
        The draft model, or what else proposes tokens.
    table : RequestTable or Tensor
        Rows and slots of the requests; or ``req_to_token [rows, max_context_len]`` int32 alone.
        Prompts without slots are refused by the books of a `SlotTable`, of others on a CPU.
    config : SpecConfig
        How the first proposal is chosen.
    chunk : int
        Most tokens of one forward.

    Raises
    ------
    ValueError
        If ``chunk`` is below 1, an argument is of another kind, or a pool on another device.
    """

    target: ModelSlot[TargetModel]
    draft: ModelSlot[DraftModel] | Proposer | None
    table: RequestTable | Tensor
    config: SpecConfig
    chunk: int = 4096

    @classmethod
    def of(cls, setup: StepSetup) -> Self:
        """Return what runs the prompts of a setup's requests.

        Raises
        ------
        ValueError
            If it is no `StepSetup`.
        """
        instance("setup", setup, StepSetup, "a StepSetup (StepSetup.over)")
        return cls(setup.target, setup.proposer, setup.table, setup.config)

    def __post_init__(self) -> None:
        whole_number("chunk", self.chunk, 1)
        check_target(self.target)
        wanted = "a SlotTable, an ExternalTable or req_to_token"
        instance("table", self.table, (Tensor, SlotTable, ExternalTable), wanted)
        instance("config", self.config, SpecConfig, "a SpecConfig")
        own = self.proposer.slot
        slots = (self.target,) if own is None else (self.target, own)
        check_pools(slots, self.req_to_token.device)

    @cached_property
    def proposer(self) -> Proposer:
        """The source of draft tokens."""
        return as_proposer(self.draft)

    @property
    def req_to_token(self) -> Tensor:
        """The slots of every row, ``[rows, max_context_len]`` int32."""
        return self.table if isinstance(self.table, Tensor) else self.table.req_to_token

    @torch.no_grad()
    @without_autocast
    def run(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingBatch,
        processors: ProcessorStates | None = None,
        bitmask: Tensor | None = None,
    ) -> PrefillResult:
        """Fill the KV of both models and draw each prompt's first token.

        Parameters
        ----------
        prompts : sequence of Prompt
            At least one.
        sampling : SamplingBatch
            How each request draws, in the order of the prompts.
        processors : ProcessorStates, optional
            What requests ask of their logits; all of them are admitted to it.
        bitmask : Tensor, optional
            ``[B, 1, ceil(V / 32)]`` int32, in the order of the prompts: which first tokens are
            possible for requests with a grammar.

        Raises
        ------
        ValueError
            If there are no prompts, or one has no tokens, none that are not cached, more than a
            context holds, tokens outside the vocabulary, or a row outside the table or without
            slots; if ``sampling`` is of another number; if one is no `Prompt`. Nothing has run
            then. And if the proposer returns other states than its ``state_fields``.
        """
        self._check(prompts, self.proposer.read_ahead)
        instance("sampling", sampling, SamplingBatch, "a SamplingBatch (SamplingBatch.of)")
        device = self.req_to_token.device
        expect("sampling.temperature", sampling.temperature, (len(prompts),), torch.float32, device)
        bonus = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        states: list[Mapping[str, Tensor]] = []
        scored: list[LogprobBuffers] = []
        for pieces in self._chunks(prompts):
            laid = self._lay_out(prompts, pieces)
            out = self._forward_target(prompts, pieces, laid, laid.last)
            drawing = _pick(sampling, laid.which)
            if len(laid.which):
                masks = None if bitmask is None else bitmask[laid.which]
                drawn = first_tokens(
                    out.logits, laid.lens, drawing, laid.rows, processors, masks, scored
                )
                bonus[laid.which] = drawn
            features, proposer = out.hidden_states, self.proposer
            if features is not None or not proposer.feature_size:
                chunk = PromptChunk(
                    laid.plan,
                    self.config,
                    tuple(prompts[p.index].tokens for p in pieces),
                    tuple((p.start, p.stop) for p in pieces),
                    laid.positions,
                    features,
                    laid.last,
                    bonus[laid.which],
                    drawing,
                    laid.tokens,
                    laid.following,
                )
                states.append(self._read(proposer, chunk))
        # prompts finish in order
        return PrefillResult(bonus, _join(states), LogprobBuffers.join(scored) if scored else None)

    def _read(self, proposer: Proposer, chunk: PromptChunk) -> Mapping[str, Tensor]:
        """Let a proposer read a chunk; return its states."""
        state, known = proposer.prompt(chunk), proposer.state_fields(self.config)
        check_kept(f"what {type(proposer).__name__}.prompt returns", state, known)
        return state

    @without_autocast
    def last_logits(self, prompt: Prompt) -> Tensor:
        """Fill the target's KV of one prompt; return the last logits ``[V]``.

        Raises
        ------
        ValueError
            As `run`.
        """
        self._check([prompt], 0)
        pieces = [_Piece(0, prompt.cached, len(prompt.tokens))]
        laid = self._lay_out([prompt], pieces)
        return self._forward_target([prompt], pieces, laid, laid.last).logits[0]

    def _check(self, prompts: Sequence[Prompt], read_ahead: int) -> None:
        """Refuse prompts that cannot run, as far as the host knows."""
        check_prompts(prompts, self.req_to_token.shape, self.target.model.vocab_size)
        for prompt in prompts:
            check_slots(prompt.row, len(prompt.tokens) + read_ahead, self.table, self.config)

    def _chunks(self, prompts: Sequence[Prompt]) -> Iterator[list[_Piece]]:
        """Cut the prompts into forwards of at most ``chunk`` tokens, in order."""
        pieces: list[_Piece] = []
        room = self.chunk
        for index, prompt in enumerate(prompts):
            start = prompt.cached
            while start < len(prompt.tokens):
                stop = min(len(prompt.tokens), start + room)
                pieces.append(_Piece(index, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    yield pieces
                    pieces, room = [], self.chunk
        if pieces:
            yield pieces

    def _lay_out(self, prompts: Sequence[Prompt], pieces: Sequence[_Piece]) -> _LaidOut:
        """Bring what a chunk reads to the device, in one copy."""
        table, texts = self.req_to_token, [prompts[p.index].tokens for p in pieces]
        places = [np.arange(p.start, p.stop) for p in pieces]
        lens = [p.stop - p.start for p in pieces]
        indptr = np.cumsum([0, *lens])
        rows = [prompts[p.index].row for p in pieces]
        done = [at for at, p in enumerate(pieces) if p.stop == len(texts[at])]
        pairs = list(zip(pieces, texts, strict=True))
        following = [[*text[p.start + 1 : p.stop + 1], 0][: p.stop - p.start] for p, text in pairs]
        where = [one + row * table.shape[1] for one, row in zip(places, rows, strict=True)]
        parts = (
            [token for p, text in pairs for token in text[p.start : p.stop]],
            [token for piece in following for token in piece],
            np.concatenate(places),
            np.concatenate(where),
            rows,
            [p.start for p in pieces],
            indptr,
            indptr[1:][done] - 1,
            [pieces[at].index for at in done],
            [pieces[at].stop - 1 for at in done],
            [rows[at] for at in done],
        )
        tokens, next_ids, positions, taken, own, starts, offsets, *ends = send_parts(
            parts, table.device
        )
        plan = ExtendPlan(
            req_to_token=table,
            req_pool_indices=own,
            seq_lens=starts.to(torch.int32),
            qo_indptr=offsets.to(torch.int32),
            out_slots=torch.take(table, taken)[None],
            max_q_len=max(lens),
            max_seq_len=max(p.stop for p in pieces),
            page_size=self.config.page_size,
        )
        return _LaidOut(plan, tokens, next_ids, positions, *ends)

    def _forward_target(
        self, prompts: Sequence[Prompt], pieces: Sequence[_Piece], laid: _LaidOut, last: Tensor
    ) -> TargetOutput:
        self.target.admit([prompts[p.index].row for p in pieces if not p.start])
        attend = self.target.backend.bind_prompts(laid.plan, [p.start for p in pieces])
        model = self.target.model
        out = model.forward(laid.tokens, laid.positions, attend, last)
        check_logits(out.logits, len(last), model.vocab_size)
        return out


def first_tokens(  # noqa: PLR0913 - as its docstring says
    logits: Tensor,
    lens: Tensor,
    sampling: SamplingBatch,
    rows: Tensor,
    processors: ProcessorStates | None = None,
    bitmask: Tensor | None = None,
    scored: list[LogprobBuffers] | None = None,
) -> Tensor:
    """Draw the tokens after prompts, as a step would.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``, after each prompt.
    lens : Tensor
        ``[R]`` int64, tokens before each prompt's last one.
    sampling : SamplingBatch
        How each request draws.
    rows : Tensor
        ``[R]`` int64, the requests' rows of the table.
    processors, bitmask, scored : optional
        With processors: what requests ask of their logits, which tokens their grammars allow, and
        a list that their log-probabilities are appended to.

    Returns
    -------
    Tensor
        ``[R]`` int64; -1 where the logits are not finite, or processors leave no token.
    """
    if processors is None:
        return accept_first(roots_at(lens), logits, lens.to(torch.int32), sampling).bonus_tokens
    logprobs = LogprobBuffers.alloc(1, len(lens), 1, lens.device)
    if scored is not None:
        scored.append(logprobs)
    # there is one entry, 0
    processing = Processing(processors, rows, logprobs, lens.new_zeros(1), bitmask)
    roots, seq_lens = roots_at(lens), lens.to(torch.int32)
    return accept_first(roots, logits, seq_lens, sampling, processing).bonus_tokens


def accept_first(
    roots: DraftTree,
    logits: Tensor,
    seq_lens: Tensor,
    sampling: SamplingBatch,
    processing: Processing | None = None,
    out: AcceptResult | None = None,
) -> AcceptResult:
    """Choose the tokens after prompts, as plain decoding's step would.

    Parameters
    ----------
    roots : DraftTree
        See `roots_at`.
    logits : Tensor
        ``[R, V]``, after each prompt.
    seq_lens : Tensor
        ``[R]`` int32, tokens before each prompt's last one.
    sampling : SamplingBatch
        How each request draws.
    processing : Processing, optional
        What requests ask of their logits.
    out : AcceptResult, optional
        Tensors to write; new ones if None.
    """
    raw, plain = logits[:, None], SpecConfig(num_steps=0, num_draft_tokens=1)
    nodes = raw if processing is None else processing.process(roots, raw)
    accepted = accept(roots, nodes, seq_lens, plain, sampling, out)
    if processing is not None:
        processing.score(accepted, raw, nodes, lambda: sampling)
        processing.note(accepted)
    return accepted


def leave_nothing(
    processors: ProcessorStates, row: int, length: int, bitmask: Tensor | None = None
) -> bool:
    """Return whether no token may follow a text, whatever the target says.

    It waits for the device.

    Parameters
    ----------
    processors : ProcessorStates
        What requests ask of their logits.
    row : int
        The request's row of the table.
    length : int
        Tokens of its text, the prompt included.
    bitmask : Tensor, optional
        ``[1, ceil(V / 32)]`` int32, of a request with a grammar.
    """
    device, vocab = processors.kinds.device, processors.history.shape[1]
    logits = torch.zeros(1, 1, vocab, device=device)
    words = None if bitmask is None else bitmask.to(device)[None]
    tree, rows = (
        roots_at(torch.tensor([length - 1], device=device)),
        torch.tensor([row], device=device),
    )
    return bool((processors.process(tree, logits, rows, words) == -torch.inf).all())


def roots_at(positions: Tensor) -> DraftTree:
    """Return trees of a root each, at ``positions [R]`` int64.

    Those are a view of these, the rest says nothing of them. The history has the roots' tokens.
    """
    root = torch.zeros_like(positions)[:, None]
    none, probs = torch.full_like(root, -1), torch.empty(len(root), 0, 0, device=root.device)
    return DraftTree(root, positions[:, None], torch.ones_like(root)[:, :, None], none, none, probs)


def _pick(sampling: SamplingBatch, which: Tensor) -> SamplingBatch:
    columns: dict[str, Any] = {
        name: value[which] for name, value in vars(sampling).items() if isinstance(value, Tensor)
    }
    return replace(sampling, **columns)


def _join(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate states along the batch: prompts finish in order."""
    return {name: torch.cat([one[name] for one in states]) for name in states[0]}
