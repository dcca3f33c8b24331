"""Steps in two halves: what requests gain is the same, and recorded halves do not wait."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specattn.attention.layers import LayeredBackend
from specattn.batch import ForwardMode
from specattn.cache.kv_pool import KVPool
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import CaptureError, CaptureMismatch
from specattn.plan import AttnInputs, AttnPlan
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step.decoder import StepDecoder
from tests.backends.spies import spy
from tests.books import check_books
from tests.cuda_graph.test_capture_failures import FAULTS, Breaking
from tests.recordings import forget
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9], [32, 38, 4], [6]]
SETTINGS = {
    "plain": ((0, 1, 1), False),
    "chain": ((3, 1, 4), False),
    "tree": ((3, 4, 9), False),
    "drawn drafts": ((3, 1, 4), True),
}
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=7)
CUDA = DEVICE.type == "cuda"


def engine(
    tree,
    backend="torch_native",
    buckets=(1, 2, 5),
    context=96,
    target=TinyTarget,
    sampling=False,
    **options,
) -> Engine:
    config = SpecConfig(*tree, context, 5, 1, sampling)
    models = target(device=DEVICE), TinyDraft(device=DEVICE)
    return Engine(*models, config, backend=backend, buckets=buckets, **options)


def admitted(*runs: Engine, drawn: bool = False) -> list[int]:
    """Run prompts, every other one drawn, and reserve whole contexts; returns all runs' rows."""
    requests = [
        Request(prompt, 80, sampling=DRAWN if drawn and at % 2 else SamplingParams())
        for at, prompt in enumerate(PROMPTS)
    ]
    found = set()
    for run in runs:
        run.add(requests)
        rows = [live.row for live in run.running]
        run.table.reserve(rows, [run.config.max_context_len] * len(rows))
        found.add(tuple(rows))
    (rows,) = map(list, found)
    return rows


def left(run: Engine) -> dict[str, Tensor]:
    """What steps leave, but for the page of padding."""
    found = dict(run.states.tensors())
    for name, slot in (("target", run.target), ("draft", run.draft)):
        if slot is not None:
            found |= {f"{name}.k": slot.pool.k[:, 1:], f"{name}.v": slot.pool.v[:, 1:]}
    return found


def batches(rows: list[int], count: int, seed: int = 5):
    """Batches that grow, shrink and change their order; one row of some has no slots."""
    rng = random.Random(seed)
    for _ in range(count):
        part = rng.sample(rows, rng.randint(1, 5))
        yield part, rng.choice([None, None, *part])


def stepped(run: Engine, part: list[int], stalled: int | None, **how) -> list[list[int]]:
    """Step with the slots of ``stalled`` taken away."""
    if stalled is None:
        return run.decoder(run.config).step(part, **how)
    room = run.table.reserved[stalled].clone()
    run.table.reserved[stalled] = 0
    gained = run.decoder(run.config).step(part, **how)
    run.table.reserved[stalled] = room
    return gained


@pytest.mark.parametrize(
    ("setting", "drawn", "cudagraph"),
    [
        ("plain", False, "full"),
        ("chain", True, "full"),
        ("tree", False, "full"),
        ("tree", True, "piecewise"),
        ("drawn drafts", True, "full"),
    ],
)
def test_a_split_step_is_an_unsplit_one(setting, drawn, cudagraph):
    """The same tokens, and bit for bit what plain steps of its halves give, in any order."""
    tree, sampling = SETTINGS[setting]
    whole, split, parts = (
        engine(tree, sampling=sampling, **options)
        for options in ({}, {"tbo": True, "cudagraph": cudagraph}, {"buckets": (1, 2, 3)})
    )
    rows = admitted(whole, split, parts, drawn=drawn)
    for part, stalled in [*batches(rows, 12), ([], None)]:
        gained = stepped(split, part, stalled, sampled=drawn)
        assert gained == stepped(whole, part, stalled, sampled=drawn)
        bucket = 5 if len(part) > 2 else max(len(part), 1)
        padded = [*part, *[0] * (bucket - len(part))]
        halves = [padded[bucket // 2 :]] + ([padded[: bucket // 2]] if bucket > 1 else [])
        for half in halves:
            stepped(parts, half, stalled, sampled=drawn)
        others = left(whole)
        for (name, value), wanted in zip(left(split).items(), left(parts).values(), strict=True):
            # libraries of a GPU promise no bits
            assert CUDA or torch.equal(value, wanted), name
            torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(value, others[name], rtol=1e-3, atol=1e-3)
    assert not split.decoder(split.config).runner.stats.eager


def test_a_batch_that_no_bucket_holds_is_split_too():
    runs = [engine((3, 4, 9), buckets=(2,), tbo=tbo) for tbo in (False, True)]
    rows = admitted(*runs)
    for _ in range(3):
        whole, split = (run.decoder(run.config).step(rows) for run in runs)
        assert split == whole
    assert sum(runs[1].decoder(runs[1].config).runner.stats.eager.values()) == 3


class Counted:
    """Counts the forwards of a kind of model, and lets one of them fail."""

    def __init__(self, kind, monkeypatch):
        self.count, self.fails, forward = 0, None, kind.forward

        def counted(model, *args, **options):
            self.count += 1
            if self.count == self.fails:
                raise KeyError("a forward failed")
            return forward(model, *args, **options)

        monkeypatch.setattr(kind, "forward", counted)


@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
@pytest.mark.parametrize("kind", [TinyTarget, TinyDraft])
def test_no_request_advances_where_the_second_half_fails(kind, cudagraph, monkeypatch):
    """Outside a recording, where the halves run one after the other."""
    counted = Counted(kind, monkeypatch)
    run = engine((3, 4, 9), tbo=True, cudagraph=cudagraph, graphs=False)
    rows, decoder = admitted(run), run.decoder(run.config)
    texts = [list(live.result.tokens) for live in run.running]
    began, gained = counted.count, [decoder.step(rows)]
    forwards = counted.count - began
    before = {name: value.clone() for name, value in run.states.tensors().items()}
    counted.fails = counted.count + forwards
    with pytest.raises(KeyError, match="a forward failed"):
        decoder.step(rows)
    for name, value in run.states.tensors().items():
        assert torch.equal(value, before[name]), name
    gained += [decoder.step(rows) for _ in range(2)]
    for prompt, text, news in zip(PROMPTS, texts, zip(*gained, strict=True), strict=True):
        for new in news:
            assert new
            text += new
        assert text == dense_greedy(run.target.model, prompt, len(text))


def test_an_engine_of_halves_decodes_as_one():
    """Requests that join, end, and come to the end of their context, a step ahead."""
    run = engine((3, 4, 9), context=48, tbo=True)
    new, results = [12, 80, 5, 23, 99], []
    waiting = [Request(p, n) for p, n in zip(PROMPTS, new, strict=True)]
    while run.num_running or waiting:
        if waiting and run.num_running < 4:
            results += run.add([waiting.pop(0)])
        run.step(ahead=True)
    run.clear()
    check_books(run.table)
    for result, prompt, count in zip(results, PROMPTS, new, strict=True):
        assert result.finish_reason == ("length" if count < 60 else "context")
        assert result.tokens == dense_greedy(run.target.model, prompt, len(result.tokens))


@pytest.mark.parametrize("bucket", [1, 2, 5])
def test_halves_are_the_requests_of_the_bucket(bucket):
    run = engine((3, 4, 9), buckets=(5,), tbo=True)
    (part,) = run.decoder(run.config).modes
    launch = run.decoder(run.config)._launch_of(part, bucket)
    halves = launch.steps
    assert [half.host.rows.shape[1] for half in halves] == [
        size for size in (bucket // 2, bucket - bucket // 2) if size
    ]
    packed = launch.packed, [half.packed for half in halves]
    turns = [
        (rows, [half.host.rows[entry] for half in halves])
        for entry, rows in enumerate(launch.host.rows)
    ]
    for whole, views in (packed, *turns):
        assert torch.cat(views).shape == whole.shape
        at = whole.data_ptr()
        for view in views:
            assert view.data_ptr() == at
            at += view.numel() * view.element_size()
    for half in halves:
        assert len(half.attention(ForwardMode.DRAFT_DECODE)) == 2
        assert half.attention(None)[2] is half.attention(ForwardMode.TARGET_VERIFY)[0]


def test_attention_made_apart_shares_no_buffers():
    """Also not where a layer is the same: what is bound may run at the same time."""
    layers, layout = TinyTarget().layers, SpecConfig(3, 4, 9).layout(ForwardMode.TARGET_VERIFY)
    pool = KVPool(layers, 16, DEVICE)
    one = LayeredBackend("triton", layers, pool, DEVICE)
    other = one.with_own_workspace()
    assert (other.name, other.pool, other.host_plan) == (one.name, pool, one.host_plan)
    table = torch.zeros(4, 64, dtype=torch.int32, device=DEVICE)
    written = []
    for backend in (one, other):
        bounds = backend.bind(AttnPlan.over(layout, table, AttnInputs.alloc(3, layout, DEVICE)))
        buffers = [
            tensor
            for bound in bounds.bounds
            for tensor in (
                *vars(bound.kernel.tables).values(),
                *bound.kernel.workspace,
            )
            if isinstance(tensor, Tensor) and tensor.numel()
        ]
        written.append({tensor.untyped_storage().data_ptr() for tensor in buffers})
    assert not written[0] & written[1]


def test_halves_are_planned_from_their_own_lengths():
    planned = spy("planned", host_plan=True)
    run = engine((3, 1, 4), backend=planned, buckets=(5,), tbo=True)
    assert run.decoder(run.config).cudagraph == "piecewise"
    rows = admitted(run)
    planned.scheduled.clear()
    lens = torch.tensor([11, 12, 13, 14], dtype=torch.int32)
    run.decoder(run.config).step(rows[:4], seq_lens_cpu=lens)
    # two draft steps, the target's two layers (of one kind), and the extend
    assert planned.scheduled == [[11, 12]] * 2 + [[13, 14, 0]] * 2 + [[11, 12], [13, 14, 0]] * 2


def test_what_does_not_go_together_is_refused():
    run = engine((3, 1, 4), tbo=True)
    rows, decoder = admitted(run), run.decoder(run.config)
    with pytest.raises(ValueError, match="which tbo splits"):
        StepDecoder(
            run.target,
            run.draft,
            run.config,
            run.table,
            run.states,
            cudagraph="piecewise",
            validate="debug",
            tbo=True,
        )
    with pytest.raises(AttributeError, match=r"StepDecoder\.options is read-only"):
        decoder.options = replace(decoder.options, tbo=False)
    cache = run.target.pool.k
    before = cache.data
    cache.data = before.clone()
    with pytest.raises(CaptureMismatch, match="k_cache changed since capture"):
        decoder.step(rows)
    cache.data = before
    assert all(decoder.step(rows))


@pytest.mark.parametrize("name", ["throw", "wait"] if CUDA else ["throw"])
def test_a_half_that_cannot_be_recorded_leaves_a_decoder_usable(name, monkeypatch):
    """The second half, which a GPU records on a stream of its own."""
    split, whole = (engine((3, 4, 9), Breaking, buckets=(5,), tbo=tbo) for tbo in (True, False))
    rows = admitted(split, whole)
    decoder, (fault, message) = split.decoder(split.config), FAULTS[name]
    (part,) = decoder.modes

    def same() -> None:
        assert decoder.step(rows) == whole.decoder(whole.config).step(rows)

    second = 3 * split.config.num_draft_tokens
    with monkeypatch.context() as patch:
        patch.setattr(Breaking, "fault", lambda q: fault(q) if len(q) == second else None)
        for _ in range(2):
            with pytest.raises(CaptureError, match=f"^capturing step .* 5 failed: {message}"):
                decoder.runner.capture(part)
    same()
    forget(decoder.runner, part)
    same()
    assert decoder.runner.stats.eager[part] == 1
    decoder.runner.capture(part)
    assert decoder.runner.recorded(part) == CUDA
    same()


class Watched(TinyTarget):
    """Notes the stream of every forward that is recorded, and takes its time on the device."""

    cycles = 0

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.streams: list[tuple[int, int]] = []

    def forward(self, input_ids, positions, attend, rows=None):
        if torch.cuda.is_current_stream_capturing():
            self.streams.append((torch.cuda.current_stream().cuda_stream, len(input_ids)))
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        return super().forward(input_ids, positions, attend, rows)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tree", "sampling"), [SETTINGS["tree"], SETTINGS["drawn drafts"]], ids=["tree", "drawn drafts"]
)
def test_recorded_halves_gain_what_an_unsplit_step_does(tree, sampling):
    """Fifty replays of changing batches, greedy and drawn, with rows that have no slots."""
    how = {"context": 320, "sampling": sampling, "target": Watched, "prompt_buckets": ()}
    whole, split = (engine(tree, "triton", tbo=tbo, **how) for tbo in (False, True))
    rows = admitted(whole, split, drawn=True)
    for at, (part, stalled) in enumerate(batches(rows, 50)):
        gained, wanted = (stepped(run, part, stalled, sampled=True) for run in (split, whole))
        assert gained == wanted, f"step {at} of rows {part}, without slots for {stalled}"
    for name, value in left(split).items():
        torch.testing.assert_close(value, left(whole)[name], rtol=1e-3, atol=1e-3)
    runner = split.decoder(split.config).runner
    assert all(runner.recorded(part) for part in runner._captured)
    assert not runner.stats.eager
    streams = split.target.model.streams
    nodes = split.config.num_draft_tokens
    # for each of greedy and drawn steps: buckets of 5 and 2 in halves, and of 1
    assert sorted(rows // nodes for _, rows in streams) == sorted([2, 3, 1, 1, 1] * 2)
    assert len({stream for stream, _ in streams}) == 2
    assert len({stream for stream, _ in whole.target.model.streams}) == 1


@pytest.mark.gpu
def test_recorded_halves_run_at_the_same_time():
    """A target that sleeps: one half's sleep is the other's."""
    cycles, spent = 20_000_000, []
    for tbo in (False, True):
        run = engine((0, 1, 1), "triton", buckets=(2,), target=Watched, graphs=False)
        run.target.model.cycles = cycles
        decoder = StepDecoder(
            run.target, None, run.config, run.table, run.states, buckets=(2,), tbo=tbo
        )
        rows = admitted(run)[:2]
        times = []
        # the shortest: others may hold host or device up
        for _ in range(10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            decoder.step_async(rows).wait()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        spent.append(min(times))
    assert spent[1] < 1.5 * spent[0], f"a step takes {spent[0]:.2f} ms, in halves {spent[1]:.2f} ms"
