"""Heads of vLLM's speculators draft here what they draft there: ``make_speculators.py`` tells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from specattn.batch import Phase, RowLayout
from specattn.cache.kv_pool import KVPool
from specattn.errors import ModelError
from specattn.models import (
    DFlashHead,
    Eagle3Head,
    HFTarget,
    load_dflash,
    load_draft,
)
from specattn.plan import AttnInputs, AttnPlan
from specattn.speculative.model import ModelSlot
from specattn.speculative.proposers.block import bind_block
from tests.implementations import using

if TYPE_CHECKING:
    from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOLDER = Path(__file__).parent / "speculators"
WIDTH, SLOTS = 64, 400


def target_with(vectors: dict[str, Tensor]) -> HFTarget:
    """A target whose ends are those of the vectors, and whose layers nobody runs."""
    vocab, size = vectors["embed_tokens"].shape
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=size,
        intermediate_size=32,
        num_attention_heads=4,
        num_hidden_layers=5,
        max_position_embeddings=128,
    )
    target = HFTarget.from_model(AutoModelForCausalLM.from_config(config).to(DEVICE), name="tiny")
    target.embed_tokens.weight.data.copy_(vectors["embed_tokens"])
    target.lm_head.weight.data.copy_(vectors["lm_head"])
    return target


def close(got: Tensor, want: Tensor) -> None:
    assert (got.double() - want.double()).norm() <= 3e-6 * want.double().norm()


def table_of(requests: int, common: int, own: int, generator: torch.Generator) -> Tensor:
    """Rows whose first columns are the same slots for all, and the next ones their own."""
    slots = 1 + torch.randperm(SLOTS - 1, generator=generator)
    table = torch.zeros(requests, WIDTH, dtype=torch.int32)
    table[:, :common] = slots[:common]
    table[:, common : common + own] = slots[common:][: requests * own].view(requests, own)
    return table.to(DEVICE)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("dflash", "torch_native"),
        ("dflash_mixed", "torch_native"),
        ("dflash_mixed", "triton"),
        ("dflash_both_ways", "torch_native"),
        ("dflash_both_ways", "triton"),
    ],
)
def test_dflash(case, backend) -> None:
    vectors = load_file(FOLDER / case / "vectors.safetensors", device=DEVICE)
    head = load_dflash(FOLDER / case, target_with(vectors))
    assert isinstance(head, DFlashHead)
    assert head.features == (0, 2, 3)
    ids, anchors, wanted = vectors["ids"], vectors["anchors"], vectors["logits"]
    batch, size, text = len(anchors), head.block.size, len(ids)
    assert wanted.shape == (batch, size, head.vocab_size)

    pool = KVPool(head.layers, SLOTS, DEVICE)
    pool.k.fill_(torch.nan), pool.v.fill_(torch.nan)
    generator = torch.Generator().manual_seed(1)
    # the requests share the text up to their anchors, and write their blocks elsewhere
    table = table_of(batch, text, size, generator)
    slots = table[:, text : text + size]
    positions = anchors[:, None] + torch.arange(size, device=DEVICE)
    with using("triton" if backend == "triton" else "naive"):
        states, places = head.combine(vectors["features"]), torch.arange(text, device=DEVICE)
        head.write_context(states, places, pool, table[:1, :text])
        slot = ModelSlot.of(head, pool, backend)
        attention = bind_block(
            slot.backend,
            head.block.views,
            table,
            req_pool_indices=torch.arange(batch, device=DEVICE),
            seq_lens=anchors.to(torch.int32),
            positions=positions,
            anchors=positions[:, :1].repeat(1, size),
            slots=slots,
        )
        attention.fill()
        block = torch.full((batch, size), head.block.mask_token_id, device=DEVICE)
        block[:, 0] = ids[anchors]
        logits = head.forward_block(block.flatten(), positions.flatten(), attention)
        close(logits, wanted.flatten(0, 1))
        rows = torch.arange(batch * size, device=DEVICE).view(batch, size)
        drafted = rows[:, head.block.first_draft :].flatten()
        some = head.forward_block(block.flatten(), positions.flatten(), attention, drafted)
    close(some, wanted[:, head.block.first_draft :].flatten(0, 1))


@pytest.mark.parametrize("case", ["eagle3_llama", "eagle3_qwen3"])
def test_eagle3(case) -> None:
    vectors = load_file(FOLDER / case / "vectors.safetensors", device=DEVICE)
    target = target_with(vectors)
    head = load_draft(FOLDER / case, target)
    assert isinstance(head, Eagle3Head)
    assert head.features == (0, 2, 3)
    ids, features, wanted = vectors["ids"], vectors["features"], vectors["logits"]
    text = len(ids)

    pool = KVPool(head.layers, SLOTS, DEVICE)
    slot = ModelSlot.of(head, pool, "torch_native")
    table = table_of(text, text, 1, torch.Generator().manual_seed(2))

    def attend(rows: Tensor, seq_lens: Tensor, slots: Tensor, causal: Tensor, at: Tensor):
        layout = RowLayout(slots.shape[1], slots.shape[1], Phase.DRAFT)
        inputs = AttnInputs(rows, seq_lens.to(torch.int32), at, slots, causal)
        bound = slot.backend.bind(AttnPlan.over(layout, table, inputs))
        bound.fill()
        return bound

    # speculators' positions begin at 1
    at = torch.arange(1, text + 1, device=DEVICE)
    words = ((2 << at - 1) - 1).view(1, text, 1)
    zero = at[:1] - 1
    first = attend(zero, zero, table[:1, :text], words, at[None])
    out = head.forward(ids, head.combine(features), at, first)
    close(out.logits, wanted[0])

    # a request per place: the text up to it, and the draft's own token behind
    following = torch.cat([ids[1:], zero])
    own, word = table[:, text : text + 1], torch.ones_like(at)[:, None, None]
    second = attend(at - 1, at, own, word, at[:, None] + 1)
    out = head.forward(following, out.hidden_states, at + 1, second)
    close(out.logits, wanted[1])


def test_a_head_of_another_kind_is_refused() -> None:
    vectors = load_file(FOLDER / "dflash" / "vectors.safetensors", device=DEVICE)
    target = target_with(vectors)
    with pytest.raises(ModelError, match="is a DFlash head, no EAGLE head"):
        load_draft(FOLDER / "dflash", target)
    with pytest.raises(ModelError, match="is no DFlash head: "):
        load_dflash(FOLDER / "eagle3_llama", target)
