"""Compares the vocabularies of a draft and its target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from specattn.errors import ModelError
from specattn.models.hub import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from specattn.models.builder import Target
    from specattn.models.checkpoint import Checkpoint

_FILE = "tokenizer.json"
# Vocabularies are padded to multiples of at most this.
_MOST_PADDING = 1024
# So many target tokens, chosen for a draft, have two among them that are neighbours.
_FEW_TOKENS = 8


def check_head_tokenizer(folder: Path, name: str, target: Target) -> None:
    """Refuse a head beside whose weights lies another tokenizer than the target's.

    Without a ``tokenizer.json``, or a tokenizer of the target, there is nothing to compare.

    Parameters
    ----------
    folder : Path
        Where the head's files are.
    name : str
        The head's folder or Hub id, for messages.
    target : HFTarget or FusedTarget
        The target.

    Raises
    ------
    ModelError
        If the tokenizers differ, or the head's is corrupt. The line names the file and a token.
    """
    wanted = vocabulary(target) if (folder / _FILE).is_file() else None
    if wanted is None:
        return
    try:
        found = Tokenizer.from_file(str(folder / _FILE)).get_vocab()
    # the library raises plain exceptions
    except Exception as error:
        raise ModelError("draft", f"{name} has a corrupt {_FILE}: {first_line(error)}") from error
    check_vocabulary(name, found, wanted, _FILE)


def check_padding(name: str, vocab_size: int, target: Target) -> None:
    """Refuse a draft whose vocabulary differs by more than padding.

    Tokens that the target's tokenizer does not name are padding.

    Parameters
    ----------
    name : str
        The draft's folder or Hub id, for messages.
    vocab_size : int
        Its tokens by its configuration.
    target : HFTarget or FusedTarget
        The target.

    Raises
    ------
    ModelError
        If the draft lacks a token that the tokenizer names, if the two differ by more than any
        padding, or if there is no tokenizer.
    """
    named, size = vocabulary(target), target.vocab_size
    last = max((index for index in (named or {}).values() if index < size), default=-1)
    if named is None:
        why = ", and no tokenizer to say which of them are padding"
    elif last >= vocab_size:
        why = f", and its tokenizer names token {last}"
    elif abs(vocab_size - size) > _MOST_PADDING:
        why = f", which no padding of at most {_MOST_PADDING} explains"
    else:
        return
    raise ModelError(
        "draft", f"{name} has vocab_size {vocab_size} in config.json; the target has {size}{why}"
    )


def vocabulary(model: Target) -> Mapping[str, int] | None:
    """Return a model's token ids by token; None without a tokenizer."""
    try:
        found: dict[str, int] = model.tokenizer.get_vocab()
    except ModelError:
        return None
    return found


def check_vocabulary(
    name: str, found: Mapping[str, int], wanted: Mapping[str, int], where: str
) -> None:
    """Refuse a draft whose tokens are not the target's.

    Both must give every id that both have to the same token; either may have more.

    Parameters
    ----------
    name : str
        The draft's folder or Hub id, for messages.
    found, wanted : mapping of str to int
        Ids by token, of the draft and of the target.
    where : str
        What gives the draft's tokens, for messages.

    Raises
    ------
    ModelError
        If they differ; the line names the first token that does.
    """
    tokens = {index: token for token, index in wanted.items()}
    for token, index in sorted(found.items(), key=lambda entry: entry[1]):
        if tokens.get(index, token) != token:
            raise ModelError(
                "draft",
                f"{name} has another tokenizer than the target: {where} has {token!r} as token "
                f"{index}, the target has {tokens[index]!r}",
            )


def target_ids(checkpoint: Checkpoint, own_size: int, target_size: int) -> Tensor | None:
    """Return each draft token's target id, ``[Vd]``; d2t holds differences.

    None if the draft has the vocabulary of ``own_size`` tokens, as the target but for padding.
    """
    file, d2t = checkpoint.weights, checkpoint.tensors.get("d2t")
    stated = checkpoint.settings.get("draft_vocab_size")
    if d2t is None:
        if stated not in (None, own_size):
            why = f"that maps these tokens to the target's {target_size}"
            raise checkpoint.wrong_setting(
                "draft_vocab_size", f", and no tensor d2t in {file} {why}"
            )
        return None
    draft_size, vocab_size = stated or d2t.numel(), min(own_size, target_size)
    if d2t.shape != (draft_size,) or d2t.dtype not in (torch.int32, torch.int64):
        raise checkpoint.wrong(
            f"has a tensor d2t of {d2t.dtype} {list(d2t.shape)} in {file}; expected integers "
            f"[{draft_size}]"
        )
    d2t = d2t.long()
    ids = torch.arange(draft_size) + d2t
    if _holds_ids(d2t, ids, marked := _marked(checkpoint, len(ids))):
        raise checkpoint.wrong(
            f"has target ids in d2t in {file}; expected each one's difference to the draft's own id"
        )
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.numel():
        raise checkpoint.wrong(
            f"maps a draft token to {int(outside[0])} by d2t in {file}; draft and target both have "
            f"tokens 0..{vocab_size - 1}"
        )
    if ids.unique().numel() != draft_size:
        raise checkpoint.wrong(f"maps two draft tokens to one target token by d2t in {file}")
    if marked is not None and not torch.equal(ids.sort().values, marked):
        raise checkpoint.wrong(f"has other target tokens in d2t than in t2d in {file}")
    return ids


def _marked(checkpoint: Checkpoint, count: int) -> Tensor | None:
    """Return the target ids that t2d marks, if they are ``count``."""
    mask = checkpoint.tensors.get("t2d")
    if mask is None or mask.dtype != torch.bool or int(mask.sum()) != count:
        return None
    return mask.flatten().nonzero()[:, 0]


def _holds_ids(d2t: Tensor, ids: Tensor, marked: Tensor | None) -> bool:
    """Return whether a d2t holds target ids, not differences.

    Read as differences, ids may stay in range. The mask t2d tells. Without one, sorted ids are
    known by rising with every token: differences that do so leave no two tokens neighbours.
    """
    if marked is None:
        return len(d2t) >= _FEW_TOKENS and bool((d2t.diff() > 0).all())
    by_id, by_difference = (torch.equal(one.sort().values, marked) for one in (d2t, ids))
    return by_id and not by_difference
