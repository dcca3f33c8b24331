"""An interrupt between any two lines leaves books that are right, or an engine that asks for clear.

In each run, a tracer raises a KeyboardInterrupt at one line of the engine, the table or the step.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import specattn
from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request, RequestOutput
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

ROOT = Path(specattn.__file__).parent
MODULES = ("engine", "admission", "flight", "decoders", "prompts", "scheduler", "configs")
ENGINE = [ROOT / "engine" / f"{name}.py" for name in MODULES]
STEPS = [
    ROOT / "speculative" / f"{name}.py" for name in ("step/host_buffers", "step/decoder", "states")
]
TABLE = [ROOT / "cache" / "slot_table.py"]
assert all(file.exists() for file in (*ENGINE, *STEPS, *TABLE))
SHARED = [7 * i % 61 for i in range(9)]
CONTEXT = 32


class Interrupt:
    """Raises a KeyboardInterrupt at the n-th line that runs in some files, or notes all lines."""

    def __init__(self, files: list[Path], at: int = -1) -> None:
        self._files, self._at = {str(file) for file in files}, at
        self.lines: list[tuple[str, int]] = []

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_error) -> None:
        sys.settrace(None)

    def _call(self, frame, _event, _arg):
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame, event, _arg):
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 == self._at:
                raise KeyboardInterrupt
        return self._line


class JumpInterrupt:
    """Raises a KeyboardInterrupt at the n-th jump back of a loop, or notes all jumps.

    There Python looks for signals, and from 3.12 on not every handler of the frame is told.
    """

    TOOL = 4

    def __init__(self, files: list[Path], at: int = -1) -> None:
        self._files, self._at = {str(file) for file in files}, at
        self.lines: list[tuple[str, int]] = []

    def __enter__(self):
        tool = sys.monitoring
        tool.use_tool_id(self.TOOL, "interrupts")
        for event in (tool.events.JUMP, tool.events.BRANCH):
            tool.register_callback(self.TOOL, event, self._jump)
        tool.set_events(self.TOOL, tool.events.JUMP | tool.events.BRANCH)
        return self

    def __exit__(self, *_error) -> None:
        sys.monitoring.set_events(self.TOOL, 0)
        sys.monitoring.free_tool_id(self.TOOL)

    def _jump(self, code, offset, target):
        if target < offset and code.co_filename in self._files:
            self.lines.append((code.co_qualname, offset))
            if len(self.lines) - 1 == self._at:
                raise KeyboardInterrupt


def one_of_each(lines: list[tuple[str, int]]) -> list[int]:
    """Where every line runs once: the first time, the last time, or between."""
    at = defaultdict(list)
    for index, line in enumerate(lines):
        at[line].append(index)
    rng = random.Random(5)
    return sorted(rng.choice([found[0], found[-1], rng.choice(found)]) for found in at.values())


@pytest.fixture(autouse=True)
def uncollected():
    """Leave engines of earlier tests alone: where one is collected, lines of its end run, too."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def models():
    return TinyTarget(device=DEVICE, layers=1), TinyDraft(device=DEVICE)


@pytest.fixture(scope="module")
def run(models):
    config = SpecConfig(1, 1, 2, max_context_len=CONTEXT, max_num_reqs=3, page_size=2)
    made = Engine(
        *models, config, backend="torch_native", buckets=(3,), num_slots=56, detokenize=str
    )
    made.generate([Request([9] * 30, 9)])  # comes to its context's end: plain decoding is made
    made.generate([Request([5], 2, SamplingParams(1.0, seed=3))])
    return made


def life(run: Engine, results: list) -> None:
    """Requests join, share a prefix, draw, look for a stop string, end, and are dropped."""
    asked = [Request([*SHARED, 5], 7), Request([*SHARED, 9], 4, stop=("no such text",))]
    results += zip(asked, run.add(asked), strict=True)
    run.step(ahead=True)
    drawn = Request([35], 9, SamplingParams(1.0, seed=3))
    results += zip([drawn], run.add([drawn]), strict=True)
    run.step(ahead=True)
    run.drop(results[-1][1])
    run.step(ahead=True)
    run.clear()
    told = [Request([8] * 28, 9), Request([3, 1], 3), Request([3], 2), Request([3, 2], 2)]
    results += zip(told, run.generate(told), strict=True)


# every life has the same texts
greedy = cache(dense_greedy)


def exact(target, request: Request, result) -> None:
    if not request.sampling.temperature:
        assert result.tokens == greedy(target, request.prompt, len(result.tokens))


def books_are_right(run: Engine) -> None:
    rows = {one.row for one in run.running}
    assert rows == run.table.rows
    assert not any(one.result.finish_reason for one in run.running)
    check_books(run.table)


def check(run: Engine, at: int, kind=Interrupt) -> bool:
    """Interrupt a life; returns whether the engine asked to be cleared."""
    results: list = []
    run.clear()
    files, stops = ENGINE + STEPS + TABLE, pytest.raises(KeyboardInterrupt)
    with kind(files, at) as interrupt, stops as caught:
        life(run, results)
    where = interrupt.lines[-1]
    # a call that is refused either way
    with pytest.raises(ValueError, match=r"call clear\(\)|which runs in this engine") as refusal:
        run.drop(RequestOutput())
    asks = "clear()" in str(refusal.value)
    if not asks:
        assert not run.scheduler.waiting, (where, caught.value.__context__)
        books_are_right(run)
        going = [(one.request, one.result) for one in run.running]
        while run.running:
            run.step(ahead=True)
        late = Request([6, 1], 3)
        for request, result in (*results, *going, (late, *run.generate([late]))):
            assert result.finish_reason, where
            exact(run.target.model, request, result)
    run.clear()
    books_are_right(run)
    assert run.table.num_free_rows == 3, where
    assert run.table.num_free_slots == 54, where
    again = Request([*SHARED, 2], 5)
    (result,) = run.generate([again])
    assert len(result.tokens) == 5, where
    exact(run.target.model, again, result)
    return asks


def lines_of(run: Engine, kind=Interrupt) -> list[tuple[str, int]]:
    run.clear()
    # what an engine does once, it has done before
    life(run, [])
    run.clear()
    with kind(ENGINE + STEPS + TABLE) as noted:
        life(run, [])
    return noted.lines


def test_an_interrupt_costs_no_row_and_no_slot(run, request):
    """At some of the lines, or with ``--whole`` at all of them."""
    places = one_of_each(lines_of(run))
    asked = [check(run, at) for at in places[:: 1 if request.config.getoption("--whole") else 11]]
    assert set(asked) == {True, False}, "every kind of end was seen"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="before 3.12, all handlers are told")
def test_an_interrupt_where_a_loop_jumps_back_costs_no_row_and_no_slot(run):
    jumps = lines_of(run, JumpInterrupt)
    first = {jump: at for at, jump in reversed(list(enumerate(jumps)))}
    assert len(first) > 40
    for at in first.values():
        check(run, at, JumpInterrupt)


def table_life(table: SlotTable) -> None:
    first = table.allocate()
    table.reserve([first], [9])
    table.commit(first, 8)
    second = table.allocate(share=first, share_len=8)
    table.reserve([first, second], [20, 26])  # takes back what is held ahead
    table.commit(second, 12)
    table.free(first)
    with table.holding([second]):
        table.reserve([second], [30])
    table.free(second)


def test_an_interrupt_at_any_line_of_a_table_is_told_or_harms_nothing():
    table = SlotTable(
        max_num_reqs=2, max_context_len=CONTEXT, num_slots=44, page_size=2, device=DEVICE
    )
    with Interrupt(TABLE) as noted:
        table_life(table)
    told = 0
    for at in range(len(noted.lines)):
        with Interrupt(TABLE, at), pytest.raises(KeyboardInterrupt):
            table_life(table)
        try:
            for row in table.rows or [1]:
                table.free(row)
        except ValueError as error:
            told += "clear()" in str(error)
        if not table.changing:
            check_books(table)
        table.clear()
        check_books(table)
        assert table.num_free_rows == 2
        assert table.num_free_slots == 42
        table_life(table)
        check_books(table)
    assert told
