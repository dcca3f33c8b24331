"""Fused forwards over the weights of SGLang's modules.

Nothing is copied, but sums that norms multiply by. SGLang keeps queries, keys and values in one
matrix, gates and what they gate in another, and the cosines and sines of every position in a table,
all in the kernels' order. Of several ranks each has its own heads and columns, and sums and gathers
by SGLang's collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from specattn.errors import UnsupportedError
from specattn.integrations.sglang.readers import projection_of
from specattn.models import DFlashHead, Eagle3Head, FusedTarget
from specattn.models.fused.block import Block, Feed, GatedFeed, RotaryTable, norms_of
from specattn.models.fused.family import FAMILIES, Family, activation_of
from specattn.models.fused.projection import Projection
from specattn.models.fused.readers import UnreadError
from specattn.models.fused.scaled import quantise
from specattn.models.hf import rescaling_length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from specattn.config import AttnConfig
    from specattn.integrations.sglang.blocks import BlockHead

#: The families of SGLang's classes, by module. One that derives from them may compute something
#: else.
TARGETS = {
    "llama.LlamaForCausalLM": FAMILIES["llama"],
    "mistral.MistralForCausalLM": FAMILIES["mistral"],
    "qwen2.Qwen2ForCausalLM": FAMILIES["qwen2"],
    "qwen3.Qwen3ForCausalLM": FAMILIES["qwen3"],
    "qwen3_moe.Qwen3MoeForCausalLM": FAMILIES["qwen3_moe"],
    "gemma3_causal.Gemma3ForCausalLM": FAMILIES["gemma3_text"],
}
HEADS = {"llama_eagle3.LlamaForCausalLMEagle3": FAMILIES["llama"]}
BLOCK_HEADS = {"dflash.DFlashDraftModel": FAMILIES["qwen3"]}
#: Feed-forward parts that run as they are; they add up over ranks by themselves.
EXPERTS = ("Qwen3MoeSparseMoeBlock",)
#: Embeddings and output projections of which every rank has the whole.
WHOLE = ("Gemma3TextScaledWordEmbedding",)
#: The rotation that a Gemma 3 computes for its layers of a kind.
COMPUTED = "Gemma3RotaryEmbedding"
#: Rotations whose angles depend on the position alone.
ROTATIONS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)


@dataclass(frozen=True, eq=False)
class Experts:
    """A layer's experts, SGLang's own module, which adds up over ranks."""

    module: Any
    rows_format: None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Feed ``x [T, H]`` forward; returns ``parts [1, T, H]``."""
        found: Tensor = self.module(x)
        return found[None]


@dataclass(frozen=True, eq=False)
class SGLangAngles(RotaryTable):
    """The rotation angles that SGLang has computed.

    SGLang makes the table longer than any context that it serves. Later positions, of padding,
    count as the last one.
    """

    @cached_property
    def rows(self) -> Tensor:
        """``[L, D]`` float32: on CUDA, SGLang's own table."""
        return self.rotary.get_buffer("cos_sin_cache").float()

    def of_length(self, length: int) -> SGLangAngles:
        """Return the table itself."""
        return self


@dataclass(frozen=True, eq=False)
class Norms:
    """What norms multiply by: SGLang's weights, or sums of them."""

    family: Family
    sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def of(self, norm: Any) -> Tensor:
        """Return what a norm of SGLang's multiplies by."""
        weight: Tensor = norm.weight.detach()
        found = self.family.norm(weight)
        if found is not weight:
            self.sums.append((found, weight))
        return found

    def follow(self, model: Any) -> None:
        """Have sums follow the weights that SGLang loads later."""
        load = model.load_weights

        def load_weights(*args: Any, **options: Any) -> Any:
            loaded = load(*args, **options)
            for found, weight in self.sums:
                found.copy_(self.family.norm(weight))
            return loaded

        if self.sums:
            model.load_weights = load_weights


def fused_target(
    model: Any,
    layers: Sequence[AttnConfig],
    *,
    max_context_len: int,
    eos_token_ids: frozenset[int] = frozenset(),
) -> FusedTarget:
    """Fuse SGLang's target over SGLang's own weights.

    Its features are the hidden states that SGLang would capture for its draft: those that enter
    ``layers_to_capture``, side by side, or the final norm.

    Parameters
    ----------
    model : nn.Module
        SGLang's, with its weights loaded.
    layers : sequence of AttnConfig
        The attention geometry of every layer.
    max_context_len : int
        Tokens up to which positions mean what they did in training.
    eos_token_ids : frozenset of int
        Tokens that end a text.

    Raises
    ------
    UnsupportedError
        With all that the fused path does not compute.
    """
    _refuse(model, TARGETS, layers)
    inner, norms = model.model, Norms(TARGETS[_kind(model)])
    captured = sorted(set(inner.layers_to_capture)) if model.capture_aux_hidden_states else []
    target = FusedTarget(
        embed_tokens=_embedding(inner.embed_tokens),
        lm_head=_vocabulary(model),
        blocks=_blocks(model, layers, norms),
        norm=norms.of(inner.norm),
        max_context_len=max_context_len,
        eos_token_ids=eos_token_ids,
        features=tuple(captured) or (len(layers),),
    )
    target.lm_head.prepare()
    norms.follow(model)
    return target


def fused_head(
    model: Any,
    layers: Sequence[AttnConfig],
    *,
    target_ids: Tensor | None = None,
    quantization: str | None = None,
) -> Eagle3Head:
    """Fuse SGLang's EAGLE-3 head over SGLang's own weights.

    Parameters
    ----------
    model : nn.Module
        SGLang's, with its own embedding and output projection or the target's.
    layers : sequence of AttnConfig
        The attention geometry of its one layer.
    target_ids : Tensor, optional
        ``[Vd]`` int64, SGLang's ``hot_token_id``: the target token id of each draft token id; None
        if both are the same.
    quantization : str, optional
        How to quantise the head's own weights, one of `FORMATS`; these are copies then.

    Raises
    ------
    UnsupportedError
        With all that the fused path does not compute; if the weights are quantised in another way.
    """
    _refuse(model, HEADS, layers)
    inner = model.model
    (layer,) = inner.layers
    width = inner.fc.in_features
    # SGLang's head neither norms nor mixes what has its own width
    mixes = width != len(layer.hidden_norm.weight)
    whole = getattr(inner, "input_norm", None)
    norms = (inner.fc_norm or ()) if whole is None else (whole,)
    head = Eagle3Head(
        embed_tokens=_embedding(inner.embed_tokens),
        lm_head=_vocabulary(model),
        blocks=_blocks(model, layers, Norms(HEADS[_kind(model)])),
        fc=Projection(inner.fc.weight, inner.fc.bias) if mixes else None,
        # its target says which hidden states these are
        features=(),
        feature_size=width,
        target_ids=target_ids,
        hidden_norm=layer.hidden_norm.weight,
        norm=inner.norm.weight,
        feature_norms=tuple(norm.weight for norm in norms) if mixes else (),
        norm_output=inner.norm_output,
    )
    if quantization is not None:
        shared = model.load_lm_head_from_target or model.lm_head is inner.embed_tokens
        head = _quantised(head, quantization, shared=shared)
    for part in (head.fc, head.lm_head):
        if part is not None:
            part.prepare()
    return head


def fused_block_head(
    model: Any, target: Any, layers: Sequence[AttnConfig], settings: BlockHead
) -> DFlashHead:
    """Fuse SGLang's DFlash head over SGLang's own weights.

    Parameters
    ----------
    model : nn.Module
        SGLang's, with its weights loaded.
    target : nn.Module
        SGLang's target, whose embedding and output projection the head shares.
    layers : sequence of AttnConfig
        The attention geometry of every layer.
    settings : BlockHead
        What the head's settings say.

    Raises
    ------
    UnsupportedError
        With all that the fused path does not compute.
    """
    embed_tokens = target.get_input_embeddings()
    found, family = list(_kind_reasons(model, BLOCK_HEADS)), FAMILIES["qwen3"]
    if not found:
        for part, geometry in zip(model.layers, layers, strict=True):
            found += _layer_reasons(part, geometry, model, family)
            found += _feed_reasons(part.mlp, family, model.config)
        found += _end_reasons(embed_tokens, target.lm_head)
        for name in ("hidden_norm", "norm"):
            found += _odd(name, getattr(model, name), "RMSNorm")
        found += _block_reasons(model, embed_tokens, layers, settings)
    if found:
        raise UnsupportedError("DFlash head over SGLang's weights", list(dict.fromkeys(found)))
    fc = Projection(model.fc.weight, model.fc.bias)
    head = DFlashHead(
        embed_tokens=_embedding(embed_tokens),
        lm_head=_vocabulary(target),
        blocks=_blocks(model, layers, Norms(family)),
        fc=fc,
        # its target says which hidden states these are
        features=(),
        feature_size=model.fc.in_features,
        logit_scale=settings.logit_scale,
        block=settings.block,
        hidden_norm=model.hidden_norm.weight,
        norm=model.norm.weight,
    )
    for part in (fc, head.lm_head):
        part.prepare()
    return head


def _quantised(head: Eagle3Head, kind: str, *, shared: bool) -> Eagle3Head:
    """Quantise a head's own weights; a shared output projection stays."""
    (block,) = head.blocks
    assert isinstance(block.feed, GatedFeed)
    try:
        gate_up, down, qkv, o = (
            quantise(one, kind) for one in (block.feed.gate_up, block.feed.down, block.qkv, block.o)
        )
        fc = head.fc and quantise(head.fc, kind)
        lm_head = head.lm_head if shared else quantise(head.lm_head, kind)
    except ValueError as error:
        raise UnsupportedError("fused forwards over SGLang's weights", [str(error)]) from error
    feed = replace(block.feed, gate_up=gate_up, down=down)
    block = replace(block, qkv=qkv, o=o, feed=feed)
    block.prepare()
    return replace(head, blocks=(block,), fc=fc, lm_head=lm_head)


def _blocks(model: Any, layers: Sequence[AttnConfig], norms: Norms) -> tuple[Block, ...]:
    """Return the weights of decoder layers; of no projection a copy."""
    tables: dict[int, RotaryTable] = {}
    found = []
    for part, geometry in zip(_inner(model).layers, layers, strict=True):
        attention, rotary = part.self_attn, _rotary(model, part)
        block = Block(
            geometry=geometry,
            # layers share a module, and so what is made of its table
            rotary=tables.setdefault(id(rotary), _table(rotary)),
            eps=getattr(part.input_layernorm, _norm_class(norms.family)[1]),
            qkv=projection_of(attention.qkv_proj),
            o=_summed(attention.o_proj),
            feed=_feed(part.mlp, model.config),
            **norms_of({name: norms.of(one) for name, one in _norms(part)}, norms.family),
        )
        block.prepare()
        found.append(block)
    return tuple(found)


def _inner(model: Any) -> Any:
    """Return what has the layers of a model."""
    return getattr(model, "model", model)


def _rotary(model: Any, part: Any) -> Any:
    """Return the module that rotates a layer's heads."""
    inner = _inner(model)
    # besides these, a Gemma 3's layers have modules that know no scaling
    if hasattr(inner, "rotary_emb_local"):
        return inner.rotary_emb_local if part.is_sliding else inner.rotary_emb
    return part.self_attn.rotary_emb


def _table(rotary: Any) -> RotaryTable:
    """Return a module's angles."""
    if type(rotary).__name__ == COMPUTED:
        return RotaryTable(rotary, rotary.max_seq_len_cached)
    return SGLangAngles(rotary, len(rotary.cos_sin_cache))


def _norms(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the norms of a layer, by name."""
    yield from ((name, one) for name, one in part.named_modules() if name.endswith("norm"))


def _norm_class(family: Family) -> tuple[str, str]:
    """Return SGLang's class of norms, and its name of their epsilon."""
    if family.norm_offset:
        return "Gemma3RMSNorm", "eps"
    return "RMSNorm", "variance_epsilon"


def _feed(mlp: Any, config: Any) -> Feed:
    """Return a layer's feed-forward part."""
    if type(mlp).__name__ in EXPERTS:
        return Experts(mlp)
    return GatedFeed(
        gate_up=projection_of(mlp.gate_up_proj),
        down=_summed(mlp.down_proj),
        activation=activation_of(config),
    )


def _summed(module: Any) -> Projection:
    """Return the projection of ranks that share its columns."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce
    from sglang.srt.runtime_context import get_parallel

    whole = projection_of(module)
    if _ranks() == 1:
        return whole
    # once in the sum
    bias = None if get_parallel().tp_rank else whole.bias
    return replace(whole, bias=bias, combine=tensor_model_parallel_all_reduce)


def _ranks() -> int:
    """Return how many ranks share a model."""
    from sglang.srt.runtime_context import get_parallel

    size: int = get_parallel().tp_size
    return size


def _embedding(module: Any) -> Any:
    """Return an embedding without rows that pad it.

    One that scales, and those of ranks, are SGLang's.
    """
    if _ranks() > 1 or type(module).__name__ in WHOLE:
        return module
    return nn.Embedding.from_pretrained(module.weight[: module.num_embeddings])


def _vocabulary(model: Any) -> Projection:
    """Return the output projection without the rows that pad it."""
    from sglang.srt.distributed import tensor_model_parallel_all_gather

    whole, size = projection_of(model.lm_head), model.logits_processor.vocab_size
    if _ranks() > 1 and type(model.lm_head).__name__ not in WHOLE:
        return replace(whole, combine=tensor_model_parallel_all_gather, size=size)
    return whole.rows(0, size)


def _refuse(model: Any, known: Mapping[str, Family], layers: Sequence[AttnConfig]) -> None:
    """Raise an UnsupportedError for a model that the kernels do not compute."""
    found = list(_kind_reasons(model, known))
    if not found:
        family = known[_kind(model)]
        found = list(_model_reasons(model, len(layers), family))
        for part, geometry in zip(model.model.layers, layers, strict=False):
            found += _layer_reasons(part, geometry, model, family)
            found += _feed_reasons(part.mlp, family, model.config)
    if found:
        raise UnsupportedError("fused forwards over SGLang's weights", list(dict.fromkeys(found)))


def _kind(model: Any) -> str:
    """Return the name of a class of SGLang's, by module."""
    return f"{type(model).__module__.removeprefix('sglang.srt.models.')}.{type(model).__name__}"


def _kind_reasons(model: Any, known: Mapping[str, Family]) -> Iterator[str]:
    """Say that a model's class is none of those that are known."""
    if _kind(model) not in known:
        yield f"model {_kind(model)} is not one of {', '.join(known)}"


def _end_reasons(embed_tokens: Any, lm_head: Any) -> Iterator[str]:
    """Say what embedding and output projection compute besides the kernels."""
    if type(embed_tokens).__name__ in WHOLE:
        # whose own output projection SGLang neither loads nor calls
        if lm_head is not embed_tokens:
            yield "lm_head is not the embedding"
        return
    yield from _odd("embed_tokens", embed_tokens, "VocabParallelEmbedding")
    yield from _odd("lm_head", lm_head, "ParallelLMHead", "VocabParallelEmbedding")
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
    yield from _odd("norm", inner.norm, _norm_class(family)[0])
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
    for name, norm in _norms(part):
        yield from _odd(name.rpartition(".")[2], norm, _norm_class(family)[0])
    yield from _odd("qkv_proj", attention.qkv_proj, "QKVParallelLinear")
    yield from _odd("o_proj", attention.o_proj, "RowParallelLinear")
    yield from _rotation_reasons(_rotary(model, part), geometry)
    if geometry.num_qo_heads * _ranks() != model.config.num_attention_heads:
        yield "heads are not this rank's share of the model's"


def _rotation_reasons(rotary: Any, geometry: AttnConfig) -> Iterator[str]:
    """Say where a rotation is not that of a head's halves."""
    halves = True
    if type(rotary).__name__ == COMPUTED:
        _, kind = rescaling_length(rotary.config)
        if kind:
            yield f"rotary_emb rotates by length ({kind})"
        turned = 2 * len(rotary.inv_freq)
    else:
        yield from _odd("rotary_emb", rotary, *ROTATIONS)
        halves, turned = rotary.is_neox_style, rotary.rotary_dim
    if not halves or turned != geometry.head_dim:
        yield "the rotation is not that of two halves of a head"


def _feed_reasons(mlp: Any, family: Family, config: Any) -> Iterator[str]:
    """Say what a feed-forward part computes that the kernels do not."""
    if family.experts and type(mlp).__name__ in EXPERTS:
        return
    if not hasattr(mlp, "gate_up_proj"):
        yield f"mlp is a {type(mlp).__name__}"
        return
    odd = [
        *_odd("gate_up_proj", mlp.gate_up_proj, "MergedColumnParallelLinear"),
        *_odd("down_proj", mlp.down_proj, "RowParallelLinear"),
    ]
    yield from odd
    columns = 0 if odd else projection_of(mlp.gate_up_proj).out_features * _ranks()
    if not odd and columns != 2 * config.intermediate_size:
        yield "columns are not this rank's share of the model's"


def _odd(name: str, part: Any, *kinds: str) -> Iterator[str]:
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
