"""Attention alone: a host with caches, a table and lengths of its own against float64."""

from __future__ import annotations

import random

import pytest
import torch

from specattn.attention import (
    Attention,
    AttnConfig,
    KVScales,
    Layer,
    Phase,
    RowLayout,
)
from specattn.interop import full_mask, packed_mask, qlen_mask
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE, random_tree
from tests.oracle import Case, check

CONTEXT = 192
GQA = AttnConfig(4, 2, 16)
CAPPED = AttnConfig(4, 2, 16, window_left=20, logit_cap=8.0)
WIDE = AttnConfig(2, 1, 32, v_head_dim=16)
LATENT = AttnConfig(4, 1, 48, 32, sm_scale=0.2, latent=True)


@pytest.fixture(params=["torch_native", "triton"])
def backend(request):
    with using("triton" if request.param == "triton" else "naive"):
        yield request.param


def tensor(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


class Host:
    """Requests over permuted pages; whatever holds no token is NaN, but for padding's page.

    Request 1 is padding, in a batch of more than one.
    """

    def __init__(self, batch: int, config: AttnConfig = GQA, *, page: int = 1, seed: int = 0):
        rng = random.Random(seed)
        self.config, self.page, self.batch = config, page, batch
        pages = -(-CONTEXT // page)
        order = rng.sample(range(1, 1 + (batch + 1) * pages), (batch + 1) * pages)
        table = [[0] * CONTEXT]
        for row in range(batch + 1):
            mine = order[row * pages : (row + 1) * pages]
            table.append([mine[i // page] * page + i % page for i in range(CONTEXT)])
        self.held = table
        self.table = tensor(table, torch.int32)
        self.rows = rng.sample(range(1, batch + 2), batch)
        self.lens = [rng.randrange(80) for _ in range(batch)]
        if batch > 1:
            self.rows[1] = self.lens[1] = 0
        self.slots = (1 + (batch + 1) * pages) * page
        self.caches = self.cache(config)
        for row, length in zip(self.rows, self.lens, strict=True):
            self.put(table[row][:length])

    def cache(self, config: AttnConfig) -> list[torch.Tensor]:
        shape, stored = (self.slots, config.num_kv_heads), config.kv_dtype or config.dtype
        k = torch.full((*shape, config.head_dim), torch.nan, device=DEVICE).to(stored)
        v = torch.full((*shape, config.v_head_dim), torch.nan, device=DEVICE).to(stored)
        k[: self.page] = v[: self.page] = 0
        return [k, k[..., : config.v_head_dim]] if config.latent else [k, v]

    def put(self, slots: list[int]) -> None:
        for cache in self.caches:
            new = torch.randn(len(slots), *cache.shape[1:], device=DEVICE)
            cache[slots] = new.to(cache.dtype)

    def new(self, count: int) -> list[torch.Tensor]:
        """Queries, keys and values of new tokens, heads side by side."""
        config = self.config
        sizes = (
            config.num_qo_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
            config.num_kv_heads * config.v_head_dim,
        )
        # as slices of one product, whose rows have a stride
        packed = torch.randn(count, sum(sizes), device=DEVICE).to(config.dtype)
        return list(packed.split(sizes, dim=1))

    def after(self, n: int) -> list[list[int]]:
        """The slots of the n columns after every prefix."""
        return [
            self.held[row][length : length + n]
            for row, length in zip(self.rows, self.lens, strict=True)
        ]

    def layer(self, attention: Attention, scales: KVScales | None = None) -> Layer:
        values = [] if self.config.latent else self.caches[1:]
        return attention.layer(self.config, self.caches[0], *values, scales=scales)

    def case(self, q, *, slots, positions, words, scales=(1.0, 1.0)) -> Case:
        """What was asked for, from the host's own lists."""
        config = self.config
        rows = sum(map(len, slots))
        return Case(
            q=q.reshape(rows, config.num_qo_heads, config.head_dim),
            k_cache=self.caches[0],
            v_cache=self.caches[1],
            out=torch.empty(rows, config.num_qo_heads, config.v_head_dim, device=DEVICE).to(
                config.dtype
            ),
            lse=torch.empty(rows, config.num_qo_heads, device=DEVICE),
            args={
                "req_to_token": self.table,
                "req_pool_indices": tensor(self.rows),
                "seq_lens": tensor(self.lens),
                "positions": tensor(positions),
                "tail_slots": tensor(slots),
                "tail_positions": tensor(positions),
                "tail_words": tensor(words),
            },
            sm_scale=config.sm_scale,
            window_left=config.window_left,
            logit_cap=config.logit_cap,
            latent=config.latent,
            kv_scales=scales,
        )


def places(host: Host, depths: list[list[int]]) -> list[list[int]]:
    return [[n + d for d in row] for n, row in zip(host.lens, depths, strict=True)]


def verify(host: Host, backend: str, n: int, kind: str = "qlen", *, store: bool = True) -> None:
    """Attend over random trees of n nodes and compare."""
    rng = random.Random(n)
    trees = [random_tree(rng, n, 12) for _ in range(host.batch)]
    words = [tree.words(-(-n // 64)) for tree in trees]
    attention = Attention(host.table, max_batch=host.batch + 2, backend=backend)
    layer = host.layer(attention)
    layout = RowLayout(n, n, Phase.VERIFY, page_size=host.page)
    forward = attention.forward(layout, host.batch)
    lens = tensor(host.lens, torch.int32)
    write = {
        "qlen": lambda w, _: qlen_mask(w),
        "qlen_bits": lambda w, _: w.view(torch.uint8),
        "full": full_mask,
        "full_bits": packed_mask,
    }
    slots = host.after(n)
    forward.adopt(
        tensor(host.rows),
        lens,
        tensor(slots).flatten(),
        mask=write[kind](tensor(words), lens),
        kind=kind,
    )
    q, k, v = host.new(host.batch * n)
    new = () if host.config.latent else (v,)
    if not store:
        layer.store(tensor(slots), k, *(new or (None,)))
    case = host.case(
        q, slots=slots, positions=places(host, [tree.depths() for tree in trees]), words=words
    )
    case.clear()
    out = case.out.flatten(1)
    found = forward.attend(layer, q, *((k, *new) if store else ()), out=out, lse=case.lse)
    assert found is out
    check(case, case.expected())


TREES = [
    (3, 1, 1, "qlen"),
    (4, 8, 16, "qlen_bits"),
    (3, 26, 1, "full"),
    (1, 60, 16, "full_bits"),
    (1, 100, 1, "full"),
]


@pytest.mark.parametrize(("batch", "n", "page", "kind"), TREES)
def test_random_trees(backend, batch, n, page, kind):
    verify(Host(batch, page=page), backend, n, kind)


@pytest.mark.parametrize("config", [CAPPED, WIDE, AttnConfig(4, 4, 16, dtype=torch.float16)])
def test_layers_of_any_geometry(backend, config):
    verify(Host(3, config), backend, 9)


@pytest.mark.parametrize("store", [True, False])
def test_latent_layers(store):
    for name in ("torch_native", "triton_mla"):
        with using("naive" if name == "torch_native" else "triton"):
            verify(Host(2, LATENT), name, 7, store=store)


def test_what_the_host_stored_itself_is_read(backend):
    verify(Host(3), backend, 12, store=False)
