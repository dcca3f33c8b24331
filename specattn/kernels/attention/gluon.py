"""Host side of the Gluon kernels: where they serve, their tile tables and their launches.

`tree` and `extend` are the callers and say what is computed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specattn.kernels.attention.tiles import FLOAT8, TileConfig
from specattn.kernels.gluon_guard import gluon_ok

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.kernels.attention.tree import TreeAttention

# converters take the registers that consumers of heads of 256 would need
HEAD_DIMS = {
    torch.float16: (64, 128, 256),
    torch.bfloat16: (64, 128, 256),
    FLOAT8: (64, 128),
}
PRODUCERS = 4
# a row has to be copied in pieces of this many bytes
PIECE = 16
# with as few rows per request, prompts end before filling a ring has paid
SHORT_PROMPT = 512


@dataclass(frozen=True)
class GluonTile(TileConfig):
    """Launch constants of the Gluon kernel; ``warps`` and ``short`` do not apply.

    Parameters
    ----------
    block_m : int
        64 or 128: one or two consumer warpgroups.
    producer_regs, consumer_regs : int
        Registers per thread of the producer and of the second consumer; the first consumer has
        what is left of ``max_regs`` per thread of the CTA.
    pages : bool
        Whole pages come by TMA, where the pool has pages.
    raw_stages : int
        Tiles of float8 keys and values on their way to the warps that convert them; 0 where they
        have 16 bits, as has all that follows.
    converters, converter_regs : int
        Those warps, for keys and as many for values, and their registers per thread.
    """

    producer_regs: int = 72
    consumer_regs: int = 216
    pages: bool = False
    raw_stages: int = 0
    converters: int = 4
    converter_regs: int = 72


def gluon_tile_config(
    rows: int,
    head_dim: int,
    batch: int,
    page_size: int,
    kv_dtype: torch.dtype,
    has_cap: bool = False,
) -> GluonTile:
    """Choose by packed rows (query tokens × group), head size, batch and page; never by length."""
    if kv_dtype == FLOAT8:
        return _float8_tile(rows)
    if rows > 64:
        if head_dim > 128:
            return GluonTile(
                128,
                64,
                stages=2,
                ctas_per_sm=1,
                max_regs=168,
                producer_regs=56,
                consumer_regs=224,
            )
        if page_size >= 16:
            return GluonTile(
                128,
                128,
                stages=3,
                ctas_per_sm=1,
                max_regs=168,
                producer_regs=56,
                consumer_regs=224,
                pages=True,
            )
        return GluonTile(
            128, 128, stages=3, ctas_per_sm=1, max_regs=168, producer_regs=72, consumer_regs=216
        )
    if head_dim > 128:
        return GluonTile(64, 64, stages=3, ctas_per_sm=1, max_regs=168)
    # a cap's arithmetic hides behind the copies only where two CTAs share a multiprocessor
    if batch <= 8 and head_dim == 128 and not has_cap:
        return GluonTile(64, 64, stages=6, ctas_per_sm=1, max_regs=168, min_tiles=2)
    return GluonTile(64, 64, stages=3, ctas_per_sm=2, max_regs=128, producer_regs=56)


def _float8_tile(rows: int) -> GluonTile:
    """Choose the tile over float8 keys, which take converting, and room for it."""
    if rows > 64:
        return GluonTile(
            128,
            64,
            stages=3,
            ctas_per_sm=1,
            max_regs=96,
            producer_regs=56,
            consumer_regs=152,
            raw_stages=3,
            converter_regs=56,
        )
    return GluonTile(
        64,
        128,
        stages=2,
        ctas_per_sm=1,
        max_regs=128,
        producer_regs=72,
        raw_stages=2,
        converter_regs=88,
    )


def gluon_extend_tile(head_dim: int, page_size: int, kv_dtype: torch.dtype) -> GluonTile:
    """Choose the tile of prompts, which are bound by arithmetic."""
    if kv_dtype == FLOAT8:
        return _float8_tile(128)
    if head_dim > 128:
        return GluonTile(
            128, 64, stages=2, ctas_per_sm=1, max_regs=168, producer_regs=56, consumer_regs=224
        )
    pages = page_size >= 16
    return GluonTile(
        128,
        128,
        stages=2,
        ctas_per_sm=1,
        max_regs=168,
        producer_regs=56 if pages else 88,
        consumer_regs=224 if pages else 208,
        pages=pages,
    )


def serves(head_dim: int, v_head_dim: int, kv_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel takes these heads, and runs right on ``device``."""
    return (
        head_dim == v_head_dim
        and head_dim in HEAD_DIMS.get(kv_dtype, ())
        and gluon_ok("gluon_tree", check_gluon_tree, device)
    )


def check_gluon_tree(device: torch.device) -> None:
    """Hold the kernel to float32 matrix products on a problem of several parts.

    Raises
    ------
    ArithmeticError
        If it disagrees.
    """
    from specattn.kernels.attention.tree import TreeAttention

    tree_kernel = TreeAttention(
        batch=1,
        q_len=2,
        tail_len=2,
        num_qo_heads=2,
        num_kv_heads=1,
        head_dim=64,
        v_head_dim=64,
        dtype=torch.float16,
        device=device,
        sm_scale=0.125,
        tile=gluon_tile_config(4, 64, 1, 1, torch.float16),
    )
    generator = torch.Generator(device).manual_seed(0)
    slots = torch.randperm(300, generator=generator, device=device).to(torch.int32)
    k, v = torch.randn(2, 300, 1, 64, dtype=torch.float16, device=device, generator=generator)
    q = torch.randn(2, 2, 64, dtype=torch.float16, device=device, generator=generator)
    out = torch.full_like(q, torch.nan)
    words = torch.tensor([[[1], [3]]], device=device)
    tree_kernel.plan(
        torch.tensor([298], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        300,
    )
    tree_kernel.run(
        q,
        k,
        v,
        out,
        None,
        indices=slots[None],
        positions=None,
        tail_slots=slots[None, 298:],
        tail_positions=None,
        tail_words=words,
    )
    keys, weighed = k[slots.long(), 0].float(), v[slots.long(), 0].float()
    logits = torch.einsum("thd,nd->thn", q.float(), keys) * 0.125
    logits[0, :, 299] = -torch.inf
    want = logits.softmax(-1) @ weighed
    error = float((out.float() - want).norm() / want.norm())
    if not error < 1e-2:
        raise ArithmeticError(f"relative error {error:.1e}")


def launch(
    kernel: TreeAttention,
    tile: GluonTile,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    indices: Tensor,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
) -> None:
    """Launch on the tables of the last plan; arguments as `TreeAttention.run` has checked them."""
    from specattn.kernels.attention.gluon_tree import gluon_tree_kernel

    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not aligned(cache):
            raise ValueError(
                f"{name} must have rows aligned to {PIECE} bytes, got strides {cache.stride()}"
            )
    shape = kernel.shape
    page, k_pages, v_pages = _pages(tile, k_cache, v_cache, kernel.page_size)
    # absent tensors are never read
    positions, tail_slots, tail_positions, tail_words = (
        indices if t is None else t for t in tensors
    )
    gluon_tree_kernel[(shape.max_chunks * kernel.num_kv_heads * shape.m_tiles,)](
        q,
        k_cache,
        v_cache,
        out,
        kernel.partial_lse if lse is None else lse,
        indices,
        positions,
        tail_slots,
        tail_positions,
        tail_words,
        kernel.tables.requests,
        kernel.tables.chunks,
        kernel.partial_out,
        kernel.partial_lse,
        k_pages,
        v_pages,
        *kernel.factors,
        kernel.v_scale,
        *strides,
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        OUT_TOKEN=out.stride(0),
        OUT_HEAD=out.stride(1),
        LSE_TOKEN=0 if lse is None else lse.stride(0),
        LSE_HEAD=0 if lse is None else lse.stride(1),
        K_SLOT=k_cache.stride(0),
        K_HEAD=k_cache.stride(1),
        V_SLOT=v_cache.stride(0),
        V_HEAD=v_cache.stride(1),
        Q_LEN=kernel.q_len,
        TAIL=kernel.tail_len,
        WORDS=kernel.words,
        WINDOW=kernel.window_left,
        HAS_CAP=kernel.has_cap,
        CSR=kernel.csr,
        HAS_LSE=lse is not None,
        GROUP=shape.group,
        NUM_KV=kernel.num_kv_heads,
        HEAD_DIM=kernel.head_dim,
        GROUPS=tile.block_m // 64,
        BN=tile.block_n,
        MT=shape.m_tiles,
        STAGES=tile.stages,
        PAGE=page,
        PRODUCERS=PRODUCERS,
        RAW=tile.raw_stages,
        CONVERTERS=tile.converters,
        PRODUCER_REGS=tile.producer_regs,
        CONVERTER_REGS=tile.converter_regs,
        CONSUMER_REGS=tile.consumer_regs,
        EARLY=kernel.early,
        num_warps=4,
        maxnreg=tile.max_regs,
        launch_pdl=True,
    )


def launch_extend(
    tile: GluonTile,
    page_size: int,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    qo_indptr: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    max_q_len: int,
    window_left: int,
    factors: tuple[float, float, float],
    v_scale: float,
) -> None:
    """Launch prompt attention; arguments as `extend_attention` has checked them."""
    from specattn.kernels.attention.gluon_extend import gluon_extend_kernel

    group, batch = q.shape[1] // k_cache.shape[1], len(seq_lens)
    blocks = -(-max_q_len * group // tile.block_m)
    page, k_pages, v_pages = _pages(tile, k_cache, v_cache, page_size)
    gluon_extend_kernel[(blocks * batch * k_cache.shape[1],)](
        q,
        k_cache,
        v_cache,
        out,
        seq_lens if lse is None else lse,
        qo_indptr,
        seq_lens,
        req_pool_indices,
        req_to_token,
        k_pages,
        v_pages,
        *factors,
        v_scale,
        req_to_token.stride(0),
        batch,
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        OUT_TOKEN=out.stride(0),
        OUT_HEAD=out.stride(1),
        LSE_TOKEN=0 if lse is None else lse.stride(0),
        LSE_HEAD=0 if lse is None else lse.stride(1),
        K_SLOT=k_cache.stride(0),
        K_HEAD=k_cache.stride(1),
        V_SLOT=v_cache.stride(0),
        V_HEAD=v_cache.stride(1),
        WINDOW=window_left,
        HAS_CAP=factors[2] > 0,
        HAS_LSE=lse is not None,
        GROUP=group,
        NUM_KV=k_cache.shape[1],
        HEAD_DIM=q.shape[2],
        GROUPS=tile.block_m // 64,
        BN=tile.block_n,
        STAGES=tile.stages,
        PAGE=page,
        PRODUCERS=PRODUCERS,
        RAW=tile.raw_stages,
        CONVERTERS=tile.converters,
        PRODUCER_REGS=tile.producer_regs,
        CONVERTER_REGS=tile.converter_regs,
        CONSUMER_REGS=tile.consumer_regs,
        num_warps=4,
        maxnreg=tile.max_regs,
    )


def aligned(cache: Tensor) -> bool:
    """Whether the rows of a pool can be copied in whole pieces."""
    steps = (cache.stride(0), cache.stride(1))
    return not (cache.data_ptr() % PIECE or any(s * cache.element_size() % PIECE for s in steps))


def _pages(
    tile: GluonTile, k_cache: Tensor, v_cache: Tensor, page_size: int
) -> tuple[int, object, object]:
    """Page size to copy by, and the pools as TMA needs them; 1 and the pools if by rows."""
    heads, dim = k_cache.shape[1:]
    # a view whose heads do not lie side by side has no rows of pages
    if (
        not tile.pages
        or page_size == 1
        or any(c.stride(1) != dim and heads > 1 for c in (k_cache, v_cache))
    ):
        return 1, k_cache, v_cache
    box = min(page_size, tile.block_n)
    return page_size, _rows(k_cache, box), _rows(v_cache, box)


def _rows(cache: Tensor, box: int) -> object:
    """Describe a pool to TMA as rows ``[slots, NUM_KV * HEAD_DIM]``, ``box`` of one head a copy."""
    gl = importlib.import_module("triton.experimental.gluon.language")
    hopper = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    dtype = gl.float16 if cache.dtype == torch.float16 else gl.bfloat16
    block = [box, cache.shape[2]]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return hopper.TensorDescriptor.from_tensor(cache.flatten(1), block, layout)
