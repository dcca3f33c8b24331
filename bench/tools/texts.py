"""Record what the shipped pair writes, greedy and drawn, and compare two recordings.

Every text comes from the command line's ``--json``, one prompt at a time and a seed for each, so
any two checkouts can be compared.

    python -m bench.tools.texts --tree OLD --out old.json
    python -m bench.tools.texts --out new.json --against old.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.tools.trees import HERE, start

PROMPTS = (
    "The sea was",
    "def fibonacci(n):",
    "Once upon a time there was a",
    "import torch\n\nclass Attention",
    "In the year 1815, the",
    "1, 2, 3, 4,",
)
CONFIGS = {
    "plain": ["--steps", "0"],
    "chain": ["--topk", "1", "--steps", "3"],
    "tree": ["--topk", "5", "--steps", "4", "--draft-tokens", "16"],
    "drawn drafts": ["--topk", "1", "--steps", "3", "--draft-sampling"],
}
DRAW = ["--temperature", "0.8", "--top-p", "0.9"]
# runs the command line over and over in one process, for loading torch takes longest
WORKER = """
import io, json, sys
from contextlib import redirect_stdout
from specattn.cli import main
for line in sys.stdin:
    found, problem = io.StringIO(), 0
    sys.argv = ["specattn", *json.loads(line)]
    try:
        with redirect_stdout(found):
            main()
    except SystemExit as stop:
        problem = stop.code or 0
    print(json.dumps([problem, found.getvalue()]), flush=True)
"""


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the arguments of every text, by its name."""
    shared = ["--device", options.device, "--dtype", options.dtype, "--json", "--ignore-eos"]
    shared += ["--max-new-tokens", str(options.new)]
    found = {}
    for name, config in CONFIGS.items():
        for drawn in (False, True):
            if not drawn and name == "drawn drafts":
                continue
            for at, prompt in enumerate(PROMPTS[: options.prompts]):
                draw = [*DRAW, "--seed", str(1000 + at)] if drawn else []
                label = f"{name}, {'drawn' if drawn else 'greedy'}, prompt {at}"
                found[label] = ["generate", prompt, *config, *draw, *shared]
    return found


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Run a checkout's command line for every text; returns tokens, text and steps of each."""
    worker = start(options.tree, ["-c", WORKER])
    assert worker.stdin is not None
    assert worker.stdout is not None
    found = {}
    for name, arguments in commands(options).items():
        worker.stdin.write(json.dumps(arguments) + "\n")
        worker.stdin.flush()
        problem, text = json.loads(worker.stdout.readline())
        if problem:
            found[name] = {"failed": problem}
        else:
            run = json.loads(text)
            found[name] = {key: run[key] for key in ("tokens", "text", "steps", "finish_reason")}
        print(f"{name}: {found[name].get('steps', 'failed')} steps", file=sys.stderr, flush=True)
        options.out.write_text(as_json(found))
    worker.stdin.close()
    worker.wait()
    return found


def as_json(found: dict[str, Any]) -> str:
    """Return a recording, one text per line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in found.items())
    return f"{{\n{lines}\n}}\n"


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Say where two recordings differ: tokens, texts, steps, or what only one of them has."""
    found = [f"{name}: in one recording only" for name in sorted(old.keys() ^ new.keys())]
    for name in old:
        if name not in new or old[name] == new[name]:
            continue
        before, after = old[name], new[name]
        pairs = list(zip(before.get("tokens", []), after.get("tokens", []), strict=False))
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        keys = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        where = "" if first is None else f", from token {first}: {pairs[first]}"
        found.append(f"{name}: {', '.join(sorted(keys))} differ{where}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=HERE, help="the checkout that runs")
    parser.add_argument("--out", type=Path, help="where its texts go; without, nothing runs")
    parser.add_argument("--against", type=Path, nargs="+", help="one recording, or without --out 2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new", type=int, default=64, help="tokens of a text")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    options = parser.parse_args()
    given = [json.loads(path.read_text()) for path in options.against or ()]
    if options.out:
        given.append(record(options))
    if len(given) == 2:
        found = differences(*given)
        print("\n".join(found) or f"{len(given[0])} texts, all the same")
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
