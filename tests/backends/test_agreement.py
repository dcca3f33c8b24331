"""The same forwards on every backend that can run here agree, pair by pair.

Each backend is held to float64 elsewhere; this shows that one can stand in for another. The bound
of a pair is that of one backend against float64 (docs/numerics.md), for outputs; lse bounds add up.
Slots are permuted, and all memory not in use holds NaN.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from specattn.backends import choose_backend, load_backend
from specattn.backends.flashinfer import FlashInferBackend
from specattn.batch import Phase
from specattn.errors import UnsupportedError
from specattn.testing.oracle import ConformanceError, head
from specattn.testing.session import Session, config_of
from tests.oracle import (
    Tolerances,
    check,
    make_extend_case,
    make_lists_case,
    make_tree_case,
    tolerances_of,
)
from tests.samples import half, on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = torch.device(DEVICE)
# Triton's interpreter has no bfloat16; FA3 was built without float16
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


class TwoPassesBackend(FlashInferBackend):
    """The same library, the other way to serve a tree."""

    name = "flashinfer in two passes"
    two_passes_from = 0


HEADS = (
    "torch_native",
    "triton",
    "flex",
    "flashinfer",
    TwoPassesBackend,
    "fa3",
    "fa3,flashinfer",
    "auto",
)
LATENT = ("torch_native", "triton_mla", "flashinfer_mla", "flashmla", "auto")
# who must be among them
EVERYWHERE = {
    HEADS: {"torch_native", "triton", "flex"},
    LATENT: {"torch_native", "triton_mla"},
}
LENGTHS = [40, 0, 65]


def chain(q_len: int, tail_len: int, phase: Phase):
    return lambda **form: make_tree_case(
        LENGTHS, mode="chain", q_len=q_len, tail_len=tail_len, phase=phase, pads=1, **form
    )


FORWARDS = {
    "decode": chain(1, 1, Phase.DECODE),
    "chain_verify": chain(5, 5, Phase.VERIFY),
    "tree_verify": lambda **form: make_tree_case(LENGTHS, q_len=7, pads=1, **form),
    "draft_topk_1": chain(1, 3, Phase.DRAFT),
    "draft_topk_4": lambda **form: make_tree_case(
        LENGTHS, mode="draft", q_len=4, tail_len=12, phase=Phase.DRAFT, pads=1, **form
    ),
    "draft_lists": lambda **form: make_lists_case(LENGTHS, topk=4, step=2, **form),
    "draft_extend": chain(4, 4, Phase.PREFILL),
    "prompt": lambda **form: make_extend_case([(0, 9), (40, 1), (65, 6)], **form),
}


def required(names, forward) -> set[str]:
    """Who serves the forward on any machine; index lists are not everybody's."""
    return {
        name
        for name in EVERYWHERE[names]
        if forward != "draft_lists" or load_backend(name).capabilities.lists
    }


def results(names, case):
    """Outputs and lse by the name of whoever serves the case."""
    found = {}
    for name in names:
        try:
            factory = choose_backend(name, [config_of(case)], HERE)
            session = Session(factory(config_of(case), HERE), case, Tolerances())
        except UnsupportedError:
            continue
        session.schedule()
        session.bound.fill()
        session.run()
        label = name if isinstance(name, str) else name.name
        found[label] = session.live
    return found


def agree(found):
    for one, other in combinations(found, 2):
        case, (want, want_lse) = head(found[one], (found[other].out, found[other].lse))
        dtype = case.q.dtype
        # "fa3,flashinfer" and "flashinfer in two passes" owe theirs to the library
        off = sum(
            tolerances_of("flashinfer" if "flashinfer" in name else name, dtype).lse
            for name in (one, other)
        )
        try:
            check(
                case, (want.double().cpu(), want_lse.double().cpu()), tolerances=Tolerances(lse=off)
            )
        except ConformanceError as error:
            pytest.fail(f"{one} and {other} in {dtype}: {error}")


@on_cpu(half, "forward", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("forward", FORWARDS)
def test_backends_agree(forward, dtype):
    found = results(HEADS, FORWARDS[forward](head_dim=64, dtype=dtype, device=DEVICE))
    assert found.keys() >= required(HEADS, forward)
    agree(found)


@pytest.mark.parametrize("forward", FORWARDS)
def test_backends_of_latent_layers_agree(forward):
    """In pages of 64, which FlashMLA loads whole."""
    found = results(
        LATENT,
        FORWARDS[forward](
            heads=(4, 1),
            head_dim=576,
            v_head_dim=512,
            latent=True,
            page_size=64,
            whole_pages=True,
            dtype=HALF,
            device=DEVICE,
        ),
    )
    assert found.keys() >= required(LATENT, forward)
    agree(found)


def test_a_pair_that_differs_is_named():
    case = FORWARDS["chain_verify"](head_dim=64, device=DEVICE)
    found = results(("torch_native", "flex"), case)
    found["flex"] = replace(found["flex"], out=found["flex"].out * 1.00001)
    with pytest.raises(pytest.fail.Exception, match="torch_native and flex in torch"):
        agree(found)
