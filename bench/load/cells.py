"""What is loaded: cells, models of real shapes, and engines."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bench.lines import Setting, models_of
from bench.load.client import WatchedEngine
from bench.load.written import Writer, Written
from bench.random_models import random_eagle3, random_target
from bench.shipped import fitted, pair
from bench.step_forced import Forced
from bench.step_world import SHARPER, Shape, shapes
from bench.suite.acceptance import LOOKUP, PLAIN
from specattn.engine.request import Request
from specattn.models import LMDraft
from specattn.speculative.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transformers import PretrainedConfig

    from specattn.models import FusedTarget, HFTarget

    Load = Callable[[str], tuple[Any, Any]]

#: Positions of an engine after its longest text, so that no step is cut.
ROOM = 128
#: Models, by their names in cells; the last one is what the command line names.
RANDOM = SMALL, LARGE = "1.5b", "8b"
SHIPPED, GIVEN = "pair", "given"


@dataclass(frozen=True)
class Cell:
    """A load: requests of a model.

    Parameters
    ----------
    model : str
        One of the names above.
    at_once : int
        Requests in flight.
    prompts, answers : tuple of (int, int)
        Fewest and most tokens, both included; drawn evenly.
    count : int
        Requests.
    temperature : float
        0 is greedy.
    written : bool
        Whether random weights write a text (`Written`), in which drafts gain as on HumanEval's.
    """

    model: str
    at_once: int
    prompts: tuple[int, int]
    answers: tuple[int, int]
    count: int
    temperature: float = 0.0
    written: bool = False

    @property
    def longest(self) -> int:
        """The most tokens of a text."""
        return self.prompts[1] + self.answers[1]

    def requests(self, vocab_size: int, seed: int) -> list[Request]:
        """Return requests of random tokens; a seed gives the same ones to every side."""
        draw, text = random.Random(seed), Written(vocab_size).tokens
        found = []
        for at in range(self.count):
            prompt = draw.choices(range(vocab_size), k=draw.randint(*self.prompts))
            if self.written:
                # no two share a prefix
                prompt[1:] = text[1 : len(prompt)]
                prompt[0] = at % vocab_size
            sampling = SamplingParams(self.temperature, seed=at)
            found.append(Request(prompt, draw.randint(*self.answers), sampling, ignore_eos=True))
        return found


CELLS = {
    "first-token-1.5b": Cell(SMALL, 1, (150, 150), (8, 8), 24),
    "first-token-8b": Cell(LARGE, 1, (150, 150), (8, 8), 24),
    "1.5b-32": Cell(SMALL, 32, (75, 225), (80, 160), 160),
    "8b-32": Cell(LARGE, 32, (50, 250), (80, 160), 160),
    "8b-32-long": Cell(LARGE, 32, (512, 1536), (100, 200), 96),
    "1.5b-32-drafts": Cell(SMALL, 32, (75, 225), (80, 160), 160, written=True),
    "1.5b-32-drawn": Cell(SMALL, 32, (75, 225), (80, 160), 160, 0.8, written=True),
    "pair-4": Cell(SHIPPED, 4, (8, 24), (8, 24), 12),
}
#: Of these every prompt runs alone, inside transformers' ``generate``: see `bench.load.inside`.
INSIDE = {
    "generate-1.5b": Cell(SMALL, 1, (150, 150), (8, 8), 24),
    "generate-8b": Cell(LARGE, 1, (150, 150), (8, 8), 24),
}
#: Names that stand for several cells.
GROUPS = {
    "first-token": ("first-token-1.5b", "first-token-8b"),
    "generate": tuple(INSIDE),
    "random": tuple(
        name for name, cell in CELLS.items() if cell.model in RANDOM and not cell.written
    ),
    "written": tuple(name for name, cell in CELLS.items() if cell.written),
    # of drafts: those of docs/published.md
    "published": (
        PLAIN,
        *(f"{kind}{more}" for kind in (LOOKUP, "eagle3", "model") for more in ("", "-adaptive")),
        "eagle3-5",
        "model-5",
    ),
}


@dataclass(frozen=True)
class Draft:
    """Who drafts, and how many tokens a step is made to gain with random weights.

    Parameters
    ----------
    setting : Setting
        The draft and its tree.
    gained : int
        0 where nothing is forced.
    share : float
        Of the places of a written text where the draft is right: about what a chain keeps of the
        first tokens on HumanEval's answers.
    """

    setting: Setting
    gained: int = 0
    share: float = 0.0


#: By name; heads of random weights gain what `bench.engines` has its steps gain.
DRAFTS = {
    PLAIN: Draft(Setting(PLAIN, (0, 1, 1))),
    LOOKUP: Draft(Setting(LOOKUP, (7, 1, 8))),
    "lookup-adaptive": Draft(Setting(LOOKUP, (7, 1, 8), others=((3, 1, 4), (0, 1, 1)))),
    "eagle3": Draft(Setting("eagle3", (3, 1, 4)), 3, 0.69),
    "eagle3-5": Draft(Setting("eagle3", (5, 1, 6)), 3, 0.69),
    "eagle3-tree": Draft(Setting("eagle3", (4, 5, 16)), 4, 0.8),
    "eagle3-adaptive": Draft(Setting("eagle3", (7, 1, 8), others=((3, 1, 4), (0, 1, 1))), 3, 0.69),
    "model": Draft(Setting("model", (3, 1, 4)), share=0.98),
    "model-5": Draft(Setting("model", (5, 1, 6)), share=0.98),
    "model-adaptive": Draft(Setting("model", (7, 1, 8), others=((3, 1, 4), (0, 1, 1))), share=0.98),
    "dflash": Draft(Setting("dflash", (7, 1, 8))),
}


def shape_of(model: str) -> Shape:
    """Return a shape of random weights."""
    if model == LARGE:
        return shapes(8192)["Llama-3.1-8B"]
    from transformers import LlamaConfig, Qwen2Config

    sizes: dict[str, Any] = {
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 8192,
    }
    target = Qwen2Config(**sizes, num_hidden_layers=28, tie_word_embeddings=True)
    return Shape("Qwen2.5-1.5B", target, LlamaConfig(**sizes, num_hidden_layers=1))


def small_of(model: str) -> PretrainedConfig:
    """Return the sizes of a smaller model of the same kind, which drafts for it."""
    from transformers import LlamaConfig, Qwen2Config

    sizes: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 8192}
    sizes |= {"tie_word_embeddings": True}
    if model == LARGE:
        sizes |= {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
        sizes |= {"intermediate_size": 8192, "vocab_size": 128256, "rope_theta": 500000.0}
        return LlamaConfig(**sizes, num_hidden_layers=16)
    sizes |= {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 4864, "vocab_size": 151936, "rope_theta": 1000000.0}
    return Qwen2Config(**sizes, num_hidden_layers=24)


def loader(
    model: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    base: HFTarget | None = None,
    head: str | None = None,
) -> Load:
    """Return what gives target and head, by the head's kind, of one target.

    Parameters
    ----------
    model : str
        That of a cell.
    device : torch.device
        Where weights are made, or loaded.
    dtype : torch.dtype, optional
        Of their weights; by default their own, and bfloat16 of random ones.
    base, head : optional
        The target that the command line names, and what drafts for it.
    """
    if model == GIVEN:
        assert base is not None
        return partial(fitted, base, head=head)
    if model == SHIPPED:
        return lambda kind: pair(device, dtype, kind=kind)
    shape = shape_of(model)
    target = random_target(shape.target, dtype=dtype or torch.bfloat16, device=device)
    return partial(random_models, model, shape, target)


def random_models(model: str, shape: Shape, target: FusedTarget, kind: str) -> tuple[Any, Any]:
    """Return a target of random weights, and a head or a smaller model of such."""
    if kind == "none":
        return target, None
    if kind == "model":
        small = random_target(small_of(model), dtype=target.dtype, device=target.device, seed=1)
        return target, LMDraft(small, target.vocab_size)
    if kind != "eagle3":
        raise ValueError(f"random weights draft as eagle3 or model, got {kind}")
    head = random_eagle3(shape.draft, target, shape.draft_vocab)
    # a trained draft's distribution is as peaked
    head.lm_head.weight.mul_(SHARPER)
    return target.with_features(head.features), head


def engine_of(load: Load, cells: Sequence[Cell], draft: Draft) -> tuple[WatchedEngine, int]:
    """Make an engine for cells of one model and one number of requests.

    Returns it, and what tokens below it become where lengths are forced, else 0.
    """
    target, head = models_of(draft.setting.draft, load)
    context, rows = max(cell.longest for cell in cells) + ROOM, cells[0].at_once
    config, *others = draft.setting.configs(context, rows)
    options: dict[str, Any] = {"configs": others, "graphs": target.device.type == "cuda"}
    options["sampled"] = cells[0].temperature > 0
    if cells[0].written:
        text = Written(target.vocab_size, draft.share)
        return WatchedEngine(
            target, head, config, accept=Writer(text, rows, target.device), **options
        ), 0
    if draft.gained and cells[0].model in RANDOM:
        lens = torch.full((rows,), draft.gained, dtype=torch.int32, device=target.device)
        forced = Forced(lens, head.vocab_size)
        return WatchedEngine(target, head, config, accept=forced, **options), head.vocab_size
    return WatchedEngine(target, head, config, **options), 0


def given(
    path: Path, tokenizer: Any, most: int, at_once: int, count: int
) -> tuple[Cell, list[Request]]:
    """Return the cell of prompts in a file, and their requests.

    A line of JSON has a ``prompt``: token ids as they are, or a text, which is asked as a chat if
    the model has learnt those. Prompts repeat where more requests are wanted. Texts end where their
    model ends them.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        asked = [json.loads(line)["prompt"] for line in file if line.strip()]
    prompts = [_encoded(prompt, tokenizer) for prompt in asked]
    requests = [Request(prompts[at % len(prompts)], most) for at in range(count)]
    lens = [len(request.prompt) for request in requests]
    return Cell(GIVEN, at_once, (min(lens), max(lens)), (1, most), count), requests


def _encoded(prompt: Any, tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    chat = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
