"""A model as a target, and what is kept for it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from specattn.engine.engine import Engine
from specattn.integrations.transformers.drafting import features_for, target_of, weights_of
from specattn.kernels.launch import power_of_2
from specattn.models.interface import INTERFACE, ModelState
from specattn.models.mixers import supply_mixers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specattn.config import SpecConfig
    from specattn.integrations.transformers.drafting import Drafting
    from specattn.models import HFTarget
    from specattn.speculative.sampling.logits_processor import LogitsProcessor

# The last settings of a model for which pools and graphs are kept.
_ENGINES_PER_MODEL = 2
_SHORTEST_CONTEXT = 256


@contextmanager
def borrowed(*models: Any) -> Iterator[None]:
    """Keep models from other calls, and let them attend through this library.

    They are in evaluation mode. Whatever ends the block, each gets its attention and its mode back.

    Raises
    ------
    ValueError
        If another call has one of them.
    """
    with ExitStack() as stack:
        _borrow(stack, models)
        yield


# a function: an interrupt in a loop of the `with` itself may go past the stack
def _borrow(stack: ExitStack, models: Sequence[Any]) -> None:
    for model in dict.fromkeys(models):
        stack.enter_context(_alone(SERVED.setdefault(model, Served()).lock))
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
    place = torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()
    try:
        model.eval()
        model.set_attn_implementation(INTERFACE)
        supply_mixers(model)
        # tensors that are kept must not be those of somebody's inference mode
        with place, torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        before.restore(model)


@dataclass(eq=False)
class Served:
    """What is kept for a model, not the model itself."""

    lock: Any = field(default_factory=Lock)
    target: HFTarget | None = None
    weights: tuple[tuple[int, torch.dtype], ...] = ()
    engines: dict[object, tuple[Engine, Any]] = field(default_factory=dict)

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
        weights, spec = weights_of(model), drafting.spec
        if self.target is None or weights != self.weights:
            self.engines.clear()
            self.target, self.weights = target_of(model), weights
        key = (*drafting.key, backend, own)
        engine, head = self.engines.pop(key, (None, None))
        limit = max(self.target.max_context_len, length, spec.reserve_len)
        # two steps may be in flight
        context = min(length + 2 * spec.reserve_len, limit)
        sizes, have = (context, rows, _slots(spec, rows, context)), _room(engine)
        if engine is None or any(one < size for one, size in zip(have, sizes, strict=True)):
            head = drafting.load(self.target, model) if head is None else head
            while len(self.engines) >= _ENGINES_PER_MODEL:
                del self.engines[next(iter(self.engines))]
            context = min(max(power_of_2(context), _SHORTEST_CONTEXT), limit)
            sizes = context, power_of_2(rows), _slots(spec, rows, context)
            context, rows, slots = map(max, sizes, have)
            # its memory is free before the larger one is made
            engine = None
            engine = Engine(
                features_for(self.target, head),
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
