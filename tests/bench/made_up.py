"""Result files with times that follow a rule, so that every number of a report is known."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bench.suite import matrix
from bench.suite.run import describe

if TYPE_CHECKING:
    from bench.suite.cases import Cell

#: Times of specattn's: a peer takes as many times longer.
PEERS = {
    "tree": {"FA3 tree": 2.0, "FlashInfer mask": 3.0},
    "chain": {"FA3": 1.5, "FA3, schedule ahead": 1.25, "FlashInfer MLA": 1.125},
    "draft": {"FlashInfer decode": 2.5, "SGLang decode": 8.0, "SGLang decode 64": 6.0},
    "extend": {"FA3": 1.75},
    "prompt": {"FA3": 0.75, "FlashInfer causal": 1.5},
}
COPY = 4.0
#: Variants of specattn's that do not take what their bytes take.
SLOWER = {"cap": 1.04, "window": 1.06, "2 words": 1.03, "bfloat16": 0.75}


def contestant(name, case, us, **more):
    keys = 1 if case.latent else 2
    row = keys * case.heads[1] * case.head_dim * (1 if case.stored else 2)
    tokens = sum(case.lengths)
    return {
        "name": name,
        "setting": "a setting",
        "us": us,
        "p10_us": us * 0.99,
        "p90_us": us * 1.01,
        "error": 0.0025,
        "plan_us": 2.0,
        "plan_wall_us": 30.0,
        "bytes": tokens * row,
        "flops": 4 * case.heads[0] * case.head_dim * case.q_len * tokens,
        **more,
    }


def microseconds(case):
    """Half of the copy's speed."""
    return 2 * contestant("", case, 0)["bytes"] / COPY / 1e6 + 1e-3


def cell(found: Cell):
    us = microseconds(found.case)
    entries = [contestant("specattn", found.case, us)]
    entries += [
        contestant(f"specattn {label}", case, microseconds(case) * SLOWER.get(label, 1))
        for label, case in found.variants
    ]
    peers = PEERS[found.case.mode] if found.peers else {}
    entries += [contestant(name, found.case, us * more) for name, more in peers.items()]
    if peers:
        entries.append({"name": "FlashInfer XQA", "setting": "", "failed": "pages of 16 only"})
    return {
        "name": found.name,
        "case": describe(found.case),
        "contestants": entries,
        "variants": {label: describe(case) for label, case in found.variants},
    }


def write(folder, names):
    """Write the files of some parts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        part = matrix.parts()[name]
        roofs = {f"{what}_tb_s": COPY for what in ("copy", "read")}
        (folder / f"{name}.json").write_text(
            json.dumps(
                {
                    "format": 1,
                    "part": name,
                    "title": part.title,
                    "rounds": 20,
                    "seconds": 1.0,
                    "machine": {
                        "device": "a GPU",
                        "torch": "2",
                        "commit": "abc",
                        "kernels": "def",
                        "date": "today",
                    },
                    "roofs": roofs | {"matmul_tflops": 700.0},
                    "absent": {"Flash X": "not installed"},
                    "cells": [cell(found) for found in part.cells],
                }
            )
        )
