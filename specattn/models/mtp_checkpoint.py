"""Reads the first MTP layer of a target's checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import safe_open
from transformers import AutoConfig

from specattn.config import FLOAT8
from specattn.errors import ModelError
from specattn.kernels.fused.fp8 import BLOCK, ScaledWeight
from specattn.kernels.launch import cdiv
from specattn.models.checkpoint import Checkpoint
from specattn.models.fused.family import FAMILIES, LLAMA, Family
from specattn.models.hf import HFTarget
from specattn.models.hub import blaming, fetch, is_gguf, locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from specattn.models.builder import Target

#: What stands for a target's own MTP layers in the place of a draft's folder.
MTP = "mtp"
#: What names of the layer that is read begin with, and those of its feed-forward part.
LAYER = "layers.0."
FEED = f"{LAYER}mlp."
# of DeepSeek's, whose last two are the target's own; of Qwen's
_BEHIND = {
    "enorm": "embed_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head.head": "",
    "embed_tokens": "",
}
_APART = {"pre_fc_norm_embedding": "embed_norm", "pre_fc_norm_hidden": "hidden_norm"}
_SCALE = "_scale_inv"


@dataclass(frozen=True, kw_only=True)
class MtpFamily:
    """What a family's MTP layers are.

    Parameters
    ----------
    behind : bool
        Whether their tensors are named as further layers of the target, as DeepSeek's are, or lie
        apart under ``mtp``.
    latent : bool
        Whether attention is latent.
    layers : Family
        How the layer differs from Llama's.
    experts : str
        The class of transformers' feed-forward module of experts; "" if there is none.
    """

    behind: bool = False
    latent: bool = False
    layers: Family = LLAMA
    experts: str = ""


#: By the model type of transformers' configurations of texts.
MTP_FAMILIES: Mapping[str, MtpFamily] = {
    "deepseek_v3": MtpFamily(behind=True, latent=True, experts="DeepseekV3MoE"),
    "glm4_moe_lite": MtpFamily(behind=True, latent=True, experts="Glm4MoeLiteMoE"),
    "qwen3_next": MtpFamily(
        layers=FAMILIES["qwen3_next"],
        experts="Qwen3NextSparseMoeBlock",
    ),
    "qwen3_5_text": MtpFamily(layers=FAMILIES["qwen3_5_text"]),
    "qwen3_5_moe_text": MtpFamily(
        layers=FAMILIES["qwen3_5_moe_text"],
        experts="Qwen3_5MoeSparseMoeBlock",
    ),
}


def is_mtp(path_or_id: str | Path) -> bool:
    """Return whether a draft's name stands for the target's own MTP layers.

    A folder of that name comes first.
    """
    return str(path_or_id) == MTP and not Path(MTP).exists()


def has_mtp(path_or_id: str | Path) -> bool:
    """Return whether a target's checkpoint has MTP layers that draft here.

    Names of tensors are read, and nothing else. A checkpoint that cannot be read has none: whoever
    loads it says why.
    """
    name = str(path_or_id)
    if is_gguf(name):
        return False
    try:
        if is_gguf(locate("target", name)):
            return False
        # of one file there is no index, and the target needs it
        folder = fetch("target", name, ["*.json", "model.safetensors"])
        checkpoint = MtpCheckpoint(name, folder, torch.float32, _text_config(folder, name))
        return checkpoint.family is not None and checkpoint.depth > 0
    except ModelError:
        return False


def _text_config(folder: Path, name: str) -> Any:
    with blaming("draft", name):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config.get_text_config(decoder=True)


@dataclass(frozen=True, eq=False)
class MtpCheckpoint(Checkpoint):
    """The MTP layers in a target's checkpoint.

    Parameters
    ----------
    dtype : torch.dtype
        What float8 weights are restored to.
    config : PreTrainedConfig
        The configuration of the target's text part; the other parts are those of `Checkpoint`.
    """

    dtype: torch.dtype = field(default=torch.float32)
    config: Any = None

    @classmethod
    def of_target(cls, target: Target, dtype: torch.dtype) -> Self:
        """Find the checkpoint that a target was loaded from.

        Raises
        ------
        ModelError
            If there is none, it is a GGUF file, or has no MTP layers that are served.
        """
        name = target.name
        if not name or is_gguf(name):
            what = "a GGUF file" if name else "built in memory"
            raise ModelError(
                "draft", f"the target is {what}: its MTP layers are read from a folder of weights"
            )
        folder = fetch("draft", name, ["*.json", "*.safetensors"])
        config = target.config if isinstance(target, HFTarget) else _text_config(folder, name)
        found = cls(name, folder, dtype, config)
        if found.family is None:
            raise found.wrong(
                f"has model type {config.model_type!r}, whose MTP layers do not draft here; those "
                f"of {', '.join(MTP_FAMILIES)} do"
            )
        if not found.depth:
            raise found.wrong(f"has no MTP layers in {found.weights}: it has no {found.first}*")
        return found

    @property
    def family(self) -> MtpFamily | None:
        """What its MTP layers are, if they are known."""
        return MTP_FAMILIES.get(self.config.model_type)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """``config.json`` of the target's text part."""
        stated = self._object("config.json")
        return stated | (stated.get("text_config") or {})

    @cached_property
    def scales(self) -> None:
        """None: float8 weights are restored."""

    @property
    def first(self) -> str:
        """What the names of the first layer's tensors begin with."""
        assert self.family is not None
        return self._layer(0) if self.family.behind else f"{MTP}."

    @cached_property
    def depth(self) -> int:
        """The number of MTP layers."""
        names, found = self._names(), 0
        while any(name.startswith(self._layer(found)) for name in names):
            found += 1
        return found

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The weights of the first layer, renamed; experts are stacked."""
        assert self.family is not None
        renamed: dict[str, Tensor] = {}
        for key, tensor in self._restored().items():
            stem, _, kind = key.removeprefix(self.first).rpartition(".")
            names, inside = (_BEHIND, LAYER) if self.family.behind else (_APART, "")
            if short := names.get(stem, inside + stem):
                renamed[f"{short}.{kind}"] = tensor
        return self._stacked(renamed)

    def spelled(self, key: str) -> str:
        """Return one of `tensors` as it is stored; experts are named together."""
        assert self.family is not None
        stem, _, kind = key.rpartition(".")
        names, inside = (_BEHIND, LAYER) if self.family.behind else (_APART, "")
        own = {short: name for name, short in names.items() if short}
        return f"{self.first}{own.get(stem, stem.removeprefix(inside))}.{kind}"

    def _layer(self, at: int) -> str:
        """Return what the names of a layer's tensors begin with."""
        assert self.family is not None
        behind = f"model.layers.{self.config.num_hidden_layers + at}."
        return behind if self.family.behind else f"{MTP}.layers.{at}."

    def _names(self) -> list[str]:
        """Return the names of all tensors, but of a lone `.bin` file."""
        if self.weights.endswith(".safetensors"):
            with blaming("draft", self.name), safe_open(self.folder / self.weights, "pt") as file:
                return list(file.keys())
        return list(self._shards() or ())

    def _wants(self, name: str) -> bool:
        if not name.startswith(self.first):
            return False
        later = re.match(rf"{MTP}\.layers\.(\d+)\.", name)
        return later is None or later[1] == "0"

    def _restored(self) -> dict[str, Tensor]:
        """Return the stored tensors, without float8."""
        stored = {key: one for key, one in self._stored.items() if self._wants(key)}
        scales = {key.removesuffix(_SCALE): key for key in stored if key.endswith(_SCALE)}
        for key, scale in scales.items():
            if key in stored and stored[key].dtype == FLOAT8:
                stored[key] = self._whole(key, stored[key], stored.pop(scale))
        if left := [key for key, one in stored.items() if one.dtype == FLOAT8]:
            raise self.wrong(
                f"has float8 weights without scales of blocks in {min(left)} in {self.weights}"
            )
        return stored

    def _whole(self, key: str, weight: Tensor, scale: Tensor) -> Tensor:
        """Return what a float8 weight stands for."""
        stated = (self.settings.get("quantization_config") or {}).get("weight_block_size")
        blocks = [cdiv(size, BLOCK) for size in weight.shape]
        if stated != [BLOCK, BLOCK] or list(scale.shape) != blocks:
            raise self.wrong(
                f"has scales {list(scale.shape)} of {key} {list(weight.shape)} in {self.weights} "
                f"for weight_block_size {stated}; expected {blocks} for [{BLOCK}, {BLOCK}]"
            )
        return ScaledWeight(weight, scale.float(), BLOCK).restored().to(self.dtype)

    def _stacked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with those of all experts in one."""
        one = re.compile(rf"{re.escape(FEED)}experts\.(\d+)\.(gate|up|down)_proj\.weight")
        experts = {key: found for key in tensors if (found := one.fullmatch(key))}
        if not experts:
            return tensors
        kept = {key: tensor for key, tensor in tensors.items() if key not in experts}
        numbers = range(1 + max(int(found[1]) for found in experts.values()))

        def of(kind: str) -> list[Tensor]:
            names = [f"{FEED}experts.{at}.{kind}_proj.weight" for at in numbers]
            for name in names:
                if name not in tensors:
                    raise self.wrong(f"lacks the tensor {self.spelled(name)} in {self.weights}")
            return [tensors.pop(name) for name in names]

        gates, ups, downs = of("gate"), of("up"), of("down")
        pairs = zip(gates, ups, strict=True)
        kept[f"{FEED}experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        kept[f"{FEED}experts.down_proj"] = torch.stack(downs)
        return kept
