"""The corpus: the Python standard library's sources, split by file, and its tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterable

END_OF_TEXT = "<|endoftext|>"
MAX_LINE = 400
# 13 of 256 hash values, about 5 % of the files
HELD_OUT_BYTES = 13
_GENERATED = re.compile(r"(?i)\b(auto-?generated|generated (by|from|with|automatically))\b")
_SKIPPED_PARTS = {"site-packages", "__pycache__", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Token streams ``[N] uint16``, files separated by the end-of-text token, and their facts."""

    train: np.ndarray
    held_out: np.ndarray
    facts: dict[str, int]


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


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE with ``END_OF_TEXT`` as its only special token (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``AutoTokenizer``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Encode the texts into one stream ``[N] uint16``, an end-of-text token before each file."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.append(end)
        ids.extend(encoding.ids)
    return np.array([*ids, end], dtype=np.uint16)


def prepare(
    folder: Path, vocab: int, max_length: int, root: Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:  # fmt: skip
    """Write ``tokenizer/``, ``train.npy``, ``held_out.npy`` and ``corpus.json`` into ``folder``.

    ``root`` is a standard library; by default the running interpreter's own. Without a
    ``tokenizer`` one is trained.
    """
    sources = read_sources(root or Path(sysconfig.get_path("stdlib")))
    train = [text for name, text in sources.items() if not is_held_out(name)]
    held_out = [text for name, text in sources.items() if is_held_out(name)]
    tokenizer = tokenizer or train_tokenizer(train, vocab)
    save_tokenizer(tokenizer, folder / "tokenizer", max_length)
    facts: dict[str, int] = {"vocab": tokenizer.get_vocab_size()}
    for name, texts in (("train", train), ("held_out", held_out)):
        stream = encode(tokenizer, texts)
        np.save(folder / f"{name}.npy", stream)
        facts[f"{name}_files"] = len(texts)
        facts[f"{name}_bytes"] = sum(len(text.encode()) for text in texts)
        facts[f"{name}_tokens"] = len(stream)
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")


def load(folder: Path) -> Corpus:
    """Read what `prepare` wrote."""
    return Corpus(
        np.load(folder / "train.npy"),
        np.load(folder / "held_out.npy"),
        json.loads((folder / "corpus.json").read_text()),
    )
