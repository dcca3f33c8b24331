"""Noticing cheaply that something a graph baked in may have been replaced."""

from __future__ import annotations

import weakref
from itertools import chain, compress, cycle
from operator import is_
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    # attributes as they are and were, those that are tensors, and every address of that turn
    _Turn = tuple[Iterable[object], list[object], list[Tensor], list[int]]

# stands for one, which is not kept alive
_TENSOR = object()


class Watch:
    """Attributes of objects, compared by identity, and tensors by their addresses, too.

    This runs before every replay. What it compares when:

    - Every time, the attributes of objects that may be set (a pool), and the addresses of those
      that are tensors, or in tuples. The tensors are not kept alive, those in tuples aside: a pool
      that is replaced gives its memory back.
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
        self._set = [vars(one).values() for one in holders if not _frozen(one)]
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
        if self._gone or not all(map(is_, chain.from_iterable(self._fixed), self._held)):
            return False
        found = [*chain.from_iterable(self._set)]
        # few numbers are looked at: a host that has waited for a step finds none in its caches
        if len(found) != len(self._kept) or [*map(is_, found, self._others)] != self._kept:
            return False
        mine = [*compress(found, self._tensors)]
        if [*map(id, mine)] != self._ids:
            return False
        values, held, tensors, addresses = next(self._turn)
        if not all(map(is_, values, held)):
            return False
        return [*map(Tensor.data_ptr, chain(mine, self._own, tensors))] == addresses

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
        self._refs = [weakref.ref(tensor, self._gone.append) for tensor in tensors]
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
