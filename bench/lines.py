"""Lines of a record: texts of many prompts by one draft and tree, and what their steps gained."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bench.suite.acceptance import CHAIN, LOOKUP, PLAIN
from bench.suite.results import write
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from specattn.engine.request import RequestOutput

    #: Steps, topk and nodes; (0, 1, 1) is plain decoding.
    Shape = tuple[int, int, int]

#: Matches that lookup merges into a tree; a chain has room for one.
MATCHES = 4


@dataclass(frozen=True)
class Setting:
    """A line: who drafts, the tree, and how tokens are drawn.

    Parameters
    ----------
    draft : str
        A kind of draft, ``lookup``, ``lookup+KIND`` for lookup in front of one, or ``plain``.
    shape : tuple of int
        Of the tree.
    temperature : float
        0 is greedy.
    best_first, draft_sampling : bool
        As of `SpecConfig`: whether the tree is best-first, and whether drafts are drawn.
    others : tuple of tuple
        Shapes that a policy may choose in place of the first.
    """

    draft: str
    shape: Shape
    temperature: float = 0.0
    best_first: bool = False
    draft_sampling: bool = False
    others: tuple[Shape, ...] = ()

    @property
    def tree(self) -> str:
        """The tree in words."""
        if self.others:
            return "adaptive"
        steps, topk, nodes = self.shape
        if not steps:
            return "no tree"
        name = f"topk {topk}, {nodes} nodes, {steps} steps" if topk > 1 else f"{CHAIN} of {steps}"
        if self.best_first:
            name = f"best first, {nodes} nodes"
        return name + (", drawn drafts" if self.draft_sampling else "")

    def configs(self, context: int, slots: int) -> list[SpecConfig]:
        """Return the configs of an engine, that of the first shape first."""
        more: dict[str, Any] = {"draft_sampling": self.draft_sampling}
        more["tree"] = "best_first" if self.best_first else "beam"
        return [SpecConfig(*shape, context, slots, **more) for shape in (self.shape, *self.others)]

    def engine(self, models: tuple[Any, Any], context: int, slots: int, **more: Any) -> Engine:
        """Make an engine for ``slots`` requests at once, captured for that many alone.

        ``more`` are further options of the engine.
        """
        config, *others = self.configs(context, slots)
        drawn = self.temperature > 0
        return Engine(*models, config, configs=others, buckets=[slots], sampled=drawn, **more)

    def requests(
        self, prompts: Sequence[Sequence[int]], new: int, *, ignore_eos: bool = False
    ) -> list[Request]:
        """Return a request per prompt, each with a seed of its own."""
        return [
            Request(prompt, new, SamplingParams(self.temperature, seed=at), ignore_eos=ignore_eos)
            for at, prompt in enumerate(prompts)
        ]

    def line(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return what texts of this setting say."""
        steps = sum(one.steps for one in outputs)
        gained = sum(sum(one.accept_lens) for one in outputs)
        return {
            "draft": self.draft,
            "tree": self.tree,
            "shape": self.shape,
            "temperature": self.temperature,
            "tokens": sum(len(one.tokens) for one in outputs),
            "steps": steps,
            "accepted_per_step": round(gained / steps, 4),
        }


def models_of(draft: str, load: Callable[[str], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the target and what drafts for it; ``load`` gives target and head by a head's kind."""
    front, _, kind = draft.rpartition("+")
    if draft in (PLAIN, LOOKUP):
        target, head = load("none")
        return target, LookupProposer(matches=MATCHES) if draft == LOOKUP else head
    target, head = load(kind)
    return target, LookupFirst(LookupProposer(matches=MATCHES), head) if front else head


def place(device: str) -> dict[str, str]:
    """Return where lines are measured, which must be the same for all of a record."""
    on_gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    return {"device": name, "torch": torch.__version__}


def free() -> None:
    """Give the memory of an engine back that has gone: the next one's pools and graphs need it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Record:
    """Lines under what they have in common, written after every one.

    Parameters
    ----------
    head : dict
        What the lines have in common; ``machine`` may say more of the last run.
    path : Path, optional
        Where the record goes; lines that are there already are kept.
    names : sequence of str
        What tells lines apart.

    Raises
    ------
    ValueError
        If the lines there were not measured alike.
    """

    def __init__(self, head: dict[str, Any], path: Path | None, names: Sequence[str]) -> None:
        self.head, self.path, self.names = head, path, tuple(names)
        found: dict[str, Any] = {"results": []}
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            alike = (name for name in head if name != "machine")
            if differing := [name for name in alike if head[name] != found.get(name)]:
                raise ValueError(f"{path} differs in {', '.join(differing)}")
        self.lines = {self.key(line): line for line in found["results"]}

    def key(self, line: dict[str, Any]) -> tuple[Any, ...]:
        """Return what tells a line from others."""
        return tuple(line[name] for name in self.names)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line."""
        self.lines[self.key(line)] = line
        if self.path is not None:
            write(self.head | {"results": list(self.lines.values())}, self.path)


class Transformers:
    """A model of transformers' under its own ``generate``.

    Parameters
    ----------
    model : PreTrainedModel
        Its generation settings are replaced: nothing but the end of a text is set.
    ends : collection of int
        Tokens that end a text; without any, texts are as long as they may be.
    """

    def __init__(self, model: Any, ends: Sequence[int] = ()) -> None:
        from transformers import GenerationConfig

        self.model = model.eval()
        ids = sorted(ends)
        model.generation_config = GenerationConfig(
            eos_token_id=ids or None, pad_token_id=ids[0] if ids else 0
        )

    def text(self, prompt: Sequence[int], new: int, **more: Any) -> list[int]:
        """Decode a prompt greedily; ``more`` are arguments of ``generate``."""
        ids = torch.tensor([prompt], device=self.model.device)
        mask = torch.ones_like(ids)
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **more
        )
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens
