"""A decode loop for a batch of requests: prompts in, tokens out, slots given back."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from specattn.kv import KVPool, SlotTable
from specattn.recording import Recorder
from specattn.spec.decoder import ModelSlot
from specattn.spec.prefill import Prefill, Prompt
from specattn.spec.request import Generation, Live, Request
from specattn.spec.sampling import SamplingBatch
from specattn.spec.settings import Settings
from specattn.spec.states import RequestStates, StateDims
from specattn.spec.step_decoder import StepDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specattn.backends.base import BackendFactory
    from specattn.backends.multi_step import Indices
    from specattn.config import KVScales, SpecConfig
    from specattn.graph import GraphReport
    from specattn.spec.checks import Validate
    from specattn.spec.model import DraftModel, TargetModel
    from specattn.spec.policy import Policy
    from specattn.spec.sampling import SamplingParams
    from specattn.spec.step_decoder import PendingStep, Seams

    Scales = Sequence[KVScales] | None


@dataclass(frozen=True)
class _Flight:
    """A step on its way: ``launched_at`` is None if something else ran since."""

    config: SpecConfig
    group: list[Live]
    pending: PendingStep
    launched_at: float | None


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
        self.buckets = list(buckets) if buckets else _buckets(config.max_num_reqs)
        self.settings = Settings((config, *configs), policy, self.buckets)
        self.eos = target.eos_token_ids
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
        self._prefill = Prefill(self.target, self.draft, self.table.req_to_token, widest)
        self._recorder = Recorder()
        self._decoders: dict[SpecConfig, StepDecoder] = {}
        self._live: list[Live] = []
        self._ahead: _Flight | None = None
        self._landed_at = 0.0
        self._drawing: tuple[tuple[SamplingParams, ...], SamplingBatch] | None = None
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
                features=self._feature_width(), buckets=self.buckets, indices=self.indices,
                record=self._record and own, seams=self.seams, recorder=self._recorder,
                validate=self.validate, tbo=self.tbo,
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
                    if on_tokens:
                        on_tokens(order[id(result)], new)
        finally:
            self.clear()
        return results

    def clear(self) -> None:
        """Drop every running request."""
        if self._ahead is not None:
            self._ahead.pending.wait()
            self._ahead = None
        for live in self._live:
            self.table.free(live.row)
        self._live = []

    def add(self, requests: Sequence[Request]) -> list[Generation]:
        """Run prompts and draw their first tokens; prefixes of running requests are shared."""
        for request in requests:
            self._check(request)
        if any(request.sampling.temperature for request in requests):
            for config in self.settings.configs:
                self.decoder(config).capture(sampled=True)
        results = [Generation(started_at=time.perf_counter()) for _ in requests]
        waiting = list(zip(requests, results, strict=True))
        if self._ahead is not None:
            self._ahead = replace(self._ahead, launched_at=None)
        while waiting:
            wave: list[tuple[Request, Generation]] = []
            later: list[tuple[Request, Generation]] = []
            for item in waiting:
                (later if self._waits(item[0], wave) else wave).append(item)
            self._admit(wave)
            waiting = later
        return results

    def step(self, *, ahead: bool = False) -> list[tuple[Generation, list[int]]]:
        """Advance every running request; returns what each of them gained.

        Parameters
        ----------
        ahead : bool
            Launch the next step before waiting for this one, where every request is sure to have
            room for both: the device then does not wait for the host. What requests gain is the
            same; one that turns out to have ended rides along in the step that was launched.
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
            self._live = [live for live in self._live if not live.result.finish_reason]

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

    def _launch(self, config: SpecConfig, group: list[Live], in_flight: int) -> _Flight:
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
        return _Flight(config, group, pending, began)

    def _launch_next(self, flight: _Flight) -> _Flight | None:
        """Launch the step after the one in flight, unless a request may lack room for it."""
        going = [live for live in self._live if live.goes_on]
        riding = set(flight.group)
        if not going or self._plans_on_host or not riding.issuperset(going):
            return None
        gain = flight.config.num_steps + 1
        rooms = [self.config.max_context_len - gain - live.length for live in going]
        config = self.settings.choose(len(going), max(rooms))
        return self._launch(config, going, gain) if config.reserve_len <= min(rooms) else None

    def _collect(self, flight: _Flight) -> list[tuple[Generation, list[int]]]:
        """Hand out a step's tokens; requests that had ended before it get none."""
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

    def _sampling(self, requests: Sequence[Request]) -> SamplingBatch:
        """Return the requests' parameters; a batch that stays the same is not sent again."""
        params = tuple(request.sampling for request in requests)
        if self._drawing is None or self._drawing[0] != params:
            self._drawing = params, SamplingBatch.of(params, self._device)
        return self._drawing[1]

    def _take(self, live: Live, tokens: list[int]) -> list[int]:
        """Append tokens up to whatever ends the request; returns those kept."""
        request, result = live.request, live.result
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            result.tokens.append(token)
            if token in self.eos and not request.ignore_eos:
                result.finish_reason = "eos"
            elif request.stop and self._stopped(request, result):
                result.finish_reason = "stop"
            elif len(result.tokens) >= request.max_new_tokens:
                result.finish_reason = "length"
            if result.finish_reason:
                break
        if not result.finish_reason and live.length >= self.config.max_context_len:
            result.finish_reason = "context"
        if result.finish_reason:
            result.finished_at = time.perf_counter()
            self.table.free(live.row)
        return kept

    def _stopped(self, request: Request, result: Generation) -> bool:
        assert self.detokenize is not None
        text = self.detokenize(result.tokens)
        return any(stop in text for stop in request.stop)

    def _check(self, request: Request) -> None:
        limit = self.config.max_context_len
        if not request.prompt:
            raise ValueError("the prompt is empty")
        if len(request.prompt) > limit:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens, the context holds {limit}"
            )
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if request.stop and self.detokenize is None:
            raise ValueError("stop strings need detokenize")

    def _waits(self, request: Request, wave: Sequence[tuple[Request, Generation]]) -> bool:
        """Whether a request of the wave will hold more of this prompt than a running one does."""
        shareable = max((_common(request.prompt, first.prompt) for first, _ in wave), default=0)
        return self._shared(request.prompt, shareable) > self._donor(request.prompt)[1]

    def _shared(self, prompt: Sequence[int], common: int) -> int:
        """Return how many tokens can be shared given a common prefix.

        The draft model's KV at a position depends on the next token too, so the last common
        token is not shared; and the prompt's last token must be run for its logits.
        """
        page = self.config.page_size
        return (min(common, len(prompt)) - 1) // page * page if common else 0

    def _donor(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the row that shares most of the prompt, and how many tokens."""
        best = (0, 0)
        for live in self._live:
            common = min(_common(prompt, live.text), live.length + 1)
            shared = self._shared(prompt, common)
            if shared > best[1]:
                best = (live.row, shared)
        return best

    def _admit(self, wave: Sequence[tuple[Request, Generation]]) -> None:
        prompts: list[Prompt] = []
        try:
            for request, _ in wave:
                donor, shared = self._donor(request.prompt)
                row = self.table.allocate(share=donor, share_len=shared)
                prompts.append(Prompt(row, request.prompt, shared))
            self.table.reserve([p.row for p in prompts], [len(p.tokens) for p in prompts])
            sampling = self._sampling([request for request, _ in wave])
            out = self._prefill.run(prompts, sampling)
            lens = torch.tensor([len(p.tokens) for p in prompts], dtype=torch.int32)
            rows = torch.tensor([p.row for p in prompts])
            self.states.admit(
                rows.to(self._device), lens.to(self._device), out.bonus_tokens, out.state, sampling
            )
            first = out.bonus_tokens.tolist()
        except Exception:
            for prompt in prompts:
                self.table.free(prompt.row)
            raise
        for at, ((request, result), prompt) in enumerate(zip(wave, prompts, strict=True)):
            length = len(request.prompt)
            self.table.commit(prompt.row, length)
            live = Live(request, result, prompt.row, length)
            result.first_token_at = time.perf_counter()
            self._take(live, [first[at]])
            if not result.finish_reason:
                self._live.append(live)

    def _seams(self) -> Seams:
        return "three" if self._plans_on_host or self.validate == "debug" else "one"

    @property
    def _plans_on_host(self) -> bool:
        slots = (self.target, self.draft)
        return any(slot is not None and slot.backend.host_plan for slot in slots)

    @property
    def _device(self) -> torch.device:
        return self.table.req_to_token.device

    def _feature_width(self) -> int:
        if self.draft is None:
            return 0
        return self.draft.model.feature_size


def _buckets(largest: int) -> list[int]:
    sizes = [1 << bit for bit in range(largest.bit_length()) if 1 << bit < largest]
    return [*sizes, largest]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
