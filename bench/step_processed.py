"""What penalties, min-p and log-probabilities add to a step of requests that draw.

`bench.step --processors` runs it: one model and tree, batches of 1, 16 and 64, the two kinds of
steps in turn. Before anything is timed, the logits that requests draw from are compared with
float64, node by node, and every step is checked to gain what is forced.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bench.step_forced import Forced
from bench.step_oracle import tree_logits
from bench.step_timing import Stepper, check_advance, timed
from bench.step_world import Setting
from specattn.speculative.processors import ProcessorStates
from specattn.speculative.sampling import SamplingParams
from specattn.speculative.verify import accept

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from bench.step_world import World
    from specattn.batch import AcceptResult, DraftTree
    from specattn.config import SpecConfig
    from specattn.speculative.sampling import SamplingBatch
    from specattn.speculative.step_decoder import StepDecoder

SETTING, BATCHES, CONTEXT = Setting(4, 5, 16), (1, 16, 64), 1024
DRAWN = SamplingParams(0.8, seed=1)
ASKED = replace(
    DRAWN,
    min_p=0.05,
    repetition_penalty=1.3,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logprobs=5,
)
# bfloat16 through all layers, relative L2 error of the logits
MOST_ERROR = 0.05
# how often the two kinds are timed in turn
TURNS = 5


class Drawing(Forced):
    """An acceptor that draws as requests do, then keeps paths of given lengths."""

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        seq_lens: Tensor,
        config: SpecConfig,
        sampling: SamplingBatch,
        out: AcceptResult,
    ) -> AcceptResult:
        """Write ``out``."""
        drawn = accept(tree, logits, seq_lens, config, sampling, out)
        forced = super().__call__(tree, logits, seq_lens, config, sampling, out)
        return replace(forced, probs=drawn.probs)


class WatchedDrawing(Drawing):
    """One that also keeps what it saw; for eager steps."""

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        seq_lens: Tensor,
        config: SpecConfig,
        sampling: SamplingBatch,
        out: AcceptResult,
    ) -> AcceptResult:
        """Write ``out``."""
        self.seen = tree.tokens.clone(), tree.positions.clone(), tree.words.clone(), logits.clone()
        return super().__call__(tree, logits, seq_lens, config, sampling, out)


def decoder_of(
    world: World, setting: Setting, batches: Sequence[int], accept: Forced, *, record: bool = True
) -> StepDecoder:
    """Capture a setting for requests that draw, and for those that ask for more."""
    vocab = world.model.vocab_size
    processors = ProcessorStates.alloc(len(world.rows) + 1, vocab, world.device)
    return world.decoder(
        setting, batches, accept, record=record, sampled=True, processors=processors
    )


def admit(
    world: World, decoder: StepDecoder, batch: int, context: int, params: SamplingParams
) -> tuple[list[int], list[list[int]]]:
    """Put requests in mid-decode; returns their rows and the prompts that they remember."""
    assert decoder.processors is not None
    rows = world.admit(decoder, batch, context, params)
    vocab = world.model.vocab_size
    prompts = torch.randint(vocab, (batch, context)).tolist()
    for row, prompt in zip(rows, prompts, strict=True):
        decoder.processors.admit(row, params, prompt)
    return rows, prompts


def check(world: World, setting: Setting, length: int, context: int) -> float:
    """Run an eager step of one request; returns how far its logits are from float64.

    Raises
    ------
    AssertionError
        If they are too far, the step gains other than what is forced, or log-probabilities lack.
    """
    acceptor = WatchedDrawing(*_forced_by(world, length))
    decoder = decoder_of(world, setting, [1], acceptor, record=False)
    (row,), (prompt,) = admit(world, decoder, 1, context, ASKED)
    pending = decoder.step_async([row], processed=True)
    (gained,) = pending.wait()
    assert len(gained) == length, f"gained {len(gained)} of {length}"
    asked = ASKED.logprobs or 0
    scored = pending.logprobs(0, asked)
    assert len(scored) == length
    assert all(one.value <= 0 and len(one.alternatives) == asked for one in scored), scored
    tokens, positions, words, logits = (seen[0] for seen in acceptor.seen)
    slots = world.table.req_to_token[row, :context]
    raw = tree_logits(world.model, world.target.pool, slots, tokens, positions, words)
    want = penalised(raw, tokens, words, prompt)
    error = _distance(logits.double(), want)
    assert error < MOST_ERROR, f"processed logits are off by {error:.2e}"
    # of those that the penalties change
    known = torch.tensor(sorted(set(prompt)), device=raw.device)
    near, far = (_distance(one[:, known], want[:, known]) for one in (logits.double(), raw))
    assert far > 2 * near, f"without penalties, logits are off by {far:.2e}, with them {near:.2e}"
    return error


def _distance(found: Tensor, want: Tensor) -> float:
    """Return a relative L2 error."""
    return float((found - want).norm() / want.norm())


def penalised(raw: Tensor, tokens: Tensor, words: Tensor, prompt: Sequence[int]) -> Tensor:
    """Return ``[n, V]`` float64 logits after `ASKED`'s penalties; nothing was emitted before."""
    found = raw.clone()
    seen = torch.zeros(raw.shape[1], dtype=torch.bool, device=raw.device)
    seen[list(prompt)] = True
    for node in range(len(tokens)):
        path = [j for j in range(1, len(tokens)) if int(words[node, j // 64]) >> (j % 64) & 1]
        emitted = torch.bincount(tokens[path], minlength=raw.shape[1])
        row, known = found[node], seen | (emitted > 0)
        repeated = torch.where(
            row > 0, row / ASKED.repetition_penalty, row * ASKED.repetition_penalty
        )
        row = torch.where(known, repeated, row)
        row = row - ASKED.frequency_penalty * emitted
        found[node] = row - ASKED.presence_penalty * (emitted > 0)
    return found


def _forced_by(world: World, length: int) -> tuple[Tensor, int]:
    forced = world.forced(length)
    return forced.lens, forced.lowest


def measure(
    world: World,
    setting: Setting,
    batches: Sequence[int],
    context: int,
    *,
    length: int,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Time both kinds of steps in turn, batch by batch."""
    error = check(world, setting, length, min(context, 512))
    acceptor = Drawing(*_forced_by(world, length))
    decoder = decoder_of(world, setting, batches, acceptor)
    for batch in batches:
        times: dict[str, list[dict[str, float]]] = {"sampled": [], "processed": []}
        for _ in range(TURNS):
            for kind, params in (("sampled", DRAWN), ("processed", ASKED)):
                rows, _ = admit(world, decoder, batch, context, params)
                stepper = Stepper(decoder, rows, acceptor, **{kind: True})
                stepper.force(length)
                check_advance(stepper)
                times[kind].append(timed(stepper, rounds))
                stepper.check()
        us = {kind: statistics.median(one["us"] for one in found) for kind, found in times.items()}
        cell = {
            "setting": setting.name,
            "batch": batch,
            "context": context,
            "error": round(error, 5),
            **{f"{kind}_us": round(value, 2) for kind, value in us.items()},
            **{
                f"{kind}_host_us": statistics.median(one["host_us"] for one in found)
                for kind, found in times.items()
            },
            "more": round(us["processed"] / us["sampled"] - 1, 4),
        }
        print(
            f"  {setting.name} {batch:3} x {context}: sampled {us['sampled']:9.1f} us  processed "
            f"{us['processed']:9.1f} us  {cell['more']:+.2%}",
            flush=True,
        )
        yield cell
