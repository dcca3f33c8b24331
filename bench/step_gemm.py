"""Products of few rows, and whole target forwards, against the bytes they have to read.

    python -m bench.step_gemm [--out FILE] [--layers 32] [--rounds 20]

Weights go round so that none stays in the L2 cache; every figure is the median over replays of a
CUDA graph. `torch` is torch's product (cuBLAS), `stream` is `specattn.kernels.fused.stream`.
"""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from specattn.speculative.verify_program import VerifyProgram
from torch.nn.functional import linear, silu
from transformers import LlamaConfig

from bench.suite.machine import machine
from bench.suite.roofs import _read
from bench.suite.timing import median_of, record
from specattn.backends.layers import LayeredBackend
from specattn.batch import Phase, RowLayout
from specattn.cache.kv_pool import KVPool
from specattn.kernels.fused.stream import stream_gated, stream_linear
from specattn.models import FusedTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specattn.speculative.verify_program import BoundVerify
    from torch import Tensor

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 500000.0,
}
# rows and columns of the weights; draft: the EAGLE-3 head of the same model
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
    "draft fc": (4096, 12288),
    "draft qkv": (6144, 8192),
    "draft lm_head": (32000, 4096),
}
ROWS = (1, 4, 16, 64, 96, 128)
CYCLED = 500e6
# batch, nodes, context
FORWARDS = (
    (1, 1, 4096),
    (1, 16, 1024),
    (1, 16, 4096),
    (1, 16, 32768),
    (4, 16, 4096),
    (16, 6, 4096),
    (8, 16, 4096),
)


def roofs(rounds: int) -> dict[str, float]:
    """Return TB/s of a copy (both ways counted) and of a read."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    ctas = torch.cuda.get_device_properties(0).multi_processor_count * 8
    sink = torch.empty(ctas, device="cuda")
    copy = median_of(record(lambda: torch.mul(source, 1.0, out=target)), rounds)
    read = median_of(
        record(lambda: _read[(ctas,)](source, sink, source.numel(), 4096, num_warps=8)), rounds
    )
    return {"copy": 2 * source.nbytes / copy / 1e6, "read": source.nbytes / read / 1e6}


def products(rounds: int, roof: dict[str, float]) -> list[dict[str, Any]]:
    """Time every shape by every number of rows."""
    found = []
    for name, (out, inner) in SHAPES.items():
        copies = max(2, round(CYCLED / (out * inner * 2)))
        weights = torch.empty(copies, out, inner, dtype=torch.bfloat16, device="cuda").normal_()
        for rows in ROWS:
            x = torch.randn(rows, inner, device="cuda").to(torch.bfloat16)
            # of gate and up, the streamed product is the activation, too
            stream = stream_gated if name == "gate_up" else stream_linear
            ways: dict[str, Callable[[Tensor, Tensor], Any]] = {"torch": linear, "stream": stream}
            cell: dict[str, Any] = {
                "shape": name,
                "rows": rows,
                "floor_us": weights[0].nbytes / roof["read"] / 1e6,
            }
            for way, call in ways.items():
                cell[f"{way}_us"] = _stack(call, x, weights, rounds)
                cell[f"{way}_error"] = _error(call(x, weights[0]), x, weights[0])
            found.append(cell)
            print(_line(cell), flush=True)
    return found


def _stack(call: Callable[..., Any], x: Tensor, weights: Tensor, rounds: int) -> float:
    turns = 1 if len(weights) > 6 else 3

    def stack() -> None:
        for weight in [*weights] * turns:
            call(x, weight)

    return median_of(record(stack, len(weights) * turns), rounds)


def _error(got: Tensor, x: Tensor, weight: Tensor) -> float:
    want = linear(x.float(), weight.float())
    if got.shape[-1] != want.shape[-1]:
        gate, up = want.chunk(2, dim=-1)
        want = silu(gate) * up
    if got.dim() == 3:
        got = got.float().sum(0)
    return float((got.float() - want).norm() / want.norm())


def _line(cell: dict[str, Any]) -> str:
    ways = " ".join(
        f"{key[:-3]} {value:7.2f} ({cell['floor_us'] / value:4.0%})"
        for key, value in cell.items()
        if key.endswith("_us") and key != "floor_us"
    )
    errors = " ".join(f"{v:.1e}" for key, v in cell.items() if key.endswith("_error"))
    return f"{cell['shape']:14} {cell['rows']:3} floor {cell['floor_us']:7.2f} {ways} {errors}"


@contextmanager
def way(name: str) -> Iterator[None]:
    """Let models multiply by torch's product only, with ``torch``."""
    if name == "torch":
        with mock.patch("specattn.models.fused.block.streams", return_value=False):
            yield
    else:
        yield


def bound_target(target: FusedTarget, batch: int, nodes: int, context: int) -> BoundVerify:
    """Bind a verify of ``nodes`` chained tokens after ``context`` shuffled ones."""
    device, width = target.device, context + nodes
    pool = KVPool(target.layers, batch * width + 1, device)
    for layer in (*pool.k, *pool.v):
        layer.normal_()
    table = torch.zeros(batch + 1, width, dtype=torch.int32, device=device)
    order = torch.randperm(batch * width, device=device) + 1
    table[1:] = order.view(batch, width).to(torch.int32)
    layout = RowLayout(nodes, nodes, Phase.VERIFY)
    program = VerifyProgram(
        target, LayeredBackend("triton", target.layers, pool, device), layout, table, batch
    )
    bound = program.bind(batch)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    words = torch.tensor([(2 << i) - 1 if i < 63 else -1 for i in range(nodes)], device=device)
    bound.copy_in(
        batch,
        tokens=torch.randint(1, 1000, (batch, nodes), device=device),
        positions=(lens[:, None] + torch.arange(nodes, device=device)).long(),
        tail_words=words[None, :, None].expand(batch, nodes, 1).contiguous(),
        req_pool_indices=torch.arange(1, batch + 1, device=device),
        seq_lens=lens,
    )
    bound.schedule(lens.cpu())
    bound.fill()
    return bound


def floor_bytes(target: FusedTarget, batch: int, context: int) -> int:
    """Return the bytes of every weight and every key and value, once."""
    weights = [target.lm_head.weight]
    for block in target.blocks:
        weights += [block.qkv, block.o, block.gate_up, block.down]
    layer = target.layers[0]
    kv = 2 * layer.num_kv_heads * layer.head_dim * 2 * batch * context * len(target.layers)
    return sum(weight.nbytes for weight in weights) + kv


def forwards(target: FusedTarget, rounds: int, roof: dict[str, float]) -> list[dict[str, Any]]:
    """Time whole forwards."""
    found = []
    for batch, nodes, context in FORWARDS:
        bound = bound_target(target, batch, nodes, context)
        bytes_read = floor_bytes(target, batch, context)
        cell: dict[str, Any] = {
            "batch": batch,
            "nodes": nodes,
            "context": context,
            "floor_us": bytes_read / roof["copy"] / 1e6,
        }
        outputs = {}
        for name in ("torch", "stream"):
            with way(name):
                outputs[name] = bound.run().logits.float()
                cell[f"{name}_us"] = median_of(record(bound.run), rounds)
        # both round to bfloat16 at the same places
        cell["apart"] = float(
            (outputs["stream"] - outputs["torch"]).norm() / outputs["torch"].norm()
        )
        found.append(cell)
        layers = len(target.layers)
        print(
            f"forward {batch} x {context} {nodes:2} nodes: floor {cell['floor_us']:.0f}",
            *(
                f"{name} {cell[f'{name}_us']:.0f} ({cell[f'{name}_us'] / cell['floor_us']:.3f}x, "
                f"{(cell[f'{name}_us'] - cell['floor_us']) / layers:+.1f}/layer)"
                for name in ("torch", "stream")
            ),
            f"apart {cell['apart']:.1e}",
            flush=True,
        )
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-products", action="store_true")
    parser.add_argument("--commit", help="what the results call this version")
    args = parser.parse_args()
    torch.manual_seed(0)
    roof = roofs(args.rounds)
    print({name: round(value, 3) for name, value in roof.items()}, flush=True)
    found: dict[str, Any] = {"machine": machine(args.commit), "roofs_tb_s": roof}
    if not args.no_products:
        found["products"] = products(args.rounds, roof)
    config = LlamaConfig(**(LLAMA_8B | {"num_hidden_layers": args.layers}))
    found["forwards"] = forwards(FusedTarget.random(config), args.rounds, roof)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
