"""Bound what prompts gain that ride in steps: one forward for verification and a chunk.

Three graphs are timed: a step that verifies without drafting, a chunk of prompts, and a chunk of as
many tokens as both have. The last is less than the forward that would do both: attention to
contexts, logits and choices of the verification come on top. So a chunk that rides saves at most
the first two less the third. From ``--lines`` of `bench.load` follows the most that each cell could
win: as if all its chunks rode, each with the largest saving of its model and tree.

    python -m bench.load --cells 1.5b-32,8b-32 --drafts plain,eagle3,eagle3-tree --out FOLDER
    python -m bench.tools.riding [--models 1.5b,8b] [--lines FOLDER/load.jsonl] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.lines import free
from bench.load.cells import CELLS, DRAFTS, shape_of
from bench.load.figures import read
from bench.step_timing import WARM, Stepper, between, check_advance, mark, timed
from bench.step_world import PLAIN, Setting, World
from specattn.speculative.prompts.launch import TARGET
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.prompts.runner import PIECES, NewPrompt, PromptRunner
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step.setup import StepSetup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Plain decoding, and as many nodes as the chain and the tree of `bench.load` have.
TREES = (PLAIN, Setting(2, 3, 4, "host"), Setting(2, 5, 16, "host"))
#: Tokens of a chunk; requests, and tokens of each.
CHUNKS, ROWS, CONTEXT = (128, 256, 512), 32, 256


def chunk_us(runner: PromptRunner, world: World, size: int, rounds: int) -> float:
    """Return microseconds of the device per chunk of ``size`` tokens, from one graph."""
    rows, found = world.rows[:PIECES], []
    ends = [size * at // len(rows) for at in range(len(rows) + 1)]
    texts = [[1] * (stop - start) for start, stop in pairwise(ends)]
    news = [NewPrompt(one, SamplingParams()) for one in map(Prompt, rows, texts)]
    stats, before = runner.targets.stats, runner.run(news)
    begun = stats.replays[TARGET]
    for _ in range(WARM + rounds):
        begin = mark(world.device)
        after = runner.run(news)
        found.append((begin, mark(world.device)))
        # the device has the next one already
        before[-1].wait()
        before = after
    assert (stats.replays[TARGET] - begun, stats.eager.total()) == (WARM + rounds, 0), stats
    before[-1].wait()
    return statistics.median(between(*span) for span in found[WARM:])


def measured(world: World, model: str, rounds: int, chunks: Sequence[int]) -> Iterator[Any]:
    """Yield a line per tree and chunk."""
    count = len(world.rows)
    sizes = {one + extra for one in chunks for extra in (0, *(t.nodes * count for t in TREES))}
    setup = StepSetup.over(world.plain, None, PLAIN.config(world.longest, count), table=world.table)
    runner = PromptRunner.of(setup, buckets=sorted(sizes), chunk=max(sizes))
    times = {size: chunk_us(runner, world, size, rounds) for size in sorted(sizes)}
    for setting in TREES:
        # a step gains two tokens of a tree, which is so deep at least
        length = min(setting.steps + 1, 2)
        decoder = world.decoder(setting, [count], accept := world.forced(length))
        rows = world.admit(decoder, count, world.rooms[0])
        stepper = Stepper(decoder, rows, accept, **setting.options(count, world.lowest))
        stepper.force(length)
        check_advance(stepper)
        step = timed(stepper, rounds)["us"]
        stepper.check()
        for size in chunks:
            chunk, both = times[size], times[size + setting.nodes * count]
            line = {"model": model, "nodes": setting.nodes, "rows": count, "chunk": size}
            line |= {"step_us": step, "chunk_us": chunk, "both_us": both}
            yield line | {"saved_us": max(step + chunk - both, 0.0)}


def most(lines: list[Any], cells: list[Any]) -> Iterator[Any]:
    """Yield what each cell could win, from what chunks save that ride."""
    for cell in (one for one in cells if one["cell"] in CELLS and one.get("steps")):
        key = CELLS[cell["cell"]].model, DRAFTS[cell["draft"]].setting.shape[2]
        saved = max((x["saved_us"] for x in lines if (x["model"], x["nodes"]) == key), default=None)
        if saved is not None:
            gone = min(cell["prompt_calls"], cell["steps"]) * saved / 1e6
            found = {name: cell[name] for name in ("cell", "draft", "tokens_per_s")}
            found |= {"chunks_per_step": cell["prompt_calls"] / cell["steps"], "saved_us": saved}
            yield found | {"at_most": cell["seconds"] / (cell["seconds"] - gone)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="1.5b,8b")
    parser.add_argument("--rounds", type=int, default=20)
    for name in ("--lines", "--out"):
        parser.add_argument(name, type=Path)
    options, found = parser.parse_args(), []
    for model in options.models.split(","):
        world = World(shape_of(model), [CONTEXT] * ROWS, torch.device("cuda"))
        found += measured(world, model, options.rounds, CHUNKS)
        del world
        free()
    found += most(found, read(options.lines) if options.lines else [])
    print(*map(json.dumps, found), sep="\n")
    if options.out:
        options.out.write_text("".join(f"{json.dumps(line)}\n" for line in found))


if __name__ == "__main__":
    main()
