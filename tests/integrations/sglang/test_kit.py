"""SGLang's own attention kit through the plug-in."""

from __future__ import annotations

import unittest
from importlib.util import find_spec

import pytest

if find_spec("sglang") is not None:
    import torch

    # modules of linear attention, which the kit imports, name these at import
    for operator in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
        setattr(torch.ops.sgl_kernel, operator, None)
    from tests.integrations.sglang.kit import cells

    CELLS = cells()
else:
    CELLS = []

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("active")]


class Strict(unittest.TestCase):
    """The kit skips where a backend cannot be made; here that is a failure."""

    def skipTest(self, reason):
        self.fail(reason)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_sglangs_attention_kit(cell):
    cell.run(Strict())
