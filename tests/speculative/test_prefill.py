"""`Prefill`, and steps after it, over rows that are reserved whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.cache.external import ExternalTable
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.model import ModelSlot
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.proposers.standalone import LMDraft
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.states import RequestStates
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.level import Level
from specattn.speculative.step.setup import StepSetup
from tests.samples import half, on_cpu
from tests.tiny import VOCAB, TinyDraft, TinyTarget
from tests.worlds import DEVICE

PROMPTS = [[3, 1, 4], [35]]
PARAMS = [SamplingParams(), SamplingParams(1.0, seed=4)]
CONTEXT, NEW = 48, 9


class Loop:
    """A table, two pools, and what runs prompts and steps over them."""

    def __init__(self, config: SpecConfig) -> None:
        models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
        self.setup = StepSetup.over(*models, config, backend="torch_native")
        self.config, self.table, self.states = config, self.setup.table, self.setup.states
        self.rows = [self.table.allocate() for _ in PROMPTS]
        self.table.reserve(self.rows, [CONTEXT] * 2)
        self.slots = self.setup.slots
        self.prefill = Prefill.of(self.setup)

    def texts(self) -> list[list[int]]:
        """Continue the prompts."""
        sampling = SamplingBatch.of(PARAMS, DEVICE)
        decoder = StepDecoder.of(self.setup, buckets=[2], levels=[Level.SAMPLED])
        start = self.prefill.run(list(map(Prompt, self.rows, PROMPTS)), sampling)
        lens = torch.tensor(list(map(len, PROMPTS)), dtype=torch.int32, device=DEVICE)
        rows = torch.tensor(self.rows, device=DEVICE)
        self.states.admit(rows, lens, start.bonus_tokens, start.state, sampling)
        texts = [[token] for token in start.bonus_tokens.tolist()]
        while min(map(len, texts)) < NEW:
            for text, new in zip(texts, decoder.step(self.rows, sampled=True), strict=True):
                text += new
        return [text[:NEW] for text in texts]


def test_plain_decoding_rejects_nothing_where_drafts_would_be_drawn():
    wanted = Engine(
        TinyTarget(device=DEVICE), None, SpecConfig(0, 1, 1, CONTEXT, 2), backend="torch_native"
    ).generate([Request(p, NEW, s) for p, s in zip(PROMPTS, PARAMS, strict=True)])
    loop = Loop(SpecConfig(0, 1, 1, CONTEXT, 2, draft_sampling=True))
    assert loop.texts() == [result.tokens for result in wanted]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_a_draft_reads_the_prompts_own_tokens_at_the_ends_of_pieces(chunk):
    """Prompts in pieces leave the draft's KV and its first proposal as whole ones do."""
    config = SpecConfig(3, 2, 5, CONTEXT, 2)
    sampling = SamplingBatch.of([SamplingParams()] * 2, DEVICE)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [35, 8, 9]]
    found = []
    for size in (4096, chunk):
        loop = Loop(config)
        start = replace(loop.prefill, chunk=size).run(
            list(map(Prompt, loop.rows, prompts)), sampling
        )
        kv = [
            getattr(loop.slots[1].pool, name)[:, loop.table.req_to_token[row, : len(ids)].long()]
            for row, ids in zip(loop.rows, prompts, strict=True)
            for name in ("k", "v")
        ]
        found.append([start.bonus_tokens, *start.state.values(), *kv])
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)


@on_cpu(half, "tree", "change")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "prompts must be at least one, got none"),
        ([{"tokens": []}, {}], r"a prompt's tokens must be 1\.\.48, got 0"),
        ([{"tokens": [1] * 49}, {}], r"a prompt's tokens must be 1\.\.48, got 49"),
        ([{"cached": 3}, {}], r"cached must be 0\.\.2, so that one of 3 tokens is left .* got 3"),
        ([{}, {"cached": -1}], r"cached must be 0\.\.0, .* got -1"),
        ([{"row": 0}, {}], r"a prompt's row must be 1\.\.2, got 0"),
        ([{}, {"row": 3}], r"a prompt's row must be 1\.\.2, got 3"),
        ([{"tokens": [3, 61]}, {}], r"prompt tokens must be 0\.\.60, got 3\.\.61"),
        ([{}, {"tokens": [-1, 3]}], r"prompt tokens must be 0\.\.60, got -1\.\.3"),
        ([{}], r"sampling.temperature must be \[1\] .* got \[2\]"),
    ],
)
@pytest.mark.parametrize("tree", [(0, 1, 1), (3, 4, 9)], ids=["plain", "tree"])
def test_prompts_that_give_no_first_token_are_refused(tree, change, message):
    """A wholly cached one was given token 0, and the next one its proposals; others work later."""
    loop = Loop(SpecConfig(*tree, CONTEXT, 2))
    wanted = loop.texts()
    good = map(Prompt, loop.rows, PROMPTS)
    bad = [replace(prompt, **fields) for prompt, fields in zip(good, change, strict=False)]
    before = len(loop.slots[0].model.calls)
    with pytest.raises(ValueError, match=message):
        loop.prefill.run(bad, SamplingBatch.of(PARAMS, DEVICE))
    assert len(loop.slots[0].model.calls) == before, "nothing has run"
    assert loop.texts() == wanted


@pytest.mark.parametrize("kind", ["books", "external", "tensor"])
@pytest.mark.parametrize("room", [0, 3, 4])
def test_a_prompt_needs_a_slot_for_every_token_that_it_writes(kind, room):
    """All keys went to slot 0; of the draft that reads ahead, the newest token's alone."""
    if kind != "books" and torch.device(DEVICE).type != "cpu":
        pytest.skip("only a table with books on the host knows without waiting for the device")
    loop = Loop(SpecConfig(3, 1, 4, CONTEXT, 2))
    row = loop.rows[0]
    if kind == "books":
        # who was there before has left slots in the row
        table = SlotTable(max_num_reqs=2, max_context_len=CONTEXT, num_slots=97, device=DEVICE)
        assert table.allocate() == row
        table.reserve([row], [CONTEXT])
        table.free(row)
        assert table.allocate() == row
        table.reserve([row], [room])
    elif kind == "external":
        reserved = torch.zeros(3, dtype=torch.int32)
        table = ExternalTable(loop.table.req_to_token, reserved, num_slots=97)
        reserved[row] = room
    else:
        table = loop.table.req_to_token.clone()
        table[row, room:] = 0
    draft = LMDraft(TinyTarget(device=DEVICE, layers=1), VOCAB)
    of_draft = ModelSlot.of(draft, KVPool(draft.layers, 97, DEVICE), "torch_native")
    sampling = SamplingBatch.of([SamplingParams()], DEVICE)
    for proposer, needed in ((loop.slots[1], 3), (of_draft, 4)):
        prefill = Prefill(loop.slots[0], proposer, table, loop.config)
        if room >= needed:
            prefill.run([Prompt(row, PROMPTS[0])], sampling)
            continue
        said = rf"row {row} must have slots for the {needed} tokens .*, got {room}: reserve"
        with pytest.raises(ValueError, match=said):
            prefill.run([Prompt(row, PROMPTS[0])], sampling)
        if needed == 3:
            with pytest.raises(ValueError, match=said):
                prefill.last_logits(Prompt(row, PROMPTS[0]))


def test_prompts_cannot_be_run_by_no_tokens_at_a_time():
    prefill = Loop(SpecConfig(0, 1, 1, CONTEXT, 2)).prefill
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        replace(prefill, chunk=0)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True], ids=["off", "given"])
def test_admitting_requests_waits_for_nothing_on_the_device(given):
    """A number assigned at indices came from the host: SGLang's first tokens came a batch late."""
    states = RequestStates.alloc(4, {}, DEVICE, position_offsets=True)
    rows, lens = torch.tensor([1, 3], device=DEVICE), torch.ones(2, device=DEVICE).int()
    sampling = SamplingBatch.of([SamplingParams()] * 2, DEVICE)
    offsets = None
    if given:
        sampling = replace(sampling, top_k=lens * 7, top_p=lens / 2)
        offsets = lens.long() * 5
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            rows.tolist()
        states.admit(rows, lens, rows + 30, {}, sampling, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert states.seq_lens.tolist() == [0, 1, 0, 1]
    assert states.bonus_tokens.tolist() == [0, 31, 0, 33]
    wanted = (7, 0.5, 5) if given else (0, 1.0, 0)
    for table, value, other in zip(
        (states.top_k, states.top_p, states.position_offsets), wanted, (0, 1.0, 0), strict=True
    ):
        assert table.flatten().tolist() == [other, value, other, value]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "head", "model", "lookup"])
def test_prompts_wait_for_nothing_on_the_device(kind):
    """A copy from pageable memory waited for the step in flight, and then for the target."""
    draft = {
        "plain": None,
        "head": TinyDraft(device=DEVICE),
        "model": LMDraft(TinyTarget(device=DEVICE, layers=1), VOCAB),
        "lookup": LookupProposer(),
    }[kind]
    config = SpecConfig(0, 1, 1, CONTEXT, 2) if draft is None else SpecConfig(3, 1, 4, CONTEXT, 2)
    setup = StepSetup.over(TinyTarget(device=DEVICE), draft, config, backend="triton")
    rows = [setup.table.allocate() for _ in PROMPTS]
    setup.table.reserve(rows, [CONTEXT] * 2)
    prefill, prompts = Prefill.of(setup), list(map(Prompt, rows, PROMPTS))
    first = prefill.run(prompts, SamplingBatch.of(PARAMS, DEVICE)).bonus_tokens.tolist()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = prefill.run(prompts, SamplingBatch.of(PARAMS, DEVICE))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again.bonus_tokens.tolist() == first
