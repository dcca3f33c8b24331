"""Targets of the Llama family with everything between the matrix products fused.

The arithmetic is transformers'. Sums, norms and rotations are in float32 where transformers rounds
in between, so that the two differ by roundings in float16 and bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from specattn.errors import ModelError
from specattn.kernels.fused import add_rms_norm
from specattn.kernels.fused.stream import ready
from specattn.models.fused.block import (
    Block,
    RotaryTable,
    activation_of,
    product,
)
from specattn.models.hf import HFTarget, checked_features
from specattn.models.pretrained import tokenizer_of
from specattn.models.shards import is_sharded
from specattn.speculative.model import TargetOutput

if TYPE_CHECKING:
    from specattn.config import AttnConfig
    from specattn.speculative.model import Attend

#: Types whose layers are those of Llama, but for norms of heads and for biases.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# The fused path uses nothing but the weights and biases of these modules.
_PLAIN = {"_proj": nn.Linear, "lm_head": nn.Linear, "embed_tokens": nn.Embedding}


@dataclass(frozen=True, eq=False)
class FusedTarget:
    """A target of few kernel launches, which goes wherever an `HFTarget` goes.

    `from_target` makes one of a loaded model of the types in `MODEL_TYPES`.

    Parameters
    ----------
    layers : tuple of AttnConfig
        The attention geometry of every layer.
    blocks : tuple of Block
        The weights of every layer.
    embed_tokens : nn.Embedding
        ``[V, H]``, the input embedding.
    lm_head : nn.Linear
        ``[V, H]``, the output projection.
    norm : Tensor
        ``[H]``, the weight of the final norm.
    eps : float
        The epsilon of every norm.
    max_context_len : int
        Tokens up to which positions mean what they did in training.
    eos_token_ids : frozenset of int
        Tokens that end a text.
    name : str
        The model's folder or Hub id, for the tokenizer.
    features : tuple of int
        The hidden states that `forward` returns.
    """

    layers: tuple[AttnConfig, ...]
    blocks: tuple[Block, ...]
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    norm: Tensor
    eps: float
    max_context_len: int
    eos_token_ids: frozenset[int]
    name: str = ""
    features: tuple[int, ...] = ()

    @classmethod
    def from_target(cls, target: HFTarget) -> Self:
        """Fuse a loaded model; the two share one copy of the weights.

        The weights of queries, keys and values are packed into one matrix, those of gate and up
        into another. The model's own weights become views of these.

        Raises
        ------
        ModelError
            If the fused path does not compute this model.
        """
        config, modules = target.config, target.module
        reasons = []
        if config.model_type not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            reasons.append(f"model type {config.model_type!r} is not one of {known}")
        odd = (why for name, part in modules.named_modules() if (why := _oddity(name, part)))
        if reasons := [*reasons, *islice(odd, 1)]:
            raise ModelError("target", f"unsupported by the fused path: {'; '.join(reasons)}")
        rotary = RotaryTable(modules.model.rotary_emb, target.max_context_len)
        blocks = tuple(
            Block.of_layer(layer, rotary, geometry, config.rms_norm_eps, activation_of(config))
            for layer, geometry in zip(modules.model.layers, target.layers, strict=True)
        )
        ready(target.device)
        return cls(
            target.layers,
            blocks,
            target.embed_tokens,
            target.lm_head,
            modules.model.norm.weight,
            config.rms_norm_eps,
            target.max_context_len,
            target.eos_token_ids,
            target.name,
            target.features,
        )

    def with_features(self, features: tuple[int, ...]) -> Self:
        """Return a target of the same weights that gives other ``features``.

        Raises
        ------
        ValueError
            If the model has no such hidden state.
        """
        return replace(self, features=checked_features(features, len(self.layers)))

    def for_context(self, max_context_len: int) -> Self:
        """Return a target of the same weights that rotates ``max_context_len`` positions.

        Later positions count as the last one. A target that was never asked for a context computes
        the angles of all positions of its model in its first forward.

        Raises
        ------
        ModelError
            If its rope type rotates contexts of that length in another way.
        """
        old = self.blocks[0].rotary
        rotary = old.of_length(max_context_len)
        if rotary is old:
            return self
        return replace(self, blocks=tuple(replace(block, rotary=rotary) for block in self.blocks))

    @property
    def hidden_size(self) -> int:
        """Width of one hidden state."""
        return self.embed_tokens.embedding_dim

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.lm_head.weight.shape[0])

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and hidden states."""
        return self.norm.dtype

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer next to the model, loaded on first use.

        Raises
        ------
        ModelError
            If there is none.
        """
        return tokenizer_of(self.name)

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> TargetOutput:
        """Run the model over flattened tokens; see `TargetModel.forward`."""
        eps, blocks = self.eps, self.blocks
        states, views = self._states(len(input_ids))
        x, stream = add_rms_norm(
            self.embed_tokens.weight[None],
            None,
            blocks[0].input_norm,
            eps,
            rows=input_ids,
            residual_out=views.get(0),
        )
        for layer, block in enumerate(blocks[:-1]):
            x, stream = block.attend(x, stream, layer, positions, attend)
            x, stream = add_rms_norm(
                block.feed(x),
                stream,
                blocks[layer + 1].input_norm,
                eps,
                residual_out=views.get(layer + 1),
            )
        last = len(blocks) - 1
        x, stream = blocks[last].attend(x, stream, last, positions, attend)
        # As a feature, the final norm is that of all tokens; else only the wanted rows need it.
        whole = last + 1 in views
        x, _ = add_rms_norm(
            blocks[last].feed(x),
            stream,
            self.norm,
            eps,
            rows=None if whole else rows,
            out=views.get(last + 1),
        )
        if whole and rows is not None:
            x = x[rows]
        wanted = self.features
        if len(views) < len(wanted):
            states = torch.cat([views[index] for index in wanted], dim=1)
        return TargetOutput(product(x, self.lm_head.weight, self.lm_head.bias), states)

    def _states(self, count: int) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Allocate features ``[T, F]``; return each hidden state's part, too."""
        wanted = tuple(dict.fromkeys(self.features))
        if not wanted:
            return None, {}
        size = self.hidden_size
        states = self.norm.new_empty(count, len(wanted) * size)
        return states, dict(zip(wanted, states.split(size, dim=1), strict=True))


def _oddity(name: str, part: nn.Module) -> str:
    """Say what a module computes besides its product, or nothing."""
    if is_sharded(part, recurse=False):
        return f"{name} is sharded over ranks"
    for suffix, plain in _PLAIN.items():
        # A quantised or adapted layer has scales or further weights.
        if name.endswith(suffix) and type(part) is not plain:
            return f"{name} is a {type(part).__name__}"
    return ""
