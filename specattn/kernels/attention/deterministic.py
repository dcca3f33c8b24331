"""Launches of tree attention with results independent of batch, bucket and mode.

The same function as `triton` launches, with one order of summation: a request is cut at multiples
of a split size, its tiles count from position 0, and a query token's last tiles are its own: the
rest of the prefix, then the tail keys it sees, as if they followed the prefix. So the bits of a
row are those of the same text in any batch, and a tree's node has the bits of plain decoding at
the end of its path. It costs one step per query token in place of one for all of them, at the end
of each request, and tiles of one shape for all widths.

Four launches: a plan, once per step; the paths, once their ancestors are known; the kernel and a
merge, once per layer. All are capturable, and the captured graph serves every length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.kernels.attention.tiles import (
    FLOAT8,
    DeviceLimits,
    TileConfig,
    cdiv,
    deterministic_tile_config,
    next_power_of_2,
    padded,
)
from specattn.kernels.attention.tree import (
    DeterministicSplits,
    Grid,
    Operands,
    Tail,
    TreeAttention,
    row_strides,
)
from specattn.kernels.attention.triton import TreeKernels, head_constants, tile_options
from specattn.kernels.attention.triton_deterministic import (
    deterministic_attention_kernel,
    deterministic_merge_kernel,
)
from specattn.kernels.attention.triton_deterministic_plan import DeterministicPlan
from specattn.kernels.launch import launch_options

if TYPE_CHECKING:
    from specattn.kernels.attention.triton_plan import PlanRequest

# of the merge; neither changes a result
_MERGE_ROWS, _MERGE_PARTIALS = 8, 8


class DeterministicKernels(TreeKernels):
    """Tables and launches of one bucket; see `TreeKernels`."""

    tables: DeterministicPlan

    def __init__(
        self, bucket: TreeAttention, tile: TileConfig | None, splits: DeterministicSplits
    ) -> None:
        tile = tile or self.choose_tile(bucket)
        if splits.split_keys < 1 or splits.split_keys % tile.block_n:
            raise ValueError(
                f"split_keys must be a multiple of {tile.block_n} (a tile), got {splits.split_keys}"
            )
        self.grid = grid = Grid.of(bucket, tile)
        # a split keeps partials of the one request that began before it; the first one is folded
        kept = min(bucket.batch, grid.splits - 1) * (
            cdiv(splits.max_keys + bucket.tail_len, splits.split_keys) - 1
        )
        if bucket.csr:
            kept = splits.max_keys // splits.split_keys
        self.kept_slots = max(kept, 1)
        # the tokens whose rows share a tile take turns at its end
        self.extra = min(bucket.q_len, cdiv(tile.block_m, bucket.group)) - 1
        self.tables = DeterministicPlan(
            batch=bucket.batch,
            max_splits=grid.splits,
            q_len=bucket.q_len,
            tail_len=bucket.tail_len,
            window_left=bucket.window_left,
            block_n=tile.block_n,
            partial_tiles=splits.split_keys // tile.block_n,
            extra=self.extra,
            csr=bucket.csr,
            device=bucket.device,
        )
        self.launch_options = launch_options(bucket.device)

    def choose_tile(self, bucket: TreeAttention) -> TileConfig:
        """Choose the one tile of the geometry."""
        return deterministic_tile_config(
            bucket.head_dim, bucket.v_head_dim, bucket.kv_dtype, DeviceLimits.of(bucket.device)
        )

    def workspace(self, bucket: TreeAttention) -> list[tuple[int, torch.dtype]]:
        """Return elements and dtypes: kept partials, their lse, folded partials, their scales."""
        rows = bucket.num_kv_heads * bucket.q_len * bucket.group
        kept, folded = self.kept_slots * rows, self.grid.splits * rows
        return [
            (kept * bucket.v_head_dim, bucket.dtype),
            (kept, torch.float32),
            (folded * bucket.v_head_dim, torch.float32),
            (folded * 2, torch.float32),
        ]

    def fill(self, request: PlanRequest) -> None:
        """Fill the bucket's plan."""
        self.tables.fill(request.seq_lens, request.rows, request.row_stride)

    def trace(self, bucket: TreeAttention, indices: Tensor, tail: Tail) -> None:
        """List the paths of all query tokens."""
        if not bucket.csr and (tail.slots is None or tail.words is None):
            raise ValueError("tail_slots and tail_words must be given without csr")
        self.tables.trace(indices, tail)

    def attend(self, bucket: TreeAttention, operands: Operands) -> None:
        """Launch the kernel; the paths stand for the tail."""
        q, k_cache, v_cache, out, lse, indices, tail = operands
        tile, grid, tables = self.grid.tile, self.grid, self.tables
        deterministic_attention_kernel[(grid.splits * bucket.num_kv_heads * grid.m_tiles,)](
            q,
            k_cache,
            v_cache,
            out,
            lse,
            indices,
            tail.positions,
            tables.paths,
            tables.path_lens,
            tables.requests,
            tables.splits,
            *bucket.workspace,
            bucket.sinks,
            *bucket.factors,
            bucket.v_scale if bucket.kv_dtype == FLOAT8 else None,
            *row_strides(q),
            *row_strides(out),
            *row_strides(lse),
            tail.strides[0],
            **head_constants(bucket, k_cache, v_cache),
            TAIL=bucket.tail_len,
            CSR=bucket.csr,
            BM=tile.block_m,
            BN=tile.block_n,
            MT=grid.m_tiles,
            TOKENS=next_power_of_2((tile.block_m - 2) // bucket.group + 2),
            WIDTH=tables.paths.shape[1],
            PARTIAL_TILES=tables.partial_tiles,
            EXTRA=self.extra,
            STAGES=tile.stages,
            **tile_options(tile),
            **self.launch_options,
        )

    def merge(self, bucket: TreeAttention, out: Tensor, lse: Tensor | None) -> None:
        """Launch the merge of the requests that are in several splits."""
        blocks = (
            bucket.num_kv_heads,
            cdiv(bucket.q_len * bucket.group, _MERGE_ROWS),
            min(self.grid.splits - 1, bucket.batch),
        )
        deterministic_merge_kernel[blocks](
            self.tables.merges,
            *bucket.workspace,
            out,
            lse,
            bucket.sinks,
            *row_strides(out),
            *row_strides(lse),
            Q_LEN=bucket.q_len,
            GROUP=bucket.group,
            NUM_KV=bucket.num_kv_heads,
            V_DIM=bucket.v_head_dim,
            V_PAD=padded(bucket.v_head_dim),
            BLOCK=_MERGE_ROWS,
            PARTIALS=_MERGE_PARTIALS,
            num_warps=4,
            **self.launch_options,
        )
