"""The versions that are allowed and tested: what the metadata says, and the record of runs."""

from __future__ import annotations

import json
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from bench import compat

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECORD = json.loads(compat.RECORD.read_text())
MAKE = runpy.run_path(str(ROOT / "docs" / "make_compatibility.py"))


def bounds() -> dict[str, Requirement]:
    """What this project requires of torch, triton, transformers and the others."""
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["models"]
    return {one.name: one for one in map(Requirement, lines)}


@pytest.mark.parametrize("engine", compat.PINS)
def test_engines_keep_the_versions_that_they_pin(engine):
    """So that `pip install` beside one resolves; `bench.compat` asks pip itself."""
    for name, pin in compat.PINS[engine].items():
        assert Version(pin) in bounds()[name].specifier, f"{engine} pins {name} {pin}"


def test_the_core_is_three_packages():
    assert {Requirement(one).name for one in PROJECT["dependencies"]} == {
        "torch",
        "triton",
        "numpy",
    }


def test_constraints_leave_something_of_the_bounds():
    """The tests run with versions that fulfil both."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert pins
    for pin in pins:
        (below,) = pin.specifier
        lowest = max(Version(one.version) for one in bounds()[pin.name].specifier)
        assert lowest < Version(below.version), pin.name


@pytest.mark.parametrize("name", RECORD)
def test_the_record_is_well_formed(name):
    run = RECORD[name]
    assert name in {*compat.ENVIRONMENTS, "resolve"}
    assert len(run["source_sha256"]) == 64
    if name == "resolve":
        assert set(run["versions"]) == set(compat.RESOLVED)
        return
    assert run["tests"] == " ".join(compat.ENVIRONMENTS[name].tests)
    assert len(run["failures"]) == run["counts"]["failed"]
    assert run["counts"]["passed"] > 0
    assert {"python", "torch", "triton", "numpy"} <= set(run["versions"])


@pytest.mark.parametrize("engine", compat.RESOLVED)
def test_pip_kept_what_the_engine_pins(engine):
    found = RECORD["resolve"]["versions"][engine]
    assert {name: found[name] for name in compat.PINS[engine]} == compat.PINS[engine]


def test_the_record_is_of_this_source():
    others = [
        name for name, run in RECORD.items() if run["source_sha256"] != compat.source_digest()
    ]
    if others:
        pytest.skip(f"recorded with another source: {', '.join(others)}; see CONTRIBUTING.md")


def test_the_page_says_why_a_test_failed():
    """And speaks of no other test: remove the reasons of those that pass again."""
    runs = [*RECORD.values(), *MAKE["gpu_runs"]()]
    failed = {test.partition("[")[0] for run in runs for test in run.get("failures", ())}
    assert set(MAKE["REASONS"]) == failed


def test_the_page_is_what_the_generator_writes():
    """Run ``python docs/make_compatibility.py`` after a record changed."""
    assert (ROOT / "docs" / "compatibility.md").read_text() == MAKE["page"]()


def test_a_report_is_counted(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a" name="one"/>'
        '<testcase classname="tests.a" name="two"><failure/></testcase>'
        '<testcase classname="tests.b" name="three"><error/></testcase>'
        '<testcase classname="tests.b" name="four"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert compat.read_report(report) == {
        "counts": {"passed": 1, "failed": 2, "skipped": 1},
        "failures": ["tests.a::two", "tests.b::three"],
    }


def test_spills_are_counted(tmp_path):
    out = tmp_path / "compiled.json"
    out.write_text(json.dumps({"records": [{"stack": 8}, {"stack": 0}, {"stack": 40}]}))
    found = compat.read_compiled(out)
    assert (found["variants"], found["spilling"], found["most_spilled"]) == (3, 2, 40)


@pytest.mark.parametrize(("name", "python"), [("py313", "python3.13"), ("newest", sys.executable)])
def test_an_environment_is_made_by_its_python(tmp_path, monkeypatch, name, python):
    ran = []
    monkeypatch.setattr(compat.subprocess, "run", lambda given, **options: ran.append(given))
    made = compat.make(name, tmp_path)
    assert made == tmp_path / name / "bin" / "python"
    assert ran[0] == [python, "-m", "venv", tmp_path / name]
    assert ran[1][0] == str(made)


def test_a_run_keeps_what_others_recorded(tmp_path, monkeypatch, capsys):
    """With an environment that is there already: this one."""
    home = tmp_path / "core" / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys.executable)
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"newest": {"counts": {}}}))
    monkeypatch.setattr(compat, "versions", lambda python: {"torch": python.parent.parent.name})
    one = compat.Environment((), ("tests/test_config.py", "-k", "no_such_name or topk"), "")
    monkeypatch.setitem(compat.ENVIRONMENTS, "core", one)
    monkeypatch.setattr(
        sys, "argv", ["compat", str(tmp_path), "--only", "core", "--record", str(record)]
    )
    found = {"counts": {"passed": 3}, "failures": []}
    monkeypatch.setattr(compat, "read_report", lambda path: found)
    monkeypatch.setattr(compat.subprocess, "run", lambda *given, **options: None)
    compat.main()
    made = json.loads(record.read_text())
    assert made["newest"] == {"counts": {}}
    assert made["core"]["counts"] == {"passed": 3}
    assert made["core"]["versions"] == {"torch": "core"}
    assert made["core"]["source_sha256"] == compat.source_digest()
    assert "core" in capsys.readouterr().out


def test_tests_of_an_engine_see_this_tree_behind_the_stubs():
    path = compat.variables(compat.ENVIRONMENTS["sglangnew"])["PYTHONPATH"]
    assert path == f"{ROOT}/tests/integrations/sglang/stubs:{ROOT}"
    assert compat.variables(compat.ENVIRONMENTS["core"])["PYTHONPATH"] == str(ROOT)
