"""GGUF files, which transformers reads and dequantises."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers.utils import logging as hf_logging

from specattn.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX = ".gguf"
# what transformers needs to read such a file; the extra `gguf` installs it
_NEEDED = ("gguf", "accelerate")


def is_gguf(path_or_id: str | Path) -> bool:
    """Return whether a name is that of a GGUF file."""
    return str(path_or_id).endswith(SUFFIX)


@contextmanager
def source_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
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


def check_rope(name: str) -> None:
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


def dequantised() -> dict[str, Any]:
    """Return the arguments that load a GGUF file's weights as plain ones."""
    # without the class, transformers knows no other way
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}
