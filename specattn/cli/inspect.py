"""``specattn inspect``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer  # noqa: TC002 - Typer evaluates annotations

from specattn.cli import options
from specattn.cli.errors import ArgumentError
from specattn.cli.options import SPECULATION, option
from specattn.cli.prompts import read_prompts

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.batch import AcceptResult, Candidates, DraftState, DraftTree, SpecBatch
    from specattn.cache.slot_table import SlotTable
    from specattn.cli.loading import Models
    from specattn.config import SpecConfig
    from specattn.speculative.decoder import ModelSlot
    from specattn.speculative.model import DraftModel


def inspect(
    ctx: typer.Context,
    prompt: options.PromptArgument = None,
    target: options.TargetOption = None,
    draft: options.DraftOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    topk: Annotated[int, option(SPECULATION, "Branches kept at every depth; 1 is a chain.")] = 2,
    steps: Annotated[int, option(SPECULATION, "Depth of the draft tree.")] = 3,
    draft_tokens: options.DraftTokensOption = None,
    backend: options.BackendOption = "auto",
    page_size: options.PageSizeOption = 1,
) -> None:
    """Show the tree, mask and KV slots of a prompt's first step."""
    found = read_prompts(prompt, None)
    if not steps:
        raise ArgumentError("--steps", "must be at least 1: plain decoding has no tree")
    config = options.speculation(topk, steps, draft_tokens, page_size=page_size)

    from specattn import inspect as pictures
    from specattn.cli.loading import models_for, pick_device

    models = models_for(ctx, pick_device(device), target, draft, dtype, backend, speculative=True)
    limit = max(models.target.max_context_len - config.reserve_len, 0)
    (ids,) = found.encode(models.tokenizer, models.target.vocab_size, limit)
    tree, scores, accepted, table = _first_step(models, ids, config, backend)
    print(f"tree of {config.num_draft_tokens} nodes after {len(ids)} tokens (* accepted)")
    print(pictures.tree(tree, models.tokenizer, scores=scores, accepted=accepted))
    print("\nmask: row i sees tail key j (#) where node j is i or an ancestor of i")
    print(pictures.mask(tree.words[0], len(ids)))
    print("\nKV slots")
    print(pictures.kv_map(table, config))


def _first_step(
    models: Models, ids: list[int], config: SpecConfig, backend: str
) -> tuple[DraftTree, Tensor, AcceptResult, SlotTable]:
    """Run a prompt, draft a tree and verify it greedily; commit nothing.

    Returns
    -------
    tree : DraftTree
        Of one request.
    scores : Tensor
        ``[1, n]``, path probabilities.
    accepted : AcceptResult
        What greedy verification keeps.
    table : SlotTable
        Where the KV is.
    """
    import torch

    from specattn.batch import SpecBatch
    from specattn.cache.kv_pool import KVPool
    from specattn.cache.slot_table import SlotTable
    from specattn.inspect import path_scores
    from specattn.speculative.decoder import ModelSlot, SpecDecoder
    from specattn.speculative.prefill import Prefill, Prompt
    from specattn.speculative.sampling import SamplingBatch, SamplingParams
    from specattn.speculative.tree import build_tree
    from specattn.speculative.verify import accept

    assert models.draft is not None
    length, device = len(ids), models.target.device
    context = length + config.reserve_len
    config = replace(config, max_context_len=context, max_num_reqs=1)
    num_slots = (-(-context // config.page_size) + 1) * config.page_size
    table = SlotTable(
        max_num_reqs=1,
        max_context_len=context,
        num_slots=num_slots,
        page_size=config.page_size,
        device=device,
    )
    target = ModelSlot.of(models.target, KVPool(models.target.layers, num_slots, device), backend)
    draft = ModelSlot.of(models.draft, KVPool(models.draft.layers, num_slots, device), backend)
    row = table.allocate()
    table.reserve([row], [context])
    greedy = SamplingBatch.of([SamplingParams()], device)
    start = Prefill(target, draft, table.req_to_token, config).run([Prompt(row, ids)], greedy)
    assert start.state is not None
    table.commit(row, length)
    lens = torch.tensor([length], dtype=torch.int32)
    batch = SpecBatch(torch.tensor([row], device=device), lens.to(device), lens, start.bonus_tokens)
    candidates = _propose(draft, config, table, batch, start.state)
    tree = build_tree(candidates, batch, config)
    decoder = SpecDecoder(
        target, draft, config, table.req_to_token, features=models.draft.feature_size, record=False
    )
    logits = decoder.verify(batch, tree).logits
    accepted = accept(tree, logits, batch.seq_lens, config, greedy)
    return tree, path_scores(candidates, config), accepted, table


def _propose(
    draft: ModelSlot[DraftModel],
    config: SpecConfig,
    table: SlotTable,
    batch: SpecBatch,
    state: DraftState,
) -> Candidates:
    """Draft as `SpecDecoder.propose` does, and keep the candidates and their scores."""
    from specattn.speculative.draft import ProposeProgram

    bound = ProposeProgram(draft.model, draft.backend, config, table.req_to_token, 1).bind(1)
    bound.copy_in(
        1, req_pool_indices=batch.req_pool_indices, seq_lens=batch.seq_lens, **vars(state)
    )
    bound.schedule(batch.seq_lens_cpu)
    bound.fill()
    return bound.run()
