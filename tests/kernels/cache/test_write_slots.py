"""write_slots against lists of pages."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from specattn.kernels.cache import write_slots
from tests.kernels.tree_oracle import DEVICE

POISON = -7


@pytest.mark.parametrize("pinned", [False, True])
def test_pieces_are_written_and_nothing_else(implementation, pinned):
    pages = [[3, 9, 1], [7] * 0, list(range(1, 515))]
    rows, columns, counts, room = [4, 1, 2], [6, 0, 2], [5, 0, 1027], [11, 0, 1029]
    starts = np.cumsum([0] + [len(some) for some in pages[:-1]]) + 15
    numbers = [*rows, *columns, *counts, *starts, *room, *chain(*pages), POISON]
    packed = torch.tensor(numbers, dtype=torch.int32, pin_memory=pinned and DEVICE == "cuda")
    wide = torch.full((5, 1040), POISON, dtype=torch.int32, device=DEVICE)
    want, reserved = wide[:, :1035].tolist(), torch.full((5,), POISON, dtype=torch.int32)
    for row, column, count, some in zip(rows, columns, counts, pages, strict=True):
        slots = [page * 2 + within for page in some for within in (0, 1)][:count]
        want[row][column : column + count] = slots
    reserved = reserved.to(DEVICE)
    write_slots(
        packed if pinned else packed.to(DEVICE),
        wide[:, :1035],
        reserved,
        pieces=3,
        longest=1027,
        page_size=2,
    )
    assert wide[:, :1035].tolist() == want
    assert (wide[:, 1035:] == POISON).all()
    assert reserved.tolist() == [POISON, 0, 1029, POISON, 11]
