"""The oracle and its cases, which the conformance kit ships."""

from __future__ import annotations

from specattn.testing.cases import (
    make_csr_case,
    make_extend_case,
    make_lists_case,
    make_tree_case,
    make_words,
)
from specattn.testing.oracle import (
    NAN,
    TOLERANCE,
    Case,
    Tolerances,
    check,
    oracle_csr,
    oracle_extend,
    oracle_tree,
    tree_lists,
)

__all__ = [
    "NAN",
    "TOLERANCE",
    "Case",
    "check",
    "make_csr_case",
    "make_extend_case",
    "make_lists_case",
    "make_tree_case",
    "make_words",
    "oracle_csr",
    "oracle_extend",
    "oracle_tree",
    "tolerances_of",
    "tree_lists",
]

# libraries take exp2 and log2 from the fast units, and sum in another order
_LIBRARIES = {
    name: Tolerances(lse=3e-3) for name in ("fa3", "flashinfer", "flashinfer_mla", "flashmla")
}


def tolerances_of(name: str) -> Tolerances:
    """How far backend ``name`` may be from the oracle."""
    return _LIBRARIES.get(name, Tolerances())
