"""Noticing cheaply that something a graph baked in may have been replaced."""

from __future__ import annotations

import weakref
from itertools import chain, compress
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable


class Watch:
    """Attributes of objects, compared by identity, and tensors by their addresses, too.

    This runs before every replay and costs a tenth of a microsecond per attribute. Tensors are
    not kept alive: a pool that is replaced gives its memory back.

    Parameters
    ----------
    objects : iterable of object
        Whose attributes are watched; the same object may come several times.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = list({id(one): one for one in objects}.values())
        self._held = [vars(one) for one in self._objects]
        self.renew()

    def unchanged(self) -> bool:
        """Return whether every attribute surely is what it was, where it was."""
        found = [*chain.from_iterable(map(dict.values, self._held))]
        # an identity may be given again, but not before its tensor is gone
        if self._gone or list(map(id, found)) != self._ids:
            return False
        return list(map(Tensor.data_ptr, compress(found, self._tensors))) == self._addresses

    def renew(self) -> None:
        """Watch what the attributes are now."""
        found = [*chain.from_iterable(map(dict.values, self._held))]
        self._ids = list(map(id, found))
        self._tensors = [isinstance(value, Tensor) for value in found]
        tensors = list(compress(found, self._tensors))
        self._addresses = list(map(Tensor.data_ptr, tensors))
        self._gone: list[object] = []
        self._refs = [weakref.ref(tensor, self._gone.append) for tensor in tensors]
        self._others = [value for value in found if not isinstance(value, Tensor)]
