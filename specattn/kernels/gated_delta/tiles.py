"""Tiles of the delta rule's kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Value heads of all requests up to which a program that reads a state solves its tree, too: it
#: does so once per block of values, while the state arrives.
FEW = 256
#: Value heads up to which programs of a whole head would leave a GPU idle.
ONE = 96


class Tile(NamedTuple):
    """What a program takes: values of a head, warps, and the tree?"""

    values: int
    warps: int
    solves: bool = False


def parts_of(dtype: torch.dtype) -> int:
    """Return how many bfloat16 stand for a float32 in products.

    Two have 16 bits, and what a bfloat16 model has is multiplied exactly. What other models have is
    multiplied in float32.
    """
    return 2 if dtype == torch.bfloat16 else 1


def commit_tile(v_dim: int) -> Tile:
    """Return the tile of a commit, and of plain decoding."""
    # one warp adds up its rows without waiting for others
    return Tile(min(v_dim, 16), 1)


def read_tile(v_dim: int, nodes: int, heads: int, dtype: torch.dtype) -> Tile:
    """Return the tile that reads states for the nodes of trees.

    Parameters
    ----------
    v_dim : int
        Values of a head.
    nodes : int
        A power of two.
    heads : int
        Value heads of all requests.
    dtype : torch.dtype
        The model's.
    """
    # registers hold no more than 16 nodes beside a state
    solves = heads <= FEW and nodes <= 16 and parts_of(dtype) > 1
    # 64 values fill a warpgroup's product: fewer take more registers
    return Tile(min(v_dim, 128 if solves and heads > ONE else 64), 4, solves)


def solve_warps(nodes: int, dtype: torch.dtype) -> int:
    """Return the warps of a program that solves a power of two."""
    if dtype == torch.float32:
        return 8 if nodes > 32 else 4
    # more warps hold the same operands again
    return 2 if nodes <= 16 else 4


def chunk_tokens(dtype: torch.dtype) -> int:
    """Return how many tokens of a prompt are solved at once."""
    return 64 if dtype == torch.bfloat16 else 16


def chunk_tile(v_dim: int) -> Tile:
    """Return the tile that reads prompts, a chunk at a time."""
    return Tile(min(v_dim, 32), 8)
