"""A model as a target, and what is kept for it."""

from __future__ import annotations

import json
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.errors import ModelError
from specattn.models import (
    DFlashHead,
    Eagle3Head,
    EagleHead,
    FusedDFlash,
    FusedEagle3,
    HFTarget,
    load_draft,
)
from specattn.models.hub import PAIR
from specattn.models.interface import INTERFACE, ModelState
from specattn.models.probe import probe_layers
from specattn.speculative.proposer import Proposer, ProposerFactory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# drafts that read features of the target
_HEADS = EagleHead | Eagle3Head | FusedEagle3 | DFlashHead | FusedDFlash
# The last settings of a model (draft, tree, backend) for which pools and graphs are kept.
_ENGINES_PER_MODEL = 2
_SHORTEST_CONTEXT = 256


@contextmanager
def attending(model: Any) -> Iterator[None]:
    """Let a model attend through this library, in evaluation mode.

    Whatever ends the block, the model gets its attention and its mode back.
    """
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
    weights: list[tuple[int, torch.dtype]] = field(default_factory=list)
    engines: dict[object, tuple[Engine, Any]] = field(default_factory=dict)

    def engine(
        self, model: Any, draft: Any, spec: SpecConfig, backend: str, rows: int, length: int
    ) -> Engine:
        """Return an engine for ``rows`` texts of ``length`` tokens.

        It is the one that such a call left, unless that is too small.

        Parameters
        ----------
        model : PreTrainedModel
            The target.
        draft : str, PathLike, head or None
            As `generate` takes it.
        spec : SpecConfig
            The tree; the room is found here.
        backend : str
            As `specattn.choose_backend` takes it.
        rows, length : int
            Texts, and tokens of the longest, its prompt included.

        Raises
        ------
        ModelError
            If the model cannot be served, or there is no such draft for it.
        """
        weights = [
            (one.data_ptr(), one.dtype) for one in chain(model.parameters(), model.buffers())
        ]
        if self.target is None or weights != self.weights:
            self.engines.clear()
            layers = probe_layers(model, model.config.get_text_config(decoder=True))
            self.target = HFTarget(weakref.proxy(model), model.name_or_path, layers)
            self.weights = weights
        name = str(draft) if isinstance(draft, str | PathLike) else id(draft)
        engine, head = self.engines.pop((name, spec, backend), (None, None))
        limit = max(self.target.max_context_len, length, spec.reserve_len)
        # two steps may be in flight
        context = min(length + 2 * spec.reserve_len, limit)
        if engine is None or not _holds(engine, rows, context):
            head = _load(draft, self.target) if head is None else head
            while len(self.engines) >= _ENGINES_PER_MODEL:
                del self.engines[next(iter(self.engines))]
            context = min(max(_power_of_two(context), _SHORTEST_CONTEXT), limit)
            sizes = [context, _power_of_two(rows), _slots(spec, rows, context)]
            if engine is not None:
                old = engine.config, engine.table.num_pages * spec.page_size
                sizes = list(map(max, sizes, (old[0].max_context_len, old[0].max_num_reqs, old[1])))
            # its memory is free before the larger one is made
            engine = None
            engine = _engine(self.target, head, spec, backend, sizes)
        self.engines[name, spec, backend] = engine, head
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
    target: HFTarget, head: Any, spec: SpecConfig, backend: str, sizes: Sequence[int]
) -> Engine:
    """Build an engine of given context length, rows and slots."""
    context, rows, slots = sizes
    config = replace(spec, max_context_len=context, max_num_reqs=rows)
    if isinstance(head, _HEADS):
        target = target.with_features(head.features)
    return Engine(target, head, config, backend=backend, num_slots=slots)


def tree_of(draft: Any, spec: SpecConfig | None) -> SpecConfig:
    """Return the tree alone, with the default for other numbers.

    Raises
    ------
    ValueError
        If ``spec`` has steps and there is no ``draft``.
    """
    if spec is None:
        spec = SpecConfig() if draft is not None else SpecConfig().plain()
    if draft is None and spec.num_steps:
        raise ValueError(f"draft must be given with {spec.num_steps} num_steps in spec_config")
    default = SpecConfig()
    return replace(spec, max_context_len=default.max_context_len, max_num_reqs=default.max_num_reqs)


def _load(draft: Any, target: HFTarget) -> Any:
    """Return the draft head, or None.

    Raises
    ------
    ModelError
        If there is none, or it does not fit.
    """
    if draft is None or isinstance(draft, _HEADS | Proposer | ProposerFactory):
        return draft
    if not isinstance(draft, str | PathLike):
        raise ModelError("draft", f"draft must be a folder, a name or a loaded head, got {draft!r}")
    if draft != "shipped":
        return load_draft(Path(draft) if isinstance(draft, PathLike) else draft, target)
    known = json.loads((PAIR / "target" / "config.json").read_text())
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    if any(known[key] != getattr(target.config, key) for key in keys):
        raise ModelError("draft", "the shipped draft is for the shipped target, not for this model")
    return load_draft(PAIR / "draft", target)


#: What is kept between calls, by model.
SERVED: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()
