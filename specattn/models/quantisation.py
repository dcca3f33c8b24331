"""Quantise transformers' models, and read those that are quantised."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specattn.errors import ModelError
from specattn.models.fused.readers import UnreadError, projection_of
from specattn.models.fused.scaled import (
    FORMATS,
    ScaledLinear,
    ScaledProjection,
    as_weights_alone,
    quantise,
)

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
        If the model has no such module, or is quantised in another way. ``argument`` is
        "quantization".
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
        model.set_submodule(name, ScaledLinear(_quantised(name, part, kind)))


def _quantised(name: str, part: nn.Module, kind: str) -> ScaledProjection:
    before = projection_of(part)
    if not isinstance(before, ScaledProjection):
        return quantise(before, kind)
    if kind == "fp8-weights":
        return as_weights_alone(before)
    by_channel = before.scale.shape[1] == 1 and before.height == 1
    if before.terms == 1 and (kind == "fp8-channel") == by_channel:
        return before
    raise ModelError("quantization", f"{kind!r} is not how {name} is quantised already")


def read_quantised(model: nn.Module) -> None:
    """Replace transformers' FP8 modules by `ScaledLinear`.

    It multiplies where theirs do not: without kernels from the Hub, and on a CPU. Those whose
    weights are not read stay as they are.
    """
    for name, part in list(model.named_modules()):
        found = _read(part)
        if found is not None:
            model.set_submodule(name, ScaledLinear(found))


def prepare(model: nn.Module) -> None:
    """Try out the kernels of a model's float8 products, before any capture."""
    for part in model.modules():
        if isinstance(part, ScaledLinear):
            part.projection.prepare()


def _read(part: nn.Module) -> ScaledProjection | None:
    """Return the numbers of an FP8 module of transformers."""
    if isinstance(part, ScaledLinear):
        return None
    with suppress(UnreadError):
        found = projection_of(part)
        return found if isinstance(found, ScaledProjection) else None
    return None


@contextmanager
def keeping_fp8(config: Any) -> Iterator[None]:
    """Let transformers keep FP8 weights where it sees no GPU.

    It would dequantise them, since its own modules do not run there.
    """
    stated = getattr(config, "quantization_config", None) or {}
    text = config.get_text_config(decoder=True)
    known = stated.get("quant_method") == "fp8" and not stated.get("dequantize")
    read = known and _is_read(stated) and not any(getattr(text, key, None) for key in _EXPERTS)
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


def _is_read(stated: dict[str, Any]) -> bool:
    """Whether modules of these settings are read."""
    return (
        stated.get("activation_scheme", "dynamic") == "dynamic"
        and list(stated.get("weight_block_size") or ()) == [128, 128]
        and stated.get("scale_fmt", "float") == "float"
    )
