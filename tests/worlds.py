"""Decoders over poisoned pools, and random inputs of every captured mode."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

import torch

from specattn.batch import ForwardMode
from specattn.buffers import BufferSet
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.speculative.decoder import ModelSlot, SpecDecoder
from tests.tiny import TinyDraft, TinyTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["torch_native", "triton"] if DEVICE.type == "cuda" else ["torch_native"]
MODES = [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND]
CONFIG = SpecConfig(4, 3, 9, max_context_len=256, max_num_reqs=8, page_size=4)


@dataclass
class World:
    """A decoder over pools whose unreserved slots hold NaN."""

    decoder: SpecDecoder
    table: SlotTable
    pools: tuple[KVPool, KVPool]
    rows: list[int]

    def poison(self, lens: list[int]) -> None:
        """Random KV in the committed prefixes of ``lens``, NaN everywhere else."""
        generator = torch.Generator().manual_seed(sum(lens))
        for pool in self.pools:
            for data in (pool.k, pool.v):
                data.fill_(float("nan"))
                for row, length in zip(self.rows, lens, strict=False):
                    slots = self.table.req_to_token[row, :length].long()
                    shape = (len(data), length, *data.shape[2:])
                    data[:, slots] = torch.randn(shape, generator=generator).to(data)

    def run(self, mode: ForwardMode, lens: list[int], values: dict):
        rows = torch.tensor(self.rows[: len(lens)], device=DEVICE)
        on_host = torch.tensor(lens, dtype=torch.int32)
        dtype = self.decoder.target.model.dtype
        read = {n: v.to(dtype) for n, v in values.items() if n in ("features", "hidden_states")}
        values = values | read
        out = self.decoder.runner.run(
            mode, len(lens), on_host, req_pool_indices=rows, seq_lens=on_host.to(DEVICE), **values
        )
        return {n: v.clone() for n, v in vars(out).items() if n != "tail_slots"}

    def bound(self, mode: ForwardMode, bucket: int):
        """What was captured for a bucket."""
        return self.decoder.runner._captured[mode][bucket].bound


def world(
    backend,
    buckets: list[int],
    config: SpecConfig = CONFIG,
    *,
    indices="table",
    record=True,
    dtype=torch.float32,
    window=9,
    kv_dtype=None,
) -> World:
    target = TinyTarget(device=DEVICE, window=window, dtype=dtype)
    draft = TinyDraft(device=DEVICE, dtype=dtype)
    context, page = config.max_context_len, config.page_size
    slots = -(-context // page) * page * 9
    table = SlotTable(
        max_num_reqs=8, max_context_len=context, num_slots=slots, page_size=page, device=DEVICE
    )
    rows = [table.allocate() for _ in range(8)]
    random.Random(3).shuffle(rows)
    for length in range(7, context + 1, 50):  # interleaves the rows' pages
        table.reserve(rows, [length] * 8)
    table.reserve(rows, [context] * 8)
    pools = tuple(KVPool(m.layers, slots, DEVICE, kv_dtype=kv_dtype) for m in (target, draft))
    decoder = SpecDecoder(
        ModelSlot.of(target, pools[0], backend),
        ModelSlot.of(draft, pools[1], backend),
        config,
        table.req_to_token,
        features=64,
        buckets=buckets,
        indices=indices,
        record=record,
    )
    return World(decoder, table, pools, rows)


def inputs(mode: ForwardMode, lens: list[int], seed: int, config: SpecConfig = CONFIG) -> dict:
    """Random values of a mode: new trees, new beams, new accepted lengths."""
    rng = random.Random(seed)
    size, nodes, width = len(lens), config.num_draft_tokens, config.num_steps + 1
    torch.manual_seed(seed)
    if mode is ForwardMode.TARGET_VERIFY:
        parents = [[-1] + [rng.randrange(j) for j in range(1, nodes)] for _ in lens]
        words, depths = zip(*(tree_of(p) for p in parents), strict=True)
        found = {
            "tokens": torch.randint(61, (size, nodes)),
            "positions": torch.tensor(lens)[:, None] + torch.tensor(depths),
            "tail_words": torch.tensor(words)[:, :, None],
        }
    elif mode is ForwardMode.DRAFT_DECODE:
        found = {
            "topk_probs": torch.rand(size, config.topk).sort(1, descending=True).values,
            "topk_tokens": torch.randint(61, (size, config.topk)),
            "hidden_states": torch.randn(size, 64),
            "draft_probs": torch.empty(size, 0),
        }
    else:
        found = {
            "tokens": torch.randint(61, (size, width)),
            "accept_lens": torch.randint(1, width + 1, (size,), dtype=torch.int32),
            "features": torch.randn(size, width, 64),
        }
    return {name: value.to(DEVICE) for name, value in found.items()}


def tree_of(parents: list[int]) -> tuple[list[int], list[int]]:
    words, depths = [], []
    for node, parent in enumerate(parents):
        words.append(1 << node | (words[parent] if node else 0))
        depths.append(depths[parent] + 1 if node else 0)
    return words, depths


def same(a: dict, b: dict) -> None:
    for name in a:
        assert not a[name].isnan().any() if a[name].is_floating_point() else True
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def identical(a: dict, b: dict) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


def buffer_sets(bound) -> Iterator[BufferSet]:
    """Every static buffer set of a bound program."""
    if isinstance(bound, BufferSet):
        yield bound
    elif is_dataclass(bound):
        for item in fields(bound):
            if item.name not in ("attend", "draft", "target", "config"):
                yield from buffer_sets(getattr(bound, item.name))
