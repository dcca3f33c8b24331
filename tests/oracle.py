"""The oracle and its cases, which the conformance kit ships."""

from __future__ import annotations

import random
from typing import Any

import torch

from specattn.testing.cases import (
    Form,
    drawn,
    list_args,
    make_extend_case,
    make_lists_case,
    make_tree_case,
    owned_slots,
)
from specattn.testing.oracle import (
    NAN,
    TOLERANCE,
    Case,
    Tolerances,
    check,
)

__all__ = [
    "LAYOUT",
    "NAN",
    "TOLERANCE",
    "Case",
    "check",
    "make_csr_case",
    "make_extend_case",
    "make_lists_case",
    "make_tree_case",
    "oracle_csr",
    "oracle_extend",
    "oracle_tree",
    "tolerances_of",
]

# the dtype of cases about layouts: compiled, float16 takes a fraction of the time of float32
LAYOUT = torch.float16 if torch.cuda.is_available() else torch.float32

# FlashInfer's FA2 kernels sum weights that are rounded already, see docs/numerics.md
_ROUNDED_SUMS = ("flashinfer", "flashinfer_mla")


# a case knows its kind
oracle_tree = oracle_extend = oracle_csr = Case.expected


def make_csr_case(lengths: list[int], **form: Any) -> Case:
    """Build a random batch of index lists of ``lengths``, one query token each."""
    look = Form(**form)
    owned, slots = owned_slots(lengths, look, random.Random(look.seed))
    args = list_args(owned, slots - 1, 0, "cpu")
    return drawn("lists", args, look, slots=slots, prefix_lens=lengths, live=len(lengths))


def tolerances_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Tolerances:
    """How far backend ``name`` may be from the oracle in ``dtype``."""
    if name in _ROUNDED_SUMS and dtype.itemsize == 2:
        return Tolerances(lse=torch.finfo(dtype).eps / 2)
    # what its own suite allows
    return Tolerances(lse=3e-3) if name == "flashmla" else Tolerances()
