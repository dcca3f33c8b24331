"""What `StepSetup.over` puts together, and decoders of it, by level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn import (
    ExternalTable,
    KVPool,
    ModelSlot,
    Prefill,
    Prompt,
    SamplingBatch,
    SamplingParams,
    SlotTable,
    SpecConfig,
    StepDecoder,
    StepSetup,
)
from specattn.errors import NotCapturedError
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.sampling.processors import ProcessorStates
from specattn.speculative.step.level import Level
from tests.grammars import Remainders
from tests.processors import dense_logits
from tests.speculative.stepping import PROMPTS, SETTINGS, admitted, engine
from tests.speculative.test_host_plans import PlanningBackend
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

CONFIG, PROMPT = SpecConfig(3, 4, 9, max_context_len=48, max_num_reqs=2), [3, 14, 15, 9, 26]
TORCH = {"backend": "torch_native"}


def models():
    return TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)


def slots(count: int) -> list[ModelSlot]:
    return [
        ModelSlot.of(model, KVPool(model.layers, count, DEVICE), "torch_native")
        for model in models()
    ]


def external() -> StepSetup:
    """Over slots and a table of somebody else, of which every row has its own."""
    own = torch.zeros(3, 48, dtype=torch.int32, device=DEVICE)
    own[1:] = torch.arange(1, 97, dtype=torch.int32, device=DEVICE).view(2, 48)
    reserved = torch.full((3,), 48, dtype=torch.int32, device=DEVICE)
    table = ExternalTable(own, reserved, num_slots=97, page_size=1)
    setup = StepSetup.over(*slots(97), CONFIG, table=table)
    assert setup.table is table
    return setup


MADE = {
    "models": lambda: StepSetup.over(*models(), CONFIG, **TORCH),
    "slots": lambda: StepSetup.over(*slots(97), CONFIG),
    "external": external,
    "a slot, a model": lambda: StepSetup.over(slots(97)[0], models()[1], CONFIG, **TORCH),
    "a proposer": lambda: StepSetup.over(models()[0], LookupProposer(), CONFIG, **TORCH),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_texts_are_those_of_plain_decoding(made):
    """Whatever is there already; of several configs over the same setup, step by step."""
    setup = made()
    plain = replace(setup, config=CONFIG.plain())
    decoders = [StepDecoder.of(one) for one in (setup, plain)]
    if isinstance(setup.table, SlotTable):
        assert setup.table.allocate() == 1
        setup.table.reserve([1], [48])
    sampling = SamplingBatch.of([SamplingParams()], DEVICE)
    start = Prefill.of(setup).run([Prompt(1, PROMPT)], sampling)
    lens = torch.tensor([len(PROMPT)], dtype=torch.int32, device=DEVICE)
    row = torch.tensor([1], device=DEVICE)
    setup.states.admit(row, lens, start.bonus_tokens, start.state, sampling)
    tokens = start.bonus_tokens.tolist()
    for at in range(12):
        tokens += decoders[at % 3 == 2].step([1])[0]
    assert tokens == dense_greedy(setup.target.model, PROMPT, len(tokens))


@pytest.mark.parametrize("page", [1, 16])
def test_every_request_can_reach_the_longest_context(page):
    config = replace(CONFIG, max_context_len=50, page_size=page)
    setup = StepSetup.over(*models(), config, **TORCH)
    table = setup.table
    rows = [table.allocate() for _ in range(config.max_num_reqs)]
    table.reserve(rows, [50] * 2)
    assert not table.num_free_slots
    assert {slot.pool.num_slots for slot in setup.slots} == {table.num_pages * page}


def test_what_exists_is_taken_as_it_is():
    target, draft = slots(200)
    setup = StepSetup.over(target, draft, CONFIG, num_slots=150)
    assert setup.target is target
    assert setup.proposer.slot is draft
    assert setup.table.num_pages == 150
    other = StepSetup.over(target, models()[1], CONFIG, table=setup.table, **TORCH)
    assert other.table is setup.table
    assert other.slots[1].pool.num_slots == 150
    assert other.states is not setup.states
    with pytest.raises(ValueError, match="pools must have the table's 300 slots, got 200"):
        StepDecoder.of(StepSetup.over(target, draft, CONFIG, num_slots=300))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (TORCH, "full"),
        (TORCH | {"validate": "debug"}, "piecewise"),
        ({"backend": PlanningBackend}, "piecewise"),
        (TORCH | {"cudagraph": "piecewise"}, "piecewise"),
    ],
    ids=["no need", "debug", "planned on the host", "asked for"],
)
def test_steps_are_recorded_in_parts_where_they_must_be(options, wanted):
    setup = StepSetup.over(*models(), CONFIG, **options)
    assert setup.options.cudagraph == wanted
    assert StepDecoder.of(setup).cudagraph == wanted


REFUSED = {
    "swapped": ({"target": models()[1]}, "target must be an HFTarget .*, got a TinyDraft"),
    "a draft's slot": ({"target": slots(97)[1]}, "target must be the slot of a target model"),
    "a class": ({"draft": TinyDraft}, "draft must be what load_draft"),
    "config": ({"config": 5}, "config must be a SpecConfig, got an int"),
    "slots": ({"num_slots": 0}, "num_slots must be"),
    "words": ({"cudagraph": "two"}, "cudagraph must be 'full' or 'piecewise', got 'two'"),
    "both": (
        {"cudagraph": "full", "backend": PlanningBackend},
        "plans on the host needs cudagraph='piecewise'",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_put_together_is_refused(change, message):
    target, draft = models()
    parts = {"target": target, "draft": draft, "config": CONFIG} | TORCH
    with pytest.raises(ValueError, match=message):
        StepDecoder.of(StepSetup.over(**parts | change))


@pytest.mark.parametrize("tree", SETTINGS.values(), ids=SETTINGS)
def test_flags_are_words_for_levels(tree):
    """Two decoders of the same requests: one is asked by flags, one by levels."""
    runs = [engine(tree), engine(tree)]
    rows, _ = (admitted(run) for run in runs)
    flags, levels = (run.decoders[0] for run in runs)
    sizes = len(runs[0].table.req_to_token), 61
    for level, asked in ((Level.SAMPLED, {"sampled": True}), (Level.PROCESSED, {})):
        with pytest.raises(NotCapturedError, match=level.name.lower()):
            levels.step(rows, level=level)
        states = [ProcessorStates.alloc(*sizes, DEVICE) if not asked else None for _ in runs]
        flags.capture(**asked, processors=states[0])
        levels.capture(level, processors=states[1])
        assert flags.levels == levels.levels
        assert level in levels.levels
        assert flags.modes == levels.modes
        flag = {f"{level.name.lower()}": True}
        assert flags.step(rows, **flag) == levels.step(rows, level=level)
    flags.capture(constrained=True)
    levels.capture(Level.CONSTRAINED)
    assert flags.levels == levels.levels == set(Level)
    wanted, found = (run.runner.stats.replays + run.runner.stats.eager for run in (flags, levels))
    assert wanted == found


def test_a_constrained_step_has_log_probabilities():
    """It is a processed one; it had none unless it was said to be one, too."""
    run = engine(SETTINGS["tree"], processed=True)
    grammars = [Remainders(prompt) for prompt in PROMPTS]
    params = SamplingParams(logprobs=2)
    rows = admitted(run, sampling=params)
    (decoder,) = run.decoders
    decoder.capture(Level.CONSTRAINED)
    for live, grammar in zip(run.running, grammars, strict=True):
        grammar.last = live.result.tokens[-1]
        run._decoders.processors.admit(live.row, params, live.request.prompt, bitmask=True)
    pending = decoder.step_async(rows, grammars=grammars)
    for at, (live, gained) in enumerate(zip(run.running, pending.wait(), strict=True)):
        text = [*live.request.prompt, *live.result.tokens]
        scored = pending.logprobs(at, 2)
        for token, found in zip(gained, scored, strict=True):
            logits = torch.tensor(dense_logits(run.target.model, text))
            wanted = float(logits.log_softmax(0)[token])
            assert found.value == pytest.approx(wanted, abs=1e-4)
            text.append(token)


def test_levels_that_lack_something_are_refused():
    (decoder,) = engine(SETTINGS["tree"]).decoders
    for level in (Level.PROCESSED, Level.CONSTRAINED):
        with pytest.raises(ValueError, match=f"{level.name.lower()} needs processors"):
            decoder.capture(level)
    with pytest.raises(ValueError, match="every level must be a Level, got a str"):
        decoder.capture("sampled")
    assert decoder.levels == {Level.GREEDY}
    for step in (decoder.step, decoder.step_async):
        with pytest.raises(ValueError, match="level must be a Level, got an int"):
            step([1], level=1)
        with pytest.raises(ValueError, match="grammars must be one per row, 1, got 0"):
            step([1], level=Level.CONSTRAINED)
    with pytest.raises(ValueError, match="processed needs processors"):
        StepDecoder.of(decoder.setup, levels=[Level.PROCESSED])


@pytest.mark.parametrize("made", [StepDecoder.of, Prefill.of])
def test_what_is_no_setup_is_refused(made):
    with pytest.raises(ValueError, match=r"setup must be a StepSetup .*, got a ModelSlot"):
        made(slots(97)[0])
    setup = StepSetup.over(*models(), CONFIG, **TORCH)
    assert made(setup).proposer is not None
    with pytest.raises(ValueError, match="levels must be a sequence of Level"):
        StepDecoder.of(setup, levels=Level.SAMPLED)


def test_a_decoder_of_parts_is_the_same():
    """`StepDecoder(...)`, as loops before `StepSetup.over` call it."""
    setup = StepSetup.over(*models(), CONFIG, **TORCH)
    parts = setup.target, setup.proposer.slot, setup.config, setup.table, setup.states
    made = [StepDecoder.of(setup, buckets=[1, 2], levels=[Level.SAMPLED])]
    made.append(StepDecoder(*parts, buckets=[1, 2], sampled=True))
    one, other = made
    assert one.modes == other.modes
    assert one.levels == other.levels
    assert one.options == other.options
    assert one.runner.buckets == other.runner.buckets
    assert [one.runner.captured(mode) for mode in one.modes] == [[1, 2]] * len(one.modes)
