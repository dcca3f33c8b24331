"""SGLang's own attention kit through the plug-in."""

from __future__ import annotations

import unittest

import pytest

from tests.integrations.sglang import INSTALLED

if INSTALLED:
    from tests.integrations.sglang import operators  # noqa: F401
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
