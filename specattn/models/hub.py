"""Model folders, local or on the Hub; errors of one line."""

from __future__ import annotations

import pickle
import warnings
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import is_zipfile

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as hf_logging

from specattn.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

#: The folder of the pair that comes with the package; an installation may lack it.
PAIR = Path(str(files("specattn"))) / "pair"
#: The folders of its draft heads by kind; a kind that is not there was not shipped.
PAIR_HEADS = {"eagle3": PAIR / "draft", "dflash": PAIR / "dflash"}
#: The folder of heads for published models, by the names that ``draft`` may give.
HEADS = PAIR.parent / "heads"
_GGUF = ".gguf"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and progress bars of transformers and the Hub."""
    bars = hf_logging.is_progress_bar_enabled()
    levels = hf_logging.get_verbosity(), hub_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(levels[0])
        hub_logging.set_verbosity(levels[1])
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def blaming(argument: str, name: str) -> Iterator[None]:
    """Load quietly, and turn any error into a `ModelError` about ``name``."""
    try:
        with quiet():
            yield
    except ModelError:
        raise
    # Loading runs five libraries' code over a stranger's files: no list of types would be complete.
    except Exception as error:
        raise ModelError(argument, f"{name} {_cause(error, name)}") from error


def is_gguf(path_or_id: str | Path) -> bool:
    """Return whether a name is that of a GGUF file."""
    return str(path_or_id).endswith(_GGUF)


def locate(argument: str, path_or_id: str | Path) -> str:
    """Return a model's folder, GGUF file or Hub name, or blame ``argument``."""
    name = str(path_or_id)
    path = Path(name).expanduser()
    if argument == "draft" and not path.exists() and (HEADS / name / "config.json").is_file():
        return str(HEADS / name)
    if path.is_dir():
        files = sorted(path.glob(f"*{_GGUF}"))
        if files and not (path / "config.json").is_file():
            raise ModelError(
                argument, f"{name} has no config.json; give its GGUF file, {files[0].name}"
            )
        return str(path)
    if path.is_file() and is_gguf(path):
        return str(path)
    if path.exists():
        raise ModelError(argument, f"{name} is a file; give the folder it is in, or a GGUF file")
    if is_gguf(path):
        raise ModelError(argument, f"no such file: {name}")
    if isinstance(path_or_id, Path) or name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise ModelError(argument, f"no such folder: {name}")
    return name


def fetch(argument: str, path_or_id: str | Path, patterns: list[str]) -> Path:
    """Return a model's folder, with its ``patterns`` fetched from the Hub."""
    name = locate(argument, path_or_id)
    if Path(name).is_dir():
        return Path(name)
    with blaming(argument, name):
        return Path(snapshot_download(name, allow_patterns=patterns))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type.

    A first line that ends in a colon announces the others: all of them are returned then.
    """
    if isinstance(error, KeyError):
        return f"there is no {error}"
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return " ".join(lines) if lines[0].endswith(":") else lines[0]


def count_from_first(names: Collection[str]) -> str:
    """Return the first name in order, and count the others."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return min(names) + more


def is_damage(error: BaseException) -> bool:
    """Return whether an error tells of a damaged file of weights."""
    # torch has no type for it
    zipped = isinstance(error, RuntimeError) and "PytorchStreamReader" in str(error)
    return zipped or isinstance(error, SafetensorError | EOFError)


def _damaged(folder: Path) -> str:
    """Name the first file of weights that is not whole."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(path, "pt")
        except SafetensorError:
            return f"a truncated or corrupt {path.name}"
    odd = [path.name for path in sorted(folder.glob("*.bin")) if not is_zipfile(path)]
    return f"a truncated or corrupt {odd[0]}" if odd else "truncated or corrupt weight files"


def _cause(error: BaseException, name: str) -> str:
    """Say why a load failed, by the chain's first known error."""
    link: BaseException | None = error
    while link is not None:
        if is_damage(link):
            return f"has {_damaged(Path(name))}"
        for kinds, text in _CAUSES:
            if isinstance(link, kinds):
                return text
        link = link.__cause__ or link.__context__
    return f"cannot be loaded: {first_line(error)}"


# The first match wins: a gated repository is also reported as one that cannot be found.
_CAUSES: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    (
        (hub_errors.GatedRepoError,),
        "is gated on the Hub; accept its licence there and log in with `hf auth login`",
    ),
    (
        (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError),
        "is neither a folder here nor a model on the Hub",
    ),
    (
        (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, ConnectionError),
        "is neither a folder here nor in the Hub's cache, and the Hub cannot be reached",
    ),
    ((pickle.UnpicklingError,), "has weight files that are corrupt or hold more than tensors"),
    ((torch.OutOfMemoryError,), "does not fit into the device's memory"),
)
