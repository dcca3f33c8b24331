"""Launches of tree attention with results independent of batch, bucket and mode.

The kernels are those of `launches`, with one order of summation: a request is cut at multiples of a
split size, its tiles count from position 0, and a query token's last tiles are its own (its path,
see `paths`). So the bits of a row are those of the same text in any batch, and a tree's node
has the bits of plain decoding at the end of its path. It costs one step per query token in place
of one for all of them, at the end of each request, and tiles of one shape for all widths.

One launch more than `triton` has: the paths, once their ancestors are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.kernels.attention.launches import TreeKernels
from specattn.kernels.attention.paths import path_kernel
from specattn.kernels.attention.tiles import (
    DeviceLimits,
    MergeTile,
    TileConfig,
    deterministic_tile_config,
)
from specattn.kernels.launch import cdiv, power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.kernels.attention.tree_attention import DeterministicSplits, Tail, TreeAttention


class DeterministicKernels(TreeKernels):
    """Tables and launches of one bucket; see `TreeKernels`."""

    def __init__(
        self, bucket: TreeAttention, tile: TileConfig | None, splits: DeterministicSplits
    ) -> None:
        tile = tile or self.choose_tile(bucket)
        if splits.split_keys < 1 or splits.split_keys % tile.block_n:
            raise ValueError(
                f"split_keys must be a multiple of {tile.block_n} (a tile), got {splits.split_keys}"
            )
        self.cuts = splits
        self.partial_tiles = splits.split_keys // tile.block_n
        # the tokens whose rows share a tile take turns at its end
        self.extra = min(bucket.q_len, cdiv(tile.block_m, bucket.group)) - 1
        super().__init__(bucket, tile)
        self.merge_tile = MergeTile(8, 8)
        rows, width = bucket.batch * bucket.q_len, 1 + cdiv(bucket.tail_len, tile.block_n)
        self.paths = torch.zeros(
            rows, width * tile.block_n, dtype=torch.int32, device=bucket.device
        )
        self.path_lens = torch.zeros(rows, dtype=torch.int32, device=bucket.device)
        self.path_options = {
            "DETERMINISTIC": True,
            "PARTIAL_TILES": self.partial_tiles,
            "EXTRA": self.extra,
            "TOKENS": power_of_2((tile.block_m - 2) // bucket.group + 2),
            "WIDTH": self.paths.shape[1],
            "paths": self.paths,
            "path_lens": self.path_lens,
        }

    def choose_tile(self, bucket: TreeAttention) -> TileConfig:
        """Choose the one tile of the geometry."""
        return deterministic_tile_config(
            bucket.head_dim, bucket.v_head_dim, bucket.kv_dtype, DeviceLimits.of(bucket.device)
        )

    def workspace(self, bucket: TreeAttention) -> list[tuple[int, torch.dtype]]:
        """Return elements and dtypes of the partial values and their log-sum-exps.

        Every partial result has a place of its own.
        """
        keys, size = self.cuts.max_keys, self.cuts.split_keys
        if bucket.csr:
            partials = bucket.batch + keys // size
        else:
            partials = bucket.batch * cdiv(keys + bucket.tail_len, size)
        rows = partials * bucket.num_kv_heads * bucket.q_len * bucket.group
        return [(rows * bucket.v_head_dim, bucket.dtype), (rows, torch.float32)]

    def trace(self, bucket: TreeAttention, indices: Tensor, tail: Tail) -> None:
        """List the paths of all query tokens, after `fill`."""
        if not bucket.csr and (tail.slots is None or tail.words is None):
            raise ValueError("tail_slots and tail_words must be given without csr")
        path_kernel[(len(self.paths),)](
            self.tables.requests,
            indices,
            *tail,
            self.paths,
            self.path_lens,
            *tail.strides,
            Q_LEN=bucket.q_len,
            TAIL=bucket.tail_len,
            TAIL_BLOCK=max(power_of_2(max(bucket.tail_len, 1)), 16),
            WINDOW=bucket.window_left,
            CSR=bucket.csr,
            BN=self.tile.block_n,
            WIDTH=self.paths.shape[1],
            num_warps=2,
        )
