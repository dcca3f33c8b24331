"""What a target is asked to write: code to go on with, questions about code, plain instructions.

Prompts are made in code, of the standard library's source and of the lists below; no file of
problems is read. A prompt is a function of the seed and its number alone. Every sixteenth is about
something held out: files of the library, and subjects, that no other prompt has.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
import warnings
from functools import cache
from pathlib import Path

from .corpus import is_held_out, read_sources

# characters of a piece of code
SHORTEST, LONGEST = 60, 1000
ABOUT_CODE = (
    "Explain step by step what this Python function does.",
    "Write a docstring for this Python function, with its parameters and what it returns.",
    "Write unit tests for this Python function.",
    "Rewrite this Python function so that it is easier to read, and show all of it.",
    "Add type annotations to this Python function.",
    "Which mistakes may a caller of this Python function make? Show how to guard against them.",
    "Write a short example program that uses this Python function.",
)
FINISH = "Here is the beginning of a Python function. Write the whole function."
VERBS = (
    "parses", "validates", "groups", "merges", "formats", "caches", "filters", "compresses",
    "schedules", "compares", "samples", "converts", "indexes", "archives", "renames", "streams",
)  # fmt: skip
THINGS = (
    "log lines", "CSV rows", "configuration files", "time stamps", "URLs", "JSON documents",
    "invoices", "temperature readings", "postal addresses", "playlists", "calendar entries",
    "stock items", "image sizes", "chat messages", "bank transfers", "GPS tracks", "recipes",
    "train timetables", "user accounts", "shell commands", "XML elements", "version numbers",
    "sensor records", "file permissions",
)  # fmt: skip
MANNERS = (
    "with type annotations and a docstring", "as a generator", "and add a few tests",
    "without imports", "and explain your choices", "raising ValueError for bad input",
    "as a class with two methods", "and show an example of its use", "with asyncio",
)  # fmt: skip
SUBJECTS = (
    "version control", "photosynthesis", "the water cycle", "hash tables", "inflation", "tides",
    "encryption", "bread baking", "black holes", "the printing press", "databases", "vaccines",
    "operating systems", "chess", "earthquakes", "compound interest",
)  # fmt: skip
REQUESTS = (
    "Explain {} to {} in {} sentences.", "Write a text about {} for {}, of {} paragraphs.",
    "List facts about {} for {}: {} of them.", "Write a dialogue about {} with {}, of {} turns.",
    "Think of questions about {} from {}, and answer {} of them.",
)  # fmt: skip
READERS = ("a child", "a beginner", "an engineer", "a teacher", "a manager", "a retired person")


def held_out(number: int) -> bool:
    """Return whether a prompt is kept out of training."""
    return number % 16 == 15


@cache
def functions(source: str) -> list[tuple[int, int, int]]:
    """Return the lines at which each function begins, has said its docstring, and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        # some files of the library are wrong on purpose
        except (SyntaxError, ValueError):
            return []
    lines, found = source.splitlines(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) else node.body
            begin, end = node.lineno - 1, node.end_lineno or node.lineno
            if SHORTEST <= sum(map(len, lines[begin:end])) <= LONGEST:
                found.append((begin, body[0].lineno - 1 if body else end, end))
    return found


class Prompts:
    """All prompts of a seed, by number.

    ``root`` is a standard library, and ``chats`` the share of prompts that are messages of a chat.
    """

    def __init__(self, seed: int, root: Path | None = None, chats: float = 0.8) -> None:
        self.seed, self.chats = seed, chats
        self.sources: dict[bool, list[str]] = {False: [], True: []}
        for name, text in read_sources(root or Path(sysconfig.get_path("stdlib"))).items():
            self.sources[is_held_out(name)].append(text)

    def at(self, number: int) -> tuple[str, bool]:
        """Return a prompt, and whether it is a message of a chat."""
        draw, held = random.Random(f"{self.seed}, {number}"), held_out(number)
        files, kind = self.sources[held], draw.random()
        # long files have more to ask about
        (source,) = draw.choices(files, map(len, files))
        if 0.6 * self.chats <= kind < self.chats:
            return _instruction(draw, held), True
        pieces = functions(source) if kind < self.chats else []
        if not pieces:
            begin = source.rfind("\n", 0, draw.randrange(max(1, len(source) - LONGEST))) + 1
            return source[begin : begin + LONGEST], False
        begin, inner, end = draw.choice(pieces)
        ask = draw.choice(ABOUT_CODE)
        if inner > begin and draw.random() < 0.4:
            ask, end = FINISH, inner
        code = textwrap.dedent("\n".join(source.splitlines()[begin:end]))
        return f"{ask}\n\n```python\n{code}\n```", True


def _instruction(draw: random.Random, held: bool) -> str:
    """Return a plain instruction; every eighth thing and subject is held out."""
    things, subjects = (
        [one for at, one in enumerate(all_) if (at % 8 == 7) == held] for all_ in (THINGS, SUBJECTS)
    )
    if draw.random() < 0.6:
        (verb, then), manner = draw.sample(VERBS, 2), draw.choice(MANNERS)
        thing = draw.choice(things)
        return f"Write a Python function that {verb} {thing} and {then} them, {manner}."
    number = draw.randrange(3, 12)
    return draw.choice(REQUESTS).format(draw.choice(subjects), draw.choice(READERS), number)


def runs(text: str) -> set[tuple[str, ...]]:
    """Return all runs of ten words: texts that share one repeat each other."""
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[at:] for at in range(10)), strict=False))
