"""How SGLang's modules are read, once loaded.

Nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specattn.config import FLOAT8
from specattn.kernels.fused.fp8 import BLOCK
from specattn.models.fused.block import Feed, GatedFeed
from specattn.models.fused.family import activation_of
from specattn.models.fused.projection import Projection
from specattn.models.fused.readers import UnreadError
from specattn.models.fused.scaled import ScaledProjection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

#: Feed-forward parts that run as they are; they add up over ranks by themselves.
EXPERTS = ("Qwen3MoeSparseMoeBlock",)
#: Embeddings and output projections of which every rank has the whole.
WHOLE = ("Gemma3TextScaledWordEmbedding",)


def _plain(module: Any) -> Projection:
    return Projection(module.weight, getattr(module, "bias", None))


def _fp8(module: Any) -> Projection:
    """Read weights of an ``Fp8LinearMethod``: blocks, or a scale per row."""
    method = module.quant_method
    if method.use_marlin:
        raise UnreadError("FP8 weights in Marlin's order (SGLANG_FORCE_FP8_MARLIN)")
    if method.use_mxfp8:
        raise UnreadError("MXFP8 weights")
    if not method.block_quant:
        return _channels(module)
    config = method.quant_config
    if getattr(config, "scale_fmt", None) == "ue8m0":
        raise UnreadError("FP8 weights of ue8m0 activation scales")
    # newer releases change it as they load
    block = getattr(method, "weight_block_size", config.weight_block_size)
    return _blocks(module, module.weight_scale_inv, block)


def _compressed_tensors(module: Any) -> Projection:
    """Read weights of a ``CompressedTensorsLinearMethod``."""
    scheme = module.scheme
    if type(scheme).__name__ != "CompressedTensorsW8A8Fp8":
        raise UnreadError(f"weights of {type(scheme).__name__}")
    if scheme.weight_block_size is None:
        return _channels(module)
    return _blocks(module, module.weight_scale, scheme.weight_block_size)


def _blocks(module: Any, scale: Tensor, block: Any) -> Projection:
    """Read ``weight [N, K]`` with a scale per block."""
    if list(block) != [BLOCK, BLOCK]:
        raise UnreadError(f"FP8 weights in blocks {list(block)}, not [{BLOCK}, {BLOCK}]")
    if getattr(scale, "format_ue8m0", False):
        raise UnreadError("FP8 weights of ue8m0 scales")
    return _scaled(module, module.weight, scale, BLOCK)


def _channels(module: Any) -> Projection:
    """Read ``weight [K, N]`` with a scale per column."""
    # transposed as a view, so that this one is contiguous
    weight, scale = module.weight.t(), module.weight_scale
    if scale.numel() != len(weight):
        raise UnreadError(f"FP8 weights of {list(scale.shape)} scales, not one per row")
    return _scaled(module, weight, scale.reshape(-1, 1), 1)


def _scaled(module: Any, weight: Tensor, scale: Tensor, height: int) -> Projection:
    if getattr(module, "input_scale", None) is not None:
        raise UnreadError("FP8 weights of static activation scales")
    if weight.dtype != FLOAT8 or scale.dtype != torch.float32:
        found = f"{weight.dtype} with {scale.dtype} scales"
        raise UnreadError(f"weights of {found}, not {FLOAT8} with torch.float32")
    return ScaledProjection(
        weight, getattr(module, "bias", None), scale=scale.detach(), height=height
    )


#: The readers, by the class of what multiplies in SGLang.
READERS: Mapping[str, Callable[[Any], Projection]] = {
    "NoneType": _plain,
    "UnquantizedLinearMethod": _plain,
    "UnquantizedEmbeddingMethod": _plain,
    "Fp8LinearMethod": _fp8,
    "W8A8Fp8LinearMethod": _channels,
    "CompressedTensorsLinearMethod": _compressed_tensors,
}


def projection_of(module: Any) -> Projection:
    """Return what this rank holds of a module of SGLang's, not copied.

    Raises
    ------
    UnreadError
        If what multiplies there has no reader, or its reader does not know weights of this kind.
    """
    method = type(getattr(module, "quant_method", None)).__name__
    if getattr(module, "use_intel_amx_backend", False):
        raise UnreadError("weights in the order of a CPU's instructions")
    if method not in READERS:
        raise UnreadError(f"weights of {method}")
    return READERS[method](module)


def inner_of(model: Any) -> Any:
    """Return what has the layers of a model."""
    return getattr(model, "model", model)


@dataclass(frozen=True, eq=False)
class Experts:
    """A layer's experts, SGLang's own module, which adds up over ranks."""

    module: Any
    rows_format: None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Feed ``x [T, H]`` forward; returns ``parts [1, T, H]``."""
        found: Tensor = self.module(x)
        return found[None]


def feed_of(mlp: Any, config: Any) -> Feed:
    """Return a layer's feed-forward part."""
    if type(mlp).__name__ in EXPERTS:
        return Experts(mlp)
    return GatedFeed(
        gate_up=projection_of(mlp.gate_up_proj),
        down=summed(mlp.down_proj),
        activation=activation_of(config),
    )


def summed(module: Any) -> Projection:
    """Return the projection of ranks that share its columns."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce
    from sglang.srt.runtime_context import get_parallel

    whole = projection_of(module)
    if ranks() == 1:
        return whole
    # once in the sum
    bias = None if get_parallel().tp_rank else whole.bias
    return replace(whole, bias=bias, combine=tensor_model_parallel_all_reduce)


def ranks() -> int:
    """Return how many ranks share a model."""
    from sglang.srt.runtime_context import get_parallel

    size: int = get_parallel().tp_size
    return size


def embedding_of(module: Any) -> Any:
    """Return an embedding without rows that pad it.

    One that scales, and those of ranks, are SGLang's.
    """
    if ranks() > 1 or type(module).__name__ in WHOLE:
        return module
    return nn.Embedding.from_pretrained(module.weight[: module.num_embeddings])


def vocabulary_of(model: Any) -> Projection:
    """Return the output projection without the rows that pad it."""
    from sglang.srt.distributed import tensor_model_parallel_all_gather

    whole, size = projection_of(model.lm_head), model.logits_processor.vocab_size
    if ranks() > 1 and type(model.lm_head).__name__ not in WHOLE:
        return replace(whole, combine=tensor_model_parallel_all_gather, size=size)
    return whole.rows(0, size)


def odd_reasons(name: str, part: Any, *kinds: str) -> Iterator[str]:
    """Say what a module computes besides its product or norm, if anything."""
    kind = type(part).__name__
    if kind not in kinds:
        yield f"{name} is a {kind}"
    elif hasattr(part, "quant_method"):
        try:
            projection_of(part)
        except UnreadError as error:
            yield f"{name} has {error}"
    elif getattr(part, "variance_size_override", None) or getattr(part, "fp32_residual", False):
        yield f"{name} is no plain norm"
