"""Launches of the Gluon kernels for `launches`, and where these serve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specattn.kernels.attention.reference import attend, tree_views
from specattn.kernels.attention.tiles import FLOAT8, GluonTile, TileConfig, gluon_tile_config
from specattn.kernels.attention.tree_attention import (
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
    """Raise an ArithmeticError unless the kernel agrees with torch."""
    random = torch.Generator(device).manual_seed(0)
    pools = torch.randn(2, 4096, 1, 64, generator=random, device=device).half()
    tile = gluon_tile_config(6, 64, 1, 1, torch.float16)
    check_kernel(TreeAttention, *pools, heads=2, tile=tile)


def check_kernel(
    kind: type[TreeAttention], k: Tensor, v: Tensor, *, heads: int, tile: TileConfig
) -> None:
    """Raise an ArithmeticError unless the kernel of a tile agrees with torch.

    The problem has a tree, and short and cut requests.

    Parameters
    ----------
    kind : type of TreeAttention
        What has the kernel.
    k, v : Tensor
        ``[4096, 1, head_dim]`` and ``[4096, 1, v_head_dim]`` of one dtype: the pools.
    heads : int
        Query heads.
    tile : TileConfig
        The tile.
    """
    lengths, q_len, device, head_dim = [0, 3000, 61, 130], 3, k.device, k.shape[2]
    batch, longest, scale = len(lengths), max(lengths), head_dim**-0.5
    random = torch.Generator(device).manual_seed(1)
    q = torch.randn(batch * q_len, heads, head_dim, generator=random, device=device).to(k.dtype)
    slots = torch.randint(
        len(k), (batch, longest + q_len), generator=random, device=device, dtype=torch.int32
    )
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    rows = torch.arange(batch, device=device)
    # the second and the third node are children of the first
    words = torch.tensor([[1], [3], [5]], device=device).repeat(batch, 1, 1)
    tail: dict[str, Any] = {"tail_slots": slots[:, longest:], "tail_words": words}
    out = torch.full_like(q[..., : v.shape[2]], torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    want, want_lse = out.float(), lse.clone()
    attention = kind(
        batch=batch,
        q_len=q_len,
        tail_len=q_len,
        num_qo_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        v_head_dim=v.shape[2],
        dtype=q.dtype,
        device=device,
        sm_scale=scale,
        tile=tile,
    )
    attention.plan(lens, rows, slots.stride(0)).fill()
    attention.run(q, k, v, out, lse, indices=slots, **tail)
    views = tree_views(
        seq_lens=lens,
        req_pool_indices=rows,
        req_to_token=slots,
        positions=None,
        tail_positions=None,
        **tail,
    )
    attend(q, k, v, want, want_lse, views=views, sm_scale=scale)
    off = ((out.float() - want).norm() / want.norm()).item()
    lse_off = (lse - want_lse).abs().max().item()
    if not (off < 1e-2 and lse_off < 1e-3):
        raise ArithmeticError(f"relative error {off:.1e}, log-sum-exp off by {lse_off:.1e}")


def launch(
    tile: GluonTile,
    bucket: TreeAttention | Prompts,
    operands: Operands,
    plan: tuple[Tensor | None, ...],
    *,
    blocks: int,
    **options: Any,
) -> None:
    """Launch ``blocks`` CTAs; see `specattn.kernels.attention.launches.launch`."""
    from specattn.kernels.attention.gluon_splits import gluon_tree_kernel

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
