"""Shortcuts of Triton's interpreter give what its own way does, of every kind and shape."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.shortcuts import ARITHMETIC, COMPARISONS

if torch.cuda.is_available():
    pytest.skip("kernels are compiled", allow_module_level=True)
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")

KINDS = ("int1", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64")
NUMBERS = (0, 1, -3, 31, 2**31, 2**40, 2**63, True, -0.0, 0.0, 1.5, 1e-40, 1e300, math.inf)
# of a scalar, and of blocks that meet
SHAPES = ((), (4,), (4, 1), (1, 4), (4, 4))
PAIRS = [((), ()), ((), (4,)), ((4, 1), ()), ((4, 1), (1, 4)), ((4, 4), (4, 1)), ((4,), (4, 4))]
OPERATORS = [f"__{name}__" for name in (*ARITHMETIC, *COMPARISONS)]
TURNED = [f"__r{name}__" for name in ARITHMETIC]


@pytest.fixture(autouse=True)
def _patched() -> None:
    # a launch does so
    interpreter._patch_lang(None)


def value(kind: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Return a value of the language."""
    rng = np.random.default_rng(seed + len(shape))
    dtype = interpreter._get_np_dtype(kind)
    data = rng.integers(0, 2 if kind.is_int1() else 40, shape or (1,))
    data = (data - 20 * (dtype.kind in "if")).astype(dtype)
    handle = interpreter.TensorHandle(data, kind)
    return tl.tensor(handle, tl.core.block_type(kind, list(shape)) if shape else kind)


def outcome(operation: Any, *args: Any, **named: Any) -> Any:
    """Return all of a result, or the class of what was raised."""
    try:
        with np.errstate(all="ignore"):
            found = operation(*args, **named)
    except Exception as error:
        return type(error)
    data = found.handle.data
    return str(found.type), str(found.dtype), [str(n) for n in found.shape], data.dtype, data


def check(operation: Any, *args: Any, **named: Any) -> None:
    got, wanted = (outcome(one, *args, **named) for one in (operation, operation.__wrapped__))
    if isinstance(got, type) or isinstance(wanted, type):
        assert got is wanted
        return
    assert got[:4] == wanted[:4]
    np.testing.assert_array_equal(got[4], wanted[4])
    np.testing.assert_array_equal(np.signbit(got[4]), np.signbit(wanted[4]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*OPERATORS, *TURNED, "minimum", "maximum"])
def test_two_values(name: str) -> None:
    operation = getattr(tl.tensor if name.startswith("__") else tl, name)
    for left, right in product(KINDS, KINDS):
        for shape, other in PAIRS if left == right else PAIRS[3:4]:
            check(operation, value(getattr(tl, left), shape), value(getattr(tl, right), other, 1))
    for kind, number in product(KINDS, NUMBERS):
        check(operation, value(getattr(tl, kind), (4, 1)), number)
        check(operation, value(getattr(tl, kind), ()), tl.constexpr(number))


def test_one_value() -> None:
    for kind, shape in product(KINDS, SHAPES):
        one = value(getattr(tl, kind), shape)
        for other in KINDS:
            check(tl.tensor.to, one, getattr(tl, other))
            check(tl.tensor.to, one, getattr(tl, other), bitcast=True)
        for at in (None, (None,), (None, slice(None)), (slice(None), None), (slice(None),), 0):
            check(tl.tensor.__getitem__, one, at)
    for span in ((0, 8), (2, 4), (0, 3), (4, 2), (0, tl.constexpr(4))):
        check(tl.arange, *span)


def test_choices() -> None:
    for kind, (shape, bits) in product(KINDS, PAIRS):
        mask, one = value(tl.int1, bits), value(getattr(tl, kind), shape)
        for other in (value(getattr(tl, kind), (4, 4), 1), value(tl.int32, ()), *NUMBERS):
            check(tl.where, mask, one, other)
            check(tl.where, mask, other, one)
    check(tl.where, value(tl.int32, (4,)), value(tl.int32, (4,)), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind: str) -> None:
    element = getattr(tl, kind)
    memory = np.arange(64).astype(interpreter._get_np_dtype(element))
    start = interpreter.TensorHandle(
        np.array([memory.ctypes.data], np.uint64), tl.core.pointer_type(element)
    )
    pointer = tl.tensor(start, start.dtype)
    for shape, masked in product(SHAPES, (None, *SHAPES)):
        offset = value(tl.int32, shape)
        offset.handle.data = np.abs(offset.handle.data)
        for move in (offset, offset.to(tl.int64), 3, value(tl.float32, ())):
            check(tl.tensor.__add__, pointer, move)
        at = pointer + offset
        check(tl.tensor.__add__, at, value(tl.int32, (4, 4)))
        mask = None if masked is None else value(tl.int1, masked)
        for other in (None, 0, 0.0, 7, 1.5, value(element, ()), value(element, shape)):
            check(tl.load, at, mask, other)
        for stored in (value(element, ()), value(element, shape), value(tl.int32, shape), 5):
            found = []
            for operation in (tl.store, tl.store.__wrapped__):
                memory[:] = 0
                try:
                    operation(at, stored, mask)
                except Exception as error:
                    found.append(type(error))
                else:
                    found.append(memory.tolist())
            assert found[0] == found[1], (stored, mask)
