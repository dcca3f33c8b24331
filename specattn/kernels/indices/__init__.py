"""Fill index lists, tables and masks of attention libraries, on the device."""

from __future__ import annotations

from specattn.kernels.indices.lists import (
    KeySlots,
    draft_kv_width,
    fill_draft_kv,
    fill_draft_tails,
    fill_lists,
)
from specattn.kernels.indices.tables import (
    fill_ancestor_table,
    fill_block_table,
    fill_page_table,
    fill_slots,
    fill_window,
)

__all__ = [
    "KeySlots",
    "draft_kv_width",
    "fill_ancestor_table",
    "fill_block_table",
    "fill_draft_kv",
    "fill_draft_tails",
    "fill_lists",
    "fill_page_table",
    "fill_slots",
    "fill_window",
]
