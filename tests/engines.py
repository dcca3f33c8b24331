"""Engines of tiny models, over trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

if TYPE_CHECKING:
    from torch import nn

    # steps, topk and nodes
    Tree = tuple[int, int, int]


def engine(
    *trees: Tree | SpecConfig,
    models: tuple[nn.Module, Any] | None = None,
    context: int = 64,
    rows: int = 4,
    page_size: int = 1,
    sampling: bool = False,
    slots: int = 0,
    device: str = DEVICE,
    **options: Any,
) -> Engine:
    """Make an engine whose first tree is its own, and the others what a policy may choose.

    Trees may be whole configs, of which the engine's numbers are then. ``slots`` are those besides
    padding's page; as many as all rows need if 0. Models are a target and a draft.
    One bucket that holds all rows is captured, unless ``buckets`` are given.
    """
    config, *others = (
        tree
        if isinstance(tree, SpecConfig)
        else SpecConfig(*tree, context, rows, page_size, sampling)
        for tree in trees
    )
    options.setdefault("buckets", [config.max_num_reqs])
    if slots:
        options["num_slots"] = slots + page_size
    target, draft = models or (TinyTarget(device=device), TinyDraft(device=device))
    return Engine(target, draft, config, configs=others, **options)
