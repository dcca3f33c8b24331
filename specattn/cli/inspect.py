"""``specattn inspect``."""

from __future__ import annotations

from typing import Annotated

import typer

from specattn.cli.errors import ArgumentError
from specattn.cli.options import (
    SPECULATION,
    BackendOption,
    DeviceOption,
    DraftOption,
    DraftTokensOption,
    DtypeOption,
    PageSizeOption,
    PromptArgument,
    TargetOption,
    speculation,
)
from specattn.cli.prompts import read_prompts


def inspect(
    ctx: typer.Context,
    prompt: PromptArgument = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    topk: Annotated[
        int,
        typer.Option(
            rich_help_panel=SPECULATION, help="Branches kept at every depth; 1 is a chain."
        ),
    ] = 2,
    steps: Annotated[
        int, typer.Option(rich_help_panel=SPECULATION, help="Depth of the draft tree.")
    ] = 3,
    draft_tokens: DraftTokensOption = None,
    backend: BackendOption = "auto",
    page_size: PageSizeOption = 1,
) -> None:
    """Show the first step after a prompt: its tree, its mask and its KV slots."""
    found = read_prompts(prompt, None)
    if not steps:
        raise ArgumentError("--steps", "must be at least 1: plain decoding has no tree")
    config = speculation(topk, steps, draft_tokens, page_size=page_size)

    from specattn import inspect as pictures
    from specattn.cli.device import pick_device
    from specattn.cli.first_step import first_step
    from specattn.cli.loading import models_for

    models = models_for(ctx, pick_device(device), target, draft, dtype, backend, speculative=True)
    limit = max(models.target.max_context_len - config.reserve_len, 0)
    (ids,) = found.encode(models.tokenizer, models.target.vocab_size, limit)
    step = first_step(models, ids, config, backend)
    print(f"tree of {config.num_draft_tokens} nodes after {len(ids)} tokens (* accepted)")
    print(pictures.tree(step.tree, models.tokenizer, scores=step.scores, accepted=step.accepted))
    print("\nmask: row i sees tail key j (#) where node j is i or an ancestor of i")
    print(pictures.mask(step.tree.words[0], len(ids)))
    print("\nKV slots")
    print(pictures.kv_map(step.table, config))
