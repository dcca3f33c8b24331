"""What a step leaves for the next one, on the device.

A one-graph step reads and writes these rows itself, so that the host need not hand anything over
between steps but the rows that take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specattn.buffers import BufferSet, buf
from specattn.checks import expect

if TYPE_CHECKING:
    from specattn.batch import DraftState
    from specattn.speculative.model import DraftModel
    from specattn.speculative.sampling import SamplingBatch


@dataclass(frozen=True)
class StateDims:
    """The widths of `RequestStates`, and the dtype of hidden states.

    Parameters
    ----------
    topk : int
        Proposals kept.
    hidden : int
        The draft's hidden size.
    vocab : int
        The draft's vocabulary if it draws; else 0.
    dtype : torch.dtype
        Of hidden states.
    """

    topk: int = 1
    hidden: int = 0
    vocab: int = 0
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, draft: DraftModel | None, topk: int, *, draft_sampling: bool) -> Self:
        """Return the widths for a draft model; 0 without one.

        Parameters
        ----------
        draft : DraftModel or None
            The draft model.
        topk : int
            Proposals to keep: the most of any config over these states.
        draft_sampling : bool
            Whether drafts are drawn, as in `SpecConfig`.
        """
        if draft is None:
            return cls(0)
        vocab = draft.vocab_size if draft_sampling else 0
        return cls(topk, draft.hidden_size, vocab, draft.layers[0].dtype)


@dataclass(frozen=True)
class RequestStates(BufferSet):
    """Every request's length, newest token, next proposal and sampling parameters.

    The axis that other buffer sets have for the batch is the row of ``req_to_token`` here:
    ``RequestStates.alloc(max_num_reqs + 1, StateDims.of(draft, topk, ...), device)``. Row 0 belongs
    to padding and is never written. A request's row is written by `admit` and then by its steps.

    Parameters
    ----------
    seq_lens, bonus_tokens : Tensor
        ``[R]`` int32 and int64, as in `SpecBatch`.
    topk_probs, topk_tokens : Tensor
        ``[R, topk]`` float32 and int64, as in `DraftState`.
    hidden_states : Tensor
        ``[R, hidden]`` of `StateDims.dtype`.
    draft_probs : Tensor
        ``[R, vocab]`` float32; ``[R, 0]`` unless drafts are drawn.
    temperature, top_p : Tensor
        ``[R]`` float32; a request draws if its temperature is above 0, and ``top_p`` 1 is off.
    top_k, seeds : Tensor
        ``[R]`` int32 and int64; ``top_k`` 0 is off.
    """

    seq_lens: Tensor = buf(lambda _: (), torch.int32)
    bonus_tokens: Tensor = buf(lambda _: (), torch.int64)
    topk_probs: Tensor = buf(lambda d: (d.topk,), torch.float32)
    topk_tokens: Tensor = buf(lambda d: (d.topk,), torch.int64)
    hidden_states: Tensor = buf(lambda d: (d.hidden,), lambda d: d.dtype)
    draft_probs: Tensor = buf(lambda d: (d.vocab,), torch.float32)
    temperature: Tensor = buf(lambda _: (), torch.float32)
    top_k: Tensor = buf(lambda _: (), torch.int32)
    top_p: Tensor = buf(lambda _: (), torch.float32, lambda _: torch.ones(()))
    seeds: Tensor = buf(lambda _: (), torch.int64)

    @property
    def drafting(self) -> tuple[Tensor, ...]:
        """Where the next proposal starts: the fields of `DraftState`, in its order."""
        return self.topk_probs, self.topk_tokens, self.hidden_states, self.draft_probs

    def admit(
        self,
        rows: Tensor,
        seq_lens: Tensor,
        bonus_tokens: Tensor,
        state: DraftState | None,
        sampling: SamplingBatch,
    ) -> None:
        """Write the rows of requests whose prompts have run.

        Parameters
        ----------
        rows : Tensor
            ``[B]`` int64, table rows, all different and none of them 0.
        seq_lens, bonus_tokens : Tensor
            ``[B]`` int32 and int64.
        state : DraftState or None
            What the prompts' draft extend left, of this set's widths; None without a draft model.
        sampling : SamplingBatch
            How the requests draw.

        Raises
        ------
        ValueError
            If a tensor is of another count, width, dtype or device; nothing has been written then.
        """
        drafting = vars(state) if state is not None else {}
        given = {"seq_lens": seq_lens, "bonus_tokens": bonus_tokens} | {
            f"state.{name}": value for name, value in drafting.items()
        }
        for name in ("temperature", "top_k", "top_p", "seeds"):
            if (value := getattr(sampling, name)) is not None:
                given[f"sampling.{name}"] = value
        for name, value in given.items():
            own = getattr(self, name.rpartition(".")[2])
            # torch would take one row for all
            expect(name, value, (len(rows), *own.shape[1:]), own.dtype, own.device)
        self.seq_lens[rows] = seq_lens
        # -1 marks logits that were not finite; the request ends before it steps
        self.bonus_tokens[rows] = bonus_tokens.clamp(min=0)
        for name, value in drafting.items():
            getattr(self, name)[rows] = value
        self.temperature[rows] = sampling.temperature
        self.seeds[rows] = sampling.seeds
        self.top_k[rows] = 0 if sampling.top_k is None else sampling.top_k
        self.top_p[rows] = 1.0 if sampling.top_p is None else sampling.top_p
