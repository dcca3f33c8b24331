"""A published model by every draft that fits it: tokens per step and per second, over HumanEval.

Nothing is forced, and nothing is timed but whole texts, prompts included. A text ends where its
model ends it. Greedy texts are compared with plain decoding's; where one departs in 16 bits, the
gap between plain decoding's best two log-probabilities says how near a tie was.

What is known is written after every line:

    python -m bench.published --target FOLDER --problems HumanEval.jsonl.gz
        [--draft FOLDER] [--batches 32 8 1] [--kinds model lookup ...] [--out FILE]

Models are folders, GGUF files or names on the Hub.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.suite.results import write
from specattn.cli.loading import load_models
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request, RequestOutput
from specattn.speculative.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ASK = "Complete this Python function. Answer with the whole function and nothing else.\n\n"
PLAIN, MODEL, LOOKUP, BOTH = "plain", "model", "lookup", "lookup+model"
Shape = tuple[int, int, int]
#: Steps, topk and nodes, by draft.
SHAPES: dict[str, tuple[Shape, ...]] = {
    PLAIN: ((0, 1, 1),),
    LOOKUP: ((7, 1, 8), (15, 4, 32)),
    MODEL: ((3, 1, 4), (5, 1, 6), (5, 4, 16)),
    BOTH: ((3, 1, 4), (5, 1, 6)),
}
#: What an adaptive engine chooses from, the first one its start.
ADAPTIVE: dict[str, tuple[Shape, ...]] = {
    MODEL: ((7, 1, 8), (3, 1, 4), (0, 1, 1)),
    BOTH: ((7, 1, 8), (3, 1, 4), (0, 1, 1)),
}
#: Problems for a batch, so that the smallest takes no longer than the others.
ROUNDS = {1: 10, 8: 5}


@dataclass(frozen=True)
class Setting:
    """A line: who drafts, the shapes to choose from, requests at once, and how tokens are drawn."""

    draft: str
    shapes: tuple[Shape, ...]
    batch: int
    temperature: float

    @property
    def named(self) -> dict[str, Any]:
        """What a record calls it."""
        return {
            "draft": self.draft,
            "shapes": self.shapes,
            "batch": self.batch,
            "temperature": self.temperature,
        }


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    """Yield the lines in the order in which they are measured."""
    for temperature in args.temperatures:
        for batch in args.batches:
            for kind in (PLAIN, *args.kinds):
                for shape in SHAPES[kind]:
                    yield Setting(kind, (shape,), batch, temperature)
                if kind in ADAPTIVE:
                    yield Setting(kind, ADAPTIVE[kind], batch, temperature)


def problems(path: Path, tokenizer: Any) -> list[list[int]]:
    """Return HumanEval's prompts as chats, in tokens."""
    with gzip.open(path, "rt") as file:
        asked = [json.loads(line)["prompt"] for line in file]
    chats = ([{"role": "user", "content": f"{ASK}```python\n{text}```"}] for text in asked)
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


def drafts(draft: str, model: Any) -> Any:
    """Return what drafts: a model, the text, or one in front of the other."""
    lookup = LookupProposer(matches=4)
    return {PLAIN: None, MODEL: model, LOOKUP: lookup, BOTH: LookupFirst(lookup, model)}[draft]


def run(
    setting: Setting, models: Any, prompts: Sequence[list[int]], new: int
) -> tuple[dict[str, Any], list[RequestOutput]]:
    """Return a line's record and its texts."""
    room = max(map(len, prompts)) + new + 2 * max(nodes for *_, nodes in setting.shapes)
    configs = [SpecConfig(*shape, room, setting.batch) for shape in setting.shapes]
    drawn = setting.temperature > 0
    engine = Engine(
        models.target,
        drafts(setting.draft, models.draft),
        configs[0],
        configs=configs[1:],
        buckets=[setting.batch],
        sampled=drawn,
    )
    requests = [
        Request(
            prompt,
            new,
            SamplingParams(setting.temperature, seed=seed if drawn else None),
        )
        for seed, prompt in enumerate(prompts)
    ]
    engine.generate(requests[: setting.batch])
    begin = time.perf_counter()
    outputs = engine.generate(requests)
    seconds = time.perf_counter() - begin
    gained = [count for one in outputs for count in one.accept_lens]
    tokens = sum(len(one.tokens) for one in outputs)
    record = setting.named | {
        "texts": len(outputs),
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
        "steps": len(gained),
        "tokens_per_step": round(sum(gained) / len(gained), 4),
        # of the steps that gained so many tokens
        "steps_by_tokens": [gained.count(n) for n in range(1, max(gained) + 1)],
    }
    return record, outputs


def departures(
    plain: Sequence[RequestOutput], found: Sequence[RequestOutput], gaps: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return how many texts are plain decoding's, and the gaps where the others depart from it."""
    near = []
    for one, other, gap in zip(plain, found, gaps, strict=False):
        pairs = zip(one.tokens, other.tokens, strict=False)
        departs = [at for at, (a, b) in enumerate(pairs) if a != b]
        near += [round(gap[at], 4) for at in departs[:1]]
    equal = sum(a.tokens == b.tokens for a, b in zip(plain, found, strict=False))
    return {"equal_to_plain": equal, "gaps_at_departures": sorted(near)}


def gaps_of(
    models: Any, prompts: Sequence[list[int]], new: int
) -> tuple[list[RequestOutput], list[list[float]]]:
    """Return plain decoding's texts, and the gaps (nats) of its best two tokens."""
    room = max(map(len, prompts)) + new + 2
    engine = Engine(models.target, None, SpecConfig(0, 1, 1, room, 8), processed=True)
    sampling = SamplingParams(logprobs=2)
    outputs = engine.generate([Request(prompt, new, sampling) for prompt in prompts])
    gaps = []
    for one in outputs:
        tops = [tuple(token.alternatives.values()) for token in one.logprobs]
        gaps.append([best - second for best, second in tops])
    return outputs, gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--problems", type=Path, required=True)
    parser.add_argument("--count", type=int, default=164)
    parser.add_argument("--new", type=int, default=256, help="most tokens of a text")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 8, 1])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--kinds", nargs="+", choices=SHAPES, default=[LOOKUP])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.draft is None and {MODEL, BOTH} & set(args.kinds):
        parser.error("a draft model needs --draft")
    models: Any = load_models(
        args.target,
        args.draft,
        speculative=args.draft is not None,
        dtype=getattr(torch, args.dtype),
        device=torch.device(args.device),
        kind=MODEL,
    )
    prompts = problems(args.problems, models.tokenizer)[: args.count]
    on_gpu = torch.device(args.device).type == "cuda"
    record = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "dtype": args.dtype,
        "target": Path(args.target).stem,
        "draft": args.draft and Path(args.draft).stem,
        "new": args.new,
        "results": [],
    }
    plain, gaps = gaps_of(models, prompts, args.new)
    for setting in settings(args):
        asked = prompts[: setting.batch * ROUNDS.get(setting.batch, len(prompts))]
        line, outputs = run(setting, models, asked, args.new)
        if not setting.temperature:
            line |= departures(plain, outputs, gaps)
        print(json.dumps(line), flush=True)
        record["results"].append(line)
        if args.out:
            write(record, args.out)
        gc.collect()  # the engine, whose pools and graphs the next one needs room for
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
