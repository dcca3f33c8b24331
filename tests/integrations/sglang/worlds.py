"""Forwards of the plug-in beside recomputed attention: random trees, drafts, decode."""

from __future__ import annotations

import unittest
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative import spec_utils
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense

from specattn.integrations.sglang.backend import SpecAttnBackend, SpecAttnDraft
from tests.integrations.sglang.kit import NAME, on_cpu

CONTEXT = 256
HEADS, KV_HEADS, SIZE = 4, 2, 16
RELATIVE = 3e-6


def close(have: torch.Tensor, want: torch.Tensor, relative: float = RELATIVE) -> None:
    """Assert that the relative L2 distance is small."""
    distance = (have.double() - want.double()).norm() / want.double().norm()
    assert distance < relative, float(distance)


def random_tree(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return visibility ``[n, n]`` bool and depths ``[n]`` of a random tree."""
    see, depth = torch.eye(n, dtype=torch.bool), torch.zeros(n, dtype=torch.long)
    for node in range(1, n):
        parent = int(torch.randint(node, (), generator=generator))
        see[node] |= see[parent]
        depth[node] = depth[parent] + 1
    return see, depth


@torch.no_grad()
def fixture(
    mode: ForwardMode,
    prefix: tuple[int, ...],
    n: int,
    page: int,
    *,
    window: int | None = None,
    size: int = SIZE,
) -> dense.Any:
    """Return the kit's fixture of one attention layer."""
    case = dense.DenseAttentionCase(
        name="world",
        backend=NAME,
        forward_mode=mode,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        page_size=page,
        prefix_lens=prefix,
        extend_lens=() if mode.is_decode() else (n,) * len(prefix),
        sliding_window_size=window,
    )
    return dense.build_dense_attention_fixture(
        unittest.TestCase(),
        case,
        head_dim=size,
        max_context_len=CONTEXT,
        dtype=torch.float32,
        device="cpu",
        loc_layout="interleaved_pages",
    )


@torch.no_grad()
def check_tree(n: int, *, page: int = 1, graph: bool = False, seed: int = 0) -> None:
    """Verify random trees, one per request; in a graph the mask is the backend's own."""
    generator = torch.Generator().manual_seed(seed)
    prefix = (3, 40, 17)
    world = fixture(ForwardMode.TARGET_VERIFY, prefix, n, page)
    trees = [random_tree(n, generator) for _ in prefix]
    batch, backend = world.forward_batch, world.backend
    batch.seq_lens = torch.tensor(prefix)
    batch.positions = torch.cat([p + depth for p, (_, depth) in zip(prefix, trees, strict=True)])
    full = [
        torch.cat([torch.ones(n, p, dtype=torch.bool), see], 1)
        for p, (see, _) in zip(prefix, trees, strict=True)
    ]
    mask = torch.cat([rows.flatten() for rows in full])
    batch.spec_info = SimpleNamespace(draft_token_num=n, topk=4, custom_mask=mask)
    if graph:
        capture_other(backend, batch, n)
        buffer = backend.get_verify_buffers_to_fill_after_draft()[0]
        buffer[: len(prefix) * n * n] = torch.cat([see.flatten() for see, _ in trees])
        batch.spec_info.custom_mask = buffer
    with forward_context(ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata(batch)
        have = world.actual_module(world.input_hidden, batch)
    want = dense.dense_attention_reference_with_custom_mask(
        world.reference_module, world.case, world.prefix_hidden, world.input_hidden, full
    )
    close(have, want)


def capture_other(backend: dense.Any, batch: dense.Any, n: int) -> None:
    """Capture over static tensors that hold another, a padded batch."""
    rows = batch.batch_size
    static = SimpleNamespace(
        batch_size=rows,
        forward_mode=batch.forward_mode,
        req_pool_indices=torch.zeros(rows, dtype=torch.int64),
        seq_lens=torch.ones(rows, dtype=torch.int64),
        out_cache_loc=torch.zeros(rows * n, dtype=torch.int64),
        positions=torch.zeros(rows * n, dtype=torch.int64),
        spec_info=SimpleNamespace(
            draft_token_num=n, topk=4, custom_mask=torch.ones(rows * n * CONTEXT)
        ),
    )
    backend.init_cuda_graph_state(rows, rows * n)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)


@torch.no_grad()
def check_decode(*, page: int = 16) -> None:
    """Decode a token of each request."""
    world = fixture(ForwardMode.DECODE, (3, 40, 17), 1, page)
    close(dense.run_dense_fixture_eager(world), dense.expected_dense_fixture_output(world))


@torch.no_grad()
def check_draft(topk: int, steps: int, *, seed: int = 0) -> None:
    """Run draft steps whose branches SGLang chooses, beside chains attended one by one."""
    generator = torch.Generator().manual_seed(seed)
    prefix = (3, 40, 17)
    world = fixture(ForwardMode.DECODE, prefix, 1, 1)
    pool, layer = world.runner.token_to_kv_pool, world.actual_module.attn
    rows, total = len(prefix), len(prefix) * topk
    # the prefixes lie below
    free = 200 + torch.randperm(500, generator=generator)[: total * steps]
    draft = SpecAttnDraft(world.runner, topk, steps)
    batch = SimpleNamespace(
        batch_size=rows,
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.arange(rows),
        seq_lens=torch.tensor(prefix),
        out_cache_loc=free.view(rows, topk, steps).flatten(),
    )
    draft.init_forward_metadata(batch)
    numbers = [
        torch.randn(steps, total, heads, SIZE, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    paths: list[list[list[int]]] = []
    scores, hidden = None, torch.zeros(rows, 1)
    for step in range(steps - 1):
        width = rows if step == 0 else total
        probs = torch.rand(width, topk, generator=generator).softmax(-1).sort(-1, True).values
        tokens = torch.randint(64, (width, topk), generator=generator)
        out = spec_utils.select_top_k_tokens(step, probs, tokens, hidden, scores, topk)
        # a branch's hidden state names it, and the chosen ones name their parents
        _, chosen, scores, _ = out
        parents = chosen.view(rows, topk).long()
        hidden = torch.arange(topk).float().repeat(rows)[:, None]
        paths.append(grown(paths, parents, step, topk, rows))
        q, k, v = (number[step] for number in numbers)
        batch.out_cache_loc = free.view(rows, topk, steps)[:, :, step].flatten()
        have = draft.attn_backends[step].forward_decode(q.flatten(1), k, v, layer, batch)
        assert torch.equal(pool.get_key_buffer(0)[batch.out_cache_loc], k), "stored elsewhere"
        close(have, chains(world, q, numbers[1:], paths[-1], topk))


def grown(paths, parents, step, topk, rows):
    """Return every branch's path: the flat number of its node in each step."""
    found = []
    for row in range(rows):
        for branch in range(topk):
            above = paths[-1][row * topk + int(parents[row, branch])] if step else []
            found.append([*above, row * topk + branch])
    return found


def chains(world, q, keys_and_values, paths, topk):
    """Attend with each branch alone, over its prefix and its path."""
    found = []
    for branch, path in enumerate(paths):
        row = branch // topk
        table = world.runner.req_to_token_pool.req_to_token[row, : world.case.prefix_lens[row]]
        buffers = world.runner.token_to_kv_pool.get_kv_buffer(0)
        keys, values = (
            torch.cat(
                [buffer[table.long()], torch.stack([new[i][at] for i, at in enumerate(path)])]
            )
            for buffer, new in zip(buffers, keys_and_values, strict=True)
        )
        group = HEADS // KV_HEADS
        keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
        logits = torch.einsum("hd,khd->hk", q[branch].double(), keys) * SIZE**-0.5
        found.append(torch.einsum("hk,khd->hd", logits.softmax(-1), values).flatten())
    return torch.stack(found)


@torch.no_grad()
def check_window_pool(mode: ForwardMode, *, page: int = 1) -> None:
    """Attend in a layer whose pool has slots of its own numbering."""
    with on_cpu():
        world = fixture(mode, (3, 40, 17), 5, page, window=6)
        runner = world.runner
        full = runner.token_to_kv_pool
        slots = full.get_key_buffer(0).shape[0]
        order = torch.randperm(slots // page + 1)
        mapped = (order[:, None] * page + torch.arange(page)).flatten()
        pool = SWAKVPool(
            size=slots,
            size_swa=len(mapped),
            page_size=page,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=SIZE,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[],
            device="cpu",
            enable_memory_saver=False,
        )
        pool.register_mapping(mapped)
        for own, other in zip(pool.get_kv_buffer(0), full.get_kv_buffer(0), strict=True):
            own[mapped[:slots]] = other
        runner.token_to_kv_pool = pool
        world.backend = SpecAttnBackend(runner)
        have = dense.run_dense_fixture_eager(world)
        close(have, dense.expected_dense_fixture_output(world))


@torch.no_grad()
def check_float8() -> None:
    """Decode over a float8 pool, which SGLang's own function has written."""
    world = fixture(ForwardMode.DECODE, (3, 40, 17), 1, 1)
    runner, full = world.runner, world.runner.token_to_kv_pool
    runner.dtype = torch.float16
    pool = MHATokenToKVPool(
        size=full.size,
        page_size=1,
        dtype=torch.float8_e4m3fn,
        head_num=KV_HEADS,
        head_dim=SIZE,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    every = torch.arange(full.get_key_buffer(0).shape[0])
    layer = world.actual_module.attn
    pool.set_kv_buffer(layer, every, *(x.half() for x in full.get_kv_buffer(0)))
    runner.token_to_kv_pool = pool
    backend = SpecAttnBackend(runner)
    q, k, v = (x.half() for x in world.actual_module.project_qkv(world.input_hidden))
    with forward_context(ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata(world.forward_batch)
        have = layer(q, k, v, world.forward_batch)
    stored = [x.double() for x in pool.get_kv_buffer(0)]
    table = runner.req_to_token_pool.req_to_token
    want = []
    for row, seq_len in enumerate(world.case.seq_lens):
        keys, values = (
            x[table[row, :seq_len].long()].repeat_interleave(HEADS // KV_HEADS, 1) for x in stored
        )
        heads = q[row].view(HEADS, SIZE).double()
        weights = (torch.einsum("hd,khd->hk", heads, keys) * SIZE**-0.5).softmax(-1)
        want.append(torch.einsum("hk,khd->hd", weights, values).flatten())
    close(have.double(), torch.stack(want), 1e-3)
