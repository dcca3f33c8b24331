"""Weights and parts of draft heads, of any kind."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specattn.config import FLOAT8, AttnConfig
from specattn.models.fused.block import GATES, HEADS, Block, GatedFeed, RotaryTable
from specattn.models.fused.projection import Projection
from specattn.models.fused.readers import output_projection
from specattn.models.fused.scaled import ScaledProjection, quantise
from specattn.models.head_settings import named, read_logit_scale, read_rotated
from specattn.models.hf import rescaling_length
from specattn.models.hub import count_from_first, first_line
from specattn.models.vocabulary import check_padding, target_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specattn.models.checkpoint import Checkpoint
    from specattn.models.fused.target import FusedTarget
    from specattn.models.hf import HFTarget

    Target = HFTarget | FusedTarget

Shapes = dict[str, tuple[int, ...]]

# What is read of config.json: whole numbers that it must have and may have, and the rest.
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads")
_COUNTS = (
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
)
_OTHERS = (
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "max_position_embeddings",
)

# The modules and norms of a layer whose rows are dimensions that are rotated.
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
# The name of scales here, behind that of their module.
_SCALE = "weight_scale"


@dataclass(frozen=True, eq=False)
class HeadBuilder:
    """Reads a head's weights and makes its parts."""

    checkpoint: Checkpoint
    target: Target
    dtype: torch.dtype
    device: torch.device | str
    quantization: str | None = None

    @cached_property
    def config(self) -> LlamaConfig:
        """The shapes of its layers; without a ``vocab_size`` it has the target's."""
        checkpoint, settings = self.checkpoint, self.checkpoint.settings
        found = {key: settings.get(key) for key in _REQUIRED + _COUNTS + _OTHERS}
        if share := named(checkpoint, "partial_rotary_factor", "rotary_pct"):
            found["partial_rotary_factor"] = settings[share]
        known = {key: value for key, value in found.items() if value is not None}
        for key in _REQUIRED + _COUNTS:
            if key in known or key in _REQUIRED:
                checkpoint.number(key, 1)
        if known.get("hidden_act", "silu") not in ACT2FN:
            raise checkpoint.wrong_setting("hidden_act", ", which transformers does not know")
        known = {"num_hidden_layers": 1, "vocab_size": self.target.vocab_size} | known
        if known["vocab_size"] != self.target.vocab_size:
            check_padding(checkpoint.name, known["vocab_size"], self.target)
        try:
            config = LlamaConfig(**known)
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

    @cached_property
    def mapped(self) -> Tensor | None:
        """The target ids ``[Vd]`` of a vocabulary of its own."""
        return target_ids(self.checkpoint, self.config.vocab_size, self.target.vocab_size)

    def layer_shapes(
        self, layer: str, width: int, *, head_norms: bool = False, input_norm: bool = True
    ) -> Shapes:
        """Return the shapes of a layer that reads ``width`` numbers."""
        config = self.config
        size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
        shapes: Shapes = {
            "self_attn.q_proj": (q, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (size, q),
            "post_attention_layernorm": (size,),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        if input_norm:
            shapes |= {"input_layernorm": (size,)}
        if head_norms:
            shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        return {f"{layer}{name}.weight": shape for name, shape in shapes.items()}

    def read(self, shapes: Shapes) -> dict[str, Tensor]:
        """Return the checkpoint's weights: those of ``shapes``, and what is optional.

        Float8 weights keep their dtype, and have scales beside them.
        """
        checkpoint, file, found = self.checkpoint, self.checkpoint.weights, self._named()
        wanted = self._wanted(shapes, found)
        missing, unknown = wanted.keys() - found.keys(), found.keys() - wanted.keys()
        for what, keys in (("lacks the", missing), ("has an unknown", unknown)):
            if keys:
                names = count_from_first([checkpoint.spelled(key) for key in keys])
                raise checkpoint.wrong(f"{what} tensor {names} in {file}")
        for key, tensor in found.items():
            scaled = f"{key.removesuffix('weight')}{_SCALE}" in wanted
            suits = tensor.is_floating_point() and (tensor.dtype == FLOAT8) == scaled
            if tensor.shape != wanted[key] or not suits:
                kind = "float8" if scaled else "floating point"
                if tensor.dtype == FLOAT8 and not scaled:
                    kind = "scales for it, or other floating point"
                what = f"{checkpoint.spelled(key)} of {tensor.dtype} {list(tensor.shape)}"
                raise checkpoint.wrong(
                    f"has a tensor {what} in {file}; expected {kind} {list(wanted[key])}"
                )
        weights = {key: one.to(self.device, self._dtype_of(key, one)) for key, one in found.items()}
        for key, one in weights.items():
            # a sum reads each weight once, and needs no memory
            numbers = one.to(self.dtype) if one.dtype == FLOAT8 else one
            if not numbers.sum(dtype=torch.float32).isfinite():
                name = checkpoint.spelled(key)
                raise checkpoint.wrong(f"has NaN or infinite weights in {name} in {file}")
        return weights

    def _wanted(self, shapes: Shapes, found: Mapping[str, Tensor]) -> Shapes:
        """Return the shapes of a checkpoint's weights, optional ones too."""
        size, own = self.config.hidden_size, self.config.vocab_size
        ends = {
            "embed_tokens.weight": (own, size),
            "lm_head.weight": (own if self.mapped is None else len(self.mapped), size),
        }
        wanted = shapes | {key: shape for key, shape in ends.items() if key in found}
        scales = self.checkpoint.scales
        for key, shape in list(wanted.items()):
            if not key.endswith(("_proj.weight", "fc.weight", "lm_head.weight")):
                continue
            # Any projection may have a bias, as those of heads for Qwen2 have.
            if (bias := key.removesuffix("weight") + "bias") in found:
                wanted[bias] = shape[:1]
            if scales is not None and (scale := key.removesuffix("weight") + _SCALE) in found:
                wanted[scale] = scales.shape(shape)
        return wanted

    def _dtype_of(self, key: str, stored: Tensor) -> torch.dtype:
        if stored.dtype == FLOAT8:
            return FLOAT8
        return torch.float32 if key.endswith(_SCALE) else self._dtype(key)

    def _named(self) -> dict[str, Tensor]:
        """Return the checkpoint's weights; scales have one name, whatever it calls them."""
        scales, found = self.checkpoint.scales, {}
        for key, tensor in self.checkpoint.tensors.items():
            if scales is not None and key.endswith(f".{scales.name}"):
                key = f"{key.removesuffix(scales.name)}{_SCALE}"
            if key not in ("d2t", "t2d"):
                found[key] = tensor
        return found

    def _dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a plain weight."""
        return self.dtype

    def parts(
        self,
        weights: dict[str, Tensor],
        layers: Sequence[str],
        features: tuple[int, ...],
        windows: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Return what heads of every kind have, by name.

        ``layers`` are what the names of each layer's weights begin with. The embedding has every
        token of the target, and the projection none that the target, or the head, has not: those
        pad one of their vocabularies.
        """
        return {
            "embed_tokens": self._embedding(weights.get("embed_tokens.weight")),
            "lm_head": self._output(weights),
            "blocks": self._blocks(weights, layers, windows),
            "fc": self._projection(weights, "fc") if "fc.weight" in weights else None,
            "features": features,
            "feature_size": self.target.hidden_size * len(features),
            "target_ids": None if self.mapped is None else self.mapped.to(self.device),
            "logit_scale": read_logit_scale(self.checkpoint),
        }

    def _blocks(
        self, weights: dict[str, Tensor], layers: Sequence[str], windows: Sequence[int]
    ) -> tuple[Block, ...]:
        """Pack the layers whose names begin so."""
        config = self.config
        rotary, order = self._rotary()
        geometry = AttnConfig(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            dtype=self.dtype,
        )
        found = []
        for layer, window in zip(layers, windows or (-1,) * len(layers), strict=True):
            own = {
                key.removeprefix(layer): one
                for key, one in weights.items()
                if key.startswith(layer)
            }
            for key in own.keys() & _NORMS if order is not None else ():
                own[key] = own[key][order]
            projections = self._projections(own, order)
            self._check_alike(projections)
            feed = GatedFeed.of_weights(projections, config)
            shape = replace(geometry, window_left=window)
            block = Block.of_weights(projections, own, rotary, shape, feed)
            block.prepare()
            found.append(block)
        return tuple(found)

    def _projections(
        self, own: dict[str, Tensor], order: Tensor | None = None
    ) -> dict[str, Projection]:
        """Return a layer's projections by name; heads' dimensions have another ``order``."""
        names = [key.removesuffix(".weight") for key in own if key.endswith("_proj.weight")]
        return {
            name: self._projection(own, name, order if name in _ROTATED else None) for name in names
        }

    def _rotary(self) -> tuple[RotaryTable, Tensor | None]:
        """Return the rotations, and the order of dimensions ``[D]`` for them.

        None stands for the order of the weights. In another one, queries and keys have the same
        products: each dimension lies half a head before the one that it is rotated with.
        """
        config = deepcopy(self.config)
        length = min(self.target.max_context_len, rescaling_length(config)[0])
        dims = read_rotated(self.checkpoint, config.rope_parameters, config.head_dim)
        still, order = 0, None
        if dims is not None:
            rest = sorted(set(range(config.head_dim)) - set(dims))
            half, still = len(dims) // 2, len(rest) // 2
            order = torch.tensor(dims[:half] + rest[:still] + dims[half:] + rest[still:])
            order = order.to(self.device)
            config.head_dim = len(dims)
            config.rope_parameters.pop("partial_rotary_factor", None)
        rotary = LlamaRotaryEmbedding(config).to(self.device)
        return RotaryTable(rotary, length, "draft", still), order

    def _embedding(self, own: Tensor | None) -> nn.Embedding:
        """Return the embedding of a head, or of its target."""
        size = self.config.hidden_size
        if own is not None:
            missing = self.target.vocab_size - len(own)
            if missing > 0:  # they repeat the last one
                own = torch.cat([own, own[-1:].expand(missing, -1)])
            embedding: nn.Embedding = nn.Embedding.from_pretrained(own)
            return embedding
        shared = self.target.embed_tokens
        if shared.embedding_dim != size:
            raise self.checkpoint.wrong(
                f"has no embed_tokens.weight in {self.checkpoint.weights}, and its hidden_size "
                f"{size} is not the target's {shared.embedding_dim}, so the two "
                "cannot share one"
            )
        return shared

    def _output(self, weights: dict[str, Tensor]) -> Projection:
        """Return the output projection of a head, or of its target."""
        size, wanted = self.config.hidden_size, self.target.vocab_size
        count = min(self.config.vocab_size, wanted) if self.mapped is None else len(self.mapped)
        if "lm_head.weight" in weights:
            lm_head = self._projection(weights, "lm_head")
        else:
            lm_head = output_projection(self.target.lm_head)
            if lm_head.in_features != size or (self.mapped is not None and count != wanted):
                raise self.checkpoint.wrong(
                    f"has no lm_head.weight in {self.checkpoint.weights}, and the target's "
                    f"{list(lm_head.weight.shape)} is not [{count}, {size}], so the "
                    "two cannot share one"
                )
        return lm_head if lm_head.out_features == count else lm_head.rows(0, count)

    def _projection(
        self, weights: dict[str, Tensor], name: str, order: Tensor | None = None
    ) -> Projection:
        """Return a projection, the rows of each head in another order."""
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        found = Projection(weight, bias)
        if (scale := weights.get(f"{name}.{_SCALE}")) is not None:
            assert self.checkpoint.scales is not None
            height = self.checkpoint.scales.height
            found = ScaledProjection(weight, bias, scale=scale, height=height)
        if order is not None:
            heads = torch.arange(len(weight), device=weight.device).view(-1, len(order))
            found = found.reordered(heads[:, order].flatten())
        if self.quantization is None:
            return found
        try:
            return quantise(found, self.quantization)
        except ValueError as error:
            raise self.checkpoint.wrong(f"has {name}.weight in FP8: {error}") from error

    def _check_alike(self, projections: Mapping[str, Projection]) -> None:
        """Refuse parts of one product of which some are quantised."""
        for names in (HEADS, GATES):
            first, *others = (name for name in names if name in projections)
            for name in others:
                if projections[name].rows_format != projections[first].rows_format:
                    raise self.checkpoint.wrong(
                        f"has {first}.weight and {name}.weight of different formats"
                    )
