"""First tokens inside transformers' ``generate``: its own loop, and ``custom_generate``."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

import specattn
from bench.load import cells
from bench.load.figures import percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.load.cells import Cell

    Line = dict[str, Any]

#: Who decodes, and the arguments of ``generate`` that say so.
LOOPS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "custom_generate": {"custom_generate": specattn.generate},
    "custom_generate, not fused": {"custom_generate": specattn.generate, "fused": False},
}


class _Clock(BaseStreamer):
    """Notes when tokens come; the prompt comes first."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def measured(
    cell: Cell, device: torch.device, dtype: torch.dtype | None, *, seed: int, rounds: int
) -> Iterator[Line]:
    """Yield a line per loop and round: of every prompt alone, when its first token came.

    Texts are greedy. How many begin as transformers' do is said, too; before each loop is timed it
    has run one of them.
    """
    torch.manual_seed(seed)
    with device:
        config = cells.shape_of(cell.model).target
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16).eval()
    prompts = [list(one.prompt) for one in cell.requests(config.vocab_size, seed)]
    texts: dict[str, list[int]] = {}
    for turn in range(rounds):
        for loop, how in LOOPS.items():
            # the loop before has left the graphs of its own forwards
            _first(model, prompts[0], cell.answers[1], how)
            found = [_first(model, prompt, cell.answers[1], how) for prompt in prompts]
            firsts = texts.setdefault(loop, [token for _, _, token in found])
            alike = sum(map(int.__eq__, firsts, texts["transformers"]))
            firsts_ms = [first for first, _, _ in found]
            yield {
                "client": loop,
                "round": turn,
                "texts": len(found),
                "ttft_ms": round(statistics.median(firsts_ms), 4),
                "ttft_p99_ms": round(percentile(firsts_ms, 0.99), 4),
                "itl_ms": round(statistics.median(gap for _, gap, _ in found), 4),
                "equal_first": alike,
            }
    specattn.integrations.transformers.release(model)


def _first(
    model: Any, prompt: list[int], new: int, how: dict[str, Any]
) -> tuple[float, float, int]:
    """Return ms to the first token, ms per token after it, and that token."""
    ids, clock = torch.tensor([prompt], device=model.device), _Clock()
    sizes = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    asked = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
    begin = time.perf_counter()
    out = model.generate(ids, streamer=clock, **sizes, **asked, **how)
    first, *_, last = clock.puts[1:]
    gap = (last - first) / max(len(clock.puts) - 2, 1)
    return 1e3 * (first - begin), 1e3 * gap, int(out[0, len(prompt)])
