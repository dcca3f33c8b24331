"""What a memory by row asks of steps, prompts and the engine, which keys and values do not."""

from __future__ import annotations

import pytest
import torch

from specattn.cache.memory import memory_for
from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.errors import CaptureMismatch
from specattn.speculative.model import ModelSlot
from specattn.speculative.states import RequestStates
from specattn.speculative.step import setup as step_setup
from specattn.speculative.step.decoder import StepDecoder
from tests.memories import Sums, slot_of
from tests.tiny import TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = SpecConfig(0, 1, 1, 64, 4)


class Breaking(TinyTarget):
    """Fails in the forward after so many."""

    left = -1

    def forward(self, input_ids, positions, attend, rows=None):
        self.left -= 1
        if not self.left:
            raise RuntimeError("no more")
        return super().forward(input_ids, positions, attend, rows)


def decoder_of(slot, table, **options) -> StepDecoder:
    states = RequestStates.alloc(len(table.req_to_token), {}, torch.device(DEVICE))
    return StepDecoder(slot, None, PLAIN, table, states, buckets=[4], record=False, **options)


def table() -> SlotTable:
    return SlotTable(**PLAIN.sizes, num_slots=300, device=DEVICE)


def test_keys_and_values_lie_by_slot():
    made = memory_for(TinyTarget(device=DEVICE).layers, books := table())
    slot = ModelSlot.of(TinyTarget(device=DEVICE), made, "auto")
    assert slot.shares_prefixes
    assert not slot.by_row()
    assert slot.num_slots == 300
    assert slot.device == books.req_to_token.device
    slot.admit([1])
    assert set(slot.tensors()) == {"k_cache", "v_cache"}


def test_a_step_of_halves_that_fails_leaves_every_row_as_it_was():
    """A row that had gone on would go on twice when the step is run again."""
    books = table()
    slot = slot_of(Breaking(device=DEVICE), books)
    decoder = decoder_of(slot, books, tbo=True)
    rows = [books.allocate() for _ in range(4)]
    books.reserve(rows, [8] * 4)
    decoder.step(rows)
    before = slot.by_row()["sums"].clone()
    assert before[:, rows].abs().amin() > 0
    slot.model.left = 2
    with pytest.raises(RuntimeError, match="no more"):
        decoder.step(rows)
    assert torch.equal(slot.by_row()["sums"], before)
    decoder.step(rows)
    assert not torch.equal(slot.by_row()["sums"], before)


def test_the_guard_of_a_capture_knows_what_lies_by_row():
    books = table()
    slot = slot_of(TinyTarget(device=DEVICE), books)
    decoder, rows = decoder_of(slot, books), [books.allocate()]
    books.reserve(rows, [8])
    sums = slot.by_row()["sums"]
    before = sums.data
    sums.data = before.clone()
    with pytest.raises(CaptureMismatch, match="sums changed since capture"):
        decoder.step(rows)
    sums.data = before
    assert decoder.step(rows)


@pytest.mark.parametrize("memory", [memory_for, Sums.over])
def test_prefixes_are_shared_where_all_lies_by_slot(memory, monkeypatch):
    monkeypatch.setattr(step_setup, "memory_for", memory)
    target = TinyTarget(device=DEVICE)
    run = Engine(target, None, PLAIN, graphs=False, kv_dtype=None)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    results = run.generate([Request([*prompt, last], 5) for last in (3, 5)])
    shared = run.metrics().shared_tokens
    assert shared == (len(prompt) - 1 if memory is memory_for else 0)
    alone = Engine(target, None, PLAIN, graphs=False)
    (want,) = alone.generate([Request([*prompt, 5], 5)])
    assert results[1].tokens == want.tokens
