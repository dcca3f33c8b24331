"""Time an engine's first start, when Triton's cache is empty, and the next one.

The models have random weights and the shape of an 8B Llama with an EAGLE-3 head, but few layers,
for layers do not add kernels. Steps of greedy, drawn and processed requests are captured, and a
prompt is answered. Every start is a process of its own. Kernels are compiled as the library does
it ("side by side"), and each where it is first launched ("one by one").

    python -m bench.tools.cold_start [--ways "side by side,one by one"] [--buckets 1,2,4,...]
        [--layers 2] [--tiny] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from bench.suite.machine import machine
from bench.suite.results import write

WAYS = "side by side", "one by one"
BUCKETS = "1,2,4,8,12,16,24,32,40,48,56,64"
CONTEXT = 2048
PROMPT, TOKENS = 50, 16
# seconds that a start may take
PATIENCE = 580


def start(way: str, buckets: list[int], layers: int, *, tiny: bool) -> dict[str, Any]:
    """Start an engine and ask it; return the seconds of each part, and kernels compiled there."""
    began = time.perf_counter()
    import torch

    from bench.random_models import random_eagle3, random_target
    from bench.step_world import shapes
    from specattn.config import SpecConfig
    from specattn.cuda_graph import GraphRunner
    from specattn.engine.engine import Engine, Request

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda, compiled = device.type == "cuda", listened()
    found: dict[str, Any] = {"imports": [time.perf_counter() - began, 0]}

    def timed(part: str, call: Any, *args: Any, **named: Any) -> Any:
        began, before = time.perf_counter(), len(compiled)
        outcome = call(*args, **named)
        if cuda:
            torch.cuda.synchronize()
        seconds, kernels = found.get(part, [0.0, 0])
        seconds += time.perf_counter() - began
        found[part] = [seconds, kernels + len(compiled) - before]
        return outcome

    compile_ = GraphRunner.compile

    def ahead(self: Any, modes: Any) -> None:
        if way == WAYS[0]:
            timed("ahead", compile_, self, modes)

    capture = GraphRunner.capture

    def captured(self: Any, mode: Any) -> None:
        timed("captures", capture, self, mode)

    def models() -> tuple[Any, Any]:
        shape = shapes(CONTEXT, layers)["Llama-3.1-8B"]
        for config in (shape.target, shape.draft) if tiny else ():
            config.update({"hidden_size": 512, "intermediate_size": 512, "vocab_size": 4096})
            config.update({"num_attention_heads": 4, "num_key_value_heads": 2})
        target = random_target(shape.target, device=device, dtype=torch.bfloat16)
        head = random_eagle3(shape.draft, target, 2048 if tiny else shape.draft_vocab)
        return target.with_features(head.features), head

    target, head = timed("models", models)
    tree = SpecConfig(5, 4, 16, max_context_len=CONTEXT, max_num_reqs=max(buckets))
    with (
        mock.patch.object(GraphRunner, "compile", ahead),
        mock.patch.object(GraphRunner, "capture", captured),
    ):
        options = {"buckets": buckets, "sampled": True, "processed": True}
        engine = timed("engine", Engine, target, head, tree, **options)
    request = Request(list(range(1, PROMPT + 1)), TOKENS)
    timed("first answer", engine.generate, [request])
    timed("second answer", engine.generate, [request])
    return found | {"graphs": sum(one.recorded for one in engine.decoder(engine.config).report())}


def listened() -> list[str]:
    """Return the names of kernels that Triton compiles from now on; none without Triton."""
    compiled: list[str] = []
    try:
        import triton
    except ImportError:
        return compiled

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    triton.knobs.compilation.listener = listen
    return compiled


def process(way: str, cache: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start in a process of its own, with this folder as Triton's cache."""
    command = [sys.executable, "-m", "bench.tools.cold_start", "--start", way]
    command += ["--buckets", options.buckets, "--layers", str(options.layers)]
    command += ["--tiny"] * options.tiny
    began = time.perf_counter()
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    seconds = time.perf_counter() - began
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"process": [seconds, 0]}


def show(way: str, state: str, found: dict[str, Any]) -> None:
    print(f"{way}, {state} cache: {found['graphs']} graphs", flush=True)
    for part, value in found.items():
        if isinstance(value, list):
            seconds, kernels = value
            compiled = f", {kernels} kernels compiled" if kernels else ""
            print(f"    {part:14} {seconds:7.2f} s{compiled}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--buckets", default=BUCKETS, help="batch sizes")
    parser.add_argument("--layers", type=int, default=2, help="of the target")
    parser.add_argument("--tiny", action="store_true", help="narrow models, for tests")
    parser.add_argument("--out", type=Path, help="write the records there, as JSON")
    parser.add_argument("--start", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        buckets = [int(size) for size in options.buckets.split(",")]
        print(json.dumps(start(options.start, buckets, options.layers, tiny=options.tiny)))
        return
    records = []
    for way in options.ways.split(","):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "warm"):
                found = process(way, cache, options)
                show(way, state, found)
                records.append({"way": way, "cache": state, **found})
    if options.out:
        write({"machine": machine(), "records": records}, options.out)


if __name__ == "__main__":
    main()
