"""Operations of Triton's interpreter, computed at once where values are of plain kinds.

An addition goes through twenty functions that type, convert and spread both sides before numpy
adds. Where both are of one kind, or one is a number that becomes of it, all of that changes
nothing. What is not as plain, mistakes among it, is left to the interpreter.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

if TYPE_CHECKING:
    from collections.abc import Callable

BITS = frozenset({"int1"})
WHOLE = frozenset({"int32", "int64", "uint32", "uint64"})
REAL = frozenset({"fp32", "fp64"})
NUMBERS = WHOLE | REAL
# integers of two kinds, and what they are converted to
WIDER = {("int32", "int64"): tl.int64, ("int64", "int32"): tl.int64}
# conversions that numpy does alike
CONVERTED = frozenset(
    {(one, other) for one in BITS | NUMBERS for other in NUMBERS}
    | {("fp16", "fp32"), ("fp32", "fp16")}
)
ARITHMETIC = {
    "add": (np.add, NUMBERS),
    "sub": (np.subtract, NUMBERS),
    "mul": (np.multiply, NUMBERS),
    "truediv": (np.divide, REAL),
    "floordiv": (lambda one, other: (one - np.fmod(one, other)) // other, WHOLE),
    "mod": (np.fmod, NUMBERS),
    "and": (np.bitwise_and, BITS | WHOLE),
    "or": (np.bitwise_or, BITS | WHOLE),
    "xor": (np.bitwise_xor, BITS | WHOLE),
    "lshift": (np.left_shift, WHOLE),
    "rshift": (np.right_shift, WHOLE),
}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def shortcuts() -> dict[Any, Callable[[Any], Any]]:
    """Return, by operation, what takes the interpreter's way and gives one with a shortcut."""
    found: dict[Any, Callable[[Any], Any]] = {
        tl.tensor.to: convert,
        tl.tensor.__getitem__: expand,
        tl.arange: count,
        tl.where: select,
        tl.load: load,
        tl.store: store,
        tl.minimum: partial(combine, np.minimum, NUMBERS),
        tl.maximum: partial(combine, np.maximum, NUMBERS),
    }
    for name, (compute, kinds) in ARITHMETIC.items():
        found[getattr(tl.tensor, f"__{name}__")] = partial(combine, compute, kinds)
        turned = partial(combine, compute, kinds, turned=True)
        found[getattr(tl.tensor, f"__r{name}__")] = turned
    for name, compute in COMPARISONS.items():
        compared = partial(combine, compute, NUMBERS, gives=tl.int1)
        found[getattr(tl.tensor, f"__{name}__")] = compared
    found[tl.tensor.__add__] = add
    return found


def wrap(data: Any, kind: Any, is_block: bool) -> tl.tensor:
    """Return the value of a kind that holds ``data``."""
    handle = TensorHandle(data, kind)
    if not is_block:
        return tl.tensor(handle, kind)
    # a kind keeps the types of its blocks
    blocks = vars(kind).setdefault("blocks", {})
    if data.shape not in blocks:
        blocks[data.shape] = tl.block_type(kind, list(data.shape))
    return tl.tensor(handle, blocks[data.shape])


def is_block(value: Any) -> bool:
    return value.type is not value.dtype


@lru_cache(maxsize=None, typed=True)
def constant(number: float, kind: str) -> Any:
    """Return a number as the interpreter has it beside a value of a kind; None if of another."""
    least, most = 2.0**-126, float(np.finfo(np.float32).max)
    if kind in WHOLE:
        limits = np.iinfo(kind)
        fits = type(number) is int and int(limits.min) <= number <= int(limits.max)
    elif type(number) is int:
        fits = kind == "fp32" and abs(number) <= 2**24
    else:
        fits = kind == "fp32" and (
            number in (0, math.inf, -math.inf) or least <= abs(number) <= most
        )
    return np.array([number], "float32" if kind == "fp32" else kind) if fits else None


@cache
def filled(shape: tuple[int, ...], value: int, kind: Any) -> Any:
    """Return an array that nobody writes to."""
    made = np.full(shape, value, kind)
    made.flags.writeable = False
    return made


def beside(other: Any, kind: Any) -> tuple[Any, Any]:
    """Return the data of what a value of ``kind`` meets, and the kind of both, or None."""
    if type(other) is tl.tensor:
        if other.dtype is not kind:
            kind = WIDER.get((kind.name, other.dtype.name))
        return other.handle.data, kind
    number = other.value if type(other) is tl.constexpr else other
    # releases differ in what a negative 0 is
    known = type(number) in (int, float) and (number or math.copysign(1, number) > 0)
    data = constant(number, kind.name) if known else None
    return data, None if data is None else kind


def combine(
    compute: Any, kinds: Any, slowly: Any, *, gives: Any = None, turned: bool = False
) -> Any:
    """Operations of two values."""

    def call(one: Any, other: Any, **named: Any) -> Any:
        if named or type(one) is not tl.tensor or one.dtype.name not in kinds:
            return slowly(one, other, **named)
        right, kind = beside(other, one.dtype)
        if kind is None:
            return slowly(one, other)
        left = one.handle.data
        data = compute(right, left) if turned else compute(left, right)
        blocks = is_block(one) or (type(other) is tl.tensor and is_block(other))
        return wrap(data, gives or kind, blocks)

    return call


def add(slowly: Any) -> Any:
    """Additions, to pointers as well."""
    add_numbers = combine(np.add, NUMBERS, slowly)

    def call(one: Any, other: Any, **named: Any) -> Any:
        if named:
            return slowly(one, other, **named)
        kind = one.dtype
        if not kind.is_ptr():
            return add_numbers(one, other)
        bytes_each = max(1, kind.element_ty.primitive_bitwidth // 8)
        if type(other) is int:
            return wrap(one.handle.data + other * bytes_each % 2**64, kind, is_block(one))
        if type(other) is not tl.tensor or other.dtype.name not in ("int32", "int64"):
            return slowly(one, other)
        offsets = other.handle.data.astype(np.uint64)
        if bytes_each > 1:
            offsets = offsets * bytes_each
        return wrap(one.handle.data + offsets, kind, is_block(one) or is_block(other))

    return call


def convert(slowly: Any) -> Any:
    """Conversions, and bits as they are read in another kind."""

    def call(one: Any, kind: Any, *args: Any, bitcast: bool = False, **named: Any) -> Any:
        names = one.dtype.name, getattr(kind, "name", "")
        # bits are those of a kind as wide
        same = names in CONVERTED and (not bitcast or kind.itemsize == one.dtype.itemsize)
        if args or named or not same:
            return slowly(one, kind, *args, bitcast=bitcast, **named)
        if kind is one.dtype:
            return one
        data, in_numpy = one.handle.data, interpreter._get_np_dtype(kind)
        data = data.view(in_numpy) if bitcast else data.astype(in_numpy)
        return wrap(data, kind, is_block(one))

    return call


def count(slowly: Any) -> Any:
    """Ranges, each made once."""

    @cache
    def counted(start: int, end: int) -> Any:
        return slowly(start, end).handle.data

    def call(start: Any, end: Any, **named: Any) -> Any:
        if named or type(start) is not int or type(end) is not int:
            return slowly(start, end, **named)
        return wrap(counted(start, end), tl.int32, True)

    return call


def expand(slowly: Any) -> Any:
    """New axes of blocks."""
    whole_axis = slice(None)

    def call(one: Any, at: Any, **named: Any) -> Any:
        if named or type(at) is not tuple or not is_block(one):
            return slowly(one, at, **named)
        for axis in at:
            if axis is not None and axis != whole_axis:
                return slowly(one, at)
        return wrap(one.handle.data[at], one.dtype, True)

    return call


def select(slowly: Any) -> Any:
    """Choices between two values of one kind, one of which may be a number."""

    def call(bits: Any, one: Any, other: Any, **named: Any) -> Any:
        known = one if type(one) is tl.tensor else other
        if named:
            return slowly(bits, one, other, **named)
        if type(known) is not tl.tensor or known.dtype.name not in NUMBERS:
            return slowly(bits, one, other)
        left, left_kind = beside(one, known.dtype)
        right, right_kind = beside(other, known.dtype)
        if type(bits) is not tl.tensor or bits.dtype is not tl.int1:
            return slowly(bits, one, other)
        if left_kind is not known.dtype or right_kind is not known.dtype:
            return slowly(bits, one, other)
        values = [value for value in (bits, one, other) if type(value) is tl.tensor]
        data = np.where(bits.handle.data, left, right)
        return wrap(data, known.dtype, any(map(is_block, values)))

    return call


def places(pointer: Any, mask: Any) -> tuple[Any, Any] | None:
    """Return the kind that is at a pointer and what of it is meant, or None."""
    if type(pointer) is not tl.tensor or not pointer.dtype.is_ptr():
        return None
    kind, shape = pointer.dtype.element_ty, pointer.handle.data.shape
    if kind is tl.int1 or kind.is_block():
        return None
    if mask is None:
        return kind, filled(shape, True, bool)
    if type(mask) is not tl.tensor or mask.dtype is not tl.int1:
        return None
    bits = mask.handle.data
    if bits.shape == shape:
        return kind, bits
    # a mask has as many axes as the pointer, or none
    return (kind, np.broadcast_to(bits, shape)) if fit(mask, pointer) else None


def fit(value: Any, pointer: Any) -> bool:
    """Whether a value becomes as large as a pointer."""
    have, want = value.handle.data.shape, pointer.handle.data.shape
    if not is_block(value) or not is_block(pointer):
        return is_block(pointer) or not is_block(value)
    return len(have) == len(want) and all(a in (1, b) for a, b in zip(have, want, strict=True))


def load(slowly: Any) -> Any:
    def call(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
        found = None if named else places(pointer, mask)
        if found is None or (mask is None and other is not None):
            return slowly(pointer, mask, other, **named)
        kind, bits = found
        at, in_numpy = pointer.handle.data, interpreter._get_np_dtype(kind)
        left = filled(at.shape, 0, in_numpy)
        if other is not None and not (type(other) in (int, float) and other == 0):
            left, left_kind = beside(other, kind)
            if left_kind is not kind or (type(other) is tl.tensor and not fit(other, pointer)):
                return slowly(pointer, mask, other)
            left = np.broadcast_to(left, at.shape)
        data = interpreter._interpreter.load(at, bits, left, in_numpy)
        return wrap(data, kind, is_block(pointer))

    return call


def store(slowly: Any) -> Any:
    def call(pointer: Any, value: Any, mask: Any = None, **named: Any) -> Any:
        found = None if named else places(pointer, mask)
        if found is None or type(value) is not tl.tensor or value.dtype is not found[0]:
            return slowly(pointer, value, mask, **named)
        if not fit(value, pointer):
            return slowly(pointer, value, mask)
        at = pointer.handle.data
        data = np.ascontiguousarray(np.broadcast_to(value.handle.data, at.shape))
        return interpreter._interpreter.store(at, data, found[1])

    return call
