"""Accepted tokens per step of the shipped pair, over text neither model was trained on.

Prompts are windows of held-out standard-library files (as `bench.tools.train_pair` splits). Every
draft of the package has lines: EAGLE-3, DFlash, and prompt lookup alone and in front of either,
as chains and as trees, greedy and at temperature 1. Greedy texts are held against plain decoding's;
in float32 a run fails at its end if one differs. ``own branch`` drafts as SGLang does at topk > 1:
a branch reads its own beam slot's KV at every depth, whatever its true ancestors are
(sglang#7523); it shows what true ancestors are worth.

What is known is written after every line, and lines that ``--out`` has are not measured again.

    python -m bench.acceptance [--kinds eagle3 dflash ...] [--seconds S] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import platform
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from bench.shipped import pair
from bench.suite.acceptance import DRAFTS, LOOKUP, PLAIN
from bench.suite.results import write
from bench.tools.train_pair.corpus import encode, is_held_out, read_sources
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.speculative import draft as drafting
from specattn.speculative.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specattn.kernels.tree import Beams

PROMPT_TOKENS = 128
# slots behind the last token, for the widest tree
ROOM = 128
#: Matches that lookup merges into a tree; a chain has room for one.
MATCHES = 4
# what names a line
Key = tuple[str, str, float]


@dataclass(frozen=True)
class Setting:
    """A line: who drafts, the tree (steps, topk, nodes), and how tokens are drawn."""

    draft: str
    shape: tuple[int, int, int]
    temperature: float = 0.0
    best_first: bool = False
    own_branch: bool = False
    draft_sampling: bool = False

    @property
    def tree(self) -> str:
        """The tree in words."""
        steps, topk, nodes = self.shape
        if not steps:
            return "no tree"
        name = f"topk {topk}, {nodes} nodes, {steps} steps" if topk > 1 else f"chain of {steps}"
        if self.best_first:
            name = f"best first, {nodes} nodes"
        name += ", own branch" if self.own_branch else ""
        return name + (", drawn drafts" if self.draft_sampling else "")

    @property
    def key(self) -> Key:
        return self.draft, self.tree, self.temperature

    def config(self, context: int, slots: int) -> SpecConfig:
        return SpecConfig(
            *self.shape,
            context,
            slots,
            draft_sampling=self.draft_sampling,
            tree="best_first" if self.best_first else "beam",
        )


def _blocks(draft: str, *nodes: int) -> tuple[Setting, ...]:
    """A chain of a block of 16, and best-first trees over it."""
    trees = (Setting(draft, (15, 1, size), best_first=True) for size in nodes)
    return Setting(draft, (15, 1, 16)), *trees


def _beams(draft: str, *shapes: tuple[int, int, int]) -> tuple[Setting, ...]:
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
    *(replace(setting, own_branch=True) for setting in (*_EAGLE[1:3], *_drawn(_EAGLE[1]))),
    *_drawn(_EAGLE[0], _BLOCKS[0], draft_sampling=True),
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

    def select(step: int, *args: Any, out: Beams, **named: Any) -> None:
        honest(step, *args, out=out, **named)
        for beam in range(topk):
            for word in range(out.words.shape[-1]):
                nodes = [s * topk + beam for s in range(step + 1)]
                bits = sum(1 << node % 64 for node in nodes if node // 64 == word)
                out.words[:, beam, word] = bits - (1 << 64 if bits >> 63 else 0)

    with mock.patch.object(drafting, "select_beams", select):
        yield


def models_of(draft: str, load: Callable[[str], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the target and what drafts for it; ``load`` gives the pair of a kind of head."""
    if draft in (PLAIN, LOOKUP):
        target, head = load("none")
        return target, LookupProposer(matches=MATCHES) if draft == LOOKUP else head
    target, head = load(draft.removeprefix(f"{LOOKUP}+"))
    front = draft.startswith(LOOKUP)
    return target, LookupFirst(LookupProposer(matches=MATCHES), head) if front else head


def measure(
    setting: Setting, models: tuple[Any, Any], prompts: list[list[int]], new: int, slots: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return a line's record and its texts."""
    swap = own_branch(setting.shape[1]) if setting.own_branch else contextlib.nullcontext()
    requests = [
        Request(prompt, new, SamplingParams(setting.temperature, seed=i), ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    config = setting.config(PROMPT_TOKENS + new + ROOM, slots)
    with swap:
        engine = Engine(*models, config, buckets=[slots], sampled=setting.temperature > 0)
        results = engine.generate(requests)
    gained = sum(sum(r.accept_lens) for r in results)
    taken = sum(r.steps for r in results)
    record = {
        "draft": setting.draft,
        "tree": setting.tree,
        "shape": setting.shape,
        "temperature": setting.temperature,
        "tokens": sum(len(r.tokens) for r in results),
        "steps": taken,
        "accepted_per_step": round(gained / taken, 4),
    }
    return record, [r.tokens for r in results]


def key_of(line: dict[str, Any]) -> Key:
    return line["draft"], line["tree"], line["temperature"]


def merged(head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a record of these lines, in the order of the settings."""
    found = {key_of(line): line for line in lines}
    return head | {"results": [found[one.key] for one in SETTINGS if one.key in found]}


def known(head: dict[str, Any], path: Path | None) -> list[dict[str, Any]]:
    """Return the lines that a file has.

    Raises
    ------
    ValueError
        If they were not measured alike.
    """
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    if differing := [name for name in head if name != "results" and head[name] != found.get(name)]:
        raise ValueError(f"{path} differs in {', '.join(differing)}")
    return list(found["results"])


def header(args: argparse.Namespace) -> dict[str, Any]:
    """Return what all lines of a record have in common, and no lines."""
    on_gpu = torch.device(args.device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": args.dtype,
        "prompts": args.prompts,
        "prompt_tokens": PROMPT_TOKENS,
        "new": args.new,
        "results": [],
    }


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the chosen lines that are not known; yield the record after every one."""
    begin = time.perf_counter()
    load = functools.cache(lambda kind: pair(args.device, getattr(torch, args.dtype), kind=kind))
    prompts = held_out_prompts(args.prompts, load("none")[0].tokenizer)
    head = header(args)
    lines = known(head, args.out)
    done = {key_of(line) for line in lines}

    @functools.cache
    def line(setting: Setting) -> tuple[dict[str, Any], list[list[int]]]:
        made = measure(setting, models_of(setting.draft, load), prompts, args.new, args.slots)
        gc.collect()  # the engine, whose pools and graphs the next one needs room for
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return made

    for setting in (one for one in SETTINGS if one.draft in args.kinds and one.key not in done):
        spent = time.perf_counter() - begin
        if args.seconds is not None and spent > args.seconds:
            print(f"{spent:.0f} s are spent before {setting.key}", flush=True)
            return
        record, tokens = line(setting)
        if not setting.temperature:
            pairs = zip(line(PLAIN_GREEDY)[1], tokens, strict=True)
            record["requests_equal_to_plain"] = sum(a == b for a, b in pairs)
        print(f"{record['accepted_per_step']:7.3f}  {setting.key}", flush=True)
        lines.append(record)
        yield merged(head, lines)


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
    found = header(args)
    for found in run(args):
        if args.out:
            write(found, args.out)
    wrong = [
        key_of(line)
        for line in found["results"]
        if line.get("requests_equal_to_plain", args.prompts) < args.prompts
    ]
    assert args.dtype != "float32" or not wrong, f"not plain decoding's texts: {wrong}"


if __name__ == "__main__":
    main()
