"""Write docs/published.md from the records of `python -m bench.published`."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results"
HEAD = """# Published models

What drafts gain on models that others have published: chats about the problems of HumanEval (MIT),
whole texts, nothing forced. A text ends where its model ends it. Greedy texts are compared with
those of plain decoding; where one departs, the gap is that of plain decoding's best two tokens
there, in nats.

This page is written by `python docs/make_published.py` from records of

```
python -m bench.published --target MODEL --problems HumanEval.jsonl.gz --kinds lookup \\
    --out bench/results/published_NAME.json
```

Models are folders, [GGUF files](published_model.md) or names on the Hub. With `--draft MODEL`,
`--eagle3 HEAD` or `--dflash HEAD`, `--kinds` may have `model`, `eagle3` and `dflash`, also behind
`lookup+`. *Adaptive* is an engine that [chooses a chain for every step](adaptive.md).
"""
OURS, INSIDE = "specattn", ("transformers", "custom_generate")
#: Names of what drafts.
DRAFTS = {
    "plain": "none",
    "lookup": "lookup",
    "model": "a model",
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
}
#: Depths whose share of accepted tokens is told.
DEPTHS = (1, 2, 3, 5, 7)

Line = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def named(draft: str) -> str:
    """Return a draft in words."""
    front, _, kind = draft.rpartition("+")
    return f"lookup, else {DRAFTS[kind]}" if front else DRAFTS[kind]


def reached(line: Line) -> list[float]:
    """Return the shares of steps that kept at least 1, 2, ... draft tokens."""
    counts = line["steps_by_tokens"][::-1]
    totals = list(accumulate(counts))[::-1]
    return [total / line["steps"] for total in totals[1:]]


def acceptance(lines: list[Line]) -> str:
    """Return tokens per step of every draft and tree, of the batch size with most texts."""
    largest = max(line["batch"] for line in lines)
    rows: dict[tuple[str, str], dict[float, Line]] = {}
    for line in lines:
        if line["batch"] == largest and line["draft"] != "plain":
            rows.setdefault((line["draft"], line["tree"]), {})[line["temperature"]] = line
    temperatures = sorted({at for row in rows.values() for at in row})
    body = []
    for (draft, tree), row in rows.items():
        shares = reached(row[min(row)])
        means = (f"{row[at]['accepted_per_step']:.2f}" if at in row else "-" for at in temperatures)
        depths = (f"{shares[at - 1]:.0%}" if at <= len(shares) else "-" for at in DEPTHS)
        body.append([named(draft), tree, *means, *depths])
    names = ["greedy" if not at else f"temperature {at}" for at in temperatures]
    head = ["draft", "tree", *names, *(f"{at} deep" for at in DEPTHS)]
    return (
        "\n### Tokens per step\n\nBonus included, and the steps that kept a draft token at a depth "
        f"({names[0]}).\n\n" + table(head, body)
    )


def speed(lines: list[Line]) -> str:
    """Return tokens per second of every draft and tree, and their ratio to plain decoding's."""
    places = sorted({(line["temperature"], line["batch"]) for line in lines})
    plain = {
        (line["temperature"], line["batch"]): line["tokens_per_second"]
        for line in lines
        if line["draft"] == "plain"
    }
    rows: dict[tuple[str, str], dict[Any, float]] = {}
    for line in lines:
        at = line["temperature"], line["batch"]
        rows.setdefault((line["draft"], line["tree"]), {})[at] = line["tokens_per_second"]

    def cell(row: dict[Any, float], at: Any) -> str:
        if at not in row:
            return "-"
        return f"{row[at]:,.0f}" + (f", {row[at] / plain[at]:.2f}x" if at in plain else "")

    body = [
        [named(draft), tree, *(cell(row, at) for at in places)]
        for (draft, tree), row in rows.items()
    ]
    names = [f"{batch} {'drawn' if drawn else 'greedy'}" for drawn, batch in places]
    return (
        "\n### Tokens per second\n\nBy requests at once, and over plain decoding; prompts are in "
        "it.\n\n" + table(["draft", "tree", *names], body)
    )


def inside(lines: list[Line]) -> str:
    """Return what transformers' `generate` gives, by itself and with ours inside."""
    rows = [
        [
            line["by"],
            named(line["draft"]),
            f"{line['tokens_per_second']:,.1f}",
            f"{line['equal_to_plain']} of {line['texts']}",
        ]
        for line in lines
    ]
    head = ["by", "draft", "tokens per second", "texts equal to plain"]
    return f"\n### Inside transformers\n\nOne request, greedy.\n\n{table(head, rows)}"


def equal(lines: list[Line]) -> str:
    """Return how many greedy texts are plain decoding's, and how the others depart."""
    greedy = [line for line in lines if not line["temperature"] and line["draft"] != "plain"]
    same, asked = (sum(line[name] for line in greedy) for name in ("equal_to_plain", "texts"))
    gaps = [gap for line in greedy for gap in line["gaps_at_departures"]]
    depart = f", the others depart where the gap is {max(gaps):.2g} at most" if gaps else ""
    return f"Of {asked:,} greedy texts {same:,} are plain decoding's{depart}."


def section(record: dict[str, Any]) -> str:
    """Return what a record says."""
    lines = record["results"]
    own = [line for line in lines if line["by"] == OURS]
    heads = ", ".join(
        f"{DRAFTS[kind]}: {record[kind]}" for kind in ("model", "eagle3", "dflash") if record[kind]
    )
    texts = max(line["texts"] for line in own)
    found = (
        f"\n## {record['target']}\n\n{record['device']}, torch {record['torch'].split('+')[0]}, "
        f"{record['dtype']}; {texts} problems, at most {record['new']} tokens each"
        f"{f'; {heads}' if heads else ''}. {equal(own)}\n" + acceptance(own)
    )
    # what a CPU that others share takes says little
    if record["device"] != "CPU":
        theirs = [line for line in lines if line["by"] in INSIDE]
        found += speed(own) + (inside(theirs) if theirs else "")
    return found


def page() -> str:
    """Return the page."""
    records = sorted(RESULTS.glob("published_*.json"))
    return HEAD + "".join(section(json.loads(path.read_text())) for path in records)


if __name__ == "__main__":
    (DOCS / "published.md").write_text(page())
