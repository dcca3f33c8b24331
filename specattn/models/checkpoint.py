"""Reads draft checkpoints: ``config.json``, and safetensors or ``.bin`` weights."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specattn.errors import ModelError
from specattn.models.hub import fetch, is_damage, is_gguf
from specattn.models.scales import scales_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specattn.models.scales import Scales


# The index of shards and the single file of each format, in the order of preference.
_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
# Objects of config.json whose settings count as its own.
_NESTED = ("transformer_layer_config", "eagle_config", "dflash_config")
_FETCHED = ["*.json", "*.safetensors", "pytorch_model*.bin"]


def says_dflash(settings: Mapping[str, Any]) -> bool:
    """Return whether a head's ``config.json`` says that it is a DFlash head."""
    architectures = " ".join(settings.get("architectures") or ()).lower()
    # newer layouts have at the top level what others nest in dflash_config
    nested = "dflash_config" in settings or {"block_size", "mask_token_id"} <= settings.keys()
    stated = settings.get("speculators_model_type") == "dflash"
    return stated or nested or "dflash" in architectures


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A draft checkpoint, not checked against a target.

    Its files are read when something is first asked of them; what is wrong with them is a
    `ModelError` then.

    Parameters
    ----------
    name : str
        The folder or Hub id, for messages.
    folder : Path
        Where its files are.
    """

    name: str
    folder: Path

    @classmethod
    def of(cls, path_or_id: str | Path) -> Self:
        """Find a draft's folder, or fetch it from the Hub."""
        name = str(path_or_id)
        if is_gguf(name):
            why = "is no head but a whole model: load it by load_lm_draft"
            raise ModelError("draft", f"{name} {why}")
        return cls(name, fetch("draft", path_or_id, _FETCHED))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """``config.json``, of a head that is served.

        What is nested in its ``eagle_config`` or ``dflash_config`` wins over it, and it wins over
        what is nested in its ``transformer_layer_config`` (of vLLM's speculators).
        """
        if not (self.folder / "config.json").is_file():
            raise self.wrong("has no config.json")
        stated = self._object("config.json")
        for key in (*_NESTED, "quantization_config"):
            if not isinstance(stated.get(key) or {}, dict):
                raise self.wrong(f"has {key} {stated[key]!r} in config.json; expected an object")
        layer, eagle, dflash = (stated.get(key) or {} for key in _NESTED)
        settings: dict[str, Any] = layer | stated | eagle | dflash
        if any("medusa" in key for key in settings):
            raise self.wrong("is a Medusa head, no EAGLE head")
        return settings

    @cached_property
    def scales(self) -> Scales | None:
        """Where float8 weights have their scales; None if all weights are plain."""
        stated = self.settings.get("quantization_config")
        try:
            return scales_of(stated) if stated else None
        except ValueError as error:
            raise self.wrong(
                f"is quantised ({error}); expected plain weights, or FP8 in blocks of 128 x 128 or "
                "by channels, and dynamic activation scales"
            ) from error

    @property
    def by_speculators(self) -> bool:
        """Whether the layout is that of vLLM's speculators."""
        return "speculators_model_type" in self.settings

    @cached_property
    def weights(self) -> str:
        """The name of the file that holds or lists the weights."""
        for file in _FILES:
            if (self.folder / file).is_file():
                return file
        raise self.wrong("has neither model.safetensors nor pytorch_model.bin")

    @cached_property
    def kind(self) -> str:
        """``"eagle"`` (EAGLE or EAGLE-2), ``"eagle3"`` or ``"dflash"``."""
        settings = self.settings
        architectures = " ".join(settings.get("architectures") or ()).lower()
        stated = settings.get("speculators_model_type")
        if stated not in (None, "eagle", "eagle3", "dflash"):
            known = "; known are 'eagle', 'eagle3' and 'dflash'"
            raise self.wrong_setting("speculators_model_type", known)
        if says_dflash(settings):
            return "dflash"
        marks = ("midlayer.", ".hidden_norm.", "d2t")
        if "eagle3" in architectures or any(mark in key for key in self._stored for mark in marks):
            return "eagle3"
        return "eagle"

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The weights and the vocabulary maps, ``d2t`` and ``t2d``, each renamed."""
        renamed: dict[str, Tensor] = {}
        for key, tensor in self._stored.items():
            short = key.removeprefix("model.")
            if self.kind == "eagle3" and short.startswith("layers.0."):
                short = "midlayer." + short.removeprefix("layers.0.")
            if short in renamed:
                raise self.wrong(f"holds the tensor {short} twice in {self.weights}")
            # the configuration tells it
            if not short.endswith("rotary_emb.inv_freq"):
                renamed[short] = tensor
        return renamed

    def spelled(self, key: str) -> str:
        """Return what a message calls one of `tensors`."""
        return key

    def wrong(self, message: str) -> ModelError:
        """Return the error that tells what is wrong with this draft."""
        return ModelError("draft", f"{self.name} {message}")

    def wrong_setting(self, key: str, why: str) -> ModelError:
        """Return the error for a setting of ``config.json``."""
        return self.wrong(f"has {key} {self.settings[key]!r} in config.json{why}")

    def number(self, key: str, least: int, most: int | None = None) -> int:
        """Return a whole number of ``config.json`` in a range."""
        found = self.settings.get(key)
        if found is None:
            raise self.wrong(f"has no {key} in config.json")
        if type(found) is not int or found < least or (most is not None and found > most):
            wanted = f"at least {least}" if most is None else f"{least}..{most}"
            raise self.wrong_setting(key, f"; expected a whole number of {wanted}")
        return found

    def states(self, key: str, layers: int) -> tuple[int, ...]:
        """Return the target's states that a setting's list of layers means.

        They are those of the first ``layers`` layers. speculators counts the states that enter a
        layer, others those that leave one.
        """
        found = self.settings.get(key)
        if found is None:
            raise self.wrong(f"has no {key} in config.json")
        if not isinstance(found, list) or {int} != {type(index) for index in found}:
            raise self.wrong_setting(key, "; expected a list of whole numbers")
        if not all(0 <= index < layers for index in found):
            where = f"{'before' if self.by_speculators else 'after'} the layers 0..{layers - 1}"
            raise self.wrong_setting(key, f"; the target can be read {where}")
        return tuple(index if self.by_speculators else index + 1 for index in found)

    @cached_property
    def _stored(self) -> dict[str, Tensor]:
        """The tensors under the names that they are stored by."""
        files = {self.weights}
        if (shards := self._shards()) is not None:
            files = {file for name, file in shards.items() if self._wants(name)}
        tensors: dict[str, Tensor] = {}
        for file in sorted(files):
            tensors |= self._file(self.folder / file)
        return tensors

    def _shards(self) -> dict[str, str] | None:
        """Return the file of each tensor; None where there is one file."""
        if not self.weights.endswith(".json"):
            return None
        shards: Any = self._object(self.weights).get("weight_map")
        if not isinstance(shards, dict):
            raise self.wrong(f"has no weight_map in {self.weights}")
        return shards

    def _wants(self, name: str) -> bool:
        """Whether a stored tensor is the draft's."""
        return True

    def _file(self, path: Path) -> dict[str, Tensor]:
        if not path.is_file():
            raise self.wrong(f"lacks the file {path.name}")
        try:
            if path.suffix == ".safetensors":
                found: Any = self._read(path)
            else:
                found = torch.load(path, map_location="cpu", weights_only=True)
        except (SafetensorError, EOFError, RuntimeError) as error:
            if not is_damage(error):
                raise
            raise self.wrong(f"has a truncated or corrupt {path.name}") from error
        except pickle.UnpicklingError as error:
            raise self.wrong(
                f"has a {path.name} that is corrupt or holds more than tensors"
            ) from error
        if not isinstance(found, dict) or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items()
        ):
            kind = type(found).__name__
            raise self.wrong(f"has a {kind} in {path.name}; expected a dict of tensors by name")
        tensors: dict[str, Tensor] = found
        return tensors

    def _read(self, path: Path) -> dict[str, Tensor]:
        """Read the wanted tensors of a file of safetensors."""
        with safe_open(path, "pt") as file:
            return self._wanted(file)

    def _wanted(self, file: Any) -> dict[str, Tensor]:
        return {name: file.get_tensor(name) for name in file.keys() if self._wants(name)}  # noqa: SIM118 - no dict

    def _object(self, file: str) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / file).read_text(encoding="utf-8"))
        except ValueError as error:
            raise self.wrong(f"has a corrupt {file}: {error}") from error
        if not isinstance(found, dict):
            raise self.wrong(f"has a {type(found).__name__} in {file}; expected an object")
        return found
