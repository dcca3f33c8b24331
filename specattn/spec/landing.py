"""How a step's rows leave the host and its tokens come back, without the host waiting."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import SpecConfig
    from specattn.spec.request import Live


class Landing:
    """Host memory that one step's rows leave from and its tokens come back to."""

    def __init__(self, batch: int, width: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.rows = torch.zeros(batch, dtype=torch.int64, pin_memory=pin)
        self.packed = torch.zeros(batch, width, dtype=torch.int64, pin_memory=pin)
        self.done = torch.cuda.Event() if pin else None
        # a list goes through an array: numpy takes several times as long to look at its numbers
        self._numbers = self.rows.numpy().data.cast("B").cast("q")
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def take_off(self, rows: list[int], bucket: int) -> Tensor:
        """Return a bucket of rows, padded, as a tensor that can be copied without waiting."""
        self._numbers[:bucket] = array("q", rows + [0] * (bucket - len(rows)))
        return self._view(bucket)[0]

    def bring(self, packed: Tensor, bucket: int) -> None:
        """Copy a whole bucket's tokens here, padding included, without waiting."""
        self._view(bucket)[1].copy_(packed, non_blocking=True)
        if self.done is not None:
            # of the device that copies, which need not be the current one
            self.done.record(torch.cuda.current_stream(packed.device))

    def _view(self, bucket: int) -> tuple[Tensor, Tensor]:
        if bucket not in self._views:
            self._views[bucket] = self.rows[:bucket], self.packed[:bucket]
        return self._views[bucket]


class PendingStep:
    """A step that was launched; `wait` returns what it gained.

    Parameters
    ----------
    landing : Landing
        Where its tokens come.
    count : int
        Requests.
    """

    def __init__(self, landing: Landing, count: int) -> None:
        self._landing, self._count = landing, count
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
            if self._landing.done is not None:
                self._landing.done.synchronize()
            found = self._landing.packed[: self._count].tolist()
            self._gained = [tokens[:gained] for gained, *tokens in found]
        return self._gained

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
