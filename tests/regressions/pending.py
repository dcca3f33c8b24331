"""Rows of the table that no test shows yet, and those that tests show in part.

Pending is not passing: `docs/make_regressions.py` prints both as what they are.
"""

from __future__ import annotations

# row: public threads, what broke, what the row's tests wait for
PENDING = {
    "R17": (
        "sglang#28034, sglang#22113, sglang#37980, sglang#17033",
        "A plan stream read masks, positions and lengths before the draft had written them, and "
        "verify prepared slots that the draft still read: illegal accesses, or less acceptance, "
        "under load.",
        "side streams",
    ),
    "R40": (
        "sglang#23336, sglang#24055",
        "Switching the number of steps at run time allocated a negative size; settings with "
        "different largest batches had different metadata, and acceptance oscillated.",
        "adaptive steps",
    ),
}

# row: what its tests leave out
PARTLY: dict[str, str] = {}
