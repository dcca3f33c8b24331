"""The two sides that `bench.metadata` compares, on the same requests, and what holds them right.

specattn derives all of it where a recorded step begins; SGLang as `bench.metadata_sglang` lists it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.metadata_sglang import EXTEND, PHASES, VERIFY, Sglang
from bench.suite import timing
from specattn.backends.base import fill_all
from specattn.backends.layers import LayeredBackend
from specattn.batch import ForwardMode
from specattn.cache.kv_pool import KVPool
from specattn.config import AttnConfig, SpecConfig
from specattn.kernels.step import StepStart, begin_step
from specattn.plan import AttnInputs, AttnPlan, MultiStepDims, MultiStepInputs, MultiStepPlan
from specattn.speculative.host_buffers import HostBuffers, InFlight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from specattn.backends.layers import BoundLayers

HEADS, DIM = (32, 8), 128


@dataclass
class Requests:
    """A batch in mid-decode: rows, lengths, and slots in no order at all.

    Lengths lie between three quarters of ``context`` and all of it.
    """

    batch: int
    setting: tuple[int, int, int]
    context: int
    device: str
    heads: tuple[int, int] = HEADS

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.batch + self.context)
        topk, steps, nodes = self.setting
        width = -(-(self.context + max(nodes, topk * steps)) // 64) * 64
        low, rows = 3 * self.context // 4, self.batch + 1
        lens = torch.randint(low, self.context + 1, (self.batch,), generator=generator)
        table = torch.randperm(rows * width, generator=generator).int().view(rows, width)
        self.rows = (1 + torch.randperm(self.batch, generator=generator)).to(self.device)
        self.lens, self.table = lens.to(self.device), table.to(self.device)
        self.accept_lens = (
            torch.randint(1, steps + 2, (self.batch,), generator=generator).int().to(self.device)
        )
        self.config = SpecConfig(steps, topk, nodes, width, rows)
        # as deep as a node can be is all that matters here
        depth = torch.arange(nodes).clamp(max=steps).to(self.device)
        self.positions = self.lens[:, None] + depth

    @property
    def name(self) -> str:
        topk, _, nodes = self.setting
        return f"batch {self.batch}, {self.context} tokens, topk {topk}, {nodes} nodes"

    @property
    def case(self) -> dict[str, Any]:
        topk, steps, nodes = self.setting
        return {
            "batch": self.batch,
            "topk": topk,
            "steps": steps,
            "nodes": nodes,
            "context": self.context,
            "tokens": int(self.lens.sum()),
            "width": self.table.shape[1],
        }

    def window(self, columns: int) -> Tensor:
        """Slots of the ``columns`` after every committed context."""
        where = self.lens[:, None] + torch.arange(columns, device=self.device)
        return self.table[self.rows].gather(1, where)

    def sglang(self, kernels: Mapping[str, Any]) -> Sglang:
        topk, steps, nodes = self.setting
        return Sglang(
            self.table,
            self.rows,
            self.lens,
            topk=topk,
            steps=steps,
            nodes=nodes,
            positions=self.positions,
            accept_lens=self.accept_lens,
            heads=self.heads,
            kernels=kernels,
        )


class OneGraph:
    """specattn in a graph of the whole step: all phases' metadata where the step begins.

    It gathers what the last step left for the requests as well: tokens, probabilities, sampling
    parameters and ``hidden`` numbers of the draft's hidden state.
    """

    def __init__(self, requests: Requests, hidden: int, dim: int = DIM) -> None:
        self.requests = requests
        self.name = "specattn, one graph" + ("" if hidden else ", no hidden states")
        config, table, device = requests.config, requests.table, torch.device(requests.device)
        batch, (topk, steps, nodes) = requests.batch, requests.setting
        layer = layer_of(requests, dim)
        layers = LayeredBackend("triton", [layer], KVPool([layer], 1, device), device)
        verify, extend = (
            config.layout(mode) for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
        )
        dims = MultiStepDims(config.num_draft_forwards, topk)
        drafts = tuple(config.layout(ForwardMode.DRAFT_DECODE, step) for step in range(dims.steps))
        # all phases start from the same length: one window of slots is the tail of each
        self.draft = MultiStepInputs.alloc(batch, dims, device)
        shared = {name: getattr(self.draft, name) for name in ("req_pool_indices", "seq_lens")}
        self.window = torch.zeros(batch, config.reserve_len, dtype=torch.int32, device=device)
        branches = self.window[:, : dims.steps * topk].unflatten(1, (dims.steps, topk))
        self.draft = replace(self.draft, branch_slots=branches)
        self.verify = replace(
            AttnInputs.alloc(batch, verify, device), **shared, tail_slots=self.window[:, :nodes]
        )
        self.extend = replace(
            AttnInputs.alloc(batch, extend, device),
            **shared,
            tail_slots=self.window[:, : steps + 1],
        )
        multi = MultiStepPlan(dims, table, self.draft, drafts)
        self.layers = [
            layers.bind(plan)
            for plan in (
                *(multi.step(step) for step in range(dims.steps)),
                AttnPlan.over(verify, table, self.verify),
                AttnPlan.over(extend, table, self.extend),
            )
        ]
        self.bounds = [bound for layers in self.layers for bound in layers.bounds]
        self.host = HostBuffers.alloc(1, batch, steps + 2, device)
        self.rows, self.lens = requests.rows.tolist(), torch.zeros_like(table[:, 0])
        self.in_flight = InFlight(self.host)
        self.in_flight.write_rows(self.rows, batch)
        self.lens[requests.rows] = requests.lens.int()
        self.reserved = torch.full_like(self.lens, table.shape[1])
        self.tables, self.outs = (
            states(count, topk, hidden, layer.dtype, device) for count in (len(table), batch)
        )
        self.begin = begin_step

    def fill(self) -> None:
        """Two launches, as a recorded step begins with."""
        self.begin(
            self.host.rows,
            self.host.turn,
            self.lens,
            self.reserved,
            self.requests.table,
            reserve_len=self.window.shape[1],
            out=StepStart(
                self.draft.req_pool_indices,
                self.draft.seq_lens,
                self.window,
                self.extend.positions,
                self.draft.positions,
            ),
            copies=list(zip(self.tables, self.outs, strict=True)),
        )
        fill_all(self.bounds)

    def check(self) -> None:
        """Begin a step, and hold it to the table and the lengths."""
        self.fill()
        check_phases(self.requests, self.draft, self.verify, self.extend)
        for bound in self.layers:
            check_plan(bound, self.requests)

    def submitted(self) -> Callable[[], None]:
        """Record it; return all that the host does per step: write the rows, replay a graph."""
        recorded = timing.record(self.fill)

        def submit() -> None:
            self.in_flight.write_rows(self.rows, len(self.rows))
            recorded.graph.replay()

        return submit


def states(
    count: int, topk: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """What a step leaves for the next one, besides lengths, of ``count`` requests."""
    numbers = torch.int64, torch.float32, torch.int32, torch.float32, torch.int64
    wide = (topk, torch.float32), (topk, torch.int64), (hidden, dtype)
    return [
        *(torch.zeros(count, dtype=kind, device=device) for kind in numbers),
        *(torch.zeros(count, width, dtype=kind, device=device) for width, kind in wide if width),
    ]


def layer_of(requests: Requests, dim: int) -> AttnConfig:
    """Nothing attends, so that the dtype only picks the tiles; an interpreter has no bfloat16."""
    dtype = torch.bfloat16 if requests.device == "cuda" else torch.float32
    return AttnConfig(*requests.heads, dim, dtype=dtype)


def check_phases(
    wanted: Requests, draft: MultiStepInputs, verify: AttnInputs, extend: AttnInputs
) -> None:
    """Hold what has been filled to the table and the lengths.

    Raises
    ------
    ArithmeticError
        If a slot or a position is wrong.
    """
    _, steps, nodes = wanted.setting
    for inputs in (draft, verify, extend):
        same("rows", inputs.req_pool_indices, wanted.rows)
        same("lengths", inputs.seq_lens, wanted.lens)
    depth = torch.arange(steps + 1, device=wanted.device)
    slots = draft.branch_slots.flatten(1)
    same("draft slots", slots, wanted.window(slots.shape[1]))
    levels = (wanted.lens[:, None] + depth[:-2])[..., None]
    same("draft positions", draft.positions, levels.expand_as(draft.positions))
    same("tree slots", verify.tail_slots, wanted.window(nodes))
    same("extend slots", extend.tail_slots, wanted.window(steps + 1))
    same("extend positions", extend.positions, wanted.lens[:, None] + depth)


def same(name: str, found: Tensor, wanted: Tensor) -> None:
    """Raise an ArithmeticError unless both hold the same numbers."""
    if found.shape != wanted.shape or not torch.equal(found.long(), wanted.long()):
        raise ArithmeticError(f"{name}: {found.tolist()} instead of {wanted.tolist()}"[:400])


def check_plan(bound: BoundLayers, requests: Requests) -> None:
    """Every key tile of every request is in one split, and is read where the table has it.

    Raises
    ------
    ArithmeticError
        Otherwise.
    """
    tables = bound.bounds[0].kernel.tables  # type: ignore[attr-defined]
    lens, table = requests.lens, requests.table
    tiles = -(-(lens + tables.tail_len) // tables.block_n)
    before = tiles.cumsum(0) - tiles
    same("row of the table", tables.requests[:, 0], requests.rows * table.stride(0))
    same("prefix", tables.requests[:, 1], lens)
    line = Counter[int]()
    for count, first, request, start, prefix, *_ in tables.splits.tolist():
        at = int(before[request]) + first
        line.update(range(at, at + count))
        if count and [start, prefix] != tables.requests[request, :2].tolist():
            raise ArithmeticError(f"split of request {request} reads {start}, {prefix}")
    if line != Counter(range(int(tiles.sum()))):
        wrong = {tile: count for tile, count in line.items() if count != 1}
        raise ArithmeticError(f"of {int(tiles.sum())} tiles {len(line)} are in splits, {wrong}")


def check_sglang(s: Sglang, requests: Requests) -> None:
    """Run SGLang's phases, and hold its buffers to what the requests' lists are."""
    topk, steps, nodes = requests.setting
    for phase in PHASES:
        s.run(phase)
    prefixes = [
        requests.table[row, :length].tolist()
        for row, length in zip(requests.rows.tolist(), requests.lens.tolist(), strict=True)
    ]
    # a branch's slots stand together: those of its step follow each other
    chains = requests.window(topk * steps).view(-1, topk, steps)
    for step in range(steps - 1):
        lists = [
            prefix + chain[: step + 1]
            for prefix, branches in zip(prefixes, chains.tolist(), strict=True)
            for chain in branches
        ]
        check_lists(f"draft step {step}", s.draft_indptr[step], s.draft_indices[step], lists)
        same("draft slots", s.step_slots[step], chains[:, :, step].flatten())
    same("draft positions", s.draft["positions"], requests.lens.repeat_interleave(topk))
    for phase, buffers in ((VERIFY, s.verify), (EXTEND, s.extend)):
        queries, indptr, indices = s.lists[phase]
        check_lists(phase, indptr, indices, prefixes)
        same(f"{phase} queries", queries, nodes * torch.arange(s.batch + 1, device=s.device))
        same(f"{phase} slots", buffers["out_cache_loc"], requests.window(nodes).flatten())
    same("tree positions", s.verify["positions"], requests.positions.flatten())
    rows = requests.lens[:, None] + torch.arange(nodes, device=s.device)
    same("extend positions", s.extend["positions"], rows.flatten())
    same("mask offsets", s.mask_indptr[1:], (nodes * (requests.lens + nodes)).cumsum(0))
    if not bool((s.num_kv_splits >= 1).all()):
        raise ArithmeticError("a branch's keys are cut into nothing")


def check_lists(name: str, indptr: Tensor, indices: Tensor, wanted: list[list[int]]) -> None:
    """Hold index lists to plain ones."""
    ends = torch.tensor([len(keys) for keys in wanted], device=indptr.device).cumsum(0)
    same(f"{name} offsets", indptr[1:], ends)
    flat = torch.tensor([key for keys in wanted for key in keys], device=indices.device)
    same(f"{name} lists", indices[: len(flat)], flat)
