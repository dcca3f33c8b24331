"""The library's own backends keep what they declare."""

from __future__ import annotations

import torch

from specattn.testing.plugin import backend_suite

pytest_plugins = ["specattn.testing.plugin"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

test_torch_native = backend_suite("torch_native", DEVICE, "quick")
# on a CPU: in the interpreter
test_triton = backend_suite(
    "triton", DEVICE, "full" if DEVICE == "cuda" else "smoke", validates=True
)
