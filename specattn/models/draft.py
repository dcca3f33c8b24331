"""Builds a draft head from a checkpoint, for a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specattn.models.builder import HeadBuilder
from specattn.models.checkpoint import Checkpoint, read_checkpoint
from specattn.models.dflash import DFlashHead, DFlashSettings
from specattn.models.eagle import EAGLE3_NORMS, Eagle3Head, EagleHead
from specattn.models.hub import blaming, first_line
from specattn.models.vocabulary import check_head_tokenizer, check_padding

if TYPE_CHECKING:
    from pathlib import Path

    from specattn.models.builder import Shapes, Target

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
    head = HeadBuilder(checkpoint, target, _llama_config(checkpoint, target), None, dtype, device)
    size, depth = head.config.hidden_size, head.config.num_hidden_layers
    if size != target.hidden_size:
        raise checkpoint.wrong(
            f"has hidden_size {size} in config.json, but EAGLE continues the "
            f"target's hidden states, which have {target.hidden_size}"
        )
    names = [f"layers.{layer}." for layer in range(depth)]
    normed = tuple(f"{name}input_layernorm.weight" in checkpoint.tensors for name in names)
    shapes: Shapes = {"fc.weight": (size, 2 * size)}
    for name, has_norm in zip(names, normed, strict=True):
        shapes |= head.layer_shapes(name, size, input_norm=has_norm)
    weights = head.read(shapes)
    return EagleHead(
        **head.ends(weights),
        blocks=head.blocks(weights, names),
        features=(len(target.layers),),
        feature_size=size,
        normed=normed,
    )


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
    size, width, count = config.hidden_size, target.hidden_size, len(features)
    mapped = _target_ids(checkpoint, config.vocab_size, target.vocab_size)
    head = HeadBuilder(checkpoint, target, config, mapped, dtype, device)
    feature_norms: Shapes = {}
    if "norm_before_fc" in norms:
        feature_norms = {"input_norm.weight": (count * width,)}
    elif "fc_norm" in norms:
        feature_norms = {f"fc_norm.{at}.weight": (width,) for at in range(count)}
    shapes = feature_norms | {"norm.weight": (size,), "midlayer.hidden_norm.weight": (size,)}
    head_norms = "midlayer.self_attn.q_norm.weight" in checkpoint.tensors
    shapes |= head.layer_shapes("midlayer.", 2 * size, head_norms=head_norms)
    # A head that reads one hidden state of its own size has nothing to mix.
    if "fc.weight" in checkpoint.tensors or count * width != size:
        shapes |= {"fc.weight": (size, count * width)}
    weights = head.read(shapes)
    return Eagle3Head(
        **head.ends(weights),
        blocks=head.blocks(weights, ["midlayer."]),
        features=features,
        feature_size=count * width,
        hidden_norm=weights["midlayer.hidden_norm.weight"],
        norm=weights["norm.weight"],
        feature_norms=tuple(weights[name] for name in feature_norms),
        norm_before_residual="norm_before_residual" in norms,
        norm_output="norm_output" in norms,
    )


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
    head = HeadBuilder(checkpoint, target, config, mapped, dtype, device)
    size, width = config.hidden_size, target.hidden_size * len(settings.features)
    names = [f"layers.{layer}." for layer in range(config.num_hidden_layers)]
    shapes: Shapes = {"fc.weight": (size, width)}
    shapes |= {"hidden_norm.weight": (size,), "norm.weight": (size,)}
    for name in names:
        shapes |= head.layer_shapes(name, size, head_norms=True)
    weights = head.read(shapes)
    return DFlashHead(
        **head.ends(weights),
        blocks=head.blocks(weights, names, settings.windows),
        features=settings.features,
        feature_size=width,
        block=settings.block,
        hidden_norm=weights["hidden_norm.weight"],
        norm=weights["norm.weight"],
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


def _features(checkpoint: Checkpoint, num_layers: int) -> tuple[int, ...]:
    """Return the states that an EAGLE-3 head reads, SGLang's by default."""
    if checkpoint.settings.get("use_aux_hidden_state") is False:
        return (num_layers,)
    key = "eagle_aux_hidden_state_layer_ids"
    if not (ids := checkpoint.numbers(key)):
        usual = (2, num_layers // 2, num_layers - 3)
        return tuple(min(max(i, 0), num_layers - 1) for i in usual)
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
    return entering


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
