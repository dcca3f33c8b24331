"""A published model by every draft that fits it: tokens per step and per second, over HumanEval.

Nothing is forced, and nothing is timed but whole texts, prompts included, after five for every row
ran. A text ends where its model ends it. Greedy texts are compared with plain decoding's; where one
departs in 16 bits, the gap between plain decoding's best two log-probabilities says how near a tie
was.

Each draft has chains, trees, and an engine that chooses among them (``adaptive``). Two trees draw
different texts with one seed, since a random number meets other candidates. Luck with few texts
outweighs what a policy loses, so problems are many, and each is drawn more than once. At batch 1,
greedy, transformers' `generate` runs beside them: plain, with the same model as its assistant, and
with prompt lookup; by itself, and with ``custom_generate=specattn.generate``.

What is known is written after every line, and lines that ``--out`` has are not measured again:

    python -m bench.published --target FOLDER --problems HumanEval.jsonl.gz
        [--draft FOLDER] [--eagle3 FOLDER] [--dflash FOLDER] [--batches 32 8 1]
        [--kinds model lookup ...] [--out FILE]

Models are folders, GGUF files or names on the Hub. The shipped pair, in every way there is to run
it:

    python -m bench.published --target specattn/pair/target --eagle3 specattn/pair/draft
        --kinds eagle3 --problems HumanEval.jsonl.gz --ways default piecewise halves eager
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import specattn
from bench.lines import Record, Setting, Transformers, free, models_of, place
from bench.shipped import LOADERS, fitted
from bench.suite.acceptance import LOOKUP, PLAIN
from bench.suite.machine import machine
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request, RequestOutput
from specattn.models import HFTarget
from specattn.models.quantisation import FORMATS
from specattn.speculative.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.lines import Shape

    Load = Callable[[str], tuple[Any, Any]]

ASK = "Complete this Python function. Answer with the whole function and nothing else.\n\n"
KINDS = (LOOKUP, *(front + kind for kind in LOADERS for front in ("", f"{LOOKUP}+")))
CHAINS: tuple[Shape, ...] = ((3, 1, 4), (5, 1, 6))
#: Shapes by draft, and those of all drafts with lookup in front; blocks have their own.
SHAPES: dict[str, tuple[Shape, ...]] = {
    PLAIN: ((0, 1, 1),),
    LOOKUP: ((7, 1, 8), (15, 4, 32)),
    "model": (*CHAINS, (5, 4, 16)),
    "eagle3": (*CHAINS, (5, 4, 16), (7, 8, 64)),
}
#: Nodes of best-first trees over a block.
NODES = (16, 32, 64, 128)
#: What an adaptive engine chooses from, the first one its start. Each choice more costs trials, so
#: trees are among those of the draft alone whose trees win.
CHOICES: tuple[Shape, ...] = ((7, 1, 8), (3, 1, 4), (0, 1, 1))
ADAPTIVE: dict[str, tuple[Shape, ...]] = {
    "eagle3": ((5, 4, 16), *CHOICES[1:]),
    f"{LOOKUP}+eagle3": ((5, 1, 6), *CHOICES[1:]),
    "model": ((5, 1, 6), (5, 4, 16), CHOICES[-1]),
    f"{LOOKUP}+model": ((5, 1, 6), *CHOICES[1:]),
}
#: Problems for a batch that would take longer than the others.
PROBLEMS = {1: 40}
#: Texts that are drawn of a problem.
DRAWS = 2
#: Batches of texts that run before any is timed: what is compiled at first use depends on how many
#: prompts come at once, and a policy has to know how long texts are.
WARM = 5
#: How steps are run: by default in one graph, where the backend can.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "piecewise": {"cudagraph": "piecewise"},
    "halves": {"tbo": True},
    "eager": {"graphs": False},
}
#: What tells lines apart.
NAMES = ("by", "draft", "tree", "batch", "temperature")
OURS, THEIRS, INSIDE = "specattn", "transformers", "custom_generate"
#: Tokens that prompt lookup proposes inside transformers.
LOOKUP_TOKENS = 7
#: Problems that its `generate` gets, which takes a minute for ten.
INSIDE_PROBLEMS = 10


def trees(kind: str, depth: int) -> Iterator[Setting]:
    """Yield the trees of a draft; ``depth`` is that of a block."""
    if kind.endswith("dflash"):
        yield Setting(kind, (depth, 1, depth + 1))
        for nodes in NODES if kind == "dflash" else NODES[1:2]:
            yield Setting(kind, (depth, 1, nodes), best_first=True)
        return
    for shape in SHAPES.get(kind, CHAINS):
        yield Setting(kind, shape)
    if kind != PLAIN:
        first, *others = ADAPTIVE.get(kind, CHOICES)
        yield Setting(kind, first, others=tuple(others))


def settings(args: argparse.Namespace, load: Load) -> Iterator[tuple[Setting, int, str]]:
    """Yield settings, batch sizes and ways in the order in which they are measured."""
    for batch in args.batches:
        for kind in (PLAIN, *args.kinds):
            depth = load("dflash")[1].block.size - 1 if kind.endswith("dflash") else 0
            for temperature in args.temperatures:
                for setting in trees(kind, depth):
                    # one request has no halves
                    for way in (one for one in args.ways if batch > 1 or one != "halves"):
                        yield replace(setting, temperature=temperature), batch, way


def named(way: str) -> str:
    """Return what lines call this library, run in a way."""
    return OURS if way == "default" else f"{OURS}, {way}"


def problems(path: Path, tokenizer: Any) -> list[list[int]]:
    """Return HumanEval's prompts in tokens, as chats where the model has learnt those."""
    with gzip.open(path, "rt") as file:
        asked = [json.loads(line)["prompt"] for line in file]
    if tokenizer.chat_template is None:
        return [tokenizer(text)["input_ids"] for text in asked]
    chats = ([{"role": "user", "content": f"{ASK}```python\n{text}```"}] for text in asked)
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


def timed(tokens: int, seconds: float) -> dict[str, float]:
    return {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 1)}


def run(
    setting: Setting,
    models: tuple[Any, Any],
    prompts: list[list[int]],
    new: int,
    *,
    batch: int,
    way: str,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return a line and its texts."""
    draws = DRAWS if setting.temperature else 1
    prompts = prompts[: PROBLEMS.get(batch)] * draws
    nodes = max(nodes for *_, nodes in (setting.shape, *setting.others))
    room = max(map(len, prompts)) + new + 2 * nodes
    engine = setting.engine(models, room, batch, **WAYS[way])
    requests = setting.requests(prompts, new)
    engine.generate(requests[: batch * WARM])
    used = engine.configs.used.copy()
    begin = time.perf_counter()
    outputs = engine.generate(requests)
    seconds = time.perf_counter() - begin
    gained = [count for one in outputs for count in one.accept_lens]
    line = {"by": named(way), "batch": batch, "texts": len(outputs), "draws": draws}
    line |= setting.line(outputs)
    line |= timed(line["tokens"], seconds)
    # of the steps that gained so many tokens
    line["steps_by_tokens"] = [gained.count(n) for n in range(1, max(gained) + 1)]
    if setting.others:
        trees = (replace(setting, shape=one, others=()) for one in (setting.shape, *setting.others))
        found = zip(trees, engine.configs.all, strict=True)
        line["steps_by_tree"] = {
            tree.tree: engine.configs.used[one] - used[one] for tree, one in found
        }
    return line, [one.tokens for one in outputs]


def departures(
    plain: Sequence[Sequence[int]], found: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return how many texts are plain decoding's, and the gaps where the others depart from it.

    Of the largest gap, the text and the token are told.
    """
    near = []
    for text, (one, other, gap) in enumerate(zip(plain, found, gaps, strict=False)):
        pairs = zip(one, other, strict=False)
        departs = [at for at, (a, b) in enumerate(pairs) if a != b]
        near += [(round(gap[at], 4), text, at) for at in departs[:1]]
    equal = sum(a == b for a, b in zip(plain, found, strict=False))
    line = {"equal_to_plain": equal, "gaps_at_departures": sorted(gap for gap, *_ in near)}
    return line | ({"largest_gap_at": max(near)[1:]} if near else {})


def gaps_of(
    target: Any, prompts: Sequence[list[int]], new: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Return plain decoding's texts, and the gaps (nats) of its best two tokens."""
    room = max(map(len, prompts)) + new + 2
    engine = Engine(target, None, SpecConfig(0, 1, 1, room, 8), processed=True)
    sampling = SamplingParams(logprobs=2)
    outputs: list[RequestOutput] = engine.generate(
        [Request(prompt, new, sampling) for prompt in prompts]
    )
    gaps = []
    for one in outputs:
        tops = [tuple(token.alternatives.values()) for token in one.logprobs]
        gaps.append([best - second for best, second in tops])
    return [one.tokens for one in outputs], gaps


def inside(
    args: argparse.Namespace, target: HFTarget, assistant: HFTarget | None
) -> Iterator[tuple[dict[str, Any], list[list[int]]]]:
    """Yield lines of transformers' `generate`, and their texts; the targets run no more.

    Its attention is transformers' default one.
    """
    ends = target.eos_token_ids
    count = min(args.count, INSIDE_PROBLEMS)
    prompts = problems(args.problems, target.tokenizer)[:count]
    sides: dict[str, dict[str, Any]] = {PLAIN: {}}
    if LOOKUP in args.kinds:
        sides[LOOKUP] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    for one in filter(None, (target, assistant)):
        one.restore()
        one.module.set_attn_implementation("sdpa")
    if assistant is not None:
        sides["model"] = {"assistant_model": Transformers(assistant.module, ends).model}
    theirs = Transformers(target.module, ends)
    for draft, more in sides.items():
        for by in (THEIRS, INSIDE):
            ours = {"custom_generate": specattn.generate} if by == INSIDE else {}
            theirs.text(prompts[0], args.new, **more, **ours)
            begin = time.perf_counter()
            texts = [theirs.text(one, args.new, **more, **ours) for one in prompts]
            seconds = time.perf_counter() - begin
            line = {"by": by, "draft": draft, "tree": "", "batch": 1, "temperature": 0.0}
            tokens = sum(map(len, texts))
            line |= {"texts": len(texts), "tokens": tokens} | timed(tokens, seconds)
            yield line, texts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", dest="model", help="a smaller model, for the kind model")
    parser.add_argument("--eagle3", help="an EAGLE-3 head")
    parser.add_argument("--dflash", help="a DFlash head")
    parser.add_argument("--problems", type=Path, required=True)
    parser.add_argument("--count", type=int, default=164)
    parser.add_argument("--new", type=int, default=256, help="most tokens of a text")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 8, 1])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[LOOKUP])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["default"])
    parser.add_argument("--no-transformers", dest="inside", action="store_false")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=FORMATS, help="of the target's weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="what the record calls this version")
    parser.add_argument("--out", type=Path, help="where lines go; those that it has are kept")
    args = parser.parse_args()
    for kind in {kind.removeprefix(f"{LOOKUP}+") for kind in args.kinds} - {LOOKUP}:
        if getattr(args, kind) is None:
            parser.error(f"--kinds {kind} needs --{'draft' if kind == 'model' else kind}")
    return args


def main() -> None:
    args = arguments()
    base = HFTarget.from_pretrained(
        args.target,
        dtype=getattr(torch, args.dtype),
        device=args.device,
        quantization=args.quantization,
    )

    @functools.cache
    def load(kind: str) -> tuple[Any, Any]:
        return fitted(base, kind, getattr(args, kind, None))

    prompts = problems(args.problems, base.tokenizer)[: args.count]
    names = {kind: getattr(args, kind) for kind in ("target", *LOADERS)}
    head = place(args.device) | {"machine": machine(args.commit)}
    head |= {"dtype": args.dtype, "problems": len(prompts), "new": args.new}
    head |= {"quantization": args.quantization} if args.quantization else {}
    head |= {kind: name and Path(name).name.removesuffix(".gguf") for kind, name in names.items()}
    record = Record(head, args.out, NAMES)
    plain, gaps = gaps_of(load("none")[0], prompts, args.new)

    def add(line: dict[str, Any], texts: list[list[int]]) -> None:
        if not line["temperature"]:
            line |= departures(plain, texts, gaps)
        print(json.dumps(line), flush=True)
        record.add(line)

    for setting, batch, way in settings(args, load):
        key = (named(way), setting.draft, setting.tree, batch, setting.temperature)
        if key not in record.lines:
            models = models_of(setting.draft, load)
            add(*run(setting, models, prompts, args.new, batch=batch, way=way))
            free()
    if args.inside:
        assistant = None
        if args.model:
            assistant = HFTarget.from_pretrained(args.model, dtype=base.dtype, device=args.device)
        for line, texts in inside(args, base, assistant):
            add(line, texts)


if __name__ == "__main__":
    main()
