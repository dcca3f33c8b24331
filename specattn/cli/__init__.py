"""The ``specattn`` command line."""

from __future__ import annotations

from importlib.util import find_spec

#: What the command needs beside the core; the extra ``models`` installs it.
NEEDED = ("transformers", "safetensors", "tokenizers", "typer", "rich")


def main() -> None:
    """Run the ``specattn`` command."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"specattn: error: the command needs {', '.join(missing)} "
            "(pip install 'specattn[models]'; in a checkout: pip install '.[models]')"
        )
    try:
        from specattn.cli.app import app
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app()
