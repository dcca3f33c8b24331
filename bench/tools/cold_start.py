"""Time an engine's first start, when Triton's cache is empty, and the next one.

The models have random weights and the shape of an 8B Llama with an EAGLE-3 head, but few layers,
for layers do not add kernels. Steps of greedy, drawn and processed requests are captured, and a
prompt is answered. Every start is a process of its own. Kernels are compiled as the library does
it ("side by side"), and each where it is first launched ("one by one"). A warm start is repeated
without graphs of prompts (``Engine(prompt_buckets=())``): the difference is what these take, of
time, and of the device's memory with all layers.

    python -m bench.tools.cold_start [--ways "side by side,one by one"] [--buckets 1,2,4,...]
        [--layers 32] [--tiny] [--out FILE]
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
from typing import TYPE_CHECKING, Any
from unittest import mock

from bench.suite.machine import machine
from bench.suite.results import write

if TYPE_CHECKING:
    from specattn.engine.engine import Engine

WAYS = "side by side", "one by one"
#: How prompts run: captured, and launched kernel by kernel.
GRAPHS, EAGER = PROMPTS = "graphs", "eager"
BUCKETS = "1,2,4,8,12,16,24,32,40,48,56,64"
CONTEXT = 2048
PROMPT, TOKENS = 50, 16
MIB = 2**20
# seconds that a start may take
PATIENCE = 580


def start(
    way: str, buckets: list[int], layers: int, *, tiny: bool, prompts: str = GRAPHS
) -> dict[str, Any]:
    """Start an engine and ask it; return the seconds of each part, and kernels compiled there.

    Beside these are what its graphs of steps and of prompts are, with the MiB that their pool grew
    by, and the MiB that the device lacks when the engine is there; None without one.
    """
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
        options["prompt_buckets"] = None if prompts == GRAPHS else ()
        engine = timed("engine", Engine, target, head, tree, **options)
    used = None
    if cuda:
        free, whole = torch.cuda.mem_get_info()
        used = (whole - free) / MIB
    request = Request(list(range(1, PROMPT + 1)), TOKENS)
    timed("first answer", engine.generate, [request])
    timed("second answer", engine.generate, [request])
    found |= taken(engine, of_prompts=False) | taken(engine, of_prompts=True)
    return found | {"prompts": prompts, "device_mib": used}


def taken(engine: Engine, *, of_prompts: bool) -> dict[str, Any]:
    """Return how many graphs an engine has, of steps or of prompts, and what their pool grew by."""
    from specattn.speculative.prompts.launch import of_prompts as is_prompts

    own = [one for one in engine.graphs()[engine.config] if is_prompts(one.part) == of_prompts]
    name = "prompt_" * of_prompts
    nbytes = sum(one.nbytes for one in own)
    return {f"{name}graphs": sum(one.recorded for one in own), f"{name}mib": nbytes / MIB}


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


def process(way: str, prompts: str, cache: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start in a process of its own, with this folder as Triton's cache."""
    command = [sys.executable, "-m", "bench.tools.cold_start", "--start", way]
    command += ["--prompts", prompts]
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
    graphs = f"{found['graphs']} graphs of steps, {found['prompt_graphs']} of prompts"
    memory = f"{found['mib']:.0f} and {found['prompt_mib']:.0f} MiB"
    used = found["device_mib"]
    device = "" if used is None else f", {used:.0f} MiB of the device"
    print(f"{way}, {state} cache, prompts as {found['prompts']}: {graphs}, {memory}{device}")
    for part, value in found.items():
        if isinstance(value, list):
            seconds, kernels = value
            compiled = f", {kernels} kernels compiled" if kernels else ""
            print(f"    {part:14} {seconds:7.2f} s{compiled}", flush=True)


def more(graphs: dict[str, Any], eager: dict[str, Any]) -> str:
    """Return what graphs of prompts take more than eager ones, of two starts."""
    seconds = graphs["engine"][0] - eager["engine"][0]
    line = f"graphs of prompts: {seconds:+.2f} s of the engine's start"
    if graphs["device_mib"] is None:
        return line
    return f"{line}, {graphs['device_mib'] - eager['device_mib']:+.0f} MiB of the device"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--buckets", default=BUCKETS, help="batch sizes")
    parser.add_argument("--layers", type=int, default=2, help="of the target")
    parser.add_argument("--tiny", action="store_true", help="narrow models, for tests")
    parser.add_argument("--out", type=Path, help="write the records there, as JSON")
    parser.add_argument("--start", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", choices=PROMPTS, default=GRAPHS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        buckets = [int(size) for size in options.buckets.split(",")]
        how = {"tiny": options.tiny, "prompts": options.prompts}
        print(json.dumps(start(options.start, buckets, options.layers, **how)))
        return
    records = []
    for way in options.ways.split(","):
        with tempfile.TemporaryDirectory() as cache:
            for state, prompts in (("empty", GRAPHS), ("warm", GRAPHS), ("warm", EAGER)):
                found = process(way, prompts, cache, options)
                show(way, state, found)
                records.append({"way": way, "cache": state, **found})
        print(more(*records[-2:]), flush=True)
    if options.out:
        write({"machine": machine(), "records": records}, options.out)


if __name__ == "__main__":
    main()
