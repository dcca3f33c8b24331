"""What is measured: one `Case` is a batch of one mode, one `Cell` those that run interleaved."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

K = 1024


@dataclass(frozen=True)
class Case:
    """A batch of one mode.

    Parameters
    ----------
    mode : str
        ``tree``, ``chain`` (a decode is a chain of 1), ``draft``, ``extend`` (ragged accepted
        tokens after a verify) or ``prompt``.
    lengths : tuple of int
        Cached tokens of every request, the tail not counted.
    q_len : int
        Query tokens of every request; of an ``extend``, the most.
    shape : tuple of int
        ``(topk, steps, nodes)`` of a tree, ``(topk, step)`` of a draft, steps counted from 0.
    heads : tuple of int
        Query and KV heads; with ``latent`` the second is 1.
    latent : bool
        Absorbed MLA: keys of ``head_dim`` = 576, values their first 512 columns.
    window_left, logit_cap, lse
        As in `specattn.config.AttnConfig`; whether the log-sum-exp is written, too.
    sinks : bool
        A logit per query head that joins the sum, in ``dtype``.
    stored : str
        Dtype of keys and values, if not ``dtype``: ``float8_e4m3fn``, with scales.
    fixed : bool
        The deterministic mode, whose sums do not depend on the batch.
    auto : bool
        By the backend that ``auto`` takes, where a `choices` record may name another library.
    """

    mode: str
    lengths: tuple[int, ...]
    q_len: int
    shape: tuple[int, ...] = ()
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = 1
    dtype: str = "bfloat16"
    latent: bool = False
    window_left: int = -1
    logit_cap: float = 0.0
    lse: bool = False
    sinks: bool = False
    stored: str = ""
    fixed: bool = False
    auto: bool = False

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def tail(self) -> int:
        """Keys whose visibility is a bit per query token."""
        if self.mode == "draft":
            return self.shape[0] * (self.shape[1] + 1)
        return self.q_len

    @property
    def v_dim(self) -> int:
        return 512 if self.latent else self.head_dim

    def accepted(self) -> list[int]:
        """Query tokens of every request that somebody reads."""
        if self.mode != "extend":
            return [self.q_len] * self.batch
        rng = random.Random(2)
        return [rng.randint(1, self.q_len) for _ in self.lengths]

    @property
    def size(self) -> str:
        """The batch in words."""
        low, high = min(self.lengths), max(self.lengths)
        if low == high:
            return f"{self.batch} x {tokens(low)}"
        if self.lengths.count(low) == self.batch - 1:
            return f"1 x {tokens(high)} + {self.batch - 1} x {tokens(low)}"
        return f"ragged {self.batch} x {tokens(low)}..{tokens(high)}"

    @property
    def name(self) -> str:
        what = {
            "tree": lambda: f"tree {'-'.join(map(str, self.shape))}",
            "chain": lambda: f"chain {self.q_len}" if self.q_len > 1 else "decode",
            "draft": lambda: f"draft topk {self.shape[0]} step {self.shape[1]}",
            "extend": lambda: f"extend 1..{self.q_len}",
            "prompt": lambda: f"prompt {tokens(self.q_len)}",
        }[self.mode]()
        return " ".join([self.size, what, *self.marks()])

    def marks(self) -> list[str]:
        """What is not the default."""
        heads, kv_heads = self.heads
        found = []
        if self.latent:
            found.append(f"mla{heads}")
        elif self.heads != (32, 8):
            found.append(f"{heads}/{kv_heads}")
        if not self.latent and self.head_dim != 128:
            found.append(f"hd{self.head_dim}")
        if self.page_size != 1:
            found.append(f"page {self.page_size}")
        if self.dtype != "bfloat16":
            found.append(self.dtype)
        if self.stored:
            found.append("fp8")
        if self.fixed:
            found.append("deterministic")
        if self.auto:
            found.append("auto")
        if self.window_left >= 0:
            found.append(f"window {self.window_left}")
        if self.logit_cap:
            found.append("cap")
        if self.lse:
            found.append("lse")
        if self.sinks:
            found.append("sinks")
        return found


@dataclass(frozen=True)
class Cell:
    """Cases that are replayed in turn: the first against its peers, then variants of our own.

    Parameters
    ----------
    case : Case
        What every contestant computes.
    variants : tuple of (str, Case)
        Other cases for specattn's kernel alone, by what makes them different.
    peers : bool
        Whether other libraries run.
    title : str
        Its name, by default the case's.
    """

    case: Case
    variants: tuple[tuple[str, Case], ...] = ()
    peers: bool = True
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.case.name

    @property
    def cases(self) -> list[Case]:
        return [self.case, *(case for _, case in self.variants)]


@dataclass(frozen=True)
class Part:
    """Cells that share a process and its roofs."""

    name: str
    title: str
    cells: list[Cell] = field(default_factory=list)


def tokens(count: int) -> str:
    return f"{count // K}k" if count >= K and count % K == 0 else str(count)


def number(text: str) -> int:
    """Return the number that `tokens` wrote."""
    return int(text[:-1]) * K if text.endswith("k") else int(text)


def lengths(size: str) -> tuple[int, ...]:
    """Return the lengths of a batch by its size: ``1 x 64k + 31 x 2k``, ``ragged 32 x 800..8k``."""
    if size.startswith("ragged"):
        batch, low, high = map(number, re.findall(r"\d+k?", size))
        rng = random.Random(0)
        return tuple(rng.randrange(low, high) for _ in range(batch))
    found: list[int] = []
    for part in size.split("+"):
        batch, _, length = part.rpartition("x")
        found += [number(length.strip())] * int(batch or 1)
    return tuple(found)


def make(name: str, **more: Any) -> Case:
    """Return a case by its name, as far as that says size and shape; ``more`` is the rest."""
    match = re.fullmatch(r"(.+?) (tree|decode|chain|draft|extend|prompt)(.*)", name)
    if match is None:
        raise ValueError(f"a case's name must be a size and a mode, got {name!r}")
    size, mode, shape = match.groups()
    numbers = tuple(number(text) for text in re.findall(r"\d+k?", shape))
    if mode in ("tree", "draft"):
        q_len = numbers[-1] if mode == "tree" else numbers[0]
        return Case(mode, lengths(size), q_len, numbers, **more)
    if mode == "decode":
        return Case("chain", lengths(size), 1, **more)
    return Case(mode, lengths(size), numbers[-1], **more)


def float8(case: Case) -> Case:
    return replace(case, stored="float8_e4m3fn")


def fixed(case: Case) -> Case:
    return replace(case, fixed=True)


def mla(case: Case, heads: int, page_size: int = 64) -> Case:
    return replace(case, latent=True, heads=(heads, 1), head_dim=576, page_size=page_size)
