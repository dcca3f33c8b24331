"""Who gets rows and slots, and who takes the next step with which config; no model runs."""

from __future__ import annotations

import pytest

from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.engine.configs import SpeculativeConfigs
from specattn.engine.request import Request, RequestOutput
from specattn.engine.scheduler import Scheduler
from specattn.errors import CapacityError
from tests.books import check_books

CONTEXT = 40
DEEP, SHALLOW, PLAIN = (SpecConfig(*tree, CONTEXT, 3) for tree in ((5, 1, 6), (2, 1, 3), (0, 1, 1)))


def scheduler(*configs: SpecConfig, policy=None, num_slots: int = 200, page_size: int = 1):
    table = SlotTable(
        max_num_reqs=3, max_context_len=CONTEXT, num_slots=num_slots, page_size=page_size
    )
    return Scheduler(table, SpeculativeConfigs(configs, policy, [1, 3]), (), None)


def running(one: Scheduler, *lens: int) -> list:
    """Requests of these lengths, each with its first token."""
    items = [(Request([at] * length, 99), RequestOutput()) for at, length in enumerate(lens)]
    admitted = one.admit(items, whole=False)
    for request, length in zip(admitted, lens, strict=True):
        request.length = length
        one.append(request, [7])
    return admitted


@pytest.mark.parametrize("room", [6, 5])
def test_a_config_that_just_fits_is_taken(room):
    one = scheduler(DEEP)
    requests = running(one, CONTEXT - room)
    assert one.schedule() == {DEEP if room == 6 else PLAIN: requests}


@pytest.mark.parametrize("room", [12, 11])
def test_a_step_ahead_that_just_fits_is_taken(room):
    """The step in flight may gain 6 tokens, and the next one needs 6 slots past them."""
    one = scheduler(DEEP)
    requests = running(one, CONTEXT - room)
    assert one.schedule_ahead(DEEP, requests) == ({DEEP: requests} if room == 12 else {})
    held = int(one.table.reserved[requests[0].row])
    assert held == CONTEXT if room == 12 else held >= CONTEXT - room


def test_a_chosen_config_that_just_fits_stays_though_a_deeper_one_fits_too():
    wide = SpecConfig(1, 8, 9, CONTEXT, 3)
    configs = SpeculativeConfigs([wide, DEEP], None, [1])
    assert configs.fit(wide, 9) is wide
    assert configs.fit(wide, 8) is DEEP


def test_configs_are_offered_by_the_longest_room():
    """A request next to its context's end keeps nobody else from a deep tree."""
    offered = []

    def first(observed):
        offered.append(observed.configs)
        return observed.configs[0]

    one = scheduler(DEEP, SHALLOW, policy=first)
    near, far = running(one, CONTEXT - 3, 5)
    assert one.schedule() == {SHALLOW: [near], DEEP: [far]}
    assert offered == [(DEEP, SHALLOW)]


def test_who_is_not_in_the_step_in_flight_keeps_others_from_a_step_ahead():
    one = scheduler(DEEP)
    first, second = running(one, 5, 7)
    assert one.schedule_ahead(DEEP, [first]) == {}
    assert one.schedule_ahead(DEEP, [second, first]) == {DEEP: [first, second]}


def test_groups_next_to_their_contexts_end_get_slots_first():
    one = scheduler(DEEP, num_slots=1 + 50)
    far, near = running(one, 5, CONTEXT - 1)
    assert one.schedule() == {PLAIN: [near]}, "there are 50 slots, and 11 + 40 are wanted"
    one.drop(near.result)
    assert one.schedule() == {DEEP: [far]}
    one = scheduler(DEEP, num_slots=1 + 5)
    running(one, 5)
    with pytest.raises(CapacityError, match="more pages of 1 KV slots are needed"):
        one.schedule()


@pytest.mark.parametrize(("length", "shared"), [(0, 0), (9, 8), (32, 28)])
def test_only_what_holds_kv_is_shared(length, shared):
    one = scheduler(DEEP, page_size=4)
    prompt = list(range(32))
    (first,) = one.admit([(Request(prompt), RequestOutput())], whole=False)
    one.table.commit(first.row, length)
    first.length = length
    (second,) = one.admit([(Request([*prompt, 50]), RequestOutput())], whole=False)
    assert second.length == one.table.committed(second.row) == shared
    slots = one.table.req_to_token[[first.row, second.row], :32]
    assert (slots[0] == slots[1]).sum() == shared


def test_prompts_that_share_one_that_comes_with_them_wait_for_it():
    one = scheduler(DEEP, page_size=4)
    items = [(Request([*range(9), last]), RequestOutput()) for last in (20, 21)]
    other = Request([33] * 9), RequestOutput()
    now, later = one.wave([*items, other])
    assert (now, later) == ([items[0], other], [items[1]])


def test_what_was_admitted_is_undone():
    one = scheduler(DEEP)
    kept = running(one, 5)
    rows = one.table.rows
    running(one, 7, 9)
    one.roll_back(kept, rows)
    assert one.running == kept
    assert one.table.rows == rows
    check_books(one.table)
