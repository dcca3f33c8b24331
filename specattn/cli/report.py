"""A finished run as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from rich.console import Console

    from specattn.cli.compare import Comparison, Difference
    from specattn.cli.prompts import Prompts
    from specattn.cli.running import ConfigReport, ModeReport, Outcome
    from specattn.engine.request import RequestOutput

# longer batches are summed up in one row
_MOST_ROWS = 24


@dataclass(frozen=True)
class Report:
    """A finished run with its texts, for people and for programs.

    ``spell`` returns the text of a token; without it no log-probabilities are shown.
    """

    prompts: Prompts
    outcome: Outcome
    texts: tuple[str, ...]
    comparison: Comparison | None = None
    spell: Callable[[int], str] | None = None

    def objects(self) -> list[dict[str, Any]]:
        """Return one JSON object per request; each repeats what concerns the run."""
        shared: dict[str, Any] = {
            "backend": self.outcome.modes[0].backend,
            "graphs": graphs(self.outcome.modes),
            "fused": list(self.outcome.fused),
        }
        if self.outcome.configs:
            shared["configs"] = [asdict(config) for config in self.outcome.configs]
        return [
            {
                "text": text,
                **_numbers(result),
                **self._scored(result),
                **shared,
                **self._compared(index),
            }
            for index, (text, result) in enumerate(
                zip(self.texts, self.outcome.results, strict=True)
            )
        ]

    def _scored(self, result: RequestOutput) -> dict[str, Any]:
        """Return the log-probabilities of a request's tokens and their alternatives."""
        if self.spell is None:
            return {}

        def entry(token: int, value: float) -> dict[str, Any]:
            assert self.spell is not None
            return {"token": token, "text": self.spell(token), "logprob": value}

        return {
            "logprobs": [
                {**entry(token, found.value), "top": [*starmap(entry, found.alternatives.items())]}
                for token, found in zip(result.tokens, result.logprobs, strict=True)
            ]
        }

    def _compared(self, index: int) -> dict[str, Any]:
        comparison = self.comparison
        if comparison is None:
            return {}
        difference = comparison.differences[index]
        return {
            "identical": difference is None if comparison.exact else None,
            "first_difference": asdict(difference) if difference else None,
            "speed_up": comparison.speed_up,
            "plain": _numbers(comparison.plain.results[index]),
        }

    def show(self, console: Console) -> None:
        """Print the tables and what the comparison found."""
        console.print()
        console.print(_requests(self.outcome, self.prompts))
        if self.spell is not None:
            console.print()
            console.print(*_logprobs(self.outcome, self.prompts, self.spell), sep="\n")
        console.print()
        console.print(_modes(self.outcome.modes))
        if self.outcome.configs:
            console.print()
            console.print(_configs(self.outcome.configs))
        if self.comparison is not None:
            console.print()
            console.print(verdict(self.comparison, self.outcome), soft_wrap=True)


def graphs(modes: Sequence[ModeReport]) -> dict[str, Any]:
    """Return the counts of forwards, in all and by mode."""
    parts = ("replayed", "unrecorded", "fallbacks")
    total = {part: sum(getattr(mode, part) for mode in modes) for part in parts}
    return {**total, "modes": {mode.mode: asdict(mode) for mode in modes}}


def verdict(comparison: Comparison, outcome: Outcome) -> str:
    """Return the result of the comparison with plain decoding in one line."""
    speeds = (
        f"{comparison.speed_up:.2f}x as fast ({outcome.tokens_per_second:.1f} against "
        f"{comparison.plain.tokens_per_second:.1f} tokens/s)"
    )
    if not comparison.exact:
        return f"sampled: plain decoding has the same distribution, not the same tokens; {speeds}"
    if comparison.first is None:
        return f"identical to plain decoding: {outcome.num_tokens} tokens; {speeds}"
    differing = sum(found is not None for found in comparison.differences)
    of = f"{differing} of {len(comparison.differences)} texts differ"
    return f"not identical to plain decoding: {of}, {_where(comparison.first)}; {speeds}"


def _where(found: Difference) -> str:
    where = f"first in request {found.request} at token {found.position}"
    if found.token is None or found.plain_token is None:
        return f"{where}: {'speculation' if found.token is None else 'plain decoding'} ended"
    return (
        f"{where}: {found.token} instead of {found.plain_token} "
        f"(plain top-2 margin {found.plain_margin:.2g})"
    )


def _numbers(result: RequestOutput) -> dict[str, Any]:
    seconds = result.finished_at - result.started_at
    return {
        "tokens": result.tokens,
        "num_tokens": len(result.tokens),
        "steps": result.steps,
        "accepted_per_step": result.accepted_per_step,
        "tokens_per_second": len(result.tokens) / seconds,
        "time_to_first_token": result.first_token_at - result.started_at,
        "finish_reason": result.finish_reason,
    }


def _requests(outcome: Outcome, prompts: Prompts) -> Table:
    columns = ("prompt", "tokens", "steps", "accepted/step", "tokens/s", "first token", "end")
    rows: list[Sequence[object]] = []
    if len(outcome.results) <= _MOST_ROWS:
        for index, result in enumerate(outcome.results):
            n = _numbers(result)
            rows.append(
                (
                    prompts.label(index),
                    n["num_tokens"],
                    n["steps"],
                    n["accepted_per_step"],
                    f"{n['tokens_per_second']:.1f}",
                    f"{1000 * n['time_to_first_token']:.0f} ms",
                    n["finish_reason"],
                )
            )
    if len(outcome.results) > 1:
        steps = sum(result.steps for result in outcome.results)
        gained = sum(sum(result.accept_lens) for result in outcome.results)
        counts = outcome.num_tokens, steps, gained / max(steps, 1)
        speed = f"{outcome.tokens_per_second:.1f}"
        rows.append((f"all {len(outcome.results)}", *counts, speed, "", ""))
    return table(columns, rows, left=("prompt", "end"))


def _logprobs(outcome: Outcome, prompts: Prompts, spell: Callable[[int], str]) -> list[Any]:
    """Return a table of the first tokens, and a line that counts the others."""
    rows: list[Sequence[object]] = []
    for index, result in enumerate(outcome.results):
        for token, found in zip(result.tokens, result.logprobs, strict=True):
            if len(rows) < _MOST_ROWS:
                best = (f"{spell(one)!r} {x:.2f}" for one, x in found.alternatives.items())
                rows.append(
                    (prompts.label(index), repr(spell(token)), found.value, "  ".join(best))
                )
    columns, left = ("prompt", "token", "logprob", "top"), ("prompt", "token", "top")
    shown, rest = table(columns, rows, left=left), outcome.num_tokens - len(rows)
    return [shown, f"and {rest} more, which --json has"] if rest else [shown]


def _modes(modes: Sequence[ModeReport]) -> Table:
    columns = ("mode", "backend", "graphs replayed", "not recorded", "eager fallbacks")
    return table(columns, map(astuple, modes), left=("mode", "backend"))


def _configs(configs: Sequence[ConfigReport]) -> Table:
    columns = ("depth", "topk", "nodes", "steps", "accepted/step")
    return table(columns, map(astuple, configs), left=("depth",))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: Collection[str]
) -> Table:
    """Return a table, of whose columns some are aligned to the left; floats have two digits."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        # where there is no room, a name goes on in the next line
        made.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(f"{one:.2f}" if isinstance(one, float) else str(one)) for one in row))
    return made
