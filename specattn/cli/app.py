"""The commands, and what they share."""

from __future__ import annotations

import io
import os
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specattn.cli.backends import backends, found
from specattn.cli.bench import bench
from specattn.cli.errors import exit_codes, logging_to_stderr
from specattn.cli.generate import Generate
from specattn.cli.graphs import EPILOG, Graphs
from specattn.cli.inspect import Inspect
from specattn.cli.options import command
from specattn.cli.torchrun import one_output, world_size


class _Commands(TyperGroup):
    """Commands that never end in a traceback or a page of usage."""

    def main(self, *args: Any, **extra: Any) -> Any:
        # Python sets them to None when they are closed before it starts
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - open until the end
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - open until the end
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # text that the terminal's encoding lacks must not end a run
                stream.reconfigure(errors="replace")
        with exit_codes(), logging_to_stderr(), one_output():
            code = super().main(*args, **extra | {"standalone_mode": False})
        if world_size() > 1:
            # a thread of gloo that frees a tensor while Python shuts down aborts the process
            sys.stderr.flush()
            os._exit(code or 0)
        sys.exit(code or 0)


# Typer's tables cut the names of options where they have no room
_NARROW = shutil.get_terminal_size().columns < 80

app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None if _NARROW else "rich",
    name="specattn",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(command(Generate))
app.command("graphs", epilog=EPILOG)(command(Graphs))
app.command("inspect")(command(Inspect))
app.command("backends")(backends)
app.command("bench")(bench)


def _print_versions(wanted: bool) -> None:
    """Print the versions of what is installed, and the backends that run here; end."""
    if not wanted:
        return
    from specattn import __version__

    print(f"specattn {__version__}")
    for name in ("torch", "triton", "transformers"):
        with suppress(PackageNotFoundError):
            print(f"{name} {version(name)}")
    for device, names in found().items():
        print(f"backends on {device}: {', '.join(names)}")
    raise typer.Exit


@app.callback(invoke_without_command=True)
def _specattn(
    ctx: typer.Context,
    versions: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Show versions, and the backends.",
        ),
    ] = False,
) -> None:
    """Exact speculative decoding: a draft proposes a tree, the target verifies it."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
