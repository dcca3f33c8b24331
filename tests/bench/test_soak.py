"""A short soak over the tiny models, and what a soak notices."""

from __future__ import annotations

import json

import pytest
import torch

from bench import soak as soaking
from bench.soak import Dice, kinds_of, soak
from bench.soak_checks import judge
from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from tests.tiny import TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[3, 14, 15, 9, 26, 5], [35], [3, 14, 15, 9, 2], [58, 9, 7, 9, 3]]
STEPS, NEW, CONTEXT = (300, 40, 96) if DEVICE == "cuda" else (60, 12, 32)


@pytest.fixture(scope="module")
def models():
    return TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)


def engine(models, tree, *others, **options) -> Engine:
    config, *more = (SpecConfig(*one, CONTEXT, 4, 4) for one in (tree, *others))
    backend = "triton" if DEVICE == "cuda" else "torch_native"
    policy = Dice(3) if more else None
    return Engine(
        *models, config, configs=more, policy=policy, backend=backend, buckets=[2, 4], **options
    )


def short_soak(models, run=None, **more):
    kinds = kinds_of(PROMPTS, NEW, CONTEXT)
    return soak(
        run or engine(models, (3, 3, 8)),
        engine(models, (3, 3, 8)),
        engine(models, (0, 1, 1)),
        kinds,
        STEPS,
        seed=1,
        check_every=10,
        **more,
    )


def test_requests_come_and_go(models, monkeypatch):
    monkeypatch.setattr(soaking, "WINDOW", STEPS // 3)
    kept = []
    report = short_soak(models, keep=lambda seen: kept.append(json.loads(json.dumps(seen))))
    assert [seen["steps"] for seen in kept] == [STEPS // 3, STEPS // 3 * 2, STEPS, STEPS, STEPS]
    assert [seen["passed"] for seen in kept] == [False] * 4 + [True]
    assert 0 < kept[0]["requests"] < kept[1]["requests"] < report["requests"]
    assert kept[-1] == json.loads(json.dumps(report))
    assert report["requests"] == report["joins"] > STEPS // 8
    assert report["greedy"] + report["drawn"] == report["requests"]
    assert not report["greedy_apart"]
    assert report["batch_sizes"][-1] == 4
    assert {"length", "context"} <= report["reasons"].keys()
    assert report["last_steps"]["mean"] > 1.3


def test_requests_come_and_go_while_settings_switch(models):
    report = short_soak(models, engine(models, (3, 3, 8), (2, 1, 3), (0, 1, 1)))
    assert report["greedy"] > STEPS // 16
    assert not report["drawn"], "drawn tokens depend on the setting"
    assert not report["greedy_apart"]
    assert min(report["steps_by_setting"].values()) > STEPS // 8


@pytest.mark.parametrize(
    "options", [{"cudagraph": "piecewise"}, {"tbo": True}], ids=["piecewise", "halves"]
)
def test_requests_come_and_go_in_parts(models, options):
    report = short_soak(models, engine(models, (3, 3, 8), **options))
    assert report["passed"]
    assert report["greedy"] > STEPS // 16
    assert report["drawn"]
    assert not report["greedy_apart"]


def test_a_wrong_token_ends_a_soak(models, monkeypatch):
    run = engine(models, (3, 3, 8))
    append = run.scheduler.append
    monkeypatch.setattr(
        run.scheduler, "append", lambda one, tokens: append(one, [t ^ 1 for t in tokens])
    )
    with pytest.raises(AssertionError, match="margin"):
        short_soak(models, run)


def test_a_lost_slot_ends_a_soak(models, monkeypatch):
    run = engine(models, (3, 3, 8))
    leave = SlotTable._leave
    monkeypatch.setattr(SlotTable, "_leave", lambda table, pages: leave(table, pages[1:]))
    with pytest.raises(AssertionError, match=r"slots were lost|page"):
        short_soak(models, run)


def test_what_grows_or_moves_is_refused():
    mean = {"mean": 2.0, "standard_error": 0.01, "fresh": 2.0, "kinds": 2.0}
    good = {
        "memory_warm": {"allocated": 0},
        "memory_end": {"allocated": 0},
        "drawn": 500,
        "drawn_apart": 5,
        "first_steps": mean,
        "last_steps": mean,
    }
    judge(good, fixed=True)
    judge(good, fixed=False)
    moved = mean | {"mean": 1.9}
    for change, fixed, message in (
        ({"memory_end": {"allocated": 2 << 20}}, True, "more are in use"),
        ({"memory_end": {"reserved": 65 << 20}}, False, "more are held"),
        ({"memory_end": {"rss_kib": 1 << 20}}, True, "the host has"),
        ({"drawn_apart": 6}, True, "drawn texts"),
        ({"last_steps": moved}, True, "1.9"),
        ({"last_steps": mean | {"mean": 1.6}}, False, "1.6"),
    ):
        with pytest.raises(AssertionError, match=message):
            judge(good | change, fixed=fixed)
