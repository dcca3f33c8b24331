"""Accepted tokens per step of the shipped pair, over text neither model was trained on.

Prompts are windows of held-out standard-library files (as `bench.tools.train_heads` splits). Every
draft of the package has lines: EAGLE-3, DFlash, and prompt lookup alone and in front of either,
as chains and as trees, greedy and at temperature 1. Greedy texts are held against plain decoding's;
in float32 a run fails at its end if one differs.

What is known is written after every line, and lines that ``--out`` has are not measured again.

    python -m bench.acceptance [--kinds eagle3 dflash ...] [--seconds S] [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import platform
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.lines import Record, Setting, free, models_of, place
from bench.shipped import pair
from bench.suite.acceptance import DRAFTS, LOOKUP, PLAIN
from bench.tools.train_heads.corpus import encode, is_held_out, read_sources

if TYPE_CHECKING:
    from bench.lines import Shape

PROMPT_TOKENS = 128
# slots behind the last token, for the widest tree
ROOM = 128
#: What tells lines apart.
NAMES = ("draft", "tree", "temperature")


def _blocks(draft: str, *nodes: int) -> tuple[Setting, ...]:
    """A chain of a block of 16, and best-first trees over it."""
    trees = (Setting(draft, (15, 1, size), best_first=True) for size in nodes)
    return Setting(draft, (15, 1, 16)), *trees


def _beams(draft: str, *shapes: Shape) -> tuple[Setting, ...]:
    return tuple(Setting(draft, shape) for shape in shapes)


def _drawn(*settings: Setting, **more: bool) -> tuple[Setting, ...]:
    return tuple(replace(setting, temperature=1.0, **more) for setting in settings)


PLAIN_GREEDY = Setting(PLAIN, (0, 1, 1))
_BLOCKS = _blocks("dflash", 16, 32, 64, 128)
_LOOKUPS = (
    *_beams(LOOKUP, (15, 1, 16), (15, 4, 32)),
    *_beams("lookup+eagle3", (5, 1, 6), (5, 4, 16)),
    *_blocks("lookup+dflash", 32),
)
_EAGLE = _beams("eagle3", (5, 1, 6), (5, 4, 16), (8, 4, 32), (7, 8, 64))
#: In the order in which they are measured.
SETTINGS = (
    PLAIN_GREEDY,
    *_BLOCKS,
    *_drawn(*_BLOCKS),
    *_LOOKUPS,
    *_EAGLE,
    *_drawn(*_LOOKUPS, *_EAGLE),
    *_drawn(_EAGLE[0], _BLOCKS[0], draft_sampling=True),
)


def held_out_prompts(count: int, tokenizer: Any) -> list[list[int]]:
    """Windows of held-out files of the running interpreter's standard library, spread evenly."""
    sources = read_sources(Path(sysconfig.get_path("stdlib")))
    texts = [text for name, text in sources.items() if is_held_out(name)]
    stream = encode(tokenizer.backend_tokenizer, texts)
    starts = np.linspace(0, len(stream) - PROMPT_TOKENS, count).astype(int)
    return [stream[at : at + PROMPT_TOKENS].tolist() for at in starts]


def measure(
    setting: Setting, models: tuple[Any, Any], prompts: list[list[int]], new: int, slots: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return a line's record and its texts."""
    engine = setting.engine(models, PROMPT_TOKENS + new + ROOM, slots)
    outputs = engine.generate(setting.requests(prompts, new, ignore_eos=True))
    return setting.line(outputs), [one.tokens for one in outputs]


def run(args: argparse.Namespace, record: Record) -> None:
    """Measure the chosen lines that are not known."""
    begin = time.perf_counter()
    load = functools.cache(lambda kind: pair(args.device, getattr(torch, args.dtype), kind=kind))
    prompts = held_out_prompts(args.prompts, load("none")[0].tokenizer)

    @functools.cache
    def line(setting: Setting) -> tuple[dict[str, Any], list[list[int]]]:
        made = measure(setting, models_of(setting.draft, load), prompts, args.new, args.slots)
        free()
        return made

    for setting in (one for one in SETTINGS if one.draft in args.kinds):
        key = setting.draft, setting.tree, setting.temperature
        if key in record.lines:
            continue
        spent = time.perf_counter() - begin
        if args.seconds is not None and spent > args.seconds:
            print(f"{spent:.0f} s are spent before {key}", flush=True)
            return
        found, tokens = line(setting)
        if not setting.temperature:
            pairs = zip(line(PLAIN_GREEDY)[1], tokens, strict=True)
            found["requests_equal_to_plain"] = sum(a == b for a, b in pairs)
        print(f"{found['accepted_per_step']:7.3f}  {key}", flush=True)
        record.add(found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--new", type=int, default=128, help="tokens of a request")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--slots", type=int, default=192, help="requests at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kinds", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--seconds", type=float, help="after which no line begins")
    parser.add_argument("--out", type=Path, help="where lines go; those that it has are kept")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    head = place(args.device) | {
        "python": platform.python_version(),
        "dtype": args.dtype,
        "prompts": args.prompts,
        "prompt_tokens": PROMPT_TOKENS,
        "new": args.new,
    }
    record = Record(head, args.out, NAMES)
    run(args, record)
    wrong = [
        key
        for key, line in record.lines.items()
        if line.get("requests_equal_to_plain", args.prompts) < args.prompts
    ]
    assert args.dtype != "float32" or not wrong, f"not plain decoding's texts: {wrong}"


if __name__ == "__main__":
    main()
