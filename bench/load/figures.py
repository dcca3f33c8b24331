"""What a load says: speeds, waits, the share of prompts; and the table of that."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bench.suite import tables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.load.client import Load

    Line = dict[str, Any]

#: Columns of the table: keys of a line, how they are shown, and what they are called.
COLUMNS = {
    "tokens_per_s": ("{:,.0f}", "tokens/s"),
    "full_tokens_per_s": ("{:,.0f}", "all there"),
    "ttft_ms": ("{:.2f}", "first token, ms"),
    "ttft_p99_ms": ("{:.2f}", "99th"),
    "itl_ms": ("{:.2f}", "between tokens, ms"),
    "itl_p99_ms": ("{:.2f}", "99th"),
    "gap_p99_ms": ("{:.2f}", "gap, 99th"),
    "gap_most_ms": ("{:.2f}", "longest"),
    "prompt_host": ("{:.1%}", "prompts, host"),
    "prompt_stream": ("{:.1%}", "prompts, stream"),
    "prompt_ms": ("{:.2f}", "per call, ms"),
    "per_step": ("{:.2f}", "tokens/step"),
    "batch": ("{:.1f}", "batch"),
}
#: What tells the rows of the table apart.
NAMES = ("cell", "draft", "client", "side")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that is at least as large as a share of all."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def figures(load: Load) -> Line:
    """Return the figures of a load.

    The time between tokens is that of a chunk of a text, over its tokens, and counts as often as it
    has tokens; a gap is the time of a chunk, undivided. ``full`` is while new requests came, so
    that all clients were there.
    """
    texts, begin = load.texts, load.begin
    chunks = [chunk for text in texts for chunk in text.chunks]
    end, last = max(now for now, _ in chunks), max(text.submitted for text in texts)
    seconds, tokens = end - begin, sum(count for _, count in chunks)
    firsts = [1e3 * (text.chunks[0][0] - text.submitted) for text in texts]
    gaps = [
        (1e3 * (now - before), count)
        for text in texts
        for (before, _), (now, count) in pairwise(text.chunks)
    ]
    each = [gap / count for gap, count in gaps for _ in range(count)]
    full = sum(count for now, count in chunks if now <= last) / (last - begin)
    line: Line = {
        "texts": len(texts),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        # a share of all requests that are there at once says nothing
        "full_tokens_per_s": full if last - begin > seconds / 4 else None,
        "ttft_ms": statistics.median(firsts),
        "ttft_p99_ms": percentile(firsts, 0.99),
    }
    if gaps:
        alone = [gap for gap, _ in gaps]
        line |= {"itl_ms": statistics.median(each), "itl_p99_ms": percentile(each, 0.99)}
        line |= {"gap_p99_ms": percentile(alone, 0.99), "gap_most_ms": max(alone)}
    return _rounded(line | _prompts(load, seconds) | _steps(load))


def _prompts(load: Load, seconds: float) -> Line:
    prompts, stream = load.prompts, load.prompts.stream
    return {
        "prompt_calls": prompts.calls,
        "prompt_tokens": load.after.prompt_tokens - load.before.prompt_tokens,
        "shared_tokens": load.after.shared_tokens - load.before.shared_tokens,
        "prompt_ms": 1e3 * prompts.host / prompts.calls,
        "prompt_host": prompts.host / seconds,
        "prompt_stream": None if stream is None else stream / seconds,
    }


def _steps(load: Load) -> Line:
    """Return the steps of a batch, and what requests gained in them."""
    pairs = zip(load.after.accept_lens, load.before.accept_lens, strict=True)
    counts = [after - before for after, before in pairs]
    steps, rows = load.after.verify_steps - load.before.verify_steps, sum(counts)
    gained = sum(n * count for n, count in enumerate(counts))
    return {"steps": steps, "per_step": gained / max(rows, 1), "batch": rows / max(steps, 1)}


def _rounded(line: Line) -> Line:
    return {
        name: round(value, 4) if isinstance(value, float) else value for name, value in line.items()
    }


def read(path: Path) -> list[Line]:
    """Return the lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(lines: Sequence[Line]) -> str:
    """Return the figures as Markdown, of rounds and processes the medians."""
    rows: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        rows.setdefault(tuple(line[name] for name in NAMES), []).append(line)
    head = [*NAMES, "rounds", *(name for _, name in COLUMNS.values())]
    # sides of a cell beside each other, cells in their order
    places = {key[:-1]: at for at, key in reversed(list(enumerate(rows)))}
    found = sorted(rows.items(), key=lambda row: places[row[0][:-1]])
    return tables.table(
        head,
        (
            [*key, str(len(some)), *map(_shown, COLUMNS, [some] * len(COLUMNS))]
            for key, some in found
        ),
    )


def _shown(name: str, lines: Sequence[Line]) -> str:
    values = [line[name] for line in lines if line.get(name) is not None]
    return COLUMNS[name][0].format(statistics.median(values)) if values else tables.NONE
