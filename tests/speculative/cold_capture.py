"""Capture a step for SM90 with an empty cache of Triton's, without a GPU; see `test_cold_captures`.

Kernels are compiled, but not launched: a stand-in for the driver counts launches. Prints, of every
call in turn, its name, how many kernels it compiled, its launches, and the threads that compiled.

    python -m tests.speculative.cold_capture fused|torch|fp8
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from transformers import LlamaConfig
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver

from bench.random_models import random_eagle3, random_target
from bench.tools.compile_targets import HOPPER, LIMITS, OfflineDriver
from specattn.backends import triton as triton_backend
from specattn.config import SpecConfig
from specattn.cuda_graph import GraphRunner
from specattn.kernels.attention.tiles import DeviceLimits
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.setup import StepSetup
from tests.tiny import TinyDraft, TinyTarget

CPU = torch.device("cpu")
CONTEXT, SLOTS = 64, 256
LLAMA = LlamaConfig(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    num_hidden_layers=2,
    vocab_size=512,
    max_position_embeddings=CONTEXT,
)
TREE = SpecConfig(2, 1, 3, CONTEXT, 2)


class Counting(OfflineDriver):
    """Loads nothing, and counts launches."""

    def __init__(self) -> None:
        super().__init__(HOPPER)
        self.launches = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": LIMITS[HOPPER].shared},
            load_binary=lambda *_: (object(), object(), 0, 0, 1024),
        )

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        def launch(*_: Any) -> None:
            self.launches += 1

        return launch


def as_it_is(_: Any, module: Any, metadata: dict[str, Any], *__: Any) -> Any:
    """Stand in for a stage that is for the GPU, where most of the time goes by."""
    metadata |= {"name": "kernel", "global_scratch_align": 1, "profile_scratch_align": 1}
    metadata["tensordesc_meta"] = []
    sizes = ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")
    metadata |= dict.fromkeys(sizes, 0)
    return module


def main(kind: str) -> None:
    counting, found = Counting(), []
    driver.set_active(counting)
    compiled: list[int] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(threading.get_ident())

    triton.knobs.compilation.listener = listen
    compile_, capture = GraphRunner.compile, GraphRunner.capture

    def noted(name: str, call: Any) -> Any:
        def run(*args: Any) -> None:
            before = counting.launches
            compiled.clear()
            call(*args)
            launches, threads = counting.launches - before, len(set(compiled))
            found.append([name, len(compiled), launches, threads])

        return run

    def captured(*args: Any) -> None:
        # nobody writes what launches should
        with (
            mock.patch.object(torch, "empty", torch.zeros),
            mock.patch.object(torch, "empty_like", torch.zeros_like),
            mock.patch.object(Tensor, "new_empty", Tensor.new_zeros),
        ):
            capture(*args)

    values = {
        "specattn.kernels.uses_triton": True,
        "specattn.cuda_graph.runner.uses_triton": True,
        "specattn.kernels.launch.supports_pdl": True,
        "specattn.kernels.fused.stream.multiprocessors": LIMITS[HOPPER].sms,
        "specattn.kernels.attention.gluon.gluon_ok": True,
    }
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch(name, return_value=value))
        swaps = [
            (DeviceLimits, "of", lambda *_: LIMITS[HOPPER]),
            (triton_backend, "platform_reasons", lambda *_: []),
            (triton_backend, "interpret", lambda: None),
            *((CUDABackend, f"make_{name}", as_it_is) for name in ("ttgir", "llir", "ptx")),
            (CUDABackend, "gluon_to_ttgir", as_it_is),
            (CUDABackend, "make_cubin", lambda *_: b""),
            (GraphRunner, "compile", noted("compile", compile_)),
            (GraphRunner, "capture", noted("capture", captured)),
        ]
        for owner, name, value in swaps:
            stack.enter_context(mock.patch.object(owner, name, value))
        decoder(kind).capture(sampled=True)
        decoder(kind)
    print(json.dumps(found))


def models(kind: str) -> tuple[Any, Any]:
    """Return a target and a draft whose layers are this library's kernels, or torch's."""
    if kind == "torch":
        return TinyTarget(dtype=torch.float16), TinyDraft(dtype=torch.float16)
    way = None if kind == "fused" else kind
    target = random_target(LLAMA, dtype=torch.float16, device=CPU, quantization=way)
    head = random_eagle3(LLAMA, target, 256, quantization=way)
    return target.with_features(head.features), head


def decoder(kind: str) -> StepDecoder:
    target, head = models(kind)
    setup = StepSetup.over(target, head, TREE, num_slots=SLOTS, backend="triton")
    return StepDecoder.of(setup, buckets=[1, 2])


if __name__ == "__main__":
    main(sys.argv[1])
