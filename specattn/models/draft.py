"""Loads drafts for a target: heads of a checkpoint, and whole models."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from specattn.autocast import without_autocast
from specattn.config import AttnConfig
from specattn.errors import ModelError
from specattn.models.builder import HeadBuilder
from specattn.models.checkpoint import Checkpoint
from specattn.models.dflash import DFlashHead, read_block, read_states
from specattn.models.eagle import Eagle3Head, EagleHead
from specattn.models.head_settings import (
    EAGLE3_IDS,
    EAGLE3_NORMS,
    check_settings,
    named,
    read_windows,
)
from specattn.models.hf import HFTarget
from specattn.models.hub import blaming
from specattn.models.mtp_builder import MtpBuilder
from specattn.models.mtp_checkpoint import MtpCheckpoint, is_mtp
from specattn.models.probe import RecurrentModelError
from specattn.models.quantisation import check_format
from specattn.models.vocabulary import (
    check_head_tokenizer,
    check_padding,
    check_vocabulary,
    vocabulary,
)
from specattn.speculative.model import check_model
from specattn.speculative.proposers.standalone import LMDraft

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from specattn.models.builder import Shapes, Target
    from specattn.models.eagle import DraftHead
    from specattn.models.mtp import MtpHead

log = logging.getLogger(__name__)

#: What a target is, in a refusal of something else.
_TARGET = "what HFTarget.from_pretrained, HFTarget.from_model or fuse returns"


def load_draft(
    path_or_id: str | Path,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    quantization: str | None = None,
) -> EagleHead | Eagle3Head | MtpHead:
    """Load an EAGLE head for a target, or its own MTP layer.

    The head is of EAGLE, EAGLE-2 or EAGLE-3.

    The head reads the hidden states of its ``features``: run it with
    ``target.with_features(head.features)``.

    Parameters
    ----------
    path_or_id : str or Path
        A folder with ``config.json`` and weights, the name of a repository on the Hub,
        ``smollm2-135m``: the head for SmolLM2-135M-Instruct that comes with the package, or
        ``mtp``: the first MTP layer in the target's own checkpoint, applied again for every token.
    target : HFTarget or FusedTarget
        The target model. A head without an embedding or output projection shares the target's.
    dtype, device : optional
        The dtype and device of the head; the target's if None.
    quantization : str, optional
        How to quantise the head's own weights, as in `HFTarget.from_pretrained`. The texts do not
        depend on it.

    Raises
    ------
    ModelError
        If the checkpoint is broken, of another kind, or made for another target. The line names
        the file, the setting or the tensor; ``argument`` is "draft".
    ValueError
        If ``target`` is none, such as a model of transformers itself; if ``quantization`` is none
        of the known ways.
    """
    if is_mtp(path_or_id):
        return _mtp(target, dtype=dtype, device=device, quantization=quantization)
    builds = {"eagle": _eagle, "eagle3": _eagle3}
    head: EagleHead | Eagle3Head = _load(
        path_or_id, target, builds, dtype=dtype, device=device, quantization=quantization
    )
    return head


def load_dflash(
    path_or_id: str | Path,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    quantization: str | None = None,
) -> DFlashHead:
    """Load a DFlash head for a target.

    The layout is z-lab's or that of vLLM's speculators. The head reads the hidden states of its
    ``features``: run the target with them.

    Parameters
    ----------
    path_or_id, target, dtype, device, quantization
        As in `load_draft`.

    Raises
    ------
    ModelError
        If the checkpoint is broken, of another kind, or made for another target. The line names
        the file, and the setting or the tensor; ``argument`` is "draft".
    ValueError
        As `load_draft`.
    """
    builds = {"dflash": _dflash}
    head: DFlashHead = _load(
        path_or_id, target, builds, dtype=dtype, device=device, quantization=quantization
    )
    return head


def load_lm_draft(
    path_or_id: str | Path,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    quantization: str | None = None,
) -> LMDraft:
    """Load a causal LM of Hugging Face as a target's draft.

    Parameters
    ----------
    path_or_id : str or Path
        As in `HFTarget.from_pretrained`: a folder, a GGUF file, or the name of a model on the Hub.
    target : HFTarget or FusedTarget
        The target model. It need not give any features.
    dtype, device : optional
        The dtype and device of the draft; the target's if None.
    quantization : str, optional
        As in `HFTarget.from_pretrained`.

    Raises
    ------
    ModelError
        As `HFTarget.from_pretrained`. If draft and target have other tokenizers, or, where one of
        them has none, vocabularies that differ by more than padding. ``argument`` is "draft".
    ValueError
        As `load_draft`.
    """
    check_model("target", target, _TARGET)
    try:
        model = HFTarget.from_pretrained(
            path_or_id,
            dtype=dtype or target.dtype,
            device=device or target.device,
            quantization=quantization,
        )
    except RecurrentModelError as error:
        raise recurrent(str(path_or_id)) from error
    except ModelError as error:
        raise ModelError("draft", str(error)) from error
    return lm_draft(model, target)


def lm_draft(model: HFTarget, target: Target) -> LMDraft:
    """Let a loaded model draft for a target.

    Parameters
    ----------
    model : HFTarget
        The draft's model. It need not give any features.
    target : HFTarget or FusedTarget
        The target.

    Raises
    ------
    ModelError
        As `load_lm_draft` for what does not fit.
    """
    found, wanted = vocabulary(model), vocabulary(target)
    name = model.name or f"the draft ({model.config.model_type})"
    if not all(isinstance(layer, AttnConfig) for layer in model.layers):
        raise recurrent(name)
    if found is not None and wanted is not None:
        check_vocabulary(name, found, wanted, "its tokenizer")
    elif model.vocab_size != target.vocab_size:
        check_padding(name, model.vocab_size, target)
    return LMDraft(model, target.vocab_size)


def recurrent(name: str) -> ModelError:
    """Return the error of a draft whose steps nothing takes back."""
    why = "has layers with recurrent states, which go on by what is kept alone: it cannot draft"
    return ModelError("draft", f"{name} {why}")


@without_autocast
def _load(
    path_or_id: str | Path,
    target: Target,
    builds: Mapping[str, Callable[[HeadBuilder], DraftHead]],
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    quantization: str | None,
) -> Any:
    """Load a head of a kind that ``builds`` has."""
    check_model("target", target, _TARGET)
    check_format("quantization", quantization)
    checkpoint = Checkpoint.of(path_or_id)
    with blaming("draft", checkpoint.name):
        if (build := builds.get(checkpoint.kind)) is None:
            raise checkpoint.wrong(
                "is a DFlash head, no EAGLE head: load it by load_dflash"
                if checkpoint.kind == "dflash"
                else "is no DFlash head: config.json has no dflash_config and no block_size; "
                "load an EAGLE head by load_draft, and a whole model by load_lm_draft"
            )
        check_settings(checkpoint)
        check_head_tokenizer(checkpoint.folder, checkpoint.name, target)
        dtype, device = dtype or target.dtype, device or target.device
        return build(HeadBuilder(checkpoint, target, dtype, device, quantization))


@without_autocast
def _mtp(
    target: Target,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    quantization: str | None,
) -> MtpHead:
    """Load a target's own MTP layer."""
    check_model("target", target, _TARGET)
    check_format("quantization", quantization)
    dtype, device = dtype or target.dtype, device or target.device
    checkpoint = MtpCheckpoint.of_target(target, dtype)
    with blaming("draft", checkpoint.name):
        return MtpBuilder(checkpoint, target, dtype, device, quantization).head()


def _eagle(head: HeadBuilder) -> EagleHead:
    checkpoint, target = head.checkpoint, head.target
    if "fc.weight" not in checkpoint.tensors:
        raise checkpoint.wrong(
            f"is no EAGLE head: it has no tensor fc.weight in {checkpoint.weights}, as a whole "
            "model or a Medusa head; give a head that was trained for this target, and load a "
            "whole model by load_lm_draft"
        )
    size, depth = head.config.hidden_size, head.config.num_hidden_layers
    if size != target.hidden_size:
        raise checkpoint.wrong_setting(
            "hidden_size",
            f", but EAGLE continues the target's hidden states, which have {target.hidden_size}",
        )
    names = [f"layers.{layer}." for layer in range(depth)]
    normed = tuple(f"{name}input_layernorm.weight" in checkpoint.tensors for name in names)
    shapes: Shapes = {"fc.weight": (size, 2 * size)}
    for name, has_norm in zip(names, normed, strict=True):
        shapes |= head.layer_shapes(name, size, input_norm=has_norm)
    weights = head.read(shapes)
    return EagleHead(
        **head.parts(weights, names, (len(target.layers),), _windows(head)),
        normed=normed,
    )


def _eagle3(head: HeadBuilder) -> Eagle3Head:
    checkpoint, config = head.checkpoint, head.config
    norms = {setting for setting in EAGLE3_NORMS if checkpoint.settings.get(setting)}
    if {"norm_before_fc", "fc_norm"} <= norms:
        raise checkpoint.wrong(
            "sets norm_before_fc and fc_norm in config.json, of which a head has one at most"
        )
    if config.num_hidden_layers != 1:
        raise checkpoint.wrong_setting("num_hidden_layers", "; an EAGLE-3 head has 1")
    if checkpoint.by_speculators and "norm_before_residual" not in checkpoint.settings:
        log.warning(
            "%s has no norm_before_residual in config.json: taken for false, as in speculators; "
            "vLLM takes it for true",
            checkpoint.name,
        )
    features = _features(checkpoint, len(head.target.layers))
    size, width, count = config.hidden_size, head.target.hidden_size, len(features)
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
        **head.parts(weights, ["midlayer."], features, _windows(head)),
        hidden_norm=weights["midlayer.hidden_norm.weight"],
        norm=weights["norm.weight"],
        feature_norms=tuple(weights[name] for name in feature_norms),
        norm_before_residual="norm_before_residual" in norms,
        norm_output="norm_output" in norms,
    )


def _dflash(head: HeadBuilder) -> DFlashHead:
    checkpoint, config, target = head.checkpoint, head.config, head.target
    own_embedding = "embed_tokens.weight" in checkpoint.tensors
    vocab_size = config.vocab_size if own_embedding else target.vocab_size
    block, windows = read_block(checkpoint, config.num_hidden_layers, vocab_size)
    features = read_states(checkpoint, len(target.layers))
    size, width = config.hidden_size, target.hidden_size * len(features)
    names = [f"layers.{layer}." for layer in range(config.num_hidden_layers)]
    shapes: Shapes = {"fc.weight": (size, width)}
    shapes |= {"hidden_norm.weight": (size,), "norm.weight": (size,)}
    for name in names:
        shapes |= head.layer_shapes(name, size, head_norms=True)
    weights = head.read(shapes)
    return DFlashHead(
        **head.parts(weights, names, features, windows),
        block=block,
        hidden_norm=weights["hidden_norm.weight"],
        norm=weights["norm.weight"],
    )


def _features(checkpoint: Checkpoint, num_layers: int) -> tuple[int, ...]:
    """Return the states that an EAGLE-3 head reads, SGLang's by default."""
    if checkpoint.settings.get("use_aux_hidden_state") is False:
        return (num_layers,)
    if (key := named(checkpoint, *EAGLE3_IDS)) is None:
        usual = (2, num_layers // 2, num_layers - 3)
        states = tuple(min(max(i, 0), num_layers - 1) for i in usual)
        log.warning(
            "%s has no %s in config.json: it reads the states that enter layers %s, as most heads",
            checkpoint.name,
            EAGLE3_IDS[0],
            states,
        )
        return states
    # Transformers shows what leaves the last layer only after the final norm.
    states = checkpoint.states(key, num_layers - (not checkpoint.by_speculators))
    log.info(
        "%s has %s %s in config.json, which engines read in several ways: here as the states that "
        "%s these layers",
        checkpoint.name,
        key,
        checkpoint.settings[key],
        "enter" if checkpoint.by_speculators else "leave",
    )
    return states


def _windows(head: HeadBuilder) -> tuple[int, ...]:
    """Return ``AttnConfig.window_left`` of an EAGLE head's layers."""
    widths = read_windows(head.checkpoint, head.config.num_hidden_layers)
    return tuple(width - 1 for width in widths)
