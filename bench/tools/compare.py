"""Time two checkouts in turns, old, new, old, new, each in processes of its own.

``quick`` is ``specattn bench``; ``step`` is `bench.step` at 1 and 16 requests of 4k tokens (plain,
a chain of 3, a tree of 16 nodes of Llama's size), with the host time of a launch and the memory of
the graphs; ``import`` is what importing takes. Records and the table so far are written after
every process, so that a run that is cut short leaves what it has.

    python -m bench.tools.compare --old OLD --new NEW --out DIR [--seconds 540] [--turns 4]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.tools.trees import HERE, start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TREES = ("old", "new")
KEPT = ("chain 1-3-4", "tree 4-5-16")
PLACE = ["--models", "Llama-3.1-8B", "--batch", "1,16", "--context", "4096"]
# both trees' `bench.step`, of two of its configs, which also tells the memory of what it captures
STEP = f"""
import json, sys
from bench import step
kept, out = {KEPT!r}, sys.argv.pop(1)
step.SETTINGS = tuple(one for one in step.SETTINGS if one.name in kept)
decoder, found = step.World.decoder, {{}}
def watched(world, config, *rest, **more):
    made = decoder(world, config, *rest, **more)
    reports = made.report() if more.get("record", True) else ()
    if reports:
        took = [(one.nbytes, one.seconds) for one in reports]
        found[config.name] = [sum(column) for column in zip(*took)]
        open(out, "w").write(json.dumps(found))
    return made
step.World.decoder = watched
# an older checkout may wait for a calmer host, which this one does not
sys.argv += ["--patience", "0"] if hasattr(step, "Patience") else []
step.main()
"""
IMPORT = """
import json, sys, time
begin = time.perf_counter()
import torch, transformers
heavy = time.perf_counter()
import specattn
first = time.perf_counter()
from specattn import Engine
import specattn.cli.app
end = time.perf_counter()
modules = sum(name.startswith("specattn") for name in sys.modules)
open(sys.argv[1], "w").write(json.dumps(
    {"specattn": 1e3 * (first - heavy), "engine and command line": 1e3 * (end - first),
     "modules": modules}))
"""
# microseconds of a step's record that are compared, and what they are called
STEP_KEYS = {
    "us": "step us",
    "host_p10_us": "launch us, quietest tenth",
    "host_idle_us": "launch us, idle device",
}


def quick(options: argparse.Namespace, folder: Path, turn: int) -> list[str]:
    workers = [] if not turn else ["--workers", "0"]
    rounds = ["--rounds", str(options.quick_rounds)]
    return ["-m", "specattn", "bench", "--out", str(folder), *rounds, *workers]


def step(options: argparse.Namespace, folder: Path, turn: int) -> list[str]:
    rounds = ["--rounds", str(options.step_rounds)]
    out = ["--out", str(folder / "step.json"), "--no-trace"]
    return ["-c", STEP, str(folder / "capture.json"), *PLACE, *rounds, *out]


def imports(options: argparse.Namespace, folder: Path, turn: int) -> list[str]:
    return ["-c", IMPORT, str(folder / "import.json")]


WHAT: dict[str, Callable[[argparse.Namespace, Path, int], list[str]]] = {
    "quick": quick,
    "step": step,
    "import": imports,
}


def numbers(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Yield kind, cell and value of everything that a turn's folder holds."""
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_text())
        except json.JSONDecodeError:  # was cut off while it was written
            continue
        if path.name == "quick.json":
            for cell in found["cells"]:
                for line in cell["contestants"]:
                    if line["name"].startswith("specattn") and "us" in line:
                        yield "attention us", f"{cell['name']}: {line['name']}", line["us"]
                        if line.get("plan_us"):
                            name = f"{cell['name']}: {line['name']}"
                            yield "plan us", name, line["plan_us"]
        elif path.name == "step.json":
            for cell in found["cells"]:
                name = f"{cell['setting']}, {cell['batch']} x {cell['context']}"
                for key, kind in STEP_KEYS.items():
                    if key in cell:
                        yield kind, name, cell[key]
        elif path.name == "capture.json":
            for name, (size, seconds) in found.items():
                yield "graphs MiB", name, size / 2**20
                yield "capture s", name, seconds
        elif path.name == "import.json":
            for name, value in found.items():
                yield "import ms", name, value


def gathered(out: Path) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the values of all turns, by kind, cell and tree."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for tree in TREES:
        for folder in sorted(out.glob(f"{tree}-*")):
            for kind, name, value in numbers(folder):
                cell = found.setdefault(kind, {}).setdefault(name, {one: [] for one in TREES})
                cell[tree].append(value)
    return found


def table(found: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """Return a line per cell: medians, their ratio, the new tree's turns, and geomeans."""
    lines = []
    for kind, cells in found.items():
        ratios = []
        lines.append(f"\n{kind:58} {'old':>10} {'new':>10} {'new/old':>8}  spread old, new")
        for name, values in cells.items():
            if not all(values.values()):
                continue
            old, new = (statistics.median(values[tree]) for tree in TREES)
            spreads = " ".join(
                f"{max(values[tree]) / max(min(values[tree]), 1e-9) - 1:6.1%}" for tree in TREES
            )
            ratio = new / old if old else math.nan
            ratios += [ratio] if ratio > 0 else []
            mark = " !" if ratio > 1.02 else ""
            delta = f" ({new - old:+.2f})" if kind.startswith(("launch", "import")) else ""
            lines.append(
                f"  {name:56} {old:10.2f} {new:10.2f} {ratio:8.4f}  {spreads}{mark}{delta}"
            )
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            lines.append(f"  {'geomean, worst':56} {'':21} {mean:8.4f}  {max(ratios):.4f}")
    return "\n".join(lines)


def warm(options: argparse.Namespace, end: float) -> None:
    """Compile both trees' steps, several processes at once: only then is anything timed."""
    running = [
        start(
            getattr(options, tree),
            ["-c", STEP, str(options.out / "ignored.json"), *PLACE, "--compile", f"{at}/{count}"],
            options.out / f"warm-{tree}.log",
        )
        for tree in TREES
        for count in [options.warm]
        for at in range(count)
    ]
    for process in running:
        wait(process, end)


def wait(process: subprocess.Popen[str], end: float) -> str:
    """Wait for a process, at most until ``end``; returns how it ended."""
    try:
        return f"exit {process.wait(timeout=max(1.0, end - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "out of time"


def run(options: argparse.Namespace) -> None:
    begin = time.monotonic()
    end, longest = begin + options.seconds, 0.0
    taken: list[dict[str, Any]] = []
    if options.warm and "step" in options.what:
        warm(options, end)
        print(f"compiled ahead after {time.monotonic() - begin:.0f} s", flush=True)
    for turn in range(options.turns):
        if time.monotonic() + longest > end:
            print(f"no time is left for turn {turn}", flush=True)
            break
        turned = time.monotonic()
        for what in options.what:
            for tree in TREES:
                folder = options.out / f"{tree}-{turn}"
                folder.mkdir(parents=True, exist_ok=True)
                at = time.monotonic()
                command = WHAT[what](options, folder, turn)
                process = start(getattr(options, tree), command, options.out / f"{tree}.log")
                ended, seconds = wait(process, end), time.monotonic() - at
                taken.append({"turn": turn, "tree": tree, "what": what, "ended": ended})
                taken[-1]["seconds"] = round(seconds, 1)
                print(f"{turn} {tree} {what}: {seconds:.1f} s, {ended}", flush=True)
                write(options.out, taken)
        # the first turn compiles
        longest = time.monotonic() - turned if turn else 0.5 * (time.monotonic() - turned)
    print(table(gathered(options.out)))


def write(out: Path, taken: Sequence[dict[str, Any]]) -> None:
    """Write what is known by now."""
    found = gathered(out)
    (out / "compare.json").write_text(json.dumps({"taken": taken, "values": found}, indent=1))
    (out / "compare.txt").write_text(table(found) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, help="a checkout")
    parser.add_argument("--new", type=Path, default=HERE, help="another one")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--what", type=lambda text: text.split(","), default=list(WHAT))
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--quick-rounds", type=int, default=20)
    parser.add_argument("--step-rounds", type=int, default=40)
    parser.add_argument("--warm", type=int, default=4, help="processes a tree that compile ahead")
    parser.add_argument("--report", action="store_true", help="print what DIR holds, run nothing")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.what = ["step" if one == "host" else one for one in options.what]
    options.what = list(dict.fromkeys(options.what))
    if unknown := set(options.what) - set(WHAT):
        parser.error(f"--what: {', '.join(sorted(unknown))}; known: {', '.join([*WHAT, 'host'])}")
    if options.report:
        print(table(gathered(options.out)))
        return
    if options.old is None:
        parser.error("--old is missing")
    options.out.mkdir(parents=True, exist_ok=True)
    run(options)


if __name__ == "__main__":
    main()
