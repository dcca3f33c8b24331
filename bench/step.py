"""Whole speculative steps at the real size: how long they take, and what the time goes into.

Models of 8B with random weights and an EAGLE-3 head, requests in mid-decode, a step as one graph,
and how much of a tree is kept forced; see `bench.step_world`. Before anything is timed, the
target's logits over a tree are compared with float64, and every step is checked to gain what was
forced, or less where its tree was not so deep. Plain decoding in one graph runs at the same places.

    python -m bench.step [--models Llama-3.1-8B] [--batch 1,4] [--context 1024] [--out FILE]
    python -m bench.step --compile I/N   # share I of N of the settings, compiled, not timed
    python -m bench.step --dflash        # blocks of one forward and best-first trees
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import timeline
from bench.step_oracle import check
from bench.step_timing import (
    Patience,
    Stepper,
    calm_loop,
    check_advance,
    launched,
    timed,
)
from bench.step_world import PLAIN, SETTINGS, Setting, World, shapes
from bench.suite.machine import machine
from bench.suite.results import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.step_world import Shape

RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "step_h200.json"
BLOCKS = RESULTS / "step_dflash.json"
BATCHES, CONTEXTS = (1, 4, 16, 64), (1024, 4096, 32768)
# tokens of context whose keys and values fit beside the weights
FITS = 16 * 32768
# the cell whose kernels are told, and of all forced lengths
SHOWN = ("Llama-3.1-8B", Setting(4, 5, 16), 1, 4096)
TRACED = 3


def places(batches: Sequence[int], contexts: Sequence[int], fits: int = FITS) -> list[Any]:
    """Return every batch and context, and whether it fits."""
    return [(b, c, b * c <= fits) for b in batches for c in contexts]


def rooms(cells: list[Any]) -> list[int]:
    """Return the longest context of the request at every place of a batch."""
    kept = [(batch, context) for batch, context, fits in cells if fits]
    most = max(batch for batch, _ in kept)
    return [max(context for batch, context in kept if batch > at) for at in range(most)]


def divided(found: dict[str, Any]) -> dict[str, float]:
    """Divide a traced step: target, draft, attention (of both), other and idle, in us."""
    shares = dict.fromkeys(("target", "draft", "attention", "other", "idle"), 0.0)
    for phase, row in found["phases"].items():
        model = {"verify": "target", "draft": "draft", "extend": "draft"}.get(phase, "other")
        for kind, us in row.items():
            if kind == "glue" or kind.endswith("GEMM"):
                shares[model] += us
            else:
                shares[kind] += us
    return {name: round(us, 1) for name, us in shares.items()}


def traced(stepper: Stepper, *, shown: bool = False) -> dict[str, Any]:
    """Record steps with the profiler; print and keep the kernels of one that is shown."""
    trace = timeline.record(stepper.both, steps=TRACED, timed=20 * shown)
    stepper.finish()
    found = timeline.numbers(trace, timeline.middle(trace))
    kept = {key: found[key] for key in ("us", "untraced_us", "gaps_over_2us", "phases")}
    if shown:
        kept["by_name"] = found["by_name"]
        print(timeline.markdown(found))
        for line in found["by_name"][:24]:
            print(f"    {line['us']:9.1f} us {line['count']:4} x  {line['phase']:8} {line['name']}")
    return kept | {"kernels": found["kernels"], "divided": divided(found)}


def measured(
    world: World, setting: Setting, name: str, options: argparse.Namespace, copy_tb_s: float
) -> Iterator[dict[str, Any]]:
    """Check a setting, capture it, and time it at every place."""
    length = min(setting.steps + 1, options.length)
    error = check(world, setting, length)
    accept, cells = world.forced(length), options.places
    begin = time.perf_counter()
    decoder = world.decoder(setting, sorted({batch for batch, _, _ in cells}), accept)
    captured = time.perf_counter() - begin
    print(f"{name} {setting.name}: error {error:.1e}, captured in {captured:.1f} s", flush=True)
    for batch, context, fits in cells:
        cell = {
            "model": name,
            "setting": setting.name,
            "topk": setting.topk,
            "steps": setting.steps,
            "nodes": setting.nodes,
            "batch": batch,
            "context": context,
            "error": round(error, 5),
        }
        if not fits:
            yield cell | {"skipped": f"keys and values of {batch * context} tokens do not fit"}
            continue
        stepper = Stepper(decoder, world.admit(decoder, batch, context), accept)
        stepper.force(length)
        check_advance(stepper)
        read = world.read_bytes(setting, batch, context)
        cell |= {
            "length": length,
            **options.patience.calmest(stepper, options.rounds),
            **launched(stepper, options.rounds),
            "bytes": read,
            "operations": world.operations(setting, batch),
            "floor_us": round(sum(read.values()) / copy_tb_s / 1e6, 2),
        }
        if _shown(cell):
            cell["by_length"] = _lengths(stepper, options)
        stepper.check()
        cell["short"] = sum(stepper.short)
        _print(cell)
        yield cell


def _shown(cell: dict[str, Any]) -> bool:
    name, setting, *place = SHOWN
    found = [cell["model"], cell["setting"], cell["batch"], cell["context"]]
    return found == [name, setting.name, *place]


def trace(
    world: World, setting: Setting, cells: list[dict[str, Any]], options: argparse.Namespace
) -> None:
    """Add to measured cells of a setting what a trace says."""
    length = min(setting.steps + 1, options.length)
    accept = world.forced(length)
    decoder = world.decoder(setting, sorted({cell["batch"] for cell in cells}), accept)
    for cell in cells:
        stepper = Stepper(decoder, world.admit(decoder, cell["batch"], cell["context"]), accept)
        stepper.force(length)
        stepper.both()
        stepper.finish()
        found = traced(stepper, shown=_shown(cell))
        stepper.check()
        cell["trace"] = found
        parts = " ".join(f"{name} {us:.0f}" for name, us in found["divided"].items())
        print(
            f"  {cell['model']} {cell['setting']:12} {cell['batch']:3} x {cell['context']:5} "
            f"{found['us']:9.1f} us  {parts}  gaps {found['gaps_over_2us']['share']:.2%}",
            flush=True,
        )


def _lengths(stepper: Stepper, options: argparse.Namespace) -> dict[str, float]:
    """Return microseconds for every length that can be forced."""
    kept, found = stepper.length, {}
    for length in range(1, stepper.decoder.config.num_steps + 2):
        stepper.force(length)
        found[str(length)] = timed(stepper, options.rounds)["us"]
    stepper.force(kept)
    return found


def _print(cell: dict[str, Any]) -> None:
    text = (
        f"  {cell['model']} {cell['setting']:12} {cell['batch']:3} x {cell['context']:5} "
        f"{cell['us']:9.1f} us  floor {cell['floor_us']:9.1f}  "
        f"{cell['us'] / cell['floor_us']:.3f}x  host {cell['host_us']:6.1f} "
        f"{cell['host_p10_us']:6.1f} {cell['host_idle_us']:6.1f}"
    )
    print(text, flush=True)


def run(
    models: dict[str, Shape],
    make: Callable[[Shape], World],
    options: argparse.Namespace,
    copy_tb_s: float,
) -> Iterator[dict[str, Any]]:
    """Measure models one after the other, each plainly first."""
    settings = _settings(options)
    fitting = sum(fits for _, _, fits in options.places)
    calm_us = calm_loop()
    for name, shape in models.items():
        world = make(shape)
        # one model's long steps, which come last, leave the next one's share alone
        options.patience = Patience(options.seconds / len(models), len(settings) * fitting, calm_us)
        for setting in settings:
            yield from measured(world, setting, name, options, copy_tb_s)
        del world
        free()


def trace_all(
    models: dict[str, Shape],
    make: Callable[[Shape], World],
    options: argparse.Namespace,
    cells: list[dict[str, Any]],
) -> Iterator[Setting]:
    """Trace every cell that was measured, setting by setting, which are yielded when they are done.

    That is after everything was timed, for a profiler slows launches for good.
    """
    for name, shape in models.items():
        world = make(shape)
        for setting in _settings(options):
            trace(
                world,
                setting,
                [
                    cell
                    for cell in cells
                    if "skipped" not in cell
                    and (cell["model"], cell["setting"]) == (name, setting.name)
                ],
                options,
            )
            yield setting
        del world
        free()


def _settings(options: argparse.Namespace) -> list[Setting]:
    return [PLAIN, *(setting for setting in SETTINGS if options.settings in setting.name)]


def free() -> None:
    """Give the device's memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compile_share(share: str, options: argparse.Namespace) -> None:
    """Run every I-th of N of all settings and buckets once, on short models."""
    index, count = map(int, share.split("/"))
    # a kernel is compiled for strides' divisibility, so widths stay and only the depth is cut
    found = shapes(max(rooms(options.places)) + 128, layers=4)
    batches = sorted({batch for batch, _, _ in options.places})
    jobs = [
        (name, setting, batch)
        for setting in reversed((PLAIN, *SETTINGS))
        for name in options.models.split(",")
        for batch in batches
    ]
    for name, shape in found.items():
        mine = [job for job in jobs[index::count] if job[0] == name]
        if mine:
            _compile(World(shape, [1024] * max(batches), torch.device("cuda")), mine)
        # many processes share the device
        free()


def _compile(world: World, jobs: list[tuple[str, Setting, int]]) -> None:
    for _, setting, batch in jobs:
        decoder = world.decoder(setting, [batch], world.forced(1), record=False)
        decoder.step(world.admit(decoder, batch, 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="Llama-3.1-8B,Qwen3-8B")
    parser.add_argument("--settings", default="", help="those whose name contains this, and plain")
    parser.add_argument("--batch", default=",".join(map(str, BATCHES)))
    parser.add_argument("--context", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--patience",
        type=float,
        default=90.0,
        metavar="SECONDS",
        dest="seconds",
        help="how long to wait in all for a host that others hold up",
    )
    parser.add_argument("--length", type=int, default=4, help="tokens to gain per step, at most")
    parser.add_argument("--no-trace", dest="trace", action="store_false")
    parser.add_argument("--compile", metavar="I/N")
    parser.add_argument(
        "--dflash",
        action="store_true",
        help="time DFlash's blocks and best-first trees, beside EAGLE-3 and plain decoding in turn",
    )
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    known = shapes(1)
    for name in options.models.split(","):
        if name not in known:
            parser.error(f"--models: {name!r} is none of {', '.join(known)}")
    if options.dflash:
        blocks(options)
        return
    numbers = (list(map(int, text.split(","))) for text in (options.batch, options.context))
    options.places = places(*numbers)
    if options.compile:
        compile_share(options.compile, options)
        return
    from bench.suite import roofs

    record: dict[str, Any] = {
        "format": 1,
        "machine": machine(options.commit),
        "rounds": options.rounds,
        "roofs": roofs.measure(options.rounds),
        "cells": [],
    }
    torch.cuda.empty_cache()
    lens = rooms(options.places)
    known = shapes(max(lens) + 128)
    models = {name: known[name] for name in options.models.split(",")}

    def make(shape: Shape) -> World:
        return World(shape, lens, torch.device("cuda"))

    for cell in run(models, make, options, record["roofs"]["copy_tb_s"]):
        record["cells"].append(cell)
        write(record, options.out)
    if options.trace:
        for _ in trace_all(models, make, options, record["cells"]):
            write(record, options.out)


def blocks(options: argparse.Namespace) -> None:
    """Time DFlash's blocks, with the first of the models; see `bench.step_blocks`."""
    from bench.step_blocks import PLACES, SETTINGS, BlockWorld, measure

    name = options.models.split(",")[0]
    settings = [one for one in SETTINGS if one == PLAIN or options.settings in one.name]
    if options.compile:
        index, count = map(int, options.compile.split("/"))
        batches = dict.fromkeys(batch for batch, _ in PLACES)
        jobs = [(name, setting, batch) for setting in reversed(settings) for batch in batches]
        # the head reads as many states of the target as if it were whole
        shape = shapes(2048, layers=8)[name]
        _compile(BlockWorld(shape, [1024] * max(batches), torch.device("cuda")), jobs[index::count])
        return
    from bench.suite import roofs

    record: dict[str, Any] = {
        "format": 1,
        "machine": machine(options.commit),
        "rounds": options.rounds,
        "model": name,
        "roofs": roofs.measure(options.rounds),
        "cells": [],
    }
    free()
    lens = rooms([(batch, context, True) for batch, context in PLACES])
    world = BlockWorld(shapes(max(lens) + 256)[name], lens, torch.device("cuda"))
    out, kept = (BLOCKS if options.out == OUT else options.out), []
    for cell, stepper in measure(
        world,
        settings,
        PLACES,
        length=options.length,
        rounds=options.rounds,
        copy_tb_s=record["roofs"]["copy_tb_s"],
    ):
        kept.append((cell, stepper))
        record["cells"].append(cell)
        write(record, out)
    # after everything was timed, for a profiler slows launches for good
    for cell, stepper in kept:
        if options.trace and cell["tree_us"] is not None:
            cell["trace"] = traced(stepper)
            write(record, out)


if __name__ == "__main__":
    main()
