"""FlexAttention, through the conformance kit."""

from __future__ import annotations

import torch

from specattn.testing.plugin import backend_suite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

test_flex = backend_suite("flex", DEVICE, "quick", evicts=True)
