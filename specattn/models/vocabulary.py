"""Compares the tokenizers of a draft and its target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from specattn.errors import ModelError
from specattn.models.hub import first_line

if TYPE_CHECKING:
    from pathlib import Path

    from specattn.models.fused import FusedTarget
    from specattn.models.hf import HFTarget

_FILE = "tokenizer.json"


def check_tokenizer(folder: Path, name: str, target: HFTarget | FusedTarget) -> None:
    """Refuse a draft whose tokenizer is not the target's.

    Both must give every token id that both have to the same token; either may have more. Without
    a ``tokenizer.json`` beside the draft, or a tokenizer beside the target, there is nothing to
    compare.

    Parameters
    ----------
    folder : Path
        Where the draft's files are.
    name : str
        The draft's folder or Hub id, for messages.
    target : HFTarget or FusedTarget
        The target.

    Raises
    ------
    ModelError
        If the tokenizers differ, or the draft's is corrupt. The line names the file and a token.
    """
    if not (folder / _FILE).is_file():
        return
    try:
        wanted = target.tokenizer.get_vocab()
    except ModelError:
        return
    try:
        found = Tokenizer.from_file(str(folder / _FILE)).get_vocab()
    # the library raises plain exceptions
    except Exception as error:
        raise ModelError("draft", f"{name} has a corrupt {_FILE}: {first_line(error)}") from error
    tokens = {index: token for token, index in wanted.items()}
    for token, index in sorted(found.items(), key=lambda entry: entry[1]):
        if tokens.get(index, token) != token:
            raise ModelError(
                "draft",
                f"{name} has another tokenizer than the target: {_FILE} has {token!r} as token "
                f"{index}, the target has {tokens[index]!r}",
            )
