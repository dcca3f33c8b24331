"""The library's own backends keep what they declare."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.backends.by_phase import by_phase
from specattn.errors import UnsupportedError
from specattn.testing import ConformanceError, Geometry, Tolerances, conformance
from specattn.testing.cases import make_tree_case
from specattn.testing.determinism import picked
from specattn.testing.oracle import check
from specattn.testing.plugin import backend_suite
from tests.samples import kit

if TYPE_CHECKING:
    from specattn.testing.kit import Check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = DEVICE == "cuda"

# of float32, which takes longest to compile, a few; heads of 32, which Gluon does not serve
HALF = (torch.float16, torch.bfloat16) if CUDA else ()
HEADS = Geometry(head_dim=32) if CUDA else None
LATENT = Geometry(heads=(4, 1), head_dim=80, v_head_dim=64, latent=True)
FIRST = "triton" if CUDA else "torch_native"
OF_PARTS = ("dtypes", "heads", "head sizes", "large logits", "long prefixes", "scale")


@pytest.mark.parametrize("page", [1, 4])
def test_requests_in_other_company_keep_their_pages(page):
    case = make_tree_case([9, 0, 14], mode="chain", page_size=page)
    wanted = case.expected()
    moved = picked(case, [2, 0], pads=1, seed=3)
    for got, want in zip(moved.expected(), wanted, strict=True):
        torch.testing.assert_close(got[:8], torch.cat([want[8:], want[:4]]), rtol=1e-12, atol=1e-12)
    args = moved.args
    for b, length in enumerate([14, 9]):
        slots = args["req_to_token"][args["req_pool_indices"][b], : length + 4]
        at = torch.arange(len(slots))
        assert torch.equal(slots, slots[at - at % page] + at % page)
        assert not (slots[::page] % page).any()
        assert (slots >= page).all()


def test_a_latent_geometry_has_one_kv_head_unless_told():
    geometry = Geometry(head_dim=80, v_head_dim=64, latent=True)
    for one in conformance("torch_native", DEVICE, "smoke", geometry=geometry):
        with contextlib.suppress(UnsupportedError):
            one()


def test_bounds_of_one_dtype_leave_the_others_as_they_are():
    wide = Tolerances(out={torch.bfloat16: 1e-2})
    case = make_tree_case([9])
    want = case.expected()
    case.out.copy_(want[0])
    case.lse.copy_(want[1])
    check(case, want, tolerances=wide)
    case.out *= 1 + 1e-5
    with pytest.raises(ConformanceError, match=r"relative error 1\.00e-05 above 3\.0e-06"):
        check(case, want, tolerances=wide)


test_torch_native = backend_suite("torch_native", DEVICE, evicts=True)
test_latent_torch_native = backend_suite("torch_native", DEVICE, geometry=LATENT)
# without CUDA they run in the interpreter
LEVEL = "quick" if CUDA else "smoke"
TRITON = {
    "triton": {"geometry": HEADS, "validates": True, "evicts": True},
    "triton_mla": {"geometry": LATENT},
}
# parts have suites of their own for what they compute by themselves
COMPOSITE = by_phase(prefill="torch_native", decode=FIRST)


def run(one: Check) -> None:
    try:
        one()
    except UnsupportedError as error:
        pytest.skip(str(error))


@kit(conformance("triton", DEVICE, LEVEL, dtypes=HALF, **TRITON["triton"]))
def test_triton(one):
    run(one)


@kit(conformance("triton_mla", DEVICE, LEVEL, dtypes=HALF, **TRITON["triton_mla"]))
def test_latent_triton(one):
    run(one)


@kit(conformance(COMPOSITE, DEVICE, geometry=HEADS, dtypes=HALF, leave_out=OF_PARTS))
def test_by_phase(one):
    run(one)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRITON)
def test_float32(name):
    for one in conformance(name, DEVICE, "smoke", dtypes=(torch.float32,), **TRITON[name]):
        with contextlib.suppress(UnsupportedError):
            one()
