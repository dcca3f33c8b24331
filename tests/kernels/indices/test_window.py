"""Slots and positions of a forward's window against plain Python over lists."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specattn.batch import ForwardMode
from specattn.config import SpecConfig
from specattn.kernels.indices import KeySlots, fill_window
from specattn.plan import AttnInputs, AttnPlan
from tests.implementations import EXAMPLES, by_each
from tests.kernels.tree_oracle import DEVICE, POISON, poisoned
from tests.recordings import recorded

CONTEXT = 50


class Window:
    """Requests over permuted slots; row 0 and length 0 are padding, and some reach the end."""

    def __init__(self, batch: int, width: int, steps: int, topk: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.table = poisoned(batch + 2, CONTEXT, dtype=torch.int32, gap=3)
        self.table.copy_(
            torch.randperm(1 << 16, device=DEVICE)[: self.table.numel()].view(self.table.shape)
        )
        self.table[0] = 0
        self.rows = rng.sample(range(1, batch + 2), batch)
        self.lens = [rng.randrange(CONTEXT + 1) for _ in range(batch)]
        if batch > 1:
            self.rows[1] = self.lens[1] = 0
            self.lens[-1] = CONTEXT - width + 1
        self.width, self.steps, self.topk = width, steps, topk
        self.tensors = [
            torch.tensor(self.rows, device=DEVICE, dtype=torch.int64),
            torch.tensor(self.lens, device=DEVICE, dtype=torch.int32),
        ]
        self.slots = poisoned(batch, width, dtype=torch.int32, gap=2)
        self.positions = poisoned(batch, steps, topk + 1)[..., :topk]

    def run(self, *, positions: bool = True) -> None:
        keys = KeySlots(self.table, *self.tensors, self.slots)
        fill_window(keys, positions_out=self.positions if positions else None)

    def check(self) -> None:
        held, zeros = self.table.tolist(), [0] * self.width
        assert self.slots.tolist() == [
            (held[row] + zeros)[length : length + self.width]
            for row, length in zip(self.rows, self.lens, strict=True)
        ]
        assert self.slots._base is None or (self.slots._base[:, self.width :] == POISON).all()

    def check_positions(self) -> None:
        assert self.positions.tolist() == [
            [[length + step] * self.topk for step in range(self.steps)] for length in self.lens
        ]


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 17), st.integers(1, 33), st.integers(0, 3), st.integers(1, 8))
@by_each
def test_windows(batch, width, steps, topk):
    """Columns beyond the table are slot 0, which belongs to padding."""
    window = Window(batch, width, steps, topk)
    window.run()
    window.check()
    window.check_positions()


def test_only_what_is_asked_for_is_written(implementation):
    window = Window(4, 6, 2, 3)
    window.run(positions=False)
    window.check()
    assert (window.positions == POISON).all()


def test_no_request_is_nothing_to_do(implementation):
    window = Window(0, 3, 2, 2)
    window.run()
    window.check()


def test_other_shapes_are_refused_by_name(implementation):
    def wrong(name, value, message):
        window = Window(3, 4, 2, 2)
        if name in ("rows", "seq_lens"):
            window.tensors[name == "seq_lens"] = value
        else:
            setattr(window, name, value)
        with pytest.raises(ValueError, match=message):
            window.run()
        for out in (window.slots, window.positions):
            assert (out == POISON).all()

    wrong("seq_lens", torch.zeros(2, dtype=torch.int32, device=DEVICE), "seq_lens")
    wrong("slots", poisoned(2, 4, dtype=torch.int32), "tail must be")
    wrong("slots", poisoned(3, 8, dtype=torch.int32)[:, ::2], "tail must be dense")
    wrong("positions", poisoned(3, 4), "positions_out")
    wrong("positions", poisoned(3, 2, 4)[..., ::2], "positions_out must be dense")
    wrong(
        "table",
        torch.ones(5, 2 * CONTEXT, dtype=torch.int32, device=DEVICE)[:, ::2],
        "req_to_token must be dense",
    )


def test_a_recorded_fill_follows_the_lengths():
    """A plan's `fill` is recorded once; rows, lengths and the table's contents may change."""
    layout = SpecConfig(3, 2, 6, CONTEXT, 3).layout(ForwardMode.TARGET_VERIFY)
    inputs = AttnInputs.alloc(3, layout, DEVICE)
    window = Window(3, layout.tail, 0, 1)
    plan = AttnPlan.over(layout, window.table, inputs)
    replay = recorded(plan.fill)
    for seed in range(3):
        window = Window(3, layout.tail, 0, 1, seed)
        plan.req_to_token.copy_(window.table)
        inputs.req_pool_indices.copy_(window.tensors[0])
        inputs.seq_lens.copy_(window.tensors[1])
        inputs.tail_slots.fill_(POISON)
        replay()
        window.slots = inputs.tail_slots
        window.check()
