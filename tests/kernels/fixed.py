"""Deterministic attention over a case, and the decode and draft cases that must agree with it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specattn.batch import Phase, RowLayout
from specattn.kernels.fixed_attention import FixedAttention
from tests.oracle import tree_lists

if TYPE_CHECKING:
    from tests.oracle import Case

_REQUEST = ("seq_lens", "req_pool_indices", "positions", "tail_slots", "tail_positions",
            "tail_words")


def make_fixed(case: Case, *, ctas: int = 0, **options: Any) -> FixedAttention:
    """Build the object of a case's shapes, with small splits and, on request, more chunks."""
    a, csr = case.args, case.kind == "lists"
    indices = a["kv_indices"] if csr else a["req_to_token"]
    shape: dict[str, Any] = {
        "batch": len(case.q) if csr else len(a["seq_lens"]),
        "q_len": 1 if csr else a["positions"].shape[1],
        "tail_len": 0 if csr else a["tail_slots"].shape[1],
        "num_qo_heads": case.q.shape[1], "num_kv_heads": case.k_cache.shape[1],
        "head_dim": case.q.shape[2], "v_head_dim": case.out.shape[2], "dtype": case.q.dtype,
        "device": case.q.device, "max_keys": indices.shape[-1], "csr": csr, "split_keys": 128,
    } | options
    kernel = FixedAttention(**shape, **case.settings)
    if ctas:
        tile = replace(kernel.shape.tile, ctas_per_sm=ctas)
        kernel = FixedAttention(**shape, **case.settings, tile=tile)
    return kernel


def run_fixed(case: Case, *, lse: bool = True, **options: Any) -> Case:
    """Plan, trace and run; returns the case."""
    kernel = make_fixed(case, **options)
    for tensor in (kernel.tables.tile_ends, kernel.tables.requests, kernel.tables.chunks,
                   kernel.tables.splits, kernel.tables.paths, kernel.tables.path_lens):
        tensor.fill_(-(2**30))
    for tensor in kernel._scratch:
        tensor.fill_(float("nan"))
    attend_fixed(kernel, case, lse=lse)
    return case


def attend_fixed(kernel: FixedAttention, case: Case, *, lse: bool = True) -> None:
    """One step of an object over a case."""
    a = case.args
    case.clear()
    if kernel.csr:
        kernel.plan_csr(a["kv_indptr"])
        named: dict[str, Any] = {"indices": a["kv_indices"]}
    else:
        kernel.plan(a["seq_lens"], a["req_pool_indices"], a["req_to_token"].stride(0))
        named = {"indices": a["req_to_token"], "positions": a["positions"]}
    tail = {n: a[n] for n in ("tail_slots", "tail_positions", "tail_words") if n in a}
    kernel.trace(**named, **tail)
    kernel.run(case.q, case.k_cache, case.v_cache, case.out, case.lse if lse else None, **named)


def picked(case: Case, requests: list[int], *, pads: int = 0, seed: int = 0) -> Case:
    """Take some requests of a tree case, in this order, with other table rows and other slots."""
    rng, a, slots = torch.Generator().manual_seed(seed), case.args, len(case.k_cache)
    move = torch.cat([torch.zeros(1).long(), 1 + torch.randperm(slots - 1, generator=rng)])
    move = move.to(case.q.device)                                         # slot 0 is padding's
    back = move.argsort()
    rows = 1 + torch.randperm(len(requests) + 2, generator=rng)[: len(requests)].to(move.device)
    at = torch.tensor(requests, device=move.device)
    table = a["req_to_token"].new_zeros(len(requests) + 3, a["req_to_token"].shape[1])
    table[rows] = back[a["req_to_token"][a["req_pool_indices"][at]].long()].int()
    args = {name: a[name][at] for name in _REQUEST} | {"req_to_token": table}
    args["tail_slots"] = back[args["tail_slots"].long()].int()
    args["req_pool_indices"] = rows
    q_len = a["positions"].shape[1]
    q = case.q.unflatten(0, (-1, q_len))[at].flatten(0, 1)
    if pads:
        own = (1 << torch.arange(q_len)).to(move.device)[None, :, None]
        for name in _REQUEST:
            pad = args[name].new_zeros(pads, *args[name].shape[1:])
            if name == "tail_words":
                pad[..., :1] = own
            args[name] = torch.cat([args[name], pad])
        q = torch.cat([q, torch.randn_like(q[:1]).expand(pads * q_len, -1, -1)])
    return replace(
        case, q=q.contiguous(), k_cache=case.k_cache[move], v_cache=case.v_cache[move],
        args=args, out=torch.empty_like(q[..., :1]).expand(*q.shape[:2], case.out.shape[2]).clone(),
        lse=case.lse.new_empty(q.shape[:2]), prefix_lens=args["seq_lens"].tolist(),
        live=len(requests) * q_len,
    )


def as_decode(case: Case, rows: list[int], seed: int = 0) -> Case:
    """Decode some query tokens of a tree case at the end of their paths, each as a request."""
    lists, case = _paths(case, rows)
    rng, device = random.Random(seed), case.q.device
    table = torch.full((len(lists) + 1, max(map(len, lists)) + seed), len(case.k_cache) - 1)
    places = rng.sample(range(1, len(lists) + 1), len(lists))
    for row, slots in zip(places, lists, strict=True):
        table[row, : len(slots) - 1] = torch.tensor(slots[:-1])
    lens = torch.tensor([len(slots) - 1 for slots in lists])
    args = {
        "seq_lens": lens.int(), "req_pool_indices": torch.tensor(places),
        "req_to_token": table.int(), "positions": lens[:, None],
        "tail_slots": torch.tensor([slots[-1:] for slots in lists]).int(),
        "tail_positions": lens[:, None],
        "tail_words": torch.ones(len(lists), 1, 1, dtype=torch.int64),
    }
    return replace(
        case, args={n: t.to(device) for n, t in args.items()}, prefix_lens=lens.tolist(),
        layout=RowLayout(1, 1, Phase.DECODE, causal=True),
    )


def as_lists(case: Case, rows: list[int]) -> Case:
    """Spell some query tokens of a tree case out as index lists."""
    lists, case = _paths(case, rows)
    ends = torch.tensor([0, *map(len, lists)]).cumsum(0).int()
    flat = torch.tensor([slot for slots in lists for slot in slots]).int()
    return replace(
        case, kind="lists",
        args={"kv_indptr": ends.to(case.q.device), "kv_indices": flat.to(case.q.device)},
    )


def _paths(case: Case, rows: list[int]) -> tuple[list[list[int]], Case]:
    """What some query tokens see, windows aside, and the case with only their rows."""
    lists = tree_lists(replace(case, window_left=-1))
    return [lists[row] for row in rows], replace(
        case, q=case.q[rows], out=torch.empty_like(case.out[rows]),
        lse=torch.empty_like(case.lse[rows]), live=len(rows),
    )
