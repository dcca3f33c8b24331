"""Products of a layer of 8B, few rows by float8 and by 16-bit weights: how long they take.

Each product is one graph of as many calls as weights that no cache holds, and all ways take turns.
What is printed is microseconds per call, the share of a copy's speed, and per way what the four
products of 32 layers take. Rows are quantised before; ``--whole`` times that, too. Before anything
is timed, each way is compared with float64.

    python -m bench.products [--rows 1,4,16,32,64] [--whole] [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import silu

from bench.suite import roofs
from bench.suite.machine import machine
from bench.suite.results import write
from bench.suite.timing import record, replay_in_turn
from specattn.kernels.fused import fp8
from specattn.models.fused.projection import Projection
from specattn.models.fused.scaled import FORMATS, ScaledProjection, quantise

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: Rows and columns of the weights of Llama 3.1 8B, and whether gates and what they gate.
PRODUCTS = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
}
LAYERS = 32
# bytes of weights that a graph reads, more than caches hold
READ = 400e6
#: The most that a way may be off, in relative L2 distance: results of 16 bits are rounded.
MOST_ERROR = 8e-3


def ways(plain: Projection, x: Tensor) -> dict[str, tuple[Any, Any]]:
    """Return by name what multiplies, and the rows that it takes."""
    found: dict[str, tuple[Any, Any]] = {"bf16": (plain, x)}
    for kind in FORMATS:
        one = quantise(plain, kind)
        found[kind] = one, fp8.scale_rows(x, one.scaled.rows_format)
    return found


def exact(one: Any, rows: Any, *, gated: bool) -> Tensor:
    """Return the product in float64 of what a way reads."""
    if isinstance(one, ScaledProjection):
        weight, x = one.scaled.restored(), rows.restored()
    else:
        weight, x = one.weight, rows
    product = x.double() @ weight.double().T
    if not gated:
        return product
    gate, up = product.chunk(2, dim=1)
    return silu(gate) * up


def call(one: Any, rows: Any, *, gated: bool) -> Tensor:
    """Multiply; returns ``[T, N]``, whose partials are added up only to be compared."""
    return one.gated(rows) if gated else one.parts(rows)


def torch_ways(one: ScaledProjection, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return torch's own product of a quantised projection, if it has one."""
    rows = fp8.scale_rows(x, one.scaled.rows_format)
    try:
        fp8._by_torch(rows, one.scaled)
    except (RuntimeError, ValueError) as problem:
        print(f"torch has no such product: {str(problem)[:80]}")
        return {}
    return {"torch": lambda: fp8._by_torch(rows, one.scaled)}


def measured(name: str, rows: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a product of so many rows in all ways."""
    out, inner, gated = PRODUCTS[name]
    copies = max(2, int(READ / (out * inner)))
    x = torch.randn(rows, inner, device="cuda").bfloat16()
    calls: dict[str, list[Callable[[], Tensor]]] = {}
    for copy in range(copies):
        weight = torch.randn(out, inner, device="cuda").bfloat16() * inner**-0.5
        for way, (one, taken) in ways(Projection(weight), x).items():
            if copy == 0:
                got = call(one, taken, gated=gated)
                got = got if gated else got.double().sum(0)
                want = exact(one, taken, gated=gated)
                error = float((got.double() - want).norm() / want.norm())
                assert error < MOST_ERROR, f"{name}, {rows} rows, {way}: off by {error:.1e}"
            whole = options.whole and isinstance(one, ScaledProjection)
            given = {way: taken} | ({f"{way}, rows too": x} if whole else {})
            for label, from_rows in given.items():
                calls.setdefault(label, []).append(
                    lambda one=one, rows=from_rows: call(one, rows, gated=gated)
                )
            if isinstance(one, ScaledProjection):
                for label, product in torch_ways(one, x).items():
                    calls.setdefault(f"{label} {way}", []).append(product)

    def in_order(products: list[Callable[[], Tensor]]) -> Callable[[], None]:
        def run() -> None:
            for product in products:
                product()

        return run

    graphs = {way: record(in_order(products), copies) for way, products in calls.items()}
    replay_in_turn(list(graphs.values()), options.rounds, 1e6)
    return [
        {"product": name, "rows": rows, "way": way, "us": round(graph.median, 2)}
        for way, graph in graphs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,4,16,32,64")
    parser.add_argument("--whole", action="store_true", help="quantise the rows in the graph, too")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    roof = roofs.measure(options.rounds)
    cells: list[dict[str, Any]] = []
    for rows in map(int, options.rows.split(",")):
        sums: dict[str, float] = {}
        for name, (out, inner, _) in PRODUCTS.items():
            for cell in measured(name, rows, options):
                size = 2 if cell["way"].startswith("bf16") else 1
                share = out * inner * size / cell["us"] / 1e6 / roof["copy_tb_s"]
                sums[cell["way"]] = sums.get(cell["way"], 0.0) + cell["us"]
                cells.append(cell | {"of_copy": round(share, 3)})
                print(f"{name:8} {rows:3} rows {cell['us']:8.2f} us {share:6.1%} {cell['way']}")
            torch.cuda.empty_cache()
        for way, total in sums.items():
            print(f"all four {rows:3} rows {total * LAYERS / 1e3:8.3f} ms of {LAYERS} layers {way}")
    if options.out:
        write({"machine": machine(), "roofs": roof, "cells": cells}, options.out)


if __name__ == "__main__":
    main()
