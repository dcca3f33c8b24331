"""The rules that keep the library readable, checked on its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "specattn"
SOURCES = sorted(ROOT.rglob("*.py"))
# a room may import the rooms before it, in types too; nothing imports a later one
LAYERS = [
    "checks",
    "errors",
    "batch",
    "buffers",
    "config",
    "kernels",
    "plan",
    "interop",
    "cuda_graph",
    "cache",
    "inspect",
    "backends",
    "attention",
    "speculative",
    "engine",
    "models",
    "integrations",
    "testing",
    "cli",
]
LIBRARIES = {"flashinfer", "sgl_kernel", "flash_attn"}
MODE_READERS = {"batch.py", "config.py", "cuda_graph/runner.py", "__init__.py", "inspect.py"}


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "specattn":
            found += [f"specattn.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def test_rooms_import_only_what_lies_below_them():
    """One order of all rooms, so that there are no cycles, also not between types."""
    wrong = []
    for path in SOURCES:
        name = path.relative_to(ROOT.parent).with_suffix("").as_posix().replace("/", ".")
        room = layer_of(name)
        if room in ("__init__", "__main__"):
            continue
        below = LAYERS[: LAYERS.index(room) + 1]
        for module in imports(path):
            if module == "specattn.__version__":
                continue
            if module.startswith("specattn.") and layer_of(module) not in below:
                wrong.append(f"{name} imports {module}")
            if module.split(".")[0] in LIBRARIES and room not in ("backends", "kernels"):
                wrong.append(f"{name} imports the library {module}")
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_forward_mode_is_data(path):
    """I4: only the table, the graph key and the algorithm's call sites name a mode."""
    inside = path.relative_to(ROOT).as_posix()
    if (
        inside.startswith(("speculative/", "engine/"))
        or inside in MODE_READERS
        or "multi_step" in inside
    ):
        return
    assert "ForwardMode" not in path.read_text()


def test_importing_the_library_is_light():
    """No GPU, no Triton, no models, no plots."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import specattn\n"
        "for name in ('transformers', 'matplotlib', 'flashinfer', 'sgl_kernel', 'typer'):\n"
        "    assert name not in sys.modules, name\n"
        "print(specattn.__version__)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


def test_public_names_exist_and_are_documented():
    import specattn

    assert set(specattn.__all__) == set(specattn._HOME_OF)
    assert not set(specattn.__all__) - set(dir(specattn))
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        _ = specattn.Enigne
    for name in specattn.__all__:
        assert getattr(specattn, name).__doc__, name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_first_lines_of_docstrings_are_short(path):
    """A reader of an index sees nothing else; commands show theirs as help."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    long = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            first = text.splitlines()[0]
            if len(first.split()) > 12 and path.parent.name != "cli":
                long.append(first)
    assert not long
