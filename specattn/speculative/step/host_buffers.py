"""Pinned memory between host and steps, without copy or wait."""

from __future__ import annotations

import struct
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specattn.kernels.logprobs import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class HostBuffers:
    """Pinned memory whose entries steps read and write in turn.

    Parameters
    ----------
    rows : Tensor
        ``[S, B]`` int64 on the host, pinned where the device is another: the table rows that take
        part, 0 for padding, of S steps in flight. May have a row stride.
    packed : Tensor
        ``[S, B, width]`` int64, as ``rows``: what `Step.packed` holds.
    entry : Tensor
        ``[1]`` int64 on the device, which entry the next step reads and writes.
    """

    rows: Tensor
    packed: Tensor
    entry: Tensor

    @classmethod
    def alloc(cls, steps: int, batch: int, width: int, device: torch.device) -> HostBuffers:
        """Allocate the memory of ``steps`` steps of up to ``batch`` requests."""
        pin = device.type == "cuda"
        rows = torch.zeros(steps, batch, dtype=torch.int64, pin_memory=pin)
        packed = torch.zeros(steps, batch, width, dtype=torch.int64, pin_memory=pin)
        return cls(rows, packed, torch.zeros(1, dtype=torch.int64, device=device))

    def of(self, begin: int, end: int) -> HostBuffers:
        """Return the buffers of the requests ``[begin, end)`` of every step."""
        return HostBuffers(self.rows[:, begin:end], self.packed[:, begin:end], self.entry)


class TokenLogprobs(NamedTuple):
    """An emitted token's log-probability, and those of its alternatives.

    Parameters
    ----------
    value : float
        The token's own, a natural logarithm.
    alternatives : dict of int to float
        Those of the most probable tokens, the most probable first, the lower token at a tie;
        whether or not the emitted token is one of them. Impossible tokens are left out.
    """

    value: float
    alternatives: dict[int, float]


@dataclass(frozen=True)
class LogprobBuffers:
    """Memory that steps write log-probabilities to, in the turns of `HostBuffers`.

    Parameters
    ----------
    values, ids : Tensor
        ``[S, B, D, 1 + K]`` float32 and int64, of S steps of B requests that gain up to D tokens:
        the token's own, then K alternatives; as `path_logprobs` writes them.
    """

    values: Tensor
    ids: Tensor

    @classmethod
    def alloc(
        cls, steps: int, batch: int, depth: int, device: torch.device, *, pinned: bool = False
    ) -> LogprobBuffers:
        """Allocate memory on ``device``, or ``pinned`` memory of the host for it."""
        shape = steps, batch, depth, 1 + MAX_LOGPROBS
        place = torch.device("cpu") if pinned else device
        pin = pinned and device.type == "cuda"
        values = torch.zeros(shape, dtype=torch.float32, device=place, pin_memory=pin)
        return cls(values, torch.zeros(shape, dtype=torch.int64, device=place, pin_memory=pin))

    @classmethod
    def join(cls, parts: Sequence[LogprobBuffers]) -> LogprobBuffers:
        """Return the requests of all ``parts``, in order."""
        return cls(*(torch.cat([getattr(p, name) for p in parts], 1) for name in ("values", "ids")))

    def of(self, requests: slice) -> LogprobBuffers:
        """Return the buffers of these requests of every step."""
        return LogprobBuffers(self.values[:, requests], self.ids[:, requests])

    def entry(self, entry: int, batch: int) -> LogprobBuffers:
        """Return a copy on the host of one step's entry."""
        values, ids = (x[entry : entry + 1, :batch].cpu() for x in (self.values, self.ids))
        return LogprobBuffers(values.clone(), ids.clone())

    def read(self, at: int, gained: int, count: int) -> list[TokenLogprobs]:
        """Return what a request's tokens have got, of an `entry`.

        Parameters
        ----------
        at : int
            The request's place in the batch.
        gained : int
            Tokens that it gained.
        count : int
            Alternatives that it wants.
        """
        values = self.values[0, at, :gained, : 1 + count].tolist()
        ids = self.ids[0, at, :gained, 1 : 1 + count].tolist()
        return [
            TokenLogprobs(
                own, {i: x for i, x in zip(tokens, others, strict=True) if x > -float("inf")}
            )
            for (own, *others), tokens in zip(values, ids, strict=True)
        ]


class PendingStep:
    """A step that was launched; `wait` returns the tokens that it gained.

    Parameters
    ----------
    packed : Tensor
        ``[B, width]`` int64 on the host, where the step writes them.
    done : torch.Event or None
        Recorded after the step; None where launching a step runs it.
    count : int
        Requests.
    rows : tuple of int
        The table rows that took part.
    logprobs : callable, optional
        Copies what a processed step has written of log-probabilities.
    """

    def __init__(
        self,
        packed: Tensor,
        done: torch.Event | None,
        count: int,
        rows: tuple[int, ...],
        logprobs: Callable[[int], LogprobBuffers] | None = None,
    ) -> None:
        self._all, self._done, self._count, self.rows = packed, done, count, rows
        self._gained: list[list[int]] | None = None
        self._copy = logprobs
        self._logprobs: LogprobBuffers | None = None

    @property
    def packed(self) -> Tensor:
        """The memory of the host that the step writes its outcome to.

        Reading it does not wait: it holds the outcome once `ready`, and until the second step after
        this one is launched.

        Returns
        -------
        Tensor
            ``[count, num_steps + 2]`` int64, dense, pinned where the device is CUDA; a row per
            request, in the order of the rows that were given to the step: the number of tokens
            gained, then those tokens, bonus last, then zeros. What `wait` says of its lists goes
            for rows, too.
        """
        return self._all[: self._count]

    def wait(self) -> list[list[int]]:
        """Wait for the step and return each request's new tokens, bonus last.

        Empty for row 0 and for a request that had no slots for a step. A last token of -1 says
        that the target's logits were not finite there, or that processors leave no token. Asked
        again, it returns the same without waiting.

        Returns
        -------
        list of list of int
            In the order of the rows that were given to the step.
        """
        if self._gained is None:
            if self._done is not None:
                self._done.synchronize()
            # half of what torch takes for the same
            found = self._all.numpy()[: self._count].tolist()
            if self._copy is not None:
                self._logprobs = self._copy(self._count)
            self._gained = [tokens[:gained] for gained, *tokens in found]
        return self._gained

    def logprobs(self, at: int, count: int) -> list[TokenLogprobs]:
        """Return log-probabilities of a request's new tokens; waits as `wait` does.

        Parameters
        ----------
        at : int
            The request's place among the rows that were given to the step.
        count : int
            Alternatives per token, at most what its ``SamplingParams.logprobs`` asked for.

        Returns
        -------
        list of TokenLogprobs
            One per token of `wait`. A last token of -1 has NaN.

        Raises
        ------
        ValueError
            If the step was not a processed one.
        """
        gained = len(self.wait()[at])
        if self._logprobs is None:
            raise ValueError("log-probabilities need a step with processed=True")
        return self._logprobs.read(at, gained, count)

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once. Asking does not wait."""
        return self.waited or self._done is None or self._done.query()

    @property
    def waited(self) -> bool:
        """Whether its tokens were read, so that its entry is free."""
        return self._gained is not None


class InFlight:
    """Launched steps, by the entry of the host buffers they use.

    Whoever drops it waits for the steps in flight: torch gives pinned memory away at once, and does
    not know that a step has yet to read its rows there, or to write its tokens.
    """

    def __init__(self, host: HostBuffers) -> None:
        self.host = host
        device = host.entry.device
        self._device = device.index
        # of all events the one that costs the host least
        self._done = [torch.Event(device) if host.entry.is_cuda else None for _ in host.rows]
        self._packed = list(host.packed)
        #: Where processed steps write log-probabilities; None until there are such steps.
        self.logprobs: LogprobBuffers | None = None
        # numpy takes several times as long to look at a list's numbers
        self._rows = [rows.numpy().data.cast("B") for rows in host.rows]
        self._steps: list[PendingStep | None] = [None] * len(self._packed)
        self._next = 0
        # whether the device's entry is known to be `_next`
        self._aligned = True
        weakref.finalize(self, _end, self._steps, host).atexit = False

    @property
    def steps(self) -> list[PendingStep]:
        """Steps that nobody has waited for."""
        return [step for step in self._steps if step is not None and not step.waited]

    @property
    def next_entry(self) -> int:
        """Which entry the next step uses."""
        return self._next

    def make_room(self) -> None:
        """Wait for the step whose entry comes next, if nobody has."""
        step = self._steps[self._next]
        if step is not None:
            step.wait()

    def begin(self) -> None:
        """Raise a ValueError unless the next step's entry is free."""
        if not self._aligned:
            # nobody may have been handed the step that a failed launch has noted
            self.settle()
            self.align()
        step = self._steps[self._next]
        if step is not None and not step.waited:
            raise ValueError(f"{len(self._steps)} steps are in flight: wait for the first of them")

    def write_rows(self, rows: Sequence[int], bucket: int) -> None:
        """Write whole numbers as a bucket of rows, padded with row 0."""
        padding = [0] * (bucket - len(rows))
        try:
            _packer(bucket)(self._rows[self._next], 0, *rows, *padding)
        except struct.error as problem:
            raise ValueError(f"rows must be whole numbers, got {list(rows)}") from problem

    def moved(self) -> None:
        """Note that later launches move the device's entry on."""
        self._aligned = False

    def launched(
        self, count: int, rows: tuple[int, ...], *, processed: bool = False
    ) -> PendingStep:
        """Note that the step of the next entry was launched."""
        at = self._next
        done = self._done[at]
        if done is not None:
            # of the steps' device, which need not be the current one
            done.record(torch.accelerator.current_stream(self._device))
        copy = None
        if processed and self.logprobs is not None:
            copy = partial(self.logprobs.entry, at)
        step = self._steps[at] = PendingStep(self._packed[at], done, count, rows, copy)
        self._next = (at + 1) % len(self._steps)
        self._aligned = True
        return step

    def settle(self) -> None:
        """Wait for every step in flight."""
        for step in self.steps:
            step.wait()

    def align(self) -> None:
        """Wait for this stream's launches; set the device's entry to the host's."""
        entry = self.host.entry
        if entry.is_cuda:
            torch.cuda.current_stream(entry.device).synchronize()
        entry.fill_(self._next)
        self._aligned = True


def _end(steps: Sequence[PendingStep | None], host: HostBuffers) -> None:
    """Wait for steps that nobody has waited for, which use ``host``."""
    for step in steps:
        # after an error CUDA has nothing left to wait for
        with suppress(RuntimeError):
            if step is not None and not step.ready:
                step.wait()


@cache
def _packer(count: int) -> Callable[..., None]:
    """Return what packs so many numbers of 8 bytes into memory."""
    return struct.Struct(f"{count}q").pack_into
