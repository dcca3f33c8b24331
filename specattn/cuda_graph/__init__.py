"""Programs over static buffers, captured per batch bucket and replayed."""

from specattn.cuda_graph.captured import Captured, GraphReport
from specattn.cuda_graph.programs import BoundProgram, GraphKey, Key, Program
from specattn.cuda_graph.runner import GraphRunner, GraphStats, check_lens, head

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
