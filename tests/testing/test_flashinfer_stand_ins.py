"""FlashInfer's adapters keep what they declare, over stand-ins of its wrappers, on the CPU."""

from __future__ import annotations

import pytest
import torch

from specattn.testing import Geometry
from specattn.testing.plugin import backend_suite
from tests.backends import fake_flashinfer
from tests.backends.stand_ins import standing_in
from tests.oracle import tolerances_of
from tests.samples import half_of_kit
from tests.testing.test_kit_passes import OF_PARTS

LATENT = Geometry(heads=(4, 1), head_dim=576, v_head_dim=512, latent=True)
BF16 = (torch.bfloat16,)
HERE = fake_flashinfer.__name__
BOUNDS = tolerances_of("flashinfer")


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the library itself is held to the kit in test_libraries.py")
    fake_flashinfer.take_the_place(monkeypatch)
    # every check has a workspace of its own
    monkeypatch.setattr(fake_flashinfer, "PROCESSORS", 8)
    monkeypatch.setattr("specattn.backends.flashinfer_plan.MIN_FLOATS", 1024)


class InTwoPasses(standing_in("flashinfer", HERE)):
    """Trees as a pass over the prefix and one over the tail, however short."""

    two_passes_from = 0


test_flashinfer = half_of_kit(
    backend_suite(
        standing_in("flashinfer", HERE),
        "cpu",
        dtypes=BF16,
        tolerances=BOUNDS,
        leave_out=("long prefixes",),
    )
)
test_in_two_passes = half_of_kit(
    backend_suite(InTwoPasses, "cpu", dtypes=BF16, tolerances=BOUNDS, leave_out=OF_PARTS)
)
test_mla = half_of_kit(
    backend_suite(
        standing_in("flashinfer_mla", HERE),
        "cpu",
        geometry=LATENT,
        tolerances=BOUNDS,
        leave_out=OF_PARTS,
    )
)
