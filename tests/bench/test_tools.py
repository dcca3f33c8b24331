"""Tools that run checkouts: what they record, compare and count."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from unittest import mock

import pytest
import torch

from bench import step
from bench.step_world import Setting, World
from bench.tools import cold_start, compare, shape, texts
from specattn import Engine, SpecConfig
from tests.bench.test_step import CPU, tiny
from tests.tiny import TinyDraft, TinyTarget


class Stays:
    """A worker that reads its lines in this process, which has imported what it needs."""

    def __init__(self, tree, arguments):
        self.program, self.stdin, self.stdout = arguments[1], self, self

    def write(self, line):
        with mock.patch.object(sys, "stdin", [line]), redirect_stdout(io.StringIO()) as said:
            exec(self.program, {})
        self.said = said.getvalue()

    def readline(self):
        return self.said

    def flush(self): ...

    close = wait = flush


@pytest.mark.slow
def test_texts_are_recorded_by_the_command_line_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "CONFIGS", {"chain": texts.CONFIGS["chain"]})
    monkeypatch.setattr(texts, "start", Stays)
    out = tmp_path / "new.json"
    run = ["texts", "--out", str(out), "--prompts", "1", "--new", "6"]
    monkeypatch.setattr(sys, "argv", run)
    texts.main()
    found = json.loads(out.read_text())
    assert list(found) == ["chain, greedy, prompt 0", "chain, drawn, prompt 0"]
    for one in found.values():
        assert (len(one["tokens"]), one["finish_reason"]) == (6, "length")
    other = tmp_path / "old.json"
    found["chain, drawn, prompt 0"]["tokens"][2] += 1
    del found["chain, greedy, prompt 0"]
    other.write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["texts", "--against", str(other), str(out)])
    with pytest.raises(SystemExit, match="True"):
        texts.main()
    said = capsys.readouterr().out
    assert "chain, greedy, prompt 0: in one recording only" in said
    assert "chain, drawn, prompt 0: tokens differ, from token 2" in said


def test_two_checkouts_are_compared_cell_by_cell(tmp_path, monkeypatch, capsys):
    for tree, times in (("old", (10.0, 12.0, 11.0)), ("new", (11.0, 12.1, 12.0))):
        for turn, us in enumerate(times):
            folder = tmp_path / f"{tree}-{turn}"
            folder.mkdir()
            lines = [{"name": "specattn", "us": us, "plan_us": None}, {"name": "FA3", "us": 1.0}]
            quick = {"cells": [{"name": "8 x 8k", "contestants": lines}]}
            (folder / "quick.json").write_text(json.dumps(quick))
            cell = {"setting": "plain", "batch": 1, "context": 4096, "us": 4 * us}
            cells = [cell | {"host_p10_us": 30.0}, {"setting": "x", "batch": 9, "context": 1}]
            (folder / "step.json").write_text(json.dumps({"cells": cells}))
    (tmp_path / "new-2" / "step.json").write_text("{cut off")
    found = compare.gathered(tmp_path)
    assert found["attention us"]["8 x 8k: specattn"]["old"] == [10.0, 12.0, 11.0]
    assert found["step us"]["plain, 1 x 4096"]["new"] == [44.0, 48.4]
    monkeypatch.setattr(sys, "argv", ["compare", "--out", str(tmp_path), "--report"])
    compare.main()
    text = capsys.readouterr().out
    assert "FA3" not in text
    (row,) = [line for line in text.splitlines() if "8 x 8k: specattn" in line]
    assert row.split()[-6:] == ["11.00", "12.00", "1.0909", "20.0%", "10.0%", "!"]
    assert "1.0500" in next(line for line in text.splitlines() if "plain, 1 x 4096" in line)


def test_checkouts_run_in_turns_and_leave_what_they_have(tmp_path, monkeypatch, capsys):
    write = "import sys; open(sys.argv[1], 'w').write('{\"specattn\": 5.0}')"
    monkeypatch.setitem(
        compare.WHAT, "import", lambda _, folder, turn: ["-c", write, str(folder / "import.json")]
    )
    out = tmp_path / "out"
    run = ["--old", str(tmp_path), "--out", str(out), "--what", "import", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", ["compare", *run])
    compare.main()
    taken = json.loads((out / "compare.json").read_text())["taken"]
    assert [(one["turn"], one["tree"]) for one in taken] == [
        (turn, tree) for turn in (0, 1) for tree in compare.TREES
    ]
    assert {one["ended"] for one in taken} == {"exit 0"}
    assert "specattn" in capsys.readouterr().out


def test_captures_of_a_step_are_watched(tmp_path, monkeypatch):
    """The program that runs in either checkout, up to where it starts to measure."""
    monkeypatch.setattr(step, "SETTINGS", step.SETTINGS)
    monkeypatch.setattr(World, "decoder", World.decoder)
    out = tmp_path / "capture.json"
    monkeypatch.setattr(sys, "argv", ["-c", str(out), "--batch", "1"])
    exec(compare.STEP.replace("step.main()", ""), {})
    assert sys.argv == ["-c", "--batch", "1"]
    assert tuple(one.name for one in step.SETTINGS) == compare.KEPT
    run = World(tiny(), [40, 40], CPU, torch.float32, "torch_native")
    run.decoder(Setting(1, 2, 3), [1, 2], run.forced(1), record=False)
    assert not out.exists()
    run.decoder(Setting(1, 2, 3), [1, 2], run.forced(1))
    (name, (size, seconds)) = json.loads(out.read_text()).popitem()
    assert (name, size) == ("chain 1-2-3", 0)
    assert seconds > 0


SHORT = """\
def add(first, second, *, third=None):
    \"\"\"Return a sum.

    Two lines.
    \"\"\"
    # said once
    return combine(first, [second, third], {"name": first})
"""
TALL = """\
def add(
    first,
    second,
    *,
    third=None,
):
    \"\"\"Return a sum.

    Two lines.
    \"\"\"
    # said once
    return combine(
        first,
        [second, third],
        {"name": first},
    )
"""


def test_refilled_lines_do_not_depend_on_the_formatter():
    assert shape.refilled(SHORT) == shape.refilled(TALL) == len(SHORT.splitlines())
    long = f"x = [{', '.join(['number'] * 30)}]\n"
    assert shape.refilled(long) == -(-len(long) // 100) == 3


class Here:
    """The program of a checkout in this process, which has imported what it needs."""

    def __init__(self, tree, arguments):
        self.program = arguments[1]

    def communicate(self):
        with redirect_stdout(io.StringIO()) as said:
            exec(self.program, {})
        return said.getvalue(), None


def test_a_step_is_traced_until_its_launch_and_within(monkeypatch):
    monkeypatch.chdir(shape.HERE)
    monkeypatch.setattr(shape, "start", Here)
    found = shape.traced(shape.HERE)
    assert {"Step", "StepDecoder", "BoundLayers"} <= set(found["which"])
    assert "RequestStates" not in found["which"], "a record of tensors"
    for part in ("launch path", "recorded path, kernels aside"):
        files, calls = found[f"{part}: files"], found[f"{part}: calls"]
        assert 1 < files <= found[f"{part}: changes of file"] + 1 <= calls


@pytest.mark.parametrize("prompts", cold_start.PROMPTS)
def test_a_start_says_what_prompts_take(monkeypatch, prompts):
    """On a CPU nothing is recorded; who asks for graphs of prompts gets an engine's own."""
    asked, made = [], Engine.__init__
    monkeypatch.setattr(
        Engine,
        "__init__",
        lambda *args, **named: asked.append(named["prompt_buckets"]) or made(*args, **named),
    )
    monkeypatch.setattr(cold_start, "listened", list)
    found = cold_start.start("one by one", [1], 2, tiny=True, prompts=prompts)
    assert asked == [None if prompts == "graphs" else ()]
    assert (found["graphs"], found["prompt_graphs"], found["device_mib"]) == (0, 0, None)
    assert found["prompts"] == prompts
    graphs = found | {"device_mib": 900.0}
    eager = graphs | {"device_mib": 650.0, "engine": [graphs["engine"][0] - 1.5, 0]}
    want = "graphs of prompts: +1.50 s of the engine's start, +250 MiB of the device"
    assert cold_start.more(graphs, eager) == want


def test_graphs_of_prompts_are_counted_apart():
    config = SpecConfig(2, 1, 3, max_context_len=48, max_num_reqs=2)
    engine = Engine(TinyTarget(), TinyDraft(), config, buckets=[1, 2], prompt_buckets=(8, 16))
    reports = engine.graphs()[config]
    assert [report.part for report in reports[:2]] == ["step", "step"]
    parts = {report.part for report in reports[2:]}
    assert parts == {"prompts", "first tokens", "prompts' drafts"}
    every = [replace(one, recorded=True, nbytes=1 << 20) for one in reports]
    engine.graphs = lambda: {config: tuple(every)}
    assert cold_start.taken(engine, of_prompts=False) == {"graphs": 2, "mib": 2.0}
    assert cold_start.taken(engine, of_prompts=True) == {"prompt_graphs": 5, "prompt_mib": 5.0}
