"""Attention alone: a host with caches, a table and lengths of its own against float64."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch

from specattn.attention import (
    FLOAT8,
    Attention,
    AttnConfig,
    KVScales,
    Layer,
    Phase,
    RowLayout,
    WindowPool,
)
from specattn.backends.triton import TritonTree
from specattn.errors import UnsupportedError
from specattn.masks import full_mask, packed_mask, qlen_mask
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE, random_tree
from tests.oracle import Case, check
from tests.recordings import recorded

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

    def chain(self, q, n: int, **more) -> Case:
        """What n causal tokens after every prefix ask for."""
        words = [[[(2 << i) - 1] for i in range(n)]] * self.batch
        given = {"slots": self.after(n), "positions": places(self, [[*range(n)]] * self.batch)}
        return self.case(q, words=words, **(given | more))

    def case(self, q, *, slots, positions, words, scales=(1.0, 1.0)) -> Case:
        """What was asked for, from the host's own lists."""
        config = self.config
        rows = q.numel() // (config.num_qo_heads * config.head_dim)
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


def judge(forward, layer: Layer, case: Case, *new: torch.Tensor) -> None:
    """Attend with queries, and keys and values if any are new, and compare."""
    case.clear()
    forward.attend(layer, *new, out=case.out, lse=case.lse)
    check(case, case.expected())


def prompted(host: Host, attention, layer, new: list[int], held, dtype=torch.int64):
    """Attend to prompts of ``new`` tokens in the slots of ``held``; return the forward."""
    slots = [
        slot
        for row, length, count in zip(host.rows, host.lens, new, strict=True)
        for slot in held[row][length : length + count]
    ]
    given = (tensor(x, dtype) for x in (host.rows, host.lens, new, slots))
    forward = attention.prompts(*given, max_q_len=max(new), page_size=host.page)
    q, k, v = host.new(sum(new))
    case = host.case(q, slots=[[]] * 3, positions=[[]] * 3, words=[[]] * 3)
    case.kind = "extend"
    case.args = {
        "req_to_token": host.table,
        "req_pool_indices": tensor(host.rows),
        "seq_lens": tensor(host.lens),
        "qo_indptr": tensor([0, *accumulate(new)]),
    }
    judge(forward, layer, case, q, k, v)
    return forward


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
    forward.copy_in(
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


def test_a_composite_serves_its_phases():
    with using("naive"):
        verify(Host(2), "flex,torch_native", 7)


def test_what_the_host_stored_itself_is_read(backend):
    verify(Host(3), backend, 12, store=False)


@pytest.mark.parametrize("scales", [None, KVScales(0.5, 2.0)], ids=str)
def test_float8_caches_with_a_layers_scales(backend, scales):
    config = AttnConfig(4, 2, 16, dtype=torch.float16, kv_dtype=FLOAT8)
    host = Host(2, config)
    attention = Attention(host.table, max_batch=2, backend=backend)
    layer = host.layer(attention, scales)
    forward = attention.forward(RowLayout(3, 3, Phase.VERIFY), 2)
    forward.copy_in(tensor(host.rows), tensor(host.lens))
    q, k, v = host.new(6)
    # numbers that float8 has, also with the scales
    k, v = (torch.randint(-3, 4, x.shape, device=DEVICE).to(x.dtype) for x in (k, v))
    case = host.chain(q, 3, scales=(layer.scales.k, layer.scales.v))
    judge(forward, layer, case, q, k, v)
    stored = layer.k_cache[host.after(3)[0]].float() * layer.scales.k
    assert torch.equal(stored, k.view(2, 3, 2, 16)[0].float())


def test_layers_with_sinks_and_without_share_a_forward(backend):
    host = Host(2)
    attention = Attention(host.table, max_batch=2, backend=backend)
    forward = attention.forward(RowLayout(3, 3, Phase.VERIFY), 2)
    forward.copy_in(tensor(host.rows), tensor(host.lens))
    q, k, v = host.new(6)
    case = host.chain(q, 3)
    drawn = [torch.randn(4, device=DEVICE) * 3 for _ in range(2)]
    for sinks in (drawn[0], drawn[1].bfloat16(), None):
        layer = attention.layer(GQA, *host.caches, sinks=sinks)
        assert layer.backend.config.sinks == (sinks is not None)
        case.sinks = sinks
        judge(forward, layer, case, q, k, v)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", [1, 4])
def test_decode_and_extend_count_their_new_tokens(backend, n, dtype):
    """Causal layouts over pages; nothing but rows and lengths is given."""
    host = Host(3, page=16)
    attention = Attention(host.table, max_batch=8, backend=backend)
    layer = host.layer(attention)
    forward = attention.forward(RowLayout(n, n, Phase.DECODE, causal=True, page_size=16), 3)
    forward.copy_in(
        tensor(host.rows, dtype), tensor([length + n for length in host.lens], dtype), counted=n
    )
    q, k, v = host.new(3 * n)
    case = host.chain(q, n)
    case.clear()
    found = forward.attend(layer, q.view(3 * n, 4, 16), k, v, lse=case.lse)
    assert found.shape == (3 * n, 4, 16)
    case.out = found
    check(case, case.expected())


def test_rows_may_see_the_prefix_alone(backend):
    """A frozen cache: nothing is stored, and no new key is seen."""
    host = Host(3)
    attention = Attention(host.table, max_batch=3, backend=backend)
    layer = host.layer(attention)
    forward = attention.forward(RowLayout(2, 2, Phase.VERIFY), 3)
    forward.copy_in(tensor(host.rows), tensor(host.lens), kind="prefix")
    q, _, _ = host.new(6)
    first = places(host, [[0, 0]] * 3)
    case = host.case(q, slots=host.after(2), positions=first, words=[[[0]] * 2] * 3)
    judge(forward, layer, case, q)


def test_slots_below_zero_are_not_stored(backend):
    """Their tokens read padding's slot; all others are as they would be."""
    host = Host(3)
    attention = Attention(host.table, max_batch=3, backend=backend)
    layer = host.layer(attention)
    forward = attention.forward(RowLayout(4, 4, Phase.VERIFY), 3)
    slots = host.after(4)
    slots[2][2:] = [-1, -1]
    forward.copy_in(tensor(host.rows), tensor(host.lens), tensor(slots))
    before = [cache.clone() for cache in host.caches]
    q, k, v = host.new(12)
    k[10:], v[10:] = torch.nan, torch.nan
    case = host.chain(q, 4, slots=[[max(slot, 0) for slot in row] for row in slots])
    judge(forward, layer, case, q, k, v)
    written = [slot for row in slots for slot in row if slot >= 0]
    for cache, old in zip(host.caches, before, strict=True):
        old[written] = cache[written]
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


DRAFTS = [(3, 1, "branch"), (4, 4, "branch"), (3, 16, "step"), (5, 3, None)]


@pytest.mark.parametrize(("steps", "topk", "order"), DRAFTS)
def test_draft_steps_read_their_true_ancestors(backend, steps, topk, order):
    """Against each branch's own path as a list of slots; a flat host may have a step too many."""
    host, rng = Host(2), random.Random(topk)
    attention = Attention(host.table, max_batch=4, backend=backend)
    layer = host.layer(attention)
    draft = attention.draft(steps, topk, 2)
    spread = steps + (order == "branch")
    slots = tensor(host.after(topk * spread)).view(2, spread, topk)
    given = {"order": order} if order else {}
    given["slots"] = {"branch": slots.transpose(1, 2), "step": slots, None: None}[order]
    if order == "branch":
        given["slots"] = given["slots"].flatten()
    draft.copy_in(tensor(host.rows), tensor(host.lens), **given)
    paths = [[[] for _ in range(topk)] for _ in range(2)]
    for step in range(steps):
        parents = [[rng.randrange(topk) for _ in range(topk)] for _ in range(2)]
        draft.grow(step, tensor(parents) if step else None)
        paths = [
            [
                [*(paths[b][up] if step else []), slots[b, step, k].item()]
                for k, up in enumerate(parents[b])
            ]
            for b in range(2)
        ]
        q, k, v = host.new(2 * topk)
        # the host's own lists: every branch sees all of its path
        own = [[slot for path in request for slot in path] for request in paths]
        words = [
            [
                word_of(range(branch * (step + 1), (branch + 1) * (step + 1)), len(own[0]))
                for branch in range(topk)
            ]
            for _ in range(2)
        ]
        case = host.case(q, slots=own, positions=[[0] * len(own[0])] * 2, words=words)
        case.args["positions"] = tensor([[n + step] * topk for n in host.lens])
        judge(draft.steps[step], layer, case, q, k, v)


def word_of(keys: range, count: int) -> list[int]:
    bits = sum(1 << key for key in keys)
    words = [bits >> 64 * w & 2**64 - 1 for w in range(-(-count // 64))]
    return [word - 2**64 if word >> 63 else word for word in words]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_prompts_over_cached_prefixes(backend, dtype):
    host = Host(3, page=16)
    attention = Attention(host.table, max_batch=3, backend=backend)
    forward = prompted(host, attention, host.layer(attention), [5, 0, 17], host.held, dtype)
    with pytest.raises(ValueError, match=r"Attention\.prompts"):
        forward.copy_in(tensor(host.rows), tensor(host.lens))


def test_latent_parts_are_their_whole():
    host = Host(2, LATENT)
    attention = Attention(host.table, max_batch=2, backend="torch_native")
    layer = host.layer(attention)
    forward = attention.forward(RowLayout(3, 3, Phase.VERIFY), 2)
    forward.copy_in(tensor(host.rows), tensor(host.lens))
    q, k, _ = host.new(6)
    q, k = q.view(6, 4, 48), k.view(6, 1, 48)
    whole = forward.attend(layer, q, k)
    assert whole.isfinite().all()
    host.caches[0][tensor(host.after(3))] = torch.nan
    parts = forward.attend(layer, (q[..., :32], q[..., 32:]), (k[..., :32], k[..., 32:]))
    # request 1 is padding, whose rows share slot 0
    assert torch.equal(parts[:3], whole[:3])


def test_a_forward_is_two_launches(plan_launches, monkeypatch):
    """One copies in, one plans the work of all geometries and pools, or of all steps of a draft."""
    from specattn.kernels.masks.copy_in import launch

    copies = []

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            copies.append(grid)
            return self.kernel[grid]

    for name in ("copy_in_rows_kernel", "copy_in_steps_kernel"):
        monkeypatch.setattr(launch, name, Counted(getattr(launch, name)))
    with using("triton"):
        host = TwoPools(3)
        attention = host.attention("triton")
        host.layer(attention)
        for config in (GQA, WIDE):
            attention.layer(config, *host.cache(config))
        attention.layer(CAPPED, *host.caches, windowed=True)
        forward = attention.forward(RowLayout(4, 4, Phase.VERIFY), 3)
        draft = attention.draft(4, 4, 3)
        for made in (forward, draft):
            del plan_launches[:], copies[:]
            made.copy_in(tensor(host.rows), tensor(host.lens))
            assert len(copies) == len(plan_launches) == 1


def test_the_first_layer_of_a_forward_waits_for_its_plan(monkeypatch):
    """Later ones prefetch; whatever ran before, the first after `copy_in` or `fill` does not."""
    honest, run, told, seen = TritonTree.for_layer, TritonTree.run, {}, []

    def for_layer(bound, scales, *, prefetch):
        found = honest(bound, scales, prefetch=prefetch)
        told[id(found)] = prefetch
        return found

    def noted(bound, *args):
        seen.append(told[id(bound)])
        run(bound, *args)

    monkeypatch.setattr(TritonTree, "for_layer", for_layer)
    monkeypatch.setattr(TritonTree, "run", noted)
    with using("triton"):
        host = Host(2)
        attention = Attention(host.table, max_batch=2, backend="triton")
        layers = [host.layer(attention) for _ in range(2)]
        forward = attention.forward(RowLayout(3, 3, Phase.VERIFY), 2)
        copy_in = partial(forward.copy_in, tensor(host.rows), tensor(host.lens))
        for begin in (copy_in, copy_in, forward.fill):
            begin()
            for layer in layers:
                forward.attend(layer, *host.new(6))
    assert seen == [False, True] * 3


def test_a_recorded_forward_follows_the_host(backend):
    """One recording, and other rows, lengths, trees and tokens at each replay."""
    host, n = Host(3), 6
    attention = Attention(host.table, max_batch=3, backend=backend)
    layers = [host.layer(attention) for _ in range(2)]
    forward = attention.forward(RowLayout(n, n, Phase.VERIFY), 3)
    if DEVICE == "cuda" and not forward.graphs:
        pytest.skip("this backend's attention cannot be recorded")
    static = {
        "rows": tensor(host.rows),
        "lens": tensor(host.lens),
        "slots": tensor(host.after(n)),
        "mask": torch.zeros(3, n, n, dtype=torch.bool, device=DEVICE),
    }
    q, k, v = (x.contiguous() for x in host.new(3 * n))
    out = torch.empty(3 * n, 4, 16, device=DEVICE)

    def step() -> None:
        forward.copy_in(static["rows"], static["lens"], static["slots"], mask=static["mask"])
        for layer in layers:
            forward.attend(layer, q, k, v, out=out)

    replay = recorded(step)
    for seed in range(3):
        other = Host(3, seed=seed)
        rng = random.Random(seed)
        trees = [random_tree(rng, n, 4) for _ in range(3)]
        words = [tree.words(1) for tree in trees]
        host.held, host.rows, host.lens = other.held, other.rows, other.lens
        host.table.copy_(other.table)
        for mine, theirs in zip(host.caches, other.caches, strict=True):
            mine.copy_(theirs)
        static["rows"].copy_(tensor(host.rows))
        static["lens"].copy_(tensor(host.lens))
        static["slots"].copy_(tensor(host.after(n)))
        static["mask"].copy_(qlen_mask(tensor(words)))
        for value, drawn in zip((q, k, v), host.new(3 * n), strict=True):
            value.copy_(drawn)
        case = host.case(
            q,
            slots=host.after(n),
            positions=places(host, [tree.depths() for tree in trees]),
            words=words,
        )
        case.out = out
        case.clear()
        replay()
        check(case, case.expected(), lse=False)


def test_a_geometry_that_comes_late_is_bound_before_a_capture(backend, monkeypatch):
    host = Host(2, CAPPED)
    attention = Attention(host.table, max_batch=2, backend=backend)
    forward = attention.forward(RowLayout(3, 3, Phase.VERIFY), 2)
    forward.copy_in(tensor(host.rows), tensor(host.lens))
    layer = host.layer(attention)
    q, k, v = host.new(6)
    monkeypatch.setattr("specattn.attention.layers.is_recording", lambda _: True)
    with pytest.raises(ValueError, match=r"before a capture.*window_left=20"):
        forward.attend(layer, q, k, v)
    monkeypatch.undo()
    with using("triton" if backend == "triton" else "naive"):
        late = forward.attend(layer, q, k, v)
        again = attention.forward(RowLayout(3, 3, Phase.VERIFY), 2)
        assert again is forward
        # padding's tokens, the others, are stored in one slot: any of them may be the last
        assert torch.equal(again.attend(layer, q, k, v)[:3], late[:3])


def test_batches_share_inputs(backend):
    host = Host(3)
    attention = Attention(host.table, max_batch=5, backend=backend)
    layout = RowLayout(2, 2, Phase.VERIFY)
    small, large = attention.forward(layout, 2), attention.forward(layout, 5)
    assert small.plan.seq_lens.data_ptr() == large.plan.seq_lens.data_ptr()
    assert attention.forward(layout, 2) is small
    assert attention.draft(2, 3, 4) is attention.draft(2, 3, 4)


def test_nobody_is_nothing_to_do(backend):
    host = Host(1)
    attention = Attention(host.table, max_batch=2, backend=backend)
    layer = host.layer(attention)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    q, k, v = host.new(0)
    forward = attention.forward(RowLayout(3, 3, Phase.VERIFY), 0)
    forward.copy_in(none, none, none, none)
    assert forward.attend(layer, q, k, v).shape == (0, 64)
    draft = attention.draft(2, 3, 0)
    draft.copy_in(none, none, none)
    draft.grow(1, none.view(0, 3))
    assert draft.steps[1].attend(layer, q, k, v).shape == (0, 64)
    prompts = attention.prompts(none, none, none, none, max_q_len=1)
    assert prompts.attend(layer, q, k, v).shape == (0, 64)


def test_others_are_refused_by_name(backend):
    host = Host(2)
    attention = Attention(host.table, max_batch=2, backend=backend)
    layer = host.layer(attention)
    forward = attention.forward(RowLayout(3, 3, Phase.VERIFY), 2)
    chain = attention.forward(RowLayout(3, 3, Phase.VERIFY, causal=True), 2)
    draft = attention.draft(2, 3, 2)
    rows, lens = tensor(host.rows), tensor(host.lens)
    q, k, v = host.new(6)
    mask = torch.zeros(18, dtype=torch.bool, device=DEVICE)
    forward.copy_in(rows, lens)
    for message, call in (
        ("req_to_token must be", lambda: Attention(host.table.long(), max_batch=1)),
        ("req_to_token must be", lambda: Attention(host.table[0], max_batch=1)),
        ("max_batch must be", lambda: Attention(host.table, max_batch=0)),
        (r"k\[0\] must be", lambda: attention.layer(WIDE, *host.caches)),
        ("v must be given", lambda: attention.layer(GQA, host.caches[0])),
        ("sinks must be", lambda: attention.layer(GQA, *host.caches, sinks=torch.zeros(2))),
        ("sinks must be", lambda: attention.layer(replace(GQA, sinks=True), *host.caches)),
        ("scales are those of float8", lambda: host.layer(attention, KVScales())),
        ("batch must be 0..2", lambda: attention.forward(RowLayout(1, 1, Phase.VERIFY), 3)),
        ("tail must be q_len", lambda: attention.forward(RowLayout(1, 2, Phase.VERIFY), 2)),
        ("batch must be 0..2", lambda: attention.draft(2, 2, 3)),
        ("steps must be", lambda: attention.draft(0, 2, 2)),
        ("rows must be", lambda: forward.copy_in(rows[:1], lens)),
        ("slots must have 2 x 3", lambda: forward.copy_in(rows, lens, rows)),
        ("positions must be", lambda: forward.copy_in(rows, lens, positions=mask.view(2, 9))),
        ("counted must be", lambda: forward.copy_in(rows, lens, counted=-1)),
        ("mask must be None with a causal", lambda: chain.copy_in(rows, lens, mask=mask)),
        ("mask must be None with a causal", lambda: chain.copy_in(rows, lens, kind="prefix")),
        ("order must be", lambda: draft.copy_in(rows, lens, rows, order="beam")),
        ("slots must be those of 2 requests", lambda: draft.copy_in(rows, lens, mask[:17])),
        ("slots must be those of 2 requests", lambda: draft.copy_in(rows, lens, mask[:6])),
        ("slots must be .* int32 or int64", lambda: draft.copy_in(rows, lens, mask)),
        ("copy_in must come before attend", lambda: chain.attend(layer, q, k, v)),
        ("copy_in must come before attend", lambda: draft.steps[1].attend(layer, q, k, v)),
        ("q must be", lambda: forward.attend(layer, q[:5])),
        ("q must be", lambda: forward.attend(layer, q.double())),
        ("k must be", lambda: forward.attend(layer, q, k[:, :9], v)),
        ("v must be", lambda: forward.attend(layer, q, k, v[:5])),
        ("k and v must be", lambda: forward.attend(layer, q, k)),
        ("out must be", lambda: forward.attend(layer, q, k, v, out=q.double())),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not any(cache[host.after(3)[0]].isfinite().any() for cache in host.caches)


@pytest.mark.skipif(DEVICE != "cpu", reason="to read an accelerator's tensors would wait for it")
def test_places_outside_the_table_are_refused_on_a_cpu(backend):
    """New tokens went to slot 0, and their request attended to whatever was there."""
    host = Host(2)
    attention = Attention(host.table, max_batch=2, backend=backend)
    host.layer(attention)
    forward, draft = attention.forward(RowLayout(3, 3, Phase.VERIFY), 2), attention.draft(2, 3, 2)
    rows, slots = tensor([1, 2]), tensor(host.after(3))
    for call, most in (
        (partial(forward.copy_in, rows), CONTEXT - 3),
        (partial(forward.copy_in, rows, counted=2), CONTEXT - 1),
        (partial(forward.copy_in, rows, slots=slots), CONTEXT),
        (partial(forward.copy_in, rows, kind="prefix"), CONTEXT),
        (partial(draft.copy_in, rows), CONTEXT - 6),
    ):
        call(tensor([5, most]))
        with pytest.raises(
            ValueError, match=rf"at most {most}, .*of {CONTEXT}, got \[5, {most + 1}"
        ):
            call(tensor([5, most + 1]))
    with pytest.raises(ValueError, match=rf"at most {CONTEXT}, .* got \[6, {CONTEXT + 1}\]"):
        attention.prompts(
            rows, tensor([5, CONTEXT - 1]), tensor([1, 2]), slots.flatten()[:3], max_q_len=2
        )
    for wrong in ([1, 4], [-1, 1]):
        with pytest.raises(ValueError, match=r"rows must be 0\.\.3, got "):
            forward.copy_in(tensor(wrong), tensor([5, 5]))


def test_a_result_that_a_library_allocated_is_handed_on():
    """Flat or as heads, as q is; a layer that is given a tensor has it written there."""
    from specattn.backends.base import BoundAttention
    from specattn.backends.torch_native import TorchNativeBackend

    held = torch.randn(2, 4, 16, device=DEVICE)

    class Bound(BoundAttention):
        def run(self, q, k_cache, v_cache, out, lse=None):
            out.copy_(held)

        def result(self, q, k_cache, v_cache, lse=None):
            return held

    class Allocating(TorchNativeBackend):
        def bind(self, plan):
            return Bound()

    host = Host(1)
    attention = Attention(host.table, max_batch=1, backend=Allocating)
    layer = host.layer(attention)
    forward = attention.forward(RowLayout(2, 2, Phase.VERIFY), 1)
    forward.copy_in(tensor(host.rows), tensor(host.lens))
    q, *_ = host.new(2)
    heads = q.unflatten(1, (4, 16))
    assert forward.attend(layer, heads) is held
    flat = forward.attend(layer, q)
    assert (flat.shape, flat.data_ptr()) == ((2, 64), held.data_ptr())
    out = torch.empty_like(held)
    assert forward.attend(layer, heads, out=out) is out
    assert torch.equal(out, held)


def test_backends_that_plan_on_the_host_are_refused():
    from specattn.backends.base import Capabilities
    from specattn.backends.torch_native import TorchNativeBackend

    class Planned(TorchNativeBackend):
        name = "planned"
        capabilities = Capabilities(host_plan=True)

    class Paged(TorchNativeBackend):
        name = "paged"
        capabilities = Capabilities(page_size=16)

    host = Host(1)
    with pytest.raises(UnsupportedError, match="'planned': it plans on the host"):
        host.layer(Attention(host.table, max_batch=1, backend=Planned))
    attention = Attention(host.table, max_batch=1, backend=Paged)
    host.layer(attention)
    with pytest.raises(UnsupportedError, match="'paged': page_size must be a multiple of 16"):
        attention.forward(RowLayout(1, 1, Phase.DECODE, page_size=8), 1)


def test_nothing_of_models_is_imported():
    """An engine has versions of its own of all of these; no operation needs Triton."""
    code = (
        "import importlib, pkgutil, sys\n"
        "for name in ('transformers', 'safetensors', 'typer', 'rich', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "import specattn.kernels\n"
        "for room in pkgutil.iter_modules(specattn.kernels.__path__, 'specattn.kernels.'):\n"
        "    room.ispkg and importlib.import_module(room.name)\n"
        "from specattn.kernels.sampling import argmax_tokens\n"
        "assert argmax_tokens(torch.eye(3)).tolist() == [0, 1, 2]\n"
        "from specattn.attention import *\n"
        "attention = Attention(torch.zeros(2, 8, dtype=torch.int32), max_batch=1)\n"
        "pool = torch.zeros(2, 9, 1, 16)\n"
        "layer = attention.layer(AttnConfig(1, 1, 16), *pool)\n"
        "forward = attention.forward(RowLayout(1, 1, Phase.DECODE), 1)\n"
        "forward.copy_in(torch.tensor([1]), torch.tensor([3]), torch.tensor([5]))\n"
        "print(forward.attend(layer, *torch.ones(3, 1, 16)).sum().item())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    # of four keys of equal weight, three are 0
    assert float(run.stdout) == pytest.approx(16 * math.e**4 / (math.e**4 + 3))


class TwoPools(Host):
    """Its layers with a window have a pool of their own, of the last tokens alone."""

    def __init__(self, batch: int, *, page: int = 1, seed: int = 0):
        super().__init__(batch, CAPPED, page=page, seed=seed)
        self.full_held, self.full_table = self.held, self.table
        order = random.Random(seed).sample(range(1, self.slots // page), self.slots // page - 1)
        other = [0, *order]
        # slots are of the other pool from here on, the map's keys of the first one
        self.held = [[other[s // page] * page + s % page for s in row] for row in self.held]
        self.held[0] = [0] * CONTEXT
        self.table = tensor(self.held, torch.int32)
        # what lies before a window has no slot there any more
        self.map = torch.full((self.slots,), -1, device=DEVICE)
        for cache in self.caches:
            cache[page:] = torch.nan
        for row, length in zip(self.rows, self.lens, strict=True):
            kept = slice(max(length - CAPPED.window_left, 0), None)
            self.map[self.full_held[row][kept]] = tensor(self.held[row][kept])
            self.put(self.held[row][kept][: length - kept.start])

    def attention(self, backend: str) -> Attention:
        pool = WindowPool(self.map, CAPPED.window_left + 3)
        return Attention(
            self.full_table, max_batch=self.batch + 1, backend=backend, window_pool=pool
        )


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("given", [True, False])
def test_layers_with_a_window_may_have_a_pool_of_their_own(backend, page, given):
    """Beside layers without: trees over both pools, in two launches' time."""
    host, n = TwoPools(4, page=page), 9
    whole = Host(4, page=page)
    attention = host.attention(backend)
    layer = attention.layer(CAPPED, *host.caches, windowed=True)
    other = whole.layer(attention)
    forward = attention.forward(RowLayout(n, n, Phase.VERIFY, page_size=page), 4)
    trees = [random_tree(random.Random(n), n, 5) for _ in range(4)]
    words = [tree.words(1) for tree in trees]
    slots = whole.after(n)
    if given:
        slots[2][-1] = -1
    forward.copy_in(
        tensor(host.rows),
        tensor(host.lens),
        tensor(slots) if given else None,
        mask=qlen_mask(tensor(words)),
    )
    positions = places(host, [tree.depths() for tree in trees])
    for each, of in ((layer, host), (other, whole), (layer, host)):
        own = [[max(slot, 0) for slot in row] for row in of.after(n)]
        if given:
            own[2][-1] = 0
        q, k, v = of.new(4 * n)
        case = of.case(q, slots=own, positions=positions, words=words)
        judge(forward, each, case, q, k, v)


@pytest.mark.parametrize("page", [1, 16])
def test_prompts_over_a_pool_of_their_own(backend, page):
    host = TwoPools(3, page=page)
    attention = host.attention(backend)
    layer = attention.layer(CAPPED, *host.caches, windowed=True)
    prompted(host, attention, layer, [25, 3, 40], host.full_held)


def test_window_pools_are_refused_where_they_do_not_fit(backend):
    host = TwoPools(2)
    attention = host.attention(backend)
    wider = replace(CAPPED, window_left=24)
    for config in (wider, replace(CAPPED, window_left=-1)):
        with pytest.raises(ValueError, match=r"window_left must be 0\.\.23"):
            attention.layer(config, *host.caches, windowed=True)
    with pytest.raises(ValueError, match="window_left must be at least 0"):
        Attention(host.table, max_batch=1, window_pool=WindowPool(host.map, -1))
    layer = attention.layer(CAPPED, *host.caches, windowed=True)
    draft = attention.draft(2, 2, 2)
    draft.copy_in(tensor(host.rows), tensor(host.lens))
    with pytest.raises(UnsupportedError, match="window pool of their own"):
        draft.steps[0].attend(layer, host.new(4)[0])
    pool = WindowPool(host.map.float(), 23)
    attention = Attention(host.full_table, max_batch=2, window_pool=pool)
    forward = attention.forward(RowLayout(2, 2, Phase.DECODE), 2)
    with pytest.raises(ValueError, match="slot_map must be"):
        forward.copy_in(tensor(host.rows), tensor(host.lens))
