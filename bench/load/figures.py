"""What a load says: speeds, waits, the share of prompts; and the table of that."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bench.suite import tables
from bench.suite.acceptance import PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.load.client import Load, Text

    Line = dict[str, Any]

#: Columns of the table: keys of a line, how they are shown, and what they are called. The second
#: and third are the table's own: over plain decoding, and of an adaptive engine over the best of
#: plain decoding and its draft's fixed settings.
COLUMNS = {
    "tokens_per_s": ("{:,.0f}", "tokens/s"),
    "over_plain": ("{:.2f}x", "over plain"),
    "of_best": ("{:.2f}x", "of best"),
    "full_tokens_per_s": ("{:,.0f}", "all there"),
    "ttft_ms": ("{:.2f}", "first token, ms"),
    "ttft_p99_ms": ("{:.2f}", "99th"),
    "itl_ms": ("{:.2f}", "between tokens, ms"),
    "itl_p99_ms": ("{:.2f}", "99th"),
    "gap_p99_ms": ("{:.2f}", "gap, 99th"),
    "gap_most_ms": ("{:.2f}", "longest"),
    "step_ms": ("{:.2f}", "step, ms"),
    "chunk_ms": ("{:.2f}", "chunk, 99th"),
    "gap_p99_bounds": ("{:.2f}", "gap, 99th, of 2 steps and a chunk"),
    "prompt_host": ("{:.1%}", "prompts, host"),
    "prompt_stream": ("{:.1%}", "prompts, stream"),
    "prompt_ms": ("{:.2f}", "per call, ms"),
    "per_step": ("{:.2f}", "tokens/step"),
    "batch": ("{:.1f}", "batch"),
}
#: What tells the rows of the table apart.
NAMES = ("cell", "draft", "client", "side")
ADAPTIVE = "-adaptive"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that is at least as large as a share of all."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def figures(load: Load) -> Line:
    """Return the figures of a load: `times`, its prompts' share, and its steps.

    A step is a gap that no prompt ran in, the median of such; the 99th gap is said in two steps and
    a chunk, too: the scheduler lets nobody who runs wait longer.
    """
    line = times(load.texts, load.begin)
    if "gap_p99_ms" in line:
        line |= _bounds(load, line["gap_p99_ms"])
    return rounded(line | _prompts(load, line["seconds"]) | _steps(load))


def user_waits(line: Line, seconds: Sequence[float]) -> Line:
    """Return a line with first tokens that nothing was watched during.

    What its client saw while the prompts' share was taken stays beside them.
    """
    found = {"ttft_watched_ms": line["ttft_ms"], "ttft_ms": 1e3 * statistics.median(seconds)}
    return line | rounded(found | {"ttft_p99_ms": 1e3 * percentile(seconds, 0.99)})


def times(texts: Sequence[Text], begin: float) -> Line:
    """Return the speeds and waits of texts whose clients came at ``begin``.

    The time between tokens is that of a chunk of a text, over its tokens, and counts as often as it
    has tokens; a gap is the time of a chunk, undivided. ``full`` is while new requests came, so
    that all clients were there.
    """
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
    return line


def _bounds(load: Load, gap: float) -> Line:
    """Return a gap in units of a step and a chunk, if some step had no prompt before it."""
    begins = sorted(load.prompts.begins)
    steps = [
        1e3 * (now - before)
        for text in load.texts
        for (first, _), (before, _), (now, _) in zip(
            text.chunks, text.chunks[1:], text.chunks[2:], strict=False
        )
        # a step is launched before the one ahead of it is read
        if bisect(begins, now) == bisect(begins, first)
    ]
    each = load.prompts.each
    if not steps or not each:
        return {}
    step, chunk = statistics.median(steps), 1e3 * percentile(each, 0.99)
    return {"step_ms": step, "chunk_ms": chunk, "gap_p99_bounds": gap / (2 * step + chunk)}


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


def rounded(line: Line) -> Line:
    """Return a line whose numbers have four places."""
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
    _compare(rows)
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


def _compare(rows: dict[tuple[str, ...], list[Line]]) -> None:
    """Add to rows how many times as fast they are as others of their cell, client and side."""
    speeds = {
        key: statistics.median(one["tokens_per_s"] for one in some)
        for key, some in rows.items()
        if all("tokens_per_s" in one for one in some)
    }
    for cell, draft, *rest in speeds:
        some = rows[cell, draft, *rest]
        own = {
            other: speed
            for (its_cell, other, *its_rest), speed in speeds.items()
            if (its_cell, its_rest) == (cell, rest)
        }
        kind, adaptive = draft.split("-")[0], draft.endswith(ADAPTIVE)
        best = [
            speed
            for other, speed in own.items()
            if other == PLAIN or (other.split("-")[0] == kind and not other.endswith(ADAPTIVE))
        ]
        found = {"over_plain": own[draft] / own[PLAIN]} if PLAIN in own else {}
        if adaptive and best:
            found["of_best"] = own[draft] / max(best)
        some[:] = [line | found for line in some]


def _shown(name: str, lines: Sequence[Line]) -> str:
    values = [line[name] for line in lines if line.get(name) is not None]
    return COLUMNS[name][0].format(statistics.median(values)) if values else tables.NONE
