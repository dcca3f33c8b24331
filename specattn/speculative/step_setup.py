"""The models, tables and options of a decoder's steps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from specattn.checks import function, one_of
from specattn.speculative.verify import accept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from specattn.attention.multi_step import Indices
    from specattn.batch import AcceptResult, DraftTree
    from specattn.cache.external import RequestTable
    from specattn.config import SpecConfig
    from specattn.cuda_graph.recorder import Recorder
    from specattn.speculative.grammar import Grammar
    from specattn.speculative.host_proposer import HostTree
    from specattn.speculative.model import ModelSlot, TargetModel
    from specattn.speculative.proposer import Proposer
    from specattn.speculative.sampling import SamplingBatch
    from specattn.speculative.states import RequestStates
    from specattn.speculative.step import StepPart

    #: Decides what is kept of a tree, as `verify.accept` does: no sync, capturable. It takes the
    #: tree, logits, lengths, config, sampling parameters, and what to write.
    Acceptor = Callable[
        [DraftTree, Tensor, Tensor, SpecConfig, SamplingBatch, AcceptResult], AcceptResult
    ]

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


class StepKeywords(EngineKeywords, total=False):
    """The fields of `StepOptions`, as keyword arguments."""

    record: bool
    cudagraph: CudagraphMode
    recorder: Recorder | None


class StepArguments(TypedDict, total=False):
    """The keyword arguments of `StepDecoder.step_async`."""

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

    @property
    def device(self) -> torch.device:
        """The device of table and states."""
        return self.table.req_to_token.device

    @property
    def slots(self) -> tuple[ModelSlot[Any], ...]:
        """The target, and the proposer's model, if it has any."""
        own = self.proposer.slot
        return (self.target,) if own is None else (self.target, own)

    def with_slots(self, change: Callable[[ModelSlot[Any]], ModelSlot[Any]]) -> StepSetup:
        """Return the setup with every model's slot changed."""
        proposer, own = self.proposer, self.proposer.slot
        if own is not None:
            proposer = proposer.make(lambda _: change(own))
        return replace(self, target=change(self.target), proposer=proposer)


def plans_on_host(*slots: ModelSlot[Any] | None) -> bool:
    """Return whether the backend of any model plans on the host."""
    return any(slot.backend.host_plan for slot in slots if slot is not None)
