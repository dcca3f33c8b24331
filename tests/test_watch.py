"""Whatever is replaced, resized or given up among watched attributes is noticed."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from specattn.watch import Watch


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


CHANGES = [resize, point_elsewhere, replace, view, change_a_number, add, replace_in_turn]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_noticed_until_renewed(change):
    held = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(3), number=2.5, name="x")
    watch = Watch([held, SimpleNamespace(c=torch.zeros(2)), held])
    assert watch.unchanged()
    held.b += 1
    held.number = held.number * 1  # equal, but perhaps another object
    watch.renew()
    assert watch.unchanged()
    change(held)
    assert not watch.unchanged()
    watch.renew()
    assert watch.unchanged()


def test_tensors_are_not_kept_alive():
    gone = []

    class Noticed(torch.Tensor):
        def __del__(self):
            gone.append(1)

    held = SimpleNamespace(a=torch.zeros(4).as_subclass(Noticed))
    watch = Watch([held])
    del held.a
    gc.collect()
    assert gone
    assert not watch.unchanged()
