"""Attention in float64, one row at a time, over explicit lists of visible keys; and its cases.

Nothing here is shared with the library: the oracle is what the kernels and twins are held to.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")
# relative L2 error over all rows; the worst row may have 2.5 times as much
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def _row(
    q: Tensor, k: Tensor, v: Tensor, slots: list[int], sm_scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """One query token ``[Hq, D]`` over the listed slots: ``[Hq, Dv]`` and ``[Hq]``."""
    heads, kv_heads = q.shape[0], k.shape[1]
    if not slots:
        zeros = torch.zeros(heads, v.shape[2], dtype=torch.float64)
        return zeros, torch.full((heads,), -math.inf, dtype=torch.float64)
    kv_head = torch.arange(heads) // (heads // kv_heads)
    keys = k[slots].double()[:, kv_head]                                  # [N, Hq, D]
    values = v[slots].double()[:, kv_head]                                # [N, Hq, Dv]
    logits = (keys * q.double()).sum(-1) * sm_scale                       # [N, Hq]
    if cap:
        logits = cap * torch.tanh(logits / cap)
    top = logits.amax(0)
    weights = torch.exp(logits - top)
    out = (weights[..., None] * values).sum(0) / weights.sum(0)[:, None]
    return out, top + torch.log(weights.sum(0))


def _visible(pos_q: int, pos_k: int, window_left: int) -> bool:
    return window_left < 0 or 0 <= pos_q - pos_k <= window_left


def _rows(case: Case, lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    q, k, v = case.q.cpu(), case.k_cache.cpu(), case.v_cache.cpu()
    pairs = [_row(q[i], k, v, s, case.sm_scale, case.logit_cap) for i, s in enumerate(lists)]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


@dataclass
class Case:
    """The tensors of one call; ``args`` are the keyword arguments of its twin."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    lse: Tensor
    args: dict[str, Any]
    sm_scale: float
    window_left: int = -1
    logit_cap: float = 0.0

    def clear(self) -> None:
        self.out.fill_(NAN)
        self.lse.fill_(NAN)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "sm_scale": self.sm_scale, "window_left": self.window_left,
            "logit_cap": self.logit_cap,
        }


def tree_lists(case: Case) -> list[list[int]]:
    """Visible slots of every query row of a tree case."""
    a = {name: t.tolist() for name, t in case.args.items() if isinstance(t, Tensor)}
    lists = []
    for b, prefix in enumerate(a["seq_lens"]):
        row = a["req_to_token"][a["req_pool_indices"][b]]
        for i, pos in enumerate(a["positions"][b]):
            slots = [row[p] for p in range(prefix) if _visible(pos, p, case.window_left)]
            for j, slot in enumerate(a["tail_slots"][b]):
                bit = (a["tail_words"][b][i][j // 64] >> (j % 64)) & 1
                if bit and _visible(pos, a["tail_positions"][b][j], case.window_left):
                    slots.append(slot)
            lists.append(slots)
    return lists


def oracle_tree(case: Case) -> tuple[Tensor, Tensor]:
    return _rows(case, tree_lists(case))


def extend_lists(case: Case) -> list[list[int]]:
    a = {name: t.tolist() for name, t in case.args.items() if isinstance(t, Tensor)}
    lists = []
    for b, prefix in enumerate(a["seq_lens"]):
        row = a["req_to_token"][a["req_pool_indices"][b]]
        for i in range(a["qo_indptr"][b + 1] - a["qo_indptr"][b]):
            pos = prefix + i
            keys = range(pos + 1)
            lists.append([row[p] for p in keys if _visible(pos, p, case.window_left)])
    return lists


def oracle_extend(case: Case) -> tuple[Tensor, Tensor]:
    return _rows(case, extend_lists(case))


def csr_lists(case: Case) -> list[list[int]]:
    indptr, indices = case.args["kv_indptr"].tolist(), case.args["kv_indices"].tolist()
    lists = []
    for begin, end in pairwise(indptr):
        last = end - begin - 1
        lists.append([
            slot for p, slot in enumerate(indices[begin:end])
            if _visible(last, p, case.window_left)
        ])
    return lists


def oracle_csr(case: Case) -> tuple[Tensor, Tensor]:
    return _rows(case, csr_lists(case))


def check(case: Case, expected: tuple[Tensor, Tensor], *, lse: bool = True) -> None:
    """Hold ``case.out`` (and ``case.lse``) to the oracle's; rows without keys exactly."""
    want, want_lse = expected
    got = case.out.double().cpu()
    tolerance = TOLERANCE[case.q.dtype]
    blind = want_lse == -math.inf
    assert not got[blind].any(), "a row without keys must be 0"
    assert got.isfinite().all(), f"{(~got.isfinite()).sum()} values are not finite"
    error = (got - want).norm(dim=-1)
    scale = want.norm(dim=-1)
    total = error.norm() / scale.norm().clamp_min(1e-30)
    assert total <= tolerance, f"relative error {total:.2e} above {tolerance:.0e}"
    floor = (scale.square().mean().sqrt()).clamp_min(1e-30)
    worst = (error / scale.clamp_min(floor)).max()
    assert worst <= 2.5 * tolerance, f"worst row {worst:.2e} above {2.5 * tolerance:.1e}"
    if lse:
        got_lse = case.lse.double().cpu()
        assert (got_lse[blind] == -math.inf).all(), "a row without keys must have lse -inf"
        off = (got_lse - want_lse)[~blind].abs() / want_lse[~blind].abs().clamp_min(1)
        # bf16 and fp16 rows: the logits are exact products, only their sum is rounded
        assert not off.numel() or off.max() <= 2e-5, f"lse off by {off.max():.2e}"


def _words(rows: list[int], tail_len: int) -> list[list[int]]:
    """Bit sets as signed 64-bit words."""
    count = max((tail_len + 63) // 64, 1)
    words = [[bits >> (64 * w) & (1 << 64) - 1 for w in range(count)] for bits in rows]
    return [[x - (1 << 64) if x >> 63 else x for x in row] for row in words]


def make_words(mode: str, q_len: int, tail_len: int, rng: random.Random) -> tuple[
    list[int], list[int], list[int]
]:
    """Bit sets and depths: ``(bits of each query, depth of each query, depth of each tail key)``.

    ``chain``: causal, query i is tail key i. ``tree``: a random tree over the tail, the queries
    being its last nodes. ``draft``: ``q_len`` branches, the tail step-major. ``any``: random bits,
    some rows empty, all bits past the tail set.
    """
    shift = tail_len - q_len
    if mode == "chain":
        depths = list(range(tail_len))
        return [(1 << (shift + i + 1)) - 1 for i in range(q_len)], depths[shift:], depths
    if mode == "draft":
        depths = [j // q_len for j in range(tail_len)]
        parent = [
            (j // q_len - 1) * q_len + rng.randrange(q_len) if j >= q_len else -1
            for j in range(tail_len)
        ]
    elif mode == "tree":
        parent = [-1] + [rng.randrange(max(0, j - 7), j) for j in range(1, tail_len)]
        depths = [0] * tail_len
        for j in range(1, tail_len):
            depths[j] = depths[parent[j]] + 1
    else:
        depths = [rng.randrange(6) for _ in range(tail_len)]
        bits = [rng.getrandbits(tail_len) if rng.random() < 0.8 else 0 for _ in range(q_len)]
        beyond = (1 << -(-tail_len // 64) * 64) - (1 << tail_len)
        bits = [row | beyond for row in bits]
        return bits, [rng.randrange(6) for _ in range(q_len)], depths
    bits = []
    for j in range(tail_len):
        bits.append((1 << j) | (bits[parent[j]] if parent[j] >= 0 else 0))
    return bits[shift:], depths[shift:], depths


def _pools(
    used: set[int], slots: int, kv_heads: int, head_dim: int, v_head_dim: int,
    dtype: torch.dtype, pad: int,
) -> tuple[Tensor, Tensor]:
    """K and V pools with NaN in every slot not in use, and in ``pad`` columns past the heads."""
    unused = torch.ones(slots, dtype=torch.bool)
    unused[sorted(used)] = False
    pools = []
    for dim in (head_dim, v_head_dim):
        pool = torch.randn(slots, kv_heads, dim + pad)
        pool[unused] = NAN
        pool[..., dim:] = NAN
        pools.append(pool.to(dtype)[..., :dim])
    return pools[0], pools[1]


def _table(lengths: list[int], rng: random.Random, slots: int = 0) -> tuple[list[list[int]], int]:
    """Permuted, distinct slots for every request; slot 0 is nobody's. Also the slot count."""
    slots = slots or sum(lengths) + 8
    order = list(range(1, slots))
    rng.shuffle(order)
    table, at = [], 0
    for length in lengths:
        table.append(order[at : at + length])
        at += length
    return table, slots


def make_tree_case(
    lengths: list[int], *, mode: str = "tree", q_len: int = 4, tail_len: int | None = None,
    heads: tuple[int, int] = (4, 2), head_dim: int = 32, v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32, window_left: int = -1, logit_cap: float = 0.0,
    pads: int = 0, scale: float = 1.0, device: str = "cpu", pool_pad: int = 0, seed: int = 0,
    width: int = 0, slots: int = 0,
) -> Case:
    """Build a random batch of a tree mode, ``pads`` padding requests at its end.

    ``width`` and ``slots`` fix the sizes of the table and the pools.
    """
    rng = random.Random(seed)
    tail_len = q_len if tail_len is None else tail_len
    v_head_dim = v_head_dim or head_dim
    batch, width = len(lengths) + pads, width or max(lengths, default=0) + tail_len + 5
    owned, slots = _table([n + tail_len for n in lengths], rng, slots)
    # req_to_token row 0 belongs to padding; the others in random order
    rows = rng.sample(range(1, batch + 1), len(lengths)) + [0] * pads
    table = torch.full((batch + 1, width), slots - 1, dtype=torch.int32)
    table[0] = 0
    tail_slots = torch.zeros(batch, tail_len, dtype=torch.int32)
    tail_positions = torch.zeros(batch, tail_len, dtype=torch.int64)
    positions = torch.zeros(batch, q_len, dtype=torch.int64)
    words = []
    for b in range(batch):
        if b >= len(lengths):
            own = [1 << (tail_len - q_len + i) for i in range(q_len)]
            words.append(_words(own, tail_len))
            continue
        bits, depth_q, depth_k = make_words(mode, q_len, tail_len, rng)
        words.append(_words(bits, tail_len))
        prefix = lengths[b]
        table[rows[b], :prefix] = torch.tensor(owned[b][:prefix], dtype=torch.int32)
        tail_slots[b] = torch.tensor(owned[b][prefix:], dtype=torch.int32)
        positions[b] = prefix + torch.tensor(depth_q)
        tail_positions[b] = prefix + torch.tensor(depth_k)
    case = Case(
        q=torch.empty(0), k_cache=torch.empty(0), v_cache=torch.empty(0), out=torch.empty(0),
        lse=torch.empty(0), sm_scale=scale * head_dim**-0.5, window_left=window_left,
        logit_cap=logit_cap,
        args={
            "seq_lens": torch.tensor(lengths + [0] * pads, dtype=torch.int32),
            "req_pool_indices": torch.tensor(rows), "req_to_token": table,
            "positions": positions, "tail_slots": tail_slots, "tail_positions": tail_positions,
            "tail_words": torch.tensor(words, dtype=torch.int64),
        },
    )
    # a tail key stays readable though no query sees it: its owner has written it
    used = {slot for row in tree_lists(case) for slot in row} | set(tail_slots.flatten().tolist())
    return _finish(case, used, slots, batch * q_len, heads, head_dim, v_head_dim, dtype,
                   pool_pad, device)


def _finish(
    case: Case, used: set[int], slots: int, rows: int, heads: tuple[int, int], head_dim: int,
    v_head_dim: int, dtype: torch.dtype, pool_pad: int, device: str,
) -> Case:
    qo_heads, kv_heads = heads
    case.q = torch.randn(rows, qo_heads, head_dim).to(dtype)
    case.k_cache, case.v_cache = _pools(
        used, slots, kv_heads, head_dim, v_head_dim, dtype, pool_pad
    )
    case.out = torch.full((rows, qo_heads, v_head_dim), NAN, dtype=dtype)
    case.lse = torch.full((rows, qo_heads), NAN)
    for name in ("q", "k_cache", "v_cache", "out", "lse"):
        setattr(case, name, getattr(case, name).to(device))
    case.args = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in case.args.items()}
    return case


def make_extend_case(
    lengths: list[tuple[int, int]], *, heads: tuple[int, int] = (4, 2), head_dim: int = 32,
    v_head_dim: int | None = None, dtype: torch.dtype = torch.float32, window_left: int = -1,
    logit_cap: float = 0.0, device: str = "cpu", seed: int = 0,
) -> Case:
    """Build a ragged extend of ``(prefix, new tokens)`` pairs."""
    rng = random.Random(seed)
    v_head_dim = v_head_dim or head_dim
    totals = [prefix + new for prefix, new in lengths]
    owned, slots = _table(totals, rng)
    rows = rng.sample(range(1, len(lengths) + 1), len(lengths))
    table = torch.full((len(lengths) + 1, max(totals) + 3), slots - 1, dtype=torch.int32)
    for b, total in enumerate(totals):
        table[rows[b], :total] = torch.tensor(owned[b], dtype=torch.int32)
    news = torch.tensor([new for _, new in lengths])
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = news.cumsum(0)
    case = Case(
        q=torch.empty(0), k_cache=torch.empty(0), v_cache=torch.empty(0), out=torch.empty(0),
        lse=torch.empty(0), sm_scale=head_dim**-0.5, window_left=window_left,
        logit_cap=logit_cap,
        args={
            "qo_indptr": indptr,
            "seq_lens": torch.tensor([p for p, _ in lengths], dtype=torch.int32),
            "req_pool_indices": torch.tensor(rows), "req_to_token": table,
            "max_q_len": int(news.max()),
        },
    )
    used = {slot for row in extend_lists(case) for slot in row}
    return _finish(case, used, slots, int(news.sum()), heads, head_dim, v_head_dim, dtype, 0,
                   device)


def make_csr_case(
    lengths: list[int], *, heads: tuple[int, int] = (4, 2), head_dim: int = 32,
    dtype: torch.dtype = torch.float32, window_left: int = -1, logit_cap: float = 0.0,
    device: str = "cpu", seed: int = 0,
) -> Case:
    """Build index lists of these lengths."""
    rng = random.Random(seed)
    owned, slots = _table(lengths, rng)
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = torch.tensor(lengths).cumsum(0)
    # entries past the last list are stale: they name a poisoned slot
    indices = torch.tensor([s for row in owned for s in row] + [slots - 1] * 3, dtype=torch.int32)
    case = Case(
        q=torch.empty(0), k_cache=torch.empty(0), v_cache=torch.empty(0), out=torch.empty(0),
        lse=torch.empty(0), sm_scale=head_dim**-0.5, window_left=window_left,
        logit_cap=logit_cap, args={"kv_indptr": indptr, "kv_indices": indices},
    )
    used = {slot for row in csr_lists(case) for slot in row}
    return _finish(case, used, slots, len(lengths), heads, head_dim, head_dim, dtype, 0, device)
