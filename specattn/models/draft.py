"""Builds a draft head from a checkpoint, for a target."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specattn.config import AttnConfig
from specattn.models.checkpoint import Checkpoint, read_checkpoint
from specattn.models.dflash import DFlashHead, DFlashSettings, DFlashWeights
from specattn.models.eagle import (
    EAGLE3_NORMS,
    Eagle3Head,
    Eagle3Weights,
    EagleHead,
    EagleWeights,
    HeadWeights,
)
from specattn.models.hf import FeatureSpec
from specattn.models.hub import blaming, count_from_first, first_line
from specattn.models.shards import is_sharded
from specattn.models.vocabulary import check_head_tokenizer, check_padding

if TYPE_CHECKING:
    from pathlib import Path

    from specattn.models.fused import FusedTarget
    from specattn.models.hf import HFTarget

    Target = HFTarget | FusedTarget

_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads")
_COUNTS = (
    *_REQUIRED,
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
)
_OPTIONAL = (
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
)


# So many target tokens, chosen for a draft, have two among them that are neighbours.
_FEW_TOKENS = 8


def load_draft(
    path_or_id: str | Path,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> EagleHead | Eagle3Head:
    """Load an EAGLE, EAGLE-2 or EAGLE-3 head for a target.

    The head reads the hidden states of its ``features``: run it with
    ``target.with_features(head.features)``.

    Parameters
    ----------
    path_or_id : str or Path
        A folder with ``config.json`` and weights, or the name of a repository on the Hub.
    target : HFTarget or FusedTarget
        The target model. A head without an embedding or output projection shares the target's.
    dtype, device : optional
        The dtype and device of the head; the target's if None.

    Raises
    ------
    ModelError
        If the checkpoint is broken, of another kind, or made for another target. The line names
        the file, the setting or the tensor; ``argument`` is "draft".
    """
    checkpoint = read_checkpoint(path_or_id)
    with blaming("draft", checkpoint.name):
        if checkpoint.kind == "dflash":
            raise checkpoint.wrong("is a DFlash head, no EAGLE head: load it by load_dflash")
        check_head_tokenizer(checkpoint.folder, checkpoint.name, target)
        build = _eagle3 if checkpoint.kind == "eagle3" else _eagle
        return build(checkpoint, target, dtype or target.dtype, device or target.device)


def _eagle(
    checkpoint: Checkpoint, target: Target, dtype: torch.dtype, device: torch.device | str
) -> EagleHead:
    config = _llama_config(checkpoint, target)
    if config.hidden_size != target.hidden_size:
        raise checkpoint.wrong(
            f"has hidden_size {config.hidden_size} in config.json, but EAGLE continues the "
            f"target's hidden states, which have {target.hidden_size}"
        )
    with torch.device("meta"):
        weights = EagleWeights(config, set(checkpoint.tensors))
    _fill(checkpoint, weights, dtype, device)
    ends = _ends(checkpoint, weights, target, config, None)
    rope, layer = _geometry(config, dtype, device)
    layers = (layer,) * config.num_hidden_layers
    features = FeatureSpec((len(target.layers),))
    return EagleHead(*ends, rope, layers, features, target.hidden_size, weights)


def _eagle3(
    checkpoint: Checkpoint, target: Target, dtype: torch.dtype, device: torch.device | str
) -> Eagle3Head:
    norms = {setting for setting in EAGLE3_NORMS if checkpoint.settings.get(setting)}
    if {"norm_before_fc", "fc_norm"} <= norms:
        raise checkpoint.wrong(
            "sets norm_before_fc and fc_norm in config.json, of which a head has one at most"
        )
    config = _llama_config(checkpoint, target)
    if config.num_hidden_layers != 1:
        raise checkpoint.wrong(
            f"has num_hidden_layers {config.num_hidden_layers} in config.json; "
            "an EAGLE-3 head has 1"
        )
    features = _features(checkpoint, len(target.layers))
    widths = [target.hidden_size] * len(features.hidden_states)
    mapped = _target_ids(checkpoint, config.vocab_size, target.vocab_size)
    draft_size = config.vocab_size if mapped is None else len(mapped)
    with torch.device("meta"):
        weights = Eagle3Weights(config, set(checkpoint.tensors), draft_size, widths, norms)
    _fill(checkpoint, weights, dtype, device)
    ends = _ends(checkpoint, weights, target, config, mapped)
    rope, layer = _geometry(config, dtype, device)
    target_ids = (torch.arange(ends[1].out_features) if mapped is None else mapped).to(device)
    return Eagle3Head(*ends, rope, (layer,), features, sum(widths), weights, target_ids)


def load_dflash(
    path_or_id: str | Path,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> DFlashHead:
    """Load a DFlash head for a target.

    The layout is z-lab's or that of vLLM's speculators. The head reads the hidden states of its
    ``features``: run the target with them.

    Parameters
    ----------
    path_or_id, target, dtype, device
        As in `load_draft`.

    Raises
    ------
    ModelError
        If the checkpoint is broken, of another kind, or made for another target. The line names
        the file, and the setting or the tensor; ``argument`` is "draft".
    """
    checkpoint = read_checkpoint(path_or_id)
    with blaming("draft", checkpoint.name):
        if checkpoint.kind != "dflash":
            raise checkpoint.wrong(
                "is no DFlash head: config.json has no dflash_config and no block_size; "
                "load an EAGLE head by load_draft, and a whole model by load_lm_draft"
            )
        check_head_tokenizer(checkpoint.folder, checkpoint.name, target)
        return _dflash(checkpoint, target, dtype or target.dtype, device or target.device)


def _dflash(
    checkpoint: Checkpoint, target: Target, dtype: torch.dtype, device: torch.device | str
) -> DFlashHead:
    config = _llama_config(checkpoint, target)
    own_embedding = "embed_tokens.weight" in checkpoint.tensors
    settings = DFlashSettings.of(
        checkpoint,
        config.num_hidden_layers,
        len(target.layers),
        config.vocab_size if own_embedding else target.vocab_size,
    )
    mapped = _target_ids(checkpoint, config.vocab_size, target.vocab_size)
    draft_size = config.vocab_size if mapped is None else len(mapped)
    feature_size = target.hidden_size * len(settings.features.hidden_states)
    with torch.device("meta"):
        weights = DFlashWeights(config, set(checkpoint.tensors), draft_size, feature_size)
    _fill(checkpoint, weights, dtype, device)
    ends = _ends(checkpoint, weights, target, config, mapped)
    rope, layer = _geometry(config, dtype, device)
    layers = tuple(replace(layer, window_left=window) for window in settings.windows)
    target_ids = None if mapped is None else mapped.to(device)
    return DFlashHead(
        *ends, rope, layers, settings.features, feature_size, weights, settings.block, target_ids
    )


def _llama_config(checkpoint: Checkpoint, target: Target) -> LlamaConfig:
    settings = checkpoint.settings
    for key in _REQUIRED:
        if settings.get(key) is None:
            raise checkpoint.wrong(f"has no {key} in config.json")
    for key in _COUNTS:
        count = settings.get(key)
        if count is not None and (type(count) is not int or count < 1):
            raise checkpoint.wrong(
                f"has {key} {count!r} in config.json; expected a whole number of at least 1"
            )
    act = settings.get("hidden_act")
    if act is not None and act not in ACT2FN:
        raise checkpoint.wrong(
            f"has hidden_act {act!r} in config.json, which transformers does not know"
        )
    vocab_size = settings.get("vocab_size") or target.vocab_size
    if vocab_size != target.vocab_size:
        check_padding(checkpoint.name, vocab_size, target)
    known = {key: settings[key] for key in _REQUIRED + _OPTIONAL if settings.get(key) is not None}
    try:
        config = LlamaConfig(**{"num_hidden_layers": 1} | known | {"vocab_size": vocab_size})
    # transformers checks settings with types of another library
    except Exception as error:
        raise checkpoint.wrong(
            f"has a config.json that transformers refuses: {first_line(error)}"
        ) from error
    rope = config.rope_parameters["rope_type"]
    if rope not in ("default", *ROPE_INIT_FUNCTIONS):
        raise checkpoint.wrong(
            f"asks for the rope type {rope!r} in config.json; known are default, "
            f"{', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    return config


def _features(checkpoint: Checkpoint, num_layers: int) -> FeatureSpec:
    """Return the states that an EAGLE-3 head reads, SGLang's by default."""
    if checkpoint.settings.get("use_aux_hidden_state") is False:
        return FeatureSpec((num_layers,))
    key = "eagle_aux_hidden_state_layer_ids"
    ids = checkpoint.settings.get(key)
    if ids is not None and (
        not isinstance(ids, list) or any(type(index) is not int for index in ids)
    ):
        raise checkpoint.wrong(
            f"has {key} {ids!r} in config.json; expected a list of whole numbers"
        )
    if not ids:
        entering = (2, num_layers // 2, num_layers - 3)
        return FeatureSpec(tuple(min(max(i, 0), num_layers - 1) for i in entering))
    # SGLang counts the states that leave a layer; vLLM, and so its speculators, those that enter.
    by_vllm = "speculators_model_type" in checkpoint.settings
    first, where = (0, "before") if by_vllm else (1, "after")
    entering = tuple(i + first for i in ids)
    # Transformers shows what leaves the last layer only after the final norm.
    if not all(first <= i < num_layers for i in entering):
        raise checkpoint.wrong(
            f"has {key} {ids} in config.json; the target can be read {where} the layers "
            f"0..{num_layers - 1 - first}"
        )
    return FeatureSpec(entering)


def _target_ids(checkpoint: Checkpoint, own_size: int, target_size: int) -> Tensor | None:
    """Return each draft token's target id, ``[Vd]``; d2t holds differences.

    None if the draft has the vocabulary of ``own_size`` tokens, as the target but for padding.
    """
    file, d2t = checkpoint.weights, checkpoint.tensors.get("d2t")
    stated = checkpoint.settings.get("draft_vocab_size")
    if d2t is None:
        if stated not in (None, own_size):
            raise checkpoint.wrong(
                f"has draft_vocab_size {stated} in config.json, and no tensor d2t in {file} that "
                f"maps these tokens to the target's {target_size}"
            )
        return None
    draft_size, vocab_size = stated or d2t.numel(), min(own_size, target_size)
    if d2t.shape != (draft_size,) or d2t.dtype not in (torch.int32, torch.int64):
        raise checkpoint.wrong(
            f"has a tensor d2t of {d2t.dtype} {list(d2t.shape)} in {file}; expected integers "
            f"[{draft_size}]"
        )
    d2t = d2t.long()
    ids = torch.arange(draft_size) + d2t
    if _holds_ids(d2t, ids, marked := _marked(checkpoint, len(ids))):
        raise checkpoint.wrong(
            f"has target ids in d2t in {file}; expected each one's difference to the draft's own id"
        )
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.numel():
        raise checkpoint.wrong(
            f"maps a draft token to {int(outside[0])} by d2t in {file}; the target has "
            f"{vocab_size} tokens"
        )
    if ids.unique().numel() != draft_size:
        raise checkpoint.wrong(f"maps two draft tokens to one target token by d2t in {file}")
    if marked is not None and not torch.equal(ids.sort().values, marked):
        raise checkpoint.wrong(f"has other target tokens in d2t than in t2d in {file}")
    return ids


def _marked(checkpoint: Checkpoint, count: int) -> Tensor | None:
    """Return the target ids that t2d marks, if they are ``count``."""
    mask = checkpoint.tensors.get("t2d")
    if mask is None or mask.dtype != torch.bool or int(mask.sum()) != count:
        return None
    return mask.flatten().nonzero()[:, 0]


def _holds_ids(d2t: Tensor, ids: Tensor, marked: Tensor | None) -> bool:
    """Return whether a d2t holds target ids, not differences.

    Read as differences, ids may stay in range. The mask t2d tells. Without one, sorted ids are
    known by rising with every token: differences that do so leave no two tokens neighbours.
    """
    if marked is None:
        return len(d2t) >= _FEW_TOKENS and bool((d2t.diff() > 0).all())
    by_id, by_difference = (torch.equal(one.sort().values, marked) for one in (d2t, ids))
    return by_id and not by_difference


def _fill(
    checkpoint: Checkpoint, weights: HeadWeights, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Fill a module with all weights of the checkpoint."""
    file = checkpoint.weights
    found = {key: one for key, one in checkpoint.tensors.items() if key not in ("d2t", "t2d")}
    # Any projection may have a bias, as those of heads for Qwen2 have.
    for name, part in weights.named_modules():
        if isinstance(part, nn.Linear) and f"{name}.bias" in found:
            part.bias = nn.Parameter(torch.empty(part.out_features, device="meta"))
    wanted = weights.state_dict()
    if missing := wanted.keys() - found.keys():
        raise checkpoint.wrong(f"lacks the tensor {count_from_first(missing)} in {file}")
    if unknown := found.keys() - wanted.keys():
        raise checkpoint.wrong(f"has an unknown tensor {count_from_first(unknown)} in {file}")
    for key, tensor in found.items():
        if tensor.shape != wanted[key].shape or not tensor.is_floating_point():
            raise checkpoint.wrong(
                f"has a tensor {key} of {tensor.dtype} {list(tensor.shape)} in {file}; expected "
                f"floating point {list(wanted[key].shape)}"
            )
    weights.load_state_dict(found, assign=True)
    weights.requires_grad_(False).eval().to(device=device, dtype=dtype)


def _ends(
    checkpoint: Checkpoint,
    weights: HeadWeights,
    target: Target,
    config: LlamaConfig,
    mapped: Tensor | None,
) -> tuple[nn.Embedding, nn.Linear]:
    """Return a head's embedding and output projection, or the target's.

    The embedding has every token of the target, and the projection none that the target, or the
    head, has not: those pad one of their vocabularies.
    """
    embed_tokens, lm_head = weights.embed_tokens, weights.lm_head
    size = config.hidden_size
    if embed_tokens is None:
        embed_tokens = target.embed_tokens
        if embed_tokens.embedding_dim != size:
            raise checkpoint.wrong(
                f"has no embed_tokens.weight in {checkpoint.weights}, and its hidden_size "
                f"{size} is not the target's {embed_tokens.embedding_dim}, so the two "
                "cannot share one"
            )
    elif config.vocab_size < target.vocab_size:
        embed_tokens = weights.embed_tokens = _lengthened(embed_tokens, target.vocab_size)
    count = min(config.vocab_size, target.vocab_size) if mapped is None else len(mapped)
    if lm_head is None:
        lm_head = target.lm_head
        if lm_head.in_features != size or (mapped is not None and count != target.vocab_size):
            raise checkpoint.wrong(
                f"has no lm_head.weight in {checkpoint.weights}, and the target's "
                f"{list(lm_head.weight.shape)} is not [{count}, {size}], so the "
                "two cannot share one"
            )
        # what is left of a shard would not be gathered
        if is_sharded(lm_head):
            return embed_tokens, lm_head
    return embed_tokens, _shortened(lm_head, count)


def _lengthened(embedding: nn.Embedding, count: int) -> nn.Embedding:
    """Return an embedding of ``count`` tokens, which repeats its last one."""
    missing = count - embedding.num_embeddings
    weight = torch.cat([embedding.weight, embedding.weight[-1:].expand(missing, -1)])
    longer: nn.Embedding = nn.Embedding.from_pretrained(weight)
    return longer


def _shortened(linear: nn.Linear, count: int) -> nn.Linear:
    """Return a projection to the first ``count`` tokens, over the same weights."""
    if linear.out_features == count:
        return linear
    first = nn.Linear(linear.in_features, count, bias=False, device="meta")
    first.weight = nn.Parameter(linear.weight[:count], requires_grad=False)
    if linear.bias is not None:
        first.bias = nn.Parameter(linear.bias[:count], requires_grad=False)
    return first


def _geometry(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device | str
) -> tuple[LlamaRotaryEmbedding, AttnConfig]:
    layer = AttnConfig(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, dtype=dtype
    )
    return LlamaRotaryEmbedding(config).to(device), layer
