"""Noticing cheaply that something a graph baked in may have been replaced."""

from __future__ import annotations

import weakref
from itertools import chain, compress, cycle
from operator import call, is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    # attributes as they are and were, those that are tensors, and every address of that turn
    _Turn = tuple[Iterable[object], list[object], list[Tensor], list[int]]

# stands for one, which is not kept alive
_TENSOR = object()

# how often a public attribute of any `Settable` was set
_CHANGES = [0]


class Settable:
    """An object with attributes that graphs bake in and anybody may set: changes are counted.

    Whoever compares them needs to look only if anything has been set since (`Glance`). What goes
    round ``__setattr__``, which takes force, is not counted, nor are private attributes, which an
    object sets itself: a subclass that keeps a public one there must set it by its public name.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name[0] != "_":
            _CHANGES[0] += 1

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name[0] != "_":
            _CHANGES[0] += 1


class Glance:
    """Looks at objects again only if they may have changed.

    Parameters
    ----------
    objects : iterable of object
        If all are `Settable`, that is when an attribute of any `Settable` has been set; else every
        time.
    names : collection of str
        Attributes that are looked at. If a class has one, as it does if a property computes it,
        that is every time, too: nobody need set it for it to change.
    """

    def __init__(self, objects: Iterable[object], names: Collection[str] = ()) -> None:
        kinds = [type(one) for one in objects]
        self._counted = all(issubclass(kind, Settable) for kind in kinds) and not any(
            hasattr(kind, name) for kind in kinds for name in names
        )
        self._seen: int | None = None

    def finds(self, same: Callable[[], bool]) -> bool:
        """Return what ``same`` says, or True if it said so last and nothing has been set since."""
        changes = _CHANGES[0]
        if changes != self._seen:
            if not same():
                return False
            self._seen = changes if self._counted else None
        return True


class Watch:
    """Attributes of objects, compared by identity, and tensors by their addresses, too.

    This runs before every replay. What it compares when:

    - Every time, the attributes of objects that may be set (a pool), and the addresses of those
      that are tensors, or in tuples. Of `Settable` objects, the attributes only when one may have
      been set. The tensors are not kept alive, those in tuples aside: a pool that is replaced
      gives its memory back.
    - Every time, the addresses of tensors that are watched themselves: who can reach a tensor (a
      table) can resize it.
    - The attributes of frozen dataclasses, and the addresses of those that are tensors: every
      time, or, if ``in_turn``, one object's each time and all of them in as many times as there
      are objects (`turns`). Replacing one takes force then. These tensors live as long as the
      watch.

    Parameters
    ----------
    objects : iterable of object
        Whose attributes are watched; the same object may come several times.
    in_turn : bool
        Whether frozen dataclasses take turns, which is for those that nobody is handed.
    """

    def __init__(self, objects: Iterable[object], *, in_turn: bool = False) -> None:
        found = list({id(one): one for one in objects}.values())
        self._reachable = [one for one in found if isinstance(one, Tensor)]
        holders = [one for one in found if not isinstance(one, Tensor)]
        self._objects = holders  # keeps what `values` shows
        # these show what the attributes are whenever they are read
        settable = [one for one in holders if not _frozen(one)]
        self._set = [vars(one).values() for one in settable]
        self._glance = Glance(settable)
        frozen = [vars(one).values() for one in holders if _frozen(one)]
        self._fixed, self._turning = ([], frozen) if in_turn else (frozen, [])
        self.renew()

    @property
    def turns(self) -> int:
        """How many calls of `unchanged` it takes to compare everything."""
        return max(len(self._turning), 1)

    def unchanged(self) -> bool:
        """Return whether every attribute surely is what it was, where it was."""
        # an identity may be given again, but not before its tensor is gone
        if self._gone:
            return False
        if self._fixed and not all(map(is_, chain.from_iterable(self._fixed), self._held)):
            return False
        # little is looked at: a host that has waited for a step finds nothing in its caches
        if not self._glance.finds(self._same):
            return False
        values, held, tensors, addresses = next(self._turn)
        if not all(map(is_, values, held)):
            return False
        mine = map(call, self._refs)
        return [*map(Tensor.data_ptr, chain(mine, self._own, tensors))] == addresses

    def _same(self) -> bool:
        """Return whether attributes that may be set are what they were."""
        found = [*chain.from_iterable(self._set)]
        if len(found) != len(self._kept) or [*map(is_, found, self._others)] != self._kept:
            return False
        return [*map(id, compress(found, self._tensors))] == self._ids

    def renew(self) -> None:
        """Watch what the attributes are now."""
        self._held = [*chain.from_iterable(self._fixed)]
        found = [*chain.from_iterable(self._set)]
        self._tensors = [isinstance(value, Tensor) for value in found]
        self._kept = [not tensor for tensor in self._tensors]
        self._others = [_TENSOR if isinstance(value, Tensor) else value for value in found]
        tensors = list(compress(found, self._tensors))
        self._ids = list(map(id, tensors))
        self._gone: list[object] = []
        self._refs: list[Callable[[], Any]] = [
            weakref.ref(tensor, self._gone.append) for tensor in tensors
        ]
        tuples = [value for value in self._others if isinstance(value, tuple)]
        self._own = _tensors([*self._reachable, *self._held, *chain.from_iterable(tuples)])
        addresses = [one.data_ptr() for one in (*tensors, *self._own)]
        known = {id(one) for one in self._own}
        turns: list[_Turn] = []
        for values in self._turning:
            held = [*values]
            private = [one for one in _tensors(held) if id(one) not in known]
            known.update(map(id, private))
            turns.append((values, held, private, addresses + [one.data_ptr() for one in private]))
        self._turn = cycle(turns or [((), [], [], addresses)])


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """Return those values that are tensors, each once."""
    return list({id(one): one for one in values if isinstance(one, Tensor)}.values())


def _frozen(one: object) -> bool:
    params = getattr(type(one), "__dataclass_params__", None)
    return params is not None and bool(params.frozen)
