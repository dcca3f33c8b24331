"""One tree attention call, by the kernel or by its twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kernels.attention.calls import make_kernel, plan, run, run_naive

if TYPE_CHECKING:
    from tests.oracle import Case

KINDS = ["twin", "triton"]


def attend(case: Case, kind: str, *, lse: bool = True) -> None:
    """Fill ``case.out`` and, on request, ``case.lse``."""
    if kind == "twin":
        run_naive(case, lse=lse)
        return
    kernel = make_kernel(case)
    plan(kernel, case)
    run(kernel, case, lse=lse)
