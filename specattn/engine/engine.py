"""An engine decodes a batch of requests, from prompts to tokens."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Unpack, cast

from specattn.cuda_graph.recorder import Recorder
from specattn.engine.admission import Admission
from specattn.engine.configs import SpeculativeConfigs
from specattn.engine.decoders import Decoders, rests_of
from specattn.engine.detokenizer import add_texts, end_ids, text_functions
from specattn.engine.flight import Flight
from specattn.engine.intake import take
from specattn.engine.metrics import Totals
from specattn.engine.prompts import prompts_of
from specattn.engine.ranks import agree, ranks_of
from specattn.engine.request import Request, RequestOutput
from specattn.engine.scheduler import Scheduler
from specattn.speculative.proposers.drafts import draft_of
from specattn.speculative.sampling.logits_processor import as_processors
from specattn.speculative.step.level import Level
from specattn.speculative.step.setup import StepSetup
from specattn.speculative.step.validation import check_target_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from specattn.backends.base import BackendFactory
    from specattn.cache.slot_table import SlotTable
    from specattn.config import SpecConfig
    from specattn.cuda_graph import GraphReport
    from specattn.engine.detokenizer import Tokenizer
    from specattn.engine.flight import Gain
    from specattn.engine.metrics import EngineMetrics
    from specattn.engine.policy import Policy
    from specattn.engine.request import RunningRequest
    from specattn.speculative.model import ModelSlot, TargetModel
    from specattn.speculative.proposers.drafts import Draft
    from specattn.speculative.sampling.logits_processor import LogitsProcessor
    from specattn.speculative.step.decoder import StepDecoder
    from specattn.speculative.step.setup import CudagraphMode, EngineKeywords, Scales


class Engine:
    """Decodes requests with one target, optionally one draft model, and speculative configs.

    Every request steps with the config that was chosen, if its context has room for that, whatever
    the rest of the batch does; requests finish and give their slots back independently.

    Near its context's end, a request takes the deepest of the engine's configs that fits, and
    plain decoding where none does. If that is not one of the configs, its decoder is made when the
    first request comes to it: once, and captured for the largest bucket alone. So the last
    ``reserve_len - 1`` tokens of a context come one by one, unless ``configs`` hold a smaller tree.

    One thread at a time calls an engine; `specattn.engine.serving.AsyncEngine` takes the requests
    of many. After an interrupt (`KeyboardInterrupt`), the books of the engine are right, or its
    next call is refused until `clear` was called.

    Parameters
    ----------
    target : TargetModel
        The model whose tokens are wanted.
    draft : DraftModel, BlockDraftModel or ProposerFactory, optional
        What proposes tokens; needed unless ``config.num_steps`` is 0.
    config : SpecConfig
        Tree width, depth, page size and limits.
    configs : sequence of SpecConfig
        More configs that steps may take; they differ from ``config`` in the tree alone. A
        `GoodputPolicy` chooses from plain decoding, too. See docs/adaptive.md.
    policy : Policy, optional
        Chooses every step's config, and so needs ``configs``;
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
    processed : bool
        The same for requests with logits processors, or that want log-probabilities; the states
        that these need are allocated then, too (`ProcessorStates`).
    processors : sequence of LogitsProcessor
        Logits processors of your own, for requests that name them in ``SamplingParams.processors``;
        in the order in which they change logits, after the built-in ones.
    deterministic : bool
        Whether attention gives every token the same bits in any batch and mode; see
        `specattn.config.AttnConfig`.
    prompt_chunk : int
        Most tokens of prompts that run at once, between two steps; longer prompts run in parts.
    prompt_buckets : sequence of int, optional
        Tokens of chunks of prompts that are captured; a chunk takes the smallest bucket that holds
        it, and longer ones run eagerly. Without any all do. By default
        `specattn.speculative.prompts.runner.BUCKETS` where graphs are recorded. They need a
        backend that plans on the device, and a proposer with `Proposer.bind_prompt`, as all here
        have it.
    tokenizer : Tokenizer, optional
        The target's, as transformers loads it: prompts may be texts then, and its end-of-text and
        end-of-turn tokens end a text as the target's own do.
    detokenize : callable, optional
        Maps token ids to text, for outputs and stop strings; by default the ``tokenizer`` does,
        without special tokens.
    kv_dtype : torch.dtype, optional
        What the pools store keys and values in, if not the models' dtype: float8 (e4m3).
    kv_scales : tuple, optional
        Of float8 pools: the target's, then the draft's, each one `KVScales` per layer, or None
        for 1.
    **options
        Others of `StepOptions`: ``indices``, ``validate``, ``tbo``, ``accept``, ``capturing``.

    Raises
    ------
    UnsupportedError
        If the backend cannot serve the models here.
    ModelError
        If a model computes contexts of ``max_context_len`` in another way than shorter ones.
    ValueError
        If ``target`` or ``draft`` is no model, such as a path or a class, ``config`` no
        `SpecConfig`, or one of ``processors`` no `LogitsProcessor`. If ``num_slots`` or ``buckets``
        are not those of a `SlotTable` and a `GraphRunner`, ``kv_dtype`` and ``kv_scales`` not those
        of a `KVPool`, ``configs`` differ in more than the tree, or there is a ``policy`` and
        nothing in ``configs`` but ``config``. Of every call: if another thread's has not returned,
        or an interrupted one asks for `clear`.
    RankError
        If the target's weights are sharded, and its ranks make different engines. Of `generate` and
        `add`: if they are given different requests, or requests gained different tokens.
    CaptureError
        If a capture fails that is made now. What is captured later, while requests run, runs
        eagerly if that fails, and a warning is logged; so it is where memory runs out.
    """

    # whether a call changes the books; an interrupt that nothing undid leaves it so
    _changing = False

    def __init__(  # noqa: PLR0913 - a constructor
        self,
        target: TargetModel,
        draft: Draft | None,
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
        processed: bool = False,
        processors: Sequence[LogitsProcessor] = (),
        deterministic: bool = False,
        prompt_chunk: int = 4096,
        prompt_buckets: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
        detokenize: Callable[[list[int]], str] | None = None,
        kv_dtype: torch.dtype | None = None,
        kv_scales: tuple[Scales, Scales] = (None, None),
        **options: Unpack[EngineKeywords],
    ) -> None:
        check_target_model(target)
        drafts, self.ranks = draft_of(draft), ranks_of(target)
        self.configs = SpeculativeConfigs.of(
            config, configs, policy, buckets, draft_len=drafts.draft_len, ranks=self.ranks
        )
        self.config, self.buckets = self.configs.all[0], list(self.configs.buckets)
        self.processors = own = as_processors(processors)
        self.encode, self.detokenize = text_functions(tokenizer, detokenize)
        setup = StepSetup.over(
            target,
            drafts if self.configs.most_steps else None,
            self.configs.widest,
            num_slots=num_slots,
            backend=backend,
            deterministic=deterministic,
            kv_dtype=kv_dtype,
            kv_scales=kv_scales,
            record=graphs,
            cudagraph=cudagraph,
            recorder=Recorder(),
            **options,
        )
        self.target, self.proposer = setup.target, setup.proposer
        rests = rests_of(self.proposer, self.configs)
        self.table, self.states = cast("SlotTable", setup.table), setup.states
        self.eos_token_ids = end_ids(self.target.model, tokenizer)
        slots, levels = self.target.num_slots, Level.each(sampled=sampled, processed=processed)
        sizes = self.configs.all, self.buckets, slots, kv_dtype, self.target.backend.name
        asked = [one.name for one in own], sampled, processed, deterministic, draft is not None
        settings = sizes, asked, (prompt_chunk, prompt_buckets), setup.options.settings
        agree(self.ranks, "the settings of an Engine", settings)
        self._decoders = Decoders(setup, self.configs.all, self.buckets, own, levels, rests)
        self.scheduler = Scheduler(
            self.table,
            self.configs,
            self.eos_token_ids,
            self.detokenize,
            self.proposer.read_ahead,
            self._decoders.blocked,
            shares_prefixes=all(one.shares_prefixes for one in setup.slots),
        )
        self._totals = Totals(self.configs.most_steps)
        self._flight = Flight(self._decoders, self.scheduler, self.configs, self._totals)
        self._admission = Admission(
            self._change,
            self._decoders,
            self.scheduler,
            self._flight,
            self._totals,
            prompts_of(setup, prompt_chunk, prompt_buckets, resting=rests and rests[1]),
        )
        self._admission.capture(*levels)
        self._lock = RLock()

    @property
    def draft(self) -> ModelSlot[Any] | None:
        """The proposer's model, pool and attention, if it has any."""
        return self.proposer.slot

    @property
    def running(self) -> list[RunningRequest]:
        """The requests that have a row and have not ended."""
        return self.scheduler.running

    @property
    def num_running(self) -> int:
        """The number of requests that have a row and have not ended."""
        return len(self.scheduler.running)

    def generate(
        self,
        requests: Sequence[Request | str],
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[RequestOutput]:
        """Decode requests to their ends.

        Requests that run already are decoded to their ends, too. A request waits for a row, and
        for slots in which all that run can become as long as they may; one that would not fit even
        alone runs by itself, for it may end before.

        Parameters
        ----------
        requests : sequence of Request or str
            Any number; at most ``max_num_reqs`` run at once. They get rows in their order. A text
            is a `Request` to continue it.
        on_tokens : callable, optional
            ``on_tokens(index, new_tokens)`` after a request's first token and after every step in
            which it took part: on the thread of this call, with the tokens up to the request's end.
            An end-of-text token is among them, and the list may be empty. It may call `drop` and
            `add`; what it raises ends the call.

        Returns
        -------
        list of RequestOutput
            One per request, in their order; with its text, where the engine can detokenize.

        Raises
        ------
        ValueError
            If a prompt is empty, longer than the context or not of the vocabulary, if ``on_tokens``
            is no callable, or if that of another `generate` calls this; nothing has run then.
        CapacityError
            If the pools are too small for a request alone, or for those that ran before together;
            every running request is dropped then.
        """
        if on_tokens is not None and not callable(on_tokens):
            raise ValueError(
                f"on_tokens must be callable, got {on_tokens!r}; a Request has its own sampling"
            )
        checked = take(requests, self)
        with self._one_thread():
            if self.scheduler.waiting:
                raise ValueError(
                    "requests of another generate wait: it has not returned, or was interrupted; "
                    "call clear()"
                )
            try:
                results = self._to_their_ends(checked, on_tokens)
            finally:
                self.clear()
        agree(self.ranks, "the tokens of requests", [one.tokens for one in results])
        if self.detokenize is not None:
            add_texts(checked, results, self.detokenize)
        return results

    def _to_their_ends(
        self, requests: Sequence[Request], on_tokens: Callable[[int, list[int]], None] | None
    ) -> list[RequestOutput]:
        """Decode checked requests, and those that run."""
        scheduler = self.scheduler
        results = scheduler.wait(requests)
        order = {id(result): at for at, result in enumerate(results)}
        while scheduler.waiting or scheduler.running:
            for result in self._admission.admit_waiting():
                if on_tokens:
                    on_tokens(order[id(result)], list(result.tokens))
            for result, new in self.step(ahead=True):
                if on_tokens and id(result) in order:
                    on_tokens(order[id(result)], new)
        return results

    def add(self, requests: Sequence[Request | str]) -> list[RequestOutput]:
        """Run the prompts of requests and draw their first tokens.

        A request shares the prefix that it has in common with a running one.

        Parameters
        ----------
        requests : sequence of Request or str
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
            If there are more requests than free rows, or slots run out. Whatever is raised, none of
            the requests runs then, and those that ran before still do, unless an interrupt asks for
            `clear`.
        """
        checked = take(requests, self)
        items = [(request, RequestOutput(seed=request.sampling.seed)) for request in checked]
        return self._admission.admit(items, whole=False, wait=True)

    def step(self, *, ahead: bool = False) -> list[Gain]:
        """Advance the running requests; returns what each of them gained.

        Requests whose contexts lack room for the config's step take another one, as a group of
        their own. A group for which slots run out sits the step out and loses nothing. Groups of
        smaller configs get slots first: their requests end soonest, and the slots are the others'
        then, unless `add` takes them.

        Parameters
        ----------
        ahead : bool
            Launch the next step before waiting for this one, where every request is sure to have
            room and slots for both: the device then does not wait for the host. What requests
            gain is the same; one that turns out to have ended rides along in the step that was
            launched, and its row and slots may be given to others at once.

        Returns
        -------
        list of (RequestOutput, list of int)
            Each request that took part and its new tokens, cut at its end. A request that ended
            has its ``finish_reason`` and is not in the next step's. Of requests that `generate` has
            begun, first tokens come by themselves.

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
        with self._change():
            try:
                if self._flight.idle:
                    self._flight.launch(self.scheduler.schedule())
                if prompts := self._flight.take_prompts():
                    return self._collect(partial(self._flight.first_tokens, prompts))
                steps = self._flight.take(ahead=ahead)
                return self._collect(partial(self._flight.collect, steps))
            except Exception:
                # the next step hands out what was launched, before anything else can fail
                self._flight.keep()
                raise
            except BaseException:
                # an interrupt may come when a step is under way and not noted
                self._drop_all(table=True)
                raise

    def drop(self, result: RequestOutput) -> None:
        """End a request at once, be it running or waiting.

        Nobody wants its text any more, or other requests need its slots. Its ``finish_reason`` is
        ``"dropped"``, it keeps the tokens that it has, and its row and slots are free. A step that
        is in flight already gains nothing for it. Other requests do not notice, those that share
        its prefix included.

        Parameters
        ----------
        result : RequestOutput
            What `add` returned for the request.

        Raises
        ------
        ValueError
            If it is not that of a running request of this engine: one that has ended, too.
        """
        with self._change():
            self.scheduler.drop(result)
            self._totals.dropped(1)

    def clear(self) -> None:
        """Drop every running request, as `drop` does, and forget those that wait.

        Whatever an interrupt has left, the engine serves new requests then: after one, every row of
        the table is free.
        """
        with self._one_thread():
            self._forget()
            # an interrupt may have come between taking the lock and noting it
            self._lock = RLock()

    def _forget(self) -> None:
        """Drop every request, whatever an error or an interrupt has left."""
        interrupted, self._changing = self._changing or self.table.changing, True
        self._drop_all(table=interrupted)

    def decoder(self, config: SpecConfig) -> StepDecoder:
        """Return the decoder of a config of the engine.

        The config may be plain decoding, too. Plain decoding, where it is no config of the engine,
        is for requests whose contexts have room for nothing else. Its decoder is made when it is
        first asked for, without a draft model, since no step of these requests drafts again.

        Raises
        ------
        ValueError
            If the config is neither.
        """
        return self._decoders[config]

    @property
    def decoders(self) -> tuple[StepDecoder, ...]:
        """The configs' decoders, then any for plain decoding without the draft."""
        return self._decoders.each

    def graphs(self) -> dict[SpecConfig, tuple[GraphReport, ...]]:
        """Return what capturing took, by the config of each decoder, and bucket.

        Chunks of prompts are the engine's own ``config``'s, behind its steps. Their parts are
        ``prompts``, ``first tokens`` and ``prompts' drafts``, and their buckets tokens.
        """
        found = self._decoders.report()
        return found | {self.config: (*found[self.config], *self._admission.report())}

    def metrics(self) -> EngineMetrics:
        """Return numbers for monitoring: requests, slots, tokens, and what drafts gained.

        Nothing waits, on the host or for the device. Any thread may ask at any time. What it reads
        while a step ends may have some numbers of before and some of after.
        """
        return self._totals.metrics(self.scheduler)

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        """Lock the engine for this thread, or raise a ValueError at once."""
        lock = self._lock
        if not lock.acquire(blocking=False):
            raise ValueError(
                "an Engine must be called from one thread at a time: "
                "a call of another thread has not returned"
            )
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _change(self) -> Iterator[Callable[[], None]]:
        """Note that the books change; the note outlives an interrupt.

        What is yielded takes the note back, for who undoes all.
        """
        with self._one_thread():
            if self._changing:
                raise ValueError(
                    "a call of this Engine was interrupted, or has not returned: call clear()"
                )
            self._changing = True
            try:
                yield self._put_right
            except Exception:
                self._changing = self.table.changing
                raise
            self._changing = False

    def _put_right(self) -> None:
        self._changing = False

    def _collect(self, gained: Callable[[], list[Gain]]) -> list[Gain]:
        """Hand out what was gained; requests that had ended before get nothing."""
        try:
            return gained()
        except Exception:
            # nobody can go on without tokens that were lost
            self._drop_all(table=False)
            raise
        finally:
            self.scheduler.remove_ended()

    def _drop_all(self, *, table: bool) -> None:
        """Drop every request, and wait for what is in flight; see `Scheduler.clear`."""
        self._flight.steps, self._flight.prompts = [], []
        self._totals.dropped(self.scheduler.clear(table=table))
        # a wait that was interrupted has left its step in flight, and may be again
        self._decoders.settle()
        self._admission.clear()
        self._changing = False
