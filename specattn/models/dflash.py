"""DFlash heads draft a whole block in one forward.

Their layers are those of Qwen3. Keys and values of the context are projections of the target's
features at several layers; those of the block come from the bonus token and mask tokens (DFlash,
arXiv:2602.06036). `specattn.models.load_dflash` builds the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.autocast import without_autocast
from specattn.kernels.fused import add_rms_norm
from specattn.kernels.fused.fp8 import scale_rows
from specattn.models.eagle import DraftHead
from specattn.models.fused.block import add_norm_for
from specattn.models.head_settings import named, read_windows
from specattn.speculative.proposers.block import BlockShape, BlockView

if TYPE_CHECKING:
    from specattn.cache.kv_pool import KVPool
    from specattn.models.checkpoint import Checkpoint
    from specattn.speculative.model import Attend

#: The most tokens of a block: as many as the widest tree has nodes.
MAX_BLOCK = 256


def read_block(
    checkpoint: Checkpoint, layers: int, vocab_size: int
) -> tuple[BlockShape, tuple[int, ...]]:
    """Return a head's block, and ``AttnConfig.window_left`` of every layer.

    Parameters
    ----------
    checkpoint : Checkpoint
        The head's.
    layers : int
        Its layers.
    vocab_size : int
        Tokens that the embedding knows.

    Raises
    ------
    ModelError
        In one line, for a setting that is missing, out of range or not served.
    """
    from_anchor = bool(checkpoint.settings.get("sample_from_anchor"))
    size = checkpoint.number("block_size", 1 if from_anchor else 2, MAX_BLOCK)
    mask = checkpoint.number("mask_token_id", 0, vocab_size - 1)
    views, windows = _attention(checkpoint, layers)
    return BlockShape(size, mask, 0 if from_anchor else 1, views), windows


def read_states(checkpoint: Checkpoint, target_layers: int) -> tuple[int, ...]:
    """Return the target's states that the head reads, as in `LoadedTarget`."""
    made_for = checkpoint.settings.get("num_target_layers")
    if made_for not in (None, target_layers):
        raise checkpoint.wrong_setting("num_target_layers", f"; the target has {target_layers}")
    own = "aux_hidden_state_layer_ids" if checkpoint.by_speculators else "target_layer_ids"
    return checkpoint.states(named(checkpoint, own, "layer_ids") or own, target_layers)


def _attention(
    checkpoint: Checkpoint, layers: int
) -> tuple[tuple[BlockView, ...], tuple[int, ...]]:
    """Return the layers' views and windows.

    Layers to which ``layer_types`` gives a window are causal unless the settings say otherwise, and
    others are not. In z-lab's layout ``causal`` or ``is_causal`` decides for all. Windows of layers
    that see ahead are those of the block's first token, and so are all of speculators, where it
    sees as many tokens before itself as the window is wide.
    """
    settings = checkpoint.settings
    by_speculators = checkpoint.by_speculators
    widths = read_windows(checkpoint, layers)
    stated = settings.get("causal", settings.get("is_causal"))
    views, windows = [], []
    for kind, width in zip(settings.get("layer_types") or [""] * layers, widths, strict=True):
        causal = kind == "sliding_attention"
        if by_speculators:
            causal = causal and not settings.get("sliding_window_non_causal")
        elif stated is not None:
            causal = bool(stated)
        views.append(BlockView(causal, anchored=by_speculators or not causal))
        windows.append(width - (not by_speculators or not width))
    return tuple(views), tuple(windows)


@dataclass(frozen=True, eq=False, kw_only=True)
class DFlashHead(DraftHead):
    """The block draft of DFlash.

    Parameters
    ----------
    block : BlockShape
        What the head fills in one forward.
    hidden_norm, norm : Tensor
        ``[H]``: weights of the norms of the context and before ``lm_head``; the other parts are
        those of `DraftHead`.
    """

    block: BlockShape
    hidden_norm: Tensor
    norm: Tensor

    @without_autocast
    def combine(self, hidden_states: Tensor) -> Tensor:
        """Mix the target's features ``[T, F]`` into the draft's context ``[T, H]``."""
        assert self.fc is not None
        parts = self.fc.parts(hidden_states.to(self.dtype))
        mixed, _ = add_rms_norm(parts, None, self.hidden_norm, self.blocks[0].eps)
        return mixed

    @torch.no_grad()
    @without_autocast
    def write_context(self, states: Tensor, positions: Tensor, pool: KVPool, slots: Tensor) -> None:
        """Store every layer's keys and values; see `BlockDraftModel.write_context`."""
        # once for all layers
        how = self.blocks[0].qkv.rows_format
        x = states if how is None else scale_rows(states, how)
        for layer, block in enumerate(self.blocks):
            parts, rotation = block.keys_values(x)
            pool.store_packed(layer, slots, parts, positions, rotation, 0)

    @torch.no_grad()
    @without_autocast
    def forward_block(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Run the draft over blocks; see `BlockDraftModel.forward_block`."""
        blocks, eps = self.blocks, self.blocks[0].eps
        last = len(blocks) - 1
        ids, table = self._embedding(input_ids)
        how = blocks[0].qkv.rows_format
        x, stream = add_norm_for(how, table[None], None, blocks[0].input_norm, eps, rows=ids)
        for layer, block in enumerate(blocks):
            wanted = rows if layer == last else None
            x, stream = block.attend(x, stream, layer, positions, attend, wanted)
            norm, how = self.norm, self.lm_head.rows_format
            if layer < last:
                norm, how = blocks[layer + 1].input_norm, blocks[layer + 1].qkv.rows_format
            x, stream = add_norm_for(how, block.feed(x), stream, norm, eps)
        return self._logits(x)
