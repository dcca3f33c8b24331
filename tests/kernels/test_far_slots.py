"""Slots at the far end of pools of more than 2^31 elements: every address is 64 bits wide.

The near end, where a wrapped offset would land, holds NaN. On a CPU the pools are small, and show
that the tests test what they say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.kernels.attention.tiles import extend_tile_config, tile_config
from specattn.kernels.cache import commit_kv, store_kv
from specattn.kernels.mla.tiles import mla_tile_config
from tests.implementations import using
from tests.kernels.attention.calls import attend, make_deterministic, make_kernel, run_extend
from tests.oracle import (
    NAN,
    Case,
    check,
    make_extend_case,
    make_tree_case,
    oracle_extend,
    oracle_tree,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float16
ELEMENTS = 2**31 + 2**24 if CUDA else 2**18
HEADS, DIM = 2, 128 if CUDA else 32


@pytest.fixture(scope="module")
def storage() -> Iterator[list[torch.Tensor]]:
    """The memory of two pools, NaN all over."""
    pools = [torch.full((ELEMENTS,), NAN, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    yield pools
    pools.clear()
    if CUDA:
        torch.cuda.empty_cache()


def far(case: Case, storage: list[torch.Tensor], *, table: str = "req_to_token") -> Case:
    """The same case with its slots at the end of a huge pool."""
    pools, slots = [], 0
    smalls = [case.k_cache] if case.latent else [case.k_cache, case.v_cache]
    for memory, small in zip(storage, smalls, strict=False):
        memory[-(2**23 if CUDA else ELEMENTS) :] = NAN
        row = small.shape[1] * small.shape[2]
        # whole pages
        slots = ELEMENTS // row // 64 * 64
        pool = memory[: slots * row].view(slots, *small.shape[1:])
        pool[slots - len(small) :] = small
        pools.append(pool)
    shift = slots - len(case.k_cache)
    for name in (table, "tail_slots"):
        if name in case.args:
            case.args[name] += shift
    keys = pools[0]
    values = keys[..., : case.out.shape[2]] if case.latent else pools[1]
    return replace(case, k_cache=keys, v_cache=values)


def tree_case(q_len: int, page_size: int = 1) -> Case:
    lengths = [500, 40] if CUDA else [40, 3]
    return make_tree_case(
        lengths,
        q_len=q_len,
        heads=(4, HEADS),
        head_dim=DIM,
        dtype=DTYPE,
        device=DEVICE,
        page_size=page_size,
        slots=1024,
    )


@pytest.mark.parametrize("q_len", [2, 8, 40])
@pytest.mark.parametrize(("page_size", "triton"), [(1, False), (64, False), (1, True)])
def test_tree_attention(storage, q_len, page_size, triton):
    case = tree_case(q_len, page_size)
    expected = oracle_tree(case)
    case = far(case, storage)
    tile = tile_config(2 * q_len, DIM, DIM, DTYPE, 2) if triton else None
    attend(make_kernel(case, tile=tile), case)
    check(case, expected)


def test_deterministic_attention(storage):
    case = tree_case(8)
    expected = oracle_tree(case)
    case = far(case, storage)
    attend(make_deterministic(case, split_keys=1024), case)
    check(case, expected)


@pytest.mark.parametrize("triton", [False, True])
def test_prompts(storage, triton):
    lengths = [(300, 65), (0, 40)] if CUDA else [(20, 5), (0, 3)]
    case = make_extend_case(
        lengths, heads=(4, HEADS), head_dim=DIM, dtype=DTYPE, device=DEVICE, slots=1024
    )
    expected = oracle_extend(case)
    case = far(case, storage)
    run_extend(case, tile=extend_tile_config(DIM, DIM, DTYPE) if triton else None)
    check(case, expected)


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("q_len", [1, 4])
def test_latent_attention(storage, q_len, triton):
    rank, rope = (512, 64) if CUDA else (32, 16)
    case = make_tree_case(
        [500, 40] if CUDA else [40, 3],
        q_len=q_len,
        heads=(16, 1),
        head_dim=rank + rope,
        v_head_dim=rank,
        latent=True,
        dtype=DTYPE,
        device=DEVICE,
        slots=1024,
    )
    expected = oracle_tree(case)
    case = far(case, storage)
    tile = mla_tile_config(q_len * 16, DTYPE) if triton else None
    attend(make_kernel(case, tile=tile), case)
    check(case, expected)


def test_latent_prompts(storage):
    rank, rope = (512, 64) if CUDA else (32, 16)
    case = make_extend_case(
        [(300, 65), (0, 40)] if CUDA else [(20, 5), (0, 3)],
        heads=(16, 1),
        head_dim=rank + rope,
        v_head_dim=rank,
        latent=True,
        dtype=DTYPE,
        device=DEVICE,
        slots=1024,
    )
    expected = oracle_extend(case)
    case = far(case, storage)
    run_extend(case)
    check(case, expected)


def test_stores_and_moves(storage):
    """New rows to the far end, then the accepted ones to the front of their tail."""
    slots = ELEMENTS // (HEADS * DIM)
    pools = [memory[: slots * HEADS * DIM].view(slots, HEADS, DIM) for memory in storage]
    for pool in pools:
        pool[:64] = NAN
    tails = torch.tensor([[5, 1, 4], [3, 2, 9]], dtype=torch.int32, device=DEVICE)
    tails = slots - tails
    k, v = (torch.randn(6, HEADS, DIM, device=DEVICE).to(DTYPE) for _ in range(2))
    with using("triton"):
        store_kv(k, v, *pools, tails)
    flat = tails.flatten().long()
    for pool, new in zip(pools, (k, v), strict=True):
        assert torch.equal(pool[flat], new)
    path = torch.tensor([[0, 2, -1], [0, 1, 2]], dtype=torch.int32, device=DEVICE)
    # the pool once more as layers, whose stride is as large as slots are far
    layers = [pool.view(2, slots // 2, HEADS, DIM) for pool in pools]
    last = [layer[1:] for layer in layers]
    moved = (tails - slots // 2).int()
    with using("triton"):
        commit_kv(*last, moved, path)
    for pool, new in zip(pools, (k, v), strict=True):
        assert torch.equal(pool[tails[0, 1].long()], new[2])
        assert torch.equal(pool[tails[1].long()], new[3:])
        assert pool[:64].isnan().all()
