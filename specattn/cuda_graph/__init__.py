"""CUDA graphs: programs over static buffers, captured per batch bucket and replayed."""

from specattn.cuda_graph.runner import GraphKey, GraphReport, GraphRunner, Key, Program

__all__ = ["GraphKey", "GraphReport", "GraphRunner", "Key", "Program"]
