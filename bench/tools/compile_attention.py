"""Attention as `compile_targets` launches it: trees, lists, prompts, latent, and their plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.tools.compile_offline import BATCH, BF16, CONTEXT, F32, I32, zeros
from specattn.kernels.attention import DeterministicSplits, TreeAttention, extend_attention
from specattn.kernels.attention.tiles import gluon_extend_tile, gluon_tile_config
from specattn.kernels.attention.triton_plan import fill_plans
from specattn.kernels.mla import MlaAttention, mla_extend
from specattn.kernels.mla.tiles import GLUON


def attend(
    q_len: int,
    tail: int,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (32, 8),
    dim: int = 128,
    window: int = -1,
    cap: float = 0.0,
    csr: bool = False,
    lse: bool = False,
    stored: torch.dtype | None = None,
    page: int = 1,
    gluon: bool = False,
    prefetch: bool = False,
    sinks: torch.dtype | None = None,
) -> None:
    rows, kept = q_len * heads[0] // heads[1], stored or dtype
    # of few requests, which is where later layers prefetch
    batch = 4 if prefetch else BATCH
    kernel = TreeAttention(
        batch=batch,
        q_len=q_len,
        tail_len=tail,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        v_head_dim=dim,
        dtype=dtype,
        device="cpu",
        sm_scale=dim**-0.5,
        window_left=window,
        logit_cap=cap,
        page_size=page,
        csr=csr,
        kv_dtype=stored,
        tile=gluon_tile_config(rows, dim, batch, page, kept, cap > 0) if gluon else None,
    )
    cache = zeros(2, heads[1], dim, dtype=kept)
    kernel = kernel.for_layer(None, prefetch=prefetch)
    if sinks is not None:
        kernel = kernel.with_sinks(zeros(heads[0], dtype=sinks))
    _launch(kernel, dtype, cache, cache.clone(), lse)


def plan_step() -> None:
    """Index lists, a window and a table of billions of slots beside a plain forward."""
    shape: dict[str, Any] = {
        "batch": BATCH,
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "v_head_dim": 128,
        "dtype": BF16,
        "device": "cpu",
        "sm_scale": 0.1,
    }
    lists = TreeAttention(q_len=1, tail_len=0, csr=True, **shape)
    kernels = [
        TreeAttention(q_len=n, tail_len=n, window_left=99 if n == 4 else -1, **shape)
        for n in (4, 16, 64)
    ]
    rows = zeros(BATCH, dtype=I32), zeros(BATCH)
    fill_plans(
        [
            lists.plan_request_csr(zeros(BATCH + 1, dtype=I32)),
            *(
                kernel.plan_request(*rows, CONTEXT << 22 * (i == 2))
                for i, kernel in enumerate(kernels)
            ),
        ]
    )


def attend_deterministic(
    q_len: int,
    tail: int,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (32, 8),
    dim: int = 128,
    window: int = -1,
    cap: float = 0.0,
    sinks: torch.dtype | None = None,
) -> None:
    kernel = TreeAttention(
        batch=BATCH,
        q_len=q_len,
        tail_len=tail,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        v_head_dim=dim,
        dtype=dtype,
        device="cpu",
        sm_scale=dim**-0.5,
        window_left=window,
        logit_cap=cap,
        deterministic=DeterministicSplits(CONTEXT),
    )
    cache = zeros(2, heads[1], dim, dtype=dtype)
    if sinks is not None:
        kernel = kernel.with_sinks(zeros(heads[0], dtype=sinks))
    _launch(kernel, dtype, cache, cache.clone(), lse=False)


def attend_latent(
    q_len: int, tail: int, dtype: torch.dtype, *, heads: int = 16, gluon: bool = False
) -> None:
    kernel = MlaAttention(
        batch=BATCH,
        q_len=q_len,
        tail_len=tail,
        num_qo_heads=heads,
        head_dim=576,
        v_head_dim=512,
        dtype=dtype,
        device="cpu",
        sm_scale=0.1,
        tile=GLUON if gluon else None,
    )
    cache = zeros(2, 1, 576, dtype=dtype)
    _launch(kernel, dtype, cache, cache[..., :512], lse=False)


def _launch(
    kernel: TreeAttention, dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, lse: bool
) -> None:
    batch = kernel.batch
    if kernel.csr:
        kernel.plan_csr(zeros(batch + 1, dtype=I32))
    else:
        kernel.plan(zeros(batch, dtype=I32), zeros(batch), CONTEXT)
    rows, heads, tail = batch * kernel.q_len, kernel.num_qo_heads, kernel.tail_len
    inputs = {
        "indices": zeros(2, CONTEXT, dtype=I32),
        "positions": zeros(batch, kernel.q_len),
        "tail_slots": zeros(batch, tail, dtype=I32),
        "tail_positions": zeros(batch, tail),
        "tail_words": zeros(batch, kernel.q_len, kernel.words),
    }
    kernel.trace(**inputs)
    kernel.run(
        zeros(rows, heads, kernel.head_dim, dtype=dtype),
        k_cache,
        v_cache,
        zeros(rows, heads, kernel.v_head_dim, dtype=dtype),
        zeros(rows, heads, dtype=F32) if lse else None,
        **inputs,
    )


def prompt(
    dtype: torch.dtype,
    *,
    dim: int = 128,
    window: int = -1,
    cap: float = 0.0,
    lse: bool = False,
    stored: torch.dtype | None = None,
    gluon: bool = False,
    sinks: torch.dtype | None = None,
) -> None:
    cache = zeros(2, 8, dim, dtype=stored or dtype)
    q = zeros(64, 32, dim, dtype=dtype)
    extend_attention(
        q,
        cache,
        cache.clone(),
        torch.zeros_like(q),
        zeros(64, 32, dtype=F32) if lse else None,
        **_prompt_arguments(),
        window_left=window,
        logit_cap=cap,
        sinks=None if sinks is None else zeros(32, dtype=sinks),
        tile=gluon_extend_tile(dim, 1, stored or dtype) if gluon else None,
    )


def prompt_latent(dtype: torch.dtype) -> None:
    cache = zeros(2, 1, 576, dtype=dtype)
    q = zeros(64, 16, 576, dtype=dtype)
    mla_extend(q, cache, cache[..., :512], q[..., :512].contiguous(), None, **_prompt_arguments())


def _prompt_arguments() -> dict[str, Any]:
    return {
        "qo_indptr": zeros(BATCH + 1, dtype=I32),
        "seq_lens": zeros(BATCH, dtype=I32),
        "req_pool_indices": zeros(BATCH),
        "req_to_token": zeros(2, CONTEXT, dtype=I32),
        "max_q_len": 16,
        "sm_scale": 0.1,
    }
