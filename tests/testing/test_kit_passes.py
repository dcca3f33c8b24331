"""The library's own backends keep what they declare."""

from __future__ import annotations

import contextlib

import pytest
import torch

from specattn.backends.by_phase import by_phase
from specattn.errors import UnsupportedError
from specattn.testing import ConformanceError, Geometry, Tolerances, conformance
from specattn.testing.cases import make_tree_case
from specattn.testing.determinism import picked
from specattn.testing.oracle import check
from specattn.testing.plugin import backend_suite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LATENT = Geometry(heads=(4, 1), head_dim=80, v_head_dim=64, latent=True)
FIRST = "triton" if DEVICE == "cuda" else "torch_native"
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
# without CUDA it runs in the interpreter
test_triton = backend_suite(
    "triton", DEVICE, "quick" if DEVICE == "cuda" else "smoke", validates=True, evicts=True
)
test_latent_torch_native = backend_suite("torch_native", DEVICE, geometry=LATENT)
test_latent_triton = backend_suite(
    "triton_mla", DEVICE, "quick" if DEVICE == "cuda" else "smoke", geometry=LATENT
)
# parts have suites of their own for what they compute by themselves
test_by_phase = backend_suite(
    by_phase(prefill="torch_native", decode=FIRST), DEVICE, leave_out=OF_PARTS
)
