"""Products of cases, of which a run takes a part; ``--whole`` runs them all."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from specattn.testing.kit import Check


def star(*at: int) -> bool:
    """Whether at most one value is another than the first of its axis."""
    return len(at) - at.count(0) <= 1


def half(*at: int) -> bool:
    """Every second case: of three axes or more, any two values meet in one."""
    return sum(at) % 2 == 0


def third(*at: int) -> bool:
    """Every third case: of an axis of three values, each case of the other axis has one."""
    return sum(at) % 3 == 0


def compiled(names: Iterable[str], *, without: Collection[str] = ()) -> list[object]:
    """Return cases of which a GPU's are ``whole`` where they are in ``without``.

    Those compile another kernel only to change a number in it; the interpreter runs them all.
    """
    on_gpu = torch.cuda.is_available()
    rows = {name: pytest.mark.whole if on_gpu and name in without else () for name in names}
    return [pytest.param(name, id=name, marks=mark) for name, mark in rows.items()]


def on_cpu(keep: Callable[..., bool], *axes: str) -> pytest.MarkDecorator:
    """Mark cases that ``keep`` refuses ``whole`` where there is no GPU; with one, all of them run.

    ``keep`` gets the index of the value of every axis, which is an argument of the test.
    """
    return pytest.mark.on_cpu(keep, axes)


def half_of_kit(suite: Callable[[Check], None]) -> Callable[[Check], None]:
    """Mark modes × options of a `backend_suite` ``whole``, every second one, without a GPU."""
    return pytest.mark.half_of_kit(suite)


def left_out(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Find the cases that `on_cpu` and `half_of_kit` mark."""
    if torch.cuda.is_available():
        return
    seen: dict[object, list[object]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("half_of_kit"):
            if not _is_kept(item.callspec.params["conformance_check"]):
                yield item
            continue
        mark = item.get_closest_marker("on_cpu")
        if mark is None:
            continue
        keep, axes = mark.args
        at = []
        for axis in axes:
            value, values = item.callspec.params[axis], seen[item.function, axis]
            # a tensor or an array is equal to none
            if not any(value is one for one in values):
                values.append(value)
            at.append(next(i for i, one in enumerate(values) if value is one))
        if not keep(*at):
            yield item


def kit(checks: Iterable[Check]) -> pytest.MarkDecorator:
    """Parametrise by the checks of a backend; on a GPU, half of modes × options are ``whole``."""
    rows = []
    for one in checks:
        marks = () if _is_kept(one) or not torch.cuda.is_available() else pytest.mark.whole
        rows.append(pytest.param(one, id=one.name, marks=marks))
    return pytest.mark.parametrize("one", rows)


def sampled(keep: Callable[..., bool], **axes: Mapping[str, object] | Iterable[object]):
    """Parametrise by the product of ``axes``; cases that ``keep`` refuses are marked ``whole``.

    ``keep`` gets the index of every value. An axis names its values, or they name themselves.
    """
    named = [
        list(axis.items()) if isinstance(axis, dict) else [(str(one), one) for one in axis]
        for axis in axes.values()
    ]
    cases = list(product(*(range(len(axis)) for axis in named)))
    kept = [set(column) for column in zip(*(at for at in cases if keep(*at)), strict=True)]
    assert kept == [set(range(len(axis))) for axis in named], "some value is in no case"
    rows = []
    for at in cases:
        names, values = zip(*(axis[i] for axis, i in zip(named, at, strict=True)), strict=True)
        marks = () if keep(*at) else pytest.mark.whole
        rows.append(pytest.param(*values, id="-".join(names), marks=marks))
    return pytest.mark.parametrize(tuple(axes), rows)


def _is_kept(check: Check) -> bool:
    # the same halves of every backend, which may have kernels in common
    mode, _, option = check.name.partition("-")
    return not option or half(*mode.encode(), *option.encode())
