"""Steps by table row: what they need is on the device, what they gained comes back when asked."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Literal

import torch

from specattn.batch import DraftTree
from specattn.cache.slot_table import SlotTable
from specattn.cuda_graph import GraphRunner, Program, check_lens
from specattn.cuda_graph.capture_guard import Glance, Settable
from specattn.errors import CapacityError, CaptureMismatch
from specattn.speculative.host_buffers import HostBuffers, InFlight, PendingStep
from specattn.speculative.rehearsal import Aside
from specattn.speculative.step_parts import StepPart
from specattn.speculative.step_program import StepProgram
from specattn.speculative.tbo_step import TboStepProgram
from specattn.speculative.validation import (
    check_rows,
    check_tables,
    check_tree,
    feature_width,
    taking_part,
)
from specattn.speculative.verify import accept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from specattn.backends.multi_step import Indices
    from specattn.cache.slot_table import RequestTable
    from specattn.config import SpecConfig
    from specattn.cuda_graph import GraphReport
    from specattn.cuda_graph.recorder import Recorder
    from specattn.speculative.bound_step import Acceptor
    from specattn.speculative.decoder import ModelSlot
    from specattn.speculative.model import DraftModel, TargetModel
    from specattn.speculative.rehearsal import Replay
    from specattn.speculative.states import RequestStates
    from specattn.speculative.validation import Validate

__all__ = ["CudagraphMode", "PendingStep", "StepDecoder"]

log = logging.getLogger(__name__)

#: How a step is recorded: as one graph, or as three that a host may work between.
CudagraphMode = Literal["full", "piecewise"]
# steps whose tokens may be on their way to the host
_IN_FLIGHT = 2
# what graphs have baked in; what holds it further down is the runner's to watch
_SETTING = (
    "config",
    "table",
    "table.req_to_token",
    "table.reserved",
    "states",
    "target",
    "draft",
    "features",
    "indices",
    "accept",
    "tbo",
)
_setting = attrgetter(*_SETTING)


class StepDecoder(Settable):
    """Runs whole steps of one speculation setting over requests' rows.

    Nothing is handed over between steps but rows: lengths advance on the device, where the next
    proposal starts is kept there too (`RequestStates`), and a step itself writes accepted tokens to
    pinned memory of the host. A request without slots for a step (see ``SlotTable.reserved``) sits
    the step out, and row 0, which is padding, takes part in the forwards alone: a rank without
    requests, or with fewer than others, can run what they run.

    Parameters
    ----------
    target : ModelSlot
        The target model.
    draft : ModelSlot or None
        The draft model; needed unless ``config.num_steps`` is 0, and then kept up to date, for
        steps of other settings.
    config : SpecConfig
        Tree width and depth.
    table : SlotTable or ExternalTable
        Rows and slots of the requests.
    states : RequestStates
        Their states; decoders of several settings may share them.
    features : int, optional
        Width of the target features the draft reads; its ``feature_size``, and nothing else.
    buckets : sequence of int
        Batch sizes to capture.
    record : bool
        Whether to record CUDA graphs.
    cudagraph : {"full", "piecewise"}
        One graph per step; or one for the drafts, one for the target and what is kept, and one
        for the draft extend, with the host free to plan (`BoundAttention.schedule`) in between.
    sampled : bool
        Whether to capture steps for requests that draw, too.
    indices : {"table", "csr"}
        What the draft steps read; see `MultiStepDraftBackend`.
    recorder : Recorder, optional
        Whose memory pool graphs use: decoders that never run at the same time share one.
    accept : Acceptor
        What decides how much of a tree is kept.
    validate : {"off", "debug"}
        ``"debug"`` also checks what tensors hold (slots, rows, lengths, the tree) before the
        target runs, which waits for the device; needs ``cudagraph="piecewise"``. See
        docs/validation.md.
    tbo : bool
        Two-batch overlap: whether both halves of a bucket run at the same time, on a stream each
        of one graph (`TboStepProgram`); what requests gain is the same.

    Raises
    ------
    ValueError
        If drafting lacks a draft model, ``cudagraph`` or ``validate`` is another word, one graph
        meets a backend that plans on the host, or ``validate="debug"`` one graph or ``tbo``; if
        table, states and pools are not of one size and the config's; if the target does not give
        the features that the draft reads.
    CaptureError
        If a capture fails; see `GraphRunner.capture`. Where memory runs out, a warning is logged
        instead, and batches that no captured bucket holds run eagerly.

    Attributes
    ----------
    runner : GraphRunner
        Counts replays and eager fallbacks by part.
    """

    def __init__(
        self,
        target: ModelSlot[TargetModel],
        draft: ModelSlot[DraftModel] | None,
        config: SpecConfig,
        table: RequestTable,
        states: RequestStates,
        *,
        features: int | None = None,
        buckets: Sequence[int] = (1,),
        record: bool = True,
        cudagraph: CudagraphMode = "full",
        sampled: bool = False,
        indices: Indices = "table",
        recorder: Recorder | None = None,
        accept: Acceptor = accept,
        validate: Validate = "off",
        tbo: bool = False,
    ) -> None:
        if config.num_steps and draft is None:
            raise ValueError(f"num_steps {config.num_steps} needs a draft model")
        if cudagraph not in ("full", "piecewise"):
            raise ValueError(f"cudagraph must be 'full' or 'piecewise', got {cudagraph!r}")
        if validate not in ("off", "debug"):
            raise ValueError(f"validate must be 'off' or 'debug', got {validate!r}")
        if validate == "debug" and cudagraph == "full":
            raise ValueError(
                "validate='debug' looks between graphs, so it needs cudagraph='piecewise'"
            )
        if cudagraph == "full" and _plans_on_host(target, draft):
            raise ValueError("a backend that plans on the host needs cudagraph='piecewise'")
        if validate == "debug" and tbo:
            raise ValueError("validate='debug' looks at a whole batch's tree, which tbo splits")
        check_tables(config, table, states, [s.pool for s in (target, draft) if s is not None])
        self.target, self.draft, self.config = target, draft, config
        self.table, self.states, self.cudagraph = table, states, cudagraph
        self.features = feature_width(draft, features)
        self.indices, self.accept = indices, accept
        self.validate, self.tbo = validate, tbo
        device = table.req_to_token.device
        self._made = _setting(self)
        self._glance = Glance([self, table], [name.split(".")[-1] for name in _SETTING])
        self._plans = _plans_on_host(target, draft)
        three = cudagraph == "piecewise"
        self._parts = [
            StepPart.of(config, cudagraph=three, sampled=drawn) for drawn in (False, True)
        ]
        self._programs: dict[int, StepProgram | TboStepProgram] = {}
        self.runner = GraphRunner(
            self._part,
            buckets,
            device,
            record=record,
            recorder=recorder,
            private=True,
            before=self._before_capture,
        )
        width, largest = config.num_steps + 2, max(table.req_to_token.shape[0], *buckets)
        self._turns = InFlight(HostBuffers.alloc(_IN_FLIGHT, largest, width, device))
        # the table's rows, and the last ones that `check_rows` found to be good
        self._known = frozenset(range(len(table.req_to_token)))
        self._good: tuple[int, ...] | None = None
        self._launching = False
        self._sampled = False
        self.capture(sampled=sampled)
        self._aside = Aside(self._turns.ring, self.runner.recorder)

    def parts(self, *, sampled: bool) -> tuple[StepPart, ...]:
        """Return what a step consists of, in order."""
        return self._parts[sampled]

    @property
    def modes(self) -> tuple[StepPart, ...]:
        """Every part that `capture` was asked for."""
        parts = (*self.parts(sampled=False), *(self.parts(sampled=True) if self._sampled else ()))
        return tuple(dict.fromkeys(parts))

    @property
    def sampled(self) -> bool:
        """Whether steps for requests that draw are captured, too."""
        return self._sampled

    def capture(self, *, sampled: bool = False) -> None:
        """Capture every bucket, for greedy requests and, if ``sampled``, for drawing ones.

        Parts of which a bucket is captured already stay as they are.

        Raises
        ------
        ValueError
            From ``between`` the parts of a step of this decoder.
        CaptureError
            If a capture fails.
        """
        self._check_free()
        self._sampled |= sampled
        for part in self.modes:
            if self.runner.captured(part):
                continue
            try:
                self.runner.capture(part)
            except CapacityError as error:
                log.warning("%s", error)
        self._turns.align()

    def report(self) -> tuple[GraphReport, ...]:
        """Return what capturing took, bucket by bucket, in the order of the captures."""
        return self.runner.reports()

    def step(
        self, rows: Sequence[int], *, sampled: bool = False, seq_lens_cpu: Tensor | None = None
    ) -> list[list[int]]:
        """Advance requests and wait: `step_async` of the same arguments, then `PendingStep.wait`.

        Returns
        -------
        list of list of int
            Each request's new tokens, bonus last, in the order of ``rows``.
        """
        return self.step_async(rows, sampled=sampled, seq_lens_cpu=seq_lens_cpu).wait()

    def step_async(
        self,
        rows: Sequence[int],
        *,
        sampled: bool = False,
        seq_lens_cpu: Tensor | None = None,
        between: Callable[[StepPart], object] | None = None,
    ) -> PendingStep:
        """Launch a step and return at once; nothing waits for the device.

        Parameters
        ----------
        rows : sequence of int
            Table rows of the requests, all different, and any number of 0 for padding, which
            gains nothing. Without rows the smallest bucket runs on padding alone.
        sampled : bool
            Whether any of them draws; greedy requests stay greedy either way. Without, all are
            greedy, whatever their temperature: only ``validate="debug"`` looks at that.
        seq_lens_cpu : Tensor, optional
            ``[len(rows)]`` int32, the committed lengths, for backends that plan on the host.
        between : callable, optional
            With ``cudagraph="piecewise"``: called with the part that comes next, after what comes
            before it has been launched and before the part is planned; never in plain decoding,
            which has one part. What it launches on the current stream runs there, too. The rows
            of the step are its own until it has been launched as a whole: a `SlotTable` does not
            free them here; tables of others must not give them, or their slots, to anybody,
            and a decoder of another setting must not step them. If it
            raises, the requests are where they were before the step.

        Returns
        -------
        PendingStep
            `PendingStep.wait` has the new tokens.

        Raises
        ------
        ValueError
            If the step before the last one has not been waited for, or, with a backend that plans
            on the host, any of this decoder's that one of these requests takes part in; if
            ``seq_lens_cpu`` is of another shape, dtype or device; if there is nothing to come
            ``between``, or it is there that the step is asked for.
        CaptureMismatch
            If what the graphs read is not what it was when they were captured. Attributes of the
            decoder, the table's tensors, the pools' and their addresses, and the addresses of the
            states' are compared before every step. The rest (buffers and settings in frozen
            dataclasses, which nobody can replace but by force) takes turns: everything is compared
            in a few dozen steps, see `specattn.cuda_graph.capture_guard.Watch`.
        NotCapturedError
            If ``sampled`` and such steps were not captured.
        TreeError
            With ``validate="debug"``, if the tree is malformed; the target has not run then.
        """
        return self._launch(rows, sampled, seq_lens_cpu, between, self._turns, self.runner.replay)

    def rehearse(self, rows: Sequence[int], *, sampled: bool = False) -> bool:
        """Go through a step's launch without launching it, so that the next launch is short.

        A host that has waited for a long step finds neither code nor data of a launch in its
        caches. Called while it waits, ``pending.wait(lambda: decoder.rehearse(rows))``, this keeps
        them there: `step_async` runs, every `rehearsal.PACE` seconds at the most,
        but for the graphs, whose place one of a small kernel takes, on a stream of its own. Nothing
        that steps read is written, nothing waits. Steps that a backend plans on the host or that
        are validated are left out, and so are those that no captured bucket holds.

        Parameters
        ----------
        rows, sampled
            Of the step that is to come, as far as they are known: `step_async`'s.

        Returns
        -------
        bool
            Whether it was rehearsed: as often, a loop may go through what else comes before a
            launch, such as `SlotTable.reserve` of what is reserved already.

        Raises
        ------
        ValueError, CaptureMismatch, NotCapturedError
            As `step_async` does for these rows.
        """
        if self._plans or self.validate != "off" or not self._aside.due:
            return False
        if not self.runner.holds(self._parts[sampled], len(rows) or 1):
            return False
        # rows that have changed are looked at again, which is most of what a launch takes then
        self._good = None
        self._aside.run(partial(self._launch, rows, sampled, None, None))
        return True

    def settle(self) -> None:
        """Wait for every step in flight, whoever has not."""
        self._turns.settle()

    def _launch(
        self,
        rows: Sequence[int],
        sampled: bool,
        seq_lens_cpu: Tensor | None,
        between: Callable[[StepPart], object] | None,
        turns: InFlight,
        replay: Replay,
    ) -> PendingStep:
        """Launch a step, or rehearse it: `step_async`, over these turns and by this replay."""
        self._check()
        landing, asked, rows = turns.take(), len(rows), tuple(rows)
        if not rows:
            rows, seq_lens_cpu = (0,), torch.zeros(1, dtype=torch.int32)
        count = len(rows)
        check_lens(seq_lens_cpu, count)
        if between is not None and self.cudagraph == "full":
            raise ValueError(
                "nothing comes between the parts of one graph; see cudagraph='piecewise'"
            )
        if self._plans:
            self._check_read(rows)
        if self._good != rows:
            check_rows(rows, self._known, turns.ring.rows.shape[1])
            self._good = rows
        live = None
        if self.validate == "debug":
            live = taking_part(
                rows,
                seq_lens_cpu,
                self.config,
                self.table,
                self.states,
                self.target.pool.num_slots,
                sampled=sampled,
            )
        turns.begin()
        parts = self._parts[sampled]
        for part, ready in zip(parts, self.runner.ready_together(parts, count), strict=True):
            if part is parts[0]:
                # padded to the bucket
                landing.write_rows(rows, ready.bucket)
            elif between is not None:
                self._leave(rows, partial(between, part))
            if self._plans:
                ready.schedule(seq_lens_cpu)
            out = replay(part, ready)
            if live is not None and isinstance(out, DraftTree):
                tree = DraftTree(*(value[live.at] for value in vars(out).values()))
                check_tree(tree, live.batch, self.config, self.target.model.vocab_size)
        return turns.land(landing, asked, rows)

    def _leave(self, rows: tuple[int, ...], work: Callable[[], object]) -> None:
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

    def _before_capture(self) -> None:
        """Read what steps in flight gained: a capture runs steps, too, and takes their turns."""
        self.settle()
        self._turns.align()
        self._turns.begin()

    def _check(self) -> None:
        self._check_free()
        if not self._glance.finds(self._as_made):
            for name, made, now in zip(_SETTING, self._made, _setting(self), strict=True):
                if made is not now:
                    raise CaptureMismatch(name, made, now)

    def _as_made(self) -> bool:
        return all(map(is_, _setting(self), self._made))

    def _check_read(self, rows: tuple[int, ...]) -> None:
        """Refuse lengths that a step in flight is about to change."""
        for pending in self._turns.in_flight:
            late = {row for row in pending.rows if row}.intersection(rows)
            if late:
                raise ValueError(
                    f"a backend plans on the host, and rows {sorted(late)} take part in a step "
                    "that has not been waited for: their lengths are not known"
                )

    def _part(self, part: StepPart, size: int) -> Program:
        if size not in self._programs:
            # besides what graphs are recorded of, the last one only
            largest = self.runner.buckets[-1]
            kept = {at: one for at, one in self._programs.items() if at == largest}
            self._programs = kept | {size: self._program(size)}
        return self._programs[size].part(part)

    def _program(self, size: int) -> StepProgram | TboStepProgram:
        make = partial(
            StepProgram,
            config=self.config,
            req_to_token=self.table.req_to_token,
            reserved=self.table.reserved,
            states=self.states,
            ring=self._turns.ring,
            features=self.features,
            indices=self.indices,
            accept=self.accept,
        )
        if not self.tbo:
            return make(self.target, self.draft, batch=size)
        first = make(self.target, self.draft, batch=max(size // 2, 1))
        draft = self.draft.with_own_workspace() if self.draft else None
        return TboStepProgram(
            first, make(self.target.with_own_workspace(), draft, batch=size - size // 2), size
        )


def _plans_on_host(*slots: ModelSlot[Any] | None) -> bool:
    return any(slot.backend.host_plan for slot in slots if slot is not None)
