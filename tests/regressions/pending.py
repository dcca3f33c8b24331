"""Rows of the table that no test shows yet, and those that tests show in part.

Pending is not passing: `docs/make_regressions.py` prints both as what they are.
"""

from __future__ import annotations

# row: public threads, what broke, what the row's tests wait for
PENDING = {
    "R40": (
        "sglang#23336, sglang#24055",
        "Switching the number of steps at run time allocated a negative size; settings with "
        "different largest batches had different metadata, and acceptance oscillated.",
        "adaptive steps",
    ),
}

# row: what its tests leave out
PARTLY: dict[str, str] = {}
