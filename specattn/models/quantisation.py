"""Quantise transformers' models, and read those that are quantised."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specattn.errors import ModelError
from specattn.models.fused.readers import CutError, UnreadError, check_blocks, projection_of
from specattn.models.fused.scaled import (
    FORMATS,
    ScaledLinear,
    ScaledProjection,
    quantise,
)
from specattn.models.scales import unread_blocks
from specattn.models.shards import is_sharded

if TYPE_CHECKING:
    from collections.abc import Iterator

# modules that choose experts, by the end of their names: what they choose is to stay
_ROUTERS = ("gate", "router")
# settings of models with experts, whose FP8 weights transformers' kernels alone multiply
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_format(argument: str, kind: str | None) -> None:
    """Refuse a way to quantise that is not known.

    Raises
    ------
    ValueError
        If it is none of `FORMATS`.
    """
    if kind is not None and kind not in FORMATS:
        raise ValueError(f"{argument} must be {', '.join(FORMATS)} or None, got {kind!r}")


@torch.no_grad()
def quantise_model(model: nn.Module, kind: str) -> None:
    """Quantise a model's weights in place: it is another model then.

    Each `nn.Linear` becomes a `ScaledLinear`, but for the output projection and what chooses
    experts. Embeddings, norms and experts keep their weights. Of a model that has FP8 weights,
    plain ones were left so, and stay.

    Parameters
    ----------
    model : PreTrainedModel
        A model of transformers, of plain weights or of FP8 weights that `read_quantised` has read.
    kind : str
        ``"fp8"``: weights in blocks of 128 x 128, rows by a scale per 128 columns.
        ``"fp8-channel"``: a scale per row of both. ``"fp8-weights"``: weights alone, in blocks; of
        FP8 weights the ones that are there.

    Raises
    ------
    ModelError
        If the model has no such module, or is quantised in another way; if ranks share a weight in
        a way that is not served, or one has a part of a block. ``argument`` is "quantization".
    ValueError
        If ``kind`` is none of these.
    """
    check_format("quantization", kind)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    parts = [(name, part) for name, part in model.named_modules() if not name.endswith(_ROUTERS)]
    found = [one for one in parts if isinstance(one[1], ScaledLinear)]
    found = found or [one for one in parts if type(one[1]) is nn.Linear and one[1] is not head]
    if not found:
        raise ModelError("quantization", "the model has no nn.Linear to quantise")
    for name, part in found:
        model.set_submodule(name, ScaledLinear(_quantised(model, name, part, kind), part.weight))


def _quantised(model: nn.Module, name: str, part: Any, kind: str) -> ScaledProjection:
    if not _is_shared_so(model, name, part):
        raise ModelError("quantization", f"{name} is shared by ranks in a way of its own")
    try:
        if kind != "fp8-channel":
            check_blocks(part.weight)
        return quantise(projection_of(part), kind)
    except ValueError as error:
        why = f"{kind!r} is not how {name} is quantised already"
        raise ModelError("quantization", why) from error
    except CutError as error:
        raise ModelError("quantization", f"{name} is {error}") from error


def read_quantised(model: nn.Module) -> None:
    """Replace transformers' FP8 modules by `ScaledLinear`.

    It multiplies where theirs do not: without kernels from the Hub, and on a CPU. Those whose
    weights are not read stay as they are.

    Raises
    ------
    ModelError
        If ranks share weights so that one has a part of a block: no module multiplies these.
        ``argument`` is "target".
    """
    for name, part in list(model.named_modules()):
        try:
            found = _read(part)
        except CutError as error:
            raise ModelError("target", f"{name} is {error}") from error
        if found is not None and _is_shared_so(model, name, part):
            model.set_submodule(name, ScaledLinear(found, part.weight))


def _is_shared_so(model: Any, name: str, part: nn.Module) -> bool:
    """Return whether a `ScaledLinear` does what ranks do."""
    plan = model.tp_plan if is_sharded(part) else {}
    return not plan or plan.get(re.sub(r"\d+", "*", name)) in ("colwise", "rowwise")


def prepare(model: nn.Module) -> None:
    """Try out the kernels of a model's float8 products, before any capture."""
    for part in model.modules():
        if isinstance(part, ScaledLinear):
            part.projection.prepare()


def _read(part: nn.Module) -> ScaledProjection | None:
    """Return the numbers of an FP8 module of transformers."""
    if isinstance(part, ScaledLinear):
        return None
    try:
        found = projection_of(part)
    except CutError:
        raise
    except UnreadError:
        return None
    return found if isinstance(found, ScaledProjection) else None


@contextmanager
def keeping_fp8(config: Any) -> Iterator[None]:
    """Let transformers keep FP8 weights where it sees no GPU.

    It would dequantise them, since its own modules do not run there.
    """
    stated = getattr(config, "quantization_config", None) or {}
    text = config.get_text_config(decoder=True)
    known = stated.get("quant_method") == "fp8" and not stated.get("dequantize")
    read = (
        known
        and not unread_blocks(stated)
        and not any(getattr(text, key, None) for key in _EXPERTS)
    )
    if not read or torch.cuda.is_available():
        yield
        return
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    before = FineGrainedFP8HfQuantizer.validate_environment
    FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None
    try:
        yield
    finally:
        FineGrainedFP8HfQuantizer.validate_environment = before
