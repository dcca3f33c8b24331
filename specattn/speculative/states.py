"""The states of requests between steps, on the device.

A one-graph step reads and writes these rows itself, so that the host need not hand anything over
between steps but the rows that take part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from specattn.buffers import BufferSet, buf
from specattn.checks import expect, instance
from specattn.speculative.sampling.params import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Collection


class StateField(NamedTuple):
    """A tensor ``[R, width]`` that a proposer keeps, zeros at first."""

    width: int
    dtype: torch.dtype


def alloc_fields(
    fields: Mapping[str, StateField], rows: int, device: torch.device
) -> dict[str, Tensor]:
    """Allocate ``[rows, width]`` zeros of every field.

    Raises
    ------
    ValueError
        If it is no mapping of names to `StateField`.
    """
    instance("state_fields", fields, Mapping, "a mapping of names to StateField")
    for name, one in fields.items():
        instance(f"state_fields[{name!r}]", one, StateField, "a StateField")
    return {
        name: torch.zeros(rows, width, dtype=dtype, device=device)
        for name, (width, dtype) in fields.items()
    }


def check_kept(name: str, state: Mapping[str, Tensor], known: Collection[str]) -> None:
    """Refuse a proposer's states that are no mapping of its fields."""
    instance(name, state, Mapping, "a mapping of fields to tensors")
    if unknown := sorted(state.keys() - set(known)):
        raise ValueError(f"{name} must be of the fields {sorted(known)}, got {unknown}")


@dataclass(frozen=True)
class RequestStates(BufferSet):
    """Every request's length, newest token, next proposal and sampling parameters.

    The axis that other buffer sets have for the batch is the row of ``req_to_token`` here:
    ``RequestStates.alloc(max_num_reqs + 1, proposer.state_fields(config), device)``. Row 0 belongs
    to padding and is never written. A request's row is written by `admit` and then by its steps.

    Parameters
    ----------
    seq_lens, bonus_tokens : Tensor
        ``[R]`` int32 and int64: tokens with committed KV, and the newest, which has none yet.
    drafting : dict of str to Tensor
        ``[R, width]`` for every field of the proposer: where the next proposal starts.
    temperature, top_p : Tensor
        ``[R]`` float32; a request draws if its temperature is above 0, and ``top_p`` 1 is off.
    top_k, seeds : Tensor
        ``[R]`` int32 and int64; ``top_k`` 0 is off.
    position_offsets : Tensor
        ``[R, 1]`` int64: what steps add to a token's place in its text for the position that models
        rotate by; ``[R, 0]`` unless they were asked for. Windows, random numbers and
        logits processors go by places.
    """

    seq_lens: Tensor = buf(lambda _: (), torch.int32)
    bonus_tokens: Tensor = buf(lambda _: (), torch.int64)
    temperature: Tensor = buf(lambda _: (), torch.float32)
    top_k: Tensor = buf(lambda _: (), torch.int32)
    top_p: Tensor = buf(lambda _: (), torch.float32, lambda _: torch.ones(()))
    seeds: Tensor = buf(lambda _: (), torch.int64)
    position_offsets: Tensor = buf(lambda offsets: (int(offsets),), torch.int64)

    drafting: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def alloc(
        cls,
        batch: int,
        dims: Mapping[str, StateField],
        device: torch.device,
        *,
        position_offsets: bool = False,
    ) -> Self:
        """Allocate ``batch`` rows of padding.

        Parameters
        ----------
        batch : int
            R.
        dims : mapping of str to StateField
            `Proposer.state_fields`, of the config with most branches; nothing without a proposer.
        device : torch.device
            Where the states live.
        position_offsets : bool
            Whether requests may have offsets of their positions.

        Raises
        ------
        ValueError
            If a field of the proposer has the name of one of these tensors.
        """
        drafting = alloc_fields(dims, batch, device)
        if taken := drafting.keys() & cls.__dataclass_fields__.keys():
            raise ValueError(
                f"state fields of a proposer must have names of their own, got {sorted(taken)}"
            )
        return replace(super().alloc(batch, position_offsets, device), drafting=drafting)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return super().tensors() | self.drafting

    def admit(
        self,
        rows: Tensor,
        seq_lens: Tensor,
        bonus_tokens: Tensor,
        state: Mapping[str, Tensor],
        sampling: SamplingBatch,
        position_offsets: Tensor | None = None,
    ) -> None:
        """Write the rows of requests whose prompts have run.

        Parameters
        ----------
        rows : Tensor
            ``[B]`` int64, table rows, all different and none of them 0.
        seq_lens, bonus_tokens : Tensor
            ``[B]`` int32 and int64.
        state : mapping of str to Tensor
            What the prompts left in `drafting`, of this set's widths.
        sampling : SamplingBatch
            How the requests draw.
        position_offsets : Tensor, optional
            ``[B]`` int64, zeros by default: what follows a prompt whose positions are not its
            tokens' places, as those of images, goes on at place + offset. That must be a position
            of the models, from 0 to below the table's ``max_context_len``, wherever steps may come.

        Raises
        ------
        ValueError
            If offsets are given to states without, if ``state`` has a field that these have not, or
            a tensor is of another count, width, dtype or device; nothing has been written then. If
            a row is 0, the table's none, or named twice, where ``rows`` lie on the host: what lies
            on a GPU is not read.
        """
        own = self.tensors()
        self._check_rows(rows)
        check_kept("state", state, self.drafting)
        instance("sampling", sampling, SamplingBatch, "a SamplingBatch (SamplingBatch.of)")
        if position_offsets is not None:
            if not self.position_offsets.shape[1]:
                raise ValueError(
                    "position_offsets need states that keep them: allocate them with "
                    "RequestStates.alloc(..., position_offsets=True)"
                )
            position_offsets = position_offsets[..., None]
        given = {"seq_lens": seq_lens, "bonus_tokens": bonus_tokens} | {
            f"state.{name}": value for name, value in state.items()
        }
        for name in ("temperature", "top_k", "top_p", "seeds"):
            if (value := getattr(sampling, name)) is not None:
                given[f"sampling.{name}"] = value
        if position_offsets is not None:
            given["position_offsets"] = position_offsets
        for name, value in given.items():
            table = own[name.rpartition(".")[2]]
            # torch would take one row for all
            expect(name, value, (len(rows), *table.shape[1:]), table.dtype, table.device)
        self.seq_lens[rows] = seq_lens
        # -1 marks logits that were not finite; the request ends before it steps
        self.bonus_tokens[rows] = bonus_tokens.clamp(min=0)
        for name, value in state.items():
            self.drafting[name][rows] = value
        self.temperature[rows] = sampling.temperature
        self.seeds[rows] = sampling.seeds
        for table, value, off in (
            (self.top_k, sampling.top_k, 0),
            (self.top_p, sampling.top_p, 1),
            (self.position_offsets, position_offsets, 0),
        ):
            if value is None:
                # torch copies an assigned number from the host, which waits for the prompts
                table.index_fill_(0, rows, off)
            else:
                table[rows] = value

    def _check_rows(self, rows: Tensor) -> None:
        """Refuse rows that are no requests'; a GPU's are not read."""
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype != torch.int64:
            got = f"{list(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else repr(rows)
            raise ValueError(f"rows must be [B] torch.int64, got {got}")
        if rows.is_cpu:
            found, most = rows.tolist(), len(self.seq_lens) - 1
            if len(set(found)) < len(found) or not all(1 <= row <= most for row in found):
                raise ValueError(f"rows must be distinct rows 1..{most}, got {found}")
