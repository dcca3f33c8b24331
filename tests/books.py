"""The books of a slot table: every page is free, or counted once per row that holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from specattn.cache.slot_table import SlotTable


def check_books(table: SlotTable) -> None:
    """Compare all counts with the rows' pages; waits for the device."""
    counts = np.zeros(len(table.reserved), dtype=np.int64)
    held = np.zeros(table.num_pages, dtype=np.int64)
    for row, pages in table._pages.items():
        counts[row] = len(pages)
        held[pages] += 1
    room = np.minimum(counts * table.page_size, table.max_context_len)
    assert (table._needed <= room).all(), "a row lost slots it needs"
    reserved = table.reserved.cpu().numpy()
    assert (reserved == room).all(), "the device has other lengths than the host"
    assert (held == table._users).all(), "page use counts disagree with the rows"
    free = np.zeros(table.num_pages, dtype=np.int64)
    np.add.at(free, table._free_pages[: table._num_free], 1)
    assert free.max(initial=0) <= 1, "a page is free twice"
    assert ((free > 0) != (held > 0))[1:].all(), "a page is leaked, or free while in use"
    assert not held[0], "page 0 belongs to padding"
    assert not free[0], "page 0 belongs to padding"
