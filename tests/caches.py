"""Caches as engines allocate them: layers anywhere, keys and values in pages of many layouts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch

from specattn.cache.external import as_slots, block_stride
from specattn.config import AttnConfig
from tests.worlds import DEVICE

if TYPE_CHECKING:
    from torch import Tensor


def scattered(count: int, shape, dtype=torch.float32, device="cpu", gap=8) -> list[Tensor]:
    """NaN in views of one buffer, unevenly far apart, the second below the first.

    They begin at multiples of ``gap`` elements from the first.
    """
    size = prod(shape)
    room = -(-size // gap) * gap + count * gap
    arena = torch.full(((count + 1) * room,), float("nan"), device=device).to(dtype)
    order = [1, 0, *range(2, count)][:count]
    starts = [place * room + at * gap for at, place in enumerate(order)]
    return [arena[start : start + size].view(shape) for start in starts]


@dataclass(frozen=True)
class Layout:
    """An engine's caches, and what specattn is shown of them.

    ``k`` and ``v`` have a tensor of slots per layer; ``pages`` has the keys and the values of every
    layer as the engine sees them, ``[num_pages, page_size, heads, dim]`` each.
    """

    k: list[Tensor]
    v: list[Tensor]
    pages: list[tuple[Tensor, Tensor]]
    stride: int

    @classmethod
    def of(cls, pages) -> Layout:
        k, v = ([as_slots(layer[i]) for layer in pages] for i in range(2))
        return cls(k, v, pages, block_stride(pages[0][0]))


def _halves(layers, pages, page, heads, dim, make):
    return Layout.of([(c[0], c[1]) for c in make(layers, (2, pages, page, heads, dim))])


def _interleaved(layers, pages, page, heads, dim, make):
    return Layout.of([(c[:, 0], c[:, 1]) for c in make(layers, (pages, 2, page, heads, dim))])


def _heads_first(layers, pages, page, heads, dim, make):
    caches = make(layers, (pages, 2, heads, page, dim))
    return Layout.of([(c[:, 0].transpose(1, 2), c[:, 1].transpose(1, 2)) for c in caches])


def _by_token(layers, pages, page, heads, dim, make):
    caches = make(layers, (pages, page, 2, heads, dim))
    return Layout.of([(c[:, :, 0], c[:, :, 1]) for c in caches])


def _layers_in_pages(layers, pages, page, heads, dim, make):
    (cache,) = make(1, (pages, layers, 2, page, heads, dim))
    return Layout.of([(cache[:, at, 0], cache[:, at, 1]) for at in range(layers)])


def _apart(layers, pages, page, heads, dim, make):
    caches = make(2 * layers, (pages, page, heads, dim))
    return Layout.of(list(zip(caches[::2], caches[1::2], strict=True)))


#: Each takes layers, pages, page size, heads, head size, and what makes tensors of a shape.
LAYOUTS = {
    "halves": _halves,
    "interleaved": _interleaved,
    "heads_first": _heads_first,
    "by_token": _by_token,
    "layers_in_pages": _layers_in_pages,
    "apart": _apart,
}


HEADS = AttnConfig(4, 2, 8)
PAGE, PAGES = 4, 6
MAKES = {
    "scattered": partial(scattered, device=DEVICE),
    "allocated": lambda count, shape: [
        torch.full(shape, float("nan"), device=DEVICE) for _ in range(count)
    ],
}


def layout_of(name: str, layers: int, make="scattered", heads=HEADS, pages=PAGES) -> Layout:
    return LAYOUTS[name](layers, pages, PAGE, heads.num_kv_heads, heads.head_dim, MAKES[make])
