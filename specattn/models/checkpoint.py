"""Reads draft checkpoints: ``config.json``, and safetensors or ``.bin`` weights."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specattn.errors import ModelError
from specattn.models.gguf_file import is_gguf
from specattn.models.hub import blaming, fetch

if TYPE_CHECKING:
    from pathlib import Path


# The index of shards and the single file of each format, in the order of preference.
_FILES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
_FETCHED = ["*.json", "*.safetensors", "pytorch_model*.bin"]


@dataclass(frozen=True)
class Checkpoint:
    """A draft checkpoint as it was read, not checked against a target.

    Parameters
    ----------
    name : str
        The folder or Hub id, for messages.
    settings : dict
        ``config.json``. What is nested in its ``eagle_config`` or ``dflash_config`` wins over it,
        and it wins over what is nested in its ``transformer_layer_config`` (of vLLM's speculators).
    tensors : dict of str to Tensor
        The weights, under one name each whatever the layout, and the vocabulary maps ``d2t`` and
        ``t2d``.
    kind : str
        ``"eagle"`` (EAGLE or EAGLE-2), ``"eagle3"`` or ``"dflash"``.
    weights : str
        The name of the file that holds or lists the weights, for messages.
    folder : Path
        Where its files are.
    """

    name: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    kind: str
    weights: str
    folder: Path

    def wrong(self, message: str) -> ModelError:
        """Return the error that tells what is wrong with this draft."""
        return ModelError("draft", f"{self.name} {message}")

    def number(self, key: str, least: int, most: int) -> int:
        """Return a whole number of ``config.json`` in a range."""
        found = self.settings.get(key)
        if found is None:
            raise self.wrong(f"has no {key} in config.json")
        if type(found) is not int or not least <= found <= most:
            raise self.wrong(
                f"has {key} {found!r} in config.json; expected a whole number of {least}..{most}"
            )
        return found

    def numbers(self, key: str, *, least: int = 0) -> list[int] | None:
        """Return a list of whole numbers of ``config.json``, if it has one.

        It must have ``least`` of them.
        """
        found: list[int] | None = self.settings.get(key)
        if found is None:
            return None
        listed = isinstance(found, list) and len(found) >= least
        if not listed or any(type(number) is not int for number in found):
            raise self.wrong(
                f"has {key} {found!r} in config.json; expected a list of whole numbers"
            )
        return found


def read_checkpoint(path_or_id: str | Path) -> Checkpoint:
    """Read a draft's configuration and weights.

    Raises
    ------
    ModelError
        If a file is missing or corrupt, or this is no EAGLE or DFlash head of plain weights.
    """
    name = str(path_or_id)
    if is_gguf(name):
        raise ModelError("draft", f"{name} is no head but a whole model: load it by load_lm_draft")
    folder = fetch("draft", path_or_id, _FETCHED)
    with blaming("draft", name):
        settings = _read_settings(folder, name)
        tensors = _read_tensors(folder, name)
        kind = _kind(settings, tensors, name)
        weights = next(file for pair in _FILES for file in pair if (folder / file).is_file())
        checkpoint = Checkpoint(name, settings, {}, kind, weights, folder)
        checkpoint = replace(checkpoint, tensors=_rename(tensors, checkpoint))
        if kind == "eagle" and "fc.weight" not in checkpoint.tensors:
            raise checkpoint.wrong(
                f"is no EAGLE head: it has no tensor fc.weight in {weights}, as a whole model or "
                "a Medusa head; give a head that was trained for this target, and load a whole "
                "model by load_lm_draft"
            )
        return checkpoint


def _read_settings(folder: Path, name: str) -> dict[str, Any]:
    """Read ``config.json``; refuse heads of another kind or quantised."""
    if not (folder / "config.json").is_file():
        raise ModelError("draft", f"{name} has no config.json")
    settings = _read_object(folder / "config.json", name)
    for nested in (
        "transformer_layer_config",
        "eagle_config",
        "dflash_config",
        "quantization_config",
    ):
        if not isinstance(settings.get(nested) or {}, dict):
            raise ModelError(
                "draft",
                f"{name} has {nested} {settings[nested]!r} in config.json; expected an object",
            )
    settings = (settings.get("transformer_layer_config") or {}) | settings
    settings |= settings.get("eagle_config") or {}
    settings |= settings.get("dflash_config") or {}
    if any("medusa" in key for key in settings):
        raise ModelError("draft", f"{name} is a Medusa head, no EAGLE head")
    if quantized := settings.get("quantization_config"):
        method = quantized.get("quant_method")
        raise ModelError(
            "draft",
            f"{name} is quantised (quant_method {method!r}); expected plain weights, and no "
            "quantization_config in config.json",
        )
    return settings


def _read_object(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError("draft", f"{name} has a corrupt {path.name}: {error}") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ModelError("draft", f"{name} has a {kind} in {path.name}; expected an object")
    return found


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder, name):
        if not path.is_file():
            raise ModelError("draft", f"{name} lacks the file {path.name}")
        try:
            if path.suffix == ".safetensors":
                tensors |= load_file(path)
                continue
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (SafetensorError, EOFError) as error:
            raise ModelError("draft", f"{name} has a corrupt {path.name}") from error
        except pickle.UnpicklingError as error:
            raise ModelError(
                "draft", f"{name} has a {path.name} that is corrupt or holds more than tensors"
            ) from error
        if not isinstance(found, dict) or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items()
        ):
            kind = type(found).__name__
            raise ModelError(
                "draft", f"{name} has a {kind} in {path.name}; expected a dict of tensors by name"
            )
        tensors |= found
    return tensors


def _weight_files(folder: Path, name: str) -> list[Path]:
    for index, single in _FILES:
        if (folder / index).is_file():
            shards = _read_object(folder / index, name).get("weight_map")
            if not isinstance(shards, dict):
                raise ModelError("draft", f"{name} has no weight_map in {index}")
            return [folder / shard for shard in sorted(set(shards.values()))]
        if (folder / single).is_file():
            return [folder / single]
    raise ModelError("draft", f"{name} has neither model.safetensors nor pytorch_model.bin")


def _kind(settings: dict[str, Any], tensors: dict[str, Tensor], name: str) -> str:
    """Return the head's kind, by its settings or its tensors' names."""
    architectures = " ".join(settings.get("architectures") or ()).lower()
    stated = settings.get("speculators_model_type")
    if stated not in (None, "eagle", "eagle3", "dflash"):
        raise ModelError(
            "draft",
            f"{name} has speculators_model_type {stated!r} in config.json; known are 'eagle', "
            "'eagle3' and 'dflash'",
        )
    # newer layouts have at the top level what others nest in dflash_config
    nested = "dflash_config" in settings or {"block_size", "mask_token_id"} <= settings.keys()
    if stated == "dflash" or nested or "dflash" in architectures:
        return "dflash"
    marks = ("midlayer.", ".hidden_norm.", "d2t")
    if "eagle3" in architectures or any(mark in key for key in tensors for mark in marks):
        return "eagle3"
    return "eagle"


def _rename(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Give the tensors of published checkpoints one spelling."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        short = key.removeprefix("model.")
        if checkpoint.kind == "eagle3" and short.startswith("layers.0."):
            short = "midlayer." + short.removeprefix("layers.0.")
        if short in renamed:
            raise checkpoint.wrong(f"holds the tensor {short} twice in {checkpoint.weights}")
        # the configuration tells it
        if not short.endswith("rotary_emb.inv_freq"):
            renamed[short] = tensor
    return renamed
