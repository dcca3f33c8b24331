"""Tokens per second inside transformers' ``generate``, beside its own speculation, batch 1.

The model is the shipped target in float32 with transformers' own modules; prompts are windows of
held-out files. Its opponents are transformers' ways to speculate that need no model which is not
shipped: prompt lookup, the target as its own assistant (every draft is right, and costs as much
as the target), and its first layers as the assistant (`assistant_early_exit`; the target was not
trained for it). There is no smaller model with its vocabulary, so an assistant in the usual sense
is not among them.

A run's tokens are compared with plain decoding's before its time counts. All ways take turns. The
time is this process's CPU time on one thread, which other processes hardly change; the wall time
stands beside it.

    python -m bench.inside_transformers [--prompts 4] [--new 128] [--turns 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

import specattn
from bench.acceptance import held_out_prompts
from bench.shipped import PAIR, plain_target
from bench.suite.results import write
from specattn import SpecConfig

OURS: dict[str, Any] = {"custom_generate": specattn.generate}
PLAIN = "transformers"


def ways(model: Any) -> dict[str, dict[str, Any]]:
    """The arguments of ``generate``, by the name of the way."""
    return {
        PLAIN: {},
        "transformers, prompt lookup of 10": {"prompt_lookup_num_tokens": 10},
        "transformers, the target as its assistant": {"assistant_model": model},
        "transformers, its first 4 layers as assistant": {"assistant_early_exit": 4},
        "specattn, plain": OURS,
        "specattn, chain of 5": OURS | {"draft": "shipped"},
        "specattn, topk 4, 16 nodes": OURS
        | {"draft": "shipped", "spec_config": SpecConfig(5, 4, 16)},
    }


def timed(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> tuple[list[int], float, float]:
    """The new tokens of one call, its CPU seconds and its wall seconds."""
    wall, begin = time.perf_counter(), time.process_time()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    cpu, wall = time.process_time() - begin, time.perf_counter() - wall
    return out[0, ids.shape[1] :].tolist(), cpu, wall


def measure(model: Any, prompts: list[list[int]], new: int, turns: int) -> list[dict[str, Any]]:
    """All ways over all prompts, in turns; the first turn compares and is not timed."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    lengths = {"max_new_tokens": new, "do_sample": False}
    want = [timed(model, torch.tensor([ids]), lengths)[0] for ids in prompts]
    times: dict[str, list[tuple[float, float]]] = {}
    equal: dict[str, int] = {}
    for turn in range(turns + 1):
        for name, options in ways(model).items():
            # pools of three trees are not kept: what a first call builds is not timed
            timed(model, torch.tensor([prompts[0]]), lengths | options)
            runs = [timed(model, torch.tensor([ids]), lengths | options) for ids in prompts]
            if not turn:
                equal[name] = sum(run[0] == text for run, text in zip(runs, want, strict=True))
                continue
            times.setdefault(name, []).append((sum(r[1] for r in runs), sum(r[2] for r in runs)))
    tokens = new * len(prompts)
    return [
        {
            "way": name,
            "texts_equal_to_plain": equal[name],
            "tokens_per_cpu_second": round(tokens / statistics.median(cpu for cpu, _ in taken), 1),
            "tokens_per_second": round(tokens / statistics.median(wall for _, wall in taken), 1),
        }
        for name, taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = plain_target("cpu", torch.float32)
    prompts = held_out_prompts(args.prompts, AutoTokenizer.from_pretrained(PAIR / "target"))
    results = measure(model, prompts, args.new, args.turns)
    print(f"{'tokens per CPU second':>21}  {'per second':>10}  {'equal':>7}")
    for one in results:
        assert one["way"].startswith(PLAIN) or one["texts_equal_to_plain"] == len(prompts), one
        print(
            f"{one['tokens_per_cpu_second']:21.1f}  {one['tokens_per_second']:10.1f}  "
            f"{one['texts_equal_to_plain']:3} / {len(prompts)}  {one['way']}"
        )
    if args.out:
        record = {
            "device": "CPU, one thread",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "prompts": args.prompts,
            "new": args.new,
            "results": results,
        }
        write(record, args.out)


if __name__ == "__main__":
    main()
