"""The models, tables and options of steps, put together."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from specattn.cache.memory import memory_for
from specattn.cache.slot_table import SlotTable
from specattn.checks import function, instance, one_of
from specattn.config import SpecConfig
from specattn.speculative.model import ModelSlot, for_context
from specattn.speculative.proposers.drafts import as_proposer, draft_of
from specattn.speculative.states import RequestStates
from specattn.speculative.step.buffers import StepWidths
from specattn.speculative.step.validation import check_target, check_target_model
from specattn.speculative.step.verify import accept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from specattn.attention.multi_step import Indices
    from specattn.backends.base import BackendFactory
    from specattn.batch import AcceptResult, DraftTree
    from specattn.cache.external import RequestTable
    from specattn.config import KVScales
    from specattn.cuda_graph.recorder import Recorder
    from specattn.speculative.model import TargetModel
    from specattn.speculative.proposers.drafts import Draft
    from specattn.speculative.proposers.host import HostTree
    from specattn.speculative.proposers.proposer import Proposer
    from specattn.speculative.sampling.grammar import Grammar
    from specattn.speculative.sampling.params import SamplingBatch
    from specattn.speculative.step.level import Level, StepPart

    Scales = Sequence[KVScales] | None

    #: Decides what is kept of a tree, as `verify.accept` does: no sync, capturable. It takes the
    #: tree, logits, lengths, config, sampling parameters, and what to write.
    Acceptor = Callable[
        [DraftTree, Tensor, Tensor, SpecConfig, SamplingBatch, AcceptResult], AcceptResult
    ]

log = logging.getLogger(__name__)

#: How a step is recorded: as one graph, or as three that a host may work between.
CudagraphMode = Literal["full", "piecewise"]
#: Whether steps also check what tensors hold.
Validate = Literal["off", "debug"]


class EngineKeywords(TypedDict, total=False):
    """The fields of `StepOptions` that an engine takes as they are."""

    indices: Indices
    accept: Acceptor
    validate: Validate
    tbo: bool
    capturing: Callable[[], AbstractContextManager[object]]


class SetupKeywords(EngineKeywords, total=False):
    """The fields of `StepOptions` that `StepSetup.over` takes as they are."""

    record: bool
    recorder: Recorder | None


class StepKeywords(SetupKeywords, total=False):
    """The fields of `StepOptions`, as keyword arguments."""

    cudagraph: CudagraphMode


class StepArguments(TypedDict, total=False):
    """The keyword arguments of `StepDecoder.step_async`."""

    level: Level
    sampled: bool
    processed: bool
    seq_lens_cpu: Tensor | None
    between: Callable[[StepPart], object] | None
    grammars: Sequence[Grammar | None] | None
    trees: Sequence[HostTree] | None


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of steps, which an engine's decoders share.

    Parameters
    ----------
    record : bool
        Whether to record CUDA graphs.
    cudagraph : {"full", "piecewise"}
        One graph per step; or one for the drafts, one for the target and what is kept, and one
        for the draft extend, with the host free to plan (`BoundAttention.schedule`) in between.
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
        of one graph (`StepLaunch`); what requests gain is the same.
    capturing : callable
        Gives a context manager, which surrounds the capture of every bucket, late ones included:
        there an engine registers what its collectives use, or sets what its forwards read. It is
        left when the capture fails, too; where nothing is recorded, it surrounds what runs instead.
        It may make another stream the current one.

    Raises
    ------
    ValueError
        If an option is another word, or cannot be called; if ``validate="debug"`` meets one graph
        or ``tbo``.
    """

    record: bool = True
    cudagraph: CudagraphMode = "full"
    indices: Indices = "table"
    recorder: Recorder | None = None
    accept: Acceptor = accept
    validate: Validate = "off"
    tbo: bool = False
    capturing: Callable[[], AbstractContextManager[object]] = nullcontext

    def __post_init__(self) -> None:
        one_of("cudagraph", self.cudagraph, "full", "piecewise")
        one_of("indices", self.indices, "table", "csr")
        one_of("validate", self.validate, "off", "debug")
        function("accept", self.accept)
        function("capturing", self.capturing)
        if self.validate == "debug" and self.cudagraph == "full":
            raise ValueError(
                "validate='debug' looks between graphs, so it needs cudagraph='piecewise'"
            )
        if self.validate == "debug" and self.tbo:
            raise ValueError("validate='debug' looks at a whole batch's tree, which tbo splits")

    @property
    def settings(self) -> tuple[object, ...]:
        """What ranks that run the same steps have in common."""
        return self.record, self.cudagraph, self.indices, self.validate, self.tbo


@dataclass(frozen=True)
class StepSetup:
    """The models, config, table, states and options of steps, whatever their batch.

    `over` makes one. Setups of several configs share the rest: ``replace(setup, config=other)``.

    Parameters
    ----------
    target : ModelSlot
        The target model.
    proposer : Proposer
        What proposes tokens.
    config : SpecConfig
        Tree width and depth.
    table : RequestTable
        Rows and slots of the requests.
    states : RequestStates
        What steps leave for each other.
    options : StepOptions
        How steps run.
    """

    target: ModelSlot[TargetModel]
    proposer: Proposer
    config: SpecConfig
    table: RequestTable
    states: RequestStates
    options: StepOptions

    @classmethod
    def over(  # noqa: PLR0913 - an assembly
        cls,
        target: TargetModel | ModelSlot[TargetModel],
        draft: Draft | ModelSlot[Any] | None,
        config: SpecConfig,
        *,
        table: RequestTable | None = None,
        num_slots: int | None = None,
        backend: str | BackendFactory = "auto",
        deterministic: bool = False,
        kv_dtype: torch.dtype | None = None,
        kv_scales: tuple[Scales, Scales] = (None, None),
        position_offsets: bool = False,
        cudagraph: CudagraphMode | None = None,
        **options: Unpack[SetupKeywords],
    ) -> StepSetup:
        """Make all that steps need: pools, attention, a table and states.

        A model, or that of a proposer, gets a pool, and attention over it. What exists already is
        taken as it is: a model's slot, and a table.

        Parameters
        ----------
        target : TargetModel or ModelSlot
            The target model.
        draft : DraftModel, BlockDraftModel, ProposerFactory, ModelSlot or None
            What proposes tokens; None for plain decoding.
        config : SpecConfig
            Tree width and depth, limits and page size. If several configs share the states, the one
            with most proposals.
        table : RequestTable, optional
            Rows and slots of the requests, on the device of steps; by default a `SlotTable` of the
            config's sizes, on the target's.
        num_slots : int, optional
            KV slots of a table that is made; by default so many that every request can reach
            ``max_context_len``. Pools that are made have the table's.
        backend : str or BackendFactory
            Attention of models without a slot, by name or itself; see `choose_backend`.
        deterministic, kv_dtype, kv_scales
            Of what is made for models, the target's scales and the draft's; see
            `specattn.engine.engine.Engine`.
        position_offsets : bool
            Whether requests may have offsets of their positions; see `RequestStates`.
        cudagraph : {"full", "piecewise"}, optional
            As in `StepOptions`; by default in one graph, and in three where a backend plans on the
            host, or with ``validate="debug"``.
        **options
            Others of `StepOptions`.

        Raises
        ------
        UnsupportedError
            If the backend cannot serve the models here.
        ModelError
            If a model computes contexts as long as the table's in another way than shorter ones.
        ValueError
            If ``target`` or ``draft`` is no model, or ``config`` no `SpecConfig`; if the rest is
            not what `SlotTable`, `KVPool` and `StepOptions` take.
        """
        instance("config", config, SpecConfig, "a SpecConfig")
        if isinstance(target, ModelSlot):
            check_target(target)
        else:
            check_target_model(target)
        if table is None:
            model = target.model if isinstance(target, ModelSlot) else target
            table = _table(model, config, num_slots)
        rows, context = len(table.req_to_token), table.max_context_len
        device = table.req_to_token.device

        def slot(model: Any, scales: Scales) -> ModelSlot[Any]:
            """Give a model a pool, and attention over it."""
            model = for_context(model, context)
            pool = memory_for(model.layers, table, kv_dtype=kv_dtype, scales=scales)
            return ModelSlot.of(model, pool, backend, deterministic=deterministic)

        own = target if isinstance(target, ModelSlot) else slot(target, kv_scales[0])
        if isinstance(draft, ModelSlot):
            proposer = as_proposer(draft)
        else:
            proposer = draft_of(draft).make(partial(slot, scales=kv_scales[1]))
        fields = proposer.state_fields(config)
        states = RequestStates.alloc(rows, fields, device, position_offsets=position_offsets)
        if cudagraph is None:
            between = _plans_on_host(own, proposer.slot) or options.get("validate") == "debug"
            cudagraph = "piecewise" if between else "full"
        steps = StepOptions(cudagraph=cudagraph, **options)
        return cls(own, proposer, config, table, states, steps)

    @property
    def device(self) -> torch.device:
        """The device of table and states."""
        return self.table.req_to_token.device

    @property
    def slots(self) -> tuple[ModelSlot[Any], ...]:
        """The target, and the proposer's model, if it has any."""
        own = self.proposer.slot
        return (self.target,) if own is None else (self.target, own)

    @property
    def plans_on_host(self) -> bool:
        """Whether the backend of any model plans on the host."""
        return _plans_on_host(*self.slots)

    @property
    def widths(self) -> StepWidths:
        """The widths of a step's buffers."""
        config, proposer = self.config, self.proposer
        return StepWidths(
            config,
            positions=max(config.num_steps + 1, proposer.num_positions(config)),
            offsets=self.states.position_offsets.shape[1],
            features=proposer.feature_size,
            dtype=proposer.dtype,
            draft_vocab=proposer.vocab_size if config.draft_sampling and config.num_steps else 0,
        )

    def with_slots(self, change: Callable[[ModelSlot[Any]], ModelSlot[Any]]) -> StepSetup:
        """Return the setup with every model's slot changed."""
        proposer, own = self.proposer, self.proposer.slot
        if own is not None:
            proposer = proposer.make(lambda _: change(own))
        return replace(self, target=change(self.target), proposer=proposer)


def _table(target: TargetModel, config: SpecConfig, num_slots: int | None) -> SlotTable:
    """Return a table; unless told, all requests may become longest."""
    if config.max_context_len > target.max_context_len:
        log.warning(
            "max_context_len %d is above the target's %d: positions from there on are none it "
            "was trained on",
            config.max_context_len,
            target.max_context_len,
        )
    pages = -(-config.max_context_len // config.page_size) * config.max_num_reqs + 1
    slots = pages * config.page_size if num_slots is None else num_slots
    return SlotTable(**config.sizes, num_slots=slots, device=target.device)


def _plans_on_host(*slots: ModelSlot[Any] | None) -> bool:
    return any(slot.backend.host_plan for slot in slots if slot is not None)
