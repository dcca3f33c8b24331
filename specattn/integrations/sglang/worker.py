"""SGLang's worker of the algorithm: prompts are SGLang's, steps are this library's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from specattn.integrations.sglang.algorithm import larger_trees
from specattn.integrations.sglang.blocks import BlockHead
from specattn.integrations.sglang.modules import join_states
from specattn.integrations.sglang.requests import refuse, sampling_of, shorten, their_first
from specattn.integrations.sglang.steps import Steps
from specattn.speculative.prompts.prefill import first_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.speculative.sampling.params import SamplingBatch
    from specattn.speculative.sampling.processors import ProcessorStates


class Relay(EagleDraftInput):
    """What SGLang carries from step to step: nothing of ours."""

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        """Return how many tokens forwards have per request: one."""
        return 1, 1

    def filter_batch(self, *args: Any, **options: Any) -> None:
        """Keep nothing of nothing."""

    def merge_batch(self, other: Relay) -> None:
        """Add nothing."""


@dataclass(frozen=True)
class Prompts:
    """How the requests of a prompt batch draw.

    Parameters
    ----------
    sampling : SamplingBatch
        Temperatures, limits and seeds.
    states : ProcessorStates or None
        What they ask of their logits; None if none of them asks for anything.
    theirs : list of int
        Places of requests whose first token SGLang's sampler chooses; see `their_first`.
    """

    sampling: SamplingBatch
    states: ProcessorStates | None
    theirs: list[int]


class SpecAttnWorker(EAGLEWorkerV2):
    """Prompts as `EAGLEWorkerV2` runs them; a decode is one step, launched whole.

    It is made by SGLang, with what SGLang gives its own workers.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        runner = self.target_worker.model_runner
        join_states(runner.model)
        # no verify forward of SGLang's is replayed; its warm-up is another runner's
        runner.init_cuda_graphs = partial(_without_decode_graphs, runner.init_cuda_graphs)
        runner.sample = partial(self._sample, runner.sample)
        # no draft or draft extend of SGLang's own
        draft = self.draft_worker
        draft.draft_attn_backend = draft.draft_extend_attn_backend = None
        draft.cuda_graph_runner = draft.cuda_graph_runner_for_draft_extend = None
        draft.init_attention_backend = draft._capture_cuda_graphs = lambda: None
        # those that run
        self._prompts: Prompts | None = None
        self.steps: Steps | None = None
        self.blocks: BlockHead | None = None

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        """Name no backend: a step reads no length on the host."""
        return ()

    def init_cuda_graphs(self) -> None:
        """Capture steps, in place of SGLang's drafts and draft extends."""
        super().init_cuda_graphs()
        draft = self.draft_worker
        tree = self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens
        block = None if self.blocks is None else self.blocks.block
        self.steps = Steps(
            self.target_worker.model_runner,
            draft.draft_runner,
            {0: tree, **larger_trees(tree, block)},
            draft.hot_token_id,
            self.blocks,
        )

    def forward_batch_generation(self, batch: Any, *args: Any, **options: Any) -> Any:
        """Run a batch of prompts, or launch a step."""
        assert self.steps is not None
        if not (batch.forward_mode.is_extend() or batch.is_extend_in_batch):
            out = self.steps.launch(batch)
            out.next_draft_input = Relay()
            return out
        steps, processed = self.steps, self.steps.processed
        refuse(batch.reqs, processed=processed is not None, grammars=steps.grammars)
        shorten(batch.reqs, steps.longest)
        states = None
        if processed is not None:
            processed.admit(batch)
            if processed.among(batch.req_pool_indices_cpu.tolist()):
                states = processed.states
        sampling = sampling_of(batch, steps.vocab_size, self.target_worker.random_seed)
        theirs = their_first(batch.reqs, processed=processed is not None)
        # where all are greedy, SGLang's sampler does what steps would do
        greedy = sampling.greedy and states is None
        self._prompts = None if greedy else Prompts(sampling, states, theirs)
        out = super().forward_batch_generation(batch, *args, **options)
        steps.admit(batch, out, sampling)
        out.next_draft_input = Relay()
        return out

    def on_verify_complete_cpu(self, *args: Any, **options: Any) -> None:
        """Free the memory of the step that the scheduler has read."""
        assert self.steps is not None
        self.steps.read()

    def _sample(
        self, original: Callable[..., Tensor], logits_output: Any, forward_batch: Any
    ) -> Tensor:
        """Draw first tokens as steps draw: by the request's seed.

        SGLang's own choice stays where only its sampler does what was asked for.
        """
        prompts, self._prompts = self._prompts, None
        if prompts is None:
            return original(logits_output, forward_batch)
        # SGLang's sampler changes them in place
        logits = logits_output.next_token_logits.clone()
        tokens = original(logits_output, forward_batch)
        if prompts.theirs:
            # without a wait for the prompts
            at = torch.tensor(prompts.theirs).to(logits.device, non_blocking=True)
            logits.index_fill_(0, at, -float("inf"))
            logits[at, tokens[at].long()] = torch.zeros_like(logits[0, 0])
        rows, lens = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long() - 1
        own = first_tokens(logits, lens, prompts.sampling, rows, prompts.states, scored=[])
        # of a prompt whose logits are not finite, whose first step ends it
        return own.clamp(min=0).to(tokens.dtype)


class BlockWorker(SpecAttnWorker):
    """The same over a DFlash head, of which SGLang runs no forward.

    Beside prompts the head's keys and values are written from the target's states.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        target, draft = self.target_worker.model_runner, self.draft_worker
        self.blocks = BlockHead.of(target, draft.draft_runner)
        # before SGLang captures prompts
        self.blocks.capture(target)
        # steps share the target's embedding and output projection by themselves
        draft.init_lm_head = draft.init_attention_backends = draft.init_cuda_graphs = lambda: None
        draft._draft_extend_for_prefill = self._read_prompts

    def _read_prompts(self, batch: Any, states: Tensor, *args: Any, **options: Any) -> None:
        """Write the head's context, in place of its forward."""
        assert self.steps is not None
        self.steps.write_context(batch, states)


def _without_decode_graphs(original: Callable[..., None], *args: Any, **options: Any) -> None:
    """Capture prompts alone."""
    original(capture_decode_cuda_graph=False)
