"""The rotations of SGLang's layers: their modules, and the angles of these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from specattn.integrations.sglang.readers import inner_of, odd_reasons
from specattn.models.fused.block import RotaryTable
from specattn.models.hf import rescaling_length

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from specattn.config import AttnConfig

#: The rotation that a Gemma 3 computes for its layers of a kind.
COMPUTED = "Gemma3RotaryEmbedding"
#: Rotations whose angles depend on the position alone.
ROTATIONS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)


@dataclass(frozen=True, eq=False)
class SGLangAngles(RotaryTable):
    """The rotation angles that SGLang has computed.

    SGLang makes the table longer than any context that it serves. Later positions, of padding,
    count as the last one.
    """

    @cached_property
    def rows(self) -> Tensor:
        """``[L, D]`` float32: on CUDA, SGLang's own table."""
        return self.rotary.get_buffer("cos_sin_cache").float()

    def of_length(self, length: int) -> SGLangAngles:
        """Return the table itself."""
        return self


def rotary_of(model: Any, part: Any) -> Any:
    """Return the module that rotates a layer's heads."""
    inner = inner_of(model)
    # besides these, a Gemma 3's layers have modules that know no scaling
    if hasattr(inner, "rotary_emb_local"):
        return inner.rotary_emb_local if part.is_sliding else inner.rotary_emb
    return part.self_attn.rotary_emb


def table_of(rotary: Any) -> RotaryTable:
    """Return a module's angles."""
    if type(rotary).__name__ == COMPUTED:
        return RotaryTable(rotary, rotary.max_seq_len_cached)
    return SGLangAngles(rotary, len(rotary.cos_sin_cache))


def rotation_reasons(rotary: Any, geometry: AttnConfig) -> Iterator[str]:
    """Say where a rotation is not that of a head's halves."""
    halves = True
    if type(rotary).__name__ == COMPUTED:
        _, kind = rescaling_length(rotary.config)
        if kind:
            yield f"rotary_emb rotates by length ({kind})"
        turned = 2 * len(rotary.inv_freq)
    else:
        yield from odd_reasons("rotary_emb", rotary, *ROTATIONS)
        halves, turned = rotary.is_neox_style, rotary.rotary_dim
    if not halves or turned != geometry.head_dim:
        yield "the rotation is not that of two halves of a head"
