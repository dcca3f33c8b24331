"""SGLang's engine, with attention of its own or ours, or with our steps."""

from __future__ import annotations

import os
import random
import time
import zlib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.engines.cells import FUSED, MTP, SETTINGS, SPARE, STEPS, WARM, write_models
from bench.engines.decode_log import summary

if TYPE_CHECKING:
    from bench.engines.cells import Job
    from bench.engines.child import Turn

SHORT_LAYERS, LAYERS = 8, 32
# what runs the prompts where steps are ours
PROMPTS_BY = "fa3"
# SGLang's variable of the tokens that every step gains
FORCED = "SGLANG_SIMULATE_ACC_LEN"
# what draws float8 weights, where SGLang's processes look for plug-ins
PLUGIN = Path(__file__).parent / "plugin"
# decode steps between two lines of SGLang's log
INTERVAL = 8
PAIR_CONTEXT, PAIR_TOKENS = 1024, 96
# Python source, as the pair has learnt it
PROMPTS = (
    "def read_lines(path):\n    with open(path) as file:",
    "class Stack:\n    def __init__(self):",
    "import os\nimport sys\n\ndef main():",
    "    def test_empty(self):\n        self.assertEqual(",
)


def options(job: Job, models: tuple[Path, Path]) -> dict[str, Any]:
    """Return the engine's arguments; sides differ in backend and algorithm alone."""
    steps, topk, nodes, gained = SETTINGS[job.setting]
    # jobs that start together must not share ports, nor those of two runs on one machine
    port = 20000 + 8 * (zlib.crc32(f"{models[0]} {job.tp} {job.name}".encode()) % 1000)
    found: dict[str, Any] = {
        "model_path": str(models[0]),
        "attention_backend": PROMPTS_BY if job.side in (STEPS, FUSED) else job.side,
        "dtype": "bfloat16",
        "tp_size": job.tp,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "disable_radix_cache": True,
        "decode_log_interval": INTERVAL,
        "log_level": "info",
        "random_seed": 0,
        "port": port,
        "nccl_port": port + 1,
        "skip_tokenizer_init": True,
        "disable_prefill_cuda_graph": True,
    }
    if job.kind == "tokens":
        found |= {"context_length": PAIR_CONTEXT, "max_total_tokens": 16384}
        found |= {"max_running_requests": len(PROMPTS), "cuda_graph_bs_decode": [len(PROMPTS)]}
        found |= {"mem_fraction_static": 0.5}
    else:
        most = max(batch for batch, _ in job.places)
        found |= {
            "load_format": "dummy",
            "context_length": max(context for _, context in job.places) + 4096,
            "max_total_tokens": job.room(gained) + most * SPARE,
            "max_running_requests": most,
            "cuda_graph_bs_decode": sorted({batch for batch, _ in job.places}),
            "mem_fraction_static": 0.93,
        }
    if job.setting in MTP:
        # texts alone
        found["enable_multimodal"] = False
    if steps:
        theirs = "NEXTN" if job.setting in MTP else "EAGLE3"
        found |= {
            "speculative_algorithm": "SPECATTN" if job.side in (STEPS, FUSED) else theirs,
            "speculative_draft_model_path": str(models[1]),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": nodes,
        }
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        found |= {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True}
        if found["attention_backend"] == PROMPTS_BY:
            found["attention_backend"] = "torch_native"
    return found


def force(job: Job) -> None:
    """Make every step gain the same, and choose forwards; SGLang reads this when it is imported."""
    steps, _, _, gained = SETTINGS[job.setting]
    os.environ["SPECATTN_SGLANG_FUSED"] = "1" if job.side == FUSED else "0"
    if steps and job.kind != "tokens":
        os.environ[FORCED] = str(gained)


def generate(engine: Any, prompts: list[list[int]], new: int) -> tuple[list[Any], float]:
    """Decode greedily past all ends; returns answers and seconds."""
    begin = time.perf_counter()
    answers = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True},
    )
    return answers, time.perf_counter() - begin


def random_prompts(batch: int, context: int, vocab: int = 32000) -> list[list[int]]:
    """Return prompts that share nothing."""
    draw = random.Random(batch * context)
    return [[draw.randrange(10, vocab) for _ in range(context)] for _ in range(batch)]


def pair_prompts() -> list[list[int]]:
    """Return the prompts in the pair's tokens."""
    from tokenizers import Tokenizer

    from bench.shipped import PAIR

    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def tokens(engine: Any, turn: Turn) -> None:
    """Record the pair's tokens."""
    answers, _ = generate(engine, pair_prompts(), PAIR_TOKENS)
    verified = [answer["meta_info"].get("spec_verify_ct", 0) for answer in answers]
    turn.record(tokens=[answer["output_ids"] for answer in answers], verified=verified)


def places(engine: Any, turn: Turn) -> None:
    """Measure every place there is time for."""
    gained = SETTINGS[turn.job.setting][3]
    new = (turn.job.steps + WARM) * gained
    for batch, context in turn.places():
        at = turn.log_size()
        _, seconds = generate(engine, random_prompts(batch, context), new)
        place = {"batch": batch, "context": context, "seconds": round(seconds, 2)}
        try:
            turn.record(**place, gained=gained, **summary_of(turn, at, batch, gained))
        except ValueError as error:
            turn.record(**place, error=str(error))


def summary_of(turn: Turn, at: int, batch: int, gained: int) -> dict[str, float]:
    """Return what the log says since ``at``, once it has come to the file."""
    time.sleep(0.5)
    return summary(turn.log_since(at), batch, gained)


def run(turn: Turn) -> None:
    """Run the job of a process."""
    force(turn.job)
    if turn.job.kind == "tokens":
        from bench.shipped import PAIR

        models = PAIR / "target", PAIR / "draft"
    else:
        layers = LAYERS if turn.job.kind == "bench" else SHORT_LAYERS
        weights = turn.job.weights
        folder = turn.out / f"models-{layers}{weights}"
        models = write_models(folder, layers, turn.job.setting, weights)
        if weights:
            paths = str(PLUGIN), os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sglang = import_module("sglang")
    engine = sglang.Engine(**options(turn.job, models))
    try:
        # what is compiled at first use
        generate(engine, random_prompts(1, 64, 2048), 2 * INTERVAL)
        turn.wait()
        tokens(engine, turn) if turn.job.kind == "tokens" else places(engine, turn)
    finally:
        engine.shutdown()
