"""Tensors that an engine's are copied to, for one pool or two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specattn.checks import (
    require_dense,
    require_integers,
    require_rows,
    require_shape,
)

if TYPE_CHECKING:
    from torch import Tensor


class PlanInputs(NamedTuple):
    """The inputs of a plan.

    Parameters
    ----------
    rows, seq_lens : Tensor
        ``[B]`` int64 and int32: table rows and prefix lengths.
    slots, store : Tensor
        ``[B, n]`` int32: slots of the new tokens to read, 0 where there is none and with
        ``"prefix"``, and slots to write, as given.
    positions : Tensor
        ``[B, n]`` int64.
    words : Tensor
        ``[B, n, W]`` int64 ancestor words.
    """

    rows: Tensor
    seq_lens: Tensor
    slots: Tensor
    store: Tensor
    positions: Tensor
    words: Tensor


@dataclass(frozen=True)
class Window:
    """The inputs of window layers with a pool of their own.

    Of each prefix a table gets the last keys, by their slots in that pool. A prefix is cut where a
    page begins, and positions count from there.

    Parameters
    ----------
    slot_map : Tensor
        ``[slots]`` int32 or int64, dense: for every slot that the request table names, the one in
        the other pool; below 0 for none.
    keys : int
        Keys of a prefix that a row may see.
    page_size : int
        Slots of a page, in both pools.
    table : Tensor
        ``[B, columns]`` int32, written: at least ``keys + page_size - 1`` columns, and the new
        tokens' in the case of prompts.
    seq_lens : Tensor
        ``[B]`` int32, written: keys of the prefix in the table.
    slots, store : Tensor
        ``[B, n]`` int32, written: slots of the new tokens to read, and to write. For prompts they
        are ``[1, T]``, and ``slots`` is not written.
    positions : Tensor
        ``[B, n]`` int64, written, but for prompts: positions in the table.
    """

    slot_map: Tensor
    keys: int
    page_size: int
    table: Tensor
    seq_lens: Tensor
    slots: Tensor
    store: Tensor
    positions: Tensor

    def check(self, batch: int, tokens: tuple[int, ...]) -> None:
        """Raise a ValueError unless all is as described."""
        require_integers((len(self.slot_map),), slot_map=self.slot_map)
        columns = max(self.keys + self.page_size - 1, self.table.shape[1])
        require_shape((batch, columns), table=self.table)
        require_shape(tokens, store=self.store)
        require_rows(table=self.table)
        require_dense(
            slot_map=self.slot_map,
            seq_lens=self.seq_lens,
            slots=self.slots,
            store=self.store,
            positions=self.positions,
        )

    def first(self, batch: int) -> Window:
        """Return views of the first ``batch`` requests."""
        written = self.table, self.seq_lens, self.slots, self.store, self.positions
        views = (tensor[:batch] for tensor in written)
        return Window(self.slot_map, self.keys, self.page_size, *views)

    def arguments(self) -> tuple[Tensor | int, ...]:
        """Return what kernels take: tensors, the table's row stride, the keys."""
        written = self.table, self.seq_lens, self.slots, self.store, self.positions
        return self.slot_map, *written, self.table.stride(0), self.keys
