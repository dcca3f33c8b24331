"""``python -m specattn`` is the ``specattn`` command."""

from specattn.cli import main

if __name__ == "__main__":
    main()
