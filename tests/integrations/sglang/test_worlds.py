"""Random trees and drafts against recomputed attention, and mutants that must fail."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.integrations.sglang import INSTALLED

if INSTALLED:
    from tests.integrations.sglang import operators  # noqa: F401, I001
    from tests.integrations.sglang import worlds
    from specattn.attention import BoundLayers, BoundMultiStep, Layer
    from specattn.errors import UnsupportedError
    from specattn.integrations.sglang import backend
    from specattn.integrations.sglang.layers import AttentionType, refusals

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("active")]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("n", [8, 26, 60, 100])
def test_random_trees(n, graph):
    worlds.check_tree(n, graph=graph, page=16 if n == 26 else 1, seed=n)


@pytest.mark.parametrize("steps", [3, 4, 6])
@pytest.mark.parametrize("topk", [1, 2, 5, 8])
def test_draft_steps_see_their_true_ancestors(topk, steps):
    worlds.check_draft(topk, steps, seed=topk * steps)


@pytest.mark.parametrize("page", [1, 16])
def test_decode(page):
    worlds.check_decode(page=page)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_window_layers_with_a_pool_of_their_own(mode, page):
    worlds.check_window_pool(worlds.ForwardMode[mode], page=page)


def test_a_float8_pool():
    """Keys and values are rounded to e4m3, which is coarse; without scales."""
    worlds.check_float8()


OPTIONS = {
    "speculative_algorithm": None,
    "enable_multi_layer_eagle": False,
    "enable_deterministic_inference": False,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": 4}, "page_size 4"),
        ({"token_to_kv_pool": object()}, "KV pool object"),
        ({"model": "sinks"}, "attention sinks"),
        ({"speculative_algorithm": "DFLASH"}, "speculative_algorithm DFLASH"),
        ({"enable_multi_layer_eagle": True}, "enable_multi_layer_eagle"),
        ({"enable_deterministic_inference": True}, "enable_deterministic_inference"),
    ],
)
def test_what_is_refused_at_start(change, named):
    runner = worlds.fixture(worlds.ForwardMode.DECODE, (3,), 1, 1).runner
    runner.server_args = SimpleNamespace(
        **{name: change.get(name, OPTIONS[name]) for name in OPTIONS}
    )
    if "model" in change:
        runner.model = torch.nn.Module()
        runner.model.sinks = torch.zeros(4)
    for name in {"page_size", "token_to_kv_pool"} & change.keys():
        setattr(runner, name, change[name])
    with pytest.raises(UnsupportedError, match=named) as error:
        backend.SpecAttnBackend(runner)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "ahead", "reasons"),
    [
        ("Gemma3ForCausalLM", False, 0),
        ("Gemma3ForCausalLM", True, 1),
        ("HrmTextForCausalLM", False, 1),
    ],
)
def test_layers_that_may_see_ahead_are_refused_but_those_of_texts(name, ahead, reasons):
    world = worlds.fixture(worlds.ForwardMode.DECODE, (3,), 1, 1)
    runner, layer = world.runner, world.actual_module.attn
    layer.attn_type = AttentionType.DECODER_BIDIRECTIONAL
    runner.server_args = SimpleNamespace(**OPTIONS)
    runner.model = type(name, (torch.nn.Module,), {})()
    runner.model.config = SimpleNamespace(use_bidirectional_attention=ahead)
    runner.model.attn = layer
    found = refusals(runner)
    assert len(found) == reasons, found
    assert all("DECODER_BIDIRECTIONAL" in one for one in found)


def test_a_head_that_no_kernel_serves_is_refused(monkeypatch):
    monkeypatch.setenv("SPECATTN_SGLANG_BACKEND", "triton")
    world = worlds.fixture(worlds.ForwardMode.DECODE, (3,), 1, 1, size=320)
    with pytest.raises(UnsupportedError, match="head_dim is limited to 256, got 320"):
        world.backend.layers.of(world.actual_module.attn)


def without(name):
    """Return `BoundLayers.copy_in` without one of its arguments."""
    real = BoundLayers.copy_in

    def copy_in(self, *args, **options):
        args = list(args)
        if name == "mask":
            args[4] = None
        else:
            options[name] = 0
        real(self, *args, **options)

    return copy_in


def step_major(self, rows, seq_lens, slots):
    real(self, rows, seq_lens, slots, order="step")


if INSTALLED:
    real = BoundMultiStep.copy_in
    grow = BoundMultiStep.grow
    in_graph = backend.SpecAttnBackend.init_forward_metadata_in_graph


def as_qlen(mask, seq_lens, n, *, out):
    cells = len(seq_lens) * n * n
    out[:cells] = mask[:cells]


def own_branch(self, step, parents, *, flat=False):
    batch, topk = parents.shape
    grow(self, step, torch.arange(topk).expand(batch, topk))


def stale(self, batch):
    # the captured batch is the only one whose slots are all padding
    if not batch.out_cache_loc.any():
        in_graph(self, batch)


#: What each mutant replaces, by what, and the check that must fail with it.
MUTANTS = {
    "causal words in verify": lambda: (
        patch.object(BoundLayers, "copy_in", without("mask")),
        lambda: worlds.check_tree(8),
    ),
    "FULL read as QLEN_ONLY": lambda: (
        patch.object(backend, "qlen_from_full", as_qlen),
        lambda: worlds.check_tree(8),
    ),
    "stale metadata at replay": lambda: (
        patch.object(backend.SpecAttnBackend, "init_forward_metadata_in_graph", stale),
        lambda: worlds.check_tree(8, graph=True),
    ),
    "lengths off by one": lambda: (
        patch.object(BoundLayers, "copy_in", without("counted")),
        lambda: worlds.check_decode(),
    ),
    "KV not stored": lambda: (
        patch.object(Layer, "store", lambda self, slots, k, v: None),
        lambda: worlds.check_tree(8),
    ),
    "own-branch words": lambda: (
        patch.object(BoundMultiStep, "grow", own_branch),
        lambda: worlds.check_draft(4, 4),
    ),
    "slots in another order": lambda: (
        patch.object(BoundMultiStep, "copy_in", step_major),
        lambda: worlds.check_draft(4, 4),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    mutant, check = MUTANTS[name]()
    check()
    with mutant, pytest.raises(AssertionError):
        check()
