"""Chunks of prompts leave what the same prompts leave by themselves."""

from __future__ import annotations

import functools
import random
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from specattn.config import SpecConfig
from specattn.errors import CaptureMismatch
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.prompts.runner import NewPrompt, Piece, PromptRunner, _cut
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.proposers.proposer import BoundPrompt, Proposer, binds_prompts
from specattn.speculative.proposers.standalone import LMDraft
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.sampling.processors import ProcessorStates, token_bitmask
from specattn.speculative.step.level import Level
from specattn.speculative.step.setup import StepSetup
from tests.samples import half, on_cpu
from tests.tiny import VOCAB, TinyBlockDraft, TinyDraft, TinyTarget
from tests.worlds import DEVICE

CONTEXT, ROWS = 48, 12
# whose prompts graphs can hold
BACKEND = "triton" if torch.device(DEVICE).type == "cuda" else "torch_native"
KINDS = ("plain", "head", "drawn", "block", "model", "lookup", "lookup before model")


def setup_of(kind: str, *, page_size: int = 1, **options) -> StepSetup:
    """Return what prompts of one kind of draft run with; pools hold NaN, that of padding, too."""
    model = LMDraft(TinyTarget(device=DEVICE, layers=1, seed=3), VOCAB)
    draft = {
        "plain": lambda: None,
        "head": lambda: TinyDraft(device=DEVICE),
        "drawn": lambda: TinyDraft(device=DEVICE),
        "block": lambda: TinyBlockDraft(device=DEVICE),
        "model": lambda: model,
        "lookup": LookupProposer,
        "lookup before model": lambda: LookupFirst(LookupProposer(), model),
    }[kind]()
    depth = 0 if draft is None else 3
    config = SpecConfig(
        depth, 1, depth + 1, CONTEXT, ROWS, page_size, draft_sampling=kind == "drawn"
    )
    made = StepSetup.over(TinyTarget(device=DEVICE), draft, config, backend=BACKEND, **options)
    for slot in made.slots:
        for cache in (slot.pool.k, slot.pool.v):
            cache[:] = torch.nan
    return made


class Run:
    """Prompts in rows of a table, some behind cached tokens that others have run."""

    def __init__(self, kind: str, **options) -> None:
        self.setup = setup_of(kind, **options)
        self.rows: list[int] = []

    def row(self, length: int) -> int:
        row = self.setup.table.allocate()
        ahead = self.setup.proposer.read_ahead
        self.setup.table.reserve([row], [min(length + ahead, CONTEXT)])
        self.rows.append(row)
        return row

    def kept(self, row: int, length: int) -> dict[str, torch.Tensor]:
        """What a request's row has, of states and pools."""
        setup = self.setup
        found = {name: table[row] for name, table in setup.states.tensors().items()}
        if "text" in found:
            found["text"] = found["text"][: length + 1]
        ahead = setup.proposer.read_ahead
        for at, slot in enumerate(setup.slots):
            count = min(length + ahead * at, CONTEXT)
            slots = setup.table.req_to_token[row, :count].long()
            found[f"k{at}"], found[f"v{at}"] = (
                torch.stack(list(one))[:, slots] for one in (slot.pool.k, slot.pool.v)
            )
        return {name: one.clone() for name, one in found.items()}


def texts(seed: int, count: int, longest: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def params(count: int) -> list[SamplingParams]:
    some = [SamplingParams(), SamplingParams(1.0, seed=5), SamplingParams(0.8, 7, 0.9, seed=6)]
    return [some[at % 3] for at in range(count)]


def alone(kind: str, prompts, drawn) -> list[tuple[int, dict]]:
    """Run each prompt by itself, as `Prefill` does."""
    run, found = Run(kind), []
    for prompt, one in zip(prompts, drawn, strict=True):
        row = run.row(len(prompt))
        sampling = SamplingBatch.of([one], DEVICE)
        out = Prefill.of(run.setup).run([Prompt(row, prompt)], sampling)
        lens = torch.tensor([len(prompt)], dtype=torch.int32, device=DEVICE)
        at = torch.tensor([row], device=DEVICE)
        run.setup.states.admit(at, lens, out.bonus_tokens, out.state, sampling)
        found.append((int(out.bonus_tokens), run.kept(row, len(prompt))))
    return found


@functools.cache
def pieces(kind: str) -> tuple[list, list, list]:
    """Prompts, how they are drawn after, and what each gives by itself."""
    prompts = [*texts(1, 9), [7] * CONTEXT, [5]]
    drawn = params(len(prompts))
    return prompts, drawn, alone(kind, prompts, drawn)


def same(got: dict, want: dict) -> None:
    for name, one in want.items():
        torch.testing.assert_close(got[name], one, rtol=1e-4, atol=1e-5, msg=name)


@on_cpu(half, "kind", "buckets")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("buckets", "chunk"),
    [((), 4096), ((), 7), ((16, 40), 40), ((5, 8, 11), 11), ((128,), 4096)],
    ids=["whole", "small", "bucket", "odd", "padded"],
)
def test_a_chunk_is_its_pieces_alone(kind, buckets, chunk):
    """In float32: first tokens, states, keys and values."""
    prompts, drawn, want = pieces(kind)
    run = Run(kind)
    runner = PromptRunner.of(run.setup, buckets=buckets, chunk=chunk)
    runner.capture(Level.SAMPLED)
    for _ in range(2):
        rows = [run.row(len(one)) for one in prompts]
        news = [
            NewPrompt(Prompt(row, prompt), one, Level.SAMPLED if one.drawn else Level.GREEDY)
            for row, prompt, one in zip(rows, prompts, drawn, strict=True)
        ]
        firsts = runner.run(news)
        for first, row, prompt, (token, kept) in zip(firsts, rows, prompts, want, strict=True):
            assert first.wait() == token
            same(run.kept(row, len(prompt)), kept)
        # the next ones get other rows, and what is in them
        for row in rows[::2] + rows[1::2]:
            run.setup.table.free(row)
    replays = runner.targets.stats.replays.total()
    assert (replays > 0) == bool(buckets)
    for slot in run.setup.slots:
        for layer in (*slot.pool.k, *slot.pool.v):
            assert layer[0].isnan().all(), "nothing is stored for padding"


def with_(kind: str, buckets, **options) -> tuple[Run, PromptRunner]:
    run = Run(kind, **options)
    return run, PromptRunner.of(run.setup, buckets=buckets, chunk=24)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buckets", [(), (12, 24)], ids=["eager", "buckets"])
def test_behind_a_prefix_that_others_have_run(kind, buckets):
    """Lookup finds what no chunk has in its text, too."""
    run, runner = with_(kind, buckets, page_size=4)
    base = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    prompts = [[*base, 7, 7], [*base, 8, 9, 7, 9], [*base]]
    want = alone(kind, prompts, params(1) * 3)
    first = run.row(len(prompts[0]))
    runner.run([NewPrompt(Prompt(first, prompts[0]), SamplingParams())])
    run.setup.table.commit(first, len(prompts[0]))
    table, news, rows = run.setup.table, [], []
    for prompt in prompts[1:]:
        rows.append(table.allocate(share=first, share_len=8))
        table.reserve(rows[-1:], [min(len(prompt) + 1, CONTEXT)])
        news.append(NewPrompt(Prompt(rows[-1], prompt, 8), SamplingParams()))
    firsts = runner.run(news)
    for found, row, prompt, (token, kept) in zip(firsts, rows, prompts[1:], want[1:], strict=True):
        assert found.wait() == token
        same(run.kept(row, len(prompt)), kept)


@pytest.mark.parametrize("buckets", [(), (12, 24)], ids=["eager", "buckets"])
def test_first_tokens_of_requests_with_processors_and_grammars(buckets):
    run, runner = with_("plain", buckets)
    processors = ProcessorStates.alloc(ROWS + 1, VOCAB, torch.device(DEVICE))
    runner.capture(Level.SAMPLED, Level.PROCESSED, processors=processors)
    prompts, allowed = texts(2, 4), [11, 23]
    drawn = [
        SamplingParams(logprobs=2),
        SamplingParams(logit_bias={9: 50.0}),
        SamplingParams(),
        SamplingParams(1.0, seed=3, allowed_tokens=[40, 41]),
    ]
    rows = [run.row(len(prompt)) for prompt in prompts]
    masks = [None, None, token_bitmask(allowed, VOCAB), None]
    levels = [Level.PROCESSED, Level.PROCESSED, Level.CONSTRAINED, Level.PROCESSED]
    news = []
    for row, prompt, one, level, mask in zip(rows, prompts, drawn, levels, masks, strict=True):
        processors.admit(row, one, prompt, bitmask=mask is not None)
        news.append(NewPrompt(Prompt(row, prompt), one, level, mask))
    firsts = runner.run(news)
    tokens = [one.wait() for one in firsts]
    plain = [token for token, _ in alone("plain", prompts, [SamplingParams()] * 4)]
    assert tokens[0] == plain[0]
    assert tokens[1] == 9
    assert tokens[2] in allowed
    assert tokens[3] in (40, 41)
    (scored,) = firsts[0].logprobs(2)
    assert next(iter(scored.alternatives)) == tokens[0]
    assert scored.value == pytest.approx(scored.alternatives[tokens[0]])


@pytest.mark.parametrize("what", ["table", "states", "target", "draft", "processors"])
def test_a_chunk_notices_what_has_moved_since_its_capture(what):
    run = Run("head")
    processors = ProcessorStates.alloc(ROWS + 1, VOCAB, DEVICE)
    runner = PromptRunner.of(run.setup, buckets=(16,))
    runner.capture(Level.PROCESSED, processors=processors)
    new = NewPrompt(Prompt(run.row(5), [3, 1, 4, 1, 5]), SamplingParams(), Level.PROCESSED)
    (first,) = runner.run([new])
    assert first.wait() >= 0
    target, draft = run.setup.slots
    moved = {
        "table": run.setup.table.req_to_token,
        "states": run.setup.states.seq_lens,
        "target": target.pool.k,
        "draft": draft.pool.v,
        "processors": processors.history,
    }[what]
    kept = moved.view(moved.shape)  # a graph that does replay writes to it
    moved.set_(moved.clone())
    with pytest.raises(CaptureMismatch, match="changed since capture"):
        runner.run([new])
    moved.set_(kept)
    (again,) = runner.run([new])
    assert again.wait() == first.wait()


def test_logits_that_are_not_finite_give_no_token():
    run, runner = with_("head", (24,))
    run.setup.target.model.head.weight[5] = torch.nan
    row = run.row(3)
    (first,) = runner.run([NewPrompt(Prompt(row, [3, 1, 4]), SamplingParams())])
    assert first.wait() == -1
    assert run.setup.states.bonus_tokens[row] == 0


def test_more_chunks_than_may_be_in_flight_wait_for_the_first():
    run, runner = with_("plain", (2,))
    runner.chunk = 2
    prompts = [[at, at + 1, at + 2] for at in range(ROWS)]
    rows = [run.row(3) for _ in prompts]
    for _ in range(2):
        firsts = runner.run(
            [
                NewPrompt(Prompt(row, text), SamplingParams())
                for row, text in zip(rows, prompts, strict=True)
            ]
        )
        found = [one.wait() for one in firsts]
        assert found == [t for t, _ in alone("plain", prompts, [SamplingParams()] * ROWS)]


@pytest.mark.parametrize(
    ("chunk", "sizes"),
    [(4, [4] * 6), (16, [16, 4, 4]), (24, [24])],
    ids=["no more than a bucket", "some", "all at once"],
)
def test_what_lacks_much_runs_eagerly_in_large_chunks(chunk, sizes, monkeypatch):
    """There arithmetic rules; but never beyond what may run at once."""
    run, found = Run("plain"), []
    runner = PromptRunner.of(run.setup, buckets=(4,), chunk=chunk)
    launch = runner._launch

    def noted(prompts, pieces):
        found.append(sum(piece.places for piece in pieces))
        return launch(prompts, pieces)

    monkeypatch.setattr(runner, "_launch", noted)
    prompts = [*texts(3, 1, 1), [3] * 23]
    news = [NewPrompt(Prompt(run.row(len(one)), one), SamplingParams()) for one in prompts]
    firsts = [one.wait() for one in runner.run(news)]
    assert firsts == [token for token, _ in alone("plain", prompts, params(1) * 2)]
    assert found == sizes
    captured = sum(size <= 4 for size in sizes)
    assert runner.targets.stats.replays.total() == 2 * captured


def test_chunks_hold_what_they_may():
    """Every token comes once and in order, and the place behind a prompt with its last token."""
    rng = random.Random(0)
    for _ in range(300):
        ahead = rng.random() < 0.5
        lens = [rng.randint(1, 30) for _ in range(rng.randint(1, 12))]
        starts = [rng.randrange(length) for length in lens]
        left = deque(
            Piece(at, start, length, int(ahead and rng.random() < 0.9))
            for at, (start, length) in enumerate(zip(starts, lens, strict=True))
        )
        whole, found = list(left), []
        size, count = rng.randint(2, 40), rng.randint(1, 8)
        while left:
            pieces = _cut(left, size, count)
            assert 1 <= len(pieces) <= count
            assert sum(piece.places for piece in pieces) <= size
            found += pieces
        for one in whole:
            own = [piece for piece in found if piece.prompt == one.prompt]
            assert [own[0].start, own[-1].stop] == [one.start, one.stop]
            assert all(a.stop == b.start for a, b in pairwise(own))
            assert all(piece.start < piece.stop for piece in own)
            assert [piece.ahead for piece in own] == [0] * (len(own) - 1) + [one.ahead]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 1}, "prompt_chunk must be at least 2, got 1"),
        ({"buckets": [64, 1]}, "every one of prompt_buckets must be at least 2, got 1"),
        ({"buckets": 64}, "prompt_buckets must be a sequence of token counts"),
    ],
)
def test_what_is_no_size_of_a_chunk_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PromptRunner.of(setup_of("plain"), **options)


def test_who_has_a_prompt_of_its_own_is_asked_by_it():
    class Own(LookupProposer):
        def prompt(self, chunk):
            return super().prompt(chunk)

    class Both(Own):
        def bind_prompt(self, chunk):
            return super().bind_prompt(chunk)

    class Nothing(Proposer):
        def bind(self, step):
            raise NotImplementedError

    class Alone(Nothing):
        def prompt(self, chunk):
            return {}

    kinds = (LookupProposer, Own, Both, Nothing, Alone)
    assert [binds_prompts(kind()) for kind in kinds] == [True, False, True, True, False]
    assert type(Nothing().bind_prompt(None)) is BoundPrompt
    setup = replace(setup_of("lookup"), proposer=Own())
    assert PromptRunner.of(setup) is None
    assert PromptRunner.of(replace(setup, proposer=Both())) is not None
