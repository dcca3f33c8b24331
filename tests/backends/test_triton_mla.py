"""Absorbed latent attention in the loop: absorbed equals expanded, speculation equals greedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.backends import available, load_backend
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import AttnConfig, SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import UnsupportedError
from specattn.plan import ExtendPlan, MultiStepDims
from tests.attention.test_multi_step import feed
from tests.books import check_books
from tests.engines import engine as tiny_engine
from tests.samples import half, on_cpu
from tests.tiny import DenseAttend, TinyTarget, dense_greedy
from tests.tiny_mla import TinyMlaDraft, TinyMlaTarget, expand

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["torch_native", "triton_mla"]
CONFIG = AttnConfig(16, 1, 576, v_head_dim=512, sm_scale=0.1, latent=True)
PROMPTS = [[3, 14, 15, 9, 26, 5], [35], list(range(1, 30)), [58, 9, 7, 9, 3]]
TREES = {"plain": (0, 1, 1), "chain": (4, 1, 5), "tree": (4, 4, 12), "wide": (3, 2, 6)}


@pytest.fixture(scope="module")
def models():
    return TinyMlaTarget(device=DEVICE), TinyMlaDraft(device=DEVICE)


@pytest.fixture(scope="module")
def expected(models):
    return [dense_greedy(expand(models[0]), prompt, 24) for prompt in PROMPTS]


def dense_logits(target, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor(tokens, device=DEVICE)
    return target(ids, torch.arange(len(ids), device=DEVICE), DenseAttend(target.layers)).logits


@pytest.mark.parametrize("q_rank", [0, 24])
def test_absorbed_equals_expanded(q_rank):
    target = TinyMlaTarget(q_rank=q_rank, rank=40, device=DEVICE)
    tokens = [7 * i % 61 for i in range(50)]
    absorbed = dense_logits(target.double(), tokens)
    expanded = dense_logits(expand(target), tokens)
    torch.testing.assert_close(absorbed, expanded, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", BACKENDS)
def test_absorbed_over_the_pool_equals_expanded(models, name):
    """A prompt in two pieces, through a table of permuted slots and a poisoned pool."""
    target = models[0]
    tokens = [7 * i % 61 for i in range(37)]
    pool = KVPool(target.layers, 64, DEVICE)
    pool.k.fill_(float("nan"))
    table = torch.zeros(3, 40, dtype=torch.int32, device=DEVICE)
    table[2, :37] = (torch.randperm(60)[:37] + 2).to(table)
    layers = LayeredBackend(name, target.layers, pool, DEVICE)
    logits = []
    for begin, end in ((0, 20), (20, 37)):
        positions = torch.arange(begin, end, device=DEVICE)
        bound = layers.bind(
            ExtendPlan(
                table,
                torch.tensor([2], device=DEVICE),
                table.new_tensor([begin]),
                table.new_tensor([0, end - begin]),
                table[2:3, begin:end],
                end - begin,
                end,
            )
        )
        bound.schedule(table.new_tensor([begin]).cpu())
        bound.fill()
        ids = torch.tensor(tokens[begin:end], device=DEVICE)
        logits.append(target(ids, positions, bound).logits)
    want = dense_logits(expand(target), tokens)
    torch.testing.assert_close(torch.cat(logits).double(), want, rtol=2e-5, atol=2e-5)


def engine(models, tree: str, **options) -> Engine:
    return tiny_engine(TREES[tree], models=models, **options)


@on_cpu(half, "name", "tree")
@pytest.mark.parametrize(
    ("tree", "page_size"),
    [("plain", 1), ("chain", 16), ("tree", 1), ("wide", 4)],
)
@pytest.mark.parametrize("name", BACKENDS)
def test_greedy_speculation_equals_expanded_greedy_decoding(
    models, expected, name, tree, page_size
):
    interpreted = name == "triton_mla" and DEVICE.type == "cpu"
    prompts, count = (PROMPTS[:2], 5) if interpreted else (PROMPTS, 24)
    run = engine(
        models,
        tree,
        backend=name,
        page_size=page_size,
        buckets=[2] if interpreted else None,
    )
    out = run.generate([Request(p, max_new_tokens=count) for p in prompts])
    for result, want in zip(out, expected, strict=False):
        assert result.tokens == want[:count]
    check_books(run.table)
    if tree != "plain":
        assert max(n for r in out for n in r.accept_lens) > 1, "nothing was ever accepted"


@pytest.mark.parametrize("page_size", [1, 4])
def test_draft_steps_over_lists_and_table_agree(page_size):
    """Two branches, three steps, unreserved slots poisoned; against the twin."""
    heads = AttnConfig(4, 1, 80, v_head_dim=64, sm_scale=0.2, latent=True)
    config = SpecConfig(4, 2, 6, max_context_len=16, max_num_reqs=3)
    q = torch.randn(6, 4, 80, device=DEVICE)
    outs = []
    for name in BACKENDS:
        for indices in ("table", "csr")[: 1 + (name == "torch_native")]:
            torch.manual_seed(1)
            table = SlotTable(
                max_num_reqs=3, max_context_len=16, num_slots=64, page_size=page_size, device=DEVICE
            )
            rows = [table.allocate() for _ in range(3)]
            table.reserve(rows, [16, 16, 16])
            pool = KVPool([heads], 64, DEVICE)
            pool.k.fill_(float("nan"))
            used = table.req_to_token[1:].flatten().long().unique()
            pool.k[0, used] = torch.randn(64, 1, 80).to(DEVICE)[: len(used)]
            layers = LayeredBackend(name, [heads], pool, DEVICE)
            shared = MultiStepDraftBackend(
                layers, MultiStepDims.of(config), table.req_to_token, 3, indices
            )
            outs.append(draft_steps(shared.bind(3), rows, q, pool))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)


def draft_steps(bound, rows, q, pool) -> torch.Tensor:
    feed(bound, rows, [3, 5, 0])
    bound.fill_slots()
    bound.fill()
    for step in range(3):
        bound.fill_ancestors(step)
    bound.schedule(None)
    out = torch.full((3, 6, 4, 64), float("nan"), device=DEVICE)
    for step, layers in enumerate(bound.steps):
        layers.bounds[0].run(q, pool.k[0], pool.v[0], out[step])
    return out


def test_what_is_not_served_is_named():
    for change, reason in (
        ({"latent": False}, "only latent layers are served"),
        ({"window_left": 8}, "window_left is not served, got 8"),
        ({"logit_cap": 2.0}, "logit_cap is not served, got 2.0"),
        ({"v_head_dim": 500}, "head_dim - v_head_dim is limited to 64, got 76"),
        ({"head_dim": 600, "v_head_dim": 550}, "v_head_dim is limited to 512, got 550"),
    ):
        (found,) = available("triton_mla", replace(CONFIG, **change), DEVICE)
        assert reason in found
    assert available("triton_mla", CONFIG, DEVICE) == []
    assert available("triton_mla", None, DEVICE) == []
    with pytest.raises(UnsupportedError, match="only latent layers"):
        Engine(TinyTarget(device=DEVICE), None, SpecConfig(0, 1, 1), backend="triton_mla")


def test_what_is_declared_is_what_reasons_refuse():
    declared = load_backend("triton_mla").capabilities
    assert declared.graphs
    assert not declared.window
    assert not declared.cap
