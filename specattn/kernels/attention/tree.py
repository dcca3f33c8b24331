"""Tree attention: the one kernel behind decode, draft decode, tree verify and draft extend.

Per request, ``q_len`` query tokens attend to a *prefix* all of them see and to a short *tail*
whose visibility is a bit word per token. The rows of one request and KV head (tokens × heads of
the group) share a tile, so the prefix is read once per request whatever the width of the tree.

Three launches: a plan (`triton_plan`, once per step), the kernel (`triton_tree`) and a merge
(`triton_merge`), once per layer. All are capturable, and the captured graph serves every length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
from torch import Tensor

from specattn.kernels.attention import gluon as gluon_attention
from specattn.kernels.attention.gluon import GluonTile
from specattn.kernels.attention.tiles import (
    FLOAT8,
    DeviceLimits,
    TileConfig,
    merge_tile,
    tile_config,
)
from specattn.kernels.attention.triton_merge import merge_kernel
from specattn.kernels.attention.triton_plan import PlanRequest, TreePlan, fill_plans
from specattn.kernels.attention.triton_tile import LOG2E
from specattn.kernels.attention.triton_tree import tree_attention_kernel

ALIGN = 256
# requests up to which later layers bring the prefix early; steps of more gain nothing by it, and
# lose 0.3 to 0.9 % (docs/notes/streamed_weights.md)
FEW = 4


@dataclass(frozen=True)
class _Shape:
    """What the head geometry makes of a bucket."""

    group: int
    tile: TileConfig
    m_tiles: int
    max_chunks: int
    partial_rows: int

    @classmethod
    def of(
        cls,
        *,
        batch: int,
        q_len: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int,
        tile: TileConfig | None,
        kv_dtype: torch.dtype | None = None,
        has_cap: bool = False,
    ) -> _Shape:
        if num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}, "
                f"got {num_qo_heads}"
            )
        group = num_qo_heads // num_kv_heads
        limits = DeviceLimits.of(device)
        stored = kv_dtype or dtype
        if tile is None and gluon_attention.serves(head_dim, v_head_dim, stored, device):
            tile = gluon_attention.gluon_tile_config(
                q_len * group, head_dim, batch, page_size, stored, has_cap
            )
        tile = tile or tile_config(q_len * group, head_dim, v_head_dim, stored, batch, limits)
        m_tiles = triton.cdiv(q_len * group, tile.block_m)
        max_chunks = max(1, limits.sms * tile.ctas_per_sm // (num_kv_heads * m_tiles))
        # every part is a chunk's, or the second of a chunk in which one split request ends and
        # the next begins
        parts = max_chunks + min(batch, max_chunks)
        rows = parts * num_kv_heads * m_tiles * tile.block_m
        return cls(group, tile, m_tiles, max_chunks, rows)

    def workspace(self, v_head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of the partial values, aligned, and of all."""
        values = triton.cdiv(self.partial_rows * v_head_dim * dtype.itemsize, ALIGN) * ALIGN
        return values, values + self.partial_rows * 4


class TreeAttention:
    """Launch constants and workspace of one bucket.

    ``plan()`` (or ``plan_csr()``) once per step, for all layers; ``run()`` once per layer. Both
    may be captured in a CUDA graph, which then serves every length.

    Parameters
    ----------
    batch : int
        Requests in the bucket; with ``csr``, index lists.
    q_len, tail_len : int
        Query tokens and tail keys per request; 1 and 0 with ``csr``.
    num_qo_heads, num_kv_heads, head_dim, v_head_dim : int
        Head geometry; ``num_qo_heads`` is a multiple of ``num_kv_heads``.
    dtype : torch.dtype
        float32 (IEEE products), float16 or bfloat16.
    device : torch.device
        A CUDA device, or the CPU in Triton's interpreter.
    sm_scale : float
        Factor on the logits, above 0.
    window_left : int
        A key is visible iff ``0 <= pos_q - pos_k <= window_left``, by position; -1 is off. A
        query's position must not be below its request's prefix length.
    logit_cap : float
        Above 0, logits become ``logit_cap * tanh(logits / logit_cap)``.
    page_size : int
        Slots of a page: positions ``p * page_size`` and on lie in consecutive slots, a page's
        first slot is a multiple of ``page_size``. Lets a kernel copy whole pages.
    csr : bool
        Keys come from index lists (``plan_csr``), all visible; a key's position is its place in
        the list, the query's that of the last one.
    workspace : Tensor, optional
        Flat uint8, at least `workspace_bytes` long, for the partial results. Objects that never
        run at the same time may share it.
    tile : TileConfig, optional
        Overrides the tile table.
    kv_dtype : torch.dtype, optional
        Of keys and values: float8 (e4m3), over float16 or bfloat16 queries; ``dtype`` if None.

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
        window_left: int = -1,
        logit_cap: float = 0.0,
        page_size: int = 1,
        csr: bool = False,
        workspace: Tensor | None = None,
        tile: TileConfig | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if kv_dtype not in (None, dtype) and (kv_dtype, dtype.itemsize) != (FLOAT8, 2):
            raise ValueError(f"kv_dtype must be {dtype}, or {FLOAT8} with 16 bits, got {kv_dtype}")
        if csr and (q_len, tail_len) != (1, 0):
            raise ValueError(f"csr needs q_len 1 and tail_len 0, got {q_len} and {tail_len}")
        if sm_scale <= 0:
            raise ValueError(f"sm_scale must be above 0, got {sm_scale}")
        device = torch.device(device)
        shape = _Shape.of(
            batch=batch,
            q_len=q_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            device=device,
            page_size=1 if csr else page_size,
            tile=tile,
            kv_dtype=kv_dtype,
            has_cap=logit_cap > 0,
        )
        self.batch, self.q_len, self.tail_len = batch, q_len, tail_len
        self.num_qo_heads, self.num_kv_heads = num_qo_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.dtype, self.csr, self.window_left = dtype, csr, window_left
        self.kv_dtype = kv_dtype or dtype
        self.v_scale = 1.0
        self.early = False
        self.words = triton.cdiv(tail_len, 64)
        self.page_size = 1 if csr else page_size
        self.shape = shape
        self.merge_tile = merge_tile(batch)
        self.tables = TreePlan.alloc(
            batch=batch,
            max_chunks=shape.max_chunks,
            tail_len=tail_len,
            window_left=window_left,
            block_n=shape.tile.block_n,
            csr=csr,
            device=device,
            min_tiles=shape.tile.min_tiles,
        )
        self.partial_out, self.partial_lse = self._carve(workspace, device)
        # logits in base 2; with a cap: cap_out * tanh(cap_in * s)
        self.factors = (
            sm_scale * LOG2E,
            sm_scale / logit_cap if logit_cap else 0.0,
            logit_cap * LOG2E,
        )
        self.has_cap = logit_cap > 0
        # programmatic dependent launch: the next kernel's CTAs start while this one drains
        self._pdl = device.type == "cuda" and DeviceLimits.of(device).major >= 9

    @staticmethod
    def workspace_bytes(
        *,
        batch: int,
        q_len: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        logit_cap: float = 0.0,
        page_size: int = 1,
        tile: TileConfig | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> int:
        """Return the bytes of workspace that an object with these parameters needs."""
        shape = _Shape.of(
            batch=batch,
            q_len=q_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            device=torch.device(device),
            page_size=page_size,
            tile=tile,
            kv_dtype=kv_dtype,
            has_cap=logit_cap > 0,
        )
        return shape.workspace(v_head_dim, dtype)[1]

    def _carve(self, workspace: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        values, total = self.shape.workspace(self.v_head_dim, self.dtype)
        if workspace is None:
            workspace = torch.empty(total, dtype=torch.uint8, device=device)
        if workspace.dtype != torch.uint8 or workspace.dim() != 1 or len(workspace) < total:
            raise ValueError(
                f"workspace must be uint8 [{total}] or longer, "
                f"got {workspace.dtype} {list(workspace.shape)}"
            )
        if workspace.data_ptr() % 16:
            raise ValueError("workspace must be aligned to 16 bytes")
        used = self.shape.partial_rows * self.v_head_dim * self.dtype.itemsize
        return workspace[:used].view(self.dtype), workspace[values:total].view(torch.float32)

    def scaled(self, k_scale: float, v_scale: float) -> Self:
        """Return this bucket for a layer with these scales of float8 keys and values.

        Plans and workspace are those of this object, and both may run.
        """
        if self.kv_dtype != FLOAT8:
            raise ValueError(f"scales need kv_dtype {FLOAT8}, got {self.kv_dtype}")
        other = copy.copy(self)
        # q (k_scale k): the keys' scale is a factor of the logits, whatever follows
        base2, cap_in, cap_out = self.factors
        other.factors = (base2 * k_scale, cap_in * k_scale, cap_out)
        other.v_scale = v_scale
        return other

    def following(self) -> Self:
        """Return this bucket for a `run` that follows another one on the same plan.

        Where the kernel can and requests are few, such a run reads plan, index table and prefix
        before it waits for the kernel before it; `gluon_tree` says why that is safe. Between the
        two runs nothing may write what they read, but for the tail's keys and values.
        """
        other = copy.copy(self)
        # index lists have no tail: new keys are among the others
        other.early = (
            isinstance(self.shape.tile, GluonTile)
            and not self.shape.tile.raw_stages
            and self.tail_len > 0
            and self.batch <= FEW
        )
        return other

    def plan(self, seq_lens: Tensor, req_pool_indices: Tensor, row_stride: int) -> None:
        """Cut the step's work into chunks, on the device; parameters as in `plan_request`."""
        fill_plans([self.plan_request(seq_lens, req_pool_indices, row_stride)])

    def plan_csr(self, kv_indptr: Tensor) -> None:
        """Cut the work of index lists, ``kv_indptr [B + 1]`` int32, into chunks, on the device."""
        fill_plans([self.plan_request_csr(kv_indptr)])

    def plan_request(
        self, seq_lens: Tensor, req_pool_indices: Tensor, row_stride: int
    ) -> PlanRequest:
        """Return what `plan` does, for `fill_plans` to do together with other buckets.

        Parameters
        ----------
        seq_lens : Tensor
            ``[B]`` int32, prefix lengths, the tail not counted.
        req_pool_indices : Tensor
            ``[B]`` int64, the requests' rows in the index table.
        row_stride : int
            Elements between two rows of that table.
        """
        _check("seq_lens", seq_lens, (self.batch,), torch.int32)
        _check("req_pool_indices", req_pool_indices, (self.batch,), torch.int64)
        return PlanRequest(self.tables, seq_lens, req_pool_indices, row_stride)

    def plan_request_csr(self, kv_indptr: Tensor) -> PlanRequest:
        """Return what `plan_csr` does; see `plan_request`."""
        _check("kv_indptr", kv_indptr, (self.batch + 1,), torch.int32)
        return PlanRequest(self.tables, kv_indptr, None, 1)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        *,
        indices: Tensor,
        positions: Tensor | None,
        tail_slots: Tensor | None,
        tail_positions: Tensor | None,
        tail_words: Tensor | None,
    ) -> None:
        """Attend, on the lengths of the last plan.

        Parameters
        ----------
        q : Tensor
            ``[B * q_len, Hq, D]``; ``out`` is ``[B * q_len, Hq, Dv]``, written in place. A row
            that sees no key gets 0.
        k_cache, v_cache : Tensor
            ``[slots, Hkv, D]`` and ``[slots, Hkv, Dv]`` of ``kv_dtype``, the last dimension
            contiguous.
        lse : Tensor or None
            ``[B * q_len, Hq]`` float32, natural log of the sum of exponentials, written in
            place; -inf for a row that sees no key.
        indices : Tensor
            int32: ``req_to_token [rows, C]``, or ``kv_indices [n]`` with ``csr`` (n >= 1).
        positions : Tensor or None
            ``[B, q_len]`` int64; read under a window only.
        tail_slots : Tensor or None
            ``[B, tail_len]`` int32.
        tail_positions : Tensor or None
            ``[B, tail_len]`` int64; read under a window only.
        tail_words : Tensor or None
            ``[B, q_len, ceil(tail_len / 64)]`` int64; bit j of token i is set iff it sees tail
            key j.

        Raises
        ------
        ValueError
            If a shape, stride or dtype disagrees with the above.
        """
        self._check_run(q, k_cache, v_cache, out, lse, indices)
        windowed = self.window_left >= 0 and not self.csr
        tail = self._tail_args(
            positions if windowed else None,
            tail_slots,
            tail_positions if windowed else None,
            tail_words,
        )
        self._attend(q, k_cache, v_cache, out, lse, indices, *tail)
        self._merge(out, lse)

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        indices: Tensor,
        tensors: tuple[Tensor | None, ...],
        strides: tuple[int, ...],
    ) -> None:
        tile, shape = self.shape.tile, self.shape
        if isinstance(tile, GluonTile):
            gluon_attention.launch(
                self, tile, q, k_cache, v_cache, out, lse, indices, tensors, strides
            )
            return
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        if tile.max_regs:
            options["maxnreg"] = tile.max_regs
        if self._pdl:
            options["launch_pdl"] = True
        tree_attention_kernel[(shape.max_chunks * self.num_kv_heads * shape.m_tiles,)](
            q,
            k_cache,
            v_cache,
            out,
            lse,
            indices,
            *tensors,
            self.tables.requests,
            self.tables.chunks,
            self.partial_out,
            self.partial_lse,
            *self.factors,
            self.v_scale if self.kv_dtype == FLOAT8 else None,
            q.stride(0),
            q.stride(1),
            *_row_strides(out),
            *_row_strides(lse),
            *strides,
            K_SLOT=k_cache.stride(0),
            K_HEAD=k_cache.stride(1),
            V_SLOT=v_cache.stride(0),
            V_HEAD=v_cache.stride(1),
            Q_LEN=self.q_len,
            TAIL=self.tail_len,
            WORDS=self.words,
            WINDOW=self.window_left,
            HAS_CAP=self.has_cap,
            CSR=self.csr,
            GROUP=shape.group,
            NUM_KV=self.num_kv_heads,
            HEAD_DIM=self.head_dim,
            V_DIM=self.v_head_dim,
            D_PAD=max(16, triton.next_power_of_2(self.head_dim)),
            V_PAD=max(16, triton.next_power_of_2(self.v_head_dim)),
            BM=tile.block_m,
            BN=tile.block_n,
            MT=shape.m_tiles,
            STAGES=tile.stages,
            SHORT=tile.short,
            PDL=self._pdl,
            **options,
        )

    def _merge(self, out: Tensor, lse: Tensor | None) -> None:
        shape, batch = self.shape, self.batch
        if shape.max_chunks == 1:
            return
        merge = self.merge_tile
        width = max(16, triton.next_power_of_2(self.v_head_dim))
        span = min(merge.span or width, width)
        grid = (
            self.num_kv_heads * width // span,
            triton.cdiv(self.q_len * shape.group, merge.rows),
            min(shape.max_chunks, batch),
        )
        options = {"launch_pdl": True} if self._pdl else {}
        merge_kernel[grid](
            self.tables.splits,
            self.partial_out,
            self.partial_lse,
            out,
            lse,
            *_row_strides(out),
            *_row_strides(lse),
            Q_LEN=self.q_len,
            GROUP=shape.group,
            NUM_KV=self.num_kv_heads,
            V_DIM=self.v_head_dim,
            V_PAD=width,
            BM=shape.tile.block_m,
            MT=shape.m_tiles,
            SPAN=span,
            ROWS=merge.rows,
            PARTS=min(merge.parts, shape.max_chunks),
            MANY=merge.many,
            PDL=self._pdl,
            num_warps=4,
            **options,
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

    def _tail_args(
        self,
        positions: Tensor | None,
        tail_slots: Tensor | None,
        tail_positions: Tensor | None,
        tail_words: Tensor | None,
    ) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
        """Check the tensors that this bucket reads, drop the others; give them and strides."""
        batch, q_len, tail = self.batch, self.q_len, self.tail_len
        if not tail:
            tail_slots = tail_positions = tail_words = None
        for name, tensor, shape, dtype in (
            ("positions", positions, (batch, q_len), torch.int64),
            ("tail_slots", tail_slots, (batch, tail), torch.int32),
            ("tail_positions", tail_positions, (batch, tail), torch.int64),
            ("tail_words", tail_words, (batch, q_len, self.words), torch.int64),
        ):
            if tensor is not None:
                _check(name, tensor, shape, dtype)
        strides = (
            _row_strides(positions)[0],
            _row_strides(tail_slots)[0],
            _row_strides(tail_positions)[0],
            *_row_strides(tail_words),
        )
        return (positions, tail_slots, tail_positions, tail_words), strides


def _row_strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    if tensor.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")
