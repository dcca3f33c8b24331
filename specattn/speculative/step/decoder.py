"""Steps by table row: launch, look at or wait for them."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Self, Unpack

import torch

from specattn.batch import DraftTree, ForwardMode
from specattn.buffers import ReadOnly
from specattn.cache.slot_table import SlotTable
from specattn.checks import expect, function, instance, listed
from specattn.cuda_graph import GraphRunner
from specattn.errors import CapacityError, CaptureError, CaptureMismatch
from specattn.speculative.proposers.drafts import as_proposer
from specattn.speculative.proposers.host import HostProposer, checked_trees
from specattn.speculative.sampling.grammar import fill_bitmasks
from specattn.speculative.sampling.processors import ProcessorStates
from specattn.speculative.step.host_buffers import (
    HostBuffers,
    InFlight,
    LogprobBuffers,
    PendingStep,
)
from specattn.speculative.step.launch import StepLaunch, StepMemory
from specattn.speculative.step.level import Level, StepPart
from specattn.speculative.step.setup import CudagraphMode, StepOptions, StepSetup
from specattn.speculative.step.validation import (
    check_draft_tokens,
    check_rows,
    check_setup,
    check_tree,
    taking_part,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from specattn.cache.external import RequestTable
    from specattn.config import SpecConfig
    from specattn.cuda_graph import GraphReport
    from specattn.cuda_graph.runner import Captured
    from specattn.speculative.model import DraftModel, ModelSlot, TargetModel
    from specattn.speculative.proposers.host import HostTree
    from specattn.speculative.proposers.proposer import Proposer
    from specattn.speculative.sampling.grammar import Grammar
    from specattn.speculative.states import RequestStates
    from specattn.speculative.step.setup import StepArguments, StepKeywords
    from specattn.speculative.step.step import Step

__all__ = ["CudagraphMode", "PendingStep", "StepDecoder"]

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
# steps whose tokens may be on their way to the host
_IN_FLIGHT = 2


class StepDecoder(ReadOnly):
    """Runs whole steps of one speculative config over requests' rows.

    Nothing is handed over between steps but rows: lengths advance on the device, where the next
    proposal starts is kept there too (`RequestStates`), and a step itself writes accepted tokens to
    pinned memory of the host. A request without slots for a step (see ``SlotTable.reserved``) sits
    the step out, and row 0, which is padding, takes part in the forwards alone: a rank without
    requests, or with fewer than others, can run what they run.

    A decoder is made of its parts, as here, or `of` the setup that `StepSetup.over` puts together.

    Parameters
    ----------
    target : ModelSlot
        The target model.
    draft : ModelSlot, Proposer or None
        The draft model, or what else proposes tokens; needed unless ``config.num_steps`` is 0, and
        then kept up to date, for steps of other configs.
    config : SpecConfig
        Tree width and depth.
    table : SlotTable or ExternalTable
        Rows and slots of the requests.
    states : RequestStates
        Their states; decoders of several configs may share them.
    buckets : sequence of int
        Batch sizes to capture.
    sampled : bool
        Whether to capture steps for requests that draw, too.
    processors : ProcessorStates, optional
        What requests ask of their logits, if steps for such requests are to be captured, too;
        decoders of several configs may share them.
    or_eager : bool
        Whether steps run eagerly whose capture fails, as in `capture`.
    **options
        Those of `StepOptions`: ``cudagraph``, ``tbo``, ``accept``, ``capturing`` and others.

    Raises
    ------
    ValueError
        If an argument is of another kind, as a target in the draft's place. If drafting lacks a
        draft model, an option is none of `StepOptions`, or one graph meets a
        backend that plans on the host; if table, states and pools are not of one size and the
        config's; if the target does not give the features that the draft reads, or the draft
        proposes tokens that the target has not.
    ModelError
        If a model computes contexts as long as the table's in another way than shorter ones.
    CaptureError
        If a capture fails; see `GraphRunner.capture`. Where memory runs out, a warning is logged
        instead, and batches that no captured bucket holds run eagerly.

    Attributes
    ----------
    proposer : Proposer
        What proposes tokens; a `NoProposer` in plain decoding without a draft.
    parts : list of tuple of StepPart
        What a step consists of, in order, by level.
    draft : ModelSlot or None
        Its model, pool and attention, if it has any.
    runner : GraphRunner
        Counts replays and eager fallbacks by part.
    """

    def __init__(  # noqa: PLR0913 - a constructor
        self,
        target: ModelSlot[TargetModel],
        draft: ModelSlot[DraftModel] | Proposer | None,
        config: SpecConfig,
        table: RequestTable,
        states: RequestStates,
        *,
        buckets: Sequence[int] = (1,),
        sampled: bool = False,
        processors: ProcessorStates | None = None,
        or_eager: bool = False,
        **options: Unpack[StepKeywords],
    ) -> None:
        proposer = as_proposer(draft)
        setup = StepSetup(target, proposer, config, table, states, StepOptions(**options))
        self._begin(setup, buckets)
        self.capture(sampled=sampled, processors=processors, or_eager=or_eager)

    @classmethod
    def of(
        cls,
        setup: StepSetup,
        *,
        buckets: Sequence[int] = (1,),
        levels: Collection[Level] = (),
        processors: ProcessorStates | None = None,
        or_eager: bool = False,
    ) -> Self:
        """Return the decoder of a setup.

        Parameters
        ----------
        setup : StepSetup
            What it steps with, and its options.
        buckets, processors, or_eager
            As in the constructor.
        levels : collection of Level
            What is captured besides greedy steps, as in `capture`.

        Raises
        ------
        ValueError, ModelError, CaptureError
            As in the constructor.
        """
        instance("setup", setup, StepSetup, "a StepSetup (StepSetup.over)")
        levels = listed("levels", levels, "Level")
        made = cls.__new__(cls)
        made._begin(setup, buckets)
        made.capture(*levels, processors=processors, or_eager=or_eager)
        return made

    def _begin(self, setup: StepSetup, buckets: Sequence[int]) -> None:
        """Check a setup, and be ready to capture."""
        check_setup(setup)
        config, table, states = setup.config, setup.table, setup.states
        setup = setup.with_slots(lambda slot: slot.for_context(table.max_context_len))
        self.setup, self.options, device = setup, setup.options, setup.device
        self.target, self.proposer, self.draft = setup.target, setup.proposer, setup.proposer.slot
        self.config, self.table, self.states = config, table, states
        self.cudagraph = self.options.cudagraph
        check_draft_tokens(self.proposer, self.target.model.vocab_size, device)
        self._plans = setup.plans_on_host
        piecewise = self.cudagraph == "piecewise"
        self.parts = [StepPart.of(config, level, piecewise=piecewise) for level in Level]
        self._levels = frozenset({Level.GREEDY})
        self.runner = GraphRunner(
            self._launch_of,
            buckets,
            device,
            record=self.options.record,
            recorder=self.options.recorder,
            before=self._before_capture,
            capturing=self.options.capturing,
        )
        # of the buckets
        self._memory: StepMemory | None = None
        self._launches: dict[int, StepLaunch] = {}
        self._tensors = table.req_to_token, table.reserved
        largest = max(table.req_to_token.shape[0], *buckets)
        host = HostBuffers.alloc(_IN_FLIGHT, largest, config.num_steps + 2, device)
        self._in_flight = InFlight(host)
        # the table's rows, and the last ones that `check_rows` found to be good
        self._known = frozenset(range(len(table.req_to_token)))
        self._good: tuple[int, ...] | None = None
        self._launching = False
        self._processors: ProcessorStates | None = None

    @property
    def modes(self) -> tuple[StepPart, ...]:
        """Every part that `capture` was asked for."""
        asked = chain.from_iterable(self.parts[level] for level in sorted(self._levels))
        return tuple(dict.fromkeys(asked))

    @property
    def levels(self) -> frozenset[Level]:
        """Every level that `capture` was asked for; greedy is always among them."""
        return self._levels

    @property
    def processors(self) -> ProcessorStates | None:
        """The states that processed steps read; None without such steps."""
        return self._processors

    def capture(
        self,
        *levels: Level,
        sampled: bool = False,
        processors: ProcessorStates | None = None,
        constrained: bool = False,
        or_eager: bool = False,
    ) -> None:
        """Capture every bucket, for greedy requests and what is asked for.

        What may be asked for are steps of a `Level`: of requests that draw; of requests with
        processors, which serve all others, too; and of requests with a grammar, which run in parts,
        whatever ``cudagraph`` says. Parts of which a bucket is captured already stay as they are.
        With ``or_eager``, a capture that fails is logged, and batches that no captured bucket holds
        run eagerly.

        Parameters
        ----------
        *levels : Level
            What is captured besides greedy steps.
        sampled, constrained : bool
            The same as their levels.
        processors : ProcessorStates, optional
            What requests ask of their logits: asks for the level, too. Processed and constrained
            steps need them, now or in an earlier call.
        or_eager : bool
            Whether steps run eagerly whose capture fails.

        Raises
        ------
        ValueError
            From ``between`` the parts of a step of this decoder; if ``processors`` have rows of
            another table or another vocabulary, or are others than before, or if there are none
            and a level needs them.
        CaptureError
            If a capture fails, unless ``or_eager``.
        """
        self._check_free()
        for level in levels:
            instance("every level", level, Level, "a Level")
        if processors is not None and processors is not self._processors:
            instance("processors", processors, ProcessorStates, "ProcessorStates")
            if self._processors is not None:
                raise ValueError("processors must be those that were captured, got others")
            size, device = (len(self._known), self.target.model.vocab_size), self.setup.device
            expect("processors.history", processors.history, size, torch.int32, device)
            self._processors = processors
            steps, batch = self._in_flight.host.rows.shape
            self._in_flight.logprobs = LogprobBuffers.alloc(
                steps, batch, self.config.num_steps + 1, processors.kinds.device, pinned=True
            )
        asked = Level.each(
            sampled=sampled, processed=processors is not None, constrained=constrained
        ).union(levels)
        highest = max(asked, default=Level.GREEDY)
        if highest >= Level.PROCESSED and self._processors is None:
            raise ValueError(f"{highest.name.lower()} needs processors")
        self._levels |= asked
        missing = [part for part in self.modes if not self.runner.captured(part)]
        self.runner.compile(missing)
        for part in missing:
            try:
                self.runner.capture(part)
            except CapacityError as error:
                log.warning("%s", error)
            except CaptureError as error:
                if not or_eager:
                    raise
                log.warning("%s; batches run eagerly unless a captured bucket holds them", error)
                self.runner.leave_eager(self.modes)
                break
        self._in_flight.align()

    def report(self) -> tuple[GraphReport, ...]:
        """Return what capturing took, in the order of the captures."""
        return self.runner.reports()

    def step(self, rows: Sequence[int], **how: Unpack[StepArguments]) -> list[list[int]]:
        """Advance requests and wait: `step_async`, with its arguments, then `PendingStep.wait`."""
        return self.step_async(rows, **how).wait()

    def step_async(  # noqa: PLR0913, PLR0915 - as its docstring says
        self,
        rows: Sequence[int],
        *,
        level: Level = Level.GREEDY,
        sampled: bool = False,
        processed: bool = False,
        seq_lens_cpu: Tensor | None = None,
        between: Callable[[StepPart], object] | None = None,
        grammars: Sequence[Grammar | None] | None = None,
        trees: Sequence[HostTree] | None = None,
    ) -> PendingStep:
        """Launch a step and return at once; nothing waits for the device.

        With ``grammars``, the launch waits for the drafts, whose tree the host reads.

        Parameters
        ----------
        rows : sequence of int
            Table rows of the requests, all different, and any number of 0 for padding, which
            gains nothing. Without rows the smallest bucket runs on padding alone.
        level : Level
            The highest that one of them needs; it serves requests of lower ones, too. A request
            that needs a higher one is not noticed: one that draws is taken to be greedy in a greedy
            step, and only ``validate="debug"`` checks that.
        sampled, processed : bool
            The same as their levels.
        seq_lens_cpu : Tensor, optional
            ``[len(rows)]`` int32, the committed lengths, for backends that plan on the host.
        between : callable, optional
            With ``cudagraph="piecewise"``: called with the part that comes next, after what comes
            before it has been launched and before the part is planned; never in plain decoding,
            which has one part. What it launches on the current stream runs there, too. The rows
            of the step are its own until it has been launched as a whole: a `SlotTable` does not
            free them here; tables of others must not give them, or their slots, to anybody,
            and a decoder of another config must not step them. If it
            raises, the requests are where they were before the step.
        grammars : sequence of Grammar or None, optional
            What the texts of requests must match, one per row, None for those without; each request
            with one has been admitted to the ``processors`` with ``bitmask=True``, and its grammar
            knows the tokens of every step before. They are asked between the draft and the target,
            or before a step of plain decoding. The step is a constrained one, which needs them. If
            one raises, the requests are where they were before the step.
        trees : sequence of HostTree, optional
            What a `HostProposer` drafts, one per row, below the newest tokens of texts that the
            host has read: those of every step before. It must be given with one, but in plain
            decoding.

        Returns
        -------
        PendingStep
            `PendingStep.wait` has the new tokens.

        Raises
        ------
        ValueError
            If the step before the last one has not been waited for, or, with a backend that plans
            on the host, any of this decoder's that one of these requests takes part in; if a row is
            not the table's, or named twice (but for 0); if ``seq_lens_cpu`` is of another shape,
            dtype or device; if there is nothing to come ``between``, or it is there that the step
            is asked for; if ``grammars`` or ``trees`` are of another number, or there is no
            `HostProposer` for ``trees``; if ``level`` is no `Level`, or a constrained step has no
            ``grammars``.
        CaptureMismatch
            If the table, the states or the pools are elsewhere than when the graphs were captured.
            ``validate="debug"`` compares everything that they have baked in.
        NotCapturedError
            If steps of the level were not captured.
        TreeError
            If one of ``trees`` is malformed; nothing has run then. With ``validate="debug"``, if
            any tree is; the target has not run then.
        """
        self._check_free()
        self._check_table()
        if type(rows) is not list:
            rows = listed("rows", rows, "table rows")
        steps, asked, rows = self._in_flight, len(rows), tuple(rows)
        if between is not None:
            function("between", between)
            if self.cudagraph == "full":
                raise ValueError(
                    "nothing comes between the parts of one graph; see cudagraph='piecewise'"
                )
        if type(level) is not Level:
            instance("level", level, Level, "a Level")
        if sampled or processed:
            level = max(level, Level.PROCESSED if processed else Level.SAMPLED)
        if grammars is not None or level is Level.CONSTRAINED:
            level = Level.CONSTRAINED
            grammars = listed("grammars", grammars or (), "Grammar or None")
            if len(grammars) != asked:
                raise ValueError(f"grammars must be one per row, {asked}, got {len(grammars)}")
        trees = self._checked_trees(trees, asked)
        if not asked:
            rows, seq_lens_cpu = (0,), torch.zeros(1, dtype=torch.int32)
        rows = self._checked_rows(rows, seq_lens_cpu)
        steps.begin()
        if self._plans:
            self._check_read(rows)
        parts = self.parts[level]
        ready = self.runner.ready(parts, len(rows))
        found = None
        if self.options.validate == "debug":
            for captured in ready:
                captured.compare()
            found = taking_part(self.setup, rows, seq_lens_cpu, sampled=level > Level.GREEDY)
        steps.moved()
        for part, captured in zip(parts, ready, strict=True):
            if part is parts[0]:
                steps.write_rows(rows, captured.bucket)
                if trees is not None:
                    _launch(captured).write_trees(trees)
            elif between is not None:
                self._let_work(rows, partial(between, part))
            if grammars and part.has(ForwardMode.TARGET_VERIFY):
                self._let_work(rows, partial(self._constrain, captured, rows, grammars))
            if self._plans:
                captured.schedule(seq_lens_cpu)
            self.runner.replay(part, captured)
            if found is not None and part.mode is ForwardMode.DRAFT_DECODE:
                self._check_tree(captured, *found)
        return steps.launched(asked, rows, processed=level >= Level.PROCESSED)

    def phases(
        self,
        rows: Sequence[int],
        *,
        seq_lens_cpu: Tensor | None = None,
        trees: Sequence[HostTree] | None = None,
    ) -> Step:
        """Return the step of these rows, to run phase by phase.

        It runs eagerly, over buffers of its own. `Step.run` shows the order of the phases. Each may
        be looked at, or replaced: what it returns is what the next one takes. Run them under
        ``torch.no_grad()``, and let no other step of these rows be in flight. The last phase,
        `Step.advance`, writes the tokens to `Step.packed`. If the decoder has ``processors``, the
        step processes logits, and ``Step.processing.logprobs`` gets log-probabilities.

        Parameters
        ----------
        rows : sequence of int
            Table rows of the requests, as in `step_async`; at least one.
        seq_lens_cpu, trees : optional
            As in `step_async`.

        Raises
        ------
        ValueError
            If a row is not the table's, or named twice (but for 0), or ``seq_lens_cpu`` is of
            another shape, dtype or device; from ``between`` the parts of a step of this decoder.
            For ``trees``, as in `step_async`.
        TreeError
            If one of ``trees`` is malformed.
        """
        self._check_free()
        rows = listed("rows", rows, "table rows")
        trees = self._checked_trees(trees, len(rows))
        rows = self._checked_rows(rows, seq_lens_cpu)
        depth, device = self.config.num_steps + 1, self.setup.device
        if not rows:
            raise ValueError("rows must be at least one, got none")
        host = HostBuffers.alloc(1, len(rows), depth + 1, device)
        host.rows[0] = torch.tensor(rows)
        launch = StepMemory(self.setup, host, len(rows)).launch(len(rows))
        if self._processors is not None:
            logprobs = LogprobBuffers.alloc(1, len(rows), depth, device)
            launch = launch.with_processing(self._processors, logprobs, masked=True)
        if trees is not None:
            launch.write_trees(trees)
        (step,) = launch.steps
        step.schedule(None, seq_lens_cpu)
        return step

    def settle(self) -> None:
        """Wait for every step in flight, whoever has not."""
        self._in_flight.settle()

    def _check_tree(self, captured: Captured, at: Tensor, seq_lens: Tensor) -> None:
        """Check the tree of who takes part; waits for the device."""
        (step,) = _launch(captured).steps
        tree = DraftTree(*(value[at] for value in vars(step.tree).values()))
        check_tree(tree, seq_lens, self.config, self.target.model.vocab_size)

    def _checked_rows(self, rows: Sequence[int], seq_lens_cpu: Tensor | None) -> tuple[int, ...]:
        """Check rows, unless they are the last ones, and their lengths."""
        found = tuple(rows)
        if seq_lens_cpu is not None:
            expect("seq_lens_cpu", seq_lens_cpu, (len(found),), torch.int32, _CPU)
        if self._good != found:
            check_rows(found, self._known, self._in_flight.host.rows.shape[1])
            self._good = found
        return found

    def _checked_trees(
        self, trees: Sequence[HostTree] | None, asked: int
    ) -> Sequence[HostTree] | None:
        """Check what the host drafts; refuse a step that lacks it."""
        proposer = self.proposer if self.config.num_steps else None
        if not isinstance(proposer, HostProposer):
            if trees is not None:
                raise ValueError("trees need a decoder whose drafts are a HostProposer's")
            return None
        name = type(proposer).__name__
        if trees is None:
            if asked:
                raise ValueError(f"trees must be given with the HostProposer {name}, got None")
            trees = ()
        trees = listed(f"{name}: trees", trees, "HostTree")
        if len(trees) != asked:
            raise ValueError(f"{name}: trees must be one per request, {asked}, got {len(trees)}")
        return checked_trees(proposer, trees, self.config, self.target.model.vocab_size)

    def _constrain(
        self, captured: Captured, rows: tuple[int, ...], grammars: Sequence[Grammar | None]
    ) -> None:
        """Fill the bitmasks of requests with a grammar; waits for the trees."""
        for step, which in _launch(captured).by_step():
            fill_bitmasks(step, rows[which], grammars[which])

    def _let_work(self, rows: tuple[int, ...], work: Callable[[], object]) -> None:
        """Let others work between two parts; the rows stay the step's."""
        table, self._launching = self.table, True
        try:
            # tables that others keep have no such books
            with table.holding(rows) if isinstance(table, SlotTable) else nullcontext():
                work()
        finally:
            self._launching = False

    def _check_free(self) -> None:
        if self._launching:
            raise ValueError("a step of this decoder is being launched: nothing else may run it")

    def _check_table(self) -> None:
        """Refuse a table that has other tensors by now."""
        table, (req_to_token, reserved) = self.table, self._tensors
        if table.req_to_token is not req_to_token:
            raise CaptureMismatch("table.req_to_token", req_to_token, table.req_to_token)
        if table.reserved is not reserved:
            raise CaptureMismatch("table.reserved", reserved, table.reserved)

    def _before_capture(self) -> None:
        """Read what steps in flight gained: a capture takes their turns."""
        self.settle()
        self._in_flight.align()
        self._in_flight.moved()

    def _check_read(self, rows: tuple[int, ...]) -> None:
        """Refuse lengths that a step in flight is about to change."""
        for pending in self._in_flight.steps:
            late = {row for row in pending.rows if row}.intersection(rows)
            if late:
                raise ValueError(
                    f"a backend plans on the host, and rows {sorted(late)} take part in a step "
                    "that has not been waited for: their lengths are not known"
                )

    def _launch_of(self, part: StepPart, batch: int) -> StepLaunch:
        """Return what runs a part for a batch size, over shared buffers."""
        if batch not in self._launches:
            buckets, memory, tbo = self.runner.buckets, self._memory, self.options.tbo
            if memory is None or batch > len(memory.packed):
                memory = StepMemory(self.setup, self._in_flight.host, batch, tbo=tbo)
            # of batches beyond the buckets, which have buffers of their own, the last one's stay
            kept = {size: one for size, one in self._launches.items() if size in buckets}
            self._launches = kept | {batch: memory.launch(batch)}
            if batch == buckets[-1]:
                self._memory = memory
        launch = replace(self._launches[batch], part=part)
        if part.level is Level.PROCESSED and self._processors is not None:
            # the host cannot write between the phases of one graph, but of plain decoding before
            masked = part.mode is not None or not self.config.num_steps
            logprobs = self._in_flight.logprobs
            assert logprobs is not None
            launch = launch.with_processing(self._processors, logprobs, masked=masked)
        return launch


def _launch(captured: Captured) -> StepLaunch:
    assert isinstance(captured.program, StepLaunch)
    return captured.program
