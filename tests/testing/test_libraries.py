"""Libraries that run here keep what their backends declare.

Skips are `reasons`, or what a backend refuses by name. FA3 is held to bfloat16, because a build
may lack kernels of another dtype, and to call one that is missing ends the process; FlashInfer,
because it would compile them.
"""

from __future__ import annotations

import pytest
import torch

from specattn.testing import Geometry, Tolerances
from specattn.testing.plugin import backend_suite
from tests.oracle import tolerances_of

LATENT = Geometry(heads=(4, 1), head_dim=576, v_head_dim=512, latent=True)
BF16 = (torch.bfloat16,)
# the tanh of a cap is tanh.approx
FA3 = Tolerances(cap=2e-3)

test_fa3 = pytest.mark.gpu(backend_suite("fa3", "cuda", dtypes=BF16, tolerances=FA3, evicts=True))
test_fa3_pages = pytest.mark.gpu(
    backend_suite(
        "fa3", "cuda", geometry=Geometry(page_size=64), dtypes=BF16, tolerances=FA3, evicts=True
    )
)
test_flashinfer = pytest.mark.gpu(
    # a window or cap of its kernels' own is another one to compile: tests/backends has those
    backend_suite(
        "flashinfer",
        "cuda",
        dtypes=BF16,
        tolerances=tolerances_of("flashinfer"),
        leave_out=("window", "cap", "options together"),
    )
)
test_flashinfer_mla = pytest.mark.gpu(
    backend_suite(
        "flashinfer_mla", "cuda", geometry=LATENT, tolerances=tolerances_of("flashinfer_mla")
    )
)
test_flashmla = pytest.mark.gpu(
    backend_suite("flashmla", "cuda", geometry=LATENT, tolerances=Tolerances(lse=3e-3))
)
