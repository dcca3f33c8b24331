"""The conformance kit: holds backends, proposers, processors and memories to their rules.

Needs torch; the pytest side is in `specattn.testing.plugin`. See docs/conformance.md.
"""

from specattn.testing.cases import Geometry
from specattn.testing.kit import Check, Level, conformance
from specattn.testing.memories import memory_conformance
from specattn.testing.oracle import Case, ConformanceError, Tolerances
from specattn.testing.processors import processor_conformance
from specattn.testing.proposers import proposer_conformance

__all__ = [
    "Case",
    "Check",
    "ConformanceError",
    "Geometry",
    "Level",
    "Tolerances",
    "conformance",
    "memory_conformance",
    "processor_conformance",
    "proposer_conformance",
]
