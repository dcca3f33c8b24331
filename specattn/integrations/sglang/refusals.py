"""What SGLang's modules compute that the fused forwards do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specattn.errors import UnsupportedError
from specattn.integrations.sglang.norms import norm_class, norms_in
from specattn.integrations.sglang.readers import EXPERTS, WHOLE, odd_reasons, projection_of, ranks
from specattn.integrations.sglang.rotations import rotary_of, rotation_reasons

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from specattn.config import AttnConfig
    from specattn.integrations.sglang.blocks import BlockHead
    from specattn.models.fused.family import Family


def refuse(model: Any, known: Mapping[str, Family], layers: Sequence[AttnConfig]) -> None:
    """Raise an UnsupportedError for a model that the kernels do not compute."""
    found = list(_kind_reasons(model, known))
    if not found:
        family = known[kind_of(model)]
        found = list(_model_reasons(model, len(layers), family))
        for part, geometry in zip(model.model.layers, layers, strict=False):
            found += _layer_reasons(part, geometry, model, family)
            found += _feed_reasons(part.mlp, family, model.config)
    if found:
        raise UnsupportedError("fused forwards over SGLang's weights", list(dict.fromkeys(found)))


def refuse_block_head(
    model: Any,
    target: Any,
    known: Mapping[str, Family],
    layers: Sequence[AttnConfig],
    settings: BlockHead,
) -> None:
    """Refuse a DFlash head that the kernels do not compute."""
    embed_tokens, found = target.get_input_embeddings(), list(_kind_reasons(model, known))
    if not found:
        family = known[kind_of(model)]
        for part, geometry in zip(model.layers, layers, strict=True):
            found += _layer_reasons(part, geometry, model, family)
            found += _feed_reasons(part.mlp, family, model.config)
        found += _end_reasons(embed_tokens, target.lm_head)
        for name in ("hidden_norm", "norm"):
            found += odd_reasons(name, getattr(model, name), "RMSNorm")
        found += _block_reasons(model, embed_tokens, layers, settings)
    if found:
        raise UnsupportedError("DFlash head over SGLang's weights", list(dict.fromkeys(found)))


def kind_of(model: Any) -> str:
    """Return the name of a class of SGLang's, by module."""
    return f"{type(model).__module__.removeprefix('sglang.srt.models.')}.{type(model).__name__}"


def _kind_reasons(model: Any, known: Mapping[str, Family]) -> Iterator[str]:
    """Say that a model's class is none of those that are known."""
    if kind_of(model) not in known:
        yield f"model {kind_of(model)} is not one of {', '.join(known)}"


def _end_reasons(embed_tokens: Any, lm_head: Any) -> Iterator[str]:
    """Say what embedding and output projection compute besides the kernels."""
    if type(embed_tokens).__name__ in WHOLE:
        # whose own output projection SGLang neither loads nor calls
        if lm_head is not embed_tokens:
            yield "lm_head is not the embedding"
        return
    yield from odd_reasons("embed_tokens", embed_tokens, "VocabParallelEmbedding")
    yield from odd_reasons("lm_head", lm_head, "ParallelLMHead", "VocabParallelEmbedding")
    if getattr(lm_head, "bias", None) is not None:
        yield "lm_head has a bias"


def _block_reasons(
    model: Any, embed_tokens: Any, layers: Sequence[AttnConfig], settings: BlockHead
) -> Iterator[str]:
    """Say what of a DFlash head fits no settings or target."""
    width, found = embed_tokens.embedding_dim, model.norm.weight.shape[0]
    if width != found:
        yield f"hidden states have {found} numbers, and the target's {width}"
    windows = tuple(layer.window_left for layer in layers)
    if windows != settings.windows:
        yield f"SGLang's layers have windows {windows}, and config.json means {settings.windows}"


def _model_reasons(model: Any, count: int, family: Family) -> Iterator[str]:
    """Say what a model computes outside its layers besides the kernels."""
    inner, logits = model.model, model.logits_processor
    yield from _end_reasons(inner.embed_tokens, model.lm_head)
    yield from odd_reasons("norm", inner.norm, norm_class(family)[0])
    if len(inner.layers) != count or (hasattr(inner, "fc") and count != 1):
        yield f"the model has {len(inner.layers)} layers, of which {count} attend"
    if not hasattr(inner, "fc") and any(not 0 <= at < count for at in inner.layers_to_capture):
        yield f"layers_to_capture must be 0..{count - 1}, got {inner.layers_to_capture}"
    if logits.logit_scale is not None or logits.final_logit_softcapping:
        yield "logits are scaled or capped"
    if logits.use_fp32_lm_head:
        yield "enable_fp32_lm_head"
    if hasattr(model.config, "scale_emb"):
        yield "embeddings are scaled (scale_emb)"


def _layer_reasons(part: Any, geometry: AttnConfig, model: Any, family: Family) -> Iterator[str]:
    """Say what a layer computes that the kernels do not."""
    attention = part.self_attn
    for name, norm in norms_in(part):
        yield from odd_reasons(name.rpartition(".")[2], norm, norm_class(family)[0])
    yield from odd_reasons("qkv_proj", attention.qkv_proj, "QKVParallelLinear")
    yield from odd_reasons("o_proj", attention.o_proj, "RowParallelLinear")
    yield from rotation_reasons(rotary_of(model, part), geometry)
    if geometry.num_qo_heads * ranks() != model.config.num_attention_heads:
        yield "heads are not this rank's share of the model's"


def _feed_reasons(mlp: Any, family: Family, config: Any) -> Iterator[str]:
    """Say what a feed-forward part computes that the kernels do not."""
    if family.experts and type(mlp).__name__ in EXPERTS:
        return
    if not hasattr(mlp, "gate_up_proj"):
        yield f"mlp is a {type(mlp).__name__}"
        return
    odd = [
        *odd_reasons("gate_up_proj", mlp.gate_up_proj, "MergedColumnParallelLinear"),
        *odd_reasons("down_proj", mlp.down_proj, "RowParallelLinear"),
    ]
    yield from odd
    columns = 0 if odd else projection_of(mlp.gate_up_proj).out_features * ranks()
    if not odd and columns != 2 * config.intermediate_size:
        yield "columns are not this rank's share of the model's"
