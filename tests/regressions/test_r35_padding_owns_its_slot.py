"""R35: NVIDIA/TensorRT-LLM#4853, NVIDIA/TensorRT-LLM#16072, NVIDIA/TensorRT-LLM#18242.

Padding needed a dummy request of its own; under load its KV could not be allocated, and batches
silently ran without graphs.

Row 0 and page 0 are padding's from the start: with every row and page taken a padded batch still
replays. What does run eagerly is counted.
"""

from __future__ import annotations

import pytest

from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import CapacityError
from tests.books import check_books
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_exhausted_table_never_gives_padding_away(page_size):
    table = SlotTable(
        max_num_reqs=3, max_context_len=32, num_slots=32, page_size=page_size, device=DEVICE
    )
    rows = [table.allocate() for _ in range(3)]
    with pytest.raises(CapacityError, match="request rows"):
        table.allocate()
    with pytest.raises(CapacityError, match="KV slots"):
        table.reserve(rows, [32, 32, 32])
    table.reserve(rows[:1], [32 - page_size])
    assert table.num_free_slots == 0
    assert 0 not in rows
    assert not table.req_to_token[0].any()
    assert (table.req_to_token[rows[0], : 32 - page_size] >= page_size).all()
    check_books(table)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_engine_still_replays_and_counts_what_it_does_not(backend):
    config = SpecConfig(2, 2, 4, 32, 3)
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    run = Engine(*models, config, backend=backend, buckets=[4], num_slots=3 * 32 + 1)
    run.add([Request([3, 1, 4], 8), Request([1, 5], 8), Request([9], 8)])
    run.table.reserve([live.row for live in run.running], [32] * 3)
    assert run.table.num_free_slots == run.table.num_free_rows == 0
    run.step()
    stats = run.decoder(config).runner.stats
    assert set(stats.replays.values()) == {1}
    assert not stats.eager
    small = Engine(*models, config, backend=backend, buckets=[2])
    small.add([Request([3, 1, 4], 8), Request([1, 5], 8), Request([9], 8)])
    small.step()
    stats = small.decoder(config).runner.stats
    assert set(stats.eager.values()) == {1}
    assert not stats.replays
