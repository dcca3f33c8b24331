"""Latent tree attention: absorbed MLA in every tree mode, and over index lists.

The plan and the merge are those of `tree_attention`; the kernel between them (`mla_kernel`) reads
the row of a token once, as key and as value, for all heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specattn.kernels.mla_kernel import mla_attention_kernel
from specattn.kernels.tile_config import HOPPER, DeviceLimits, TileConfig, fit_tile
from specattn.kernels.tree_attention import TreeAttention, _row_strides
from specattn.kernels.tree_merge import merge_kernel

# a row of DeepSeek's, padded: no model has a wider one
ROW = 512 + 64


def mla_tile_config(
    rows: int, dtype: torch.dtype, limits: DeviceLimits = HOPPER
) -> TileConfig:
    """Choose by packed rows (query tokens × heads), as `tile_config` does; BN is at most 64.

    An accumulator of 512 columns sets the limits, above 32 rows with the queries in shared memory.
    The 16-bit tile up to 16 rows was the best of a prototype on an H200; the others were chosen
    by what compiles without spills in the loop over full tiles, or with few, and not yet timed.
    """
    if limits.major != HOPPER.major and dtype != torch.float32:
        # not yet timed, either; tensor memory would want each tile several times in shared memory
        tile = TileConfig(16, 32) if rows <= 16 else TileConfig(32, 32, warps=8, ctas_per_sm=1)
    else:
        tile = _hopper_tile(rows, dtype)
    return fit_tile(tile, ROW * dtype.itemsize, ROW * dtype.itemsize, limits)


def _hopper_tile(rows: int, dtype: torch.dtype) -> TileConfig:
    if dtype == torch.float32:
        # IEEE products run on the FMA units
        return TileConfig(16, 16, warps=8, stages=2)
    if rows <= 16:
        return TileConfig(16, 32)
    if rows <= 32:
        return TileConfig(32, 32, warps=8, ctas_per_sm=1)
    # of 32 keys, both warpgroups would compute the same logits from the narrowest products
    return TileConfig(64, 64, warps=8, stages=2, ctas_per_sm=1)


class MlaAttention(TreeAttention):
    """Launch constants and workspace of one bucket; ``plan``, ``plan_csr`` and ``run`` as there.

    ``run`` takes the pool twice: ``k_cache [slots, 1, head_dim]``, and ``v_cache``, which must be
    the view of its first ``v_head_dim`` columns.

    Parameters
    ----------
    num_qo_heads : int
        Heads, all of which read the same rows.
    head_dim, v_head_dim : int
        Width of a row, and of its latent part.
    tile : TileConfig, optional
        Overrides `mla_tile_config`.
    batch, q_len, tail_len, dtype, device, sm_scale, csr, workspace
        See `TreeAttention`.

    Raises
    ------
    ValueError
        If a number is out of range or the workspace does not fit.
    """

    def __init__(
        self, *, batch: int, q_len: int, tail_len: int, num_qo_heads: int, head_dim: int,
        v_head_dim: int, dtype: torch.dtype, device: torch.device | str, sm_scale: float,
        csr: bool = False, workspace: Tensor | None = None, tile: TileConfig | None = None,
    ) -> None:
        tile = tile or mla_tile_config(
            q_len * num_qo_heads, dtype, DeviceLimits.of(torch.device(device))
        )
        if tile.block_n > 64:
            raise ValueError(f"block_n must be at most 64, got {tile.block_n}")
        if not v_head_dim < head_dim:
            raise ValueError(f"v_head_dim must be below {head_dim}, got {v_head_dim}")
        super().__init__(
            batch=batch, q_len=q_len, tail_len=tail_len, num_qo_heads=num_qo_heads,
            num_kv_heads=1, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, device=device,
            sm_scale=sm_scale, csr=csr, workspace=workspace, tile=tile,
        )

    def _check_run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None,
        indices: Tensor,
    ) -> None:
        super()._check_run(q, k_cache, v_cache, out, lse, indices)
        check_latent(k_cache, v_cache)

    def _attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None,
        indices: Tensor, tensors: tuple[Tensor | None, ...], strides: tuple[int, ...],
    ) -> None:
        tile, shape = self.shape.tile, self.shape
        _, tail_slots, _, tail_words = tensors
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        if tile.max_regs:
            options["maxnreg"] = tile.max_regs
        if self._pdl:
            options["launch_pdl"] = True
        mla_attention_kernel[(shape.max_chunks * shape.m_tiles,)](
            q, k_cache, out, lse, indices, tail_slots, tail_words,
            self.tables.requests, self.tables.chunks, self.partial_out, self.partial_lse,
            self.factors[0], q.stride(0), q.stride(1), *_row_strides(out), *_row_strides(lse),
            strides[1], *strides[3:],
            SLOT=k_cache.stride(0), Q_LEN=self.q_len, TAIL=self.tail_len, WORDS=self.words,
            HEADS=self.num_qo_heads, BM=tile.block_m, BN=tile.block_n, MT=shape.m_tiles,
            STAGES=tile.stages, SHORT=tile.short, PDL=self._pdl,
            **latent_widths(self.head_dim, self.v_head_dim), **options,
        )

    def _merge(self, out: Tensor, lse: Tensor | None) -> None:
        shape, batch = self.shape, self.batch
        if shape.max_chunks == 1:
            return
        # rows are wide: few per program, so that the parts loaded at once stay in registers
        rows, parts = (1, 32) if batch == 1 else (2, 16) if batch <= 4 else (4, 8)
        grid = (1, triton.cdiv(self.q_len * shape.group, rows), min(shape.max_chunks, batch))
        options = {"launch_pdl": True} if self._pdl else {}
        merge_kernel[grid](
            self.tables.splits, self.partial_out, self.partial_lse, out, lse,
            *_row_strides(out), *_row_strides(lse),
            Q_LEN=self.q_len, GROUP=shape.group, NUM_KV=1, V_DIM=self.v_head_dim,
            V_PAD=max(16, triton.next_power_of_2(self.v_head_dim)), BM=shape.tile.block_m,
            MT=shape.m_tiles, ROWS=rows, PARTS=min(parts, shape.max_chunks), PDL=self._pdl,
            num_warps=4, **options,
        )


def latent_widths(head_dim: int, v_head_dim: int) -> dict[str, int]:
    """Return the widths of the two parts of a row as constants of the kernels."""
    rope = head_dim - v_head_dim
    return {
        "RANK": v_head_dim, "ROPE": rope, "RANK_PAD": max(16, triton.next_power_of_2(v_head_dim)),
        "ROPE_PAD": max(16, triton.next_power_of_2(rope)),
    }


def check_latent(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise unless ``v_cache`` is the view of the first columns of ``k_cache``.

    Raises
    ------
    ValueError
        If it has memory or strides of its own.
    """
    if v_cache.data_ptr() != k_cache.data_ptr() or v_cache.stride() != k_cache.stride():
        raise ValueError(
            f"v_cache must be k_cache[..., :{v_cache.shape[-1]}], a view, "
            f"got memory or strides of its own"
        )
