"""Attention over a case of the oracle, by the kernels and by torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specattn.config import KVScales
from specattn.kernels.attention import (
    DeterministicSplits,
    TreeAttention,
    extend_attention,
    reference,
)
from specattn.kernels.mla import MlaAttention, mla_extend
from specattn.testing.oracle import unwritten
from tests.oracle import check

if TYPE_CHECKING:
    from torch import Tensor

    from tests.oracle import Case

NAIVE = {
    "tree": reference.tree_views,
    "lists": reference.csr_views,
    "extend": reference.extend_views,
}
TAIL = ("positions", "tail_slots", "tail_positions", "tail_words")


def make_kernel(case: Case, *, ctas: int = 0, **options: Any) -> TreeAttention:
    """Build the kernels of a case's bucket; ``ctas`` per multiprocessor make more splits."""
    a, csr = case.args, case.kind == "lists"
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
        "sm_scale": case.sm_scale,
    }
    kind: Any = MlaAttention
    if not case.latent:
        kind = TreeAttention
        shape |= {
            "csr": csr,
            "kv_dtype": case.kv_dtype,
            "page_size": case.page_size,
            **case.settings,
        }
    kernel = kind(**shape | options)
    if ctas:
        tile = replace(kernel.tile, ctas_per_sm=ctas)
        kernel = kind(**shape | options | {"tile": tile})
    return kernel


def make_deterministic(case: Case, *, split_keys: int = 128, **options: Any) -> TreeAttention:
    """Build the deterministic kernels of a case's bucket, with small splits."""
    indices = case.args["kv_indices" if case.kind == "lists" else "req_to_token"]
    splits = DeterministicSplits(indices.shape[-1], split_keys)
    return make_kernel(case, deterministic=splits, **options)


def plan(kernel: TreeAttention, case: Case) -> None:
    """Fill the kernels' plan for a case."""
    a = case.args
    if kernel.csr:
        kernel.plan_csr(a["kv_indptr"]).fill()
    else:
        table = a["req_to_token"]
        kernel.plan(a["seq_lens"], a["req_pool_indices"], table.stride(0), table=table).fill()


def run(kernel: TreeAttention, case: Case, *, lse: bool = True) -> None:
    """Attend on the last plan, with the scales of a float8 case, and its sinks."""
    a = case.args
    inputs = {"indices": a["kv_indices" if kernel.csr else "req_to_token"]}
    inputs |= {name: a[name] for name in TAIL if name in a}
    layer = kernel
    if kernel.kv_dtype != kernel.dtype:
        layer = kernel.for_layer(KVScales(*case.kv_scales), prefetch=False)
    if case.sinks is not None:
        layer = layer.with_sinks(case.sinks)
    kernel.trace(**inputs)
    layer.run(case.q, case.k_cache, case.v_cache, case.out, case.lse if lse else None, **inputs)


def attend(kernel: TreeAttention, case: Case, *, lse: bool = True) -> None:
    """Clear a case's outputs, plan and attend."""
    case.clear()
    plan(kernel, case)
    run(kernel, case, lse=lse)


def run_deterministic(case: Case, *, lse: bool = True, **options: Any) -> Case:
    """Attend once with tables and workspace of nonsense; return the case."""
    kernel = make_deterministic(case, **options)
    poison(kernel)
    attend(kernel, case, lse=lse)
    return case


def poison(kernel: TreeAttention) -> None:
    """Fill tables and workspace with what no result may hold."""
    for table in [*vars(kernel.tables).values(), *kernel.kernels.path_options.values()]:
        if hasattr(table, "fill_"):
            table.fill_(-(2**30))
    for tensor in kernel.workspace:
        tensor.fill_(float("nan"))


def scales(case: Case) -> dict[str, float]:
    """The scales of a float8 case, by the names functions take; none of another."""
    if case.kv_dtype is None:
        return {}
    return dict(zip(("k_scale", "v_scale"), case.kv_scales, strict=True))


def run_naive(case: Case, *, lse: bool = True) -> None:
    """Attend with torch functions."""
    args = {name: value for name, value in case.args.items() if name != "max_q_len"}
    settings = dict(case.settings)
    views = NAIVE[case.kind](**args, window_left=settings.pop("window_left", -1))
    reference.attend(
        case.q,
        case.k_cache,
        case.v_cache,
        case.out,
        case.lse if lse else None,
        views=views,
        **settings,
        **scales(case),
        sinks=case.sinks,
    )


def run_extend(case: Case, *, lse: bool = True, **options: Any) -> None:
    """Attend with the prompt kernel."""
    function, settings = extend_attention, case.settings | scales(case) | {"sinks": case.sinks}
    if case.latent:
        function, settings = mla_extend, {"sm_scale": case.sm_scale}  # type: ignore[assignment]
    function(
        case.q,
        case.k_cache,
        case.v_cache,
        case.out,
        case.lse if lse else None,
        **case.args,
        **settings,
        **options,
    )


def check_first_has_none(case: Case, expected: tuple[Tensor, Tensor], *, requests: int) -> None:
    """Attend in every way; the first request of so many gets no numbers, the others theirs."""
    rows = len(case.q) // requests
    for call in (
        lambda: run_naive(case),
        lambda: attend(make_kernel(case), case),
        lambda: attend(make_kernel(case, ctas=8), case),
    ):
        case.clear()
        call()
        # clearing fills with a NaN of its own
        assert not unwritten(case.out).any()
        assert case.out[:rows].isnan().all()
        assert case.lse[:rows].isnan().all()
        # beside numbers for those that have none
        case.out[:rows] = expected[0][:rows].to(case.out)
        case.lse[:rows] = expected[1][:rows].to(case.lse)
        check(case, expected)
