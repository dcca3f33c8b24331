"""The sanitizer's tests are chosen, and its parser reads the tools."""

from __future__ import annotations

import sys

import pytest

from bench.tools import sanitize
from bench.tools.sanitize import ROOMS, TESTS, collected, parse, sample, watched


def test_every_room_of_kernels_has_tests():
    assert {one.parent.name for one in TESTS.glob("*/test_*.py")} == set(ROOMS)


def test_lines_are_printed_as_they_come_and_a_process_ends_with_its_time(capsys):
    code, text = watched([sys.executable, "-c", "print('one'); print('two'); exit(3)"], 60.0)
    assert (code, text) == (3, "one\ntwo\n")
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]
    code, text = watched([sys.executable, "-c", "import time; time.sleep(60)"], 0.1)
    assert code not in (0, None)


def test_samples_are_spread():
    names = [str(number) for number in range(100)]
    assert sample(names, 100) == names
    assert sample(names, 30) == names[::4]
    assert sample([], 30) == []


def test_tests_are_collected_by_their_rooms(monkeypatch):
    """Those that a machine without a GPU has; without one to run, the tool ends."""
    monkeypatch.setattr(sanitize, "UNFIT", "32_bit_offsets")
    found = collected(["cache"], 1)
    assert len(found) == 1
    assert found[0].startswith("tests/kernels/cache/test_kv_move.py::test_")
    monkeypatch.setattr(sanitize, "PYTEST", [sys.executable, "-c", "print('no tests collected')"])
    with pytest.raises(SystemExit, match="no test to run under a tool"):
        collected(["cache"], 1)


MEMCHECK = """
========= COMPUTE-SANITIZER
........ [100%]
8 passed in 3.21s
========= Invalid __global__ read of size 4 bytes
=========     at _store_kernel+0x1b0 in kv_store.py:40
=========     by thread (1,0,0) in block (0,0,0)
========= Invalid __global__ read of size 4 bytes
=========     at _store_kernel+0x2b0 in kv_store.py:40
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """
========= Error: Race reported between Write access at merge_kernel+0x90
=========     and Read access at merge_kernel+0xa0 [4 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_summaries_are_read():
    found = parse(MEMCHECK)
    assert (found["errors"], found["warnings"], found["passed"]) == (2, 0, 8)
    assert found["reports"] == [
        {
            "text": "Invalid __global__ read of size 4 bytes"
            " / at _store_kernel+0x… in kv_store.py:40",
            "times": 2,
        },
    ]
    found = parse(RACECHECK)
    assert (found["errors"], found["warnings"]) == (1, 1)
    assert "merge_kernel" in found["reports"][0]["text"]
    assert parse("nothing at all")["errors"] is None
    assert (
        parse("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")["errors"]
        == 0
    )
