"""A prompt, and what it must be to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from specattn.cache.slot_table import SlotTable
from specattn.checks import listed, whole_number, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.cache.external import RequestTable
    from specattn.config import SpecConfig


@dataclass(frozen=True)
class Prompt:
    """A prompt to run, from its cached prefix on.

    Parameters
    ----------
    row : int
        Row of ``req_to_token``; has slots for the whole prompt.
    tokens : sequence of int
        The whole prompt.
    cached : int
        Tokens whose KV is already there; less than the prompt's length.
    """

    row: int
    tokens: Sequence[int]
    cached: int = 0


def check_prompts(prompts: Sequence[Prompt], table: Sequence[int], vocab_size: int) -> None:
    """Raise a ValueError that names what is wrong with prompts.

    ``table`` is the shape of ``req_to_token``.
    """
    if not listed("prompts", prompts, "Prompt"):
        raise ValueError("prompts must be at least one, got none")
    rows, width = table
    for prompt in prompts:
        if not hasattr(prompt, "cached"):
            raise ValueError(f"every prompt must be a Prompt(row, tokens), got {prompt!r}")
        whole_number("a prompt's row", prompt.row, 1, rows - 1)
        whole_numbers("every prompt token", prompt.tokens)
        length = len(prompt.tokens)
        if not 1 <= length <= width:
            raise ValueError(f"a prompt's tokens must be 1..{width}, got {length}")
        low, high = min(prompt.tokens), max(prompt.tokens)
        # an embedding would read past its end
        if low < 0 or high >= vocab_size:
            raise ValueError(f"prompt tokens must be 0..{vocab_size - 1}, got {low}..{high}")
        if not 0 <= whole_number("cached", prompt.cached) < length:
            raise ValueError(
                f"cached must be 0..{length - 1}, so that one of {length} tokens is left to run, "
                f"got {prompt.cached}"
            )


def check_slots(row: int, length: int, table: RequestTable | Tensor, config: SpecConfig) -> None:
    """Refuse a row without slots for ``length`` tokens; reads no accelerator."""
    slots = table if isinstance(table, Tensor) else table.req_to_token
    length = min(length, slots.shape[1])
    if isinstance(table, SlotTable):
        room = table.room(row)
    elif slots.device.type != "cpu":
        return
    elif isinstance(table, Tensor):
        # page 0 is padding
        room = int((slots[row, :length] >= config.page_size).int().cumprod(0).sum())
    else:
        room = int(table.reserved[row])
    if room < length:
        raise ValueError(
            f"row {row} must have slots for the {length} tokens that its prompt writes, got {room}:"
            " reserve them first"
        )
