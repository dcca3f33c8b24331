"""Make Triton's interpreter cheaper, and give its products what those of a GPU have."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# a matrix as rows of one each, and what all of these are multiplied with
ROW, MATRIX = (..., slice(None), None, slice(None)), (..., None, slice(None), slice(None))


def patch_once(shortcuts: Mapping[Any, Callable[[Any], Any]] | None = None) -> None:
    """Replace the operations of `triton.language` once, and for good.

    The interpreter does so at every launch, which puts them back at its end, and looks through all
    of the language for more of them at every call of a device function: up to half of its time.

    Parameters
    ----------
    shortcuts : mapping
        For operations of `triton.language`, what makes another of the one that replaces it.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    ways = shortcuts or {}

    @cache
    def interpreted(operation: Any, builder: Any) -> Any:
        semantic, function = TritonSemantic(builder), inspect.unwrap(operation)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        if operation not in ways:
            return call
        shortcut = ways[operation](call)
        shortcut.__wrapped__ = call
        return shortcut

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name, member in inspect.getmembers(package, tl.core.is_builtin):
            scope.set_attr(package, name, interpreted(member, builder))

    @cache
    def patch_language() -> Any:
        patch_all(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        return interpreter._LangPatchScope()

    if hasattr(interpreter, "_LangPatchScope"):
        patch_all = interpreter._patch_lang
        interpreter._patch_builtin = patch
        interpreter._patch_lang = lambda function: patch_language()


def describe_once() -> None:
    """Work out once what shape and elements say of a value.

    Every value of a kernel is new, and the interpreter describes each anew: its shape as constants
    that have types of their own, its type as text.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.interpreter import TensorHandle

    check_handle, make_tensor = TensorHandle.__post_init__, TritonSemantic.to_tensor
    make_block, kind_in_numpy = tl.block_type.__init__, interpreter._get_np_dtype
    shapes: dict[Any, Any] = {}
    kinds: dict[str, Any] = {}

    @cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    def describe(value: Any) -> tuple[Any, Any]:
        return constants(tuple(value.type.shape) if value.type.is_block() else ())

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if sizes not in shapes:
            make_block(self, element_ty, shape)
            shapes[sizes] = self.shape, self.numel
        self.element_ty, (self.shape, self.numel) = element_ty, shapes[sizes]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and data.itemsize > getattr(dtype, "itemsize", 8):
            check_handle(self)

    def as_tensor(self: Any, value: Any, *args: Any, **named: Any) -> Any:
        return value if type(value) is tl.tensor else make_tensor(self, value, *args, **named)

    def find_kind(kind: Any) -> Any:
        kind = kind.scalar
        if kind.name not in kinds:
            kinds[kind.name] = kind_in_numpy(kind)
        return kinds[kind.name]

    tl.block_type.__init__ = init_block
    tl.block_type.name = property(
        lambda self: f"<{self.shape}, {self.element_ty}>", lambda *_: None
    )
    tl.tensor.numel = property(lambda self: describe(self)[0])
    tl.tensor.shape = property(lambda self: describe(self)[1])
    tl.tensor.__init__, TensorHandle.__init__ = init_tensor, init_handle
    TritonSemantic.to_tensor, interpreter._get_np_dtype = as_tensor, find_kind
    # the arguments of all launches share the types of pointers
    tl.str_to_ty = cache(tl.str_to_ty)


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


def round_to_float8() -> None:
    """Let numbers become the nearest e4m3 ones, the even one of two, and NaN stay one.

    The interpreter loses the carry from mantissa to exponent, so that 31.3 becomes 16; and what is
    NaN becomes 480 on its way back.
    """
    import numpy as np
    import torch
    from triton.language import float8e4nv, float32
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
        if kind == float8e4nv:
            numbers = torch.from_numpy(np.array(data)).view(torch.float8_e4m3fn).float().numpy()
            if wanted == float32:
                return numbers.view(np.uint32)
            data, kind = numbers, float32
        if wanted != float8e4nv:
            return convert(data, kind, wanted, rounding)
        if kind != float32:
            data = convert(data, kind, float32, None).view(np.float32)
        found = torch.from_numpy(np.array(data, np.float32)).to(torch.float8_e4m3fn)
        return found.view(torch.uint8).numpy()

    interpreter._convert_float = convert_float


def round_to_bfloat16() -> None:
    """Let numbers become the nearest bfloat16 ones; the interpreter cuts them off."""
    import torch
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
        if kind != float32 or wanted != bfloat16:
            return convert(data, kind, wanted, rounding)
        found = torch.from_numpy(data.view("float32").copy()).to(torch.bfloat16)
        return found.view(torch.int16).numpy().view("uint16")

    interpreter._convert_float = convert_float
