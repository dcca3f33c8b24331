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
    "tree_lists",
]
