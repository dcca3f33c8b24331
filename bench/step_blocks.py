"""The world of `bench.step --dflash`: a DFlash head of five layers over the same target."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bench.random_models import random_dflash
from bench.step_world import (
    PLAIN,
    SHARPER,
    Setting,
    World,
    cached_bytes,
    matrix_bytes,
    matrix_numbers,
)
from specattn.cache.kv_pool import KVPool
from specattn.speculative.model import ModelSlot
from specattn.speculative.proposers.block import BlockShape, BlockView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import LlamaConfig, Qwen3Config

    from bench.step_world import Shape
    from specattn.models import DFlashHead, FusedTarget
    from specattn.speculative.model import TargetModel

BLOCK, LAYERS, FEATURES = 16, 5, 5
# the block's depth of drafts, and nodes with the root
NODES = (16, 32, 64, 128)
# slots after the longest context, for trees of 128 nodes
ROOM = 144
SETTINGS = (
    Setting(1, 3, 4),
    Setting(4, 5, 16),
    Setting(8, 7, 64),
    *(Setting(1, BLOCK - 1, nodes, "dflash") for nodes in NODES),
)


def draft_config(like: LlamaConfig, layers: int = LAYERS) -> Qwen3Config:
    """Return a DFlash head's configuration, of an EAGLE-3 head's widths."""
    from transformers import Qwen3Config

    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("vocab_size", "intermediate_size", "max_position_embeddings")
    return Qwen3Config(**{name: getattr(like, name) for name in names}, num_hidden_layers=layers)


def spaced(depth: int, states: int = FEATURES) -> tuple[int, ...]:
    """Return the layers of a target whose inputs a head reads, evenly spaced."""
    return tuple(1 + round(at * (depth - 2) / states) for at in range(1, states + 1))


def random_head(
    model: FusedTarget, config: Qwen3Config, size: int, features: tuple[int, ...]
) -> tuple[DFlashHead, int]:
    """Make a head over a target, and return a token that it never drafts, the target's last.

    Blocks have ``size`` tokens.
    """
    # the head knows the target's whole vocabulary; a token of logit 0 is never among its best
    lowest = model.vocab_size - 1
    model.lm_head.weight[lowest].zero_()
    views = (BlockView(causal=False, anchored=True),) * config.num_hidden_layers
    made = random_dflash(config, model, BlockShape(size, 1, 1, views), features)
    # the output matrix is the target's, so what sharpens it stands before it
    return replace(made, norm=made.norm * SHARPER), lowest


class BlockWorld(World):
    """A world with a DFlash head, too, over the same target and rows.

    Parameters
    ----------
    shape, rooms, device, dtype, backend
        As of `World`.
    size, layers : int
        Tokens of a block, and layers of the head.
    states : int
        How many of the target's hidden states the head reads, evenly spaced.
    """

    def __init__(
        self,
        shape: Shape,
        rooms: Sequence[int],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "triton",
        *,
        size: int = BLOCK,
        layers: int = LAYERS,
        states: int = FEATURES,
    ) -> None:
        super().__init__(shape, rooms, device, dtype, backend, ROOM)
        config = draft_config(shape.draft, layers)
        features = spaced(len(self.model.layers), states)
        self.block, self.lowest = random_head(self.model, config, size, features)
        target_pool = self.target.pool
        pool = KVPool(self.block.layers, len(target_pool.k[0]), device)
        for data in (*pool.k, *pool.v):
            data.normal_()
        self.block_target: ModelSlot[TargetModel] = ModelSlot.of(
            self.model.with_features(features), target_pool, backend
        )
        self.block_draft: ModelSlot[Any] = ModelSlot.of(self.block, pool, backend)

    def slots_of(self, setting: Setting) -> tuple[ModelSlot[TargetModel], Any]:
        """Return the target and the draft of a setting."""
        if setting.draft == "dflash":
            return self.block_target, self.block_draft
        return super().slots_of(setting)

    def read_bytes(self, setting: Setting, batch: int, context: int) -> dict[str, int]:
        """Return the bytes a step cannot do without; see `World.read_bytes`.

        Of a block's draft all matrices once, and after the target the ones that write its context.
        """
        if setting.draft != "dflash":
            return super().read_bytes(setting, batch, context)
        written = self._written() * self.block.fc.weight.element_size()
        return super().read_bytes(PLAIN, batch, context) | {
            "draft weights": matrix_bytes(self.block),
            "context weights": written,
            "draft KV": cached_bytes(self.block_draft.pool, batch * context),
        }

    def operations(self, setting: Setting, batch: int) -> int:
        """Return the floating point operations of a step; see `World.operations`."""
        if setting.draft != "dflash":
            return super().operations(setting, batch)
        draft, path, logits = self.block, setting.steps + 1, self.block.lm_head.weight.numel()
        layers = matrix_numbers(draft) - logits
        drafted = draft.block.size * layers + setting.steps * logits
        verified = setting.nodes * super().operations(PLAIN, 1)
        return batch * (verified + 2 * (drafted + path * self._written()))

    def _written(self) -> int:
        """Return the numbers of the matrices that write the draft's context."""
        draft, kv = self.block, 0
        for block in draft.blocks:
            shape = block.geometry
            kv += block.qkv.rows(shape.num_qo_heads * shape.head_dim).weight.numel()
        return draft.fc.weight.numel() + kv
