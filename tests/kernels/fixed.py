"""Deterministic attention over a case."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specattn.kernels.attention.deterministic import FixedAttention

if TYPE_CHECKING:
    from tests.oracle import Case


def make_fixed(case: Case, *, ctas: int = 0, **options: Any) -> FixedAttention:
    """Build the object of a case's shapes, with small splits and, on request, more chunks."""
    a, csr = case.args, case.kind == "lists"
    indices = a["kv_indices"] if csr else a["req_to_token"]
    shape: dict[str, Any] = {
        "batch": len(case.q) if csr else len(a["seq_lens"]),
        "q_len": 1 if csr else a["positions"].shape[1],
        "tail_len": 0 if csr else a["tail_slots"].shape[1],
        "num_qo_heads": case.q.shape[1],
        "num_kv_heads": case.k_cache.shape[1],
        "head_dim": case.q.shape[2],
        "v_head_dim": case.out.shape[2],
        "dtype": case.q.dtype,
        "device": case.q.device,
        "max_keys": indices.shape[-1],
        "csr": csr,
        "split_keys": 128,
        "kv_dtype": case.kv_dtype,
    } | options
    kernel = FixedAttention(**shape, **case.settings)
    if ctas:
        tile = replace(kernel.shape.tile, ctas_per_sm=ctas)
        kernel = FixedAttention(**shape, **case.settings, tile=tile)
    return kernel


def run_fixed(case: Case, *, lse: bool = True, **options: Any) -> Case:
    """Plan, trace and run; returns the case."""
    kernel = make_fixed(case, **options)
    for tensor in (
        kernel.tables.tile_ends,
        kernel.tables.requests,
        kernel.tables.chunks,
        kernel.tables.splits,
        kernel.tables.paths,
        kernel.tables.path_lens,
    ):
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
    layer = kernel if kernel.kv_dtype == kernel.dtype else kernel.scaled(*case.kv_scales)
    layer.run(case.q, case.k_cache, case.v_cache, case.out, case.lse if lse else None, **named)
