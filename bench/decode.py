"""Decoding speed of the shipped pair: plain, chain and tree, eager and under graphs.

Every run's tokens are compared with plain decoding's (float32: equal; half: counted) before its
time is printed. Times are of the decode loop, the prompt and the captures excluded.

    python -m bench.decode [--batch 1 8 64] [--new 192] [--dtype bfloat16] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from bench.acceptance import held_out_prompts
from specattn.config import SpecConfig
from specattn.models import HFTarget, load_draft
from specattn.spec.generate import Engine
from specattn.spec.request import Request

TREES = {"plain": (0, 1, 1), "chain 5": (5, 1, 6), "topk 4, 16 nodes": (5, 4, 16),
         "topk 8, 64 nodes": (7, 8, 64)}


def timed(engine: Engine, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Decode one batch to its end, synchronising once per step as any caller must."""
    results = engine.add([Request(p, new, ignore_eos=True) for p in prompts])
    begin, steps = time.perf_counter(), []
    while engine.num_live:
        at = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - at)
    seconds = time.perf_counter() - begin
    made = sum(len(r.tokens) - 1 for r in results)
    return {
        "tokens": [r.tokens for r in results], "tokens_per_second": made / seconds,
        "step_ms": statistics.median(steps) * 1e3,
        "accepted_per_step": sum(sum(r.accept_lens) for r in results)
        / sum(r.steps for r in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, dtype = ("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, args.dtype)
    pair = files("specattn") / "pair"
    target = HFTarget.from_pretrained(str(pair / "target"), dtype=dtype, device=device)
    draft = load_draft(str(pair / "draft"), target, dtype=dtype, device=device)
    prompts = held_out_prompts(max(args.batch), target.tokenizer)
    target = target.with_features(draft.features)
    records = []
    for batch in args.batch:
        plain = None
        for name, tree in TREES.items():
            for graphs in (False, True) if device == "cuda" else (False,):
                config = SpecConfig(*tree, 512, batch)
                engine = Engine(target, draft, config, buckets=[batch], graphs=graphs)
                timed(engine, prompts[:batch], 16)
                found = timed(engine, prompts[:batch], args.new)
                plain = plain or found["tokens"]
                same = sum(a == b for a, b in zip(plain, found.pop("tokens"), strict=True))
                assert dtype != torch.float32 or same == batch, (name, graphs)
                record = {"setting": name, "batch": batch, "graphs": graphs, "equal": same, **found}
                records.append(record)
                print(f"batch {batch:3d}  {name:18s} graphs {graphs!s:5s} "
                      f"{found['tokens_per_second']:9.0f} tok/s  {found['step_ms']:7.3f} ms/step  "
                      f"{found['accepted_per_step']:.2f} per step  {same}/{batch} equal",
                      flush=True)
                if args.profile and graphs and batch == 1:
                    profile(engine, prompts[:batch])
    if args.out:
        args.out.write_text(json.dumps({
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "torch": torch.__version__, "python": platform.python_version(),
            "dtype": args.dtype, "new_tokens": args.new, "results": records,
        }, indent=1) + "\n")


def profile(engine: Engine, prompts: list[list[int]]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    engine.add([Request(p, 128, ignore_eos=True) for p in prompts])
    for _ in range(3):
        engine.step()
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(10):
            engine.step()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=22,
                                     max_name_column_width=60))
    engine.clear()


if __name__ == "__main__":
    main()
