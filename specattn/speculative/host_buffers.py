"""How a step finds its rows and its tokens reach the host: no copy, and the host never waits."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.buffers import fingerprint
from specattn.kernels.step import write_output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specattn.buffers import Fingerprint


@dataclass(frozen=True)
class HostBuffers:
    """Memory of the host that graphs bake in: steps read it and write to it, one after the other.

    Parameters
    ----------
    rows : Tensor
        ``[S, B]`` int64 on the host, pinned where the device is another: the table rows that take
        part, 0 for padding, of S steps in flight. May have a row stride.
    packed : Tensor
        ``[S, B, width]`` int64, as ``rows``: what `StepOutput` holds.
    turn : Tensor
        ``[1]`` int64 on the device, which of them the next step reads and writes.
    """

    rows: Tensor
    packed: Tensor
    turn: Tensor

    @classmethod
    def alloc(cls, slots: int, batch: int, width: int, device: torch.device) -> HostBuffers:
        """Allocate the memory of ``slots`` steps of up to ``batch`` requests."""
        pin = device.type == "cuda"
        rows = torch.zeros(slots, batch, dtype=torch.int64, pin_memory=pin)
        packed = torch.zeros(slots, batch, width, dtype=torch.int64, pin_memory=pin)
        return cls(rows, packed, torch.zeros(1, dtype=torch.int64, device=device))

    def of(self, begin: int, end: int) -> HostBuffers:
        """Return what concerns the requests ``[begin, end)`` of every step."""
        return HostBuffers(self.rows[:, begin:end], self.packed[:, begin:end], self.turn)

    def align(self, turn: int) -> None:
        """Wait for every step that has been launched on this stream, and set the next one's turn.

        Until they are through, nobody knows which turn they read and write.
        """
        if self.turn.is_cuda:
            torch.cuda.current_stream(self.turn.device).synchronize()
        self.turn.fill_(turn)

    def fingerprint(self) -> Fingerprint:
        """Describe what graphs bake in."""
        return fingerprint(**{f"ring.{name}": tensor for name, tensor in vars(self).items()})

    def land(self, packed: Tensor) -> None:
        """Write a step's ``packed [b, width]`` to its turn; no sync, capturable."""
        write_output(packed, self.packed, self.turn)


class Landing:
    """One turn of a `HostBuffers`: where a step finds its rows and leaves its tokens.

    Parameters
    ----------
    ring : HostBuffers
        The whole of it.
    turn : int
        Which.

    Attributes
    ----------
    pending : PendingStep or None
        The step that has this turn, until its tokens are read: then they are its reader's alone,
        and no launch finds lists of another step to free.
    """

    def __init__(self, ring: HostBuffers, turn: int) -> None:
        self.pending: PendingStep | None = None
        device = ring.turn.device
        self.packed = ring.packed[turn]
        # of all events the one that costs the host least
        self._done = torch.Event(device) if device.type == "cuda" else None
        self._device = device.index
        # numpy takes several times as long to look at a list's numbers
        self._bytes = ring.rows[turn].numpy().data.cast("B")

    def write_rows(self, rows: Sequence[int], bucket: int) -> None:
        """Write a bucket of rows, padded, where the step that is launched next reads them.

        The step that had this turn before must have landed.

        Raises
        ------
        ValueError
            If a row is no whole number.
        """
        try:
            _packer(bucket)(self._bytes, 0, *rows, *[0] * (bucket - len(rows)))
        except struct.error as problem:
            raise ValueError(f"rows must be whole numbers, got {list(rows)}") from problem

    def launched(self) -> None:
        """Note that all which the step will write here has been launched."""
        if self._done is not None:
            # of the steps' device, which need not be the current one
            self._done.record(torch.accelerator.current_stream(self._device))

    @property
    def ready(self) -> bool:
        """Whether it is written. Asking does not wait."""
        return self._done is None or self._done.query()

    def wait(self) -> None:
        """Wait until it is written."""
        if self._done is not None:
            self._done.synchronize()


@cache
def _packer(count: int) -> Callable[..., None]:
    """Return what packs so many numbers of 8 bytes into memory."""
    return struct.Struct(f"{count}q").pack_into


class PendingStep:
    """A step that was launched; `wait` returns what it gained.

    Parameters
    ----------
    landing : Landing
        Where its tokens come.
    count : int
        Requests.
    rows : tuple of int
        What took part; padding, where nobody did.
    """

    def __init__(self, landing: Landing, count: int, rows: tuple[int, ...]) -> None:
        self._landing, self._count, self.rows = landing, count, rows
        self._gained: list[list[int]] | None = None

    def wait(self, meanwhile: Callable[[], object] | None = None) -> list[list[int]]:
        """Wait for the step and return each request's new tokens, bonus last.

        Empty for row 0 and for a request that had no slots for a step. Asked again, it returns
        the same without waiting.

        Parameters
        ----------
        meanwhile : callable, optional
            Called over and over until the step is through, not at all if it is: what a host does
            while it waits, such as `StepDecoder.rehearse`. The step is noticed when it returns.
            What it raises ends the wait, and the step can be waited for again.

        Returns
        -------
        list of list of int
            In the order of the rows that were given to the step.
        """
        while meanwhile is not None and not self.ready:
            meanwhile()
        # it may have waited itself, and the turn be another step's by now
        if self._gained is None:
            self._landing.wait()
            found = self._landing.packed[: self._count].tolist()
            self._gained = [tokens[:gained] for gained, *tokens in found]
            self._landing.pending = None
        return self._gained

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once. Asking does not wait."""
        return self.waited or self._landing.ready

    @property
    def waited(self) -> bool:
        """Whether its tokens have been read."""
        return self._gained is not None


class InFlight:
    """A ring's turns as the host counts them: which one is next, and what is in flight.

    Parameters
    ----------
    ring : HostBuffers
        Whose turns the device counts, too.
    """

    def __init__(self, ring: HostBuffers) -> None:
        self.ring = ring
        self._landings = [Landing(ring, turn) for turn in range(len(ring.rows))]
        self._next = 0
        # whether the device's turn is known to be `_next`
        self._aligned = True

    @property
    def in_flight(self) -> list[PendingStep]:
        """Steps that nobody has waited for."""
        return [one.pending for one in self._landings if one.pending is not None]

    def take(self) -> Landing:
        """Return the next step's turn.

        Raises
        ------
        ValueError
            If the step that had it has not been waited for.
        """
        if not self._aligned:
            # nobody may have been handed what the last launch, which failed, has noted
            self.settle()
            self.align()
        landing = self._landings[self._next]
        if landing.pending is not None:
            raise ValueError(
                f"{len(self._landings)} steps are in flight: wait for the first of them"
            )
        return landing

    def begin(self) -> None:
        """Note that what is launched from here on moves the device's turn on."""
        self._aligned = False

    def land(self, landing: Landing, count: int, rows: tuple[int, ...]) -> PendingStep:
        """Note that a step was launched whose turn it was, with ``count`` requests."""
        landing.launched()
        pending = landing.pending = PendingStep(landing, count, rows)
        self._next = (self._next + 1) % len(self._landings)
        self._aligned = True
        return pending

    def settle(self) -> None:
        """Wait for every step in flight, whoever has not."""
        for pending in self.in_flight:
            pending.wait()

    def align(self) -> None:
        """Wait for what has been launched, and let the device's turn be the host's."""
        self.ring.align(self._next)
        self._aligned = True
