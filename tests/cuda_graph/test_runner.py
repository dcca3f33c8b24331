"""Replay equals eager, padding is invisible, and misuse is an error with a name.

The same tests run over CUDA graphs on a GPU and over the eager runner elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specattn.backends import available
from specattn.batch import ForwardMode
from specattn.config import SpecConfig
from specattn.cuda_graph import GraphRunner
from specattn.cuda_graph.recorder import Recorder
from specattn.errors import CapacityError, CaptureMismatch, NotCapturedError
from tests.recordings import forget
from tests.worlds import CONFIG, DEVICE, MODES, identical, inputs, part_of, same, world

BACKENDS = ["triton"] if DEVICE.type == "cuda" else ["torch_native"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    assert not available(request.param, None, DEVICE)
    return request.param


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_padding_growth_shrinkage_and_new_trees_are_invisible(backend, mode):
    """One world pads into buckets of 8 and replays; the other has a bucket per batch size.

    R04, R05, R08, R20, R21: whatever an earlier, larger batch left behind is not seen.
    """
    padded, exact = world(backend, [5, 8]), world(backend, [1, 2, 3, 4, 5, 6, 7, 8])
    rng = random.Random(11)
    for seed in range(8):
        size = [8, 1, 5, 3, 7, 2, 8, 6][seed]
        lens = [rng.choice([0, 1, 3, 4, 5, 17, 63, 64, 65, 200, 244]) for _ in range(size)]
        values = inputs(mode, lens, seed)
        for one in (padded, exact):
            one.poison(lens)
        same(padded.run(mode, lens, values), exact.run(mode, lens, values))
    assert padded.decoder.runner.stats.replays[part_of(mode)] == 8
    assert not padded.decoder.runner.stats.eager


def test_interleaved_buckets_and_modes_do_not_disturb_each_other(backend):
    """R28: capture order and bucket order do not matter."""
    mixed = world(backend, [1, 2, 4, 8])
    rng = random.Random(5)
    for seed in range(9):
        mode = rng.choice(MODES)
        lens = [rng.randrange(240) for _ in range(rng.randrange(1, 9))]
        values = inputs(mode, lens, seed)
        alone = world(backend, [len(lens)])
        for one in (mixed, alone):
            one.poison(lens)
        same(mixed.run(mode, lens, values), alone.run(mode, lens, values))


def test_replay_equals_eager_bitwise(backend):
    """The same bucket size, recorded and not: the same bits."""
    recorded = world(backend, [4])
    lens = [5, 0, 130, 64]
    for mode in MODES:
        values, found = inputs(mode, lens, 1), []
        for eager in (False, True):
            recorded.poison(lens)
            found.append(recorded.run(mode, lens, values, eager=eager))
        identical(*found)


def test_a_tree_equals_each_of_its_paths(backend):
    """Verify one random tree, then every root-to-node path as a chain of its own."""
    lens = [37]
    tree = world(backend, [1])
    values = inputs(ForwardMode.TARGET_VERIFY, lens, 2)
    tree.poison(lens)
    whole = tree.run(ForwardMode.TARGET_VERIFY, lens, values)["logits"][0]
    for node in range(CONFIG.num_draft_tokens):
        word = int(values["words"][0, node])
        path = [j for j in range(CONFIG.num_draft_tokens) if word >> j & 1]
        chain = world(backend, [1], SpecConfig(4, 3, max(len(path), 2), 256, 8, 4))
        width = max(len(path), 2)
        ids = (path + path)[:width]
        chain.poison(lens)
        alone = chain.run(
            ForwardMode.TARGET_VERIFY,
            lens,
            {
                "tokens": values["tokens"][:, ids],
                "tree_positions": 37 + torch.arange(width, device=DEVICE)[None],
                "words": torch.tensor([[[(2 << i) - 1] for i in range(width)]], device=DEVICE),
            },
        )["logits"][0]
        torch.testing.assert_close(whole[node], alone[len(path) - 1], rtol=1e-4, atol=1e-4)


def test_a_batch_above_the_largest_bucket_runs_eagerly_and_is_counted(backend):
    small, large = world(backend, [2]), world(backend, [8])
    lens = [9, 100, 3, 55, 0]
    for mode in MODES:
        values = inputs(mode, lens, 4)
        for one in (small, large):
            one.poison(lens)
        same(small.run(mode, lens, values), large.run(mode, lens, values))
        assert small.decoder.runner.stats.eager[part_of(mode)] == 1
        assert not small.decoder.runner.stats.replays[part_of(mode)]


def test_a_mode_that_was_never_captured_is_refused(backend):
    """R24: the key has the mode in it; a width that happens to fit is no reason to replay."""
    one = world(backend, [1])
    with pytest.raises(NotCapturedError, match=r"'decode' was never captured \(captured: draft_"):
        one.decoder.runner.ready((part_of(ForwardMode.DECODE),), 1)


def test_a_moved_table_is_a_capture_mismatch_that_names_it(backend):
    """R09, R49: replaying over other memory than was captured is an error, not an answer."""
    one = world(backend, [2])
    states = one.decoder.states
    object.__setattr__(states, "seq_lens", states.seq_lens.clone())
    with pytest.raises(CaptureMismatch, match=r"states\.seq_lens changed since capture"):
        one.run(ForwardMode.TARGET_VERIFY, [4], inputs(ForwardMode.TARGET_VERIFY, [4], 0))


@pytest.mark.parametrize("name", ["sm_scale", "window_left", "logit_cap"])
def test_a_layers_config_is_what_was_captured(backend, name):
    """A recorded graph has the layers' numbers in it; nobody can replace them but by force."""
    one, lens = world(backend, [2]), [4]
    layer = one.step(ForwardMode.TARGET_VERIFY, 2).verify_attention.layers[-1].backend
    with pytest.raises(AttributeError, match=r"config is read-only"):
        layer.config = replace(layer.config, **{name: 3})
    (captured,) = one.decoder.runner.ready((part_of(ForwardMode.TARGET_VERIFY),), 1)
    captured.compare()
    old = getattr(layer.config, name)
    object.__setattr__(layer.config, name, 0.5)
    with pytest.raises(CaptureMismatch, match=rf"AttnConfig\[\d\]\.{name} changed .* {old}, got"):
        captured.compare()
    object.__setattr__(layer.config, name, old)
    one.poison(lens)
    one.run(ForwardMode.TARGET_VERIFY, lens, inputs(ForwardMode.TARGET_VERIFY, lens, 0))


def test_running_out_of_memory_at_capture_names_the_bucket_and_leaves_eager_usable(backend):
    one, fed, verify = world(backend, [1]), [], part_of(ForwardMode.TARGET_VERIFY)
    make = one.decoder._launch_of

    def hungry(part, batch):
        if batch == 2 and not fed:
            raise torch.OutOfMemoryError("no more")
        return make(part, batch)

    runner = GraphRunner(hungry, [1, 2, 4], DEVICE)
    with pytest.raises(CapacityError, match=r"target_verify for a batch of 2; .*\[4\]"):
        runner.capture(verify)
    assert runner.captured(verify) == [4]
    lens = [7, 30]
    values = inputs(ForwardMode.TARGET_VERIFY, lens, 0)
    vars(one.decoder)["runner"] = runner
    one.poison(lens)
    got = one.run(ForwardMode.TARGET_VERIFY, lens, values)  # served by the bucket of 4
    fed.append(True)
    forget(runner, verify)
    one.poison(lens)
    same(got, one.run(ForwardMode.TARGET_VERIFY, lens, values))
    assert runner.stats.eager[verify] == 1


def test_buckets_are_batch_sizes():
    with pytest.raises(ValueError, match="buckets"):
        GraphRunner(lambda mode, size: None, [0, 2], DEVICE)


def test_collection_is_off_only_while_recording():
    """A graph in a reference cycle is destroyed by a collection, which would end a capture."""
    import gc

    from specattn.cuda_graph.recorder import no_collection

    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_captures_are_reported_in_their_order(backend):
    one = world(backend, [1, 5, 8])
    reports = one.decoder.runner.reports()
    assert [report.order for report in reports] == list(range(9))
    assert [report.bucket for report in reports] == [8, 5, 1] * 3
    assert {report.part for report in reports} == {mode.value for mode in MODES}
    assert len({report.digest for report in reports}) == 9
    for report in reports:
        assert report.seconds > 0
        assert report.recorded == (DEVICE.type == "cuda")
        assert len(report.digest) == 12
        assert report.nbytes >= 0
    assert bool(sum(report.nbytes for report in reports)) == (DEVICE.type == "cuda")
    assert one.decoder.runner.reports() == reports
    verify = part_of(MODES[0])
    one.decoder.runner.capture(verify)
    again = one.decoder.runner.reports()
    assert [report.order for report in again if report.part == verify.value] == [9, 10, 11]
    kept = [report for report in reports if report.part != verify.value]
    assert list(again[:6]) == kept
    # the same buffers at the same places
    assert {report.digest for report in again} == {report.digest for report in reports}


@pytest.mark.gpu
def test_a_pool_warms_up_twice_once_and_on_one_stream():
    recorder, streams = Recorder(), []
    x = torch.ones(64, 64, device=DEVICE)

    def step():
        streams.append(torch.cuda.current_stream())
        return x @ x

    found = [recorder.record(step) for _ in range(3)]
    warm = [stream for at, stream in enumerate(streams) if at not in (2, 4, 6)]
    assert len(streams) == 7
    assert len({stream.cuda_stream for stream in warm}) == 1
    assert found[0].nbytes > 0
    for one in found:
        one.outputs.zero_()
        one.graph.replay()
        assert bool((one.outputs == 64).all())


def test_a_device_that_is_not_the_current_one_is_refused(monkeypatch):
    """Kernels are launched on the current device, wherever their tensors are."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.raises(ValueError, match=r"cuda:1 must be the current device, which is cuda:3"):
        GraphRunner(lambda mode, size: None, [2], torch.device("cuda:1"), record=False)
    for device in ("cuda:3", "cuda", "cpu"):
        GraphRunner(lambda mode, size: None, [2], torch.device(device), record=False)
