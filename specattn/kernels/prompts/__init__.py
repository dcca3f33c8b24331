"""Begin a chunk of prompts on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specattn.checks import require_dense, require_rows, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import cdiv, power_of_2, programs_per_row

launch = TritonModule("specattn.kernels.prompts.triton")

#: What the host says of a piece, see `begin_prompts`.
COLUMNS = 10
# places of a program, and pieces that it looks through: the kernel is compiled for these alone,
# and not for every number of pieces
_BLOCK, _PIECES = 64, 64
# numbers that a program clears at a time
_CLEARED = 2048


class PieceStart(NamedTuple):
    """The outputs of `begin_prompts` for P pieces; all dense.

    Parameters
    ----------
    rows, seq_lens : Tensor
        ``[P]`` int64 and int32: each piece's row, and the tokens before it.
    qo_indptr : Tensor
        ``[P + 1]`` int32, where pieces begin.
    last, places : Tensor
        ``[P]`` int64: where each piece's last token of the prompt is among the chunk's, and its
        last place; 0 for a piece without any before the first token.
    ended, before : Tensor
        ``[P]`` int64 and int32: the row of a prompt that ends here, and the tokens before its last
        one; else 0.
    temperature, top_k, top_p, seeds : Tensor
        ``[P]`` float32, int32, float32 and int64: how requests draw.
    """

    rows: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor
    last: Tensor
    places: Tensor
    ended: Tensor
    before: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor


class TokenStart(NamedTuple):
    """The outputs of `begin_prompts` for T places; all dense.

    Parameters
    ----------
    tokens, next_ids : Tensor
        ``[T]`` int64: tokens, and each one's next of its prompt; 0 behind a prompt, and padding.
    rows, positions : Tensor
        ``[T]`` int64: each place's row, and its position in the text; 0 for padding.
    slots : Tensor
        ``[T]`` int32; -1 for padding.
    """

    tokens: Tensor
    next_ids: Tensor
    rows: Tensor
    positions: Tensor
    slots: Tensor


def clear_rows(held: Tensor, rows: Tensor, seq_lens: Tensor) -> None:
    """Zero what is held of rows in which texts begin.

    Parameters
    ----------
    held : Tensor
        ``[L, R, ...]``, contiguous: what L layers hold of R rows; in place.
    rows : Tensor
        ``[P]`` int64, below R; row 0 is padding, and is left.
    seq_lens : Tensor
        ``[P]`` int32, the tokens before: a text of which there are none begins.

    Raises
    ------
    ValueError
        Before anything is written: if a shape, a dtype or a stride is another.
    """
    require_shape((len(rows),), torch.int64, rows=rows)
    require_shape((len(rows),), torch.int32, seq_lens=seq_lens)
    require_dense(held=held, rows=rows, seq_lens=seq_lens)
    layers, count = held.shape[:2]
    size = held[:1, :1].numel()
    if on_triton(held):
        if len(rows) * layers * size:
            blocks = programs_per_row(len(rows) * layers, cdiv(size, _CLEARED))
            launch.clear_rows_kernel[len(rows), layers, blocks](
                held, rows, seq_lens, count, SIZE=size, BLOCK=_CLEARED
            )
        return
    held[:, rows[(seq_lens == 0) & (rows > 0)]] = 0


def begin_prompts(
    pieces: Tensor,
    tokens: Tensor,
    entry: Tensor,
    req_to_token: Tensor,
    *,
    pieces_out: PieceStart,
    tokens_out: TokenStart,
) -> None:
    """Lay out what all forwards of a chunk read; one launch.

    Parameters
    ----------
    pieces : Tensor
        ``[S, P, 10]`` int64, of S chunks in flight: each piece's row, tokens before it, first place
        in the chunk, places, of these places those behind the prompt (0 or 1), the prompt's next
        token (-1 if it ends here), seed, top_k, and the bits of temperature and top_p. Pieces come
        in order, without gaps; one without places begins where the others end, in row 0. Pinned
        memory, which the host may write until a launch, or on the device.
    tokens : Tensor
        ``[S, T]`` int64 alike, the token at every place; both may have a stride of S.
    entry : Tensor
        ``[1]`` int64, at least 0 and below S: whose are read.
    req_to_token : Tensor
        ``[R, context]`` int32; dense last axis.
    pieces_out, tokens_out : PieceStart, TokenStart
        What is written.

    Raises
    ------
    ValueError
        Before anything is written: if a shape or a stride is another.
    """
    count, size = pieces.shape[1], tokens.shape[1]
    require_shape((len(tokens), count, COLUMNS), torch.int64, pieces=pieces)
    require_dense(1, pieces=pieces, tokens=tokens)
    require_rows(req_to_token=req_to_token)
    _check_dense("pieces_out", count, pieces_out._replace(qo_indptr=pieces_out.qo_indptr[1:]))
    _check_dense("tokens_out", size, tokens_out)
    if on_triton(req_to_token):
        launch.begin_prompts_kernel[(max(cdiv(size, _BLOCK), 1),)](
            pieces,
            tokens,
            entry,
            req_to_token,
            tuple(pieces_out),
            tuple(tokens_out),
            count,
            size,
            pieces.stride(0),
            tokens.stride(0),
            req_to_token.stride(0),
            COLUMNS=COLUMNS,
            BLOCK=_BLOCK,
            BLOCK_P=max(_PIECES, power_of_2(count)),
        )
        return
    device = req_to_token.device
    found, texts = (one.to(device)[entry][0] for one in (pieces, tokens))
    row, start, begin, places, ahead, following, seed, top_k, warm, top_p = found.unbind(1)
    end = begin + places
    last = (end - 1 - ahead).clamp(min=0)
    ended = (places > 0) & (following < 0)
    wanted = PieceStart(
        row,
        start,
        torch.cat([begin, end[-1:]]),
        last,
        (end - 1).clamp(min=0),
        torch.where(ended, row, 0),
        torch.where(ended, start + places - ahead - 1, 0),
        warm.to(torch.int32).view(torch.float32),
        top_k,
        top_p.to(torch.int32).view(torch.float32),
        seed,
    )
    for out, value in zip(pieces_out, wanted, strict=True):
        out.copy_(value)
    place = torch.arange(size, device=device)
    inside = (place[:, None] >= begin) & (place[:, None] < end)  # [T, P]
    live, is_last = inside.any(1), (inside & (place[:, None] == last)).any(1)
    own_row = (inside * row).sum(1)
    position = torch.where(live, (inside * (start - begin)).sum(1) + place, 0)
    next_ids = torch.where(live, torch.cat([texts[1:], texts[:1] * 0]), 0)
    after = ((inside & (place[:, None] == last)) * following.clamp(min=0)).sum(1)
    tokens_out.tokens.copy_(torch.where(live, texts, 0))
    tokens_out.next_ids.copy_(torch.where(is_last, after, next_ids))
    tokens_out.rows.copy_(own_row)
    tokens_out.positions.copy_(position)
    tokens_out.slots.copy_(torch.where(live, req_to_token[own_row, position], -1))


def _check_dense(name: str, length: int, outputs: PieceStart | TokenStart) -> None:
    """Raise a ValueError unless all are as long and dense."""
    for field, out in outputs._asdict().items():
        require_shape((length,), **{f"{name}.{field}": out})
        require_dense(**{f"{name}.{field}": out})
