"""Who gets rows and slots, and who takes the next step with which config; no model runs."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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


def test_who_is_not_in_the_step_in_flight_joins_the_step_ahead():
    """It gains nothing in that, so that it needs slots for one step alone."""
    one = scheduler(DEEP)
    first, second = running(one, 5, CONTEXT - 6)
    assert one.schedule_ahead(DEEP, [first]) == {DEEP: [first, second]}
    assert one.schedule_ahead(DEEP, [second, first]) == {}


@pytest.mark.parametrize(
    ("length", "new", "held", "steps"),
    [(5, 9, False, True), (5, 1, False, False), (CONTEXT, 9, False, False), (5, 9, True, False)],
    ids=["goes on", "of one token", "at its context's end", "that the host must know"],
)
def test_who_awaits_its_first_token_steps_if_it_surely_goes_on(length, new, held, steps):
    one = scheduler(PLAIN)
    items = [(Request([at] * 5, 9), RequestOutput()) for at in range(2)]
    items[0] = Request([3] * length, new), RequestOutput()
    admitted = one.admit(items, whole=False)
    for request in admitted:
        one.await_first(request, by_host=held and request is admitted[0])
        assert one.table.committed(request.row) == request.prompt_len
    group = admitted if steps else admitted[1:]
    assert one.schedule() == {PLAIN: group}
    assert one.schedule_ahead(PLAIN, []) == {PLAIN: group}
    # one token in flight besides, and the first
    going = one.schedule_ahead(PLAIN, admitted)
    assert going == {PLAIN: [request for request in group if request.request.max_new_tokens > 2]}


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


COUNT = st.integers(1, 3)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of few prompts, of which many begin alike; a step gains any number of tokens."""

    @initialize(num_slots=st.sampled_from([60, 200]), page_size=st.sampled_from([1, 4]))
    def start(self, num_slots, page_size):
        policy = lambda observed: observed.configs[self.choice % len(observed.configs)]  # noqa: E731
        configs = [DEEP, SHALLOW, PLAIN]
        self.one = scheduler(*configs, policy=policy, num_slots=num_slots, page_size=page_size)
        self.choice, self.free = 0, self.one.table.num_free_slots
        self.admit(1, 9, 30)

    def note(self, *admitted):
        for one in admitted:
            assert one.length == self.one.table.committed(one.row), "what is shared is committed"
            shared, slots = one.length, self.one.table.req_to_token[one.row, : one.length]
            for other in self.one.running if shared else ():
                theirs = self.one.table.req_to_token[other.row, :shared]
                # slots of others are those of the same tokens, which hold KV
                if (theirs == slots).all():
                    assert list(other.tokens[: shared + 1]) == list(one.tokens[: shared + 1])
            one.length = len(one.request.prompt)
            self.one.append(one, [7])
        self.one.remove_ended()

    @precondition(lambda self: self.one.num_free)
    @rule(count=COUNT, length=st.integers(1, CONTEXT), new=st.integers(1, 40))
    def admit(self, count, length, new):
        requests = [Request([*range(length - 1), at], new) for at in range(count)]
        requests = requests[: self.one.num_free]
        running, rows = list(self.one.running), self.one.table.rows
        items = [(request, RequestOutput()) for request in requests]
        try:
            while items:
                now, items = self.one.wave(items)
                assert now, "somebody comes first"
                self.note(*self.one.admit(now, whole=False))
        except CapacityError:
            gone = [one for one in running if one.result.finish_reason]
            self.one.roll_back([one for one in running if one not in gone], rows)

    @precondition(lambda self: self.one.running)
    @rule(choice=st.integers(0, 2), gains=st.lists(st.integers(1, 6), min_size=6, max_size=6))
    def step(self, choice, gains):
        """One step, and perhaps one that is launched before its tokens are known."""
        self.choice = choice
        try:
            groups = self.one.schedule()
        except CapacityError:
            # nobody has slots: somebody has to go
            return self.drop(0)
        taking = [one for group in groups.values() for one in group]
        assert len({one.row for one in taking}) == len(taking)
        for config, group in groups.items():
            for one in group:
                assert self.one.table.room(one.row) >= one.length + config.reserve_len
        config, group = next(iter(groups.items()))
        ahead = self.one.schedule_ahead(config, group) if len(groups) == 1 else {}
        for following, later in ahead.items():
            assert set(later) <= set(group)
            for one in later:
                need = one.length + config.num_steps + 1 + following.reserve_len
                assert self.one.table.room(one.row) >= need
        for done, group in [*groups.items(), *ahead.items()]:
            for one, gain in zip(group, gains, strict=False):
                # one that ended rides along
                if not one.result.finish_reason:
                    one.length += min(gain, done.num_steps + 1)
                    self.one.append(one, [7] * min(gain, done.num_steps + 1))
        self.one.remove_ended()

    @precondition(lambda self: self.one.running)
    @rule(at=st.integers(0, 2))
    def drop(self, at):
        result = self.one.running[at % len(self.one.running)].result
        self.one.drop(result)
        assert result.finish_reason == "dropped"

    @precondition(lambda self: len(self.one.running) > 2)
    @rule()
    def clear(self):
        count = len(self.one.running)
        assert self.one.clear(table=False) == count

    @invariant()
    def rows_belong_to_whoever_runs(self):
        check_books(self.one.table)
        assert sorted(self.one.table.rows) == sorted(one.row for one in self.one.running)
        assert all(not one.result.finish_reason for one in self.one.running)

    def teardown(self):
        self.one.clear(table=False)
        self.rows_belong_to_whoever_runs()
        assert self.one.table.num_free_slots == self.free


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=25)
