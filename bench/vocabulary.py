"""Latency of what a step does over whole vocabularies, beside torch's own operators and sgl_kernel.

Each kernel is held to its torch twin before it is timed; all ways of doing one thing are recorded
in graphs of their own and replayed in turn. ``torch`` is what one would write: ``softmax`` and
``topk``, ``argmax``, and for distributions the twin, which sorts. ``sgl_kernel`` renormalises
probabilities by top-k, then by top-p (it keeps more of equal ones, so it is only timed).

    python -m bench.vocabulary [--rounds 20] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.small_ops_step import by_torch
from bench.suite import roofs, timing
from bench.suite.machine import machine
from specattn.kernels import sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    Ways = dict[str, Callable[[int], object]]

RESULTS = Path(__file__).parent / "results"
DRAFT_VOCAB, VOCAB = 32000, 128256
# more logits than the L2 cache holds, read in turn
COLD_BYTES = 200 << 20
SETTINGS = {
    "off": (None, None),
    "given, but off": (0, 1.0),
    "top_k 50": (50, 1.0),
    "top_p 0.95": (0, 0.95),
    "both": (50, 0.95),
}


def logits_of(rows: int, vocab: int) -> list[Tensor]:
    """Logits as a model's: peaked, in bfloat16; several sets, so that they come from memory."""
    sets = max(1, min(16, COLD_BYTES // (2 * rows * vocab)))
    return [(3 * torch.randn(rows, vocab, device="cuda")).bfloat16() for _ in range(sets)]


def top_tokens(rows: int, topk: int, sets: list[Tensor]) -> Ways:
    """Return ways to choose draft tokens."""
    probs = torch.empty(rows, topk, device="cuda")
    ids = torch.empty(rows, topk, dtype=torch.int64, device="cuda")
    want = torch.empty_like(probs), torch.empty_like(ids)
    sampling.top_tokens(sets[0], topk, probs_out=probs, ids_out=ids)
    with by_torch():
        sampling.top_tokens(sets[0], topk, probs_out=want[0], ids_out=want[1])
    assert torch.equal(ids, want[1])
    torch.testing.assert_close(probs, want[0], rtol=1e-5, atol=1e-7)
    return {
        "specattn": lambda at: sampling.top_tokens(sets[at], topk, probs_out=probs, ids_out=ids),
        "torch": lambda at: torch.softmax(sets[at].float(), -1).topk(topk),
    }


def argmax(rows: int, sets: list[Tensor]) -> Ways:
    """Return ways to find the target's most probable tokens."""
    with by_torch():
        want = sampling.argmax_tokens(sets[0])
    assert torch.equal(sampling.argmax_tokens(sets[0]), want)
    return {
        "specattn": lambda at: sampling.argmax_tokens(sets[at]),
        "torch": lambda at: sets[at].argmax(-1),
    }


def distributions(rows: int, sets: list[Tensor], top_k: int | None, top_p: float | None) -> Ways:
    """Return ways to the distributions that sampling draws from."""
    warmth = torch.full((rows,), 0.8, device="cuda")
    few = None if top_k is None else torch.full((rows,), top_k, dtype=torch.int32, device="cuda")
    share = None if top_p is None else torch.full((rows,), top_p, device="cuda")
    args = (warmth, few, share, 1)
    got = sampling.target_probs(sets[0], *args)
    if rows <= 512:
        with by_torch():
            want = sampling.target_probs(sets[0], *args)
        # where mass cuts, rounding may move the cut by tokens of next to no mass
        moved = torch.where((got > 0) == (want > 0), 0, got + want).sum(1)
        assert moved.max() < 1e-5, f"{moved.max():.1e} of the mass is cut elsewhere"
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    ways: Ways = {"specattn": lambda at: sampling.target_probs(sets[at], *args)}
    if rows <= 64:
        ways["torch"] = lambda at: sampling.naive.target_probs(sets[at], *args)
    peer = _renormalise()
    if peer is not None and (few is not None or share is not None):
        ways["sgl_kernel"] = lambda at: peer(
            torch.softmax(sets[at].float() / warmth[:, None], -1), top_k, top_p, few, share
        )
    return ways


def _renormalise() -> Callable[..., Tensor] | None:
    try:
        from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob
    except (ImportError, OSError):
        return None

    def run(probs: Tensor, top_k: int, top_p: float, few: Tensor, share: Tensor) -> Tensor:
        if top_k:
            probs = top_k_renorm_prob(probs, few)
        return top_p_renorm_prob(probs, share) if top_p < 1 else probs

    return run


def timed(ways: Ways, sets: int, rounds: int) -> dict[str, float]:
    """Return each way's median microseconds per call."""
    graphs = {}
    for name, call in ways.items():
        calls = max(4, min(32, round(4e3 / timing.once(partial(call, 0)))))

        def stack(call: Callable[[int], object] = call, calls: int = calls) -> None:
            for nth in range(calls):
                call(nth % sets)

        try:
            graphs[name] = timing.record(stack, calls)
        except RuntimeError as error:  # a peer that waits for the device
            print(f"{name}: {error}", flush=True)
    timing.replay_in_turn(list(graphs.values()), rounds, 1e6)
    return {name: round(graph.median, 2) for name, graph in graphs.items()}


def cells() -> dict[str, tuple[int, int, Callable[[list[Tensor]], Ways]]]:
    """Return rows, vocabulary and ways of every cell."""
    found: dict[str, tuple[int, int, Callable[[list[Tensor]], Ways]]] = {}
    for rows in (1, 4, 16, 64, 256):
        for topk in (1, 4, 8):
            name = f"top {topk} of {rows} x {DRAFT_VOCAB}"
            found[name] = rows, DRAFT_VOCAB, partial(top_tokens, rows, topk)
    for rows in (1, 16, 256, 4096):
        found[f"argmax of {rows} x {VOCAB}"] = rows, VOCAB, partial(argmax, rows)
    for rows in (1, 16, 256, 1024):
        for setting, (top_k, top_p) in SETTINGS.items():
            ways = partial(distributions, rows, top_k=top_k, top_p=top_p)
            found[f"law of {rows} x {VOCAB}, {setting}"] = rows, VOCAB, ways
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=RESULTS / "vocabulary_h200.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "format": 1,
        "machine": machine(options.commit),
        "rounds": options.rounds,
        "roofs": roofs.measure(options.rounds),
        "cells": [],
    }
    for name, (rows, vocab, ways) in cells().items():
        sets = logits_of(rows, vocab)
        try:
            us = timed(ways(sets), len(sets), options.rounds)
        except (AssertionError, RuntimeError) as error:
            us = {}
            print(f"{name}: {str(error)[:300]}", flush=True)
        floor = 2 * rows * vocab / found["roofs"]["read_tb_s"] / 1e6
        found["cells"].append({"name": name, "read_us": round(floor, 2), "us": us})
        print(
            f"{name:34} read {floor:8.2f}  " + "  ".join(f"{k} {v:9.2f}" for k, v in us.items()),
            flush=True,
        )
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
