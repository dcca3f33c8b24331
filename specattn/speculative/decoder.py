"""One speculative step: propose, build the tree, verify, accept, commit, extend."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from specattn.backends.layers import LayeredBackend
from specattn.batch import AcceptResult, Candidates, DraftState, DraftTree, ForwardMode, SpecBatch
from specattn.cuda_graph import GraphRunner, Program
from specattn.errors import CapacityError, CaptureMismatch
from specattn.speculative.draft import ProposeProgram
from specattn.speculative.draft_tokens import drawing_names
from specattn.speculative.extend import ExtendProgram
from specattn.speculative.tree import build_tree, root_tree
from specattn.speculative.validation import (
    Validate,
    check_batch,
    check_contents,
    check_features,
    check_tree,
    feature_width,
)
from specattn.speculative.verify import accept, spread
from specattn.speculative.verify_program import VerifyOutput, VerifyProgram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.backends.base import BackendFactory
    from specattn.backends.multi_step import Indices
    from specattn.cache.kv_pool import KVPool
    from specattn.config import SpecConfig
    from specattn.speculative.model import DraftModel, TargetModel
    from specattn.speculative.sampling import SamplingBatch

log = logging.getLogger(__name__)

Model = TypeVar("Model", "TargetModel", "DraftModel")


@dataclass(frozen=True)
class StepResult:
    """What a step leaves.

    Parameters
    ----------
    tree : DraftTree
        What was verified.
    accepted : AcceptResult
        What was kept of it.
    state : DraftState or None
        Where the next proposal starts; None in plain decoding.
    """

    tree: DraftTree
    accepted: AcceptResult
    state: DraftState | None


@dataclass(frozen=True)
class ModelSlot(Generic[Model]):
    """A model with its paged KV and its attention.

    Parameters
    ----------
    model : TargetModel or DraftModel
        The model.
    pool : KVPool
        Its keys and values; target and draft pools share slot numbers.
    backend : LayeredBackend
        Its attention over that pool.
    """

    model: Model
    pool: KVPool
    backend: LayeredBackend

    @classmethod
    def of(
        cls,
        model: Model,
        pool: KVPool,
        backend: str | BackendFactory,
        *,
        deterministic: bool = False,
    ) -> ModelSlot[Model]:
        """Choose the attention backend of ``model``, over ``pool``; see `choose_backend`.

        ``deterministic`` asks for it in every layer, whatever the layers say.

        Raises
        ------
        UnsupportedError
            If the backend cannot serve one of the layers.
        """
        layers = [
            replace(layer, deterministic=layer.deterministic or deterministic)
            for layer in pool.layers
        ]
        return cls(model, pool, LayeredBackend(backend, layers, pool, pool.device))

    def with_own_workspace(self) -> ModelSlot[Model]:
        """Return the same model and pool with attention that may run at the same time."""
        return replace(self, backend=self.backend.with_own_workspace())


class SpecDecoder:
    """Decodes one speculation setting, step by step, over static buffers and captured graphs.

    Parameters
    ----------
    target : ModelSlot
        The target model.
    draft : ModelSlot or None
        The draft model; needed unless ``config.num_steps`` is 0.
    config : SpecConfig
        Tree width and depth.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32, the table the pools' slots are found through.
    features : int, optional
        Width of the target features the draft reads; its ``feature_size``, and nothing else.
    buckets : sequence of int
        Batch sizes to capture.
    record : bool
        Whether to record CUDA graphs (on a CUDA device, with a backend that allows it).
    indices : {"table", "csr"}
        What the draft steps read; see `MultiStepDraftBackend`.
    validate : {"off", "debug"}
        ``"debug"`` also checks what tensors hold (slots, rows, lengths, the tree), which waits
        for the device several times per step; see docs/validation.md.

    Raises
    ------
    ValueError
        If drafting lacks a draft model, ``validate`` is another word, or the target does not give
        the features that the draft reads.
    CaptureError
        If a capture fails; see `GraphRunner.capture`.

    Attributes
    ----------
    runner : GraphRunner
        Counts replays and eager fallbacks by mode.
    """

    def __init__(
        self,
        target: ModelSlot[TargetModel],
        draft: ModelSlot[DraftModel] | None,
        config: SpecConfig,
        req_to_token: Tensor,
        *,
        features: int | None = None,
        buckets: Sequence[int] = (1,),
        record: bool = True,
        indices: Indices = "table",
        validate: Validate = "off",
    ) -> None:
        if validate not in ("off", "debug"):
            raise ValueError(f"validate must be 'off' or 'debug', got {validate!r}")
        if config.num_steps and draft is None:
            raise ValueError(f"num_steps {config.num_steps} needs a draft model")
        self.target, self.draft, self.config = target, draft, config
        self.features = feature_width(draft, features)
        self.req_to_token, self.indices = req_to_token, indices
        self.validate = validate
        self._captured = self._setting()
        self.verify_mode = ForwardMode.TARGET_VERIFY if config.num_steps else ForwardMode.DECODE
        self.runner = GraphRunner(self._program, buckets, req_to_token.device, record=record)
        for mode in self.modes:
            try:
                self.runner.capture(mode)
            except CapacityError as error:
                log.warning("%s", error)

    @property
    def modes(self) -> tuple[ForwardMode, ...]:
        """The forward modes of a step."""
        if not self.config.num_steps:
            return (ForwardMode.DECODE,)
        return ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND

    def _program(self, mode: ForwardMode, size: int) -> Program:
        config, table = self.config, self.req_to_token
        if mode is self.verify_mode:
            layout = config.layout(mode)
            return VerifyProgram(self.target.model, self.target.backend, layout, table, size)
        assert self.draft is not None
        model, attention = self.draft.model, self.draft.backend
        if mode is ForwardMode.DRAFT_DECODE:
            return ProposeProgram(model, attention, config, table, size, self.indices)
        return ExtendProgram(model, attention, config, table, self.features, size)

    def step(
        self, batch: SpecBatch, state: DraftState | None, sampling: SamplingBatch
    ) -> StepResult:
        """Advance every request by at least one token.

        Parameters
        ----------
        batch : SpecBatch
            The requests; each has slots reserved for ``config.reserve_len`` tokens past its
            ``seq_lens``.
        state : DraftState or None
            From the last step's extend, or from the prompt's.
        sampling : SamplingBatch
            How each request draws.

        Raises
        ------
        ValueError
            If a tensor of the batch is not as documented, a length is negative, or the step does
            not fit into the context; nothing has run then.
        CaptureMismatch
            If an attribute of the decoder was replaced after its graphs were captured.
        TreeError
            With ``validate="debug"``, if the tree is malformed; the target has not run then.
        """
        self._check(batch, state, sampling)
        tree = self.propose(batch, state, sampling)
        verified = self.verify(batch, tree)
        accepted = accept(tree, verified.logits, batch.seq_lens, self.config, sampling)
        self.target.pool.commit(verified.tail_slots, accepted)
        state = self.extend(batch, accepted, verified.features, sampling)
        return StepResult(tree, accepted, state)

    def _setting(self) -> dict[str, object]:
        """Return what the captured programs were made of."""
        names = ("config", "req_to_token", "target", "draft", "features", "indices")
        return {name: getattr(self, name) for name in names}

    def _check(self, batch: SpecBatch, state: DraftState | None, sampling: SamplingBatch) -> None:
        for name, value in self._setting().items():
            if value is not self._captured[name]:
                raise CaptureMismatch(name, self._captured[name], value)
        check_batch(batch, state, sampling, self.config, self.req_to_token)
        if self.validate == "debug":
            check_contents(batch, self.config, self.req_to_token, self.target.pool.num_slots)

    def propose(
        self, batch: SpecBatch, state: DraftState | None, sampling: SamplingBatch
    ) -> DraftTree:
        """Draft a tree below every bonus token; plain decoding drafts nothing."""
        if not self.config.num_steps:
            return root_tree(batch)
        candidates: Candidates = self._run(
            ForwardMode.DRAFT_DECODE, batch, **vars(state), **self._drawing(sampling)
        )
        if self.config.draft_sampling and self.draft is not None:
            law = spread(self.draft.model, candidates.draft_probs, self.target.model.vocab_size)
            candidates = replace(candidates, draft_probs=law)
        return build_tree(candidates, batch, self.config)

    def verify(self, batch: SpecBatch, tree: DraftTree) -> VerifyOutput:
        """Run the target over all nodes at once."""
        if self.validate == "debug":
            check_tree(tree, batch, self.config, self.target.model.vocab_size)
        verified: VerifyOutput = self._run(
            self.verify_mode,
            batch,
            tokens=tree.tokens,
            positions=tree.positions,
            tail_words=tree.words,
        )
        return verified

    def extend(
        self, batch: SpecBatch, accepted: AcceptResult, features: Tensor, sampling: SamplingBatch
    ) -> DraftState | None:
        """Run the draft model over the accepted path, with the target's features along it."""
        if not self.config.num_steps:
            return None
        check_features(features.shape[-1], self.features)
        path = accepted.accept_index.clamp(min=0).long()[:, :, None]  # [B, N + 1, 1]
        state: DraftState = self._run(
            ForwardMode.DRAFT_EXTEND,
            batch,
            tokens=accepted.accept_tokens,
            accept_lens=accepted.accept_lens,
            features=features.gather(1, path.expand(-1, -1, features.shape[-1])),
            **self._drawing(sampling),
        )
        return state

    def _drawing(self, sampling: SamplingBatch) -> dict[str, Tensor]:
        """Return what draft models draw with, if they draw."""
        return {name: getattr(sampling, name) for name in drawing_names(self.config)}

    def _run(self, mode: ForwardMode, batch: SpecBatch, **values: Tensor) -> Any:
        return self.runner.run(
            mode,
            len(batch),
            batch.seq_lens_cpu,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            **values,
        )
