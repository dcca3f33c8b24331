"""A scheduler decides which requests run, and keeps their slots."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from specattn.engine.detokenizer import TextStream
from specattn.engine.request import RequestOutput, RunningRequest
from specattn.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from specattn.cache.slot_table import SlotTable
    from specattn.config import SpecConfig
    from specattn.engine.configs import SpeculativeConfigs
    from specattn.engine.request import Request
    from specattn.speculative.step.host_buffers import TokenLogprobs

    Item = tuple[Request, RequestOutput]
    Groups = dict[SpecConfig, list[RunningRequest]]


class Scheduler:
    """The requests that wait, and those that run and hold slots.

    Parameters
    ----------
    table : SlotTable
        Rows and slots. As many requests may run as it has free rows now.
    configs : SpeculativeConfigs
        What a step may run with.
    eos : collection of int
        The tokens that end a text, see `end_ids`.
    detokenize : callable or None
        Makes text of tokens, for stop strings.
    read_ahead : int
        Slots past a prompt that running it writes: `Proposer.read_ahead`.
    blocked : callable, optional
        Tells whether a request without a next token has none because of what it asks for; such a
        one ends as ``"blocked"``, not as ``"nonfinite"``.
    shares_prefixes : bool
        Whether requests may share prefixes: `ModelSlot.shares_prefixes` of all models.

    Attributes
    ----------
    waiting : list of (Request, RequestOutput)
        Requests without a row, in their order.
    running : list of RunningRequest
        Requests with a row that have not ended.
    full : int
        With so many running, no waiting request found a row or slots.
    """

    def __init__(  # noqa: PLR0913 - a constructor
        self,
        table: SlotTable,
        configs: SpeculativeConfigs,
        eos: Collection[int],
        detokenize: Callable[[list[int]], str] | None,
        read_ahead: int = 0,
        blocked: Callable[[RunningRequest], bool] = lambda _: False,
        *,
        shares_prefixes: bool = True,
    ) -> None:
        self.table, self.configs, self._blocked = table, configs, blocked
        self._eos, self._detokenize, self._read_ahead = eos, detokenize, read_ahead
        self._shares = shares_prefixes
        self.waiting: list[Item] = []
        self.running: list[RunningRequest] = []
        self._rows = self.full = table.num_free_rows

    @property
    def num_free(self) -> int:
        """Requests that may run besides those that do."""
        return self._rows - len(self.running)

    def wait(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Let requests wait for rows and slots; return their results."""
        if not self.waiting:
            self.full = self._rows
        results = [RequestOutput(seed=one.sampling.seed) for one in requests]
        self.waiting += zip(requests, results, strict=True)
        return results

    def wave(self, items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
        """Split off the requests that wait to share a prompt of others."""
        if len(items) == 1:
            return list(items), []
        now: list[Item] = []
        later: list[Item] = []
        # of many samples of a prompt, one
        prompts: set[tuple[int, ...]] = set()
        for item in items:
            prompt = item[0].prompt
            common = max((_common(prompt, first) for first in prompts), default=0)
            if self._shareable(prompt, common) > self._donor(prompt)[1]:
                later.append(item)
            else:
                now.append(item)
                prompts.add(tuple(prompt))
        return now, later

    def admit(self, items: Sequence[Item], *, whole: bool) -> list[RunningRequest]:
        """Let requests run: each gets a row and slots for its prompt.

        Parameters
        ----------
        items : sequence of (Request, RequestOutput)
            The requests, and where their tokens go.
        whole : bool
            Whether there must be slots for all steps of all requests that run then, not for these
            prompts alone.

        Returns
        -------
        list of RunningRequest
            In the order of ``items``; they are among ``running``, too.

        Raises
        ------
        CapacityError
            If rows or slots run out. Rows that were given are not taken back: see `roll_back`.
        """
        admitted = []
        self.configs.prepare(len(self.running) + len(items))
        for request, result in items:
            donor, shared = self._donor(request.prompt)
            row = self.table.allocate(share=donor, share_len=shared)
            eos: Collection[int] = () if request.ignore_eos else self._eos
            stream = None
            if request.stop and self._detokenize is not None:
                stream = TextStream.of(request, self._detokenize)
            admitted.append(RunningRequest(request, result, row, shared, eos, stream))
            admitted[-1].ready = self.configs.drafting and self._read(donor, shared)
            self.running.append(admitted[-1])
        holders = self.running if whole else admitted
        self.table.reserve(
            [one.row for one in holders],
            [
                self._last_slot(one.request) if whole else self._first_slot(one.request)
                for one in holders
            ],
        )
        return admitted

    def roll_back(
        self,
        running: Sequence[RunningRequest],
        rows: frozenset[int],
        results: Sequence[RequestOutput] = (),
    ) -> None:
        """Go back to requests that ran, and rows taken, before `admit`.

        ``results`` are those of the requests that were to run; they hold nothing then.
        """
        for row in self.table.rows - rows:
            self.table.free(row)
        self.running = list(running)
        for result in results:
            vars(result).update(vars(RequestOutput(seed=result.seed)))

    def schedule(self) -> Groups:
        """Reserve slots for the next step; return its requests by config.

        Every request steps with the chosen config, if its context has room for that. Requests for
        whose group slots run out sit the step out, and so do those whose first token is awaited and
        surely ends them, or is needed on the host.

        Returns
        -------
        dict
            By config, in the order of their ``reserve_len``: a list of `RunningRequest`.

        Raises
        ------
        CapacityError
            If no group has slots.
        ValueError
            From `SpeculativeConfigs.choose`.
        """
        groups: Groups = {}
        going = [one for one in self.running if self._goes_on(one)]
        rooms = [self.table.max_context_len - one.length for one in going]
        if not going:
            return groups
        chosen = self._choose(going, rooms)
        for one, room in zip(going, rooms, strict=True):
            groups.setdefault(self.configs.fit(chosen, room), []).append(one)
        scheduled: Groups = {}
        short: CapacityError | None = None
        # those next to their contexts' ends come first: they are the next to free slots
        for config in sorted(groups, key=lambda config: config.reserve_len):
            try:
                self._reserve(config, groups[config], [0] * len(groups[config]))
            except CapacityError as error:
                short = error
            else:
                scheduled[config] = groups[config]
        if short is not None and not scheduled:
            raise short
        return scheduled

    def schedule_ahead(self, config: SpecConfig, group: Sequence[RunningRequest]) -> Groups:
        """Return the requests of the step after one in flight, by config.

        Slots are reserved for both steps. No request takes it unless all that may go on have room
        and slots for both. Those that take no part in the step in flight, ``config`` of ``group``,
        join: their prompts have been launched since.
        """
        own = set(group)
        going = [one for one in self.running if self._goes_on(one, in_flight=one in own)]
        # a grammar is asked before its step
        if not going or any(one.grammar is not None for one in going if one not in own):
            return {}
        gains = [config.num_steps + 1 if one in own else 0 for one in going]
        limit = self.table.max_context_len
        rooms = [limit - gain - one.length for one, gain in zip(going, gains, strict=True)]
        following = self._choose(going, rooms)
        if following.reserve_len > min(rooms):
            return {}
        try:
            self._reserve(following, going, gains)
        except CapacityError:  # what this step does not gain may be enough
            return {}
        return {following: going}

    def _goes_on(self, one: RunningRequest, *, in_flight: bool = False) -> bool:
        """Whether a request may step after what is in flight."""
        if not one.awaited:
            # one token is the least that a step gains
            return len(one.result.tokens) + in_flight < one.request.max_new_tokens
        full = one.length >= self.table.max_context_len
        return not (one.held or full or 1 + in_flight >= one.request.max_new_tokens)

    def _choose(self, going: Sequence[RunningRequest], rooms: Sequence[int]) -> SpecConfig:
        """Return the next step's config, asking the policy if there are several."""
        configs = self.configs
        if not configs.adaptive:
            return configs.current
        ready = None if configs.bare is None else sum(one.ready for one in going)
        return configs.choose(rooms, ready)

    def _reserve(
        self, config: SpecConfig, group: Sequence[RunningRequest], gains: Sequence[int]
    ) -> None:
        """Reserve a step's slots; of each request ``gains`` may come before."""
        need = config.reserve_len
        lens = [one.length + gain + need for one, gain in zip(group, gains, strict=True)]
        self.table.reserve([one.row for one in group], lens)
        # plain decoding at a context's end may be no config of the engine
        if config in self.configs.all:
            self.configs.current = config

    def await_first(self, one: RunningRequest, *, by_host: bool) -> None:
        """Note that a request's prompt was launched.

        With ``by_host``, every step needs the tokens before it on the host.
        """
        one.length, one.awaited = one.prompt_len, True
        one.held = by_host or one.grammar is not None
        # others may share it
        self.table.commit(one.row, one.length)

    def lacking(self, request: Request) -> int:
        """Return how many tokens of a prompt no running request has run."""
        return len(request.prompt) - self._donor(request.prompt)[1]

    def append(
        self,
        one: RunningRequest,
        tokens: Sequence[int],
        scored: Callable[[int], list[TokenLogprobs]] | None = None,
    ) -> list[int]:
        """Append tokens that have slots, free who ends; return those kept.

        ``scored`` returns their log-probabilities, with a number of alternatives.
        """
        self.table.commit(one.row, one.length)
        kept = one.append(tokens, self.table.max_context_len)
        if one.result.finish_reason:
            self.table.free(one.row)
        if one.result.finish_reason == "nonfinite" and self._blocked(one):
            one.result.finish_reason = "blocked"
        if scored is not None and (count := one.request.sampling.logprobs) is not None:
            one.result.logprobs += scored(count)[: len(kept)]
        return kept

    def remove_ended(self) -> None:
        """Forget the requests that have ended."""
        self.running = [one for one in self.running if not one.result.finish_reason]

    def drop(self, result: RequestOutput) -> None:
        """End a request: free its row, or let it wait no more.

        Raises
        ------
        ValueError
            If no request has this result, or its row takes part in a step that is being launched.
        """
        for one in self.running:
            if one.result is result:
                # first, for it may be refused
                self.table.free(one.row)
                _drop(result)
                self.remove_ended()
                return
        for at, (_, waits) in enumerate(self.waiting):
            if waits is result:
                del self.waiting[at]
                _drop(result)
                # those after it may need less
                self.full = self._rows
                return
        raise ValueError("result must be that of a request which runs in this engine, or waits")

    def clear(self, *, table: bool) -> int:
        """Drop every request; with ``table``, free every row, whoever took it.

        Returns how many had not ended.
        """
        dropped = 0
        if table:
            self.table.clear()
        for one in self.running:
            if not table and not one.result.finish_reason:
                self.table.free(one.row)
            dropped += _drop(one.result)
        self.running = []
        # last: after an interrupt, one that runs may still be among them
        for _, result in self.waiting:
            dropped += _drop(result)
        self.waiting.clear()
        return dropped

    def _first_slot(self, request: Request) -> int:
        """Return how many positions running a prompt needs slots for."""
        return min(len(request.prompt) + self._read_ahead, self.table.max_context_len)

    def _last_slot(self, request: Request) -> int:
        """Return how many positions of a request may ever need slots.

        Its last step begins when it lacks one token, and its newest token has no slot yet.
        """
        longest = len(request.prompt) + request.max_new_tokens - 2
        return min(longest + self.configs.reserve_len, self.table.max_context_len)

    def _donor(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the row that shares most of a prompt, and how much."""
        best, most = (0, 0), self._shareable(prompt, len(prompt))
        for one in self.running:
            if best[1] == most:
                break
            # only what holds KV is shared, and the token after it is known
            common = min(_common(prompt, one.tokens), one.length + 1)
            shared = self._shareable(prompt, common)
            if shared > best[1]:
                best = (one.row, shared)
        return best

    def _read(self, donor: int, shared: int) -> bool:
        """Whether the draft has read what is shared with a row."""
        return not shared or all(one.ready for one in self.running if one.row == donor)

    def _shareable(self, prompt: Sequence[int], common: int) -> int:
        """Return how many tokens of a common prefix can be shared.

        Only whole pages are. The draft model's KV at a position depends on the next token too, so
        the last common token is not shared; and the prompt's last token must be run for its
        logits.
        """
        page = self.table.page_size
        return (min(common, len(prompt)) - 1) // page * page if common and self._shares else 0


def _drop(result: RequestOutput) -> bool:
    """End a request; returns whether it had not ended."""
    if result.finish_reason:
        return False
    result.finish_reason = "dropped"
    result.finished_at = time.perf_counter()
    return True


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
