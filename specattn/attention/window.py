"""Sliding-window layers whose caches are a pool of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from specattn.checks import whole_number
from specattn.kernels.masks import Window
from specattn.plan import AttnPlan, ExtendPlan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.batch import RowLayout

P = TypeVar("P", AttnPlan, ExtendPlan)


@dataclass(frozen=True)
class WindowPool:
    """A pool of their own that an engine's sliding-window layers have.

    Parameters
    ----------
    slot_map : Tensor
        ``[slots]`` int32 or int64: for every slot that the request table names, the one in that
        pool; below 0 for none. Only the last ``window_left`` tokens of a request need one.
    window_left : int
        The largest of these layers, at least 0.
    """

    slot_map: Tensor
    window_left: int


class WindowTables:
    """Tables of a window pool: by them layers find a prefix's end.

    Parameters
    ----------
    pool : WindowPool
        The engine's.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32: the engine's request table.
    max_batch : int
        Most requests of a forward.

    Raises
    ------
    ValueError
        If the pool's window is below 0.
    """

    def __init__(self, pool: WindowPool, req_to_token: Tensor, max_batch: int) -> None:
        whole_number("window_left", pool.window_left, 0)
        self._pool, self._req_to_token, self._max_batch = pool, req_to_token, max_batch
        # a request's row of a window table
        self._order = torch.arange(max(max_batch, len(req_to_token)), device=req_to_token.device)
        self._tables: dict[int, Tensor] = {}
        self._of_layout: dict[RowLayout, Window] = {}

    def over(self, plan: AttnPlan | ExtendPlan) -> tuple[AttnPlan | ExtendPlan, Window]:
        """Return what layers of the pool read, and what an engine writes.

        The batches of a layout share these tensors, as they share their inputs. Prompts have a
        table of their own, with the new tokens, too.
        """
        if isinstance(plan, ExtendPlan):
            table = self._table(len(plan.req_pool_indices), plan.page_size, plan.max_q_len)
            tokens = 1, plan.out_slots.numel()
            inputs = self._made(table, tokens, plan.page_size)
            found = self._reading(plan, inputs)
            return replace(found, out_slots=inputs.store, max_seq_len=table.shape[1]), inputs
        layout = plan.layout
        if layout not in self._of_layout:
            # every forward copies in before it attends, so that layouts share one
            if layout.page_size not in self._tables:
                self._tables[layout.page_size] = self._table(self._max_batch, layout.page_size)
            tokens = self._max_batch, layout.q_len
            table = self._tables[layout.page_size]
            self._of_layout[layout] = self._made(table, tokens, layout.page_size)
        inputs = self._of_layout[layout].first(plan.batch)
        where = inputs.positions
        rows = self._reading(plan, inputs)
        rows = replace(rows, tail_slots=inputs.slots, positions=where, tail_positions=where)
        return rows, inputs

    def _table(self, batch: int, page_size: int, new_tokens: int = 0) -> Tensor:
        # a prefix is cut where a page begins
        columns = self._pool.window_left + page_size - 1 + new_tokens
        return self._req_to_token.new_zeros(batch, max(columns, 1))

    def _made(self, table: Tensor, tokens: tuple[int, int], page_size: int) -> Window:
        batch, n = len(table), math.prod(tokens)
        # zeros are padding
        whole = torch.zeros(tokens, dtype=torch.int64, device=table.device)
        lens, slots, store = table.new_zeros(batch + 2 * n).split([batch, n, n])
        return Window(
            self._pool.slot_map,
            self._pool.window_left,
            page_size,
            table,
            lens,
            slots.view(tokens),
            store.view(tokens),
            whole,
        )

    def _reading(self, plan: P, inputs: Window) -> P:
        """Return a plan that reads the pool's table."""
        return replace(
            plan,
            req_to_token=inputs.table,
            req_pool_indices=self._order[: len(inputs.table)],
            seq_lens=inputs.seq_lens,
        )
