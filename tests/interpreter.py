"""Make Triton's interpreter cheaper; what it computes stays the same."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


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
