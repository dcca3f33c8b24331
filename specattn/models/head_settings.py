"""What ``config.json`` of a draft head may say besides sizes.

A setting is obeyed, refused by name, or known to change nothing. Others are logged.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from transformers import LlamaConfig

if TYPE_CHECKING:
    from specattn.models.checkpoint import Checkpoint

log = logging.getLogger(__name__)

_KINDS = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "dflash": "DFlash"}
# What changes the result of a head and is not computed here, with the value that changes nothing.
_UNSERVED: dict[str, Any] = {
    "activation_limit": None,
    "add_swa_attention_sink_bias": False,
    "additional_fc": False,
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "attn_logit_softcapping": 0,
    "clip_qkv": None,
    "conv_kernel_size": 0,
    "dim_model_base": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": 0,
    "logits_scaling": 1.0,
    "output_multiplier": 1.0,
    "parallel_draft_step": 1,
    "parallel_drafting": False,
    "projector_type": "dflash",
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "rope_local_base_freq": None,
    "scale_depth": None,
    "scale_emb": 1,
    "selector_rank": 0,
    "shift_label": False,
    "swiglu_limit": None,
    "use_gemma_norm": False,
}
# The names of a rope's pairs, and the value for dimensions i and i + D / 2.
_PAIRS = {
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "rope_interleave": False,
    "rope_interleaved": False,
}
_ROPES = ("rope_parameters", "rope_scaling")
#: The states that an EAGLE-3 head reads, by the names that checkpoints give them.
EAGLE3_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "layer_ids")
#: Settings of vLLM's speculators for norms that the paper's EAGLE-3 head has not: the norm of the
#: hidden state before the residual stream begins, of all features side by side or of each one
#: before they are mixed, and of the hidden state that the next draft step continues.
EAGLE3_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_READ = {
    "eagle": (),
    "eagle3": (*EAGLE3_IDS, *EAGLE3_NORMS, "use_aux_hidden_state"),
    "dflash": (
        *("aux_hidden_state_layer_ids", "layer_ids", "target_layer_ids", "num_target_layers"),
        *("block_size", "mask_token_id", "sample_from_anchor"),
        *("causal", "is_causal", "sliding_window_non_causal"),
    ),
}
# What all kinds read, and what the tensors tell or only training reads.
_KNOWN = frozenset(
    (
        *LlamaConfig().to_dict(),
        *("draft_vocab_size", "logit_scale", "quantization_config"),
        *("layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
        *("swa_window_size", "use_swa"),
        *("partial_rotary_factor", "rotary_pct", "rope_scaling", "rope_theta", *_PAIRS),
        *("eagle_config", "dflash_config", "transformer_layer_config", "speculators_config"),
        *("speculators_model_type", "speculators_version", "auto_map", "inference_type"),
        *("target_hidden_size", "target_model_type", "target_vocab_size", "num_target_layers"),
        *("embed_requires_grad", "enable_sp_ulysses", "reuse_target_lm_head"),
        *("has_lm_head", "num_aux_hidden_states", "parallel_draft_heads_num_layers"),
        *("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm"),
        *("auf", "emb_dim", "gru_hidden_dim", "lambda_base_decay_ratio", "lambda_base_start"),
        *("pure_draft_prefix_len", "selector_top_k", "conv_group_size"),
        *("bias", "qkv_bias", "experts_per_token", "num_local_experts", "torch_dtype"),
        *("name_or_path", "_attn_implementation", "_attn_implementation_autoset"),
    )
)
_KNOWN_ROPE = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"),
        *("original_max_position_embeddings", "attention_factor", "long_factor", "short_factor"),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
        # of images; all the positions of a text are the same
        *("mrope_section", "mrope_interleaved"),
    )
)


def check_settings(checkpoint: Checkpoint) -> None:
    """Refuse what no head here computes, and log what is not known.

    Raises
    ------
    ModelError
        For a setting of ``config.json`` that would change what the head computes.
    """
    settings, kind = checkpoint.settings, checkpoint.kind
    unserved = _UNSERVED if kind == "dflash" else _UNSERVED | {"causal": True, "is_causal": True}
    for key, plain in unserved.items():
        if settings.get(key) not in (None, plain):
            raise checkpoint.wrong_setting(key, f", which no {_KINDS[kind]} head here has")
    unknown = settings.keys() - _KNOWN - unserved.keys() - set(_READ[kind])
    for key in _ROPES:
        rope = settings.get(key)
        if not isinstance(rope, dict):
            continue
        if any(isinstance(part, dict) for part in rope.values()):
            raise checkpoint.wrong_setting(key, "; expected one rope for all layers")
        unknown |= {f"{key}.{name}" for name in rope.keys() - _KNOWN_ROPE}
    if unknown:
        log.warning(
            "%s has settings in config.json that nothing here reads: %s",
            checkpoint.name,
            ", ".join(sorted(unknown)),
        )


def named(checkpoint: Checkpoint, *keys: str) -> str | None:
    """Return the first of a setting's names that ``config.json`` uses.

    Raises
    ------
    ModelError
        If two of the names have different values.
    """
    settings = checkpoint.settings
    found = [key for key in keys if settings.get(key) not in (None, [])]
    for other in found[1:]:
        if settings[other] != settings[found[0]]:
            why = f", and {found[0]} {settings[found[0]]!r}, which mean the same"
            raise checkpoint.wrong_setting(other, why)
    return found[0] if found else None


def read_windows(checkpoint: Checkpoint, layers: int) -> tuple[int, ...]:
    """Return how many tokens each layer sees, itself included; 0 for all.

    ``use_swa`` gives every layer a window. Without it ``layer_types`` tells which layers have one,
    and where that is missing, the rule of Qwen: those from ``max_window_layers`` on, unless
    ``use_sliding_window`` is false.

    Raises
    ------
    ModelError
        For settings that are wrong or contradict each other.
    """
    settings = checkpoint.settings
    types = settings.get("layer_types") or []
    known = ("full_attention", "sliding_attention")
    fits = isinstance(types, list) and len(types) in (0, layers)
    if not fits or any(kind not in known for kind in types):
        raise checkpoint.wrong_setting(
            "layer_types", f"; expected {layers} of {' and '.join(known)}"
        )
    width = "sliding_window"
    if settings.get("use_swa"):
        width = named(checkpoint, "swa_window_size", width) or width
        sliding = [True] * layers
    elif types:
        sliding = [kind == "sliding_attention" for kind in types]
    elif settings.get(width) is None or settings.get("use_sliding_window") is False:
        sliding = [False] * layers
    else:
        sliding = _from_some_layer(checkpoint, layers)
    window = checkpoint.number(width, 1, 2**31 - 1) if any(sliding) else 0
    return tuple(window if has_one else 0 for has_one in sliding)


def _from_some_layer(checkpoint: Checkpoint, layers: int) -> list[bool]:
    """Return which layers have a window where no ``layer_types`` tells."""
    stated = [checkpoint.settings.get(k) for k in ("max_window_layers", "use_sliding_window")]
    first = 0 if stated[0] is None else checkpoint.number("max_window_layers", 0)
    if None in stated:
        log.warning(
            "%s has sliding_window in config.json, but no layer_types: taken for layers from %d on",
            checkpoint.name,
            first,
        )
    return [layer >= first for layer in range(layers)]


def read_rotated(checkpoint: Checkpoint, rope: dict[str, Any], head_dim: int) -> list[int] | None:
    """Return the dimensions of a head that are rotated, by pairs.

    Pair i is dimensions ``[i]`` and ``[i + n / 2]`` of the ``n`` that are returned. None means
    what rotations are made for: all of them, in order.

    Parameters
    ----------
    checkpoint : Checkpoint
        The head's.
    rope : dict
        transformers' rope parameters.
    head_dim : int
        D, the dimensions of a head.

    Raises
    ------
    ModelError
        For settings that are wrong or contradict each other.
    """
    settings = checkpoint.settings
    stated = {key: settings[key] for key in _PAIRS if settings.get(key) is not None}
    halves = {value == _PAIRS[key] for key, value in stated.items()}
    if len(halves) > 1 or not all(isinstance(value, bool) for value in stated.values()):
        raise checkpoint.wrong(f"says in several ways how its rope pairs dimensions: {stated}")
    share, count = rope.get("partial_rotary_factor", 1.0), head_dim
    # this type computes its own share
    if share is not None and rope["rope_type"] != "proportional":
        count = int(head_dim * share) if isinstance(share, int | float) else 0
    if not 0 < count <= head_dim or count % 2:
        raise checkpoint.wrong(
            f"has partial_rotary_factor {share!r} in config.json; expected a share of head_dim "
            f"{head_dim} that is an even number of dimensions"
        )
    dims = list(range(count))
    if halves == {False}:
        dims = dims[::2] + dims[1::2]
    return None if dims == list(range(head_dim)) else dims


def read_logit_scale(checkpoint: Checkpoint) -> float:
    """Return what a head's logits are multiplied by.

    Raises
    ------
    ModelError
        If it is no positive number.
    """
    scale = checkpoint.settings.get("logit_scale")
    if scale is None:
        return 1.0
    if type(scale) not in (int, float) or not 0 < scale < math.inf:
        raise checkpoint.wrong_setting("logit_scale", "; expected a positive number")
    return float(scale)
