"""Launches: a part of a chunk of prompts, over static buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from specattn.backends.base import fill_all
from specattn.buffers import fingerprint, send
from specattn.kernels.prompts import COLUMNS, begin_prompts
from specattn.kernels.step import end_step, write_output
from specattn.plan import ExtendPlan
from specattn.speculative.prompts.buffers import ChunkPieces, ChunkTokens, ChunkViews
from specattn.speculative.prompts.prefill import accept_first, roots_at
from specattn.speculative.sampling.grammar import open_bitmask
from specattn.speculative.sampling.processors import Processing
from specattn.speculative.states import check_kept
from specattn.speculative.step.level import Level
from specattn.speculative.step.validation import check_features, check_logits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from specattn.attention.bound import BoundLayers
    from specattn.buffers import Fingerprint
    from specattn.speculative.proposers.proposer import BoundPrompt, Proposer
    from specattn.speculative.sampling.processors import ProcessorStates
    from specattn.speculative.step.host_buffers import HostBuffers, LogprobBuffers
    from specattn.speculative.step.setup import StepSetup


class Phase(StrEnum):
    """A phase of a chunk; a graph records one.

    The target's forward, first tokens, and what follows them: the proposer's part and admission, or
    admission alone.
    """

    TARGET = "prompts"
    FIRST = "first tokens"
    ADMIT = "prompts' drafts"
    BARE = "prompts without drafts"


class PromptPart(NamedTuple):
    """What one graph of chunks records.

    Parameters
    ----------
    phase : Phase
        The phase.
    level : Level
        What requests may need of their first tokens.
    """

    phase: Phase
    level: Level = Level.GREEDY

    @property
    def value(self) -> str:
        """Its name in messages and reports."""
        name = self.phase.value
        return f"{name} ({self.level.name.lower()})" if self.level else name


TARGET, ADMIT, BARE = (PromptPart(one) for one in (Phase.TARGET, Phase.ADMIT, Phase.BARE))


def of_prompts(part: str) -> bool:
    """Return whether a report names a part of chunks, not steps."""
    return part.startswith(tuple(phase.value for phase in Phase))


class PromptMemory:
    """Memory of chunks, which launches of up to ``size`` places share.

    Parameters
    ----------
    setup : StepSetup
        Models, table and states.
    host : HostBuffers
        Where chunks find what the host says, ``rows [S, 10 most + places]``, and write first
        tokens.
    size, count : int
        Places and pieces.
    longest : int
        The longest prompt, up to where a chunk ends it.
    resting : Proposer, optional
        What reads chunks while a draft rests, see `Proposer.at_rest`.
    """

    def __init__(
        self,
        setup: StepSetup,
        host: HostBuffers,
        size: int,
        count: int,
        longest: int,
        resting: Proposer | None = None,
    ) -> None:
        self.resting = resting
        self.setup, self.host, self.longest, self.count = setup, host, longest, count
        device = setup.device
        self.tokens = ChunkTokens.alloc(size, None, device)
        self.pieces = ChunkPieces.alloc(count, None, device)
        self.qo_indptr = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.packed = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self.roots = roots_at(torch.zeros(count, dtype=torch.int64, device=device))
        # of every piece, its tokens and then the place behind them, which is row 0's
        self.states: tuple[Tensor, Tensor] | None = None
        if not setup.target.shares_prefixes and setup.proposer.read_ahead:
            rows = torch.zeros(2 * count, dtype=torch.int64, device=device)
            self.states = rows, torch.zeros(2 * count + 1, dtype=torch.int32, device=device)
        # what the target leaves for later parts
        self._kept: dict[str, Tensor] = {}

    @cached_property
    def bitmask(self) -> Tensor:
        """The first tokens that grammars allow, at first all."""
        vocab = self.setup.target.model.vocab_size
        return open_bitmask(len(self.pieces.rows), 1, vocab=vocab, device=self.packed.device)

    def keep(self, name: str, found: Tensor) -> None:
        """Copy what is found into static memory; the most rows come first."""
        if name not in self._kept:
            self._kept[name] = torch.empty_like(found, memory_format=torch.contiguous_format)
        self._kept[name][: len(found)].copy_(found)

    def kept(self, name: str, rows: int) -> Tensor | None:
        """Return what was kept by this name, if anything."""
        return self._kept[name][:rows] if name in self._kept else None

    def write_bitmask(self, masks: Sequence[Tensor | None]) -> None:
        """Write which first tokens grammars allow, None for all; nobody waits."""
        rows = torch.full((len(masks), self.bitmask.shape[-1]), -1, dtype=torch.int32)
        for row, mask in zip(rows, masks, strict=True):
            if mask is not None:
                row.copy_(mask)
        self.bitmask[: len(rows), 0] = send(rows, self.bitmask.device)

    def views(self, size: int) -> ChunkViews:
        """Return a chunk of so many places, at most ``size``."""
        setup, tokens, pieces = self.setup, self.tokens.bind(size), self.pieces
        plan = ExtendPlan(
            req_to_token=setup.table.req_to_token,
            req_pool_indices=pieces.rows,
            seq_lens=pieces.seq_lens,
            qo_indptr=self.qo_indptr,
            out_slots=tokens.slots[None],
            max_q_len=min(size, self.longest),
            max_seq_len=self.longest,
            page_size=setup.config.page_size,
            states=self.states,
        )
        return ChunkViews(setup.config, setup.table, setup.states, tokens, pieces, plan)

    def leave_places_behind(self) -> None:
        """Keep the places behind prompts from layers with states."""
        if self.states is None:
            return
        (rows, offsets), pieces, starts = self.states, self.pieces, self.qo_indptr
        rows[::2] = pieces.rows
        offsets[::2] = starts
        read = torch.where(starts[1:] > starts[:-1], pieces.last + 1, starts[:-1])
        offsets[1::2] = read.to(torch.int32)

    def launch(self, size: int) -> PromptLaunch:
        """Return the launch of so many places; the most come first."""
        chunk = self.views(size)
        bound = self.setup.proposer.bind_prompt(chunk)
        resting = None if self.resting is None else self.resting.bind_prompt(chunk)
        assert bound is not None
        attend = self.setup.target.backend.bind(chunk.plan)
        return PromptLaunch(TARGET, self, chunk, attend, bound, resting)


@dataclass(frozen=True)
class PromptLaunch:
    """A part of a chunk of T places and P pieces."""

    part: PromptPart
    memory: PromptMemory
    chunk: ChunkViews
    attend: BoundLayers
    bound: BoundPrompt
    resting: BoundPrompt | None = None
    processing: Processing | None = None

    def of(self, part: PromptPart) -> PromptLaunch:
        """Return another part of the chunk."""
        if part.phase is not Phase.BARE:
            return replace(self, part=part)
        assert self.resting is not None
        return replace(self, part=part, bound=self.resting)

    def with_processing(
        self, processors: ProcessorStates, logprobs: LogprobBuffers
    ) -> PromptLaunch:
        """Return the launch for requests with processors, over the same buffers."""
        memory, rows = self.memory, self.chunk.pieces.ended
        entry = memory.host.entry
        return replace(
            self, processing=Processing(processors, rows, logprobs, entry, memory.bitmask)
        )

    @property
    def graphs(self) -> bool:
        """Whether the attention of the part may be recorded."""
        attends = {Phase.TARGET: (self.attend,), Phase.FIRST: ()}
        return all(one.graphs for one in attends.get(self.part.phase, self.bound.attending))

    def pad(self) -> None:
        """Turn all pieces into padding, whichever part runs."""
        self.memory.host.rows.zero_()
        self.begin()

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Do nothing: chunks are planned on the device."""

    def run(self) -> None:
        """Run the part: no sync, capturable."""
        if self.part.phase is Phase.TARGET:
            self.begin()
            self.forward()
        elif self.part.phase is Phase.FIRST:
            self.choose()
        else:
            self.admit()

    def begin(self) -> None:
        """Lay out what all forwards read, from the host's memory."""
        memory, chunk = self.memory, self.chunk
        rows, count = memory.host.rows, len(chunk.pieces.rows)
        # the tokens lie behind room for the most pieces
        first = COLUMNS * len(memory.host.packed[0])
        begin_prompts(
            rows[:, : COLUMNS * count].unflatten(1, (count, COLUMNS)),
            rows[:, first : first + len(chunk.tokens.tokens)],
            memory.host.entry,
            chunk.table.req_to_token,
            pieces_out=chunk.pieces.start(memory.qo_indptr),
            tokens_out=chunk.tokens.start,
        )
        memory.leave_places_behind()

    def forward(self) -> None:
        """Run the target; keep the logits after every piece, and the features."""
        memory, tokens, pieces = self.memory, self.chunk.tokens, self.chunk.pieces
        target, proposer = memory.setup.target.model, memory.setup.proposer
        memory.setup.target.begin(pieces.rows, pieces.seq_lens)
        fill_all([self.attend])
        out = target.forward(tokens.tokens, tokens.positions, self.attend, pieces.last)
        check_logits(out.logits, len(pieces.last), target.vocab_size)
        memory.keep("logits", out.logits)
        if out.hidden_states is not None and proposer.feature_size:
            check_features(out.hidden_states.shape[-1], proposer.feature_size)
            memory.keep("features", out.hidden_states)

    def choose(self) -> None:
        """Choose the first tokens; those of pieces that end nothing are nobody's."""
        pieces = self.chunk.pieces
        min_p = None if self.processing is None else self.processing.min_p()
        sampling = pieces.sampling(sampled=self.part.level > Level.GREEDY, min_p=min_p)
        logits = self.memory.kept("logits", len(pieces.last))
        assert logits is not None
        roots, out = self.memory.roots, pieces.accepted
        if self.processing is not None:  # nobody else asks where a root is
            roots.positions[:, 0] = pieces.before
        accept_first(roots, logits, pieces.before, sampling, self.processing, out)

    def admit(self) -> None:
        """Let the proposer read the chunk, and requests begin whose prompts end."""
        memory, chunk, states = self.memory, self.chunk, self.chunk.states
        pieces = chunk.pieces
        state: Mapping[str, Tensor] = {}
        features = memory.kept("features", len(chunk.tokens.tokens))
        if features is not None or not memory.setup.proposer.feature_size:
            fill_all(self.bound.attending)
            state = self.bound.read(features)
            name = f"what {type(self.bound).__name__}.read returns"
            check_kept(name, state, states.drafting)
        copies = [(new, states.drafting[name]) for name, new in state.items()]
        names = "temperature", "top_k", "top_p", "seeds"
        copies += [(getattr(pieces, name), getattr(states, name)) for name in names]
        if offsets := states.position_offsets.shape[1]:
            none = pieces.seeds.new_zeros(len(pieces.seeds), offsets)
            copies.append((none, states.position_offsets))
        end_step(
            pieces.ended,
            pieces.before,
            pieces.accepted,
            seq_lens_table=states.seq_lens,
            bonus_table=states.bonus_tokens,
            copies=copies,
            packed_out=memory.packed,
        )
        write_output(memory.packed, memory.host.packed, memory.host.entry)

    def holders(self) -> tuple[Iterable[object], ...]:
        """Return what holds the tensors of states, table and pools.

        The target's part names what all parts read: it comes first in each chunk.
        """
        setup, first = self.memory.setup, self.part.phase is Phase.TARGET
        own = () if self.processing is None else (self.processing.processors,)
        states = [vars(one) for one in ((setup.states, *own) if first else own)]
        states += [value for one in states for value in one.values() if isinstance(value, dict)]
        if not first:
            return tuple(one.values() for one in states)
        caches = [cache for slot in setup.slots for cache in slot.tensors().values()]
        return (
            *(one.values() for one in states),
            (setup.table.req_to_token,),
            *((one,) if isinstance(one, torch.Tensor) else one for one in caches),
        )

    def fingerprint(self) -> Fingerprint:
        """Describe buffers, table, states, pools and config of the chunk."""
        memory, chunk = self.memory, self.chunk
        host = {f"host.{name}": tensor for name, tensor in vars(memory.host).items()}
        found = fingerprint(
            part=self.part,
            packed=memory.packed,
            config=chunk.config,
            req_to_token=chunk.table.req_to_token,
            states=chunk.states,
            tokens=chunk.tokens,
            pieces=chunk.pieces,
            qo_indptr=memory.qo_indptr,
            piece_states=memory.states,
            **host,
        )
        if self.processing is not None:
            found += self.processing.fingerprint()
        for attention in (self.attend, *self.bound.attending):
            found += attention.fingerprint()
        return found
