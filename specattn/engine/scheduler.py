"""Requests that run, and their steps: launched, perhaps one ahead, and handed out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specattn.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from specattn.cache.slot_table import SlotTable
    from specattn.config import SpecConfig
    from specattn.engine.configs import Settings
    from specattn.engine.decoders import EngineDecoders
    from specattn.engine.request import RequestOutput, RunningRequest
    from specattn.speculative.host_buffers import PendingStep

    Gain = tuple[RequestOutput, list[int]]


@dataclass(frozen=True)
class Flight:
    """A step of an engine on its way.

    Parameters
    ----------
    config : SpecConfig
        Its setting.
    group : list of RunningRequest
        The requests that take part.
    pending : PendingStep
        What they gain.
    launched_at : float or None
        `time.perf_counter` reading, in seconds; None if something else ran since.
    """

    config: SpecConfig
    group: list[RunningRequest]
    pending: PendingStep
    launched_at: float | None


class Running:
    """The requests of an engine from their first token to their last.

    Parameters
    ----------
    table : SlotTable
        Their rows and slots, given back when they end.
    decoders : EngineDecoders
        What steps them.
    settings : Settings
        What chooses the setting of a step.
    eos : collection of int
        End-of-text tokens.
    detokenize : callable or None
        Maps token ids to text, for stop strings.

    Attributes
    ----------
    live : list of RunningRequest
        Those that have not ended.
    """

    def __init__(
        self,
        table: SlotTable,
        decoders: EngineDecoders,
        settings: Settings,
        eos: Collection[int],
        detokenize: Callable[[list[int]], str] | None,
    ) -> None:
        self._table, self._decoders, self._settings = table, decoders, settings
        self._eos, self._detokenize = eos, detokenize
        self.live: list[RunningRequest] = []
        # launched and not handed out: the groups of one step
        self._flights: list[Flight] = []
        # whether they are still here because another launch failed
        self._kept = False
        self._landed_at = 0.0

    def join(self, admitted: Sequence[tuple[RunningRequest, int]]) -> None:
        """Let requests run that have rows, and their first tokens."""
        self.live += [live for live, _ in admitted]
        for live, first in admitted:
            live.result.first_token_at = time.perf_counter()
            self._take(live, [first])
        self._forget_ended()

    def keep(self, staying: Collection[RunningRequest]) -> None:
        """Drop all requests but some."""
        for live in self.live:
            # who has ended has given its row back
            if live not in staying and not live.result.finish_reason:
                self._drop(live)
        self.live = list(staying)

    def drop(self, result: RequestOutput) -> None:
        """Drop one request; in the step in flight it rides along. See `Engine.drop`."""
        for live in self.live:
            if live.result is result:
                self._drop(live)
                self._forget_ended()
                return
        raise ValueError("result must be that of a request which runs in this engine")

    def _drop(self, live: RunningRequest) -> None:
        # first, for it may be refused
        self._table.free(live.row)
        live.result.finish_reason = "dropped"
        live.result.finished_at = time.perf_counter()

    def clear(self) -> None:
        """Drop every request."""
        self._flights = []
        self.keep([])
        # a wait that was interrupted has left its step in flight, and may be again
        self._decoders.settle()

    def untimed(self) -> None:
        """Note that something else runs before the next step lands."""
        self._flights = [replace(flight, launched_at=None) for flight in self._flights]

    def _forget_ended(self) -> None:
        self.live = [live for live in self.live if not live.result.finish_reason]

    def step(self, *, ahead: bool) -> list[Gain]:
        """Advance the requests that there are slots for; see `Engine.step`."""
        try:
            if not self._flights:
                self._launch_groups()
            flights = self._flights
            ahead = ahead and not self._kept and len(flights) == 1
            self._flights = self._launch_next(*flights) if ahead else []
            self._kept = False
            return self._collect(flights)
        except Exception:
            # the next step hands out what was launched, before anything else can fail
            self._kept = bool(self._flights)
            self.untimed()
            raise
        except BaseException:
            # an interrupt may come when a step is under way and not noted
            self.clear()
            raise

    def _launch_groups(self) -> None:
        """Launch a step of every group that there are slots for.

        If the launch of a group fails, the others are launched all the same, and handed out by the
        next step.
        """
        short: CapacityError | None = None
        failed: Exception | None = None
        groups = self._groups()
        # those next to their contexts' ends come first: they are the next to free slots
        for config in sorted(groups, key=lambda config: config.reserve_len):
            try:
                self._flights.append(self._launch(config, groups[config], 0))
            except CapacityError as error:
                short = error
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        if short is not None and not self._flights:
            raise short

    def _groups(self) -> dict[SpecConfig, list[RunningRequest]]:
        """Return the requests by the setting that their contexts have room for."""
        groups: dict[SpecConfig, list[RunningRequest]] = {}
        rooms = [self._table.max_context_len - live.length for live in self.live]
        chosen = self._settings.choose(len(rooms), max(rooms, default=0))
        for live, room in zip(self.live, rooms, strict=True):
            groups.setdefault(self._settings.fit(chosen, room), []).append(live)
        return groups

    def _launch(self, config: SpecConfig, group: list[RunningRequest], in_flight: int) -> Flight:
        """Launch a step; ``in_flight`` tokens at most are not known to the host yet."""
        need = in_flight + config.reserve_len
        self._table.reserve([live.row for live in group], [live.length + need for live in group])
        lens = None
        if self._decoders.plans_on_host:
            lens = torch.tensor([live.length for live in group], dtype=torch.int32)
        decoder = self._decoders.of(config)
        sampled = any(live.request.sampling.temperature for live in group)
        rows, began = [live.row for live in group], time.perf_counter()
        pending = decoder.step_async(rows, sampled=sampled, seq_lens_cpu=lens)
        self._settings.launched(config)
        return Flight(config, group, pending, began)

    def _launch_next(self, flight: Flight) -> list[Flight]:
        """Launch the step after the one in flight, if all ride in that and have room for both."""
        going = [live for live in self.live if live.goes_on]
        riding = set(flight.group)
        if not going or self._decoders.plans_on_host or not riding.issuperset(self.live):
            return []
        gain = flight.config.num_steps + 1
        rooms = [self._table.max_context_len - gain - live.length for live in going]
        config = self._settings.choose(len(going), max(rooms))
        if config.reserve_len > min(rooms):
            return []
        try:
            return [self._launch(config, going, gain)]
        except CapacityError:  # what this step does not gain may be enough
            return []

    def _collect(self, flights: Sequence[Flight]) -> list[Gain]:
        """Hand out a step's tokens; requests that had ended before it get none."""
        try:
            return [gain for flight in flights for gain in self._hand_out(flight)]
        except Exception:
            # nobody can go on without tokens that were lost
            self.clear()
            raise
        finally:
            self._forget_ended()

    def _hand_out(self, flight: Flight) -> list[Gain]:
        gained, began = flight.pending.wait(), flight.launched_at
        now = time.perf_counter()
        # a step that was launched ahead began when the one before it ended
        seconds = None if began is None else now - max(began, self._landed_at)
        self._landed_at = now
        counts, found = [0] * len(gained), []
        for at, (live, tokens) in enumerate(zip(flight.group, gained, strict=True)):
            if live.result.finish_reason:  # it had ended, and rode along
                continue
            counts[at] = len(tokens)
            live.length += len(tokens)
            self._table.commit(live.row, live.length)
            kept = self._take(live, tokens)
            live.result.accept_lens.append(len(kept))
            found.append((live.result, kept))
        handed_out = sum(len(kept) for _, kept in found)
        self._settings.landed(flight.config, counts, handed_out, seconds)
        return found

    def _take(self, live: RunningRequest, tokens: list[int]) -> list[int]:
        """Append tokens up to whatever ends the request, which gives its row back."""
        kept = live.take(tokens, self._eos, self._table.max_context_len, self._detokenize)
        if live.result.finish_reason:
            self._table.free(live.row)
        return kept
