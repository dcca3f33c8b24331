"""Make Triton's interpreter cheaper, and give its products what those of a GPU have."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

# a matrix as rows of one each, and what all of these are multiplied with
ROW, MATRIX = (..., slice(None), None, slice(None)), (..., None, slice(None), slice(None))


def patch_once() -> None:
    """Let calls of device functions leave alone what their launch has patched already.

    For every such call, too, the interpreter looks through all of `triton.language` for operations
    to replace, in vain: that is up to half of its time. What there is to replace is looked up
    once, and not sought again before the launch puts it back.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def operations(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        names = operations(package)
        if names and is_builtin(getattr(package, names[0])):
            for name in names:
                interpreter._patch_attr(package, name, getattr(package, name), builder, scope)

    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        interpreter._patch_builtin = patch


def without_idle_checks() -> None:
    """Leave out what looks for overflows of integers, which takes a quarter of the time.

    Whatever it finds goes to an assertion that the interpreter drops, as it does not debug.
    """
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


def multiply_by_row() -> None:
    """Let a row of a product have the same bits at any place of its tile, as on a GPU.

    The interpreter multiplies with numpy, whose BLAS on some processors adds up the last rows of
    a matrix in another order than the first.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *args: Any) -> Any:
        rows, columns, added = (
            TensorHandle(one.data[where], one.dtype.scalar)
            for one, where in ((a, ROW), (b, MATRIX), (d, ROW))
        )
        found = multiply(builder, rows, columns, added, *args)
        return TensorHandle(found.data.squeeze(-2), d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def spread_bits() -> None:
    """Let a comparison of scalars be bits once it is spread over a block.

    The interpreter of Triton 3.9 makes numbers of the compared kind of it, and refuses them as the
    mask of a load.
    """
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    spread = InterpreterBuilder.create_splat

    def create_splat(builder: Any, kind: Any, scalar: Any) -> Any:
        if scalar.data.dtype == bool:
            scalar = TensorHandle(scalar.data, int1)
        return spread(builder, kind, scalar)

    InterpreterBuilder.create_splat = create_splat
