"""An engine under load: so many requests at once, and the next one comes as one ends.

Prompts and answers are as long as a seed draws, the same for every side. A line has, per cell and
round, tokens per second, the time to the first token, that between tokens, the longest gap, the
share of time that the engine's prompts take, and the tokens of a step. Before anything is timed the
same requests run once, which compiles what they need, and some of their texts are compared with
those of the requests alone (`bench.load.check`).

    python -m bench.load --cells first-token,1.5b-32,8b-32 --out FOLDER
    python -m bench.load --cells generate --out FOLDER       # inside transformers' generate
    python -m bench.load --cells 8b-32 --drafts plain,eagle3,lookup --rounds 3 --out FOLDER
    python -m bench.load --cells written --drafts published --rounds 3 --out FOLDER
    python -m bench.load --target FOLDER --draft FOLDER --drafts plain,model,model-adaptive
        --prompts FILE.jsonl --at-once 32,8,1 --out FOLDER
    python -m bench.load --cells pair-4 --drafts plain,eagle3       # the shipped pair, on a CPU

Models have random weights and real shapes (1.5b: Qwen2.5-1.5B, 8b: Llama-3.1-8B), and their heads
are made to gain as much as in `bench.engines`. In the cells ``written`` the target is made to write
a text of which drafts gain about what docs/published.md has (`bench.load.written`), greedily and
drawn. Or models are the shipped pair, or folders, and nothing is forced.

Clients are ``engine``, the engine's own thread, of which they take nothing; ``asyncio``, tasks of
another thread that read streams as a server does, and so pay for Python's lock; ``generate``, which
hands the engine all requests at once, so that some always wait: there the first token is timed from
a request's admission on. The share of prompts is that of the host, from the begin of
`Admission._run_prompts` to its end, later parts of long prompts included; and that of the stream,
between two events around it, so how long the stream was the prompts'. Where one request comes at a
time, first tokens of the client ``engine`` are those of `Engine.add` in calls of their own, without
events and timers: what the caller waits for. ``ttft_watched_ms`` is what it was with them.

Lines are added to FOLDER/load.jsonl. Another checkout takes its turn from a folder that is none,
with a label; its library comes first on the path, this bench from the second:

    PYTHONPATH=OLD:NEW python -m bench.load --label old --commit COMMIT --cells 8b-32 --out FOLDER
    PYTHONPATH=NEW python -m bench.load --label new --cells 8b-32 --out FOLDER
    python -m bench.load --table FOLDER/load.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.lines import free
from bench.load import inside
from bench.load.cells import (
    CELLS,
    DRAFTS,
    GROUPS,
    INSIDE,
    engine_of,
    given,
    loader,
)
from bench.load.check import check
from bench.load.client import CLIENTS, first_tokens, load
from bench.load.figures import figures, read, table, user_waits
from bench.load.written import Written
from bench.suite.machine import machine
from specattn.models import HFTarget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.load.cells import Cell, Load
    from specattn.engine.request import Request

    #: A cell by its name, and its requests; random ones are drawn when the model is known.
    Asked = dict[str, tuple[Cell, list[Request] | None]]

#: Texts of a cell that are compared with those of their requests alone.
CHECKED = 4


def asked_for(
    options: argparse.Namespace, base: HFTarget | None
) -> dict[str, dict[tuple[Any, ...], Asked]]:
    """Return what is asked for, by model, and by what an engine is made for."""
    asked: Asked = {name: (CELLS[name], None) for name in options.cells if name in CELLS}
    if base is not None:
        name = Path(options.target).name.removesuffix(".gguf")
        for at_once in options.at_once:
            asked[f"{name}-{at_once}"] = given(
                options.prompts, base.tokenizer, options.new, at_once, options.count
            )
    found: dict[str, dict[tuple[Any, ...], Asked]] = {}
    for name, (cell, requests) in asked.items():
        made_for = cell.at_once, cell.temperature, cell.written
        found.setdefault(cell.model, {}).setdefault(made_for, {})[name] = cell, requests
    return found


def measured(
    asked: Asked, models: Load, draft: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the lines of one engine: all its cells are checked, then timed in rounds."""
    chosen, begin = DRAFTS[draft], time.perf_counter()
    engine, lowest = engine_of(models, [cell for cell, _ in asked.values()], chosen)
    start = round(time.perf_counter() - begin, 2)
    how = {"seconds": options.seconds, "client": options.client}
    vocab, head = engine.target.model.vocab_size, {}
    requests = {
        name: mine or cell.requests(vocab, options.seed) for name, (cell, mine) in asked.items()
    }
    for name, (cell, _) in asked.items():
        warm = load(engine, requests[name], cell.at_once, **how)
        # most of them came while others ran
        spread = max(len(warm.texts) // CHECKED, 1)
        if cell.written:
            found = Written(vocab, chosen.share).check(warm.texts)
        else:
            found = check(engine, warm.texts[::spread][:CHECKED], lowest)
        head[name] = {"cell": name, "draft": draft, "client": options.client, "side": options.label}
        head[name] |= {"at_once": cell.at_once, "asked": cell.count, "seed": options.seed}
        head[name] |= {"start_s": start, "forced": chosen.gained if lowest else 0, **found}
        print(f"{name} {draft}: started in {start} s; {json.dumps(found)}", flush=True)
    for turn in range(options.rounds):
        for name, (cell, _) in asked.items():
            found = figures(load(engine, requests[name], cell.at_once, **how))
            if cell.at_once == 1 and options.client == "engine":
                found = user_waits(found, first_tokens(engine, requests[name]))
            yield {**head[name], "round": turn, **found}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the lines of all that is asked for, one model after the other."""
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    for name in options.cells:
        if name in INSIDE:
            how = {"seed": options.seed, "rounds": options.rounds}
            for line in inside.measured(INSIDE[name], device, dtype, **how):
                yield {"cell": name, "draft": "plain", "side": options.label, **line}
            free()
    base = None
    if options.target:
        base = HFTarget.from_pretrained(options.target, dtype=dtype, device=device)
    for model, by_rows in asked_for(options, base).items():
        models = loader(model, device, dtype, base, options.draft)
        for asked, draft in product(by_rows.values(), options.drafts):
            yield from measured(asked, models, draft, options)
            # the next engine needs the memory of this one's pools
            free()
        del models
        free()


def names(text: str, known: Sequence[str]) -> list[str]:
    """Return comma-separated names, all known, those of `GROUPS` with what they stand for."""
    found: list[str] = []
    for name in filter(None, text.split(",")):
        some = GROUPS.get(name, (name,))
        if unknown := set(some) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; known: {', '.join(known)}")
        found += some
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cells",
        type=lambda text: names(text, [*CELLS, *INSIDE, *GROUPS]),
        default=[],
        help=", ".join([*CELLS, *INSIDE, *GROUPS]),
    )
    parser.add_argument(
        "--drafts",
        type=lambda text: names(text, list(DRAFTS)),
        default=["plain"],
        help=", ".join(DRAFTS),
    )
    parser.add_argument("--target", help="a published target: folder, GGUF file or name")
    parser.add_argument("--draft", help="what drafts for it")
    parser.add_argument("--prompts", type=Path, help="JSONL of its prompts")
    parser.add_argument("--new", type=int, default=256, help="most tokens of its answers")
    parser.add_argument("--count", type=int, default=160, help="its requests")
    parser.add_argument(
        "--at-once", type=lambda text: [*map(int, text.split(","))], default=[32], help="in flight"
    )
    parser.add_argument("--client", choices=CLIENTS, default="engine")
    parser.add_argument("--seconds", type=float, default=20.0, help="no requests after that")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="of the weights; by default their own")
    parser.add_argument("--label", default="this", help="what the lines call this side")
    parser.add_argument("--commit", help="what the lines call this version")
    parser.add_argument("--out", type=Path, help="folder of load.jsonl")
    parser.add_argument("--table", type=Path, help="print the table of results")
    options = parser.parse_args(argv)
    if options.target and options.prompts is None:
        parser.error("--target needs --prompts")
    if not (options.table or options.target or options.cells):
        parser.error("--cells or --target is needed")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    if options.table:
        print(table(read(options.table)))
        return
    where, lines = machine(options.commit), []
    for line in run(options):
        lines.append(line)
        print(json.dumps(line), flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "load.jsonl").open("a") as file:
                file.write(json.dumps(line | {"machine": where}) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
