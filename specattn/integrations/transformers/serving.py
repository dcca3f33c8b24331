"""A model as a target, and what is kept for it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from specattn.engine.engine import Engine
from specattn.integrations.transformers.drafting import (
    blaming_assistant,
    features_for,
    target_of,
    weights_of,
)
from specattn.integrations.transformers.fusing import fused_or_own, has_copies
from specattn.kernels.launch import power_of_2
from specattn.models import FusedTarget
from specattn.models.interface import INTERFACE, ModelState
from specattn.models.mixers import supply_mixers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specattn.config import SpecConfig
    from specattn.integrations.transformers.drafting import Drafting, Models
    from specattn.speculative.sampling.logits_processor import LogitsProcessor

# The last settings of a model for which pools and graphs are kept.
_ENGINES_PER_MODEL = 2
_SHORTEST_CONTEXT = 256


@contextmanager
def borrowed(*models: Any, fused: bool) -> Iterator[None]:
    """Keep models from other calls, and let them attend through this library.

    They are in evaluation mode. Whatever ends the block, each gets its attention and its mode back.
    A model that runs ``fused`` is not touched.

    Raises
    ------
    ValueError
        If another call has one of them.
    """
    with ExitStack() as stack:
        _borrow(stack, models, fused=fused)
        yield


# a function: an interrupt in a loop of the `with` itself may go past the stack
def _borrow(stack: ExitStack, models: Sequence[Any], *, fused: bool) -> None:
    for model in dict.fromkeys(models):
        served = SERVED.setdefault(model, Served())
        stack.enter_context(_alone(served.lock))
        served.forget_others(model, fused=fused)
        if model.device.type == "cuda":
            stack.enter_context(torch.cuda.device(model.device))
        # tensors that are kept must not be those of somebody's inference mode
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if not served.is_fused:
            stack.enter_context(_attending(model))


@contextmanager
def _alone(lock: Any) -> Iterator[None]:
    if not lock.acquire(blocking=False):
        raise ValueError("another call of generate for this model has not returned")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _attending(model: Any) -> Iterator[None]:
    before = ModelState.of(model)
    try:
        model.eval()
        model.set_attn_implementation(INTERFACE)
        supply_mixers(model)
        yield
    finally:
        before.restore(model)


@dataclass(eq=False)
class Served:
    """What is kept for a model, not the model itself.

    Parameters
    ----------
    lock : Lock
        Held by the call that has the model.
    models : tuple or None
        The model as it was read, and what steps run: the same, or its fused form.
    fused : bool
        Whether a fused form was asked for.
    weights : tuple
        Of which these were made.
    engines : dict
        By settings, each with its draft.
    """

    lock: Any = field(default_factory=Lock)
    models: Models | None = None
    fused: bool = False
    weights: tuple[object, ...] = ()
    engines: dict[object, tuple[Engine, Any]] = field(default_factory=dict)

    @property
    def is_fused(self) -> bool:
        """Whether steps run a fused form."""
        return self.models is not None and isinstance(self.models[1], FusedTarget)

    def forget_others(self, model: Any, *, fused: bool) -> None:
        """Forget what is of other weights, or of another form."""
        if fused != self.fused or self.weights != self._weights_of(model):
            self.engines.clear()
            self.models, self.fused = None, fused

    def read(self, model: Any) -> Models:
        """Return the model as it is read, and what steps run.

        Raises
        ------
        ModelError
            If the model cannot be served.
        """
        if self.models is None:
            target = target_of(model)
            self.models = target, fused_or_own(target, model) if self.fused else target
            # of a fused form they lie elsewhere
            self.weights = self._weights_of(model)
        return self.models

    def _weights_of(self, model: Any) -> tuple[object, ...]:
        return weights_of(model, written=self.is_fused and has_copies(model.config))

    def engine(
        self,
        model: Any,
        drafting: Drafting,
        backend: str,
        rows: int,
        length: int,
        *,
        own: tuple[LogitsProcessor, ...] = (),
    ) -> Engine:
        """Return an engine for ``rows`` texts of ``length`` tokens.

        It is the one that such a call left, unless that is too small.

        Parameters
        ----------
        model : PreTrainedModel
            The target.
        drafting : Drafting
            What drafts, and the tree; the room is found here.
        backend : str
            As `specattn.choose_backend` takes it.
        rows, length : int
            Texts, and tokens of the longest, its prompt included.
        own : tuple of LogitsProcessor
            What the texts ask for beside the built-in processors.

        Raises
        ------
        ModelError
            If the model cannot be served, or there is no such draft for it.
        """
        spec, assistant = drafting.spec, None
        target, runs = self.read(model)
        if drafting.assistant is not None:
            with blaming_assistant(drafting.assistant, target.device):
                assistant = SERVED[drafting.assistant].read(drafting.assistant)
        key = (*drafting.key, backend, own)
        engine, head = self.engines.pop(key, (None, None))
        limit = max(target.max_context_len, length, spec.reserve_len)
        # two steps may be in flight
        context = min(length + 2 * spec.reserve_len, limit)
        sizes, have = (context, rows, _slots(spec, rows, context)), _room(engine)
        if engine is None or any(one < size for one, size in zip(have, sizes, strict=True)):
            head = drafting.load(target, assistant) if head is None else head
            while len(self.engines) >= _ENGINES_PER_MODEL:
                del self.engines[next(iter(self.engines))]
            context = min(max(power_of_2(context), _SHORTEST_CONTEXT), limit)
            sizes = context, power_of_2(rows), _slots(spec, rows, context)
            context, rows, slots = map(max, sizes, have)
            # its memory is free before the larger one is made
            engine = None
            engine = Engine(
                features_for(runs, head),
                head,
                replace(spec, max_context_len=context, max_num_reqs=rows),
                backend=backend,
                num_slots=slots,
                processors=own,
            )
        self.engines[key] = engine, head
        return engine


def _room(engine: Engine | None) -> tuple[int, int, int]:
    """Return an engine's context, rows and slots."""
    if engine is None:
        return 0, 0, 0
    config = engine.config
    slots = engine.table.num_pages * config.page_size
    return config.max_context_len, config.max_num_reqs, slots


def _slots(config: SpecConfig, rows: int, context: int) -> int:
    """Return the slots of texts in whole pages, padding included."""
    return (rows * -(-context // config.page_size) + 1) * config.page_size


#: What is kept between calls, by model.
SERVED: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()
