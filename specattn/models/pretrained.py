"""Models and tokenizers of Hugging Face, loaded by transformers."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import logging as hf_logging

from specattn.errors import ModelError
from specattn.models.hub import blaming, count_from_first, first_line, is_gguf, locate
from specattn.models.quantisation import (
    check_format,
    keeping_fp8,
    quantise_model,
    read_quantised,
)
from specattn.models.shards import process_group, too_old

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

# what transformers needs to read a GGUF file; the extra `gguf` installs it
_NEEDED = ("gguf", "accelerate")
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model")
# what a GGUF file calls its ends, beside the end-of-text token that transformers reads
_FILE_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# the type of tokens that are no text
_CONTROL = 3
# control tokens that end a turn of a chat; older files do not name theirs
_TURN_ENDS = {
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<|end_of_turn|>"),
    *("<end_of_turn>", "<turn|>", "<end_of_utterance>"),
}


def load_causal(
    path_or_id: str | Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    tp_plan: str | dict[str, str] | None,
    quantization: str | None = None,
) -> tuple[Any, str]:
    """Load a causal LM; see `HFTarget.from_pretrained`.

    Returns the model and its folder, file or Hub id.
    """
    name = locate("target", path_or_id)
    if tp_plan is not None and is_gguf(name):
        raise ModelError("target", f"{name} is a GGUF file, whose weights are not sharded")
    check_format("quantization", quantization)
    with blaming("target", name), _source_of(name) as (folder, file):
        if file:
            _check_whole(name)
            _check_rope(name)
        config = AutoConfig.from_pretrained(folder, **file, trust_remote_code=False)
        _check_causal(name, config)
        plain = _dequantised(name, config, is_file=bool(file))
        with keeping_fp8(config):
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
        if file:
            _add_ends(name, module.generation_config)
        if dtype is not None and plain and not file:
            _convert_experts(module, dtype)
        read_quantised(module)
        if process_group(module) is None:
            module = module.to(device)
        if quantization is not None:
            quantise_model(module, quantization)
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
    with blaming("target", f"the tokenizer of {name}"), _source_of(name) as (folder, file):
        tokenizer = AutoTokenizer.from_pretrained(folder, **file, trust_remote_code=False)
    # a context that is too short is an error here; a warning before it would say less
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


@contextmanager
def _source_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Hold what transformers' ``from_pretrained`` takes for a located model.

    That is a folder or Hub id, and further arguments. Meanwhile a GGUF file is read once, and
    quietly. Else transformers reads its vocabulary for the configuration and again for the weights,
    makes the table of tensors' names for every module, and shows a bar of its own: together more
    than half the time that a model of 135 million parameters takes.

    Raises
    ------
    ModelError
        If what reads GGUF files is not installed. ``argument`` is "target".
    """
    if not is_gguf(name):
        yield name, {}
        return
    if missing := [package for package in _NEEDED if find_spec(package) is None]:
        raise ModelError(
            "target", f"{name} needs {' and '.join(missing)} (pip install 'specattn[gguf]')"
        )
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loader

    kept = gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm
    gguf.GGUFReader = cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    loader.tqdm = hf_logging.tqdm
    try:
        yield str(Path(name).parent), {"gguf_file": Path(name).name}
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm = kept


def _check_whole(name: str) -> None:
    """Refuse a file that is truncated, or one of several shards.

    Raises
    ------
    ModelError
        If it is so. ``argument`` is "target".
    """
    import gguf

    try:
        reader = gguf.GGUFReader(name)
    except OSError:
        raise
    # what numpy says of bytes that are not there
    except Exception as error:
        why = f"is truncated or corrupt: {first_line(error)}"
        raise ModelError("target", f"{name} {why}") from error
    split = reader.fields.get("split.count")
    if split is not None and (count := int(split.parts[split.data[0]][0])) > 1:
        raise ModelError(
            "target",
            f"{name} is one of {count} shards of a GGUF file, of which transformers reads none: "
            "give one file, as `llama-gguf-split --merge` writes it",
        )


def _check_rope(name: str) -> None:
    """Refuse a file whose positions transformers would read as unscaled ones.

    Raises
    ------
    ModelError
        If the file scales its rope. ``argument`` is "target".
    """
    import gguf

    reader = gguf.GGUFReader(name)
    # Llama 3.1 and Phi-3 keep factors as tensors
    found = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    for key, field in reader.fields.items():
        # of gpt-oss, transformers reads it
        if key.endswith(".rope.scaling.type") and not key.startswith("gpt-oss."):
            kind = bytes(field.parts[field.data[0]]).decode()
            found += [f"{key} {kind}"] if kind != "none" else []
    if found:
        raise ModelError(
            "target",
            f"{name} has {found[0]}, which transformers does not read: it would compute another "
            "model; give the folder that the file was made of",
        )


def _add_ends(name: str, settings: Any) -> None:
    """Add to generation settings what ends a turn by a GGUF file."""
    import gguf

    fields = gguf.GGUFReader(name).fields
    found = {_numbers(fields[key])[0] for key in _FILE_ENDS if key in fields}
    tokens, kinds = (fields.get(f"tokenizer.ggml.{part}") for part in ("tokens", "token_type"))
    if tokens is not None and kinds is not None:
        control = [at for at, kind in enumerate(_numbers(kinds)) if kind == _CONTROL]
        spelled = {bytes(tokens.parts[tokens.data[at]]).decode(): at for at in control}
        # where a turn has several messages, this ends one of them
        ends = _TURN_ENDS - ({"<|end|>"} if "<|return|>" in spelled else set())
        found |= {at for token, at in spelled.items() if token in ends}
    given = settings.eos_token_id
    found.update([] if given is None else [given] if isinstance(given, int) else given)
    settings.eos_token_id = sorted(found) or None


def _numbers(field: Any) -> list[int]:
    """Return the numbers of a GGUF file's field."""
    return [int(field.parts[at][0]) for at in field.data]


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


def _dequantised(name: str, config: Any, *, is_file: bool) -> dict[str, Any]:
    """Return the arguments that make GGUF and MXFP4 weights plain ones.

    Kernels for MXFP4 (gpt-oss) come from the Hub, on some machines; nothing here has run them.
    Weights of a method that transformers would take for plain ones, with a warning, are refused.
    """
    if is_file:
        # without the class, transformers knows no other way
        known = hasattr(transformers, "GgufConfig")
        return {"quantization_config": transformers.GgufConfig(dequantize=True)} if known else {}
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
