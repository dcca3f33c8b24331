"""`Prefill` and `SpecDecoder` by themselves, over rows that are reserved whole."""

from __future__ import annotations

import importlib

import pytest
import torch

from specattn.batch import SpecBatch
from specattn.config import SpecConfig
from specattn.kv import KVPool
from specattn.slots import SlotTable
from specattn.spec import verify
from specattn.spec.decoder import ModelSlot, SpecDecoder
from specattn.spec.generate import Engine, Request
from specattn.spec.prefill import Prefill, Prompt
from specattn.spec.sampling import SamplingBatch, SamplingParams
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

PROMPTS = [[3, 1, 4], [35]]
PARAMS = [SamplingParams(), SamplingParams(1.0, seed=4)]
CONTEXT, NEW = 48, 9


class Loop:
    """A table, two pools, and what runs prompts and steps over them."""

    def __init__(self, config: SpecConfig) -> None:
        slots = 1 + 2 * CONTEXT
        self.config = config
        self.table = SlotTable(
            max_num_reqs=2, max_context_len=CONTEXT, num_slots=slots, device=DEVICE
        )
        self.rows = [self.table.allocate() for _ in PROMPTS]
        self.table.reserve(self.rows, [CONTEXT] * 2)
        self.slots = [
            ModelSlot.of(model, KVPool(model.layers, slots, DEVICE), "torch_native")
            for model in (TinyTarget(device=DEVICE), TinyDraft(device=DEVICE))
        ]
        self.prefill = Prefill(*self.slots, self.table.req_to_token, config)

    def texts(self) -> list[list[int]]:
        """Continue the prompts."""
        sampling = SamplingBatch.of(PARAMS, DEVICE)
        decoder = SpecDecoder(*self.slots, self.config, self.table.req_to_token, buckets=[2])
        start = self.prefill.run(list(map(Prompt, self.rows, PROMPTS)), sampling)
        bonus, state, lens = start.bonus_tokens, start.state, list(map(len, PROMPTS))
        texts = [[token] for token in bonus.tolist()]
        while min(map(len, texts)) < NEW:
            on_host = torch.tensor(lens, dtype=torch.int32)
            batch = SpecBatch(
                torch.tensor(self.rows, device=DEVICE), on_host.to(DEVICE), on_host, bonus
            )
            out = decoder.step(batch, state, sampling)
            bonus, state = out.accepted.bonus_tokens, out.state
            for at, count in enumerate(out.accepted.accept_lens.tolist()):
                texts[at] += out.accepted.accept_tokens[at, :count].tolist()
                lens[at] += count
        return [text[:NEW] for text in texts]


@pytest.mark.parametrize("kernels", ["specattn.kernels.reference", "specattn.kernels"])
def test_plain_decoding_rejects_nothing_where_drafts_would_be_drawn(monkeypatch, kernels):
    """By the Triton kernels, too, which have no law to look at then."""
    wanted = Engine(
        TinyTarget(device=DEVICE), None, SpecConfig(0, 1, 1, CONTEXT, 2), backend="torch_native"
    ).generate([Request(p, NEW, s) for p, s in zip(PROMPTS, PARAMS, strict=True)])
    monkeypatch.setattr(
        verify, "ops", lambda name, device: importlib.import_module(f"{kernels}.{name}")
    )
    loop = Loop(SpecConfig(0, 1, 1, CONTEXT, 2, draft_sampling=True))
    assert loop.texts() == [result.tokens for result in wanted]
