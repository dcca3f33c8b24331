"""Slot tables map every token of a request to a KV slot.

Slot and page 0 and table row 0 belong to padding: padded rows read and write only there.
"""

from __future__ import annotations

from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specattn.buffers import ReadOnly
from specattn.checks import whole_number, whole_numbers
from specattn.errors import CapacityError
from specattn.kernels import check_current
from specattn.kernels.cache import write_slots

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt


def count_pages(num_slots: int, page_size: int) -> int:
    """Return the number of whole pages in a pool.

    Raises
    ------
    ValueError
        If the page size is no power of two, or there are less than two pages: page 0 is padding.
    """
    num_slots = whole_number("num_slots", num_slots)
    page_size = whole_number("page_size", page_size)
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")
    if num_slots < 2 * page_size:
        raise ValueError(f"num_slots must be at least two pages, got {num_slots}")
    return num_slots // page_size


class StagingRing:
    """Pinned buffers that kernels read, used in turn.

    Writing neither allocates nor waits, unless as many launches as there are buffers are underway:
    then it waits for the oldest. Make all calls on one stream, or on streams that wait for each
    other.

    Parameters
    ----------
    size : int
        Most numbers of one launch.
    device : torch.device
        Where kernels read them.
    depth : int
        Launches that may be underway at once.
    """

    def __init__(self, size: int, device: torch.device, depth: int = 4) -> None:
        self._at, self._of, cuda = 0, device.index, device.type == "cuda"
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(depth)
        ]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        # of all events the one that costs the host least
        self._read = [torch.Event(device) for _ in self._buffers] if cuda else []

    def write(self, *parts: npt.NDArray[np.integer]) -> Tensor:
        """Write integers into the next buffer, one flattened part after the other.

        Parameters
        ----------
        *parts : ndarray
            Integers within int32, at most ``size`` of them.

        Returns
        -------
        Tensor
            ``[size]`` int32 on the host, which begins with them. Call `launched` when what reads it
            was launched.
        """
        at = self._at
        # first: what an interrupt has left underway reads the last one
        self._at = (at + 1) % len(self._buffers)
        if self._read:
            self._read[at].synchronize()
        array, end = self._arrays[at], 0
        for part in parts:
            begin, end = end, end + part.size
            array[begin:end] = part.reshape(-1)
        return self._buffers[at]

    def launched(self) -> None:
        """Note that what reads the last buffer was launched.

        That is on the current stream.
        """
        if self._read:
            self._read[self._at - 1].record(torch.accelerator.current_stream(self._of))


class SlotTable(ReadOnly):
    """A slot table gives requests rows and KV slots, page by page.

    Requests share the pages of a common prefix; the table counts the users of every page. The host
    keeps the pages of every row and these counts; the device has ``req_to_token`` and
    ``reserved``, which kernels read. Nothing here waits for the device or allocates on it: what
    changes goes there in one launch, which reads pinned memory, and most steps need none, because
    rows get slots ahead of what is asked for. Other rows can take those back when slots
    are short.

    Whoever runs forwards that the device has not finished yet reserves for all of them: slots past
    the largest length asked for (`reserve`) or committed may go to another row. A row that is freed
    may be given to another request while a step that it took part in is in flight, if all launches
    are made on one stream: what is launched later finds the step finished.

    An error or an interrupt inside a change of the table leaves ``changing`` set, and every further
    change is refused until `clear` was called.

    Parameters
    ----------
    max_num_reqs : int
        Requests alive at once.
    max_context_len : int
        Longest context of a request.
    num_slots : int
        Slots in the pools, slot 0 included; rounded down to whole pages.
    page_size : int
        Slots per page.
    device : torch.device
        Where ``req_to_token`` and ``reserved`` live.

    Raises
    ------
    ValueError
        If a number is out of range.

    Attributes
    ----------
    req_to_token : Tensor
        ``[max_num_reqs + 1, max_context_len]`` int32: slot of every reserved position; others
        hold 0 or a slot the row once had.
    reserved : Tensor
        ``[max_num_reqs + 1]`` int32: tokens of every row that have slots; 0 of free rows and of
        row 0.
    """

    # Reserving ahead saves an upload on most steps.
    _AHEAD = 64
    # pages of one upload; a long prompt takes several
    _UPLOAD = 1 << 15

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_context_len: int,
        num_slots: int,
        page_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_pages = count_pages(num_slots, page_size)
        for name, value in (("max_num_reqs", max_num_reqs), ("max_context_len", max_context_len)):
            whole_number(name, value, 1)
        self.max_context_len = max_context_len
        self.page_size = page_size
        self.req_to_token = torch.zeros(
            max_num_reqs + 1, max_context_len, dtype=torch.int32, device=device
        )
        self.reserved = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.clear()
        batch = min(self._UPLOAD, self.num_pages)
        self._staging = StagingRing(5 * (max_num_reqs + 1) + batch, self.req_to_token.device)
        check_current(self.req_to_token.device)

    def clear(self) -> None:
        """Free every row, whatever an error or interrupt left behind.

        No step may be between its parts (`holding`). Steps in flight still find their slots.
        """
        self._changing = True
        rows = len(self.reserved)
        self._free_rows = list(range(rows - 1, 0, -1))
        # a stack: the last of the first `_num_free` is given next
        self._free_pages = np.arange(self.num_pages)[::-1].copy()
        self._num_free = self.num_pages - 1
        self._users = np.zeros(self.num_pages, dtype=np.int64)
        self._pages: dict[int, list[int]] = {}
        self._committed: dict[int, int] = {}
        # by row: tokens that must keep their slots
        self._needed = [0] * rows
        self._holding: frozenset[int] = frozenset()
        self.reserved.zero_()
        self._changing = False

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Note that the table changes."""
        self._changing = True
        yield
        # not if anything was raised
        self._changing = False

    def _check_whole(self) -> None:
        if self._changing:
            raise ValueError("a change of this table was interrupted, or has failed: call clear()")

    @property
    def changing(self) -> bool:
        """Whether a change has begun and not ended: only `clear` helps."""
        return self._changing

    @property
    def rows(self) -> frozenset[int]:
        """Rows that are allocated."""
        return frozenset(self._pages)

    @property
    def num_free_slots(self) -> int:
        """Slots no request holds."""
        return self._num_free * self.page_size

    def pages(self, row: int) -> tuple[int, ...]:
        """Return an allocated row's pages, in the order of its tokens.

        Raises
        ------
        ValueError
            If the row is not allocated.
        """
        return tuple(self._pages[self._known(row)])

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be allocated."""
        return len(self._free_rows)

    def committed(self, row: int) -> int:
        """Return the committed length of a row, in tokens.

        Raises
        ------
        ValueError
            If the row is not allocated.
        """
        return self._committed[self._known(row)]

    def room(self, row: int) -> int:
        """Return how many of a row's tokens keep their slots.

        That is the largest length which it has asked for or committed.

        Raises
        ------
        ValueError
            If the row is not allocated.
        """
        return self._needed[self._known(row)]

    def allocate(self, *, share: int = 0, share_len: int = 0) -> int:
        """Take a row, optionally on top of another request's prefix.

        Parameters
        ----------
        share : int
            Row whose first ``share_len`` tokens the new request has too.
        share_len : int
            Whole pages of committed tokens; their KV is used by both and copied by neither.

        Returns
        -------
        int
            The row, with ``share_len`` tokens committed.

        Raises
        ------
        CapacityError
            If all rows are taken.
        ValueError
            If ``share_len`` is not whole committed pages of ``share``.
        """
        self._check_whole()
        share, share_len = whole_number("share", share), whole_number("share_len", share_len)
        if not self._free_rows:
            raise CapacityError(f"all {len(self._pages)} request rows are taken")
        if share_len % self.page_size or not 0 <= share_len <= self._committed.get(share, 0):
            raise ValueError(
                f"share_len must be a multiple of {self.page_size} up to the "
                f"{self._committed.get(share, 0)} tokens committed in row {share}, got {share_len}"
            )
        with self._change():
            row = self._free_rows.pop()
            shared = self._pages[share][: share_len // self.page_size] if share_len else []
            self._pages[row], self._committed[row] = list(shared), share_len
            self._needed[row] = share_len
            if share_len:
                self._users[shared] += 1
                self.req_to_token[row, :share_len] = self.req_to_token[share, :share_len]
                self.reserved[row].fill_(share_len)
        return row

    def reserve(self, rows: Sequence[int], lens: Sequence[int]) -> None:
        """Make sure every row has slots for its first ``lens`` tokens.

        Parameters
        ----------
        rows, lens : sequence of int
            Rows, and the tokens each must have room for; of one length.

        Raises
        ------
        CapacityError
            If a length is over ``max_context_len`` or the pages run out; nothing is taken then.
        ValueError
            If a row is not allocated or named twice, or a length is negative or no whole number; if
            slots are to be written on a CUDA device other than the current one; nothing is taken
            then.
        """
        self._check_whole()
        # every step comes here, and nearly all of them with lists of ints
        if not (type(rows) is type(lens) is list and {int}.issuperset(map(type, [*rows, *lens]))):
            whole_numbers("every row", rows)
            whole_numbers("every length", lens)
            rows, lens = [*map(index, rows)], [*map(index, lens)]
        distinct = set(rows)
        if not distinct <= self._pages.keys():
            for row in rows:
                self._known(row)
        if len(distinct) != len(rows) or len(rows) != len(lens):
            raise ValueError(f"rows must differ, got {list(rows)} for {len(lens)} lengths")
        if min(lens, default=0) < 0:
            raise ValueError(f"lens must be 0 or more, got {list(lens)}")
        longest = max(lens, default=0)
        if longest > self.max_context_len:
            raise CapacityError(
                f"{longest} tokens do not fit into a context of {self.max_context_len}"
            )
        # few rows at a time: of less than some fifty, numpy takes longer
        pages, size, needed = self._pages, self.page_size, self._needed
        if any(need > len(pages[row]) * size for row, need in zip(rows, lens, strict=True)):
            self._grow(rows, lens)
        for row, need in zip(rows, lens, strict=True):
            if need > needed[row]:
                needed[row] = need

    def _known(self, row: int) -> int:
        """Return a row; a ValueError if it is not allocated."""
        row = whole_number("row", row)
        if row not in self._pages:
            raise ValueError(f"row must be allocated ({sorted(self._pages)}), got {row}")
        return row

    def _missing(
        self, rows: Sequence[int], lens: Sequence[int], ahead: int = 0
    ) -> list[tuple[int, int]]:
        """Return the rows that lack pages for these tokens, and how many."""
        missing, limit = [], self.max_context_len
        for row, need in zip(rows, lens, strict=True):
            pages = -(-min(need + ahead, limit) // self.page_size) - len(self._pages[row])
            if pages > 0:
                missing.append((row, pages))
        return missing

    def _grow(self, rows: Sequence[int], lens: Sequence[int]) -> None:
        """Give rows missing pages, and more ahead while there are enough."""
        check_current(self.req_to_token.device)
        ahead = self._missing(rows, lens, self._AHEAD)
        if _total(ahead) <= self._num_free:
            self._append(ahead)
            return
        short = self._missing(rows, lens)
        trimmed: list[int] = []
        if (wanted := _total(short)) > self._num_free:
            trimmed = self._take_back(dict(zip(rows, lens, strict=True)), wanted)
        self._append([*short, *((row, 0) for row in trimmed)])

    def _take_back(self, need: Mapping[int, int], wanted: int) -> list[int]:
        """Free pages that rows hold ahead of need; return those rows.

        Raises `CapacityError` if ``wanted`` pages would still not be free.
        """
        spare = {}
        for row, held in sorted(self._pages.items()):
            kept = -(-max(self._needed[row], need.get(row, 0)) // self.page_size)
            if len(held) > kept:
                spare[row] = held[kept:]
        ahead = sum(map(len, spare.values()))
        if wanted > self._num_free + ahead:
            raise CapacityError(
                f"{wanted} more pages of {self.page_size} KV slots are needed, "
                f"{self._num_free} are free and {ahead} reserved ahead"
            )
        # until the device has it, too: see `_append`
        self._changing = True
        for row, pages in spare.items():
            self._release(pages)
            del self._pages[row][-len(pages) :]
        return list(spare)

    def _append(self, grown: Sequence[tuple[int, int]]) -> None:
        """Give rows so many pages, 0 if shrunk; tell the device."""
        self._changing = True
        for part in _uploads(grown, self._UPLOAD):
            self._upload(part)
        self._changing = False

    def _upload(self, grown: Sequence[tuple[int, int]]) -> None:
        """Give rows as many pages as one upload holds."""
        total = _total(grown)
        pages = self._free_pages[self._num_free - total : self._num_free][::-1].copy()
        self._num_free -= total
        self._users[pages] = 1
        size, limit = self.page_size, self.max_context_len
        taken, begin, pieces = pages.tolist(), 0, []
        for row, count in grown:
            held = self._pages[row]
            column = min(len(held) * size, limit)
            held += taken[begin : begin + count]
            room = min(len(held) * size, limit)
            pieces.append((row, column, room - column, 5 * len(grown) + begin, room))
            begin += count
        write_slots(
            self._staging.write(np.array(pieces).T, pages),
            self.req_to_token,
            self.reserved,
            pieces=len(pieces),
            longest=max(piece[2] for piece in pieces),
            page_size=size,
        )
        self._staging.launched()

    def commit(self, row: int, length: int) -> None:
        """Record that the first ``length`` reserved tokens of ``row`` have their KV.

        Raises
        ------
        ValueError
            If the row is not allocated, or has no slots for as many tokens.
        """
        self._check_whole()
        # every request of every step comes here, and nearly all of them with ints
        if not type(row) is type(length) is int or row not in self._pages:
            row, length = self._known(row), whole_number("length", length)
        room = min(len(self._pages[row]) * self.page_size, self.max_context_len)
        if not 0 <= length <= room:
            raise ValueError(f"row {row} has slots for 0..{room} tokens, not for {length}")
        # first: what is committed must keep its slots
        if length > self._needed[row]:
            self._needed[row] = length
        self._committed[row] = length

    @contextmanager
    def holding(self, rows: Collection[int]) -> Iterator[None]:
        """Refuse to free these rows until the block ends.

        A step that reads and writes them is launched as a whole only then. Rows that are held
        already stay so.

        Parameters
        ----------
        rows : collection of int
            Rows; 0 does not matter.
        """
        before = self._holding
        try:
            self._holding = before.union(rows)
            yield
        finally:
            self._holding = before

    def free(self, row: int) -> None:
        """Give the row back, and every page nobody else uses.

        Raises
        ------
        ValueError
            If the row is not allocated, or takes part in a step that is not launched as a whole.
        """
        self._check_whole()
        row = self._known(row)
        if row in self._holding:
            raise ValueError(
                f"row {row} takes part in a step that is being launched; "
                "if that was interrupted, call clear()"
            )
        with self._change():
            pages = self._pages.pop(row)
            del self._committed[row]
            self._release(pages)
            self._free_rows.append(row)
            self._needed[row] = 0
            # in the stream's order: kernels launched before this one still find the row's slots
            self.reserved[row].zero_()

    def _release(self, pages: Sequence[int]) -> None:
        """Count one user less of these pages; free those without any."""
        left = np.asarray(pages, dtype=np.int64)
        self._users[left] -= 1
        left = left[self._users[left] == 0][::-1]
        self._free_pages[self._num_free : self._num_free + len(left)] = left
        self._num_free += len(left)


def _total(grown: Iterable[tuple[int, int]]) -> int:
    """Return how many pages rows get."""
    return sum(count for _, count in grown)


def _uploads(grown: Iterable[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Split rows and their pages into parts of so many pages."""
    part: list[tuple[int, int]] = []
    room = most
    for row, count in grown:
        lacking = count
        while lacking > room:
            part.append((row, room))
            yield part
            part, room, lacking = [], most, lacking - room
        part.append((row, lacking))
        room -= lacking
    if part:
        yield part
