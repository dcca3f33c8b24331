"""A whole `sglang.Engine` with the shipped pair on a CPU, as a program.

``python -m tests.integrations.sglang.engine SETTING BACKEND`` prints a line of JSON. What a CPU
needs beside options is in ``stubs/``: `sglang_cpu` (SGLang's Triton kernels in place of its CUDA
ones, no streams) and ``sitecustomize`` (stand-ins of packages that are never called).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.resources import files
from typing import Any

PAIR = files("specattn") / "pair"
NEW = 20
#: algorithm, num_steps, topk, num_draft_tokens, page_size
SETTINGS: dict[str, tuple[str | None, int, int, int, int]] = {
    "plain": (None, 0, 0, 0, 1),
    "chain": ("EAGLE3", 4, 1, 5, 1),
    "4-5-16": ("EAGLE3", 4, 5, 16, 1),
    "4-2-8": ("EAGLE3", 4, 2, 8, 1),
    "4-2-8 pages": ("EAGLE3", 4, 2, 8, 16),
    "standalone": ("STANDALONE", 3, 2, 6, 1),
    "full": ("EAGLE3", 4, 2, 8, 1),
    "two ranks": ("EAGLE3", 4, 2, 8, 1),
}
#: Tokens that a pool holds; in the setting "full" it runs out.
POOL = {"full": 96}
#: Processes that share the heads, over gloo.
RANKS = {"two ranks": 2}
TEXTS = (
    "def fibonacci(n):",
    "import os\nclass Reader:",
    "import os\nclass Reader:\n    def close(self):",
    "def main():\n    parser =",
)


def options(setting: str, backend: str) -> dict[str, Any]:
    """Return what `sglang.Engine` takes."""
    algorithm, steps, topk, nodes, page = SETTINGS[setting]
    found: dict[str, Any] = {
        "model_path": str(PAIR / "target"),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": backend,
        "disable_cuda_graph": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "max_total_tokens": POOL.get(setting, 2048),
        "max_running_requests": 4,
        "page_size": page,
        "tp_size": RANKS.get(setting, 1),
        "skip_server_warmup": True,
        "log_level": "error",
    }
    if algorithm:
        found |= {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(
                PAIR / ("draft" if algorithm == "EAGLE3" else "target")
            ),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": nodes,
        }
    return found


def generate(engine: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return each prompt's tokens and how many verify forwards they took."""
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    return [
        {
            "tokens": output["output_ids"],
            "verified": output["meta_info"].get("spec_verify_ct"),
            "cached": output["meta_info"]["cached_tokens"],
        }
        for output in outputs
    ]


def abort(engine: Any, prompts: list[list[int]]) -> list[str]:
    """Start long requests, abort them, and return how they ended."""
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}

    async def run() -> list[dict[str, Any]]:
        started = [
            asyncio.create_task(
                engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=f"long-{at}")
            )
            for at, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(4)
        for at in range(len(prompts)):
            engine.tokenizer_manager.abort_request(rid=f"long-{at}")
        return await asyncio.gather(*started)

    outputs = engine.loop.run_until_complete(run())
    return [output["meta_info"]["finish_reason"]["type"] for output in outputs]


def prompts() -> list[list[int]]:
    """Return the prompts: the second is a prefix of the third."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def main(setting: str, backend: str) -> None:
    """Run one setting: all prompts, and again after others were aborted."""
    import sglang

    # SGLang wants a core named for each rank where they share a memory node
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(RANKS.get(setting, 1))))
    # compiling a few small functions takes longer than all that they do here
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    # a torch for CUDA brings NCCL, which ranks on a CPU would start
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"
    engine = sglang.Engine(**options(setting, backend))
    try:
        first = generate(engine, prompts())
        found: dict[str, Any] = {"first": first}
        if setting == "4-2-8":
            found["aborted"] = abort(engine, prompts())
            found["after abort"] = generate(engine, prompts())
    finally:
        engine.shutdown()
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
