"""Logits processors and log-probabilities within a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from specattn.buffers import fingerprint
from specattn.kernels.logprobs import path_logprobs
from specattn.kernels.sampling import target_probs

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.batch import AcceptResult, DraftTree
    from specattn.buffers import Fingerprint
    from specattn.speculative.host_buffers import LogprobBuffers
    from specattn.speculative.processors import ProcessorStates
    from specattn.speculative.sampling import SamplingBatch


@dataclass(frozen=True)
class Processing:
    """The processing that requests ask for, over static memory.

    Parameters
    ----------
    processors : ProcessorStates
        What they ask for.
    rows : Tensor
        ``[B]`` int64, their rows of the table.
    logprobs : LogprobBuffers
        Where log-probabilities go.
    entry : Tensor
        ``[1]`` int64, which entry of ``logprobs`` a step writes.
    bitmask : Tensor or None
        ``[B, n, ceil(V / 32)]`` int32: which tokens may follow each node of requests with a
        grammar; None where the host cannot write it.
    """

    processors: ProcessorStates
    rows: Tensor
    logprobs: LogprobBuffers
    entry: Tensor
    bitmask: Tensor | None = None

    def min_p(self) -> Tensor:
        """Return each request's ``[B]`` float32."""
        return self.processors.min_p[self.rows]

    def process(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """Return the logits ``[B, n, V]`` float32 that these requests draw from."""
        return self.processors.process(tree, logits, self.rows, self.bitmask)

    def score(
        self,
        accepted: AcceptResult,
        logits: Tensor,
        processed: Tensor,
        sampling: Callable[[], SamplingBatch],
    ) -> None:
        """Write the log-probabilities of accepted tokens for the host; capturable.

        Parameters
        ----------
        accepted : AcceptResult
            The tokens, and what they were drawn from.
        logits, processed : Tensor
            ``[B, n, V]``: the target's, and processed ones.
        sampling : callable
            Gives how the requests draw, if that is needed.
        """
        if accepted.probs is None:
            nodes = processed.flatten(0, 1)
            by = sampling()
            drawing = by.temperature, by.top_k, by.top_p, processed.shape[1], by.min_p
            probs = target_probs(nodes, *drawing)
            accepted = replace(accepted, probs=probs.view(processed.shape))
        path_logprobs(
            logits,
            accepted,
            self.rows,
            self.entry,
            counts=self.processors.logprobs,
            sources=self.processors.logprobs_of,
            values_out=self.logprobs.values,
            ids_out=self.logprobs.ids,
            processed=processed,
        )

    def note(self, accepted: AcceptResult) -> None:
        """Add accepted tokens to the histories."""
        self.processors.note(self.rows, accepted.accept_tokens, accepted.accept_lens)

    def fingerprint(self) -> Fingerprint:
        """Describe states, bitmask and log-probabilities."""
        logprobs = self.logprobs
        return fingerprint(
            processors=self.processors,
            bitmask=self.bitmask,
            values=logprobs.values,
            ids=logprobs.ids,
        )
