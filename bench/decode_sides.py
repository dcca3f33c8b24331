"""What `bench.decode` compares: engines and transformers' `generate`, and how a run is counted."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.engine.engine import Engine
    from specattn.engine.request import Request


@dataclass(frozen=True)
class Run:
    """A batch decoded to its end, and how long the loop took.

    Parameters
    ----------
    tokens : list of list of int
        Of every request, the prompt's own first one included.
    seconds : float
        Of the loop.
    accept_lens : list of list of int
        What every request gained, step by step; empty for transformers.
    whole_steps, whole_seconds : int, float
        Steps after which every request still ran, and their time.
    """

    tokens: list[list[int]]
    seconds: float
    accept_lens: list[list[int]] = field(default_factory=list)
    whole_steps: int = 0
    whole_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return sum(len(tokens) - 1 for tokens in self.tokens) / self.seconds


def decode(engine: Engine, requests: Sequence[Request]) -> Run:
    """Decode a batch to its end; the first tokens come with the prompts and are not timed."""
    results = engine.add(requests)
    whole_steps, whole_seconds, steps = 0, 0.0, 0
    begin = time.perf_counter()
    while engine.num_running:
        engine.step(ahead=True)
        steps += 1
        if engine.num_running == len(requests):
            whole_steps, whole_seconds = steps, time.perf_counter() - begin
    engine.clear()
    seconds = time.perf_counter() - begin
    return Run(
        [r.tokens for r in results],
        seconds,
        [r.accept_lens for r in results],
        whole_steps,
        whole_seconds,
    )


class Transformers:
    """A model of transformers' under its own ``generate``."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        # texts go on past their ends, as those of the other contestants do
        self.model.generation_config.eos_token_id = None

    def decode(self, prompts: list[list[int]], new: int, temperature: float) -> Run:
        """Decode a batch; the time is that of all tokens but the first ones."""
        ids = torch.tensor(prompts, device=self.model.device)
        _, first = self._generate(ids, 1, temperature)
        tokens, seconds = self._generate(ids, new, temperature)
        return Run(tokens, seconds - first)

    def _generate(
        self, ids: torch.Tensor, new: int, temperature: float
    ) -> tuple[list[list[int]], float]:
        drawing = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        begin = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=bool(temperature),
            **drawing,
        )
        tokens = out[:, ids.shape[1] :].tolist()
        return tokens, time.perf_counter() - begin


@dataclass
class Contestant:
    """A setting, run one way over one batch; collects its runs.

    ``wanted`` are the tokens it is compared with, once they are known; ``exact`` says whether they
    must be equal.
    """

    setting: str
    way: str
    engine: Engine | None = None
    wanted: list[list[int]] | None = None
    exact: bool = False
    equal: int | None = None
    runs: list[Run] = field(default_factory=list)

    def turn(self, found: Run) -> Run:
        """Compare a run's tokens, and return it.

        Raises
        ------
        ArithmeticError
            If tokens differ where they must be equal.
        """
        if self.wanted is not None:
            pairs = zip(self.wanted, found.tokens, strict=True)
            equal = sum(want[: len(tokens)] == tokens for want, tokens in pairs)
            self.equal = equal if self.equal is None else min(self.equal, equal)
            if self.exact and equal < len(found.tokens):
                raise ArithmeticError(
                    f"{self.setting}, {self.way}: {len(found.tokens) - equal} of "
                    f"{len(found.tokens)} texts are not those of plain decoding"
                )
        return found

    def line(self) -> dict[str, Any]:
        """Return what was measured, and print it."""
        speeds = [round(run.tokens_per_second, 1) for run in self.runs]
        run, steps = self.runs[0], [len(gained) for gained in self.runs[0].accept_lens]
        line: dict[str, Any] = {
            "setting": self.setting,
            "way": self.way,
            "new_tokens": len(run.tokens[0]),
            "tokens_per_second": round(statistics.median(speeds), 1),
            "runs": speeds,
            "equal": self.equal,
        }
        if steps:
            gained = sum(map(sum, run.accept_lens))
            seconds = statistics.median(run.seconds for run in self.runs)
            line |= {
                "steps": max(steps),
                "ms_per_step": round(1e3 * seconds / max(steps), 4),
                "accepted_per_step": round(gained / sum(steps), 3),
            }
        if run.whole_steps:
            line["whole_batch_tokens_per_second"] = round(
                statistics.median(
                    sum(sum(gained[: run.whole_steps]) for gained in run.accept_lens)
                    / run.whole_seconds
                    for run in self.runs
                ),
                1,
            )
        print(
            f"  {self.setting:18} {self.way:13} {line['tokens_per_second']:10,.0f} tokens/s  "
            f"{line.get('ms_per_step', 0):8.3f} ms/step  "
            f"{line.get('accepted_per_step', 1):.2f} per step  equal {self.equal}",
            flush=True,
        )
        return line
