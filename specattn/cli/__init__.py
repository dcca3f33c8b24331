"""The ``specattn`` command line."""

from __future__ import annotations


def main() -> None:
    """Run the ``specattn`` command."""
    try:
        from specattn.cli.app import app
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app()
