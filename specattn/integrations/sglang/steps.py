"""Whole steps over SGLang's models, pools and request table."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.layers.dp_attention import set_dp_buffer_len, set_is_extend_in_batch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import get_alloc_reserve_per_decode
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.runner import get_batch_sizes_to_capture
from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

from specattn.buffers import send
from specattn.cache.external import ExternalTable
from specattn.engine.configs import powers_of_two
from specattn.errors import UnsupportedError
from specattn.integrations.sglang import simulated
from specattn.integrations.sglang.algorithm import TREES_VARIABLE, tree_config
from specattn.integrations.sglang.layers import (
    BLOCK_KINDS,
    HYBRID,
    KINDS,
    backend_name,
    refusals,
    state_refusals,
)
from specattn.integrations.sglang.memory import HybridMemory, memory_of
from specattn.integrations.sglang.modules import step_models
from specattn.integrations.sglang.names import ALGORITHM, OLD, release
from specattn.integrations.sglang.processed import (
    Processed,
    TreeGrammar,
    logprob_counts,
    write_logprobs,
)
from specattn.integrations.sglang.requests import PROCESSED_VARIABLE, asked
from specattn.integrations.sglang.weights import Weights
from specattn.speculative.model import ModelSlot
from specattn.speculative.sampling.processors import ProcessorStates
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.level import Level
from specattn.speculative.step.setup import StepSetup
from specattn.speculative.step.verify import accept

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from specattn.config import SpecConfig
    from specattn.integrations.sglang.algorithm import Tree
    from specattn.integrations.sglang.blocks import BlockHead
    from specattn.speculative.sampling.params import SamplingBatch
    from specattn.speculative.step.decoder import PendingStep

log = logging.getLogger(__name__)

POOLS: tuple[str, ...] = ("MHATokenToKVPool", "MLATokenToKVPool")
if release() == OLD:
    POOLS = (*POOLS, HYBRID)
#: What the names of classes of heads have in them; other drafts are whole models.
HEADS = ("Eagle", "MTP", "NextN", "DFlash")
MIB = 2**20


def model_refusals(target: Any, draft: Any, *, blocks: bool = False) -> list[str]:
    """Say what of both models a step does not serve.

    Parameters
    ----------
    target, draft : ModelRunner
        SGLang's.
    blocks : bool
        Whether the draft is a DFlash head.
    """
    kinds = BLOCK_KINDS if blocks else KINDS
    found = [f"target: {reason}" for reason in refusals(target, POOLS)]
    found += [f"draft: {reason}" for reason in refusals(draft, POOLS, kinds)]
    found += [f"target: {reason}" for reason in state_refusals(target)]
    if target.model_config.is_multimodal:
        found.append("target: multimodal inputs")
    kind = type(draft.model).__name__
    if not any(word in kind for word in HEADS):
        found.append(
            f"draft: {kind} reads no states of the target, as EAGLE, MTP and DFlash heads do"
        )
    return found


class Steps:
    """Steps of all of SGLang's requests, by row of its table.

    Parameters
    ----------
    target, draft : ModelRunner
        SGLang's, with models, pools and the request table.
    trees : dict of int to tuple of int
        Steps, topk and nodes, by the least number of requests; the first serves the smallest
        batches, and needs the most slots.
    target_ids : Tensor or None
        ``[Vd]``, the target's token of every token of the head.
    blocks : BlockHead, optional
        Of a DFlash head.

    Raises
    ------
    UnsupportedError
        In one line, naming all that is not served.
    ValueError
        If no batch size is captured that a tree would serve.

    Attributes
    ----------
    decoders : list of StepDecoder
        What runs them, for ever larger batches.
    longest : int
        Tokens of prompt and answer that leave room for what SGLang reserves for steps, which is
        never less than a step writes.
    vocab_size : int
        The target's.
    grammars : bool
        Whether requests may have grammars; see `refuse`.
    processed : Processed or None
        Requests whose logits steps process; None if the environment wants no such steps.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        trees: Mapping[int, Tree],
        target_ids: torch.Tensor | None,
        blocks: BlockHead | None = None,
    ) -> None:
        if found := model_refusals(target, draft, blocks=blocks is not None):
            raise UnsupportedError(f"SGLang algorithm {ALGORITHM!r}", found)
        # 0 without CUDA
        began, free = time.perf_counter(), torch.cuda.memory_reserved()
        req_to_token, page = target.req_to_token_pool.req_to_token, target.page_size
        rows, width = req_to_token.shape
        sizes = {"max_context_len": width, "max_num_reqs": rows - 1, "page_size": page}
        block = None if blocks is None else blocks.block
        configs = [tree_config(tree, block, **sizes) for tree in trees.values()]
        for runner in (target, draft):
            Weights.of(runner.model)
        models = step_models(target, draft, target_ids, blocks)
        pools = memory_of(target), memory_of(draft)
        # SGLang has reserved slots for whatever it decodes
        reserved = torch.full_like(req_to_token[:, 0], width).contiguous()
        num_slots = pools[0].num_slots // page * page
        table = ExternalTable(req_to_token, reserved, num_slots=num_slots, page_size=page)
        records = _records(target)
        setup = StepSetup.over(
            ModelSlot.of(models[0], pools[0], backend_name()),
            ModelSlot.of(models[1], pools[1], backend_name()),
            configs[0],
            table=table,
            record=records,
            accept=simulated.asked() or accept,
            capturing=partial(_capturing, records),
        )
        self.states, self._memory, args = setup.states, pools[0], target.server_args
        self.grammars = True
        if isinstance(self._memory, HybridMemory):
            keeps = args.enable_mamba_extra_buffer()
            self.grammars = keeps or args.disable_radix_cache
            if keeps:
                places = target.req_to_token_pool.req_index_to_mamba_ping_pong_track_buffer_mapping
                self._memory.follow(self.states.seq_lens, args.mamba_track_interval, places)
        # SGLang writes that many columns past a text, whether or not a row has them
        self.longest = width - (get_alloc_reserve_per_decode() + page - 1)
        self.vocab_size, self.target_ids = models[0].vocab_size, target_ids
        states = None
        if os.environ.get(PROCESSED_VARIABLE, "1") != "0":
            states = ProcessorStates.alloc(rows, self.vocab_size, req_to_token.device)
        self.processed = None if states is None else Processed(states)
        levels = Level.each(sampled=True, processed=states is not None)
        sizes_of_trees = shared_out(_buckets(target, rows - 1, records), trees)

        def made(config: SpecConfig, sizes: list[int]) -> StepDecoder:
            one = replace(setup, config=config)
            return StepDecoder.of(one, buckets=sizes, levels=levels, processors=states)

        # Python's garbage stays where it is while graphs are captured
        with torch.no_grad(), freeze_gc(not records or target.server_args.enable_cudagraph_gc):
            self.decoders = list(map(made, configs, sizes_of_trees))
        self._records, self._constrains = records, False
        self._in_flight: deque[tuple[PendingStep, list[int | None], Any]] = deque()
        self._log(time.perf_counter() - began, torch.cuda.memory_reserved() - free)

    def admit(self, batch: Any, out: Any, sampling: SamplingBatch) -> None:
        """Write the rows of requests whose prompts SGLang has run.

        Of a prompt in pieces, each piece writes the row again.

        Parameters
        ----------
        batch : ScheduleBatch
            The prompts.
        out : GenerationBatchResult
            Their first tokens, and what the head proposes after them, if it has begun.
        sampling : SamplingBatch
            How the requests draw.
        """
        draft = out.next_draft_input
        self.states.admit(
            batch.req_pool_indices.long(),
            batch.seq_lens.to(torch.int32),
            out.next_token_ids.long(),
            {} if draft is None else self._drafting(draft),
            sampling,
        )

    def _drafting(self, draft: Any) -> dict[str, torch.Tensor]:
        """Return where the head goes on from, of SGLang's record of it."""
        tokens = draft.topk_index
        if self.target_ids is not None:
            tokens = self.target_ids[tokens]
        probs, kept = draft.topk_p.float(), self.states.drafting["hidden_states"].dtype
        return {
            "topk_probs": probs,
            "topk_tokens": tokens.long(),
            "hidden_states": draft.hidden_states.to(kept),
            "draft_probs": probs[:, :0],
        }

    def write_context(self, batch: Any, features: torch.Tensor) -> None:
        """Write what a DFlash head keeps of prompts, to their slots.

        Parameters
        ----------
        batch : ScheduleBatch
            The prompts.
        features : Tensor
            ``[T, F]``, the target's.
        """
        slot, slots = self.decoders[0].draft, batch.out_cache_loc.int()[None]
        assert slot is not None
        spans = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        places = torch.cat([torch.arange(begin, begin + count) for begin, count in spans])
        positions, states = send(places, slots.device), slot.model.combine(features)
        slot.model.write_context(states, positions, slot.backend.pool, slots)

    def launch(self, batch: Any) -> GenerationBatchResult:
        """Launch a step and return at once what it will write.

        Tokens and their numbers are the host's pinned memory, which the step itself writes.
        """
        rows = batch.req_pool_indices_cpu.tolist()
        if isinstance(self._memory, HybridMemory):
            self._memory.take_turns(rows, batch.reqs)
        processed = self.processed is not None and self.processed.among(rows)
        level = Level.GREEDY if batch.sampling_info.is_all_greedy else Level.SAMPLED
        level = Level.PROCESSED if processed else level
        grammars = self._grammars(batch) if processed and batch.has_grammar else None
        step = self._decoder(len(rows)).step_async(rows, level=level, grammars=grammars)
        packed, output = step.packed, LogitsProcessorOutput(next_token_logits=None)
        scored = logprob_counts(batch.reqs, processed=processed) if batch.return_logprob else []
        self._in_flight.append((step, scored, output))
        return GenerationBatchResult(
            logits_output=output,
            # the numbers of a request follow each other: a count, then its tokens
            next_token_ids=packed.view(-1)[1:],
            accept_lens=packed[:, 0],
            speculative_num_draft_tokens=packed.shape[1],
            can_run_cuda_graph=self._records and len(rows) <= _most(self.decoders[-1]),
        )

    def _decoder(self, requests: int) -> StepDecoder:
        """Return what runs so many requests."""
        return next((one for one in self.decoders if requests <= _most(one)), self.decoders[-1])

    def _grammars(self, batch: Any) -> list[TreeGrammar | None] | None:
        """Return the requests' grammars, if any; capture steps for them at first.

        SGLang has read all steps before it launches one of such a batch, so that its grammars know
        the whole texts, and a capture disturbs nothing.
        """
        reqs = [None if asked(req, processed=True) else req.grammar for req in batch.reqs]
        if not any(reqs):
            return None
        assert self.processed is not None
        assert not self._in_flight
        if not self._constrains:
            log.info("%s: capturing steps for requests with a grammar", ALGORITHM)
            for decoder in self.decoders:
                decoder.capture(Level.CONSTRAINED)
            self._constrains = True
        return [None if grammar is None else TreeGrammar(grammar) for grammar in reqs]

    def read(self) -> None:
        """Note that SGLang has read the oldest step, and may read log-probabilities."""
        step, scored, output = self._in_flight.popleft()
        step.wait()
        if scored:
            write_logprobs(step, scored, output)

    def _log(self, seconds: float, nbytes: int) -> None:
        steps = " and ".join(
            f"{one.num_steps}-{one.proposals}-{one.num_draft_tokens} of up to {most} requests"
            for one, most in ((decoder.config, _most(decoder)) for decoder in self.decoders)
        )
        graphs = sum(report.recorded for one in self.decoders for report in one.report())
        sizes = sum(len(one.runner.buckets) for one in self.decoders)
        attention = self.decoders[0].target.backend.name
        log.info(
            f"{ALGORITHM}: steps {steps}, attention {attention}; {graphs} "
            f"graphs of {sizes} batch sizes in {seconds:.1f} s, {nbytes / MIB:.0f} MiB"
        )


def shared_out(buckets: Sequence[int], trees: Iterable[int]) -> list[list[int]]:
    """Share batch sizes out among trees of least numbers of requests.

    Raises
    ------
    ValueError
        If a tree gets none.
    """
    least = list(trees)
    found = [
        [size for size in buckets if begin <= size < end]
        for begin, end in zip([0, *least[1:]], [*least[1:], math.inf], strict=True)
    ]
    if not all(found):
        raise ValueError(
            f"{TREES_VARIABLE} must leave every tree a batch size that is captured, got trees from "
            f"{', '.join(map(str, least[1:]))} requests on, and batch sizes {list(buckets)}"
        )
    return found


def _most(decoder: StepDecoder) -> int:
    return decoder.runner.buckets[-1]


def _records(runner: Any) -> bool:
    """Return whether SGLang's options let decode steps be CUDA graphs."""
    return runner.device == "cuda" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


def _buckets(runner: Any, most: int, records: bool) -> list[int]:
    """Return batch sizes: those that SGLang captures, or few for eager steps."""
    if not records:
        return powers_of_two(most)
    sizes, _ = get_batch_sizes_to_capture(runner)
    return [int(size) for size in sizes]


@contextmanager
def _capturing(records: bool) -> Iterator[None]:
    """Enter what SGLang captures its own forwards in.

    Its layers read there that nothing is a prompt, and its collectives register buffers.
    """
    set_dp_buffer_len(None, 0, False)
    set_is_extend_in_batch(False)
    if not records:
        yield
        return
    with graph_capture(), model_capture_mode():
        yield
