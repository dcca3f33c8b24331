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
    once, and replaced by the same at every launch, which puts it back at its end.
    """
    import triton.language as tl
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

    @cache
    def languages(function: Any) -> list[Any]:
        found = function.__globals__.values()
        return [member for member in found if member is tl or member is tl.core]

    def patch_language(function: Any) -> Any:
        samples = [tl.tensor.__add__, *(language.load for language in languages(function))]
        return patch_all(function) if any(map(is_builtin, samples)) else nothing

    if hasattr(interpreter, "_LangPatchScope"):
        patch_all, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
        interpreter._patch_builtin, interpreter._patch_lang = patch, patch_language


def describe_once() -> None:
    """Work out once what shape and elements say of a block.

    Every value of a kernel is a new block, and the interpreter describes each anew: its shape as
    constants that have types of their own, its type as text. That takes half of the time.
    """
    import triton.language.core as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    make_block, make_tuple = tl.block_type.__init__, tl.tuple.__init__
    compare_kinds, unwrap_any = tl.dtype.__eq__, tl._unwrap_if_constexpr
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
        sizes = tuple(shape)
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

    def spread(self: Any, scalar: Any, block: Any) -> Any:
        kind = block.type.with_element_ty(scalar.dtype)
        return self.tensor(self.builder.create_splat(kind, scalar.handle), kind)

    def broadcast_two(self: Any, one: Any, other: Any) -> Any:
        blocks = one.type.is_block(), other.type.is_block()
        if blocks[0] == blocks[1] and one.shape is other.shape:
            return one, other
        if blocks[0] == blocks[1] or self.builder is not interpreter.interpreter_builder:
            return broadcast(self, one, other)
        return (one, spread(self, other, one)) if blocks[0] else (spread(self, one, other), other)

    plain = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type}

    def unwrap(value: Any) -> Any:
        return value if type(value) in plain else unwrap_any(value)

    def equal_kinds(self: Any, other: Any) -> bool:
        return self is other or compare_kinds(self, other)

    tl.tensor.__init__, tl.block_type.__init__, tl.tuple.__init__ = (
        init_tensor,
        init_block,
        init_tuple,
    )
    tl.block_type.name = property(
        lambda self: f"<{self.shape}, {self.element_ty}>", lambda *_: None
    )
    tl.tuple.type = property(tuple_type, lambda self, type: setattr(self, "_type", type))
    tl.dtype.__eq__, tl._unwrap_if_constexpr = equal_kinds, unwrap
    interpreter._get_np_dtype = find_kind
    TritonSemantic.broadcast_impl_value = broadcast_two


def convert_once() -> None:
    """Convert a number once, and nothing where both sides of an operation are of one kind."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_builder

    convert, make_constant = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.scalar_constant,
    )
    constants: dict[Any, Any] = {}
    floats = (tl.float32, tl.float64)
    alike = {id(kind) for kind in (tl.int1, tl.int32, tl.int64, tl.uint32, tl.uint64, *floats)}

    def takes(one: Any, number: Any) -> bool:
        """Whether a number beside a value gets the value's kind."""
        if type(one) is not tl.tensor or type(number) not in (int, float):
            return False
        fits = type(number) is int and -(2**31) <= number < 2**31
        return any(one.dtype is kind for kind in floats) or (fits and one.dtype is tl.int32)

    def convert_two(self: Any, one: Any, other: Any, *args: Any, **named: Any) -> Any:
        # beside what an operation may take pointers for, nothing is asked
        plain = len(args) <= 2 and not named
        if plain and takes(one, other):
            other = self.scalar_constant(other, one.dtype)
        elif plain and takes(other, one):
            one = self.scalar_constant(one, other.dtype)
        if type(one) is not tl.tensor or type(other) is not tl.tensor:
            return convert(self, one, other, *args, **named)
        if one.dtype is not other.dtype or id(one.dtype) not in alike:
            return convert(self, one, other, *args, **named)
        return self.broadcast_impl_value(one, other)

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if self.builder is not interpreter_builder:
            return make_constant(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
        return constants[key]

    TritonSemantic.binary_op_type_checking_impl = convert_two
    TritonSemantic.scalar_constant = constant


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
