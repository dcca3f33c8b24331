"""A model as a target, and what is kept for it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from specattn.engine.engine import Engine
from specattn.integrations.transformers.drafting import features_for, weights_of
from specattn.models import HFTarget
from specattn.models.interface import INTERFACE, ModelState
from specattn.models.probe import probe_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specattn.config import SpecConfig
    from specattn.integrations.transformers.drafting import Drafting
    from specattn.speculative.logits_processor import LogitsProcessor

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
            layers = probe_layers(model)
            self.target = HFTarget(weakref.proxy(model), model.name_or_path, layers)
            self.weights = weights
        key = (*drafting.key, backend, own)
        engine, head = self.engines.pop(key, (None, None))
        limit = max(self.target.max_context_len, length, spec.reserve_len)
        # two steps may be in flight
        context = min(length + 2 * spec.reserve_len, limit)
        if engine is None or not _holds(engine, rows, context):
            head = drafting.load(self.target, model) if head is None else head
            while len(self.engines) >= _ENGINES_PER_MODEL:
                del self.engines[next(iter(self.engines))]
            context = min(max(_power_of_two(context), _SHORTEST_CONTEXT), limit)
            sizes = [context, _power_of_two(rows), _slots(spec, rows, context)]
            if engine is not None:
                old = engine.config, engine.table.num_pages * spec.page_size
                sizes = list(map(max, sizes, (old[0].max_context_len, old[0].max_num_reqs, old[1])))
            # its memory is free before the larger one is made
            engine = None
            engine = _engine(self.target, head, spec, backend, sizes, own)
        self.engines[key] = engine, head
        return engine


def _holds(engine: Engine, rows: int, context: int) -> bool:
    """Whether an engine has room for so many texts."""
    config, slots = engine.config, engine.table.num_pages * engine.config.page_size
    if rows > config.max_num_reqs or context > config.max_context_len:
        return False
    return _slots(config, rows, context) <= slots


def _slots(config: SpecConfig, rows: int, context: int) -> int:
    """Return the slots of texts in whole pages, padding included."""
    return (rows * -(-context // config.page_size) + 1) * config.page_size


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _engine(
    target: HFTarget,
    head: Any,
    spec: SpecConfig,
    backend: str,
    sizes: Sequence[int],
    own: tuple[LogitsProcessor, ...],
) -> Engine:
    """Build an engine of given context length, rows and slots."""
    context, rows, slots = sizes
    config = replace(spec, max_context_len=context, max_num_reqs=rows)
    return Engine(
        features_for(target, head), head, config, backend=backend, num_slots=slots, processors=own
    )


#: What is kept between calls, by model.
SERVED: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()
