"""Programs over static buffers, captured per batch bucket and replayed."""

from specattn.graph.captured import Captured, GraphReport
from specattn.graph.programs import BoundProgram, GraphKey, Key, Program
from specattn.graph.runner import GraphRunner, GraphStats, check_lens, head

__all__ = [
    "BoundProgram",
    "Captured",
    "GraphKey",
    "GraphReport",
    "GraphRunner",
    "GraphStats",
    "Key",
    "Program",
    "check_lens",
    "head",
]
