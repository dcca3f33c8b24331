"""Whole speculative steps at the real size: how long they take, and which kernels they have.

Models of 8B with random weights, requests in mid-decode, a step as one graph, and how much of a
tree is kept forced; see `bench.step_world`. Before anything is timed, the target's logits over a
tree are compared with float64, and every step is checked to gain what was forced, or less where
its tree was not so deep. Plain decoding in one graph runs at the same places.

Drafts are of an EAGLE-3 head, with ``--dflash`` also of one forward per block, in best-first
trees. With ``--mtp`` the model is a hybrid, whose layers attend or have states, and an MTP layer of
its own kind drafts. With ``--host`` the host hands over trees that it has: a tree of a text
proposer hangs below a token that the host has read, so no such step is launched ahead, and the
round trip tells.

    python -m bench.step [--models Llama-3.1-8B] [--batch 1,4] [--context 1024] [--out FILE]
    python -m bench.step --dflash
    python -m bench.step --mtp [--states bfloat16]
    python -m bench.step --host
    python -m bench.step --weights fp8 [--draft-weights fp8]   # quantised, see `FORMATS`
    python -m bench.step --batch 16 --context 16640 --common 16384 [--backend triton_sharing]
    python -m bench.step --compile I/N   # share I of N of the settings, compiled, not timed
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import step_blocks
from bench.lines import free
from bench.step_oracle import check
from bench.step_timing import Stepper, check_advance, launched, timed, traced
from bench.step_world import HOST, MTP, PLAIN, SETTINGS, Setting, World, shapes
from bench.suite import roofs
from bench.suite.blocks import DRAFTING
from bench.suite.machine import machine
from bench.suite.results import write
from specattn.models.fused.scaled import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.step_world import Shape

RESULTS = Path(__file__).parent / "results"


#: By the kind of drafts, what is measured unless the command line says otherwise, and how many
#: tokens of context have keys and values that fit beside the weights.
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "models": "Llama-3.1-8B,Qwen3-8B",
        "batch": "1,4,16,64",
        "context": "1024,4096,32768",
        "fits": 16 * 32768,
        "out": RESULTS / "step_h200.json",
    },
    "dflash": {
        "models": "Llama-3.1-8B",
        "batch": "1,4,16",
        "context": "4096,32768",
        "fits": 64 * 1024,
        "out": RESULTS / "step_dflash.json",
    },
    "mtp": {
        "models": "Qwen3.5-9B",
        "batch": "1,16",
        "context": "4096",
        "fits": 16 * 32768,
        "out": RESULTS / "step_mtp.json",
    },
    "host": {
        "models": "Llama-3.1-8B",
        "batch": "1,16",
        "context": "4096",
        "fits": 64 * 1024,
        "out": RESULTS / "step_host.json",
    },
}


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """Return what is measured, plain decoding first."""
    others = {"dflash": step_blocks.SETTINGS, "mtp": MTP, "host": HOST}
    found = others.get(options.drafts, SETTINGS)
    return [PLAIN, *(setting for setting in found if options.settings in setting.name)]


def rooms(cells: list[Any]) -> list[int]:
    """Return the longest context of the request at every place of a batch."""
    kept = [(batch, context) for batch, context, fits in cells if fits]
    most = max(batch for batch, _ in kept)
    return [max(context for batch, context in kept if batch > at) for at in range(most)]


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
        rows = world.admit(decoder, batch, context)
        stepper = Stepper(decoder, rows, accept, **setting.options(batch, world.lowest))
        stepper.force(length)
        check_advance(stepper)
        read = world.read_bytes(setting, batch, context)
        cell |= {
            "length": length,
            **timed(stepper, options.rounds),
            **launched(stepper, options.rounds),
            "bytes": read,
            "operations": world.operations(setting, batch),
            "floor_us": round(sum(read.values()) / copy_tb_s / 1e6, 2),
        }
        stepper.check()
        cell["short"] = sum(stepper.short)
        print(
            f"  {cell['model']} {cell['setting']:12} {batch:3} x {context:5} "
            f"{cell['us']:9.1f} us  floor {cell['floor_us']:9.1f}  "
            f"{cell['us'] / cell['floor_us']:.3f}x  host {cell['host_us']:6.1f} "
            f"{cell['host_p10_us']:6.1f} {cell['host_idle_us']:6.1f}",
            flush=True,
        )
        yield cell


def trace(
    world: World, setting: Setting, cells: list[dict[str, Any]], options: argparse.Namespace
) -> None:
    """Add to measured cells of a setting what a trace says."""
    length = min(setting.steps + 1, options.length)
    accept = world.forced(length)
    decoder = world.decoder(setting, sorted({cell["batch"] for cell in cells}), accept)
    for cell in cells:
        batch = cell["batch"]
        rows = world.admit(decoder, batch, cell["context"])
        stepper = Stepper(decoder, rows, accept, **setting.options(batch, world.lowest))
        stepper.force(length)
        found = cell["trace"] = traced(stepper)
        stepper.check()
        if setting.draft == "dflash":
            cell["tree_us"] = sum(k["us"] for k in found["by_name"] if DRAFTING in k["name"])
        print(f"  {cell['model']} {setting.name}, {batch} x {cell['context']}")
        for one in found["by_name"]:
            print(f"    {one['us']:9.1f} us {one['count']:5.0f} x  {one['name'][:90]}", flush=True)


def run(
    models: dict[str, Shape],
    make: Callable[[Shape], World],
    options: argparse.Namespace,
    record: dict[str, Any],
) -> Iterator[None]:
    """Measure models one after the other, each plainly first; yield when the record has grown.

    Traces come after everything was timed, for a profiler slows launches for good.
    """
    cells = record["cells"]
    for tracing in (False, True) if options.trace else (False,):
        for name, shape in models.items():
            world = make(shape)
            for setting in settings_of(options):
                key = name, setting.name
                if tracing:
                    mine = [one for one in cells if (one["model"], one["setting"]) == key]
                    trace(world, setting, [one for one in mine if "skipped" not in one], options)
                    yield
                    continue
                for cell in measured(world, setting, name, options, record["roofs"]["copy_tb_s"]):
                    cells.append(cell)
                    yield
            del world
            free()


def compile_share(options: argparse.Namespace, world: Callable[..., World]) -> None:
    """Run every I-th of N of all settings and buckets once, on short models."""
    index, count = map(int, options.compile.split("/"))
    # a kernel is compiled for strides' divisibility, so widths stay and only the depth is cut; a
    # block's head reads as many states of the target as if it were whole
    layers = 8 if options.drafts == "dflash" else 4
    found = shapes(max(rooms(options.places)) + 128, layers, options.states)
    batches = sorted({batch for batch, _, _ in options.places})
    jobs = [
        (name, setting, batch)
        for setting in reversed(settings_of(options))
        for name in options.models.split(",")
        for batch in batches
    ][index::count]
    for name, shape in found.items():
        if any(job[0] == name for job in jobs):
            made = world(shape, [1024] * max(batches), torch.device("cuda"))
            for _, setting, batch in (job for job in jobs if job[0] == name):
                decoder = made.decoder(setting, [batch], made.forced(1), record=False)
                rows = made.admit(decoder, batch, 1024)
                decoder.step_async(rows, **setting.options(batch, made.lowest)).wait()
            del made
        # many processes share the device
        free()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind in ("dflash", "mtp", "host"):
        parser.add_argument(
            f"--{kind}", dest="drafts", action="store_const", const=kind, default="eagle3"
        )
    parser.add_argument("--models")
    parser.add_argument("--settings", default="", help="those whose name contains this, and plain")
    parser.add_argument("--batch")
    parser.add_argument("--context")
    parser.add_argument("--common", type=int, default=0, help="tokens that all requests begin with")
    parser.add_argument("--backend", default="triton")
    for name in ("--weights", "--draft-weights"):
        parser.add_argument(name, choices=tuple(FORMATS))
    parser.add_argument("--states", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--length", type=int, default=4, help="tokens to gain per step, at most")
    parser.add_argument("--no-trace", dest="trace", action="store_false")
    parser.add_argument("--compile", metavar="I/N")
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(**KINDS[parser.parse_args().drafts])
    options = parser.parse_args()
    if options.drafts in ("dflash", "mtp") and (options.weights or options.draft_weights):
        parser.error("--weights: blocks and hybrids have no quantised models here")
    own = options.drafts == "mtp"
    known = [name for name, shape in shapes(1).items() if (shape.draft is None) == own]
    for name in options.models.split(","):
        if name not in known:
            parser.error(f"--models: {name!r} is none of {', '.join(known)}")
    batches, contexts = (map(int, text.split(",")) for text in (options.batch, options.context))
    # and whether they fit
    options.places = [(b, c, b * c <= options.fits) for b, c in product(batches, contexts)]
    return options


def main() -> None:
    options = arguments()
    world: Any = step_blocks.BlockWorld
    if options.drafts != "dflash":
        ways = {"weights": options.weights, "draft_weights": options.draft_weights}
        world = partial(World, **{name: way for name, way in ways.items() if way})
    if options.compile:
        compile_share(options, world)
        return
    record: dict[str, Any] = {
        "format": 1,
        "machine": machine(options.commit),
        "rounds": options.rounds,
        "model": options.models,
        "weights": [options.weights, options.draft_weights],
        "states": options.states,
        "roofs": roofs.measure(options.rounds),
        "cells": [],
    }
    free()
    lens = rooms(options.places)
    known = shapes(max(lens) + 256, None, options.states)
    models = {name: known[name] for name in options.models.split(",")}

    def make(shape: Shape) -> World:
        made = world(shape, lens, torch.device("cuda"), backend=options.backend)
        made.share(options.common)
        return made

    for _ in run(models, make, options, record):
        write(record, options.out)


if __name__ == "__main__":
    main()
