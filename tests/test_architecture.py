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
    "autocast",
    "batch",
    "buffers",
    "config",
    "kernels",
    "plan",
    "masks",
    "trees",
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
# SGLang's enumeration has the same name
MODE_READERS |= {f"integrations/sglang/{name}.py" for name in ("modules", "names")}


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_only_a_models_slot_speaks_to_its_memory(path):
    """So a second kind of memory changes no step, engine or capture."""
    inside = path.relative_to(ROOT)
    if inside.parts[0] not in ("speculative", "engine", "cuda_graph"):
        return
    if inside.as_posix() == "speculative/model.py":
        return
    asked = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "attr", getattr(node.value, "id", "")) == "pool"
    ]
    assert not asked


def test_importing_the_library_is_light():
    """No GPU, no Triton, no models."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import specattn\n"
        "for name in ('transformers', 'flashinfer', 'sgl_kernel', 'typer'):\n"
        "    assert name not in sys.modules, name\n"
        "print(specattn.__version__)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


def test_public_names_exist_and_are_documented():
    import specattn

    known_to_checkers = {
        alias.asname: node.module.removeprefix("specattn.")
        for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert known_to_checkers == specattn._HOME_OF
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


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
JUMPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp)
CATCHES = {"BaseException", "KeyboardInterrupt"}


def loops_under_cleanup(source: str) -> list[int]:
    """Lines of loops in a frame that has to clean up whatever ends them.

    Where a loop jumps back, Python 3.12 and later may raise an interrupt that no handler of the
    frame is told of. Loops in functions that the frame calls are frames of their own.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Try):
            caught = [ast.unparse(one.type) if one.type else "" for one in node.handlers]
            interrupts = any(
                not names or CATCHES & set(names.strip("()").split(", ")) for names in caught
            )
            body = node.body + node.orelse if node.finalbody or interrupts else []
        else:
            body = node.body if isinstance(node, ast.With | ast.AsyncWith) else []
        for inside in body:
            found.update(loops_of(inside))
    return sorted(found)


def loops_of(node: ast.AST) -> list[int]:
    """Lines of loops in a node's own frame."""
    if isinstance(node, FUNCTIONS):
        return []
    if isinstance(node, ast.GeneratorExp):
        # the first iterable is made in the frame around it
        return loops_of(node.generators[0].iter)
    inside = [line for child in ast.iter_child_nodes(node) for line in loops_of(child)]
    return [node.lineno, *inside] if isinstance(node, JUMPS) else inside


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_what_an_interrupt_must_undo_has_no_loop_of_its_own(path):
    """The body of such a `try` or `with` calls what loops."""
    assert not loops_under_cleanup(path.read_text())


LOOPS = {
    "for": ("try:\n for x in y: f(x)\nfinally: g()", [2]),
    "while": ("try:\n f()\n while x: f()\nexcept BaseException: g()", [3]),
    "comprehension": ("with f():\n return {x for x in y}", [2]),
    "nested": ("with f():\n if x:\n  try:\n   g([x for x in y])\n  except E: pass", [4]),
    "bare": ("try: [x for x in y]\nexcept: g()", [1]),
    "made for a generator": ("with f():\n g(x for x in [y for y in z])", [2]),
    "else": ("try: f()\nexcept (E, KeyboardInterrupt): g()\nelse: [x for x in y]", [3]),
    "a frame of its own": ("with f():\n g(x for x in y)\n def h():\n  for x in y: pass", []),
    "around": ("for x in y:\n try: f(x)\n finally: g()", []),
    "an error's alone": ("try:\n for x in y: f(x)\nexcept Exception: g()", []),
    "in the cleanup": ("try: f()\nfinally:\n for x in y: g(x)", []),
}


@pytest.mark.parametrize(("source", "lines"), LOOPS.values(), ids=LOOPS)
def test_loops_under_cleanup_are_found(source, lines):
    assert loops_under_cleanup(source) == lines
