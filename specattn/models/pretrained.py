"""Models and tokenizers of Hugging Face, loaded by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
)
from transformers.quantizers import AutoHfQuantizer

from specattn.errors import ModelError
from specattn.models.gguf_file import check_rope, dequantised, is_gguf, source_of
from specattn.models.hub import blaming, count_from_first, locate
from specattn.models.shards import process_group, too_old

if TYPE_CHECKING:
    from torch import nn

_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model")


def load_causal(
    path_or_id: str | Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    tp_plan: str | dict[str, str] | None,
) -> tuple[Any, str]:
    """Load a causal LM of plain weights; see `HFTarget.from_pretrained`.

    Returns the model and its folder, file or Hub id.
    """
    name = locate("target", path_or_id)
    if tp_plan is not None and is_gguf(name):
        raise ModelError("target", f"{name} is a GGUF file, whose weights are not sharded")
    with blaming("target", name), source_of(name) as (folder, file):
        if file:
            check_rope(name)
        config = AutoConfig.from_pretrained(folder, **file, trust_remote_code=False)
        _check_causal(name, config)
        plain = dequantised() if file else _dequantised(name, config)
        module, info = AutoModelForCausalLM.from_pretrained(
            folder,
            **file,
            config=config,
            dtype=dtype or "auto",
            # Some classes know no other; `from_model` switches.
            attn_implementation="eager",
            trust_remote_code=False,
            # Both are reported by name below; transformers would log a table, and
            # initialise what is missing at random.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_distributed(name, tp_plan),
            **plain,
        )
        _check_complete(name, info)
        if dtype is not None and plain and not file:
            _convert_experts(module, dtype)
        if process_group(module) is None:
            module = module.to(device)
    return module, name


def tokenizer_of(name: str) -> Any:
    """Load the tokenizer of a model folder or Hub id.

    Raises
    ------
    ModelError
        If there is none, or it cannot be loaded; a model built in memory, with no name, has none.
    """
    if not name:
        raise ModelError("target", "a model built in memory has no tokenizer")
    files = Path(name)
    if files.is_dir() and not any(any(files.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ModelError("target", f"{name} has no tokenizer: there is no tokenizer.json in it")
    with blaming("target", f"the tokenizer of {name}"), source_of(name) as (folder, file):
        tokenizer = AutoTokenizer.from_pretrained(folder, **file, trust_remote_code=False)
    # a context that is too short is an error here; a warning before it would say less
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _distributed(name: str, tp_plan: str | dict[str, str] | None) -> dict[str, Any]:
    """Return the arguments of transformers' ``from_pretrained`` that shard a model."""
    if tp_plan is None:
        return {}
    from transformers.distributed import DistributedConfig

    if "tp_plan" not in DistributedConfig.__dataclass_fields__:
        raise too_old(name)
    return {"distributed_config": DistributedConfig(tp_plan=tp_plan)}


def _check_causal(name: str, config: Any) -> None:
    if config.is_encoder_decoder:
        raise ModelError("target", f"{name} is an encoder-decoder; only decoders are supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError("target", f"{name} is no causal language model ({config.model_type})")


def _dequantised(name: str, config: Any) -> dict[str, Any]:
    """Return the arguments that load MXFP4 weights (gpt-oss) as plain ones.

    Kernels for them as they are come from the Hub, on some machines; nothing here has run them.
    Weights of a method that transformers would take for plain ones, with a warning, are refused.
    """
    quantised = getattr(config, "quantization_config", None) or {}
    method = quantised.get("quant_method")
    if quantised and not AutoHfQuantizer.supports_quant_method(quantised):
        raise ModelError("target", f"{name} has quant_method {method!r}, unknown to transformers")
    return {"quantization_config": Mxfp4Config(dequantize=True)} if method == "mxfp4" else {}


def _convert_experts(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert what some releases of transformers dequantise to bfloat16 always."""
    for parameter in module.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.to(dtype)


def _check_complete(name: str, info: dict[str, Any]) -> None:
    """Refuse a checkpoint with weights missing, which transformers would draw at random."""
    if missing := info["missing_keys"]:
        raise ModelError("target", f"{name} lacks the tensor {count_from_first(missing)}")
    # Each comes with the two shapes.
    if mismatched := {key for key, *_ in info["mismatched_keys"]}:
        raise ModelError(
            "target", f"{name} has the wrong shape for the tensor {count_from_first(mismatched)}"
        )
