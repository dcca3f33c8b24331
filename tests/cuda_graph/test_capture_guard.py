"""Whatever is replaced, resized or given up among watched attributes is noticed."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from specattn.cuda_graph.capture_guard import Glance, Settable, Watch


class Counted(Settable):
    """An object whose changes are counted."""

    def __init__(self, **values):
        vars(self).update(values)


HOLDERS = [SimpleNamespace, Counted]


def resize(held):
    held.a.resize_(64)


def point_elsewhere(held):
    held.a.data = held.a.clone()


def replace(held):
    held.a = held.a.clone()


def view(held):
    held.a = held.a.view(2, 2)


def change_a_number(held):
    held.number = 3.5


def add(held):
    held.more = 1


def replace_in_turn(held):
    """The memory and the identity of what is given up may be those of what comes next."""
    del held.a
    held.a = torch.zeros(2, 2)


def take_away(held):
    del held.number


CHANGES = [
    resize,
    point_elsewhere,
    replace,
    view,
    change_a_number,
    add,
    replace_in_turn,
    take_away,
]


@pytest.mark.parametrize("other", HOLDERS)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_noticed_until_renewed(change, holder, other):
    held = holder(a=torch.zeros(4), b=torch.zeros(3), number=2.5, name="x")
    watch = Watch([held, other(c=torch.zeros(2)), held])
    assert watch.unchanged()
    held.b += 1
    held.number = held.number * 1  # equal, but perhaps another object
    watch.renew()
    assert watch.unchanged()
    change(held)
    assert not any(watch.unchanged() for _ in range(3))
    watch.renew()
    assert watch.unchanged()


def resize_one_of_many(held):
    held.many[1].resize_(64)


def point_one_of_many_elsewhere(held):
    held.many[2].data = held.many[2].clone()


def replace_many(held):
    held.many = tuple(held.many)[:2]


MANY = [resize_one_of_many, point_one_of_many_elsewhere, replace_many]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("change", MANY, ids=lambda change: change.__name__)
@pytest.mark.parametrize("in_turn", [False, True])
def test_tensors_in_tuples_have_no_turns(change, in_turn, holder):
    held = holder(many=tuple(torch.zeros(4) for _ in range(3)), names=("a", "b"))
    watch = Watch([held, *(fixed() for _ in range(3))], in_turn=in_turn)
    assert all(watch.unchanged() for _ in range(7))
    change(held)
    assert not any(watch.unchanged() for _ in range(4))
    watch.renew()
    assert all(watch.unchanged() for _ in range(7))


@dataclass(frozen=True)
class Fixed:
    a: torch.Tensor
    b: torch.Tensor
    number: float = 2.5


def fixed():
    return Fixed(torch.zeros(4), torch.zeros(1))


def replace_by_force(held):
    """By one of the same value, which comparing values would not notice."""
    object.__setattr__(held, "b", held.b.clone())


def change_a_number_by_force(held):
    object.__setattr__(held, "number", 3.5)


FORCED = [resize, point_elsewhere, replace_by_force, change_a_number_by_force]


@pytest.mark.parametrize("change", FORCED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("in_turn", [False, True])
def test_changes_of_frozen_dataclasses_are_noticed_at_once_or_in_turn(change, in_turn):
    objects = [fixed() for _ in range(5)]
    watch = Watch([*objects, SimpleNamespace(c=torch.zeros(2))], in_turn=in_turn)
    assert watch.turns == (5 if in_turn else 1)
    for held in objects:
        assert all(watch.unchanged() for _ in range(12))
        change(held)
        assert [watch.unchanged() for _ in range(watch.turns)].count(False) == 1
        watch.renew()


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_others_can_set_has_no_turns(change, holder):
    held = holder(a=torch.zeros(4), number=2.5)
    watch = Watch([*(fixed() for _ in range(3)), held], in_turn=True)
    change(held)
    assert not any(watch.unchanged() for _ in range(4))


@pytest.mark.parametrize("change", [resize, point_elsewhere], ids=lambda change: change.__name__)
@pytest.mark.parametrize("at", range(3))
def test_tensors_that_others_can_reach_have_no_turns(change, at):
    objects = [fixed() for _ in range(3)]
    watch = Watch([*objects, objects[at].a], in_turn=True)
    assert all(watch.unchanged() for _ in range(7))
    change(objects[at])
    assert not any(watch.unchanged() for _ in range(4))


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("in_turn", [False, True])
def test_tensors_are_not_kept_alive(in_turn, holder):
    gone = []

    class Noticed(torch.Tensor):
        def __del__(self):
            gone.append(1)

    held = holder(a=torch.zeros(4).as_subclass(Noticed))
    watch = Watch([held], in_turn=in_turn)
    assert watch.unchanged()
    del held.a
    gc.collect()
    assert gone
    assert not watch.unchanged()


def test_a_tensor_given_up_by_force_is_noticed():
    held = Counted(a=torch.zeros(4))
    watch = Watch([held])
    assert watch.unchanged()
    object.__setattr__(held, "a", torch.zeros(4))
    assert not watch.unchanged()


def test_a_glance_looks_only_if_something_may_have_changed():
    held, looks, says = Counted(a=1), [], [True]

    def same():
        looks.append(len(looks))
        return says[0]

    glance = Glance([held])
    assert glance.finds(same)
    assert glance.finds(same)
    assert len(looks) == 1
    held._own = 2  # nobody else sets what is private
    assert glance.finds(same)
    assert len(looks) == 1
    held.a = 2
    says[0] = False
    assert not glance.finds(same)
    assert not glance.finds(same), "what has changed stays changed"
    assert len(looks) == 3
    says[0] = True
    assert glance.finds(same)
    assert glance.finds(same)
    assert len(looks) == 4
    mixed = Glance([held, SimpleNamespace()])
    assert mixed.finds(same)
    assert mixed.finds(same)
    assert len(looks) == 6, "changes of one are not counted"


def test_a_glance_looks_every_time_at_what_is_computed():
    class Computing(Counted):
        a = property(lambda held: held.source[0])

    held, looks = Computing(source=[1]), []

    def same():
        looks.append(held.a)
        return True

    computed, kept = Glance([held], ["a"]), Glance([held], ["source"])
    for source in range(3):
        held.source[0] = source
        assert computed.finds(same)
    assert looks == [0, 1, 2]
    assert kept.finds(same)
    assert kept.finds(same)
    assert len(looks) == 4
