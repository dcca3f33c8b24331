"""The Python standard library's sources, split by file."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
MAX_LINE = 400
# 13 of 256 hash values, about 5 % of the files
HELD_OUT_BYTES = 13
_GENERATED = re.compile(r"(?i)\b(auto-?generated|generated (by|from|with|automatically))\b")
_SKIPPED_PARTS = {"site-packages", "__pycache__", "pydoc_data"}


def is_held_out(relative: str) -> bool:
    """Whether the file at this path relative to the library root is kept out of training."""
    return hashlib.sha256(relative.encode()).digest()[0] < HELD_OUT_BYTES


def read_sources(root: Path) -> dict[str, str]:
    """Map relative path to text, without generated files, odd encodings and very long lines."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_PARTS & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        too_long = any(len(line) > MAX_LINE for line in text.splitlines())
        if len(text) < 64 or too_long or _GENERATED.search(text[:600]):
            continue
        sources[relative.as_posix()] = text
    return sources


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Encode the texts into one stream ``[N] uint16``, an end-of-text token before each file."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.append(end)
        ids.extend(encoding.ids)
    return np.array([*ids, end], dtype=np.uint16)
