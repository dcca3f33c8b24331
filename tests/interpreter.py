"""Make Triton's interpreter cheaper, and give its products what those of a GPU have."""

from __future__ import annotations

import inspect
import math
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
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    @cache
    def operations(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    @cache
    def interpreted(operation: Any, builder: Any) -> Any:
        semantic = TritonSemantic(builder)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return operation(*args, **named)

        return call

    def patch(package: Any, builder: Any, scope: Any) -> None:
        names = operations(package)
        if names and is_builtin(getattr(package, names[0])):
            for name in names:
                scope.set_attr(package, name, interpreted(getattr(package, name), builder))

    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        interpreter._patch_builtin = patch


def describe_once() -> None:
    """Work out once what shape and elements say of a block.

    Every value of a kernel is a new block, and the interpreter describes each anew: its shape as
    constants that have types of their own, its type as text. That takes half of the time.
    """
    import triton.language.core as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    make_block, make_tuple = tl.block_type.__init__, tl.tuple.__init__
    broadcast, kind_in_numpy = TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype
    shapes: dict[Any, Any] = {}
    kinds: dict[str, Any] = {}

    @cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(tuple(type.shape) if type.is_block() else ())

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([tl._unwrap_if_constexpr(size) for size in shape])
        if sizes not in shapes:
            make_block(self, element_ty, shape)
            shapes[sizes] = self.shape, self.numel
        self.element_ty, (self.shape, self.numel) = element_ty, shapes[sizes]

    def init_tuple(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make_tuple(self, args, type)

    def tuple_type(self: Any) -> Any:
        if "_type" not in vars(self):
            self._type = tl._type_for_tuple_values(self.values)
        return self._type

    def find_kind(kind: Any) -> Any:
        kind = kind.scalar
        if kind.name not in kinds:
            kinds[kind.name] = kind_in_numpy(kind)
        return kinds[kind.name]

    def broadcast_two(self: Any, one: Any, other: Any) -> Any:
        same = one.type.is_block() == other.type.is_block() and one.shape is other.shape
        return (one, other) if same else broadcast(self, one, other)

    tl.tensor.__init__, tl.block_type.__init__, tl.tuple.__init__ = (
        init_tensor,
        init_block,
        init_tuple,
    )
    tl.block_type.name = property(
        lambda self: f"<{self.shape}, {self.element_ty}>", lambda *_: None
    )
    tl.tuple.type = property(tuple_type, lambda self, type: setattr(self, "_type", type))
    interpreter._get_np_dtype = find_kind
    TritonSemantic.broadcast_impl_value = broadcast_two


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
