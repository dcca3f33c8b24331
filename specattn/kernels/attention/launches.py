"""Launches of a bucket's kernels, of prompts, and of merges of results.

A bucket takes three launches: a plan (`plan`, once per step), the kernel (`splits`, or
`gluon_splits` where the tile says so) and a merge (`merges`), once per layer. Prompts take that
kernel alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specattn.kernels.attention import gluon
from specattn.kernels.attention.merges import merge_kernel
from specattn.kernels.attention.plan import PlanRequest, Sharing, TreePlan
from specattn.kernels.attention.splits import tree_attention_kernel
from specattn.kernels.attention.tiles import (
    FLOAT8,
    DeviceLimits,
    GluonTile,
    MergeTile,
    TileConfig,
    extend_tile_config,
    gluon_extend_tile,
    gluon_tile_config,
    merge_tile,
    padded,
    sharing_rows,
    tile_config,
)
from specattn.kernels.attention.tree_attention import (
    Operands,
    Prompts,
    Tail,
    TreeAttention,
    row_strides,
    shape_constants,
)
from specattn.kernels.fused.fp8 import BLOCK, RowsFormat, ScaledRows, has_kernels, rows_like
from specattn.kernels.launch import cdiv, launch_options


class TreeKernels:
    """Tables and launches of one bucket; ``tile`` overrides the tile table.

    What changes from layer to layer is read from the bucket that a call is given.

    Attributes
    ----------
    tile : TileConfig
        The tile of the kernel.
    m_tiles : int
        Tiles that the packed rows of a request and KV head take.
    splits : int
        Most shares that the keys of the batch are cut into; per KV head and M tile, a CTA each.
    """

    tables: TreePlan
    merge_tile: MergeTile

    # of deterministic attention: tiles of a partial result, tiles that paths are worth
    partial_tiles = 0
    extra = 0

    def __init__(self, bucket: TreeAttention, tile: TileConfig | None) -> None:
        self.tile = tile = tile or self.choose_tile(bucket)
        self.m_tiles = cdiv(bucket.q_len * bucket.group, tile.block_m)
        # every multiprocessor gets as many CTAs as the tile is meant for
        ctas = DeviceLimits.of(bucket.device).sms * tile.ctas_per_sm
        self.splits = max(1, ctas // (bucket.num_kv_heads * self.m_tiles))
        self.merge_tile = merge_tile(bucket.batch)
        self.sharing = self._sharing(bucket)
        self.tables = TreePlan(
            batch=bucket.batch,
            max_splits=self.splits,
            tail_len=bucket.tail_len,
            window_left=bucket.window_left,
            block_n=tile.block_n,
            csr=bucket.csr,
            device=bucket.device,
            min_tiles=tile.min_tiles,
            partial_tiles=self.partial_tiles,
            extra=self.extra,
            sharing=self.sharing,
        )
        # programmatic dependent launch: the next kernel's CTAs start while this one drains
        self.launch_options = launch_options(bucket.device)
        # of deterministic attention: the paths, and their constants
        self.path_options: dict[str, Any] = {}

    def choose_tile(self, bucket: TreeAttention) -> TileConfig:
        """Choose from the tile table of the kernel that serves the bucket."""
        rows, stored = bucket.q_len * bucket.group, bucket.kv_dtype
        dims = bucket.head_dim, bucket.v_head_dim
        in_gluon = gluon.serves(*dims, stored, bucket.device)
        if bucket.may_share:
            rows = sharing_rows(rows, stored, rests=in_gluon)
        if in_gluon:
            return gluon_tile_config(
                rows, bucket.head_dim, bucket.batch, bucket.page_size, stored, bucket.has_cap
            )
        return tile_config(rows, *dims, stored, bucket.batch, DeviceLimits.of(bucket.device))

    def _sharing(self, bucket: TreeAttention) -> Sharing | None:
        """Return what is shared, in blocks of a request's M tiles."""
        if not bucket.may_share or self.partial_tiles:
            return None
        rows = bucket.q_len * bucket.group
        return Sharing(bucket.share_from, rows, self.m_tiles * self.tile.block_m)

    @property
    def may_prefetch(self) -> bool:
        """Whether the kernel can read a prefix before it waits."""
        return isinstance(self.tile, GluonTile) and not self.tile.raw_stages

    def workspace(self, bucket: TreeAttention) -> list[tuple[int, torch.dtype]]:
        """Return elements and dtypes of the partial values and their log-sum-exps."""
        sharing = self.sharing
        if sharing:
            entries = self.splits + sharing.entries(bucket.batch)
            rows = self._own_rows(bucket) + bucket.num_kv_heads * entries * sharing.tile_rows
        else:
            # a split has one partial result, or two where a cut request ends and the next begins
            partials = self.splits + min(bucket.batch, self.splits)
            rows = partials * bucket.num_kv_heads * self.m_tiles * self.tile.block_m
        return [(rows * bucket.v_head_dim, bucket.dtype), (rows, torch.float32)]

    def _own_rows(self, bucket: TreeAttention) -> int:
        """Return rows of partial results that are not shared: they come first."""
        return (self.splits + bucket.batch) * bucket.num_kv_heads * bucket.q_len * bucket.group

    def plan(
        self, seq_lens: Tensor, rows: Tensor | None, row_stride: int, table: Tensor | None = None
    ) -> PlanRequest:
        """Return the plan and what to fill it from."""
        return PlanRequest(self.tables, seq_lens, rows, row_stride, table)

    def trace(self, bucket: TreeAttention, indices: Tensor, tail: Tail) -> None:
        """Do nothing: these kernels read the words themselves."""

    def quantises(self, bucket: TreeAttention, how: RowsFormat) -> bool:
        """Whether the merge quantises so: by a scale per head."""
        # the table of requests is another one where all are merged
        each = self.partial_tiles or self.sharing
        return (
            (bucket.v_head_dim, how.groups) == (BLOCK, bucket.num_qo_heads)
            and not (each or self.merge_tile.span)
            and has_kernels(bucket.workspace[0])
        )

    def run(self, bucket: TreeAttention, operands: Operands) -> None:
        """Attend and merge."""
        self.attend(bucket, operands)
        if self.splits > 1 or self.partial_tiles or self.sharing:
            self.merge(bucket, operands.out, operands.lse)

    def run_scaled(self, bucket: TreeAttention, operands: Operands, how: RowsFormat) -> ScaledRows:
        """Attend, merge and quantise."""
        self.attend(bucket, operands)
        found = rows_like(operands.out.flatten(1), how)
        self.merge(bucket, operands.out, None, found)
        return found

    def attend(self, bucket: TreeAttention, operands: Operands) -> None:
        """Launch the kernel of the tile."""
        launch(
            self.tile,
            bucket,
            operands,
            (self.tables.requests, self.tables.splits, *bucket.workspace),
            blocks=(self.splits * bucket.num_kv_heads * self.m_tiles,),
            MT=self.m_tiles,
            **self.shared(bucket, "members"),
            **self.path_options,
        )

    def shared(self, bucket: TreeAttention, table: str) -> dict[str, Any]:
        """Return a kernel's table of the groups, and where their results begin."""
        if not self.sharing:
            return {}
        return {table: getattr(self.tables, table), "own_rows": self._own_rows(bucket)}

    def merge(
        self,
        bucket: TreeAttention,
        out: Tensor,
        lse: Tensor | None,
        scaled: ScaledRows | None = None,
    ) -> None:
        """Launch the merge of the requests that were cut.

        With ``scaled`` it quantises the rows of all requests.
        """
        merge, in_order = self.merge_tile, self.partial_tiles > 0
        options: dict[str, Any] = {}
        if scaled is not None:
            options = {"requests": self.tables.requests, "scaled": scaled.room}
            options["TERMS"] = len(scaled.values)
        # whatever the splits, any request may have to be merged, and results have no padded rows
        each = in_order or self.sharing is not None
        rows, width = bucket.q_len * bucket.group, padded(bucket.v_head_dim)
        span = min(merge.span or width, width)
        blocks = (
            bucket.num_kv_heads * width // span,
            cdiv(rows, merge.rows),
            bucket.batch if each or options else min(self.splits, bucket.batch),
        )
        merge_kernel[blocks](
            self.tables.merges,
            *bucket.workspace,
            out,
            lse,
            bucket.sinks if in_order else None,
            *row_strides(out),
            *row_strides(lse),
            Q_LEN=bucket.q_len,
            GROUP=bucket.group,
            NUM_KV=bucket.num_kv_heads,
            V_DIM=bucket.v_head_dim,
            V_PAD=width,
            BM=rows if each else self.tile.block_m,
            MT=1 if each else self.m_tiles,
            SPAN=span,
            ROWS=merge.rows,
            PARTIALS=merge.partials if in_order else min(merge.partials, self.splits),
            MANY=merge.many,
            IN_ORDER=in_order,
            TILE_ROWS=self.m_tiles * self.tile.block_m,
            **self.shared(bucket, "shares"),
            **options,
            num_warps=4,
            **self.launch_options,
        )


def tile_options(tile: TileConfig) -> dict[str, int]:
    """Return the compiler's options for a tile."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return options | {"maxnreg": tile.max_regs} if tile.max_regs else options


def launch(
    tile: TileConfig,
    bucket: TreeAttention | Prompts,
    operands: Operands,
    plan: tuple[Tensor | None, ...],
    *,
    blocks: tuple[int, ...],
    **options: Any,
) -> None:
    """Launch the kernel of a tile.

    Parameters
    ----------
    tile : TileConfig
        Of Gluon's kernel, or of Triton's.
    bucket : TreeAttention or Prompts
        The forward.
    operands : Operands
        A layer's.
    plan : tuple of Tensor or None
        Requests, splits, partial values and their log-sum-exps; prompts have none.
    blocks : tuple of int
        The grid.
    **options
        Further arguments of the kernel, by name.
    """
    if isinstance(tile, GluonTile):
        gluon.launch(tile, bucket, operands, plan, blocks=math.prod(blocks), **options)
        return
    q, k_cache, v_cache, out, lse, indices, tail = operands
    tree_attention_kernel[blocks](
        q,
        k_cache,
        v_cache,
        out,
        lse,
        indices,
        *tail,
        *plan,
        bucket.sinks,
        *bucket.factors,
        bucket.v_scale if k_cache.dtype == FLOAT8 else None,
        *row_strides(q),
        *row_strides(out),
        *row_strides(lse),
        *tail.strides,
        **shape_constants(bucket, operands),
        V_DIM=v_cache.shape[2],
        D_PAD=padded(k_cache.shape[2]),
        V_PAD=padded(v_cache.shape[2]),
        BM=tile.block_m,
        BN=tile.block_n,
        STAGES=tile.stages,
        SHORT=tile.short,
        **options,
        **tile_options(tile),
        **launch_options(q.device),
    )


def extend_attention(*, operands: Operands, prompts: Prompts, tile: TileConfig | None) -> None:
    """Launch prompt attention, which `specattn.kernels.attention` has checked."""
    q, k_cache, v_cache = operands[:3]
    kv_heads, v_head_dim = v_cache.shape[1:]
    sizes = q.shape[2], v_head_dim
    rows, batch = prompts.max_q_len * q.shape[1] // kv_heads, len(prompts.seq_lens)
    options: dict[str, Any] = {"DETERMINISTIC": prompts.deterministic}
    if (
        tile is None
        and not prompts.deterministic
        and rows > gluon.SHORT_PROMPT
        and gluon.serves(*sizes, k_cache.dtype, q.device)
        and gluon.aligned(k_cache)
        and gluon.aligned(v_cache)
    ):
        tile = gluon_extend_tile(q.shape[2], prompts.page_size, k_cache.dtype)
    elif tile is None:
        tile = extend_tile_config(*sizes, k_cache.dtype, DeviceLimits.of(q.device))
    if isinstance(tile, GluonTile):
        options = {"batch": batch}
    launch(
        tile,
        prompts,
        operands,
        (None,) * 4,
        blocks=(cdiv(rows, tile.block_m), kv_heads, batch),
        MT=1,
        qo_indptr=prompts.qo_indptr,
        seq_lens=prompts.seq_lens,
        table_rows=prompts.req_pool_indices,
        stride_table=operands.indices.stride(0),
        **options,
    )
