"""Launches of the latent kernels between `attention.triton`'s plan and merge.

The kernel (`triton_tree`, or `gluon_tree` where the tile says so) reads the row of a token once,
as key and as value, for all heads.
"""

from __future__ import annotations

from specattn.kernels.attention.tiles import GluonTile, MergeTile, TileConfig
from specattn.kernels.attention.tree import Operands, TreeAttention, row_strides
from specattn.kernels.attention.triton import TreeKernels, tile_options
from specattn.kernels.mla.gluon import choose_mla_tile, copies_16_bytes, launch_latent
from specattn.kernels.mla.tiles import MERGE, latent_widths
from specattn.kernels.mla.triton_tree import mla_attention_kernel


class LatentKernels(TreeKernels):
    """Tables and launches of one bucket; see `TreeKernels`."""

    may_prefetch = False

    def __init__(
        self, bucket: TreeAttention, tile: TileConfig | None, merge: MergeTile | None
    ) -> None:
        super().__init__(bucket, tile)
        self.merge_tile = merge or MERGE
        if self.grid.tile.block_n > 64:
            raise ValueError(f"block_n must be at most 64, got {self.grid.tile.block_n}")

    def choose_tile(self, bucket: TreeAttention) -> TileConfig:
        """Choose the kernel and its tile; see `choose_mla_tile`."""
        return choose_mla_tile(
            bucket.q_len * bucket.num_qo_heads,
            bucket.dtype,
            bucket.head_dim,
            bucket.v_head_dim,
            bucket.device,
        )

    def attend(self, bucket: TreeAttention, operands: Operands) -> None:
        """Launch the tile's kernel; Triton's, where Gluon's cannot copy the rows."""
        grid, tile = self.grid, self.grid.tile
        q, k_cache, _, out, lse, indices, tail = operands
        if isinstance(tile, GluonTile) and copies_16_bytes(q, k_cache):
            launch_latent(self, tile, bucket, operands)
            return
        strides = tail.strides
        mla_attention_kernel[(grid.splits * grid.m_tiles,)](
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
            *row_strides(q),
            *row_strides(out),
            *row_strides(lse),
            strides[1],
            *strides[3:],
            SLOT=k_cache.stride(0),
            Q_LEN=bucket.q_len,
            TAIL=bucket.tail_len,
            WORDS=bucket.words,
            HEADS=bucket.num_qo_heads,
            BM=tile.block_m,
            BN=tile.block_n,
            MT=grid.m_tiles,
            STAGES=tile.stages,
            SHORT=tile.short,
            **latent_widths(bucket.head_dim, bucket.v_head_dim),
            **tile_options(tile),
            **self.launch_options,
        )
