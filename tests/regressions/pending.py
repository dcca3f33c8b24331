"""Rows of the table that no test shows yet, and those that tests show in part.

Pending is not passing: `docs/make_regressions.py` prints both as what they are.
"""

from __future__ import annotations

# row: public threads, what broke, what the row's tests wait for
PENDING: dict[str, tuple[str, str, str]] = {}

# row: what its tests leave out
PARTLY: dict[str, str] = {}
