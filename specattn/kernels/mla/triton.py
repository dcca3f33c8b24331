"""Launches of the latent kernels between `attention.launches`'s plan and merge.

The kernel (`splits`, or `gluon_tree` where the tile says so) reads the row of a token once,
as key and as value, for all heads.
"""

from __future__ import annotations

from specattn.kernels.attention.gluon import aligned
from specattn.kernels.attention.launches import TreeKernels, tile_options
from specattn.kernels.attention.tiles import DeviceLimits, GluonTile, TileConfig
from specattn.kernels.attention.tree_attention import Operands, TreeAttention, row_strides
from specattn.kernels.mla import gluon
from specattn.kernels.mla.tiles import GLUON, MERGE, latent_widths, mla_tile_config
from specattn.kernels.mla.triton_tree import mla_attention_kernel


class LatentKernels(TreeKernels):
    """Tables and launches of one bucket; see `TreeKernels`."""

    may_prefetch = False

    def __init__(self, bucket: TreeAttention, tile: TileConfig | None) -> None:
        super().__init__(bucket, tile)
        self.merge_tile = MERGE
        tile = self.tile
        if tile.block_n > 64:
            raise ValueError(f"block_n must be at most 64, got {tile.block_n}")
        sizes = {
            "Q_LEN": bucket.q_len,
            "TAIL": bucket.tail_len,
            "WORDS": bucket.words,
            "HEADS": bucket.num_qo_heads,
            "MT": self.m_tiles,
            "STAGES": tile.stages,
            **self.launch_options,
        }
        own = {
            "WIDTHS": latent_widths(bucket.head_dim, bucket.v_head_dim),
            "BM": tile.block_m,
            "BN": tile.block_n,
            "SHORT": tile.short,
        }
        self._constants = sizes | own | tile_options(tile)
        if isinstance(tile, GluonTile):
            registers = {
                "PRODUCER_REGS": tile.producer_regs,
                "CONSUMER_REGS": tile.consumer_regs,
                "maxnreg": tile.max_regs,
            }
            self._gluon_constants = sizes | registers | {"num_warps": 4}

    def choose_tile(self, bucket: TreeAttention) -> TileConfig:
        """Choose the kernel and its tile: Gluon's where it serves."""
        if gluon.serves(bucket):
            return GLUON
        rows = bucket.q_len * bucket.num_qo_heads
        return mla_tile_config(rows, bucket.dtype, DeviceLimits.of(bucket.device))

    def attend(self, bucket: TreeAttention, operands: Operands) -> None:
        """Launch the tile's kernel; Triton's, where Gluon's cannot copy the rows."""
        tile, blocks = self.tile, (self.splits * self.m_tiles,)
        q, k_cache, _, out, lse, indices, tail = operands
        strides = tail.strides
        inputs = (
            q,
            k_cache,
            out,
            lse,
            indices,
            tail.slots,
            tail.words,
            self.tables.requests,
            self.tables.splits,
            *bucket.workspace,
            bucket.factors[0],
        )
        outer = (*row_strides(out), *row_strides(lse), strides[1], *strides[3:])
        if isinstance(tile, GluonTile) and aligned(q) and aligned(k_cache):
            # Gluon is experimental: nothing may need it where this kernel is not used
            from specattn.kernels.mla.gluon_tree import mla_gluon_kernel

            mla_gluon_kernel[blocks](
                *inputs,
                q.stride(0) // 8,
                q.stride(1) // 8,
                *outer,
                SLOT=k_cache.stride(0),
                **self._gluon_constants,
            )
            return
        mla_attention_kernel[blocks](
            *inputs,
            *row_strides(q),
            *outer,
            SLOT=k_cache.stride(0),
            **self._constants,
        )
