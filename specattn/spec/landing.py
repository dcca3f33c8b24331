"""How a step's rows leave the host and its tokens come back, without the host waiting."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.kernels import ops

if TYPE_CHECKING:
    from specattn.config import SpecConfig
    from specattn.spec.request import Live


@dataclass(frozen=True)
class Ring:
    """Where steps write what they gained, one after the other: host memory that graphs bake in.

    Parameters
    ----------
    packed : Tensor
        ``[S, B, width]`` int64 on the host, pinned where the device is another: what `StepOutput`
        holds, of S steps in flight.
    turn : Tensor
        ``[1]`` int64 on the device, which of them is written next.
    """

    packed: Tensor
    turn: Tensor

    @classmethod
    def alloc(cls, slots: int, batch: int, width: int, device: torch.device) -> Ring:
        """Allocate the memory of ``slots`` steps of up to ``batch`` requests."""
        pin = device.type == "cuda"
        packed = torch.zeros(slots, batch, width, dtype=torch.int64, pin_memory=pin)
        return cls(packed, torch.zeros(1, dtype=torch.int64, device=device))

    def land(self, packed: Tensor) -> None:
        """Write a step's ``packed [b, width]`` to its turn; no sync, capturable."""
        ops("land", packed.device).land_step(packed, self.packed, self.turn)


class Landing:
    """Host memory that one step's rows leave from and its tokens come back to.

    Parameters
    ----------
    packed : Tensor
        ``[B, width]`` int64, a step's of a `Ring`.
    device : torch.device
        Where steps run.
    """

    def __init__(self, packed: Tensor, device: torch.device) -> None:
        pin, batch = device.type == "cuda", len(packed)
        self.packed = packed
        self.rows = torch.zeros(batch, dtype=torch.int64, pin_memory=pin)
        # of all events the one that costs the host least
        self._done = torch.Event(device) if pin else None
        self._device = device.index
        # a list goes through an array: numpy takes several times as long to look at its numbers
        self._numbers = self.rows.numpy().data.cast("B").cast("q")
        self._views: dict[int, Tensor] = {}

    def take_off(self, rows: list[int], bucket: int) -> Tensor:
        """Return a bucket of rows, padded, as a tensor that can be copied without waiting."""
        self._numbers[:bucket] = array("q", rows + [0] * (bucket - len(rows)))
        if bucket not in self._views:
            self._views[bucket] = self.rows[:bucket]
        return self._views[bucket]

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


class PendingStep:
    """A step that was launched; `wait` returns what it gained.

    Parameters
    ----------
    landing : Landing
        Where its tokens come.
    count : int
        Requests.
    rows : list of int
        What took part; padding, where nobody did.
    """

    def __init__(self, landing: Landing, count: int, rows: list[int]) -> None:
        self._landing, self._count, self.rows = landing, count, rows
        self._gained: list[list[int]] | None = None

    def wait(self) -> list[list[int]]:
        """Wait for the step and return each request's new tokens, bonus last.

        Empty for row 0 and for a request that had no slots for a step. Asked again, it returns
        the same without waiting.

        Returns
        -------
        list of list of int
            In the order of the rows that were given to the step.
        """
        if self._gained is None:
            self._landing.wait()
            found = self._landing.packed[: self._count].tolist()
            self._gained = [tokens[:gained] for gained, *tokens in found]
        return self._gained

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once. Asking does not wait."""
        return self.waited or self._landing.ready

    @property
    def waited(self) -> bool:
        """Whether its tokens have been read."""
        return self._gained is not None


@dataclass(frozen=True)
class Flight:
    """A step of an engine on its way.

    Parameters
    ----------
    config : SpecConfig
        Its setting.
    group : list of Live
        The requests that take part.
    pending : PendingStep
        What they gain.
    launched_at : float or None
        `time.perf_counter` reading, in seconds; None if something else ran since.
    """

    config: SpecConfig
    group: list[Live]
    pending: PendingStep
    launched_at: float | None
