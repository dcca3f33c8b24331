"""The interfaces of target and draft models.

Shapes: T tokens of all requests, flattened; R tokens whose logits are wanted; V and Vd the
vocabularies of target and draft; H the draft's hidden size; F the width of the target features
the draft reads (H for EAGLE-1/2, several layers' states side by side for EAGLE-3).

A model never sees a batch, a mask or a KV cache: it computes token by token and calls ``attend``
once per layer. Nothing in a forward may depend on a tensor's value on the host, so that one can be
captured in a CUDA graph. Forwards are called without gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar, runtime_checkable

from specattn.attention.layers import LayeredBackend
from specattn.checks import kind_of
from specattn.kernels.prompts import clear_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from specattn.backends.base import BackendFactory
    from specattn.batch import AcceptResult
    from specattn.cache.kv_pool import Caches
    from specattn.cache.memory import Memory
    from specattn.config import LayerConfig
    from specattn.kernels.gated_delta import LayerParts, LayerWeights, Nodes
    from specattn.plan import AttnPlan


class Attend(Protocol):
    """One layer's attention, bound to a step's rows and KV slots."""

    @property
    def slots(self) -> Tensor:
        """``[B, q]`` int32 with B q = T: the tokens' KV slots."""
        ...

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store ``k`` and ``v`` in layer ``layer``'s slots, then attend.

        A model that has stored both already, in a kernel of its own and at `slots`, gives neither.

        Parameters
        ----------
        layer : int
            Index into the model's ``layers``.
        q : Tensor
            ``[T, Hq, D]``, contiguous, position embedding applied, not scaled.
        k : Tensor, optional
            ``[T, Hkv, D]``, contiguous, position embedding applied.
        v : Tensor, optional
            ``[T, Hkv, Dv]``, contiguous.
        sinks : Tensor, optional
            ``[Hq]`` floats, a logit per head without a value; for layers whose ``AttnConfig`` says
            so, and for them alone.

        Returns
        -------
        Tensor
            ``[T, Hq, Dv]``.
        """

    def mix(self, layer: int, parts: LayerParts, weights: LayerWeights) -> Tensor:
        """Mix tokens along their text, in layer ``layer``, which has a state.

        An `attend` of one's own need not have it for models whose layers all attend.

        Parameters
        ----------
        layer : int
            Index into the model's ``layers``, whose config there is a `StateConfig`.
        parts : LayerParts
            What the layer's products give for T tokens.
        weights : LayerWeights
            What else the layer mixes by.

        Returns
        -------
        Tensor
            ``[T, HV, V]``.
        """


@dataclass(frozen=True)
class TargetOutput:
    """The result of a target forward.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``.
    hidden_states : Tensor or None
        ``[T, F]``, the features that a draft reads; None if no draft asked for any.
    """

    logits: Tensor
    hidden_states: Tensor | None


@dataclass(frozen=True)
class DraftOutput:
    """The result of a draft forward.

    Parameters
    ----------
    logits : Tensor
        ``[R, Vd]``.
    hidden_states : Tensor
        ``[R, H]``, the next draft step's input.
    """

    logits: Tensor
    hidden_states: Tensor


class TargetModel(Protocol):
    """The model whose distribution is decoded."""

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The geometry of every layer, in the order ``attend`` numbers them."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_context_len(self) -> int:
        """Tokens up to which positions mean what they did in training."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text; may be empty."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of the hidden states."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> TargetOutput:
        """Run the model over flattened tokens.

        Parameters
        ----------
        input_ids, positions : Tensor
            ``[T]`` int64.
        attend : Attend
            Called once per layer.
        rows : Tensor, optional
            ``[R]`` int64 indices of the tokens whose logits are wanted; all if None.
        """


class AnyDraftModel(Protocol):
    """The part that draft models of all kinds have in common."""

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The geometry of every layer, in the order ``attend`` numbers them."""

    @property
    def vocab_size(self) -> int:
        """Vd, the width of the draft's logits."""

    @property
    def feature_size(self) -> int:
        """F, the width of the target features that `combine` reads."""

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Map the target's features ``[T, F]`` to draft hidden states ``[T, H]``."""

    @property
    def target_ids(self) -> Tensor | None:
        """The table of `to_target`, contiguous ``[Vd]`` int64, if it is one.

        The kernel that chooses tokens reads it, and saves a launch.
        """

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map draft token ids, int64 of any shape, to target token ids."""


class DraftModel(AnyDraftModel, Protocol):
    """A model that proposes tokens from the target's features."""

    @property
    def hidden_size(self) -> int:
        """H, the width of the states between draft steps."""

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        *,
        sources: Tensor | None = None,
    ) -> DraftOutput:
        """Run the draft over flattened tokens.

        Parameters
        ----------
        input_ids : Tensor
            ``[T]`` int64, target token ids: each one follows the token its hidden state is of.
        hidden_states : Tensor
            ``[T, H]``, from `combine` or from the previous draft forward; of any number of rows
            with ``sources``.
        positions : Tensor
            ``[T]`` int64.
        attend : Attend
            Called once per layer, over all tokens.
        rows : Tensor, optional
            ``[R]`` int64 indices of the tokens whose logits and states are wanted; all if None.
        sources : Tensor, optional
            ``[T]`` int64, each token's row of ``hidden_states``; row i for token i if None.
        """


@runtime_checkable
class ContextModel(Protocol):
    """A model that must know the longest context before it runs."""

    def for_context(self, max_context_len: int) -> Self:
        """Return the model for contexts of up to ``max_context_len`` tokens.

        Raises
        ------
        ModelError
            If it computes contexts of that length in another way than shorter ones.
        """


@runtime_checkable
class ShardedModel(Protocol):
    """A model whose weights may be sharded over ranks.

    Each rank has heads of its own. Forwards contain collectives, so that all ranks have to run the
    same ones.
    """

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ranks that hold the shards; None if there is one."""
        ...


Model = TypeVar("Model", TargetModel, DraftModel)


def check_model(name: str, model: object, wanted: str, *, has: str = "eos_token_ids") -> None:
    """Refuse what is no such model: a path, a class, another kind.

    Parameters
    ----------
    name, wanted : str
        The argument, and what it must be.
    model : object
        What was given.
    has : str
        What models of the kind have besides ``layers``; by default what targets have.

    Raises
    ------
    ValueError
        If it lacks one of the two.
    """
    if isinstance(model, type) or not (hasattr(model, "layers") and hasattr(model, has)):
        raise ValueError(f"{name} must be {wanted}, got {kind_of(model)}")


def for_context(model: Model, max_context_len: int) -> Model:
    """Return ``model`` for contexts of ``max_context_len`` tokens; see `ContextModel`."""
    return model.for_context(max_context_len) if isinstance(model, ContextModel) else model


@dataclass(frozen=True)
class ModelSlot(Generic[Model]):
    """A model, what it keeps of requests, and its attention over that.

    Parameters
    ----------
    model : TargetModel or DraftModel
        The model.
    pool : Memory
        What its layers keep, a `KVPool` or a `HybridPool`; target and draft pools share slot
        numbers.
    backend : LayeredBackend
        Its attention over these.
    """

    model: Model
    pool: Memory
    backend: LayeredBackend

    @classmethod
    def of(
        cls,
        model: Model,
        pool: Memory,
        backend: str | BackendFactory,
        *,
        deterministic: bool = False,
    ) -> ModelSlot[Model]:
        """Choose the attention backend of ``model``, over ``pool``.

        Parameters
        ----------
        model : TargetModel or DraftModel
            The model.
        pool : Memory
            A `KVPool` or a `HybridPool`; what every layer is and the device are the pool's.
        backend : str or BackendFactory
            What `choose_backend` takes: a name, or a backend or composite itself.
        deterministic : bool
            Ask for deterministic attention in every layer, whatever the layers say.

        Raises
        ------
        UnsupportedError
            If the backend cannot serve one of the layers.
        ValueError
            If ``model`` is no model, ``pool`` is of another kind, or its layers are another
            model's.
        """
        check_model("model", model, "a target or a draft model", has="layers")
        made = LayeredBackend.of(backend, model.layers, pool, deterministic=deterministic)
        return cls(model, pool, made)

    @property
    def device(self) -> torch.device:
        """The device of what it keeps."""
        return self.pool.device

    @property
    def num_slots(self) -> int:
        """Tokens that it can keep, slot 0 included."""
        return self.pool.num_slots

    @property
    def shares_prefixes(self) -> bool:
        """Whether what it keeps of a text's beginning serves other texts, too."""
        return not self.by_row()

    def tensors(self) -> Mapping[str, Caches]:
        """Return all that it keeps; see `Memory.tensors`."""
        return self.pool.tensors()

    def by_row(self) -> Mapping[str, Tensor]:
        """Return what it keeps by row; see `Memory.by_row`."""
        return self.pool.by_row()

    def admit(self, rows: Sequence[int]) -> None:
        """Let prompts begin in these rows, whoever had them before."""
        for tensor in self.by_row().values():
            tensor[:, rows] = 0

    def begin(self, rows: Tensor, seq_lens: Tensor) -> None:
        """Let prompts begin as `admit` does, where no token comes before; capturable.

        Parameters
        ----------
        rows, seq_lens : Tensor
            ``[P]`` int64 and int32: the pieces' rows, and the tokens before them.
        """
        for tensor in self.by_row().values():
            clear_rows(tensor, rows, seq_lens)

    def nodes(self, batch: int, count: int) -> Nodes | None:
        """Allocate what nodes leave for `commit`, if anything; see `Memory.nodes`."""
        return self.pool.nodes(batch, count)

    def commit(self, plan: AttnPlan, accepted: AcceptResult, nodes: Nodes | None = None) -> None:
        """Keep the accepted path of what ``plan`` verified; see `Memory.commit`."""
        self.pool.commit(plan.tail_slots, accepted, plan.req_pool_indices, nodes)

    def for_context(self, max_context_len: int) -> ModelSlot[Model]:
        """Return the slot for contexts of that length; see `ContextModel`."""
        model = for_context(self.model, max_context_len)
        return self if model is self.model else replace(self, model=model)

    def with_own_workspace(self) -> ModelSlot[Model]:
        """Return the same slot with attention that may run beside it."""
        return replace(self, backend=self.backend.with_own_workspace())
