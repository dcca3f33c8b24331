"""What the captured forwards of a step share: handing values to buffers, and fingerprints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specattn.buffers import BufferSet, Fingerprint, fingerprint

if TYPE_CHECKING:
    from torch import Tensor


#: What every program takes: table rows and committed lengths of the requests.
ROWS = ("req_pool_indices", "seq_lens")


def copy_in_all(values: dict[str, Tensor], *sets: tuple[BufferSet, object]) -> None:
    """Hand each buffer set, given with its dimensions, the values it declares.

    Raises
    ------
    ValueError
        Before any set is written: if a value is not what its set declares.
    """
    for part, _ in sets:
        part.check(**{n: values[n] for n in part.tensors().keys() & values.keys()})
    for part, dims in sets:
        if not values:
            part.reset(dims)
        named = part.tensors().keys() & values.keys()
        part.copy_in(dims, **{name: values[name] for name in named})


def describe(
    setting: object, req_to_token: Tensor, *sets: BufferSet, **parts: object
) -> Fingerprint:
    """Describe a program's setting, the request table, its buffer sets and what else it reads."""
    for part in sets:
        parts[type(part).__name__] = part
    return fingerprint(setting=setting, req_to_token=req_to_token, **parts)
