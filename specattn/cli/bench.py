"""``specattn bench``: the attention benchmark of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specattn.cli.errors import ArgumentError, refuse
from specattn.cli.options import source

if TYPE_CHECKING:
    from types import ModuleType

_SUITE = "specattn._bench"
_ROOT = Path(__file__).parents[2]
_COMMAND = (sys.executable, "-m", "specattn")
_log = partial(print, flush=True)

# what does not time anything reads few of the options
_READ_BY = {"report": ("out",), "listing": ("full", "part", "only")}


def bench(  # noqa: PLR0913 - a command's options
    ctx: typer.Context,
    full: Annotated[bool, typer.Option("--full", help="All parts; otherwise a quick set.")] = False,
    part: Annotated[
        list[str] | None, typer.Option("--part", metavar="NAME", help="A part of the full set.")
    ] = None,
    only: Annotated[
        str, typer.Option("--only", metavar="TEXT", help="Cells whose name contains TEXT.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the results.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=5, help="Replays of each kernel.")] = 20,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="Processes that compile ahead.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option("--commit", help="What the results call this version.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep cells already in DIR.")] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="KERNEL[@CELL]", help="Leave a kernel out."),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List parts, cells and peers.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write what auto takes, and tables of docs/, from DIR.")
    ] = False,
    shard: Annotated[str, typer.Option("--shard", hidden=True)] = "",
) -> None:
    """Time attention against other libraries on this GPU; results are checked first."""
    import torch

    from specattn.backends import fastest

    _check_read(ctx)
    chosen = _chosen(full, part or [], only)
    folder = out or _results()
    if report:
        docs, no_docs = _ROOT / "docs", "writes docs/ of a checkout, and this is an installation"
        refuse(
            (not docs.is_dir(), "--report", no_docs),
            (not folder.is_dir(), "--out", f"no such folder of results: {folder}"),
        )
        record = _suite("choices").write(_suite("results").read(folder), fastest.RECORD)
        for path in (*_suite("report").write(folder, docs), record):
            print(path)
        return
    if listing:
        _list(chosen)
        return
    if not torch.cuda.is_available():
        raise ArgumentError("bench", "needs a CUDA device, and torch sees none here")
    if shard:
        index, count = map(int, shard.split("/"))
        cells = [cell for one in chosen for cell in one.cells]
        raise typer.Exit(1 if _suite("run").compile_share(cells, index, count) else 0)
    _warm(workers)
    options = {"rounds": rounds, "commit": commit, "skip": skip or []}
    runner = _suite("run").Runner(folder, log=_log, resume=resume, **options)
    try:
        for one in chosen:
            runner.part(one)
    except _suite("run").DeviceLost as lost:
        _log(f"starting anew without {lost}")
        again = [word for word in sys.argv[1:] if word != "--resume"]
        os.execv(
            sys.executable,
            [*_COMMAND, *again, "--workers", "0", "--resume", "--skip", str(lost)],
        )


def _check_read(ctx: typer.Context) -> None:
    """Refuse options that another one makes meaningless."""
    written = {param.name: param.opts[0] for param in ctx.command.params if param.name}
    given = [name for name in written if source(ctx, name) == "COMMANDLINE"]
    for mode, read in _READ_BY.items():
        unread = [name for name in given if name not in (mode, *read)]
        if mode in given and unread:
            raise ArgumentError(
                written[unread[0]], f"cannot be combined with {written[mode]}, which times nothing"
            )
    if "full" in given and "part" in given:
        raise ArgumentError("--part", "cannot be combined with --full, which has all parts")


def _suite(name: str) -> ModuleType:
    """Import a module of the installed suite, else of the checkout's."""
    if _SUITE not in sys.modules and util.find_spec(_SUITE) is None:
        init = _ROOT / "bench" / "suite" / "__init__.py"
        spec = util.spec_from_file_location(
            _SUITE, init, submodule_search_locations=[str(init.parent)]
        )
        if spec is None or spec.loader is None or not init.is_file():
            raise ArgumentError("bench", "this installation came without the benchmark")
        sys.modules[_SUITE] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_SUITE])
    return import_module(f"{_SUITE}.{name}")


def _results() -> Path:
    """Return the folder of results: the checkout's, else one here."""
    kept = _ROOT / "bench" / "results"
    return kept / "attention" if kept.is_dir() else Path("specattn-bench")


def _chosen(full: bool, names: list[str], only: str) -> list[Any]:
    """Return the parts to run, with the cells whose name contains ``only``."""
    matrix = _suite("matrix")
    known = matrix.parts()
    for name in names:
        if name not in known and name != "quick":
            raise ArgumentError(
                "--part", f"must be one of {', '.join(known)} or quick, got {name!r}"
            )
    found = [matrix.quick() if name == "quick" else known[name] for name in names]
    if not found:
        found = list(known.values()) if full else [matrix.quick()]
    chosen = [matrix.only(one, only) for one in found]
    if not any(one.cells for one in chosen):
        raise ArgumentError("--only", f"no cell's name contains {only!r}")
    return [one for one in chosen if one.cells]


def _list(parts: list[Any]) -> None:
    for one in parts:
        print(f"{one.name}: {one.title}")
        for cell in one.cells:
            extra = f" (and {', '.join(label for label, _ in cell.variants)})"
            print(f"  {cell.name}{extra if cell.variants else ''}")
    print("peers")
    for kind in _suite("peers").PEERS:
        reason = kind.absent()
        print(f"  {kind.name:30} {'absent: ' + reason if reason else 'here'}")


def _warm(workers: int | None) -> None:
    """Compile Triton kernels in parallel processes, a share of cells each."""
    count = min(12, (os.cpu_count() or 1) - 2) if workers is None else workers
    if count < 2:
        return
    _log(f"compiling ahead in {count} processes")
    running = [
        subprocess.Popen(
            [*_COMMAND, *sys.argv[1:], "--shard", f"{index}/{count}"],
            stdout=subprocess.DEVNULL,
        )
        for index in range(count)
    ]
    _log(f"compiled ahead, {sum(process.wait() != 0 for process in running)} with failures")
