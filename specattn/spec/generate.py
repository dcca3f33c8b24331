"""A decode loop for a batch of requests: prompts in, tokens out, slots given back."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from specattn.errors import CapacityError
from specattn.kv import KVPool
from specattn.recording import Recorder
from specattn.slots import SlotTable
from specattn.spec.admission import Admission, check_request
from specattn.spec.decoder import ModelSlot
from specattn.spec.landing import Flight
from specattn.spec.prefill import Prefill
from specattn.spec.request import Generation, Live, Request
from specattn.spec.settings import Settings, powers_of_two
from specattn.spec.states import RequestStates, StateDims
from specattn.spec.step_decoder import StepDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from specattn.backends.base import BackendFactory
    from specattn.backends.multi_step import Indices
    from specattn.config import KVScales, SpecConfig
    from specattn.graph import GraphReport
    from specattn.spec.checks import Validate
    from specattn.spec.model import DraftModel, TargetModel
    from specattn.spec.policy import Policy
    from specattn.spec.step_decoder import Seams

    Item = tuple[Request, Generation]
    Scales = Sequence[KVScales] | None

log = logging.getLogger(__name__)


class Engine:
    """Decodes requests with one target, optionally one draft model, and speculation settings.

    Every request steps with the widest setting its remaining context allows, whatever the rest of
    the batch does; requests finish and give their slots back independently.

    Parameters
    ----------
    target : TargetModel
        The model whose tokens are wanted.
    draft : DraftModel, optional
        Needed unless ``config.num_steps`` is 0.
    config : SpecConfig
        Tree width, depth, page size and limits.
    configs : sequence of SpecConfig
        More settings that steps may take; they differ from ``config`` in the tree alone. See
        docs/adaptive.md.
    policy : Policy, optional
        Chooses every step's setting; `specattn.spec.policy.GoodputPolicy` by default.
    backend : str or BackendFactory
        Attention backend, by name (``"auto"`` picks one) or itself; see `choose_backend`.
    num_slots : int, optional
        KV slots of the pools; by default every request can reach ``max_context_len``.
    buckets : sequence of int, optional
        Batch sizes to capture; powers of two up to ``max_num_reqs`` by default.
    graphs : bool
        Whether to record CUDA graphs.
    seams : {"one", "three"}, optional
        How a step is recorded, see `StepDecoder`; by default in one graph, and in three where a
        backend plans on the host.
    indices : {"table", "csr"}
        What draft steps read; see `MultiStepDraftBackend`.
    validate : {"off", "debug"}
        Whether steps also check what tensors hold; see `StepDecoder`.
    deterministic : bool
        Whether attention gives every token the same bits in any batch and mode; see
        `specattn.config.AttnConfig`.
    tbo : bool
        Whether the halves of a batch step at the same time; see `StepDecoder`.
    detokenize : callable, optional
        Maps token ids to text, for stop strings.
    kv_dtype : torch.dtype, optional
        What the pools store keys and values in, if not the models' dtype: float8 (e4m3).
    kv_scales : tuple, optional
        Of float8 pools: the target's, then the draft's, each one `KVScales` per layer, or None
        for 1.

    Raises
    ------
    UnsupportedError
        If the backend cannot serve the models here.
    ValueError
        If ``kv_dtype`` and ``kv_scales`` are not those of a `KVPool`, or ``configs`` differ in
        more than the tree.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        config: SpecConfig,
        *,
        configs: Sequence[SpecConfig] = (),
        policy: Policy | None = None,
        backend: str | BackendFactory = "auto",
        num_slots: int | None = None,
        buckets: Sequence[int] | None = None,
        graphs: bool = True,
        seams: Seams | None = None,
        indices: Indices = "table",
        validate: Validate = "off",
        deterministic: bool = False,
        tbo: bool = False,
        detokenize: Callable[[list[int]], str] | None = None,
        kv_dtype: torch.dtype | None = None,
        kv_scales: tuple[Scales, Scales] = (None, None),
    ) -> None:
        self.config, self.indices, self._record = config, indices, graphs
        self.detokenize, self.validate, self.tbo = detokenize, validate, tbo
        self.buckets = list(buckets) if buckets else powers_of_two(config.max_num_reqs)
        self.settings = Settings((config, *configs), policy, self.buckets)
        self.eos = target.eos_token_ids
        if config.max_context_len > target.max_context_len:
            log.warning(
                "max_context_len %d is above the target's %d: positions from there on are none it "
                "was trained on, and to fused models they are all the same",
                config.max_context_len, target.max_context_len,
            )
        device = target.device
        pages = -(-config.max_context_len // config.page_size) * config.max_num_reqs + 1
        slots = num_slots or pages * config.page_size
        self.table = SlotTable(
            max_num_reqs=config.max_num_reqs, max_context_len=config.max_context_len,
            num_slots=slots, page_size=config.page_size, device=device,
        )
        pool = partial(KVPool, num_slots=slots, device=device, kv_dtype=kv_dtype)
        self.target = ModelSlot.of(
            target, pool(target.layers, scales=kv_scales[0]), backend, deterministic=deterministic
        )
        self.draft: ModelSlot[DraftModel] | None = None
        if self.settings.speculative and draft is not None:
            self.draft = ModelSlot.of(
                draft, pool(draft.layers, scales=kv_scales[1]), backend,
                deterministic=deterministic,
            )
        for slot in (self.target, self.draft):
            if slot is not None:
                slot.backend.check_pages(config.page_size)
        self.seams = seams or self._seams()
        draft_model = self.draft.model if self.draft else None
        widest = self.settings.widest
        dims = StateDims.of(draft_model, widest.topk, draft_sampling=config.draft_sampling)
        self.states = RequestStates.alloc(config.max_num_reqs + 1, dims, device)
        self._admission = Admission(self.table, self.states, config.page_size)
        self._prefill = Prefill(self.target, self.draft, self.table.req_to_token, widest)
        self._recorder = Recorder()
        self._decoders: dict[SpecConfig, StepDecoder] = {}
        self._live: list[Live] = []
        self._ahead: Flight | None = None
        self._landed_at = 0.0
        for setting in self.settings.configs:
            self.decoder(setting)

    def decoder(self, config: SpecConfig) -> StepDecoder:
        """Return the decoder of a setting; those that are not the engine's run eagerly."""
        if config not in self._decoders:
            own = config in self.settings.configs
            # a request that was shrunk to plain decoding never drafts again
            draft = self.draft if own or config.num_steps else None
            self._decoders[config] = StepDecoder(
                self.target, draft, config, self.table, self.states,
                buckets=self.buckets, indices=self.indices, record=self._record and own,
                seams=self.seams, recorder=self._recorder, validate=self.validate, tbo=self.tbo,
            )
        return self._decoders[config]

    @property
    def decoders(self) -> tuple[StepDecoder, ...]:
        """Every decoder made so far, those of the engine's own settings first."""
        return tuple(self._decoders.values())

    def graphs(self) -> dict[SpecConfig, tuple[GraphReport, ...]]:
        """Return what capturing took: for each of the engine's settings, bucket by bucket."""
        return {config: self.decoder(config).report() for config in self.settings.configs}

    @property
    def num_live(self) -> int:
        """Requests not finished yet."""
        return len(self._live)

    def generate(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[Generation]:
        """Decode requests to their ends.

        Parameters
        ----------
        requests : sequence of Request
            Any number; at most ``max_num_reqs`` run at once, the others wait.
        on_tokens : callable, optional
            ``on_tokens(index, new_tokens)`` after the first token and after every step.

        Raises
        ------
        ValueError
            If a prompt is empty or longer than the context.
        CapacityError
            If the pools are too small.
        """
        results: list[Generation] = []
        order: dict[int, int] = {}
        waiting = list(requests)
        try:
            while waiting or self._live:
                room = self.config.max_num_reqs - len(self._live)
                if waiting and room:
                    taken, waiting = waiting[:room], waiting[room:]
                    for result in self.add(taken):
                        order[id(result)] = len(results)
                        results.append(result)
                        if on_tokens:
                            on_tokens(order[id(result)], list(result.tokens))
                for result, new in self.step(ahead=not waiting):
                    if on_tokens and id(result) in order:
                        on_tokens(order[id(result)], new)
        finally:
            self.clear()
        return results

    def clear(self) -> None:
        """Drop every running request."""
        # a wait that was interrupted has left its step in flight, too
        for decoder in self.decoders:
            decoder.settle()
        self._ahead = None
        self._drop(self._live)
        self._live = []

    def add(self, requests: Sequence[Request]) -> list[Generation]:
        """Run prompts and draw their first tokens; prefixes of running requests are shared.

        Parameters
        ----------
        requests : sequence of Request
            At most as many as rows are free (`SlotTable.num_free_rows`).

        Returns
        -------
        list of Generation
            One per request, with its first token; `step` appends to them.

        Raises
        ------
        ValueError
            If a prompt is empty, longer than the context or not of the vocabulary; nothing has
            run then.
        CapacityError
            If rows or slots run out. Whatever is raised, none of the requests runs then, and
            those that ran before still do.
        """
        limit, vocab_size = self.config.max_context_len, self.target.model.vocab_size
        for request in requests:
            check_request(request, limit, vocab_size, self.detokenize)
        if any(request.sampling.temperature for request in requests):
            for config in self.settings.configs:
                self.decoder(config).capture(sampled=True)
        results = [Generation(started_at=time.perf_counter()) for _ in requests]
        waiting = list(zip(requests, results, strict=True))
        if self._ahead is not None:
            self._ahead = replace(self._ahead, launched_at=None)
        before = list(self._live)
        try:
            while waiting:
                waiting = self._run_wave(waiting)
        except BaseException:
            self._drop(live for live in self._live if live not in before)
            self._live = before
            raise
        return results

    def _run_wave(self, waiting: Sequence[Item]) -> list[Item]:
        """Admit requests whose prompts run now; returns those that wait to share them."""
        wave, later = self._admission.wave(waiting, self._live)
        admitted = self._admission.run(self._prefill, wave, self._live)
        self._live += [live for live, _ in admitted]
        for live, first in admitted:
            live.result.first_token_at = time.perf_counter()
            self._take(live, [first])
        self._forget_ended()
        return later

    def _forget_ended(self) -> None:
        self._live = [live for live in self._live if not live.result.finish_reason]

    def _drop(self, group: Iterable[Live]) -> None:
        """Give the rows of those that have not given theirs back yet."""
        for live in group:
            if not live.result.finish_reason:
                self.table.free(live.row)

    def step(self, *, ahead: bool = False) -> list[tuple[Generation, list[int]]]:
        """Advance every running request; returns what each of them gained.

        Parameters
        ----------
        ahead : bool
            Launch the next step before waiting for this one, where every request is sure to have
            room and slots for both: the device then does not wait for the host. What requests
            gain is the same; one that turns out to have ended rides along in the step that was
            launched.

        Returns
        -------
        list of (Generation, list of int)
            Each request that took part and its new tokens, cut at its end. A request that ended
            has its ``finish_reason`` and is not in the next step's.

        Raises
        ------
        CapacityError
            If slots run out; the step can be made again when others have ended.
        Exception
            What ``detokenize`` raises. A step's tokens are lost then, so all requests are dropped.
        """
        try:
            if self._ahead is None:
                groups = self._groups()
                if len(groups) != 1:
                    return [gain for item in groups.items() for gain in self._step_group(*item)]
                self._ahead = self._launch(*groups.popitem(), 0)
            flight = self._ahead
            self._ahead = self._launch_next(flight) if ahead else None
            return self._collect(flight)
        finally:  # a group that finished has given its rows back, whatever the next one did
            self._forget_ended()

    def _groups(self) -> dict[SpecConfig, list[Live]]:
        """Return the requests by the widest setting that their contexts have room for."""
        groups: dict[SpecConfig, list[Live]] = {}
        rooms = [self.config.max_context_len - live.length for live in self._live]
        chosen = self.settings.choose(len(rooms), max(rooms, default=0))
        for live, room in zip(self._live, rooms, strict=True):
            groups.setdefault(chosen.shrink(room), []).append(live)
        return groups

    def _step_group(
        self, config: SpecConfig, group: list[Live]
    ) -> list[tuple[Generation, list[int]]]:
        return self._collect(self._launch(config, group, 0))

    def _launch(self, config: SpecConfig, group: list[Live], in_flight: int) -> Flight:
        """Launch a step; ``in_flight`` tokens at most are not known to the host yet."""
        need = in_flight + config.reserve_len
        self.table.reserve([live.row for live in group], [live.length + need for live in group])
        lens = None
        if self._plans_on_host:
            lens = torch.tensor([live.length for live in group], dtype=torch.int32)
        decoder = self.decoder(config)
        sampled = any(live.request.sampling.temperature for live in group)
        if sampled and not decoder.sampled:  # a setting that was shrunk to
            decoder.capture(sampled=True)
        rows, began = [live.row for live in group], time.perf_counter()
        pending = decoder.step_async(rows, sampled=sampled, seq_lens_cpu=lens)
        self.settings.launched(config)
        return Flight(config, group, pending, began)

    def _launch_next(self, flight: Flight) -> Flight | None:
        """Launch the step after the one in flight, if all ride in that and have room for both."""
        going = [live for live in self._live if live.goes_on]
        riding = set(flight.group)
        if not going or self._plans_on_host or not riding.issuperset(self._live):
            return None
        gain = flight.config.num_steps + 1
        rooms = [self.config.max_context_len - gain - live.length for live in going]
        config = self.settings.choose(len(going), max(rooms))
        if config.reserve_len > min(rooms):
            return None
        try:
            return self._launch(config, going, gain)
        except CapacityError:  # what this step does not gain may be enough
            return None

    def _collect(self, flight: Flight) -> list[tuple[Generation, list[int]]]:
        """Hand out a step's tokens; requests that had ended before it get none."""
        try:
            return self._hand_out(flight)
        except BaseException:
            # nobody can go on without tokens that were lost
            self.clear()
            raise

    def _hand_out(self, flight: Flight) -> list[tuple[Generation, list[int]]]:
        gained, began = flight.pending.wait(), flight.launched_at
        now = time.perf_counter()
        # a step that was launched ahead began when the one before it ended
        seconds = None if began is None else now - max(began, self._landed_at)
        self._landed_at = now
        if self.settings.adaptive:
            self.settings.landed(flight.config, list(map(len, gained)), seconds)
        found = []
        for live, tokens in zip(flight.group, gained, strict=True):
            if live.result.finish_reason:
                continue
            live.length += len(tokens)
            live.result.accept_lens.append(len(tokens))
            self.table.commit(live.row, live.length)
            found.append((live.result, self._take(live, tokens)))
        return found

    def _take(self, live: Live, tokens: list[int]) -> list[int]:
        """Append tokens up to whatever ends the request, which gives its row back."""
        kept = live.take(tokens, self.eos, self.config.max_context_len, self.detokenize)
        if live.result.finish_reason:
            self.table.free(live.row)
        return kept

    def _seams(self) -> Seams:
        return "three" if self._plans_on_host or self.validate == "debug" else "one"

    @property
    def _plans_on_host(self) -> bool:
        slots = (self.target, self.draft)
        return any(slot is not None and slot.backend.host_plan for slot in slots)
