"""Requests whose logits steps process, by row of SGLang's table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specattn.integrations.sglang.requests import asked, end_ids, is_processed, params_of
from specattn.speculative.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.speculative.sampling.processors import ProcessorStates
    from specattn.speculative.step.decoder import PendingStep


class Processed:
    """Which rows steps process, and how.

    Penalties count tokens of the answer alone, as SGLang's do.

    Parameters
    ----------
    states : ProcessorStates
        What steps read, a row per row of the table.
    """

    def __init__(self, states: ProcessorStates) -> None:
        self.states = states
        self._rows: set[int] = set()

    def among(self, rows: Sequence[int]) -> bool:
        """Return whether a step of these rows must process logits."""
        return not self._rows.isdisjoint(rows)

    def admit(self, batch: Any) -> None:
        """Write the rows of a prompt batch's requests, before it runs."""
        rows = batch.req_pool_indices_cpu.tolist()
        for req, row in zip(batch.reqs, rows, strict=True):
            wanted = is_processed(req) and not asked(req, processed=True)
            # of a row that nobody has written nothing is read
            if wanted or row in self._rows:
                self._write(req, row, wanted=wanted)

    def _write(self, req: Any, row: int, *, wanted: bool) -> None:
        if not wanted:
            self._rows.discard(row)
            self.states.admit(row, SamplingParams(), ())
            return
        self._rows.add(row)
        params, least = params_of(req), req.sampling_params.min_new_tokens
        self.states.admit(
            row,
            params,
            (),
            min_new_tokens=len(req.origin_input_ids) + least if least else 0,
            end_ids=end_ids(req) if least else (),
            bitmask=req.grammar is not None,
        )
        # of a request that was taken back
        if params.penalised and req.output_ids:
            history = self.states.history[row]
            emitted = torch.tensor(list(req.output_ids)).to(history.device, non_blocking=True)
            history.index_add_(0, emitted, torch.full_like(emitted, 2, dtype=history.dtype))


class TreeGrammar:
    """A request's grammar of SGLang's as a `Grammar` of steps.

    Parameters
    ----------
    grammar : BaseGrammarObject
        SGLang's, which knows the text so far and goes on by itself.
    """

    def __init__(self, grammar: Any) -> None:
        self.grammar = grammar

    def fill(self, tokens: Sequence[int], parents: Sequence[int], bitmask: Tensor) -> None:
        """Say which tokens may follow each node; see `Grammar.fill`."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        self._fill(0, tokens, children, bitmask)

    def _fill(
        self, node: int, tokens: Sequence[int], children: dict[int, list[int]], bitmask: Tensor
    ) -> None:
        """Fill a node's row and those of its descendants."""
        if self.grammar.is_terminated():
            return
        self.grammar.fill_vocab_mask(bitmask, node)
        for child in children.get(node, ()):
            token = tokens[child]
            if not int(bitmask[node, token // 32]) >> token % 32 & 1:
                continue
            self.grammar.accept_token(token)
            self._fill(child, tokens, children, bitmask)
            self.grammar.rollback(1)

    def accept(self, tokens: Sequence[int]) -> None:
        """Do nothing: SGLang tells its grammar what a text goes on with."""


def logprob_counts(reqs: Sequence[Any], *, processed: bool) -> list[int | None]:
    """Return the alternatives that each request wants beside log-probabilities.

    None where it wants none, or has been refused.
    """
    return [
        req.logprob.top_logprobs_num
        if processed and req.return_logprob and not asked(req, processed=True)
        else None
        for req in reqs
    ]


def write_logprobs(step: PendingStep, counts: Sequence[int | None], output: Any) -> None:
    """Give SGLang the log-probabilities of a step that has ended.

    Parameters
    ----------
    step : PendingStep
        The step; a processed one if any request wants them.
    counts : sequence of int or None
        `logprob_counts`.
    output : LogitsProcessorOutput
        SGLang's, of the step.
    """
    depth = step.packed.shape[1] - 1
    values = torch.zeros(len(counts), depth)
    others: list[list[torch.Tensor]] = [[], []]
    for at, count in enumerate(counts):
        found = [] if count is None else step.logprobs(at, count)
        values[at, : len(found)] = torch.tensor([one.value for one in found])
        for place in range(depth):
            best = found[place].alternatives if place < len(found) else {}
            others[0].append(torch.tensor([*best.values()]))
            others[1].append(torch.tensor([*best]))
    output.next_token_logprobs = values
    output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx = others
