"""Accepted tokens per step of the shipped pair, over text neither model was trained on.

Prompts are windows of held-out standard-library files (as `bench.tools.train_pair` splits). Greedy
runs must give plain decoding's tokens before their acceptance counts. ``own branch`` drafts as
SGLang does at topk > 1: a branch reads its own beam slot's KV at every depth, whatever its true
ancestors are (sglang#7523); it shows what true ancestors are worth.

    python -m bench.acceptance [--prompts 192] [--new 128] [--dtype float32] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from bench.shipped import pair
from bench.suite.results import write
from bench.tools.train_pair.corpus import encode, is_held_out, read_sources
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.speculative import draft as drafting
from specattn.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT = 384
PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Setting:
    name: str
    tree: tuple[int, int, int]
    temperature: float = 0.0
    own_branch: bool = False
    draft_sampling: bool = False


SETTINGS = (
    Setting("plain, greedy", (0, 1, 1)),
    Setting("chain of 5, greedy", (5, 1, 6)),
    Setting("topk 4, 16 nodes, greedy", (5, 4, 16)),
    Setting("topk 4, 16 nodes, greedy, own branch", (5, 4, 16), own_branch=True),
    Setting("topk 4, 32 nodes, 8 steps, greedy", (8, 4, 32)),
    Setting("topk 4, 32 nodes, 8 steps, greedy, own branch", (8, 4, 32), own_branch=True),
    Setting("topk 8, 64 nodes, 7 steps, greedy", (7, 8, 64)),
    Setting("chain of 5, temperature 1", (5, 1, 6), 1.0),
    Setting("chain of 5, temperature 1, rejection", (5, 1, 6), 1.0, draft_sampling=True),
    Setting("topk 4, 16 nodes, temperature 1", (5, 4, 16), 1.0),
    Setting("topk 4, 16 nodes, temperature 1, own branch", (5, 4, 16), 1.0, own_branch=True),
)


def held_out_prompts(count: int, tokenizer: Any) -> list[list[int]]:
    """Windows of held-out files of the running interpreter's standard library, spread evenly."""
    sources = read_sources(Path(sysconfig.get_path("stdlib")))
    texts = [text for name, text in sources.items() if is_held_out(name)]
    stream = encode(tokenizer.backend_tokenizer, texts)
    starts = np.linspace(0, len(stream) - PROMPT_TOKENS, count).astype(int)
    return [stream[at : at + PROMPT_TOKENS].tolist() for at in starts]


@contextlib.contextmanager
def own_branch(topk: int) -> Iterator[None]:
    """Make draft nodes see their own beam slot of every earlier step, as SGLang's do."""
    honest = drafting.select_beams

    def select(step: int, *args: Any, words_out: torch.Tensor, **named: Any) -> None:
        honest(step, *args, words_out=words_out, **named)
        for beam in range(topk):
            for word in range(words_out.shape[-1]):
                nodes = [s * topk + beam for s in range(step + 1)]
                bits = sum(1 << node % 64 for node in nodes if node // 64 == word)
                words_out[:, beam, word] = bits - (1 << 64 if bits >> 63 else 0)

    with mock.patch.object(drafting, "select_beams", select):
        yield


def measure(
    setting: Setting, target: Any, draft: Any, prompts: list[list[int]], new: int, slots: int
) -> tuple[dict[str, Any], list[list[int]]]:
    steps, topk, nodes = setting.tree
    config = SpecConfig(steps, topk, nodes, CONTEXT, slots, draft_sampling=setting.draft_sampling)
    swap = own_branch(topk) if setting.own_branch else contextlib.nullcontext()
    requests = [
        Request(prompt, new, SamplingParams(setting.temperature, seed=i), ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    with swap:
        engine = Engine(target, draft, config, buckets=[slots])
        results = engine.generate(requests)
    gained = sum(sum(r.accept_lens) for r in results)
    taken = sum(r.steps for r in results)
    record = {
        "setting": setting.name,
        "tree": setting.tree,
        "temperature": setting.temperature,
        "tokens": sum(len(r.tokens) for r in results),
        "steps": taken,
        "accepted_per_step": round(gained / taken, 4),
    }
    return record, [r.tokens for r in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--slots", type=int, default=64, help="requests at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = args.device
    dtype = getattr(torch, args.dtype)
    target, draft = pair(device, dtype)
    prompts = held_out_prompts(args.prompts, target.tokenizer)

    records, plain = [], None
    for setting in SETTINGS:
        record, tokens = measure(setting, target, draft, prompts, args.new, args.slots)
        if setting.temperature == 0:
            plain = plain or tokens
            record["requests_equal_to_plain"] = sum(
                a == b for a, b in zip(plain, tokens, strict=True)
            )
            assert dtype != torch.float32 or plain == tokens, setting.name
        records.append(record)
        print(f"{record['accepted_per_step']:7.3f}  {setting.name}", flush=True)
    if args.out:
        name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
        found = {
            "device": name,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "dtype": args.dtype,
            "prompts": len(prompts),
            "prompt_tokens": PROMPT_TOKENS,
            "results": records,
        }
        write(found, args.out)


if __name__ == "__main__":
    main()
