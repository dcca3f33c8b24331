"""Fused forwards over the weights of SGLang's modules.

Nothing is copied, but sums that norms multiply by, and heads that are quantised. SGLang keeps
queries, keys and values in one matrix, gates and what they gate in another, and the cosines and
sines of every position in a table, all in the kernels' order. Of several ranks each has its own
heads and columns, and sums and gathers by SGLang's collectives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from specattn.errors import UnsupportedError
from specattn.integrations.sglang.norms import Norms, norm_class, norms_in
from specattn.integrations.sglang.readers import (
    embedding_of,
    feed_of,
    inner_of,
    projection_of,
    summed,
    vocabulary_of,
)
from specattn.integrations.sglang.refusals import kind_of, refuse, refuse_block_head
from specattn.integrations.sglang.rotations import rotary_of, table_of
from specattn.integrations.sglang.weights import Weights
from specattn.models import DFlashHead, Eagle3Head, FusedTarget
from specattn.models.fused.block import Block, GatedFeed, RotaryTable, norms_of
from specattn.models.fused.family import FAMILIES
from specattn.models.fused.projection import Projection
from specattn.models.fused.scaled import ScaledProjection, quantise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

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
    refuse(model, TARGETS, layers)
    inner, norms = model.model, Norms(TARGETS[kind_of(model)], Weights.of(model))
    captured = sorted(set(inner.layers_to_capture)) if model.capture_aux_hidden_states else []
    target = FusedTarget(
        embed_tokens=embedding_of(inner.embed_tokens),
        lm_head=vocabulary_of(model),
        blocks=_blocks(model, layers, norms),
        norm=norms.of(inner.norm),
        max_context_len=max_context_len,
        eos_token_ids=eos_token_ids,
        features=tuple(captured) or (len(layers),),
    )
    target.lm_head.prepare()
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
    refuse(model, HEADS, layers)
    inner, weights = model.model, Weights.of(model)
    (layer,) = inner.layers
    width = inner.fc.in_features
    # SGLang's head neither norms nor mixes what has its own width
    mixes = width != len(layer.hidden_norm.weight)
    whole = getattr(inner, "input_norm", None)
    norms = (inner.fc_norm or ()) if whole is None else (whole,)
    head = Eagle3Head(
        embed_tokens=embedding_of(inner.embed_tokens),
        lm_head=vocabulary_of(model),
        blocks=_blocks(model, layers, Norms(HEADS[kind_of(model)], weights)),
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
        head = _quantised(head, weights, quantization, shared=shared)
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
    refuse_block_head(model, target, BLOCK_HEADS, layers, settings)
    fc = Projection(model.fc.weight, model.fc.bias)
    head = DFlashHead(
        embed_tokens=embedding_of(target.get_input_embeddings()),
        lm_head=vocabulary_of(target),
        blocks=_blocks(model, layers, Norms(BLOCK_HEADS[kind_of(model)], Weights.of(model))),
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


def _quantised(head: Eagle3Head, weights: Weights, kind: str, *, shared: bool) -> Eagle3Head:
    """Quantise a head's own weights; a shared output projection stays."""
    (block,) = head.blocks
    assert isinstance(block.feed, GatedFeed)
    copied = partial(_copied, weights, kind)
    try:
        gate_up, down, qkv, o = map(
            copied, (block.feed.gate_up, block.feed.down, block.qkv, block.o)
        )
        fc = head.fc and copied(head.fc)
        lm_head = head.lm_head if shared else copied(head.lm_head)
    except ValueError as error:
        raise UnsupportedError("fused forwards over SGLang's weights", [str(error)]) from error
    feed = replace(block.feed, gate_up=gate_up, down=down)
    block = replace(block, qkv=qkv, o=o, feed=feed)
    block.prepare()
    return replace(head, blocks=(block,), fc=fc, lm_head=lm_head)


def _copied(weights: Weights, kind: str, one: Projection) -> ScaledProjection:
    """Quantise a projection, whose numbers then follow SGLang's."""
    found = quantise(one, kind)

    def again() -> tuple[Tensor, Tensor]:
        made = quantise(one, kind)
        return made.weight, made.scale

    # the numbers of one that is quantised stay
    if not isinstance(one, ScaledProjection):
        weights.keep(again, (found.weight, found.scale))
    return found


def _blocks(model: Any, layers: Sequence[AttnConfig], norms: Norms) -> tuple[Block, ...]:
    """Return the weights of decoder layers; of no projection a copy."""
    tables: dict[int, RotaryTable] = {}
    found = []
    for part, geometry in zip(inner_of(model).layers, layers, strict=True):
        attention, rotary = part.self_attn, rotary_of(model, part)
        block = Block(
            geometry=geometry,
            # layers share a module, and so what is made of its table
            rotary=tables.setdefault(id(rotary), table_of(rotary)),
            eps=getattr(part.input_layernorm, norm_class(norms.family)[1]),
            qkv=projection_of(attention.qkv_proj),
            o=summed(attention.o_proj),
            feed=feed_of(part.mlp, model.config),
            **norms_of({name: norms.of(one) for name, one in norms_in(part)}, norms.family),
        )
        block.prepare()
        found.append(block)
    return tuple(found)
