"""The library's own backends keep what they declare."""

from __future__ import annotations

import torch

from specattn.backends.hybrid import hybrid
from specattn.backends.tbo import tbo
from specattn.testing import Geometry
from specattn.testing.plugin import backend_suite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LATENT = Geometry(heads=(4, 1), head_dim=80, v_head_dim=64, latent=True)
FIRST = "triton" if DEVICE == "cuda" else "torch_native"

test_torch_native = backend_suite("torch_native", DEVICE, evicts=True)
# without CUDA it runs in the interpreter
test_triton = backend_suite(
    "triton", DEVICE, "quick" if DEVICE == "cuda" else "smoke", validates=True, evicts=True
)
test_latent_torch_native = backend_suite("torch_native", DEVICE, geometry=LATENT)
test_latent_triton = backend_suite(
    "triton_mla", DEVICE, "quick" if DEVICE == "cuda" else "smoke", geometry=LATENT
)
test_hybrid = backend_suite(hybrid(prefill="torch_native", decode=FIRST), DEVICE)
test_tbo = backend_suite(tbo(FIRST), DEVICE)
