"""What `bench.tools.sanitize` runs of attention: trees, index lists, prompts, latent attention."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.tools.sanitize_world import BF16, DEVICE, F8, F16, F32, World, finite

if TYPE_CHECKING:
    from collections.abc import Callable


def attend(
    q_len: int,
    tail: int,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (8, 2),
    dim: int = 64,
    window: int = -1,
    cap: float = 0.0,
    page: int = 1,
    triton: bool = False,
    stored: torch.dtype | None = None,
) -> None:
    """Tree attention by the kernel of the table, or by the Triton kernel in any case."""
    from specattn.kernels.attention import TreeAttention
    from specattn.kernels.attention.tiles import tile_config

    world = World(q_len, tail, page=page)
    rows = q_len * heads[0] // heads[1]
    tile = tile_config(rows, dim, dim, stored or dtype, world.batch) if triton else None
    kernel = TreeAttention(
        batch=world.batch,
        q_len=q_len,
        tail_len=tail,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        v_head_dim=dim,
        dtype=dtype,
        device=DEVICE,
        sm_scale=dim**-0.5,
        window_left=window,
        logit_cap=cap,
        page_size=page,
        tile=tile,
        kv_dtype=stored,
    )
    q = torch.randn(world.batch * q_len, heads[0], dim).to(dtype).to(DEVICE)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan")).to(DEVICE) if window >= 0 or triton else None
    k, v = (world.pool(heads[1], dim, stored or dtype) for _ in range(2))
    kernel.plan(world.lens, world.rows, world.width)
    kernel.run(
        q,
        k,
        v,
        out,
        lse,
        indices=world.table,
        positions=world.positions,
        tail_slots=world.tails,
        tail_positions=world.tail_positions,
        tail_words=world.words,
    )
    finite(out, lse)


def attend_lists(dtype: torch.dtype, *, triton: bool = False) -> None:
    from specattn.kernels.attention import TreeAttention
    from specattn.kernels.attention.tiles import tile_config

    world = World(1, 1)
    tile = tile_config(4, 64, 64, dtype, world.batch) if triton else None
    kernel = TreeAttention(
        batch=world.batch,
        q_len=1,
        tail_len=0,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        dtype=dtype,
        device=DEVICE,
        sm_scale=0.1,
        csr=True,
        tile=tile,
    )
    lens = (world.lens + 1).tolist()
    lists = torch.cat([world.table[b + 1, :n] for b, n in enumerate(lens)])
    starts = [sum(lens[:b]) for b in range(len(lens) + 1)]
    indptr = torch.tensor(starts, dtype=torch.int32).to(DEVICE)
    q = torch.randn(world.batch, 8, 64).to(dtype).to(DEVICE)
    out = torch.full_like(q, float("nan"))
    k, v = (world.pool(2, 64, dtype) for _ in range(2))
    kernel.plan_csr(indptr)
    kernel.run(
        q,
        k,
        v,
        out,
        None,
        indices=lists,
    )
    finite(out)


def attend_deterministic(q_len: int, tail: int, dtype: torch.dtype) -> None:
    from specattn.kernels.attention import DeterministicSplits, TreeAttention

    world = World(q_len, tail)
    kernel = TreeAttention(
        batch=world.batch,
        q_len=q_len,
        tail_len=tail,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        dtype=dtype,
        device=DEVICE,
        sm_scale=0.1,
        deterministic=DeterministicSplits(world.width, split_keys=128),
    )
    inputs = {
        "indices": world.table,
        "positions": world.positions,
        "tail_slots": world.tails,
        "tail_positions": world.tail_positions,
        "tail_words": world.words,
    }
    kernel.plan(world.lens, world.rows, world.width)
    kernel.trace(**inputs)
    q = torch.randn(world.batch * q_len, 8, 64).to(dtype).to(DEVICE)
    out = torch.full_like(q, float("nan"))
    k, v = (world.pool(2, 64, dtype) for _ in range(2))
    kernel.run(q, k, v, out, None, **inputs)
    finite(out)


def attend_latent(
    q_len: int, tail: int, dtype: torch.dtype, heads: int = 16, *, triton: bool = False
) -> None:
    from specattn.kernels.mla import MlaAttention
    from specattn.kernels.mla.tiles import mla_tile_config

    world = World(q_len, tail, lens=(0, 7, 130))
    kernel = MlaAttention(
        batch=world.batch,
        q_len=q_len,
        tail_len=tail,
        num_qo_heads=heads,
        head_dim=576,
        v_head_dim=512,
        dtype=dtype,
        device=DEVICE,
        sm_scale=0.1,
        tile=mla_tile_config(q_len * heads, dtype) if triton else None,
    )
    q = torch.randn(world.batch * q_len, heads, 576).to(dtype).to(DEVICE)
    out = torch.full((*q.shape[:2], 512), float("nan"), dtype=dtype).to(DEVICE)
    cache = world.pool(1, 576, dtype)
    kernel.plan(world.lens, world.rows, world.width)
    kernel.run(
        q,
        cache,
        cache[..., :512],
        out,
        None,
        indices=world.table,
        positions=world.positions,
        tail_slots=world.tails,
        tail_positions=world.tail_positions,
        tail_words=world.words,
    )
    finite(out)


def prompt(
    dtype: torch.dtype,
    *,
    dim: int = 64,
    window: int = -1,
    cap: float = 0.0,
    page: int = 1,
    triton: bool = False,
) -> None:
    from specattn.kernels.attention import extend_attention
    from specattn.kernels.attention.tiles import extend_tile_config

    world, q, arguments = _prompt(dtype, 8, dim, page)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan")).to(DEVICE)
    k, v = (world.pool(2, dim, dtype) for _ in range(2))
    tile = extend_tile_config(dim, dim, dtype) if triton else None
    extend_attention(q, k, v, out, lse, **arguments, window_left=window, logit_cap=cap, tile=tile)
    finite(out, lse)


def prompt_latent(dtype: torch.dtype) -> None:
    from specattn.kernels.mla import mla_extend

    world, q, arguments = _prompt(dtype, 16, 576, 1)
    out = torch.full((*q.shape[:2], 512), float("nan"), dtype=dtype).to(DEVICE)
    cache = world.pool(1, 576, dtype)
    mla_extend(q, cache, cache[..., :512], out, None, **arguments)
    finite(out)


def _prompt(
    dtype: torch.dtype, heads: int, dim: int, page: int
) -> tuple[World, Tensor, dict[str, Any]]:
    """New tokens of 40, 1 and 17 over prefixes, in the tail's slots, which the table holds."""
    world = World(40, 40, lens=(0, 130, 65), page=page)
    new = (40, 1, 17)
    q = torch.randn(sum(new), heads, dim).to(dtype).to(DEVICE)
    starts = torch.tensor([sum(new[:b]) for b in range(len(new) + 1)], dtype=torch.int32)
    return (
        world,
        q,
        {
            "qo_indptr": starts.to(DEVICE),
            "seq_lens": world.lens,
            "req_pool_indices": world.rows,
            "req_to_token": world.table,
            "max_q_len": max(new),
            "sm_scale": dim**-0.5,
        },
    )


# by what the tile tables and the compiler make differ
TREE: dict[str, Callable[[], None]] = {
    "16 rows, bf16": partial(attend, 4, 4, BF16),
    "64 rows, page 16, f16": partial(attend, 8, 8, F16, page=16),
    "64 rows, window, cap, f16": partial(attend, 8, 24, F16, window=20, cap=9.0),
    "256 rows, page 64, bf16": partial(attend, 64, 64, BF16, page=64, dim=128),
    "280 rows, 2 words, bf16": partial(attend, 70, 70, BF16, dim=128),
    "head 256, bf16": partial(attend, 8, 8, BF16, dim=256),
    "lists, bf16": partial(attend_lists, BF16),
    "f8": partial(attend, 8, 8, BF16, stored=F8),
}
TRITON: dict[str, Callable[[], None]] = {
    "16 rows, bf16": partial(attend, 4, 4, BF16, triton=True),
    "64 rows, window, cap, f16": partial(attend, 8, 24, F16, window=20, cap=9.0, triton=True),
    "256 rows, bf16": partial(attend, 64, 64, BF16, dim=128, triton=True),
    "head 96, bf16": partial(attend, 8, 8, BF16, dim=96, triton=True),
    "f32": partial(attend, 8, 8, F32, window=20),
    "lists, f16": partial(attend_lists, F16, triton=True),
    "fixed, bf16": partial(attend_deterministic, 8, 8, BF16),
}
PROMPT: dict[str, Callable[[], None]] = {
    "bf16": partial(prompt, BF16, dim=128),
    "window, cap, f16": partial(prompt, F16, window=20, cap=9.0),
    "page 16, bf16": partial(prompt, BF16, page=16),
    "triton, bf16": partial(prompt, BF16, triton=True),
    "f32": partial(prompt, F32),
}
LATENT: dict[str, Callable[[], None]] = {
    "16 rows, bf16": partial(attend_latent, 1, 1, BF16),
    "64 rows, f16": partial(attend_latent, 4, 4, F16),
    "512 rows, bf16": partial(attend_latent, 4, 4, BF16, heads=128),
    "f32": partial(attend_latent, 1, 1, F32),
    "triton, 16 rows, bf16": partial(attend_latent, 1, 1, BF16, triton=True),
    "triton, 64 rows, f16": partial(attend_latent, 4, 4, F16, triton=True),
    "prompt, bf16": partial(prompt_latent, BF16),
}
