"""Launches of the Gluon kernels for `triton`, and where these serve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specattn.kernels.attention.tiles import FLOAT8, GluonTile, gluon_tile_config
from specattn.kernels.attention.tree import (
    Operands,
    Prompts,
    TreeAttention,
    row_strides,
    shape_constants,
)
from specattn.kernels.gluon_guard import gluon_ok, tma_boxes

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


def serves(head_dim: int, v_head_dim: int, kv_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel takes these heads, and runs right on ``device``."""
    return (
        head_dim == v_head_dim
        and head_dim in HEAD_DIMS.get(kv_dtype, ())
        and gluon_ok("gluon_tree", check_gluon_tree, device)
    )


def check_gluon_tree(device: torch.device) -> None:
    """Raise an ArithmeticError unless the kernel agrees with float32 products."""
    attention = TreeAttention(
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
    attention.plan(
        torch.tensor([298], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        300,
    )
    attention.run(
        q,
        k,
        v,
        out,
        None,
        indices=slots[None],
        tail_slots=slots[None, 298:],
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
    tile: GluonTile,
    bucket: TreeAttention | Prompts,
    operands: Operands,
    plan: tuple[Tensor | None, ...],
    *,
    blocks: int,
    **options: Any,
) -> None:
    """Launch ``blocks`` CTAs; see `specattn.kernels.attention.triton.launch`."""
    from specattn.kernels.attention.gluon_tree import gluon_tree_kernel

    q, k_cache, v_cache, out, lse, indices, tail = operands
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not aligned(cache):
            raise ValueError(
                f"{name} must have rows aligned to {PIECE} bytes, got strides {cache.stride()}"
            )
    page, k_pages, v_pages = _pages(tile, k_cache, v_cache, bucket.page_size)
    # absent tensors are never read
    present = [indices if tensor is None else tensor for tensor in (*tail, *plan)]
    (q_token, q_head), (out_token, out_head), (lse_token, lse_head) = map(
        row_strides, (q, out, lse)
    )
    gluon_tree_kernel[(blocks,)](
        q,
        k_cache,
        v_cache,
        out,
        present[-1] if lse is None else lse,
        indices,
        *present,
        bucket.sinks,
        k_pages,
        v_pages,
        *bucket.factors,
        bucket.v_scale,
        *tail.strides,
        Q_TOKEN=q_token,
        Q_HEAD=q_head,
        OUT_TOKEN=out_token,
        OUT_HEAD=out_head,
        LSE_TOKEN=lse_token,
        LSE_HEAD=lse_head,
        HAS_LSE=lse is not None,
        **shape_constants(bucket, operands),
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
        PREFETCH=bucket.prefetch,
        **options,
        num_warps=4,
        maxnreg=tile.max_regs,
        launch_pdl=True,
    )


def aligned(cache: Tensor) -> bool:
    """Whether the rows of a pool can be copied in whole pieces."""
    steps = (cache.stride(0), cache.stride(1))
    return not (cache.data_ptr() % PIECE or any(s * cache.element_size() % PIECE for s in steps))


def _pages(
    tile: GluonTile, k_cache: Tensor, v_cache: Tensor, page_size: int
) -> tuple[int, object, object]:
    """Return page size and TMA's pools; 1 and plain ones for rows."""
    heads, dim = k_cache.shape[1:]
    # a view whose heads do not lie side by side has no rows of pages
    if (
        not tile.pages
        or page_size == 1
        or any(c.stride(1) != dim and heads > 1 for c in (k_cache, v_cache))
    ):
        return 1, k_cache, v_cache
    box = min(page_size, tile.block_n)
    # one copy brings ``box`` rows of one head
    k_pages, v_pages = (tma_boxes(cache.flatten(1), box, dim) for cache in (k_cache, v_cache))
    return page_size, k_pages, v_pages
