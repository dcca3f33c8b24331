"""What every test shares: the interpreter without a GPU, one thread, a fixed seed, the GPU mark."""

from __future__ import annotations

import datetime
import gc
import json
import logging
import os
import platform
from collections import Counter
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from bench.compat import source_digest
from tests.implementations import IMPLEMENTATIONS, using
from tests.interpreter import (
    describe_once,
    multiply_by_row,
    patch_once,
    round_to_bfloat16,
    round_to_float8,
    spread_bits,
    without_idle_checks,
)
from tests.samples import left_out

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["specattn.testing.plugin", "tests.interruptions"]


def begin_with_another_gpu() -> None:
    """Let each worker of pytest-xdist begin with another GPU than the last; it sees all of them."""
    count, worker = torch.cuda.device_count(), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus = named.split(",")
    first = int(worker.removeprefix("gw")) % len(gpus)
    if count > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


# no test fails by chance, or for a busy machine; `--hypothesis-profile random` draws other examples
FIXED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "database": None,
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
}
settings.register_profile("fixed", **FIXED, derandomize=True)
settings.register_profile("random", **FIXED)
settings.load_profile("fixed")

# before CUDA starts
begin_with_another_gpu()
CUDA = torch.cuda.is_available()
torch.set_num_threads(1)  # tiny shapes: a second thread only waits
# pytest would attach to each of torch's loggers, in every phase of every test
for logger in logging.root.manager.loggerDict.values():
    if isinstance(logger, logging.Logger):
        logger.propagate = True
# before anything imports triton
if not CUDA:
    # torch would note the stack of every call, for a CUDA that is started later
    torch.manual_seed = torch.default_generator.manual_seed
    interprets = os.environ.setdefault("TRITON_INTERPRET", "1") == "1"
    if interprets and find_spec("triton"):
        from tests.shortcuts import shortcuts

        patch_once(shortcuts())
        describe_once()
        without_idle_checks()
        multiply_by_row()
        spread_bits()
        round_to_float8()
        round_to_bfloat16()

# what the lane for each edit (`-m "not slow"`) leaves out, besides single tests that are marked
SLOW = (
    "tests/bench/",
    "tests/cli/",
    "tests/integrations/",
    "tests/published/",
    "tests/test_core.py",
    "tests/test_pair.py",
    "tests/backends/test_flex.py",
    "tests/engine/test_machine.py",
    "tests/engine/test_engine_distributions.py",
    "tests/engine/test_nonfinite.py",
    "tests/engine/test_processor_distributions.py",
    "tests/kernels/attention/test_deterministic.py",
    "tests/kernels/test_compile_targets.py",
    "tests/regressions/test_r48_verify_has_the_bits_of_decode.py",
    "tests/speculative/test_dflash_steps.py::test_three_tokens",
    "tests/speculative/test_lookup.py",
    "tests/speculative/test_standalone.py",
    "tests/testing/test_kit",
    "tests/testing/test_proposer_kit.py",
    "tests/testing/test_stand_ins.py",
)


# seconds of tests after which a run says what took them
LONG = 60


# environments of engines have no pytest-xdist
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Take a core each, four at most; `-n 16` asks for more."""
    return min(4, os.cpu_count() or 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-record", metavar="FILE", help="write what a whole run of `-m gpu` covered to FILE"
    )
    parser.addoption(
        "--whole", action="store_true", help="run all of what some tests take samples of"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU; with one, whatever runs on `DEVICE` is a GPU test."""
    for item in left_out(items):
        item.add_marker(pytest.mark.whole)
    if not config.getoption("--whole"):
        left = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu"):
            if not CUDA:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif CUDA and hasattr(item.module, "DEVICE"):
            item.add_marker(pytest.mark.gpu)
    # modules that take long to set up come first: what is left at the end is shared by workers
    items.sort(key=lambda item: not _is_slow(item.getparent(pytest.Module)))


def _is_slow(module: pytest.Module | None) -> bool:
    """Whether all tests of a module are slow."""
    return module is not None and any(mark.name == "slow" for mark in module.own_markers)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keep what was imported and collected from being looked through for garbage, ever again.

    It is most of a process's objects, and stays to the end. Of what tests leave there is little:
    on a CPU a tenth of their time went by in looking for it as often as Python does.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        if not CUDA:
            gc.set_threshold(50_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def freed_between_modules() -> Iterator[None]:
    """Give a GPU's memory back after every module: processes share it."""
    yield
    if CUDA:
        torch.cuda.empty_cache()


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--gpu-record")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not path or hasattr(session.config, "workerinput"):
        return
    import transformers
    import triton

    reports = {kind: reporter.stats.get(kind, []) for kind in ("passed", "failed", "skipped")}
    counts = {kind: len(found) for kind, found in reports.items()}
    Path(path).write_text(
        json.dumps(
            {
                "source_sha256": source_digest(),
                "counts": counts,
                "failures": sorted(report.nodeid for report in reports["failed"]),
                "device": torch.cuda.get_device_name(),
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "transformers": transformers.__version__,
                },
                "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            },
            indent=1,
        )
        + "\n"
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the files that took longest, in seconds of their processes."""
    took: Counter[str] = Counter()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        # warnings are among them, too
        if isinstance(report, pytest.TestReport):
            took[report.nodeid.partition("::")[0]] += report.duration
    if sum(took.values()) > LONG:
        terminalreporter.section("slowest files")
        for path, seconds in took.most_common(12):
            terminalreporter.line(f"{seconds:7.1f} s {path}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with torch functions, and with Triton kernels."""
    with using(request.param):
        yield request.param


@pytest.fixture
def plan_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Grids of the launches that fill attention plans, from here on."""
    from specattn.kernels.attention import plan as tree_plan

    grids, kernel = [], tree_plan._plan_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(tree_plan, "_plan_kernel", Counted())
    return grids
