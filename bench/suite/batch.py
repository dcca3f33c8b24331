"""The tensors of a case: one slot table over shuffled pages, many pools."""

from __future__ import annotations

import math
import random
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from . import trees

if TYPE_CHECKING:
    from torch import Tensor

    from .cases import Case

MB = 2**20
#: Pools of a stack hold at least this much together, so that none stays in the L2 cache.
CYCLED = 384 * MB
MOST_POOLS = 64
#: Of float8 keys and of values.
KV_SCALE = 0.75
#: Numbers that are made at a time.
CHUNK = 2**26


class Arena:
    """One allocation of random numbers per dtype; the pools of all cases are views of it.

    Parameters
    ----------
    device : torch.device
        Where it lies.
    only_one : bool
        Whether a case gets one pool, which is enough to try its kernels.
    """

    def __init__(self, device: torch.device, *, only_one: bool = False) -> None:
        self.device, self.only_one = device, only_one
        self._flats: dict[torch.dtype, Tensor] = {}

    def reserve(self, cases: list[Case]) -> None:
        """Hold the pools of the largest case; views made before are gone."""
        for dtype in {stored_dtype(case) for case in cases}:
            need = max(
                self.count(case) * math.prod(pool_shape(case))
                for case in cases
                if stored_dtype(case) == dtype
            )
            if dtype not in self._flats or len(self._flats[dtype]) < need:
                self._flats.pop(dtype, None)
                flat = self._flats[dtype] = torch.empty(need, dtype=dtype, device=self.device)
                for chunk in flat.split(CHUNK):
                    chunk.copy_(torch.randn(len(chunk), device=self.device))

    def pools(self, case: Case) -> list[Tensor]:
        flat, shape = self._flats[stored_dtype(case)], pool_shape(case)
        size = math.prod(shape)
        return [flat[i * size : (i + 1) * size].view(shape) for i in range(self.count(case))]

    def count(self, case: Case) -> int:
        """Return how many pools a case gets."""
        size = math.prod(pool_shape(case)) * stored_dtype(case).itemsize
        return 1 if self.only_one else min(MOST_POOLS, max(2, math.ceil(CYCLED / size)))


def pages_of(case: Case) -> list[int]:
    """Pages that each request occupies, tail included."""
    return [-(-(length + case.tail) // case.page_size) for length in case.lengths]


def stored_dtype(case: Case) -> torch.dtype:
    """Return the dtype of a case's keys and values."""
    found: torch.dtype = getattr(torch, case.stored or case.dtype)
    return found


def pool_shape(case: Case) -> tuple[int, ...]:
    """``[keys and values, slots, KV heads, head_dim]``; latent rows are both."""
    slots = (sum(pages_of(case)) + 1) * case.page_size
    return (1 if case.latent else 2, slots, case.heads[1], case.head_dim)


class Batch:
    """A case on a device; ``pools[i]`` are its layers.

    Slot 0 and table row 0 belong to padding. A request's tail follows its prefix in its pages.

    Parameters
    ----------
    case : Case
        What to make.
    arena : Arena
        Where the pools lie; reserved for the case.
    """

    def __init__(self, case: Case, arena: Arena) -> None:
        self.case, self.device = case, arena.device
        self.dtype = getattr(torch, case.dtype)
        self.kv_dtype = stored_dtype(case)
        self.kv_scale = KV_SCALE if case.stored else 1.0
        self.pools = arena.pools(case)
        self._place()
        self._query()
        self.accepted = case.accepted()
        self.offsets = [0, *accumulate(self.accepted)]
        self._words()

    def _place(self) -> None:
        case, device, size = self.case, self.device, self.case.page_size
        counts = pages_of(case)
        order = torch.randperm(sum(counts), device=device).to(torch.int32) + 1
        self.page_table = torch.zeros(case.batch, max(counts), dtype=torch.int32, device=device)
        self.table = torch.zeros(
            case.batch + 1, max(counts) * size, dtype=torch.int32, device=device
        )
        self.tails = torch.zeros(case.batch, case.tail, dtype=torch.int32, device=device)
        within = torch.arange(size, dtype=torch.int32, device=device)
        at = 0
        for b, (count, length) in enumerate(zip(counts, case.lengths, strict=True)):
            pages = order[at : at + count]
            slots = (pages[:, None] * size + within).flatten()
            self.page_table[b, :count] = pages
            self.table[b + 1, : count * size] = slots
            self.tails[b] = slots[length : length + case.tail]
            at += count
        self.lens = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        self.rows = torch.arange(1, case.batch + 1, device=device)

    def _query(self) -> None:
        case, rows = self.case, self.case.batch * self.case.q_len
        shape = (rows, case.heads[0], case.head_dim)
        self.q = torch.randn(shape, dtype=self.dtype, device=self.device)
        self.out = torch.empty(
            rows, case.heads[0], case.v_dim, dtype=self.dtype, device=self.device
        )
        self.sinks = None
        if case.sinks:
            # of the size of the largest logits, so that they weigh
            self.sinks = 4 + torch.randn(case.heads[0], dtype=self.dtype, device=self.device)
        self.lse = torch.empty(rows, case.heads[0], device=self.device) if case.lse else None
        self.scale = (192 if case.latent else case.head_dim) ** -0.5

    def _words(self) -> None:
        """Ancestor bits of the query tokens, the last of the tail; None for a prompt."""
        case, rng = self.case, random.Random(1)
        self.bits: list[list[int]] | None = None
        if case.mode == "prompt":
            return
        found = []
        for _ in case.lengths:
            parents = (
                trees.grow(*case.shape, rng)
                if case.mode == "tree"
                else trees.branch(*case.shape, rng)
                if case.mode == "draft"
                else trees.chain(case.q_len)
            )
            found.append(trees.ancestry(parents))
        first = case.tail - case.q_len
        self.bits = [bits[first:] for bits, _ in found]
        self.words = torch.tensor(
            [[trees.signed_words(b, case.tail) for b in bits] for bits in self.bits],
            device=self.device,
        )
        depths = torch.tensor([depth for _, depth in found], device=self.device)
        self.tail_positions = self.lens[:, None] + depths
        self.positions = self.tail_positions[:, first:].contiguous()

    def visible(self, b: int) -> Tensor:
        """``[q_len, tail]`` bool: which tail keys the query tokens of a request see."""
        case = self.case
        if self.bits is None:
            full = torch.ones(case.q_len, case.tail, dtype=torch.bool, device=self.device)
            return full.tril()
        rows = [[bits >> j & 1 for j in range(case.tail)] for bits in self.bits[b]]
        return torch.tensor(rows, device=self.device).bool()

    @property
    def bytes(self) -> int:
        """Live keys and values, q and out, once each."""
        case, item = self.case, self.dtype.itemsize
        per_key = self.pools[0][:, 0].nbytes
        window = case.window_left
        live = sum(min(n, window) if window >= 0 else n for n in case.lengths)
        rows = sum(self.accepted) * case.heads[0] * (case.head_dim + case.v_dim) * item
        return (live + case.batch * case.tail) * per_key + rows

    @property
    def flops(self) -> float:
        """Of both products, over the keys that are seen."""
        case = self.case
        pairs: float = 0
        for length, rows in zip(case.lengths, self.accepted, strict=True):
            pairs += rows * length + (rows * (rows + 1) / 2 if case.mode == "prompt" else 0)
        return 2 * case.heads[0] * (case.head_dim + case.v_dim) * pairs

    def k(self, pool: int) -> Tensor:
        return self.pools[pool][0]

    def v(self, pool: int) -> Tensor:
        return self.pools[pool][-1][..., : self.case.v_dim]

    def meant(self, cache: Tensor, slots: Tensor) -> Tensor:
        """``[len(slots), heads, width]`` float64: what rows of a cache stand for."""
        if self.kv_dtype.itemsize == 1:
            # bytes can be indexed everywhere
            rows = cache.view(torch.uint8)[slots].view(self.kv_dtype)
            return rows.float().double() * self.kv_scale
        return cache[slots].double()

    def pages(self, tensor: Tensor) -> Tensor:
        """View ``[slots, heads, width]`` as ``[pages, page size, heads, width]``."""
        return tensor.unflatten(0, (-1, self.case.page_size))
