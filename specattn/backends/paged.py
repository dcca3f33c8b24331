"""The common part of adapters, and of those of page-granular causal kernels.

The latter read KV through ``block_tables [B, pages]`` and the number of keys, mask causally or
not at all, and know no trees. Plans speak of slots, and of pages of so many slots
(``SpecConfig.page_size``), which must be the adapter's `PagedBackend.page_size` or a multiple.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from specattn.backends.base import (
    BoundAttention,
    Capabilities,
    imported,
    installed,
    lists_refused,
    undeclared,
)
from specattn.buffers import ReadOnly
from specattn.errors import UnsupportedError
from specattn.kernels.indices import fill_block_table
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.config import AttnConfig

#: TRT-LLM's kernels, and CUTLASS MLA, read a block table in strides of so many keys.
TABLE_KEYS = 128
#: Where a result goes, if the caller has a place for it.
Place = torch.Tensor | None


class LibraryBackend(ReadOnly, ABC):
    """An adapter; the class attributes say of what.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        A CUDA device of a compute capability in ``majors``.

    Raises
    ------
    UnsupportedError
        If the library is installed but cannot be imported.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    module: ClassVar[str]  # where the entry points are
    package: ClassVar[str] = "sglang-kernel"  # what installs it
    majors: ClassVar[tuple[int, ...]] = (9,)  # of the compute capabilities it has kernels for

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.library = imported(self.module, self.name)

    @classmethod
    def reasons(cls, config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = cls.device_reasons(device)
        if not installed(cls.module):
            found.insert(0, f"{cls.module} is not installed (pip install {cls.package})")
        if config is None:
            return found
        return found + undeclared(config, cls.capabilities) + cls.geometry(config)

    @classmethod
    def device_reasons(cls, device: torch.device) -> list[str]:
        """Say why the library has no kernels for ``device``."""
        needed = "needs a CUDA device of compute capability " + " or ".join(
            f"{major}.x" for major in cls.majors
        )
        if device.type != "cuda" or not torch.cuda.is_available():
            return [f"{cls.name} {needed}, got {device}"]
        if (have := torch.cuda.get_device_capability(device))[0] not in cls.majors:
            return [f"{cls.name} {needed}, got {have[0]}.{have[1]}"]
        return []

    @classmethod
    @abstractmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say what else about the layers stands in the way."""


class PagedBackend(LibraryBackend):
    """An adapter of kernels that read whole pages and mask causally.

    For another page size, subclass with another ``page_size`` and pass the class as the backend.
    """

    # what all have in common
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True,
        trees=False,
        lists=False,
        extend=False,
        dtypes=(torch.float16, torch.bfloat16),
    )
    page_sizes: ClassVar[tuple[int, ...]]
    page_size: ClassVar[int] = 64
    masks: ClassVar[bool] = True  # causally; else every query token gets a list of its own

    def __init_subclass__(cls) -> None:
        # a subclass for other pages promises them, too
        cls.capabilities = replace(cls.capabilities, page_size=cls.page_size)

    @classmethod
    def reasons(cls, config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way, the page size among it."""
        found = super().reasons(config, device)
        if cls.page_size not in cls.page_sizes:
            sizes = ", ".join(map(str, cls.page_sizes))
            found.append(f"page_size must be one of {sizes}, got {cls.page_size}")
        return found

    def refusals(self, plan: AttnPlan | ExtendPlan) -> list[str]:
        """Say why `bind` refuses a plan; empty means that it serves."""
        if isinstance(plan, ExtendPlan):
            return ["prompts are not served; give them to another backend (by_phase(prefill=...))"]
        if not plan.layout.causal:
            return ["trees are not served, its kernels know causal masks only (topk 1)"]
        if (have := plan.layout.page_size) % self.page_size:
            needed = f"a multiple of {self.page_size}"
            return [f"page_size must be {needed}, got {have} (SpecConfig.page_size)"]
        return []

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to a plan; an UnsupportedError for lists, and for `refusals`."""
        if isinstance(plan, CsrPlan):
            raise lists_refused(self.name)
        if reasons := self.refusals(plan):
            raise UnsupportedError(f"backend {self.name!r}", reasons)
        return self.attention(plan)

    def attention(self, plan: AttnPlan | ExtendPlan) -> BoundAttention:
        """Return attention over a plan that is not refused."""
        assert isinstance(plan, AttnPlan)
        keys = Keys.in_pages(plan, self.page_size, 1 if self.masks else plan.layout.q_len)
        return BoundPages(self, plan, keys, self.scratch(plan, keys))

    def scratch(self, plan: AttnPlan, keys: Keys) -> tuple[Tensor, ...]:
        """Return what the library needs besides: a workspace, or a plan."""
        return ()

    def plan(self, bound: BoundPages) -> None:
        """Let the library plan on the device, over the filled block table."""

    @abstractmethod
    def attend(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, out: Place, lse: Place
    ) -> Tensor:
        """Call the library over a block table; see `BoundAttention.run`.

        Returns
        -------
        Tensor
            ``out``, or memory of the library's; always the latter if ``out`` is None.
        """


@dataclass(frozen=True)
class Keys:
    """Every request's keys, as libraries are given them; ``fill`` lists them.

    Parameters
    ----------
    table : Tensor
        ``[rows, width]`` int32, pages of a list's keys.
    lens : Tensor
        ``[lists]`` int32, keys of every list: one per request, or per query token.
    fill : callable
        Writes all of it, on the device.
    page_size : int
        Slots of a table entry.
    rows : Tensor, optional
        ``[lists]`` int32, every list's row of the table; without, list i has row i.
    """

    table: Tensor
    lens: Tensor
    fill: Callable[[], None]
    page_size: int = 1
    rows: Tensor | None = None

    @classmethod
    def in_pages(cls, plan: AttnPlan, page_size: int, lists: int = 1) -> Keys:
        """List any keys of a causal plan, ``lists`` times a request.

        The table is as wide as strides of `TABLE_KEYS` keys.
        """
        strides = -(-(plan.req_to_token.shape[1] + plan.layout.tail) // TABLE_KEYS)
        width = strides * TABLE_KEYS // page_size
        table = plan.req_to_token.new_zeros(plan.batch * lists, width)
        lens = table.new_zeros(len(table))

        def fill() -> None:
            fill_block_table(
                plan.key_slots, table=table, lens=lens, page_size=page_size, lists=lists
            )

        return cls(table, lens, fill, page_size)

    @property
    def most(self) -> int:
        """The keys a list can have, whatever the batch."""
        return self.table.shape[1] * self.page_size

    def pages(self, pool: Tensor) -> Tensor:
        """View ``[num_slots, heads, dim]`` as ``[num_pages, page_size, heads, dim]``."""
        whole = len(pool) // self.page_size * self.page_size
        return pool[:whole].view(-1, self.page_size, *pool.shape[1:])


@dataclass(frozen=True)
class BoundPages(BoundAttention):
    """Attention over listed keys, planned on the device."""

    backend: PagedBackend
    plan: AttnPlan | ExtendPlan
    keys: Keys
    scratch: tuple[Tensor, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Requests, and query tokens of each."""
        assert isinstance(self.plan, AttnPlan)
        return self.plan.batch, self.plan.layout.q_len

    def fill(self) -> None:
        """List the keys of every request, and plan."""
        self.keys.fill()
        self.backend.plan(self)

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        found = self.backend.attend(self, q, k_cache, v_cache, out, lse)
        if found is not out:
            out.copy_(found)

    def result(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lse: Tensor | None = None
    ) -> Tensor:
        """Attend; see `BoundAttention.result`."""
        return self.backend.attend(self, q, k_cache, v_cache, None, lse)
