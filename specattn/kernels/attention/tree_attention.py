"""Host side of attention for decode, draft decode, tree verify, draft extend.

Per request, ``q_len`` query tokens attend to a *prefix* that all of them see and to a short *tail*
whose visibility is a bit word per token. The rows of one request and KV head (tokens × heads of
the group) share a tile, so the prefix is read once per request whatever the width of the tree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from specattn.checks import require_rows, require_shape
from specattn.kernels.attention.tiles import (
    FLOAT8,
    MOST_SHARERS,
    TileConfig,
    logit_factors,
)
from specattn.kernels.launch import cdiv

if TYPE_CHECKING:
    from specattn.config import KVScales
    from specattn.kernels.attention.launches import TreeKernels
    from specattn.kernels.attention.plan import PlanRequest
    from specattn.kernels.fused.fp8 import RowsFormat, ScaledRows

ALIGN = 256
# requests up to which later layers prefetch the prefix; steps of more gain nothing by it, and lose
# 0.3 to 0.9 % (docs/notes/streamed_weights.md)
PREFETCH_BATCH = 4


@dataclass(frozen=True)
class DeterministicSplits:
    """The cuts of deterministic attention: at multiples, whatever the batch.

    Parameters
    ----------
    max_keys : int
        Most keys of a prefix; with ``csr``, of all lists together. The workspace is made for it.
    split_keys : int
        Keys between two cuts, a multiple of the tile's. Objects agree in bits only if it is equal.
    """

    max_keys: int
    split_keys: int = 1024


class Tail(NamedTuple):
    """The tail of every request; None is not read.

    Parameters
    ----------
    positions : Tensor or None
        ``[B, q_len]`` int64.
    slots, slot_positions : Tensor or None
        ``[B, tail_len]`` int32 and int64.
    words : Tensor or None
        ``[B, q_len, ceil(tail_len / 64)]`` int64.
    """

    positions: Tensor | None = None
    slots: Tensor | None = None
    slot_positions: Tensor | None = None
    words: Tensor | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides between requests, and between the words of two query tokens."""
        return (
            row_strides(self.positions)[0],
            row_strides(self.slots)[0],
            row_strides(self.slot_positions)[0],
            *row_strides(self.words),
        )


class Operands(NamedTuple):
    """Tensors of one layer's attention, checked; prompts have no tail."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    lse: Tensor | None
    indices: Tensor
    tail: Tail = Tail()


class Prompts(NamedTuple):
    """Ragged prompts, in the place of a bucket of requests.

    Parameters are those of `specattn.kernels.attention.extend_attention`, with ``factors`` as
    `logit_factors` returns them. A row has a single token, and neither tail nor plan.
    """

    qo_indptr: Tensor
    seq_lens: Tensor
    req_pool_indices: Tensor
    max_q_len: int
    factors: tuple[float, float, float]
    window_left: int
    v_scale: float
    page_size: int
    deterministic: bool
    sinks: Tensor | None
    q_len: int = 1
    tail_len: int = 0
    words: int = 0
    csr: bool = False
    prefetch: bool = False


def shape_constants(bucket: TreeAttention | Prompts, operands: Operands) -> dict[str, int]:
    """Return the constants of a launch that both languages' kernels have."""
    q, k_cache, v_cache = operands[:3]
    return {
        "Q_LEN": bucket.q_len,
        "TAIL": bucket.tail_len,
        "WORDS": bucket.words,
        "WINDOW": bucket.window_left,
        "HAS_CAP": bucket.factors[2] > 0,
        "CSR": bucket.csr,
        "GROUP": q.shape[1] // k_cache.shape[1],
        "NUM_KV": k_cache.shape[1],
        "HEAD_DIM": k_cache.shape[2],
        "K_SLOT": k_cache.stride(0),
        "K_HEAD": k_cache.stride(1),
        "V_SLOT": v_cache.stride(0),
        "V_HEAD": v_cache.stride(1),
    }


class TreeAttention:
    """Launch constants, plan and workspace of one bucket.

    ``plan().fill()`` (or ``plan_csr().fill()``) once per step, for all layers; ``trace()`` once the
    tail is known, for all layers, which only deterministic attention needs; ``run()`` once per
    layer. All may be captured in a CUDA graph, which then serves every length.

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
    workspace : callable, optional
        Takes a number of bytes and returns a flat uint8 tensor of at least as many, for the
        partial results. Objects that never run at the same time may share one.
    tile : TileConfig, optional
        Overrides the tile table.
    kv_dtype : torch.dtype, optional
        Of keys and values: float8 (e4m3), over float16 or bfloat16 queries; ``dtype`` if None.
    deterministic : DeterministicSplits, optional
        Gives a row the same bits in any batch, bucket and mode. ``tail_len`` is then at least 1
        without ``csr``, and of ``tile``, ``ctas_per_sm`` changes no bit.
    share_from : int
        If above 0, requests whose prefixes begin with as many equal slots, or more, read the keys
        there once, where that saves half as many per request. ``plan()`` finds them in the index
        table. Nothing is shared with ``csr``, a window or ``deterministic``, or in batches above
        `MOST_SHARERS`. The workspace then has room for twice the packed rows of the batch, and for
        what 16 groups leave empty.

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
        workspace: Callable[[int], Tensor] | None = None,
        tile: TileConfig | None = None,
        kv_dtype: torch.dtype | None = None,
        deterministic: DeterministicSplits | None = None,
        share_from: int = 0,
    ) -> None:
        if kv_dtype not in (None, dtype) and (kv_dtype, dtype.itemsize) != (FLOAT8, 2):
            raise ValueError(f"kv_dtype must be {dtype}, or {FLOAT8} with 16 bits, got {kv_dtype}")
        if csr and (q_len, tail_len) != (1, 0):
            raise ValueError(f"csr needs q_len 1 and tail_len 0, got {q_len} and {tail_len}")
        if deterministic and not csr and tail_len < 1:
            raise ValueError(f"deterministic needs a tail without csr, got tail_len {tail_len}")
        if share_from < 0:
            raise ValueError(f"share_from must be 0 (nothing is shared) or more, got {share_from}")
        if sm_scale <= 0:
            raise ValueError(f"sm_scale must be above 0, got {sm_scale}")
        if num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}, "
                f"got {num_qo_heads}"
            )
        self.batch, self.q_len, self.tail_len = batch, q_len, tail_len
        self.num_qo_heads, self.num_kv_heads = num_qo_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.dtype, self.device, self.csr = dtype, torch.device(device), csr
        self.window_left, self.has_cap = window_left, logit_cap > 0
        self.page_size = 1 if csr else page_size
        self.kv_dtype = kv_dtype or dtype
        self.group = num_qo_heads // num_kv_heads
        self.words, self.share_from = cdiv(tail_len, 64), share_from
        self.factors = logit_factors(sm_scale, logit_cap)
        self.v_scale = 1.0
        self.prefetch = False
        self.sinks: Tensor | None = None
        self.kernels = self._kernels(tile, deterministic)
        self.workspace = _carve(self.kernels.workspace(self), workspace, self.device)

    def _kernels(
        self, tile: TileConfig | None, deterministic: DeterministicSplits | None
    ) -> TreeKernels:
        if deterministic:
            from specattn.kernels.attention.deterministic import DeterministicKernels

            return DeterministicKernels(self, tile, deterministic)
        from specattn.kernels.attention.launches import TreeKernels

        return TreeKernels(self, tile)

    @property
    def tile(self) -> TileConfig:
        """The tile of the kernel."""
        return self.kernels.tile

    @property
    def may_share(self) -> bool:
        """Whether requests of the batch can share prefixes; see ``share_from``."""
        return (
            self.share_from > 0
            and 1 < self.batch <= MOST_SHARERS
            and self.window_left < 0
            and not self.csr
        )

    @property
    def tables(self) -> Any:
        """The tables of the plan, which `plan` fills."""
        return self.kernels.tables

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return this bucket for one layer.

        It shares the plan and the workspace of this object.

        Parameters
        ----------
        scales : KVScales or None
            Of float8 keys and values.
        prefetch : bool
            Whether ``run`` follows another one on the same plan. Where the kernel can and requests
            are few, it then reads plan, index table and prefix before it waits for the kernel in
            front of it; `gluon_splits` says why that is safe. Between the two runs nothing may
            write what they read, but for the tail's keys and values.

        Raises
        ------
        ValueError
            For scales, if keys and values are not float8.
        """
        other = copy.copy(self)
        # index lists have no tail: new keys are among the others
        other.prefetch = (
            prefetch
            and self.kernels.may_prefetch
            and self.tail_len > 0
            and self.batch <= PREFETCH_BATCH
        )
        if scales is None:
            return other
        if self.kv_dtype != FLOAT8:
            raise ValueError(f"scales need kv_dtype {FLOAT8}, got {self.kv_dtype}")
        # q (k_scale k): the keys' scale is a factor of the logits, whatever follows
        base2, cap_in, cap_out = self.factors
        other.factors = (base2 * scales.k, cap_in * scales.k, cap_out)
        other.v_scale = scales.v
        return other

    def with_sinks(self, sinks: Tensor) -> Self:
        """Return this bucket with a layer's sinks.

        They join the sum in the share that holds a request's first keys, or, where that would
        depend on the batch (deterministic attention), after all keys. Partial results are
        otherwise as without, and so is their merge.

        Parameters
        ----------
        sinks : Tensor
            ``[Hq]`` float32, float16 or bfloat16, contiguous; logits that no scale and no cap
            applies to.

        Raises
        ------
        ValueError
            If it is of another shape, dtype or device.
        """
        check_sinks(sinks, self.num_qo_heads, self.device)
        other = copy.copy(self)
        other.sinks = sinks
        return other

    def plan(
        self,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        row_stride: int,
        *,
        table: Tensor | None = None,
    ) -> PlanRequest:
        """Return what splits the step's work on the device, by its ``fill``.

        `fill_plans` does so for several buckets at once.

        Parameters
        ----------
        seq_lens : Tensor
            ``[B]`` int32, prefix lengths, the tail not counted.
        req_pool_indices : Tensor
            ``[B]`` int64, the requests' rows in the index table.
        row_stride : int
            Elements between two rows of that table.
        table : Tensor, optional
            ``[rows, C]`` int32, that table; needed with ``share_from``.
        """
        require_shape((self.batch,), torch.int32, seq_lens=seq_lens)
        require_shape((self.batch,), torch.int64, req_pool_indices=req_pool_indices)
        require_rows(seq_lens=seq_lens, req_pool_indices=req_pool_indices)
        if self.share_from and (table is None or table.dtype != torch.int32):
            found = None if table is None else table.dtype
            raise ValueError(f"table must be int32 [rows, C] with share_from, got {found}")
        return self.kernels.plan(seq_lens, req_pool_indices, row_stride, table)

    def plan_csr(self, kv_indptr: Tensor) -> PlanRequest:
        """Return what splits the work of lists: of ``[B + 1]`` int32."""
        require_shape((self.batch + 1,), torch.int32, kv_indptr=kv_indptr)
        require_rows(kv_indptr=kv_indptr)
        return self.kernels.plan(kv_indptr, None, 1)

    def trace(self, *, indices: Tensor, **tail: Tensor | None) -> None:
        """List what every query token reads after the prefix's last full tile.

        Deterministic attention needs it after ``plan()``, and again whenever one of these tensors
        has changed; they are those of `run`.

        Raises
        ------
        ValueError
            If a shape, stride or dtype disagrees with those of `run`, or a tail is not given.
        """
        self.kernels.trace(self, indices, self._tail(**tail))

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        *,
        indices: Tensor,
        **tail: Tensor | None,
    ) -> None:
        """Attend, on the lengths of the last plan.

        A deterministic bucket reads the last trace, too.

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
        positions : Tensor, optional
            ``[B, q_len]`` int64; read under a window only.
        tail_slots : Tensor, optional
            ``[B, tail_len]`` int32; needed unless ``csr``, as are the words.
        tail_positions : Tensor, optional
            ``[B, tail_len]`` int64; read under a window only.
        tail_words : Tensor, optional
            ``[B, q_len, ceil(tail_len / 64)]`` int64; bit j of token i is set iff it sees tail
            key j.

        Raises
        ------
        ValueError
            If a shape, stride or dtype disagrees with the above.
        """
        operands = Operands(q, k_cache, v_cache, out, lse, indices, self._tail(**tail))
        self._check_run(operands)
        self.kernels.run(self, operands)

    def quantises(self, how: RowsFormat) -> bool:
        """Whether `scaled` quantises so, which costs no launch."""
        return self.kernels.quantises(self, how)

    def scaled(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        how: RowsFormat,
        *,
        indices: Tensor,
        **tail: Tensor | None,
    ) -> ScaledRows:
        """Attend as `run`, and quantise for a product.

        Parameters
        ----------
        q, k_cache, v_cache, indices, **tail
            As in `run`.
        how : RowsFormat
            What `quantises` allows.

        Returns
        -------
        ScaledRows
            ``[B * q_len, Hq * Dv]``, as `scale_rows` makes it of ``out``.
        """
        out = q.new_empty(*q.shape[:-1], self.v_head_dim)
        operands = Operands(q, k_cache, v_cache, out, None, indices, self._tail(**tail))
        self._check_run(operands)
        return self.kernels.run_scaled(self, operands, how)

    def _check_run(self, operands: Operands) -> None:
        q, k_cache, v_cache, out, lse, indices, _ = operands
        rows, heads, kv_heads = self.batch * self.q_len, self.num_qo_heads, self.num_kv_heads
        key, value = (kv_heads, self.head_dim), (kv_heads, self.v_head_dim)
        require_shape((rows, heads, self.head_dim), self.dtype, q=q)
        require_shape((rows, heads, self.v_head_dim), self.dtype, out=out)
        require_shape((len(k_cache), *key), self.kv_dtype, k_cache=k_cache)
        require_shape((len(v_cache), *value), self.kv_dtype, v_cache=v_cache)
        require_shape((rows, heads), torch.float32, lse=lse)
        require_rows(q=q, out=out, k_cache=k_cache, v_cache=v_cache)
        if indices.dtype != torch.int32 or not indices.numel() or indices.stride(-1) != 1:
            raise ValueError(
                f"indices must be int32, not empty, its last dimension contiguous, got "
                f"{indices.dtype} {list(indices.shape)} with strides {indices.stride()}"
            )

    def _tail(
        self,
        *,
        positions: Tensor | None = None,
        tail_slots: Tensor | None = None,
        tail_positions: Tensor | None = None,
        tail_words: Tensor | None = None,
    ) -> Tail:
        """Check the tensors this bucket reads; return them."""
        batch, q_len, tail = self.batch, self.q_len, self.tail_len
        if self.window_left < 0 or self.csr:
            positions = tail_positions = None
        if not tail:
            tail_slots = tail_positions = tail_words = None
        require_shape((batch, q_len), torch.int64, positions=positions)
        require_shape((batch, tail), torch.int32, tail_slots=tail_slots)
        require_shape((batch, tail), torch.int64, tail_positions=tail_positions)
        require_shape((batch, q_len, self.words), torch.int64, tail_words=tail_words)
        require_rows(positions=positions, tail_slots=tail_slots)
        require_rows(tail_positions=tail_positions, tail_words=tail_words)
        return Tail(positions, tail_slots, tail_positions, tail_words)


def row_strides(tensor: Tensor | None) -> tuple[int, int]:
    """Return the first two strides of a tensor; zeros for none."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def check_sinks(sinks: Tensor, heads: int, device: torch.device) -> None:
    """Raise a ValueError unless ``sinks`` are ``[heads]`` floats, in a row."""
    if (
        sinks.shape != (heads,)
        or sinks.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        or sinks.device.type != device.type
        or not sinks.is_contiguous()
    ):
        raise ValueError(
            f"sinks must be {[heads]} float32, float16 or bfloat16, contiguous, on {device}, got "
            f"{list(sinks.shape)} {sinks.dtype} on {sinks.device}"
        )


def _carve(
    needs: list[tuple[int, torch.dtype]],
    workspace: Callable[[int], Tensor] | None,
    device: torch.device,
) -> list[Tensor]:
    """Lay flat tensors of these lengths and dtypes out in one workspace."""
    sizes = [cdiv(count * dtype.itemsize, ALIGN) * ALIGN for count, dtype in needs]
    total, at, found = sum(sizes), 0, []
    if workspace is None:
        memory = torch.empty(total, dtype=torch.uint8, device=device)
    else:
        memory = workspace(total)
    if memory.dtype != torch.uint8 or memory.dim() != 1 or len(memory) < total:
        raise ValueError(
            f"workspace must be uint8 [{total}] or longer, got {memory.dtype} {list(memory.shape)}"
        )
    if memory.data_ptr() % 16:
        raise ValueError("workspace must be aligned to 16 bytes")
    for (count, dtype), size in zip(needs, sizes, strict=True):
        found.append(memory[at : at + count * dtype.itemsize].view(dtype))
        at += size
    return found
