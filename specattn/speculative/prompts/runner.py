"""Prompts by chunk: launch, look at or wait for them."""

from __future__ import annotations

import logging
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from specattn.checks import listed, whole_number
from specattn.cuda_graph import GraphRunner
from specattn.cuda_graph.runner import Captured
from specattn.errors import CapacityError, CaptureError
from specattn.kernels.fused.stream import MAX_GATED_ROWS
from specattn.kernels.prompts import COLUMNS
from specattn.speculative.prompts.launch import (
    ADMIT,
    BARE,
    TARGET,
    Phase,
    PromptLaunch,
    PromptMemory,
    PromptPart,
)
from specattn.speculative.prompts.prompt import check_prompts, check_slots
from specattn.speculative.proposers.proposer import binds_prompts
from specattn.speculative.step.host_buffers import HostBuffers, InFlight, LogprobBuffers
from specattn.speculative.step.level import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from specattn.cuda_graph import GraphReport
    from specattn.speculative.prompts.prompt import Prompt
    from specattn.speculative.proposers.proposer import Proposer
    from specattn.speculative.sampling.params import SamplingParams
    from specattn.speculative.sampling.processors import ProcessorStates
    from specattn.speculative.step.host_buffers import PendingStep, TokenLogprobs
    from specattn.speculative.step.setup import StepSetup

log = logging.getLogger(__name__)

#: Places of captured chunks, unless others are asked for. On an H200 the products of a layer take
#: an eighth less for 160 than for 192.
BUCKETS = (32, 64, 128, 160, 192, 256, 384, 512)
#: Pieces of a captured chunk, and of any.
PIECES, MOST_PIECES = 8, 64
# chunks whose first tokens may be on their way to the host
_IN_FLIGHT = 16
# arithmetic takes longer than launches from so many times the largest bucket on
_LARGE = 4


@dataclass(frozen=True)
class NewPrompt:
    """A prompt to run, and how its request draws.

    Parameters
    ----------
    prompt : Prompt
        Its row, tokens and cached prefix.
    sampling : SamplingParams
        How the request draws.
    level : Level
        What its first token needs.
    bitmask : Tensor, optional
        ``[ceil(V / 32)]`` int32 on the host, of a request with a grammar: its first tokens.
    drafts : bool
        Whether the proposer reads it; a chunk without any such prompt leaves the proposer out.
    """

    prompt: Prompt
    sampling: SamplingParams
    level: Level = Level.GREEDY
    bitmask: Tensor | None = None
    drafts: bool = True


class KnownTokens(NamedTuple):
    """The first tokens of prompts that were waited for.

    Parameters
    ----------
    tokens : list of int
        A token per prompt.
    scored : LogprobBuffers or None
        Their log-probabilities on the host.
    """

    tokens: list[int]
    scored: LogprobBuffers | None

    def wait(self) -> list[list[int]]:
        """Return them, see `PendingStep.wait`."""
        return [[token] for token in self.tokens]

    def logprobs(self, at: int, count: int) -> list[TokenLogprobs]:
        """Return those of one prompt, see `PendingStep.logprobs`."""
        assert self.scored is not None
        return self.scored.read(at, 1, count)


class FirstToken(NamedTuple):
    """Where a prompt's first token comes.

    Parameters
    ----------
    pending : PendingStep or KnownTokens
        The chunk that the prompt ends in.
    at : int
        Which of its pieces.
    """

    pending: PendingStep | KnownTokens
    at: int

    def wait(self) -> int:
        """Wait for it.

        It is -1 if the logits were not finite, or processors leave no token.
        """
        (token,) = self.pending.wait()[self.at]
        return token

    def logprobs(self, count: int) -> list[TokenLogprobs]:
        """Return its log-probabilities; see `PendingStep.logprobs`."""
        return self.pending.logprobs(self.at, count)


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a prompt; ``ahead`` more places follow."""

    prompt: int
    start: int
    stop: int
    ahead: int

    @property
    def places(self) -> int:
        """How many places it takes."""
        return self.stop - self.start + self.ahead


@dataclass
class PromptWave:
    """Prompts on their way, chunk by chunk.

    Parameters
    ----------
    prompts : sequence of NewPrompt
        The prompts.
    left : deque of Piece
        What has not been launched.
    firsts : dict of int to FirstToken
        Of prompts that were launched to their ends, by their places.
    launched : int
        How many chunks of them were.
    """

    prompts: Sequence[NewPrompt]
    left: deque[Piece]
    firsts: dict[int, FirstToken] = field(default_factory=dict)
    launched: int = 0


class PromptRunner:
    """Runs prompts by chunks, whose first tokens nobody has to wait for.

    A chunk of up to as many places as the largest bucket is a replay of graphs, of the smallest
    bucket that holds it; others run eagerly, through the same code, and so do all whose capture
    fails, which is logged. Whatever they need of the host lies in pinned memory, which their first
    kernel reads.

    Parameters
    ----------
    setup : StepSetup
        What it runs prompts with; see `PromptRunner.of`.
    buckets : sequence of int
        Places of chunks to capture; none runs all chunks eagerly.
    chunk : int
        Most places of a chunk.
    resting : Proposer, optional
        What reads chunks that leave the proposer out, see `Proposer.at_rest`: such are captured,
        too.

    Raises
    ------
    ValueError
        If a bucket or ``chunk`` is below 2.

    Attributes
    ----------
    waits : bool
        False, see `specattn.engine.prompts.Prompts`.
    proposer : Proposer
        The source of draft tokens.
    targets, firsts : GraphRunner
        Count replays and eager runs of targets and proposers, and of first tokens.
    """

    waits = False

    def __init__(
        self,
        setup: StepSetup,
        *,
        buckets: Sequence[int],
        chunk: int = 4096,
        resting: Proposer | None = None,
    ) -> None:
        self.setup, device, options = setup, setup.device, setup.options
        self.proposer = setup.proposer
        # a prompt's end may need two places
        self.chunk = whole_number("prompt_chunk", chunk, 2)
        wanted = listed("prompt_buckets", buckets, "token counts")
        for one in wanted:
            whole_number("every one of prompt_buckets", one, 2)
        self.buckets = sorted({min(one, chunk) for one in wanted})
        self._resting = resting
        self._admits = (ADMIT,) if resting is None else (ADMIT, BARE)
        self._longest = setup.table.max_context_len
        # with room for pieces that are padding
        self._most = max(min(len(setup.table.req_to_token) - 1, MOST_PIECES), PIECES)
        host = HostBuffers.alloc(_IN_FLIGHT, self._most, 2, device)
        width = COLUMNS * self._most + self.chunk
        pin = device.type == "cuda"
        numbers = torch.zeros(_IN_FLIGHT, width, dtype=torch.int64, pin_memory=pin)
        self._in_flight = InFlight(HostBuffers(numbers, host.packed, host.entry))
        # numpy takes several times as long to look at a list's numbers
        self._numbers = [entry.numpy().data.cast("B") for entry in numbers]
        self._processors: ProcessorStates | None = None
        self._memory: PromptMemory | None = None
        self._launches: dict[int, PromptLaunch] = {}
        self._tried: set[PromptPart] = set()
        # places of captured chunks
        self._largest = 0

        def runner(
            make: Callable[[PromptPart, int], PromptLaunch], sizes: Sequence[int]
        ) -> GraphRunner[PromptPart]:
            return GraphRunner(
                make,
                sizes,
                device,
                record=options.record,
                recorder=options.recorder,
                before=self._before_capture,
                capturing=options.capturing,
                # so few rows have products of their own
                probes=[one for one in sizes if one <= MAX_GATED_ROWS],
            )

        # without buckets nothing is captured
        self.targets = runner(self._launch_of, self.buckets or [2])
        self.firsts = runner(self._first_of, [PIECES])
        self.capture(or_eager=True)

    @classmethod
    def of(
        cls,
        setup: StepSetup,
        *,
        buckets: Sequence[int] | None = None,
        chunk: int = 4096,
        resting: Proposer | None = None,
    ) -> Self | None:
        """Return what runs a setup's prompts, if that needs no host.

        It does where a backend plans on the host, or a proposer has no `Proposer.bind_prompt`: then
        `Prefill` runs them.

        Parameters
        ----------
        setup : StepSetup
            What it runs prompts with.
        buckets : sequence of int, optional
            As above; by default `BUCKETS` where graphs are recorded, up to the first that holds a
            context, else none.
        chunk, resting
            As above.

        Raises
        ------
        ValueError
            As above.
        """
        if setup.plans_on_host or not binds_prompts(setup.proposer):
            return None
        host = HostBuffers.alloc(1, 1, 2, setup.device)
        chunk_of_one = PromptMemory(setup, host, 1, 1, 1).views(1)
        # a proposer in front of another one knows when it is bound
        if setup.proposer.bind_prompt(chunk_of_one) is None:
            return None
        if buckets is None:
            attend = setup.target.backend.bind(chunk_of_one.plan)
            recorded = setup.options.record and setup.device.type == "cuda" and attend.graphs
            # up to the first that holds a whole context
            most = sum(size < setup.table.max_context_len for size in BUCKETS) + 1
            buckets = BUCKETS[:most] if recorded else ()
        return cls(setup, buckets=buckets, chunk=chunk, resting=resting)

    def capture(
        self, *levels: Level, processors: ProcessorStates | None = None, or_eager: bool = False
    ) -> None:
        """Capture every bucket, for greedy requests and those of ``levels``.

        Parameters
        ----------
        *levels : Level
            What first tokens need besides, see `StepDecoder.capture`.
        processors : ProcessorStates, optional
            What requests ask of their logits.
        or_eager : bool
            Whether chunks run eagerly whose capture fails.

        Raises
        ------
        CaptureError
            If a capture fails, unless ``or_eager``.
        """
        if processors is not None and self._processors is None:
            self._processors = processors
            steps = len(self._in_flight.host.packed)
            self._in_flight.logprobs = LogprobBuffers.alloc(
                steps, self._most, 1, self.setup.device, pinned=True
            )
        # every admission asks
        if not self.buckets or (not levels and self._tried):
            return
        asked = {min(level, Level.PROCESSED) for level in (Level.GREEDY, *levels)}
        firsts = [PromptPart(Phase.FIRST, level) for level in sorted(asked)]
        if self._tried.issuperset(firsts):
            return
        try:
            _capture(self.targets, [TARGET, *self._admits], self._tried, or_eager=or_eager)
        finally:
            self._largest = self._most_captured()
        # they read what the target has left
        if self.targets.captured(TARGET):
            _capture(self.firsts, firsts, self._tried, or_eager=or_eager)
        self._in_flight.align()

    def report(self) -> tuple[GraphReport, ...]:
        """Return what capturing took, in the order of the captures."""
        return self.targets.reports() + self.firsts.reports()

    def settle(self) -> None:
        """Wait for every chunk in flight, whoever has not."""
        self._in_flight.settle()

    def run(self, prompts: Sequence[NewPrompt]) -> list[FirstToken]:
        """Launch prompts in chunks, and return at once.

        What their requests leave for steps is there when the chunks have run: a step that is
        launched later finds it.

        Parameters
        ----------
        prompts : sequence of NewPrompt
            At least one. Requests with processors have been admitted to these.

        Returns
        -------
        list of FirstToken
            One per prompt.

        Raises
        ------
        ValueError
            As from `Prefill.run`; nothing has run then.
        """
        self._check(prompts)
        wave = self.begin(prompts)
        while wave.left:
            self.launch(wave)
        return [wave.firsts[at] for at in range(len(prompts))]

    def begin(self, prompts: Sequence[NewPrompt]) -> PromptWave:
        """Return prompts that `launch` takes chunk by chunk; they have been checked."""
        ahead, longest = self.proposer.read_ahead, self._longest
        pieces = (
            Piece(at, one.cached, len(one.tokens), min(ahead, longest - len(one.tokens)))
            for at, one in enumerate(new.prompt for new in prompts)
        )
        return PromptWave(prompts, deque(pieces))

    def launch(self, wave: PromptWave) -> None:
        """Launch the next chunk of what is left."""
        size, count, largest = self.chunk, self._most, self._largest
        places = sum(piece.places for piece in wave.left)
        # where much is lacking arithmetic rules, of which a large chunk takes less
        if largest and (places < _LARGE * largest or size <= largest):
            size, count = largest, PIECES
        pieces = _cut(wave.left, size, count)
        pending = self._launch(wave.prompts, pieces)
        wave.launched += 1
        for at, piece in enumerate(pieces):
            if piece.stop == len(wave.prompts[piece.prompt].prompt.tokens):
                wave.firsts[piece.prompt] = FirstToken(pending, at)

    def _check(self, prompts: Sequence[NewPrompt]) -> None:
        """Refuse prompts that cannot run."""
        setup, texts = self.setup, [one.prompt for one in prompts]
        check_prompts(texts, setup.table.req_to_token.shape, setup.target.model.vocab_size)
        for one in prompts:
            length = len(one.prompt.tokens) + setup.proposer.read_ahead
            check_slots(one.prompt.row, length, setup.table, setup.config)
            if one.sampling.lacks_seed:
                raise ValueError("seed must be given to parameters that draw, got None")

    def _launch(self, prompts: Sequence[NewPrompt], pieces: Sequence[Piece]) -> PendingStep:
        """Launch a chunk."""
        steps, size = self._in_flight, sum(piece.places for piece in pieces)
        own = [prompts[piece.prompt] for piece in pieces]
        ended = [
            one
            for one, piece in zip(own, pieces, strict=True)
            if piece.stop == len(one.prompt.tokens)
        ]
        level = max((one.level for one in ended), default=Level.GREEDY)
        first = PromptPart(Phase.FIRST, min(level, Level.PROCESSED))
        steps.make_room()
        steps.begin()
        last = ADMIT if any(one.drafts for one in own) else BARE
        target, admit, choose = self._ready(last, first, size, len(pieces))
        launch = target.program
        assert isinstance(launch, PromptLaunch)
        for one, piece in zip(own, pieces, strict=True):
            if piece.start and piece.start == one.prompt.cached:
                launch.bound.cached(one.prompt.row, one.prompt.tokens[: piece.start])
        self._write(steps.next_entry, own, pieces, launch.memory.count)
        if level is Level.CONSTRAINED:
            launch.memory.write_bitmask([one.bitmask for one in own])
        steps.moved()
        self.targets.replay(TARGET, target)
        self.firsts.replay(first, choose)
        self.targets.replay(last, admit)
        rows = tuple(one.prompt.row for one in own)
        return steps.launched(len(pieces), rows, processed=level >= Level.PROCESSED)

    def _ready(
        self, last: PromptPart, first: PromptPart, size: int, count: int
    ) -> tuple[Captured, ...]:
        """Return what serves a chunk: graphs, or parts that run eagerly."""
        if count <= PIECES and size <= self._largest and self.firsts.captured(first):
            return *self.targets.ready((TARGET, last), size), *self.firsts.ready((first,), PIECES)
        memory = self._memory_for(size, count)
        launch = memory.launch(size)
        return tuple(Captured(size, self._for_part(launch, part)) for part in (TARGET, last, first))

    def _most_captured(self) -> int:
        """Return the most places that all parts have captured; 0 without any."""
        parts = map(self.targets.captured, (TARGET, *self._admits))
        return max(set.intersection(*map(set, parts)), default=0)

    def _write(
        self, entry: int, own: Sequence[NewPrompt], pieces: Sequence[Piece], count: int
    ) -> None:
        """Write what the host says of a chunk of ``count`` pieces."""
        begin = 0
        columns: list[int] = []
        tokens: list[int] = []
        for one, piece in zip(own, pieces, strict=True):
            text, ends = one.prompt.tokens, piece.stop == len(one.prompt.tokens)
            following = -1 if ends else text[piece.stop]
            place = one.prompt.row, piece.start, begin, piece.places, piece.ahead, following
            columns += *place, *_drawing(one.sampling)
            tokens += text[piece.start : piece.stop]
            tokens += [0] * piece.ahead
            begin += piece.places
        columns += [0, 0, begin, *[0] * (COLUMNS - 3)] * (count - len(pieces))
        # the tokens lie behind room for the most pieces
        for at, numbers in ((0, columns), (COLUMNS * self._most, tokens)):
            struct.pack_into(f"{len(numbers)}q", self._numbers[entry], 8 * at, *numbers)

    def _before_capture(self) -> None:
        """Read what chunks in flight gained: a capture takes their turns."""
        self.settle()
        self._in_flight.align()
        self._in_flight.moved()

    def _launch_of(self, part: PromptPart, size: int) -> PromptLaunch:
        """Return what runs a part of so many places, over shared buffers."""
        if self._memory is None:
            largest = self.buckets[-1]
            self._memory = self._memory_for(largest, PIECES)
        if size not in self._launches:
            self._launches[size] = self._memory.launch(size)
        return self._for_part(self._launches[size], part)

    def _memory_for(self, size: int, count: int) -> PromptMemory:
        host = self._in_flight.host
        return PromptMemory(self.setup, host, size, count, self._longest, self._resting)

    def _first_of(self, part: PromptPart, _: int) -> PromptLaunch:
        return self._launch_of(part, self.buckets[-1])

    def _for_part(self, launch: PromptLaunch, part: PromptPart) -> PromptLaunch:
        launch = launch.of(part)
        if part.level is not Level.PROCESSED:
            return launch
        logprobs = self._in_flight.logprobs
        assert self._processors is not None
        assert logprobs is not None
        return launch.with_processing(self._processors, logprobs)


def _capture(
    runner: GraphRunner[PromptPart],
    parts: Sequence[PromptPart],
    tried: set[PromptPart],
    *,
    or_eager: bool,
) -> None:
    """Capture what was not ``tried``; see `StepDecoder.capture`."""
    missing = [part for part in parts if part not in tried]
    tried.update(missing)
    runner.compile(missing)
    for part in missing:
        try:
            runner.capture(part)
        except CapacityError as error:
            log.warning("%s", error)
        except CaptureError as error:
            if not or_eager:
                raise
            log.warning("%s; prompts run eagerly unless a captured bucket holds them", error)
            break


def _drawing(params: SamplingParams) -> tuple[int, int, int, int]:
    """Return how a request draws, as `begin_prompts` takes it."""
    temperature, top_p = struct.unpack("2i", struct.pack("2f", params.temperature, params.top_p))
    return params.seed or 0, params.top_k or 0, temperature, top_p


def _cut(left: deque[Piece], size: int, count: int) -> list[Piece]:
    """Take a chunk of so many places and pieces at most."""
    pieces: list[Piece] = []
    while left and size and len(pieces) < count:
        piece = left.popleft()
        if piece.places > size:
            # the place behind a prompt stays with the prompt's last token
            stop = piece.start + min(size, piece.stop - piece.start - 1)
            left.appendleft(piece._replace(start=stop))
            if stop == piece.start:
                break
            piece = Piece(piece.prompt, piece.start, stop, 0)
        pieces.append(piece)
        size -= piece.places
    return pieces
