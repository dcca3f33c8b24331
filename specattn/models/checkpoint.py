"""Reading published EAGLE checkpoints: a ``config.json`` and safetensors or ``.bin`` weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specattn.errors import ModelError
from specattn.models.hub import blaming, fetch

if TYPE_CHECKING:
    from pathlib import Path


# Index of the shards and single file, in the order of preference.
_FILES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
_FETCHED = ["*.json", "*.safetensors", "pytorch_model*.bin"]


@dataclass(frozen=True)
class Checkpoint:
    """A draft checkpoint as read: nothing in it has been checked against a target.

    Parameters
    ----------
    name : str
        For messages.
    settings : dict
        ``config.json``, with what is nested in its ``eagle_config`` on top and in its
        ``transformer_layer_config`` (of vLLM's speculators) below.
    tensors : dict of str to Tensor
        Under the names that `EagleWeights` and `Eagle3Weights` use.
    is_eagle3 : bool
        Which of the two it is.
    """

    name: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    is_eagle3: bool

    def wrong(self, message: str) -> ModelError:
        """Return the error that says what is wrong with this draft."""
        return ModelError("draft", f"{self.name} {message}")


def read_checkpoint(path_or_id: str | Path) -> Checkpoint:
    """Read a draft's configuration and weights.

    Raises
    ------
    ModelError
        If a file is missing or corrupt.
    """
    folder, name = fetch("draft", path_or_id, _FETCHED), str(path_or_id)
    if not (folder / "config.json").is_file():
        raise ModelError("draft", f"{name} has no config.json")
    with blaming("draft", name):
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = (settings.get("transformer_layer_config") or {}) | settings
        settings |= settings.get("eagle_config") or {}
        tensors = _read_tensors(folder, name)
        is_eagle3 = _is_eagle3(settings, tensors)
        return Checkpoint(name, settings, _rename(tensors, name, is_eagle3), is_eagle3)


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder, name):
        if not path.is_file():
            raise ModelError("draft", f"{name} lacks the file {path.name}")
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        else:
            tensors |= torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def _weight_files(folder: Path, name: str) -> list[Path]:
    for index, single in _FILES:
        if (folder / index).is_file():
            shards = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
            return [folder / shard for shard in sorted(set(shards.values()))]
        if (folder / single).is_file():
            return [folder / single]
    raise ModelError("draft", f"{name} has neither model.safetensors nor pytorch_model.bin")


def _is_eagle3(settings: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    architectures = " ".join(settings.get("architectures") or ())
    return "eagle3" in architectures.lower() or any(
        mark in key for key in tensors for mark in ("midlayer.", ".hidden_norm.", "d2t")
    )


def _rename(tensors: dict[str, Tensor], name: str, is_eagle3: bool) -> dict[str, Tensor]:
    """Map the spellings found in published checkpoints to one."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        short = key.removeprefix("model.")
        if is_eagle3 and short.startswith("layers.0."):
            short = "midlayer." + short.removeprefix("layers.0.")
        if short in renamed:
            raise ModelError("draft", f"{name} holds the tensor {short} twice")
        # Both are derived: the one from the configuration, the other from d2t.
        if not short.endswith("rotary_emb.inv_freq") and short != "t2d":
            renamed[short] = tensor
    return renamed
