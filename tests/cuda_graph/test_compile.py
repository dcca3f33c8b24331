"""Before captures, what they launch is compiled: all of it where a bucket lacks any."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from specattn.cuda_graph import GraphRunner, runner

CPU = torch.device("cpu")


class Mode(Enum):
    DRAFT = "draft"
    VERIFY = "verify"


class Noting:
    """A program that notes what it is asked for."""

    graphs = False

    def __init__(self, mode: Mode, bucket: int, notes: list[tuple[str, str, int]]) -> None:
        self.mode, self.bucket, self.notes = mode, bucket, notes

    def pad(self) -> None:
        self.notes.append(("pad", self.mode.value, self.bucket))

    def schedule(self, seq_lens_cpu: torch.Tensor | None) -> None:
        assert seq_lens_cpu is not None
        assert seq_lens_cpu.tolist() == [0] * self.bucket

    def run(self) -> None:
        self.notes.append(("run", self.mode.value, self.bucket))

    def holders(self) -> dict[str, torch.Tensor]:
        return {}

    def fingerprint(self) -> tuple[object, ...]:
        return ()


class Compiling:
    """Stands in for what compiles: makes the calls, and says that they took so many kernels.

    Captures lack as many as ``lacking`` says, in turn.
    """

    def __init__(self, found: int, lacking: Sequence[int] = ()) -> None:
        self.found, self.times, self.lacking = found, 0, list(lacking)

    @contextmanager
    def compiled(self) -> Iterator[list[str]]:
        yield ["kernel"] * self.lacking.pop(0)

    def compile_ahead(self, calls: Iterable[Callable[[], object]], device: torch.device) -> int:
        assert device == CPU
        self.times += 1
        for call in calls:
            call()
        return self.found


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    monkeypatch.setattr(runner, "uses_triton", lambda device: True)
    return []


def runner_of(notes: list[tuple[str, str, int]]) -> GraphRunner[Mode]:
    return GraphRunner(lambda mode, bucket: Noting(mode, bucket, notes), [1, 3], CPU)


FIRST = [("pad", "draft", 3), ("pad", "draft", 3), ("run", "draft", 3)]
REST = [
    (what, mode, bucket)
    for mode, bucket in (("draft", 1), ("verify", 3), ("verify", 1))
    for what in ("pad", "run")
]


@pytest.mark.parametrize(
    ("found", "ranks", "ran"),
    [(5, 1, FIRST + REST), (0, 1, FIRST), (0, 2, FIRST + REST)],
    ids=["cold", "warm", "ranks"],
)
def test_the_first_bucket_decides_about_the_others(
    monkeypatch: pytest.MonkeyPatch,
    notes: list[tuple[str, str, int]],
    found: int,
    ranks: int,
    ran: list[tuple[str, str, int]],
) -> None:
    """But where ranks wait for each other, whose caches may differ."""
    monkeypatch.setattr(runner, "ahead", Compiling(found))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    one = runner_of(notes)
    one.compile(list(Mode))
    assert notes == ran
    assert not one.captured(Mode.DRAFT)
    assert not one.reports()


def test_a_capture_that_lacks_a_kernel_has_the_others_compiled(
    monkeypatch: pytest.MonkeyPatch, notes: list[tuple[str, str, int]]
) -> None:
    """Not all buckets launch what the first one does: large ones multiply in another way."""
    compiling = Compiling(0, lacking=[0, 2])
    monkeypatch.setattr(runner, "ahead", compiling)
    one = runner_of(notes)
    one.compile(list(Mode))
    notes.clear()
    one.capture(Mode.DRAFT)
    one.capture(Mode.VERIFY)
    captures = [(what, "draft", bucket) for bucket in (3, 1) for what in ("pad", "run")]
    others = [(what, "verify", bucket) for bucket in (3, 1) for what in ("pad", "run")]
    assert notes == captures + others + others
    assert compiling.times == 2


def test_all_that_runs_is_surrounded_as_captures_are(
    monkeypatch: pytest.MonkeyPatch, notes: list[tuple[str, str, int]]
) -> None:
    @contextmanager
    def around() -> Iterator[None]:
        notes.append(("enter", "", 0))
        yield
        notes.append(("leave", "", 0))

    monkeypatch.setattr(runner, "ahead", Compiling(5))
    make = partial(Noting, notes=notes)
    GraphRunner(make, [1, 3], CPU, capturing=around).compile(list(Mode))
    depth = 0
    for what, *_ in notes:
        depth += {"enter": 1, "leave": -1}.get(what, 0)
        assert depth == (0 if what == "leave" else 1)
    assert [note for note in notes if note[0] in ("pad", "run")] == FIRST + REST


def test_nothing_to_capture_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, notes: list[tuple[str, str, int]]
) -> None:
    monkeypatch.setattr(runner, "ahead", Compiling(1))
    runner_of(notes).compile([])
    assert not notes


def test_what_fails_is_left_to_the_captures(
    monkeypatch: pytest.MonkeyPatch,
    notes: list[tuple[str, str, int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> int:
        raise RuntimeError("no compiler")

    compiling = Compiling(0)
    monkeypatch.setattr(compiling, "compile_ahead", fails)
    monkeypatch.setattr(runner, "ahead", compiling)
    with caplog.at_level(logging.INFO):
        runner_of(notes).compile([Mode.DRAFT])
    assert "kernels are compiled one by one: no compiler" in caplog.text


def test_nor_are_kernels_compiled_that_do_not_run() -> None:
    """On a CPU."""
    notes: list[tuple[str, str, int]] = []
    runner_of(notes).compile(list(Mode))
    assert not notes


def test_a_launcher_is_its_own_whatever_was_loaded_since(monkeypatch):
    """CPython gives modules of one name, loaded again, as one object."""
    ahead = pytest.importorskip("specattn.kernels.ahead", exc_type=ImportError)
    build, shared = ahead.build, SimpleNamespace()

    def load(name: str, path: str) -> SimpleNamespace:
        shared.launch = path
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    with ahead._loaded_apart():
        first, second = (build._load_module_from_path("launcher", path) for path in ("one", "two"))
    assert (first.launch, second.launch) == ("one", "two")
    assert build._load_module_from_path is load
