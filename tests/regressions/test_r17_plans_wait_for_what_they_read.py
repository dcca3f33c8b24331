"""R17: sglang#28034, sglang#22113, sglang#37980, sglang#17033.

A plan stream read masks, positions and lengths before the draft had written them, and verify
prepared slots that the draft still read: illegal accesses, or less acceptance, under load.

There is no second stream. What the host plans follows from lengths that it has, so that later
parts may be planned while earlier ones run; what follows from the tree is filled after the tree, in
the same order recorded as eagerly. All phases read one window of slots, which is written once. A
host that runs ahead of its stream, with joins and slots on their way, changes no token.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from specattn.backends import BoundAttention, available
from specattn.backends.torch_native import TorchNativeBackend
from specattn.cache.slot_table import SlotTable
from specattn.config import AttnConfig, SpecConfig
from specattn.cuda_graph import GraphRunner
from specattn.engine.engine import Engine, Request
from specattn.plan import AttnPlan
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.level import Level
from tests.backends import fake_flashinfer as fake
from tests.books import check_books
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9]]
TREES = {"chain": (3, 1, 4), "tree": (3, 3, 7)}
POISON = -7777
BF16 = torch.bfloat16


def engine(tree, backend, *, dtype=torch.float32, **options) -> Engine:
    """An engine with running requests, which have slots for whole contexts."""
    config = SpecConfig(*tree, 96, 4)
    models = TinyTarget(device=DEVICE, dtype=dtype), TinyDraft(device=DEVICE, dtype=dtype)
    run = Engine(*models, config, backend=backend, buckets=[4], **options)
    run.add([Request(prompt, 60) for prompt in PROMPTS])
    run.table.reserve(rows_of(run), [config.max_context_len] * len(PROMPTS))
    return run


def rows_of(run: Engine) -> list[int]:
    return [live.row for live in run.running]


def poison(run: Engine) -> None:
    """Spoil whatever a step is to write before it is read."""
    (launch,) = run.decoder(run.config)._launches.values()
    (step,) = launch.steps
    # rows are written last by who launches
    kept = {"req_pool_indices", "seq_lens", "window"}
    tensors = [tensor for name, tensor in step.buffers.tensors().items() if name not in kept]
    tensors += step.bound.gathers.values()
    # the words of the first draft step never change: every node sees itself
    drafts = step.bound.multi_step.inputs
    tensors += [drafts.positions, drafts.words[:, 1:], step.buffers.seq_lens, step.buffers.window]
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)


class Watchful(TorchNativeBackend):
    """Attends, and looks at what its plans hold: when filled, when run, and after the step."""

    name = "watchful"
    bounds: list[BoundWatch]

    def bind(self, plan):
        inner = super().bind(plan)
        if not isinstance(plan, AttnPlan):
            return inner
        self.bounds.append(BoundWatch(inner, plan))
        return self.bounds[-1]


class BoundWatch(BoundAttention):
    def __init__(self, inner, plan: AttnPlan) -> None:
        self.inner, self.plan = inner, plan
        self.filled: dict[str, Tensor] = {}
        self.ran: dict[str, Tensor] = {}
        # draft steps after the first find their ancestors when they run
        self.late = {"tail_words"} if plan.layout.tail > plan.layout.q_len else set()

    def read(self) -> dict[str, Tensor]:
        found = {item.name: getattr(self.plan, item.name) for item in fields(self.plan)}
        return {
            name: value.clone()
            for name, value in found.items()
            if isinstance(value, Tensor) and name != "req_to_token"
        }

    def fill(self) -> None:
        self.filled = self.read()
        for name, value in self.filled.items():
            assert name in self.late or not (value == POISON).any(), f"{name} is filled too early"
        self.inner.fill()

    def run(self, *arguments) -> None:
        self.ran = self.read()
        for name, value in self.ran.items():
            assert not (value == POISON).any(), f"{name} is read too early"
            assert name in self.late or torch.equal(value, self.filled[name]), name
        self.inner.run(*arguments)


@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_nothing_is_filled_or_read_before_it_is_written(tree, cudagraph):
    Watchful.bounds = []
    run, calm = engine(tree, Watchful, cudagraph=cudagraph), engine(tree, "torch_native")
    rows, depth = rows_of(run), tree[0]
    for part in (rows, rows[::-1][:2], rows):
        for bound in Watchful.bounds:
            bound.filled, bound.ran = {}, {}
        poison(run)
        assert run.decoder(run.config).step(part) == calm.decoder(calm.config).step(part)
        ran = [bound for bound in Watchful.bounds if bound.ran]
        assert len(ran) == depth + 1, "the drafts, the target and the extend"
        for bound in ran:
            after = bound.read()
            for name, value in bound.ran.items():
                assert torch.equal(value, after[name]), f"{name} was written twice"
        # one window of slots, for the largest forward
        slots = [bound.ran["tail_slots"] for bound in ran]
        widest = max(slots, key=lambda tail: tail.shape[1])
        for tail in slots:
            assert torch.equal(tail, widest[:, : tail.shape[1]])


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_all_parts_may_be_planned_before_the_first_has_run(monkeypatch, tree):
    """Plans come from the host's lengths: nothing that they could read is there yet."""
    fake.install(monkeypatch)
    early, calm = (engine(tree, "flashinfer", dtype=BF16) for _ in range(2))
    decoder, rows = early.decoder(early.config), rows_of(early)
    assert decoder.cudagraph == "piecewise"
    lens = torch.tensor([live.length for live in early.running], dtype=torch.int32)
    for _ in range(2):
        parts = decoder.parts[Level.GREEDY]
        ready = decoder.runner.ready(parts, len(rows))
        poison(early)
        for one in ready:
            one.schedule(lens)
        decoder._in_flight.write_rows(rows, ready[0].bucket)
        for part, one in zip(parts, ready, strict=True):
            decoder.runner.replay(part, one)
        gained = decoder._in_flight.launched(len(rows), tuple(rows)).wait()
        assert gained == calm.decoder(calm.config).step(rows, seq_lens_cpu=lens)
        lens += torch.tensor([len(tokens) for tokens in gained], dtype=torch.int32)


def decode(run: Engine, joins: list[Request], *, ahead: bool) -> list[tuple[list[int], list[int]]]:
    """Decode to the end, with a request that joins after every other step."""
    results, waiting, at = [live.result for live in run.running], list(joins), 0
    while run.num_running or waiting:
        if waiting and run.num_running < 4 and at % 2:
            results += run.add([waiting.pop(0)])
        run.step(ahead=ahead)
        at += 1
    run.clear()
    check_books(run.table)
    return [(result.tokens, result.accept_lens) for result in results]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_a_host_that_runs_ahead_changes_nothing(backend, monkeypatch):
    """On a stream of its own, slowed down; slots for every step are sent while another one runs."""
    dtype = torch.float32 if backend == "triton" else BF16
    reasons = available(backend, AttnConfig(4, 2, 64, dtype=dtype), DEVICE)
    if reasons:
        pytest.skip("; ".join(reasons))
    monkeypatch.setattr(SlotTable, "_AHEAD", 0)
    joins = [Request(prompt, 40) for prompt in ([9, 9], [5, 4, 3, 2, 1], [17])]

    def made() -> Engine:
        config = SpecConfig(3, 3, 7, 96, 4)
        models = TinyTarget(device=DEVICE, dtype=dtype), TinyDraft(device=DEVICE, dtype=dtype)
        run = Engine(*models, config, backend=backend, buckets=[4])
        run.add([Request(prompt, 30 + 9 * at) for at, prompt in enumerate(PROMPTS)])
        return run

    calm = decode(made(), joins, ahead=False)
    racing, replay, launch, done = made(), GraphRunner.replay, StepDecoder.step_async, []

    def slow(runner, mode, ready):
        torch.cuda._sleep(4_000_000)
        return replay(runner, mode, ready)

    def watched(decoder, *arguments, **named):
        pending = launch(decoder, *arguments, **named)
        done.append(pending.ready)
        return pending

    monkeypatch.setattr(GraphRunner, "replay", slow)
    monkeypatch.setattr(StepDecoder, "step_async", watched)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = decode(racing, joins, ahead=True)
    assert not all(done), f"the host never ran ahead of any of {len(done)} steps"
    assert found == calm
    if backend == "triton":
        prompts = [*PROMPTS, *(request.prompt for request in joins)]
        for (tokens, _), prompt in zip(found, prompts, strict=True):
            assert tokens == dense_greedy(racing.target.model, prompt, len(tokens))
