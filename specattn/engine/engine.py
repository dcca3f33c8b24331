"""A decode loop for a batch of requests: prompts in, tokens out, slots given back."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.engine.admission import Admission, check_request
from specattn.engine.configs import Settings, powers_of_two
from specattn.engine.decoders import EngineDecoders
from specattn.engine.request import Request, RequestOutput
from specattn.engine.scheduler import Running
from specattn.engine.waiting import Waiting
from specattn.speculative.decoder import ModelSlot
from specattn.speculative.prefill import Prefill
from specattn.speculative.states import RequestStates, StateDims

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from specattn.backends.base import BackendFactory
    from specattn.backends.multi_step import Indices
    from specattn.config import KVScales, SpecConfig
    from specattn.cuda_graph import GraphReport
    from specattn.engine.policy import Policy
    from specattn.engine.request import RunningRequest
    from specattn.speculative.model import DraftModel, TargetModel
    from specattn.speculative.step_decoder import CudagraphMode, StepDecoder
    from specattn.speculative.validation import Validate

    Scales = Sequence[KVScales] | None

log = logging.getLogger(__name__)


class Engine:
    """Decodes requests with one target, optionally one draft model, and speculation settings.

    Every request steps with the setting that was chosen, if its context has room for that, whatever
    the rest of the batch does; requests finish and give their slots back independently.

    Near its context's end, a request takes the deepest of the engine's settings that fits, and
    plain decoding where none does. If that is not one of the settings, its decoder is made when the
    first request comes to it: once, and captured for the largest bucket alone. So the last
    ``reserve_len - 1`` tokens of a context come one by one, unless ``configs`` hold a smaller tree.

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
        Chooses every step's setting, and so needs ``configs``;
        `specattn.engine.policy.GoodputPolicy` by default.
    backend : str or BackendFactory
        Attention backend, by name (``"auto"`` picks one) or itself; see `choose_backend`.
    num_slots : int, optional
        KV slots of the pools; by default every request can reach ``max_context_len``.
    buckets : sequence of int, optional
        Batch sizes to capture; powers of two up to ``max_num_reqs`` by default.
    graphs : bool
        Whether to record CUDA graphs.
    cudagraph : {"full", "piecewise"}, optional
        How a step is recorded, see `StepDecoder`; by default in one graph, and in three where a
        backend plans on the host.
    sampled : bool
        Whether to capture steps for requests that draw, too; otherwise the first such request to be
        added, and all that run then, wait for that.
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
        If ``num_slots`` or ``buckets`` are not those of a `SlotTable` and a `GraphRunner`,
        ``kv_dtype`` and ``kv_scales`` not those of a `KVPool`, ``configs`` differ in more than the
        tree, or there is a ``policy`` and no setting in ``configs`` but ``config``.
    CaptureError
        If a capture fails that is made now. What is captured later, while requests run, runs
        eagerly if that fails, and a warning is logged; so it is where memory runs out.
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
        cudagraph: CudagraphMode | None = None,
        sampled: bool = False,
        indices: Indices = "table",
        validate: Validate = "off",
        deterministic: bool = False,
        tbo: bool = False,
        detokenize: Callable[[list[int]], str] | None = None,
        kv_dtype: torch.dtype | None = None,
        kv_scales: tuple[Scales, Scales] = (None, None),
    ) -> None:
        self.config, self._detokenize = config, detokenize
        self.buckets = powers_of_two(config.max_num_reqs) if buckets is None else list(buckets)
        self.settings = Settings((config, *configs), policy, self.buckets)
        if config.max_context_len > target.max_context_len:
            log.warning(
                "max_context_len %d is above the target's %d: positions from there on are none it "
                "was trained on, and to fused models they are all the same",
                config.max_context_len,
                target.max_context_len,
            )
        device = target.device
        pages = -(-config.max_context_len // config.page_size) * config.max_num_reqs + 1
        slots = pages * config.page_size if num_slots is None else num_slots
        self.table = SlotTable(
            max_num_reqs=config.max_num_reqs,
            max_context_len=config.max_context_len,
            num_slots=slots,
            page_size=config.page_size,
            device=device,
        )
        pool = partial(KVPool, num_slots=slots, device=device, kv_dtype=kv_dtype)
        self.target = ModelSlot.of(
            target, pool(target.layers, scales=kv_scales[0]), backend, deterministic=deterministic
        )
        self.draft: ModelSlot[DraftModel] | None = None
        if self.settings.speculative and draft is not None:
            self.draft = ModelSlot.of(
                draft,
                pool(draft.layers, scales=kv_scales[1]),
                backend,
                deterministic=deterministic,
            )
        for slot in (self.target, self.draft):
            if slot is not None:
                slot.backend.check_pages(config.page_size)
        draft_model = self.draft.model if self.draft else None
        widest = self.settings.widest
        dims = StateDims.of(draft_model, widest.topk, draft_sampling=config.draft_sampling)
        self.states = RequestStates.alloc(config.max_num_reqs + 1, dims, device)
        self._admission = Admission(
            self.table, self.states, config.page_size, self.settings.reserve_len
        )
        self._prefill = Prefill(self.target, self.draft, self.table.req_to_token, widest)
        self._decoders = EngineDecoders(
            self.target,
            self.draft,
            self.settings.configs,
            self.table,
            self.states,
            buckets=self.buckets,
            indices=indices,
            record=graphs,
            cudagraph=cudagraph,
            sampled=sampled,
            validate=validate,
            tbo=tbo,
        )
        self._running = Running(
            self.table, self._decoders, self.settings, target.eos_token_ids, detokenize
        )

    def decoder(self, config: SpecConfig) -> StepDecoder:
        """Return the decoder of one of the engine's settings, or of plain decoding.

        Raises
        ------
        ValueError
            If it is neither.
        """
        return self._decoders.of(config)

    @property
    def decoders(self) -> tuple[StepDecoder, ...]:
        """Those of the engine's settings, then that of plain decoding if it was asked for."""
        return self._decoders.made

    def graphs(self) -> dict[SpecConfig, tuple[GraphReport, ...]]:
        """Return what capturing took, bucket by bucket: for each of the engine's settings.

        And of plain decoding, if a request that came near its context's end has asked for it.
        """
        return {decoder.config: decoder.report() for decoder in self.decoders}

    @property
    def num_live(self) -> int:
        """Requests not finished yet."""
        return len(self._live)

    @property
    def _live(self) -> list[RunningRequest]:
        return self._running.live

    def generate(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[RequestOutput]:
        """Decode requests to their ends.

        Parameters
        ----------
        requests : sequence of Request
            Any number; at most ``max_num_reqs`` run at once, and no more than there are slots for
            if all of them become as long as they may. The others wait.
        on_tokens : callable, optional
            ``on_tokens(index, new_tokens)`` after the first token and after every step.

        Raises
        ------
        ValueError
            If a prompt is empty, longer than the context or not of the vocabulary; nothing has
            run then.
        CapacityError
            If the pools are too small for a request alone, or for those that ran before together;
            every running request is dropped then.
        """
        self._check(requests)
        results: list[RequestOutput] = []
        order: dict[int, int] = {}
        waiting = Waiting(requests, self.config.max_num_reqs, self._running, self._add)
        try:
            while waiting or self._live:
                for result in waiting.join():
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
        """Drop every running request, as `drop` does."""
        self._running.clear()

    def drop(self, result: RequestOutput) -> None:
        """End a running request at once: nobody wants its text, or others need its slots.

        Its ``finish_reason`` is ``"dropped"``, it keeps the tokens that it has, and its row and
        slots are free. A step that is in flight already gains nothing for it. Other requests do
        not notice, those that share its prefix included.

        Parameters
        ----------
        result : RequestOutput
            What `add` returned for the request.

        Raises
        ------
        ValueError
            If it is not that of a running request of this engine: one that has ended, too.
        """
        self._running.drop(result)

    def add(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Run prompts and draw their first tokens; prefixes of running requests are shared.

        Parameters
        ----------
        requests : sequence of Request
            At most as many as rows are free (`SlotTable.num_free_rows`).

        Returns
        -------
        list of RequestOutput
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
        self._check(requests)
        return self._add(requests, whole=False)

    def _add(self, requests: Sequence[Request], *, whole: bool) -> list[RequestOutput]:
        if any(request.sampling.temperature for request in requests):
            self._decoders.capture_sampled()
        results = [RequestOutput(started_at=time.perf_counter()) for _ in requests]
        waiting = list(zip(requests, results, strict=True))
        self._running.untimed()
        before = list(self._live)
        try:
            while waiting:
                # prompts that run now, and those that wait to share them
                wave, waiting = self._admission.wave(waiting, self._live)
                self._running.join(
                    self._admission.run(self._prefill, wave, self._live, whole=whole)
                )
        except BaseException:
            self._running.keep(before)
            raise
        return results

    def _check(self, requests: Sequence[Request]) -> None:
        limit, vocab_size = self.config.max_context_len, self.target.model.vocab_size
        for request in requests:
            check_request(request, limit, vocab_size, self._detokenize)

    def step(self, *, ahead: bool = False) -> list[tuple[RequestOutput, list[int]]]:
        """Advance the running requests; returns what each of them gained.

        Requests whose contexts lack room for the setting's step take another one, as a group of
        their own. A group for which slots run out sits the step out and loses nothing. Groups of
        smaller settings get slots first: their requests end soonest, and the slots are the others'
        then, unless `add` takes them.

        Parameters
        ----------
        ahead : bool
            Launch the next step before waiting for this one, where every request is sure to have
            room and slots for both: the device then does not wait for the host. What requests
            gain is the same; one that turns out to have ended rides along in the step that was
            launched.

        Returns
        -------
        list of (RequestOutput, list of int)
            Each request that took part and its new tokens, cut at its end. A request that ended
            has its ``finish_reason`` and is not in the next step's.

        Raises
        ------
        CapacityError
            If no group has slots; the step can be made again when others have ended, by `drop` or
            `clear` if nothing else ends them.
        Exception
            What the launch of a group raises; the other groups are launched first. No tokens are
            lost: those of what was launched are the next step's. And what ``detokenize`` raises: a
            step's tokens are lost then, so all requests are dropped, as by an interrupt.
        """
        return self._running.step(ahead=ahead)
