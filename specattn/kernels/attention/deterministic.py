"""Tree attention whose results do not depend on the batch, the bucket or the mode.

The same function as `tree`, with one order of summation: a request is cut at multiples
of a split size, its tiles count from position 0, and a query token's last tiles are its own: the
rest of the prefix, then the tail keys it sees, as if they followed the prefix. So the bits of a
row are those of the same text in any batch, and a tree's node has the bits of plain decoding at
the end of its path. It costs one step per query token in place of one for all of them, at the end
of each request, and tiles of one shape for all widths.

Four launches: a plan, once per step; the paths, once their ancestors are known; the kernel and a
merge, once per layer. All are capturable, and the captured graph serves every length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
from torch import Tensor

from specattn.kernels.attention.deterministic_kernel import (
    fixed_attention_kernel,
    fixed_merge_kernel,
)
from specattn.kernels.attention.deterministic_plan import FixedPlan
from specattn.kernels.attention.tiles import FLOAT8, DeviceLimits, TileConfig, fixed_tile_config
from specattn.kernels.attention.tree import ALIGN, _check, _row_strides
from specattn.kernels.attention.triton_tile import LOG2E

#: Keys between two cuts.
SPLIT_KEYS = 1024
# of the merge; neither changes a result
_MERGE_ROWS, _MERGE_PARTS = 8, 8


@dataclass(frozen=True)
class _Shape:
    """What the head geometry makes of a bucket."""

    group: int
    tile: TileConfig
    rows: int
    m_tiles: int
    max_chunks: int
    kept_slots: int

    @classmethod
    def of(
        cls,
        *,
        batch: int,
        q_len: int,
        tail_len: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_keys: int,
        csr: bool,
        split_keys: int,
        tile: TileConfig | None,
        kv_dtype: torch.dtype | None,
    ) -> _Shape:
        if num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}, "
                f"got {num_qo_heads}"
            )
        limits = DeviceLimits.of(device)
        tile = tile or fixed_tile_config(head_dim, v_head_dim, kv_dtype or dtype, limits)
        if split_keys < 1 or split_keys % tile.block_n:
            raise ValueError(
                f"split_keys must be a multiple of {tile.block_n} (a tile), got {split_keys}"
            )
        group = num_qo_heads // num_kv_heads
        m_tiles = triton.cdiv(q_len * group, tile.block_m)
        max_chunks = max(1, limits.sms * tile.ctas_per_sm // (num_kv_heads * m_tiles))
        # a chunk keeps parts of the one request that began before it; the first part is folded
        kept = min(batch, max_chunks - 1) * (triton.cdiv(max_keys + tail_len, split_keys) - 1)
        if csr:
            kept = max_keys // split_keys
        return cls(group, tile, q_len * group, m_tiles, max_chunks, max(kept, 1))

    def workspace(
        self, num_kv_heads: int, v_head_dim: int, dtype: torch.dtype
    ) -> list[tuple[int, torch.dtype]]:
        """Elements and dtypes of the kept parts, their lse, the folded parts and their scales."""
        kept, folded = (n * num_kv_heads * self.rows for n in (self.kept_slots, self.max_chunks))
        return [
            (kept * v_head_dim, dtype),
            (kept, torch.float32),
            (folded * v_head_dim, torch.float32),
            (folded * 2, torch.float32),
        ]


class FixedAttention:
    """Launch constants, tables and workspace of one bucket.

    ``plan()`` (or ``plan_csr()``) once per step, for all layers; ``trace()`` once the tail is
    known, for all layers; ``run()`` once per layer.

    Parameters
    ----------
    max_keys : int
        Most keys of a prefix; with ``csr``, of all lists together. The workspace is made for it.
    split_keys : int
        Keys between two cuts, a multiple of the tile's. Objects agree in bits only if it is equal.
    tile : TileConfig, optional
        Overrides the tile of `fixed_tile_config`; of it, ``ctas_per_sm`` changes no bit.
    batch, q_len, tail_len, num_qo_heads, num_kv_heads, head_dim, v_head_dim, dtype, device,
    sm_scale, window_left, logit_cap, csr, workspace, kv_dtype
        See `specattn.kernels.attention.tree.TreeAttention`; ``tail_len`` is at least 1 without
        ``csr``.

    Raises
    ------
    ValueError
        If a number is out of range, the workspace does not fit, or the dtypes do not go together.
    """

    def __init__(
        self,
        *,
        batch: int,
        q_len: int,
        tail_len: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        sm_scale: float,
        max_keys: int,
        window_left: int = -1,
        logit_cap: float = 0.0,
        csr: bool = False,
        split_keys: int = SPLIT_KEYS,
        workspace: Tensor | None = None,
        tile: TileConfig | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if kv_dtype not in (None, dtype) and (kv_dtype, dtype.itemsize) != (FLOAT8, 2):
            raise ValueError(f"kv_dtype must be {dtype}, or {FLOAT8} with 16 bits, got {kv_dtype}")
        if (q_len, tail_len) != (1, 0) if csr else tail_len < 1:
            raise ValueError(
                f"csr needs q_len 1 and tail_len 0, tables a tail, got {q_len} and {tail_len}"
            )
        if sm_scale <= 0:
            raise ValueError(f"sm_scale must be above 0, got {sm_scale}")
        device = torch.device(device)
        self.shape = shape = _Shape.of(
            batch=batch,
            q_len=q_len,
            tail_len=tail_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            device=device,
            max_keys=max_keys,
            csr=csr,
            split_keys=split_keys,
            tile=tile,
            kv_dtype=kv_dtype,
        )
        self.batch, self.q_len, self.tail_len = batch, q_len, tail_len
        self.num_qo_heads, self.num_kv_heads = num_qo_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.dtype, self.csr, self.window_left = dtype, csr, window_left
        self.kv_dtype = kv_dtype or dtype
        self._v_scale = 1.0 if kv_dtype == FLOAT8 else None
        # the tokens whose rows share a tile take turns at its end
        self.extra = min(q_len, triton.cdiv(shape.tile.block_m, shape.group)) - 1
        self.tables = FixedPlan.alloc(
            batch=batch,
            max_chunks=shape.max_chunks,
            q_len=q_len,
            tail_len=tail_len,
            window_left=window_left,
            block_n=shape.tile.block_n,
            split_tiles=split_keys // shape.tile.block_n,
            extra=self.extra,
            csr=csr,
            device=device,
        )
        self._scratch = self._carve(workspace, device)
        # logits in base 2; with a cap: cap_out * tanh(cap_in * s)
        self._factors = (
            sm_scale * LOG2E,
            sm_scale / logit_cap if logit_cap else 0.0,
            logit_cap * LOG2E,
        )
        self._has_cap = logit_cap > 0
        self._pdl = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9

    @staticmethod
    def workspace_bytes(
        *,
        batch: int,
        q_len: int,
        tail_len: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_keys: int,
        csr: bool = False,
        split_keys: int = SPLIT_KEYS,
        tile: TileConfig | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> int:
        """Return the bytes of workspace that an object with these parameters needs."""
        shape = _Shape.of(
            batch=batch,
            q_len=q_len,
            tail_len=tail_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            device=torch.device(device),
            max_keys=max_keys,
            csr=csr,
            split_keys=split_keys,
            tile=tile,
            kv_dtype=kv_dtype,
        )
        return _total(shape.workspace(num_kv_heads, v_head_dim, dtype))

    def _carve(self, workspace: Tensor | None, device: torch.device) -> list[Tensor]:
        needs = self.shape.workspace(self.num_kv_heads, self.v_head_dim, self.dtype)
        total = _total(needs)
        if workspace is None:
            workspace = torch.empty(total, dtype=torch.uint8, device=device)
        if workspace.dtype != torch.uint8 or workspace.dim() != 1 or len(workspace) < total:
            raise ValueError(
                f"workspace must be uint8 [{total}] or longer, "
                f"got {workspace.dtype} {list(workspace.shape)}"
            )
        if workspace.data_ptr() % 16:
            raise ValueError("workspace must be aligned to 16 bytes")
        found, at = [], 0
        for count, dtype in needs:
            found.append(workspace[at : at + count * dtype.itemsize].view(dtype))
            at += _aligned(count * dtype.itemsize)
        return found

    def scaled(self, k_scale: float, v_scale: float) -> Self:
        """Return this bucket for a layer of these scales; see `TreeAttention.scaled`."""
        if self._v_scale is None:
            raise ValueError(f"scales need kv_dtype {FLOAT8}, got {self.kv_dtype}")
        other = copy.copy(self)
        base2, cap_in, cap_out = self._factors
        other._factors = (base2 * k_scale, cap_in * k_scale, cap_out)
        other._v_scale = v_scale
        return other

    def plan(self, seq_lens: Tensor, req_pool_indices: Tensor, row_stride: int) -> None:
        """Cut the step's work; see `TreeAttention.plan`."""
        _check("seq_lens", seq_lens, (self.batch,), torch.int32)
        _check("req_pool_indices", req_pool_indices, (self.batch,), torch.int64)
        self.tables.fill(seq_lens, req_pool_indices, row_stride)

    def plan_csr(self, kv_indptr: Tensor) -> None:
        """Cut the work of index lists, ``kv_indptr [B + 1]`` int32."""
        _check("kv_indptr", kv_indptr, (self.batch + 1,), torch.int32)
        self.tables.fill(kv_indptr, None, 1)

    def trace(
        self,
        *,
        indices: Tensor,
        positions: Tensor | None = None,
        tail_slots: Tensor | None = None,
        tail_positions: Tensor | None = None,
        tail_words: Tensor | None = None,
    ) -> None:
        """List what every query token reads after the prefix's last full tile.

        After ``plan()``, and again whenever one of these tensors has changed; they are those of
        `TreeAttention.run`.
        """
        batch, q_len, tail = self.batch, self.q_len, self.tail_len
        if self.csr:
            positions = tail_slots = tail_positions = tail_words = None
        elif tail_slots is None or tail_words is None:
            raise ValueError("tail_slots and tail_words must be given without csr")
        for name, tensor, shape, dtype in (
            ("positions", positions, (batch, q_len), torch.int64),
            ("tail_slots", tail_slots, (batch, tail), torch.int32),
            ("tail_positions", tail_positions, (batch, tail), torch.int64),
            ("tail_words", tail_words, (batch, q_len, triton.cdiv(tail, 64)), torch.int64),
        ):
            if tensor is not None:
                _check(name, tensor, shape, dtype)
        strides = (
            _row_strides(positions)[0],
            _row_strides(tail_slots)[0],
            _row_strides(tail_positions)[0],
            *_row_strides(tail_words),
        )
        self.tables.trace(indices, positions, tail_slots, tail_positions, tail_words, strides)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        *,
        indices: Tensor,
        positions: Tensor | None = None,
    ) -> None:
        """Attend, on the lengths of the last plan and the paths of the last trace.

        Parameters
        ----------
        q, k_cache, v_cache, out, lse, indices, positions
            See `specattn.kernels.attention.tree.TreeAttention.run`.

        Raises
        ------
        ValueError
            If a shape, stride or dtype disagrees with the above.
        """
        self._check_run(q, k_cache, v_cache, out, lse, indices)
        tile, shape, tables = self.shape.tile, self.shape, self.tables
        v_pad = max(16, triton.next_power_of_2(self.v_head_dim))
        common: dict[str, Any] = {"PDL": self._pdl}
        if self._pdl:
            common["launch_pdl"] = True
        options = {"maxnreg": tile.max_regs} if tile.max_regs else {}
        fixed_attention_kernel[(shape.max_chunks * self.num_kv_heads * shape.m_tiles,)](
            q,
            k_cache,
            v_cache,
            out,
            lse,
            indices,
            positions,
            tables.paths,
            tables.path_lens,
            tables.requests,
            tables.chunks,
            *self._scratch,
            *self._factors,
            self._v_scale,
            q.stride(0),
            q.stride(1),
            *_row_strides(out),
            *_row_strides(lse),
            _row_strides(positions)[0],
            K_SLOT=k_cache.stride(0),
            K_HEAD=k_cache.stride(1),
            V_SLOT=v_cache.stride(0),
            V_HEAD=v_cache.stride(1),
            Q_LEN=self.q_len,
            TAIL=self.tail_len,
            WINDOW=self.window_left,
            HAS_CAP=self._has_cap,
            CSR=self.csr,
            GROUP=shape.group,
            NUM_KV=self.num_kv_heads,
            HEAD_DIM=self.head_dim,
            V_DIM=self.v_head_dim,
            D_PAD=max(16, triton.next_power_of_2(self.head_dim)),
            V_PAD=v_pad,
            BM=tile.block_m,
            BN=tile.block_n,
            MT=shape.m_tiles,
            TOKENS=triton.next_power_of_2((tile.block_m - 2) // shape.group + 2),
            WIDTH=tables.paths.shape[1],
            SPLIT=tables.split_tiles,
            EXTRA=self.extra,
            STAGES=tile.stages,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **options,
            **common,
        )
        if shape.max_chunks == 1:
            return
        grid = (
            self.num_kv_heads,
            triton.cdiv(shape.rows, _MERGE_ROWS),
            min(shape.max_chunks - 1, self.batch),
        )
        fixed_merge_kernel[grid](
            tables.splits,
            *self._scratch,
            out,
            lse,
            *_row_strides(out),
            *_row_strides(lse),
            Q_LEN=self.q_len,
            GROUP=shape.group,
            NUM_KV=self.num_kv_heads,
            V_DIM=self.v_head_dim,
            V_PAD=v_pad,
            BLOCK=_MERGE_ROWS,
            PARTS=_MERGE_PARTS,
            num_warps=4,
            **common,
        )

    def _check_run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        indices: Tensor,
    ) -> None:
        rows, heads, kv_heads = self.batch * self.q_len, self.num_qo_heads, self.num_kv_heads
        _check("q", q, (rows, heads, self.head_dim), self.dtype)
        _check("out", out, (rows, heads, self.v_head_dim), self.dtype)
        _check("k_cache", k_cache, (k_cache.shape[0], kv_heads, self.head_dim), self.kv_dtype)
        _check("v_cache", v_cache, (v_cache.shape[0], kv_heads, self.v_head_dim), self.kv_dtype)
        if lse is not None and (lse.shape != (rows, heads) or lse.dtype != torch.float32):
            raise ValueError(
                f"lse must be float32 {[rows, heads]}, got {lse.dtype} {list(lse.shape)}"
            )
        if indices.dtype != torch.int32 or not indices.numel() or indices.stride(-1) != 1:
            raise ValueError(
                f"indices must be int32, not empty, its last dimension contiguous, got "
                f"{indices.dtype} {list(indices.shape)} with strides {indices.stride()}"
            )


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _total(needs: list[tuple[int, torch.dtype]]) -> int:
    return sum(_aligned(count * dtype.itemsize) for count, dtype in needs)
