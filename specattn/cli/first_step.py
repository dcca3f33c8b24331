"""The first step after a prompt, with everything that a user of the library does not see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specattn.batch import SpecBatch
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.inspect import path_scores
from specattn.speculative.decoder import ModelSlot, SpecDecoder
from specattn.speculative.draft import ProposeProgram
from specattn.speculative.prefill import Prefill, Prompt
from specattn.speculative.sampling import SamplingBatch, SamplingParams
from specattn.speculative.tree import build_tree
from specattn.speculative.verify import accept

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.batch import AcceptResult, Candidates, DraftState, DraftTree
    from specattn.cli.loading import Models
    from specattn.config import SpecConfig
    from specattn.speculative.model import DraftModel


@dataclass(frozen=True)
class FirstStep:
    """What the first step makes, before anything is committed.

    Parameters
    ----------
    tree : DraftTree
        Of one request.
    scores : Tensor
        ``[1, n]``, path probabilities.
    accepted : AcceptResult
        What greedy verification keeps.
    table : SlotTable
        Where the KV is.
    """

    tree: DraftTree
    scores: Tensor
    accepted: AcceptResult
    table: SlotTable


def first_step(models: Models, ids: list[int], config: SpecConfig, backend: str) -> FirstStep:
    """Run a prompt, propose a tree and verify it, greedily and eagerly."""
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
    return FirstStep(tree, path_scores(candidates, config), accepted, table)


def _propose(
    draft: ModelSlot[DraftModel],
    config: SpecConfig,
    table: SlotTable,
    batch: SpecBatch,
    state: DraftState,
) -> Candidates:
    """Draft as `SpecDecoder.propose` does, keeping the candidates and their scores."""
    bound = ProposeProgram(draft.model, draft.backend, config, table.req_to_token, 1).bind(1)
    bound.copy_in(
        1, req_pool_indices=batch.req_pool_indices, seq_lens=batch.seq_lens, **vars(state)
    )
    bound.schedule(batch.seq_lens_cpu)
    bound.fill()
    return bound.run()
