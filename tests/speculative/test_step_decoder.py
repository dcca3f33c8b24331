"""Steps over request states: what they leave on the device, and what they tell the host."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specattn.cache.external import ExternalTable
from specattn.cache.kv_pool import KVPool
from specattn.engine.engine import Request
from specattn.errors import CaptureMismatch, NotCapturedError
from specattn.speculative.model import ModelSlot
from specattn.speculative.proposers.eagle import EagleProposer
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.states import RequestStates
from specattn.speculative.step.decoder import StepDecoder
from tests.samples import half, on_cpu
from tests.speculative.stepping import DRAWN, PROMPTS, SETTINGS, admitted, engine
from tests.tiny import dense_greedy
from tests.worlds import BACKENDS, DEVICE


@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
@pytest.mark.parametrize("tree", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_decode_whoever_takes_part(backend, tree, cudagraph):
    """Batches grow, shrink and change their order from step to step; no row notices."""
    run = engine(tree, backend, cudagraph=cudagraph, buckets=(2, 5))
    rows, decoder, rng = admitted(run), run.decoder(run.config), random.Random(5)
    made = dict.fromkeys(rows, 0)
    tokens = {live.row: list(live.result.tokens) for live in run.running}
    lens = {live.row: live.length for live in run.running}
    for _ in range(12):
        part = rng.sample(rows, rng.randint(1, 5))
        for row, new in zip(part, decoder.step(part), strict=True):
            assert new
            tokens[row] += new
            made[row] += 1
            lens[row] += len(new)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert tokens[row] == dense_greedy(run.target.model, prompt, len(tokens[row]))
        assert int(run.states.seq_lens[row]) == lens[row]
        assert int(run.states.bonus_tokens[row]) == tokens[row][-1]
    assert min(made.values()) > 1
    if DEVICE.type == "cuda" and backend == "triton":
        assert all(map(decoder.runner.recorded, decoder.modes))
        assert not decoder.runner.stats.eager
    assert not any(
        int(value[0].count_nonzero())
        for name, value in run.states.tensors().items()
        if name != "top_p"
    ), "a step wrote into the row of padding"


@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 4, 9)], ids=["chain", "tree"])
def test_a_request_without_slots_sits_out(tree, cudagraph):
    run = engine(tree, cudagraph=cudagraph)
    rows, decoder = admitted(run), run.decoder(run.config)
    states = {name: value.clone() for name, value in run.states.tensors().items()}
    kv = [run.target.pool.k.clone(), run.draft.pool.k.clone()]
    held = rows[2]
    run.table.reserved[held] = run.running[2].length + run.config.reserve_len - 1
    gained = decoder.step(rows)
    assert gained[2] == []
    assert all(gained[i] for i in (0, 1, 3, 4))
    for name, before in states.items():
        assert torch.equal(run.states.tensors()[name][held], before[held]), name
    slots = run.table.req_to_token[held].long()
    for pool, before in zip((run.target.pool, run.draft.pool), kv, strict=True):
        assert torch.equal(pool.k[:, slots], before[:, slots])
    run.table.reserved[held] += 1
    (new,) = decoder.step([held])
    text = [*run.running[2].result.tokens, *new]
    assert text == dense_greedy(run.target.model, PROMPTS[2], len(text))


@on_cpu(half, "cudagraph", "sampling")
@pytest.mark.parametrize("sampling", [False, True], ids=["target", "rejection"])
@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
def test_drawn_tokens_do_not_depend_on_seams_or_company(cudagraph, sampling):
    tree = (3, 1, 4) if sampling else (3, 4, 9)
    alone = [
        engine(tree, sampling=sampling).generate([Request(p, 20, sampling=DRAWN)])[0].tokens
        for p in PROMPTS[:3]
    ]
    run = engine(tree, sampling=sampling, cudagraph=cudagraph, buckets=(2, 5))
    mixed = [Request(p, 20, sampling=DRAWN) for p in PROMPTS[:3]]
    mixed.append(Request(PROMPTS[3], 20))  # a greedy one among them
    out = run.generate(mixed)
    assert [r.tokens for r in out[:3]] == alone
    if not sampling:
        assert out[3].tokens == dense_greedy(run.target.model, PROMPTS[3], 20)


REACHED = {
    "req_to_token": lambda run: run.table.req_to_token,
    "reserved": lambda run: run.table.reserved,
    "states.seq_lens": lambda run: run.states.seq_lens,
    "states.hidden_states": lambda run: run.states.drafting["hidden_states"],
    "k_cache": lambda run: run.target.pool.k,
    "v_cache": lambda run: run.draft.pool.v,
}


@pytest.mark.parametrize("name", REACHED)
def test_memory_that_moved_is_refused_by_name_at_once(name):
    run = engine((3, 1, 4), buckets=(5,))
    rows, decoder = admitted(run), run.decoder(run.config)
    assert all(decoder.step(rows))
    tensor = REACHED[name](run)
    before = tensor.data
    tensor.data = tensor.clone()
    with pytest.raises(CaptureMismatch, match=f"{name} changed since capture"):
        decoder.step(rows)
    tensor.data = before
    assert all(decoder.step(rows))


class Forwarding(ExternalTable):
    """Says what the table of an engine says, whenever it is asked."""

    def __init__(self, source):
        self._source = source
        self.page_size, self.num_pages = source.page_size, source.num_pages
        self.max_context_len = source.max_context_len

    req_to_token = property(lambda table: table._source.req_to_token)
    reserved = property(lambda table: table._source.reserved)


@pytest.mark.parametrize("name", ["req_to_token", "reserved"])
def test_a_table_that_computes_other_tensors_is_refused(name):
    run = engine((3, 1, 4), buckets=(5,))
    rows, source = admitted(run), SimpleNamespace(**vars(run.table))
    decoder = StepDecoder(
        run.target, run.draft, run.config, Forwarding(source), run.states, buckets=(5,)
    )
    assert all(decoder.step(rows))
    before = getattr(source, name)
    setattr(source, name, before.clone())
    with pytest.raises(CaptureMismatch, match=rf"table\.{name} changed since capture"):
        decoder.step(rows)
    setattr(source, name, before)
    assert all(decoder.step(rows))


def test_what_cannot_be_run_is_refused():
    run = engine((3, 1, 4))
    rows, decoder = admitted(run), run.decoder(run.config)
    with pytest.raises(NotCapturedError, match="sampled"):
        decoder.step(rows, sampled=True)
    with pytest.raises(ValueError, match="cudagraph must be 'full' or 'piecewise'"):
        StepDecoder(run.target, run.draft, run.config, run.table, run.states, cudagraph="two")
    with pytest.raises(ValueError, match="needs cudagraph='piecewise'"):
        StepDecoder(run.target, run.draft, run.config, run.table, run.states, validate="debug")


def test_states_of_other_widths_are_not_admitted():
    run = engine((3, 4, 9))
    rows = torch.tensor(admitted(run), device=DEVICE)
    kept = {name: value.clone() for name, value in run.states.tensors().items()}
    narrow = {name: value[rows, :1] for name, value in run.states.drafting.items()}
    sampling = SamplingBatch.of([SamplingParams()] * 5, DEVICE)
    lens = torch.ones(5, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"state\.topk_probs must be \[5, 4\] .* got \[5, 1\]"):
        run.states.admit(rows, lens, lens.long(), narrow, sampling)
    for name, value in kept.items():
        assert torch.equal(run.states.tensors()[name], value), name


def one_for_all(value):
    """One row, which torch would copy to all."""
    return value[:1]


@pytest.mark.parametrize("spoil", [one_for_all, lambda value: value.double()])
@pytest.mark.parametrize(
    "name",
    [
        "seq_lens",
        "bonus_tokens",
        "state.topk_tokens",
        "state.hidden_states",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.seeds",
    ],
)
def test_states_of_other_requests_are_not_admitted(name, spoil):
    run = engine((3, 4, 9))
    rows = torch.tensor(admitted(run), device=DEVICE)
    kept = {field: value.clone() for field, value in run.states.tensors().items()}
    given = {
        "seq_lens": torch.full((5,), 77, dtype=torch.int32, device=DEVICE),
        "bonus_tokens": torch.full((5,), 66, device=DEVICE),
        "state": {name: value[rows] + 1 for name, value in run.states.drafting.items()},
        "sampling": SamplingBatch.of([SamplingParams(0.5, top_k=3, top_p=0.5, seed=4)] * 5, DEVICE),
    }
    part, _, field = name.rpartition(".")
    if part == "state":
        given[part][field] = spoil(given[part][field])
    elif part:
        given[part] = replace(given[part], **{field: spoil(getattr(given[part], field))})
    else:
        given[field] = spoil(given[field])
    with pytest.raises(ValueError, match=rf"{name} must be \[5.* got"):
        run.states.admit(rows, **given)
    for field, value in kept.items():
        assert torch.equal(run.states.tensors()[field], value), field


@pytest.mark.parametrize("validate", ["off", "debug"])
def test_rows_that_no_step_can_take_are_refused(validate):
    run = engine((3, 4, 9), cudagraph="piecewise", validate=validate)
    rows, decoder = admitted(run), run.decoder(run.config)
    for bad in ([rows[0], 0, rows[0]], [rows[0], 6], [-1], [0, -6]):
        with pytest.raises(ValueError, match=r"rows must be distinct rows 1\.\.5, or 0 for padd"):
            decoder.step(bad)
    with pytest.raises(ValueError, match="at most 6 rows take part, padding included, got 7"):
        decoder.step([*rows, 0, 0])
    assert [bool(new) for new in decoder.step([0, *rows[:2], 0])] == [False, True, True, False]


def test_debugging_compares_host_lengths_with_the_devices():
    run = engine((3, 1, 4), validate="debug")
    rows, decoder = admitted(run), run.decoder(run.config)
    lens = torch.tensor([live.length for live in run.running], dtype=torch.int32)
    wrong = lens + (torch.arange(5) == 3).to(torch.int32)
    with pytest.raises(ValueError, match=r"seq_lens must be seq_lens_cpu \[6, 2, 4, 4, 1\], got"):
        decoder.step(rows, seq_lens_cpu=wrong)
    padded = torch.nn.functional.pad(lens, (1, 0))
    assert all(decoder.step([0, *rows], seq_lens_cpu=padded)[1:])


def test_debugging_notices_drawing_requests_in_a_greedy_step():
    run = engine((3, 1, 4), validate="debug")
    rows, decoder = admitted(run), run.decoder(run.config)
    run.states.temperature[rows[1]] = 0.5
    with pytest.raises(ValueError, match=rf"sampled must be True: rows \[{rows[1]}\] have a temp"):
        decoder.step(rows)
    decoder.capture(sampled=True)
    assert all(decoder.step(rows, sampled=True))


def narrow_pool(run):
    pool = KVPool(run.target.pool.layers, 100, DEVICE)
    target = ModelSlot.of(run.target.model, pool, "torch_native")
    return StepDecoder(target, run.draft, run.config, run.table, run.states)


def changed(run, states=None, **over):
    config = replace(run.config, **over)
    return StepDecoder(run.target, run.draft, config, run.table, states or run.states)


def other_states(run, topk=4, rows=6):
    fields = EagleProposer(run.draft).state_fields(replace(run.config, topk=topk))
    return RequestStates.alloc(rows, fields, DEVICE)


MISFITS = {
    "pool": (narrow_pool, "pools must have the table's 481 slots, got 100"),
    "page": (lambda run: changed(run, page_size=4), "page_size must be the table's, 1, got 4"),
    "context": (
        lambda run: changed(run, max_context_len=64),
        "max_context_len must be at least the table's, 96, got 64",
    ),
    "rows": (
        lambda run: changed(run, other_states(run, rows=5)),
        r"states\.seq_lens must be \[6\] torch\.int32 on .*, got \[5\]",
    ),
    "topk": (
        lambda run: changed(run, other_states(run, topk=3)),
        r"states must hold topk_probs \[6, 4\] .*, got \[6, 3\]",
    ),
}


@pytest.mark.parametrize(("make", "message"), MISFITS.values(), ids=MISFITS)
def test_tables_that_do_not_belong_together_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(engine((3, 4, 9)))


@pytest.mark.parametrize("tbo", [False, True], ids=["whole", "tbo"])
def test_a_bucket_is_filled_up_with_row_0(tbo):
    """A request that padding repeats would be stepped twice at once, over the same slots."""
    run = engine((3, 4, 9), buckets=(5,), tbo=tbo)
    rows, decoder = admitted(run), run.decoder(run.config)
    host = decoder._in_flight.host
    for part in (rows, rows[:2], rows[2:3], []):
        host.rows.fill_(-1)
        before = run.states.seq_lens.clone()
        gained = decoder.step(part)
        (written,) = [entry for entry in host.rows if entry[0] != -1]
        assert written[: len(part)].tolist() == part
        assert not written[len(part) : 5].any()
        grown = run.states.seq_lens - before
        assert grown[part].tolist() == [len(new) for new in gained]
        assert int(grown.sum()) == sum(map(len, gained))
