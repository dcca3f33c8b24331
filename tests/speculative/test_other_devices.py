"""Steps on a CUDA device that is not the first, also from threads whose current one is another."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from typer.testing import CliRunner

from specattn.cli.app import app
from specattn.config import SpecConfig
from specattn.cuda_graph.recorder import Recorder
from specattn.engine.engine import Engine, Request
from specattn.kernels import uses_triton
from tests.books import check_books
from tests.speculative.stepping import PROMPTS, admitted
from tests.tiny import TinyDraft, TinyTarget, dense_greedy

SECOND = torch.device("cuda", 1)

two_devices = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture
def second():
    number = torch.zeros(1, device="cuda:0")
    # torch's stream for recordings is of the device that is recorded on first
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        number.add_(1)
    Recorder().record(number.clone)
    torch.cuda.set_device(SECOND)
    yield SECOND
    torch.cuda.set_device(0)


def elsewhere(work, *args):
    """Run in a thread whose current device is the first, as it is in any new one."""

    def called():
        assert torch.cuda.current_device() == 0
        return work(*args)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(called).result()


def engine(device, **options) -> Engine:
    config = SpecConfig(3, 4, 9, 96, 5)
    models = TinyTarget(device=device), TinyDraft(device=device)
    return Engine(*models, config, backend="triton", buckets=(2, 5), **options)


def test_kernels_are_not_launched_on_another_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.raises(ValueError, match=r"cuda:1 must be the current device, which is cuda:3"):
        uses_triton(SECOND)


class TestTwoDevices:
    pytestmark = two_devices

    def test_the_command_runs_on_the_one_it_is_given(self, second):
        torch.cuda.set_device(0)
        gc.collect()  # what other tests have left would be given back in between
        held = torch.cuda.memory_allocated(0)
        result = CliRunner().invoke(
            app,
            [
                "generate",
                "def add(a, b):",
                "--device",
                "cuda:1",
                "--dtype",
                "float32",
                "--max-new-tokens",
                "40",
                "--compare",
                "--json",
            ],
        )
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["identical"] is True
        assert found["graphs"]["replayed"] > 0
        assert torch.cuda.memory_allocated(0) <= held

    @pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
    def test_graphs_are_replayed_from_any_thread(self, second, cudagraph):
        run, other = (engine(second, cudagraph=cudagraph) for _ in range(2))
        rows = admitted(run)
        assert rows == admitted(other)
        wanted = [run.decoder(run.config).step(rows) for _ in range(6)]
        decoder = other.decoder(other.config)
        found, pending = [], elsewhere(decoder.step_async, rows)
        for _ in range(5):
            later = elsewhere(decoder.step_async, rows)
            found.append(elsewhere(pending.wait))
            pending = later
        assert [*found, elsewhere(pending.wait)] == wanted
        stats = decoder.runner.stats
        assert not stats.eager
        assert set(stats.replays.values()) == {6}

    def test_what_would_launch_kernels_is_refused_and_changes_nothing(self, second):
        run = engine(second)
        requests = [Request(prompt, 20) for prompt in PROMPTS]
        with pytest.raises(ValueError, match="cuda:1 must be the current device, which is cuda:0"):
            elsewhere(run.generate, requests)
        check_books(run.table)
        wanted = [dense_greedy(run.target.model, prompt, 20) for prompt in PROMPTS]
        assert [one.tokens for one in run.generate(requests)] == wanted
        eager = engine(second, graphs=False)
        with pytest.raises(ValueError, match="cuda:1 must be the current device, which is cuda:0"):
            elsewhere(eager.generate, requests)
        assert [one.tokens for one in eager.generate(requests)] == wanted
