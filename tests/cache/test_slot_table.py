"""The slot table against plain Python books: what the device is told, how often, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specattn.cache.slot_table import SlotTable, StagingRing
from specattn.errors import CapacityError
from tests.books import check_books

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = -7_777_777


def table(kind: type[SlotTable] = SlotTable, **over) -> SlotTable:
    sizes = {"max_num_reqs": 3, "max_context_len": 200, "num_slots": 601, "device": DEVICE}
    return kind(**(sizes | over))


class Small(SlotTable):
    """Whatever is longer than this takes several uploads."""

    _UPLOAD = 5


def count_uploads(books: SlotTable) -> list[int]:
    sizes, write = [], books._staging.write
    books._staging.write = lambda *parts: sizes.append(len(parts[0][0])) or write(*parts)
    return sizes


@pytest.mark.parametrize("page_size", [1, 16])
def test_reserved_says_how_many_tokens_have_slots(page_size):
    books = table(page_size=page_size)
    assert books.reserved.dtype == torch.int32
    assert books.reserved.tolist() == [0] * 4
    row = books.allocate()
    assert books.reserved.tolist() == [0] * 4
    books.reserve([row], [30])
    room = -(-94 // page_size) * page_size
    assert books.reserved[row] == room
    assert (books.req_to_token[row, :room] >= page_size).all()
    books.commit(row, 30)
    second = books.allocate(share=row, share_len=16)
    assert books.reserved[second] == 16
    books.reserve([second], [16])
    assert books.reserved[second] == 16, "what is there is enough"
    books.free(row)
    assert books.reserved[row] == 0
    assert books.reserved[second] == 16
    books.reserve([second], [199])
    assert books.reserved.tolist()[second] == 200, "never more than the context"
    check_books(books)


def test_a_row_is_topped_up_whenever_another_one_needs_pages():
    books = table(max_context_len=4000, num_slots=9000)
    rows, lens = [books.allocate(), books.allocate()], [100, 107]
    books.reserve(rows, lens)
    sizes = count_uploads(books)
    steps = 0
    while max(lens) < 3900:
        lens = [length + gain for length, gain in zip(lens, (6, 2 + steps % 3), strict=True)]
        books.reserve(rows, lens)
        steps += 1
    assert set(sizes) == {2}, "both rows travel in one upload"
    assert steps / len(sizes) > 10
    check_books(books)


def test_what_is_held_ahead_is_given_back_to_those_who_need_it():
    books = table(max_num_reqs=4, max_context_len=128, num_slots=201)
    first, second, third = (books.allocate() for _ in range(3))
    books.reserve([first], [40])
    books.commit(first, 60)
    kept = books.req_to_token[first, :60].clone()
    books.reserve([second], [10])
    assert books.reserved[[first, second]].tolist() == [104, 74]
    free = books.num_free_slots
    with pytest.raises(CapacityError, match=r"131 .* 22 are free and 44 reserved ahead"):
        books.reserve([third, second], [128, 77])
    assert (books.num_free_slots, books.reserved[second].item()) == (free, 74)
    sizes = count_uploads(books)
    books.reserve([third, second], [128, 12])
    assert sizes == [3], "rows that shrink travel with those that grow"
    assert books.reserved[[first, second, third]].tolist() == [60, 12, 128]
    assert torch.equal(books.req_to_token[first, :60], kept)
    sizes = {first: 60, second: 12, third: 128}
    slots = [books.req_to_token[row, :size] for row, size in sizes.items()]
    assert len(torch.cat(slots).unique()) == 200, "every slot, and each of them once"
    check_books(books)
    with pytest.raises(CapacityError, match="0 are free and 0 reserved ahead"):
        books.reserve([second], [13])


def test_what_was_asked_for_stays_reserved():
    """Forwards that are not finished may write there."""
    books = table(max_context_len=128, num_slots=201)
    first, second = books.allocate(), books.allocate()
    books.reserve([first], [90])
    books.reserve([first], [20])
    with pytest.raises(CapacityError, match="72 are free and 38 reserved ahead"):
        books.reserve([second], [111])
    books.reserve([second], [110])
    assert books.reserved[[first, second]].tolist() == [90, 110]
    check_books(books)


def test_a_long_prompt_takes_several_uploads():
    books = table(Small, page_size=4, max_context_len=150, num_slots=800)
    sizes = count_uploads(books)
    rows = [books.allocate(), books.allocate(), books.allocate()]
    books.reserve(rows, [150, 3, 149])
    assert len(sizes) == -(-(38 + 17 + 38) // 5)
    assert books.reserved[rows].tolist() == [150, 68, 150]
    slots = torch.cat(
        [books.req_to_token[rows[0]], books.req_to_token[rows[1], :68], books.req_to_token[rows[2]]]
    )
    assert len(slots.unique()) == len(slots)
    check_books(books)


@dataclass
class Books:
    """A row in plain Python: tokens that were asked for, those that are committed, and slots."""

    asked: int = 0
    committed: int = 0
    slots: list[int] = field(default_factory=list)


ROW = st.integers(0, 5)


class SlotMachine(RuleBasedStateMachine):
    """Any calls keep every slot that was asked for; what is refused changes nothing."""

    context, rows = 150, 6

    @initialize(kind=st.sampled_from([SlotTable, Small]), page_size=st.sampled_from([1, 4, 16]))
    def start(self, kind, page_size):
        # small enough to run out
        num_slots = {1: 260, 4: 400, 16: 700}[page_size]
        self.table = table(
            kind,
            page_size=page_size,
            num_slots=num_slots,
            max_num_reqs=self.rows,
            max_context_len=self.context,
        )
        self.whole, self.books = self.table.num_free_slots, {}
        for _ in range(3):
            self.allocate()

    def row(self, at: int) -> int:
        return sorted(self.books)[at % len(self.books)]

    @rule()
    def allocate(self):
        if len(self.books) == self.rows:
            with pytest.raises(CapacityError, match="all 6 request rows are taken"):
                self.table.allocate()
        else:
            self.books[self.table.allocate()] = Books()

    @precondition(lambda self: len(self.books) < self.rows)
    @rule(at=ROW, pages=st.integers(0, 9))
    def share(self, at, pages):
        donor, size = self.row(at), self.table.page_size
        length = min(pages, self.books[donor].committed // size) * size
        row = self.table.allocate(share=donor, share_len=length)
        self.books[row] = Books(length, length, self.books[donor].slots[:length])

    @rule(grown=st.dictionaries(ROW, st.sampled_from([-9, 0, 3, 9, 80]), min_size=1))
    def reserve(self, grown):
        more = {self.row(at): count for at, count in grown.items()}
        lens = [min(self.context, max(self.books[row].asked + n, 0)) for row, n in more.items()]
        try:
            self.table.reserve([*more], lens)
        except CapacityError:
            return
        for row, length in zip(more, lens, strict=True):
            books = self.books[row]
            books.asked = max(books.asked, length)
            books.slots += self.table.req_to_token[row, len(books.slots) : length].tolist()

    @rule(at=ROW, more=st.integers(0, 80))
    def commit(self, at, more):
        books = self.books[self.row(at)]
        books.committed = min(books.asked, books.committed + more)
        self.table.commit(self.row(at), books.committed)

    @precondition(lambda self: len(self.books) > 1)
    @rule(at=ROW)
    def free(self, at):
        del self.books[row := self.row(at)]
        self.table.free(row)

    @rule(at=ROW)
    def hold(self, at):
        with self.table.holding([row := self.row(at)]), pytest.raises(ValueError, match="a step"):
            self.table.free(row)

    @precondition(lambda self: len(self.books) > 3)
    @rule()
    def clear(self):
        self.table.clear()
        self.books.clear()
        self.allocate()

    @invariant()
    def host_and_device_agree(self):
        check_books(self.table)
        room, slots = self.table.reserved.tolist(), self.table.req_to_token.tolist()
        assert {row for row, count in enumerate(room) if count} <= self.books.keys()
        for row, books in self.books.items():
            assert self.table.committed(row) == books.committed
            assert room[row] >= self.table.room(row) == books.asked
            assert slots[row][: books.asked] == books.slots, "slots moved"
            assert min(slots[row][: room[row]], default=16) >= self.table.page_size
        assert not any(slots[0])

    def teardown(self):
        for row in self.books:
            self.table.free(row)
        self.books.clear()
        self.host_and_device_agree()
        assert self.table.num_free_slots == self.whole


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=50, stateful_step_count=40)


def test_a_ring_takes_its_buffers_in_turn():
    ring = StagingRing(6, torch.device(DEVICE), depth=3)
    written = []
    for step in range(3):
        written.append(ring.write(np.array([[step, 1], [2, 3]]), np.array([step])))
        ring.launched()
    assert [one.tolist() for one in written] == [[step, 1, 2, 3, step, 0] for step in range(3)]
    assert len({one.data_ptr() for one in written}) == 3
    again = ring.write(np.arange(6))
    assert again.data_ptr() == written[0].data_ptr()
    assert again.tolist() == list(range(6))
    assert written[1].tolist() == [1, 1, 2, 3, 1, 0]
    # an interrupt may have come before the launch was noted
    assert ring.write(np.arange(1)).data_ptr() == written[1].data_ptr()


@pytest.mark.gpu
def test_a_buffer_underway_is_not_written_again():
    ring = StagingRing(4096, torch.device(DEVICE), depth=2)
    seen = torch.zeros(12, 4096, dtype=torch.int32, device=DEVICE)
    torch.cuda._sleep(100_000_000)  # every copy waits behind this
    for step in range(12):
        seen[step].copy_(ring.write(np.full(4096, step)), non_blocking=True)
        ring.launched()
    assert (seen == torch.arange(12, device=DEVICE)[:, None]).all()


@pytest.mark.gpu
def test_reserving_neither_waits_nor_allocates():
    books = table(max_num_reqs=65, max_context_len=20_000, num_slots=1_000_000)
    rows = [books.allocate() for _ in range(64)]
    lens = [100 + 7 * at for at in range(64)]
    books.reserve(rows, lens)
    books.free(books.allocate())
    torch.cuda.synchronize()
    sizes = count_uploads(books)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1000):
            lens = [length + 1 + (at + step) % 6 for at, length in enumerate(lens)]
            books.reserve(rows, lens)
            if step % 50 == 0:
                books.commit(rows[0], 64)
                guest = books.allocate(share=rows[0], share_len=64)
                books.reserve([guest], [40_000 // 3])
                books.free(guest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert len(sizes) < 1000 / 8 + 20
    check_books(books)


def test_rows_that_are_held_stay_so_while_others_are_held():
    books = table()
    first, second = books.allocate(), books.allocate()
    with books.holding([first]):
        with books.holding([second]):
            for row in (first, second):
                with pytest.raises(ValueError, match=f"row {row} takes part in a step"):
                    books.free(row)
        books.free(second)
        with pytest.raises(ValueError, match=f"row {first} takes part in a step"):
            books.free(first)
    books.free(first)
    check_books(books)


@pytest.mark.parametrize("lens", [[2.5], [True], [None], np.array([2.5])])
def test_lengths_that_are_no_whole_numbers_are_refused(lens):
    books = table()
    row = books.allocate()
    with pytest.raises(ValueError, match="every length must be a whole number"):
        books.reserve([row], lens)
    check_books(books)
    for good in (np.array([5], dtype=np.int32), (6,), torch.tensor([7])):
        books.reserve([row], good)
    books.reserve([], [])
    assert int(books.reserved[row]) >= 7
