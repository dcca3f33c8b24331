"""Speculation against plain decoding: same tokens, and how much faster."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from specattn.cli.running import run
from specattn.config import SpecConfig
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specattn.cli.running import Outcome, Setup
    from specattn.engine.engine import Engine


@dataclass(frozen=True)
class Difference:
    """The place at which a request's tokens first differ.

    ``position`` counts generated tokens from 0. A token, or the margin, is None where its text had
    already ended. The margin is the difference of the target's two best logits at that position of
    the plain text: rounding can only change a token where it is small.
    """

    request: int
    position: int
    token: int | None
    plain_token: int | None
    plain_margin: float | None


@dataclass(frozen=True)
class Comparison:
    """A run of plain decoding, and where the speculative run differs.

    ``differences`` has every request's first; ``speed_up`` is tokens per second with speculation
    over those without; ``exact`` says that all requests are greedy: sampled tokens agree in
    distribution, not one by one.
    """

    plain: Outcome
    differences: tuple[Difference | None, ...]
    speed_up: float
    exact: bool

    @property
    def first(self) -> Difference | None:
        """The difference of the first request that has one."""
        return next((found for found in self.differences if found), None)


def compare_plain(
    outcome: Outcome,
    setup: Setup,
    config: SpecConfig,
    on_tokens: Callable[[int, list[int]], None],
) -> Comparison:
    """Run the same requests without speculation; return the differences."""
    engine = setup.engine(SpecConfig(0, 1, 1, page_size=config.page_size))
    setup.prepare(engine)
    plain = run(engine, setup.requests, on_tokens)
    exact = all(request.sampling.temperature == 0 for request in setup.requests)
    texts = enumerate(zip(setup.requests, outcome.results, plain.results, strict=True))
    differences = tuple(
        _first_difference(engine, at, request.prompt, ours.tokens, theirs.tokens) if exact else None
        for at, (request, ours, theirs) in texts
    )
    # a target of NaN may generate nothing
    speed_up = outcome.tokens_per_second / plain.tokens_per_second if plain.num_tokens else 0.0
    return Comparison(plain, differences, speed_up, exact)


def top2_margin(engine: Engine, tokens: Sequence[int]) -> float:
    """Return the difference of the two best logits for the next token."""
    table, row = engine.table, engine.table.allocate()
    try:
        table.reserve([row], [len(tokens)])
        prefill = Prefill(engine.target, None, table, engine.config)
        logits = prefill.last_logits(Prompt(row, tokens))
    finally:
        table.free(row)
    best, second = logits.float().topk(2).values.tolist()
    return float(best - second)


def _first_difference(
    engine: Engine, index: int, prompt: Sequence[int], ours: list[int], theirs: list[int]
) -> Difference | None:
    for at, (token, plain_token) in enumerate(zip_longest(ours, theirs)):
        if token != plain_token:
            margin = None if plain_token is None else top2_margin(engine, [*prompt, *theirs[:at]])
            return Difference(index, at, token, plain_token, margin)
    return None
