"""The parts of the full set; the quick set is a few cells of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .cases import (
    Case,
    Cell,
    K,
    Part,
    chain,
    draft,
    even,
    extend,
    fixed,
    float8,
    mla,
    prompt,
    ragged,
    sinks,
    tree,
    with_page,
)

SMALL, MEDIUM, BROAD, WIDE = (4, 3, 8), (4, 5, 16), (8, 3, 16), (8, 5, 32)
LARGE, HUGE = (8, 7, 64), (8, 7, 128)
MIXED = (64 * K, *even(31, 2 * K))


def _trees() -> list[Cell]:
    """Sizes with small trees, then every tree at three sizes."""
    small = [
        even(1, 100),
        even(1, K),
        even(1, 4 * K),
        even(1, 32 * K),
        even(1, 128 * K),
        even(32, 4 * K),
        even(32, 8 * K),
        even(32, 32 * K),
        even(64, K),
        even(64, 4 * K),
        even(128, 512),
        even(256, K),
        even(512, 512),
        MIXED,
        ragged(32, 800, 8 * K),
        ragged(64, 100, 4 * K),
    ]
    quick = (even(1, 100), even(1, 4 * K), even(32, 4 * K), MIXED)
    medium = [even(1, 32 * K), even(8, K), even(8, 8 * K), even(8, 32 * K)]
    cells = [Cell(tree(size, *SMALL), quick=size in quick) for size in small]
    cells += [Cell(tree(size, *MEDIUM), quick=size == even(8, 8 * K)) for size in medium]
    for shape in (BROAD, WIDE, LARGE, HUGE):
        cells += [
            Cell(tree(even(1, 4 * K), *shape)),
            Cell(tree(even(8, 8 * K), *shape), quick=shape == LARGE),
            Cell(tree(even(32, 4 * K), *shape)),
        ]
    return [*cells, Cell(tree(even(1, 32 * K), *LARGE))]


def _shapes() -> list[Cell]:
    found = []
    for heads, width in (
        ((8, 1), 128),
        ((16, 8), 128),
        ((64, 8), 128),
        ((32, 8), 64),
        ((16, 4), 256),
    ):
        head = {"heads": heads, "head_dim": width}
        # with one KV head a token has few bytes
        batch = 32 if heads[1] == 1 else 8
        found += [
            Cell(tree(even(1, 4 * K), *SMALL, **head)),
            Cell(tree(even(batch, 8 * K), *SMALL, **head), quick=width == 256),
            Cell(tree(even(8, 8 * K), *LARGE, **head)),
            Cell(chain(even(batch, 8 * K), **head)),
            Cell(draft(even(batch, 8 * K), 8, 2, **head)),
        ]
    half = {"dtype": "float16"}
    return [
        *found,
        Cell(tree(even(8, 32 * K), *SMALL, heads=(8, 1)), quick=True),
        Cell(tree(even(64, 4 * K), *SMALL, heads=(8, 1))),
        Cell(tree(even(1, 4 * K), *SMALL, **half)),
        Cell(tree(even(8, 8 * K), *MEDIUM, **half)),
        Cell(tree(even(32, 4 * K), *SMALL, **half)),
        Cell(chain(even(8, 8 * K), **half)),
        Cell(chain(even(8, 8 * K), 8, **half)),
        Cell(draft(even(8, 8 * K), 8, 2, **half)),
    ]


def _pages() -> list[Cell]:
    """Pages against page 1 within the cell: the layout of the pool is all that differs."""
    both = [
        tree(even(1, 4 * K), *SMALL),
        tree(even(8, 8 * K), *MEDIUM),
        tree(even(8, 32 * K), *SMALL),
        tree(even(32, 4 * K), *SMALL),
        tree(even(8, 8 * K), *LARGE),
        tree(MIXED, *SMALL),
        chain(even(8, 8 * K)),
        chain(even(8, 8 * K), 8),
    ]
    large = [
        tree(even(8, 8 * K), *WIDE),
        tree(even(64, 4 * K), *SMALL),
        chain(even(1, 4 * K)),
        chain(even(32, 4 * K)),
        chain(even(8, 8 * K), 4),
        draft(even(8, 8 * K), 8, 2),
        extend(even(8, 8 * K), 6),
        prompt(even(8, 8 * K), 512),
        prompt(even(1, 8 * K), 8 * K),
        tree(even(8, 32 * K), *SMALL, heads=(8, 1)),
    ]
    sized = [(case, size) for case in both for size in (16, 64)] + [(case, 64) for case in large]
    return [
        Cell(
            with_page(case, size),
            (("page 1", case),),
            quick=size == 64 and case.shape == MEDIUM,
        )
        for case, size in sized
    ]


def _chains() -> list[Cell]:
    decode = [
        even(1, 100),
        even(1, K),
        even(1, 4 * K),
        even(1, 8 * K),
        even(1, 32 * K),
        even(1, 128 * K),
        even(8, K),
        even(8, 8 * K),
        even(32, 4 * K),
        even(64, 16 * K),
        even(128, K),
        even(512, 512),
        MIXED,
    ]
    four = [even(1, K), even(8, K), even(8, 8 * K), even(32, 4 * K)]
    eight = [even(1, K), even(1, 8 * K), even(8, 8 * K), even(32, 8 * K), even(128, K), MIXED]
    return [
        *(Cell(chain(size), quick=size == even(8, 8 * K)) for size in decode),
        *(Cell(chain(size, 4)) for size in four),
        *(Cell(chain(size, 8), quick=size == even(8, 8 * K)) for size in eight),
    ]


def _drafts() -> list[Cell]:
    """Every step at one size, one step at every size."""
    wide = [even(1, K), even(1, 8 * K), even(8, K), even(32, 4 * K), even(128, K), MIXED]
    return [
        *(Cell(draft(even(8, 8 * K), 8, step), quick=step == 2) for step in range(7)),
        *(Cell(draft(even(8, 8 * K), 4, step)) for step in range(5)),
        *(Cell(draft(even(1, 8 * K), 8, step)) for step in (0, 6)),
        *(Cell(draft(size, 8, 2)) for size in wide),
        *(Cell(draft(size, 4, 2)) for size in (even(1, 8 * K), even(32, 4 * K))),
    ]


def _extends() -> list[Cell]:
    sizes = [even(1, 8 * K), even(8, 8 * K), even(32, 4 * K), even(128, K)]
    prompts = [
        prompt(even(8, 8 * K), 512),
        prompt(even(1, 8 * K), 8 * K),
        prompt(even(1, 8 * K), 512),
        prompt(even(1, 64 * K), 512),
        prompt(even(1, 0), 8 * K),
        prompt(even(8, 8 * K), 512, dtype="float16"),
    ]
    return [
        *(Cell(extend(size, 6), quick=size == even(8, 8 * K)) for size in sizes),
        Cell(extend(MIXED, 8)),
        *(Cell(case, quick=case == prompts[0]) for case in prompts),
    ]


def _options() -> list[Cell]:
    """Options in memory-bound cells, and growth: variants of our own, replayed in turn."""
    cells = []
    for lengths in (even(32, 4 * K), even(8, 32 * K)):
        for base in (tree(lengths, *SMALL), chain(lengths)):
            cells.append(
                Cell(
                    base,
                    (
                        # a window that cuts nothing off: its price, not its gain
                        ("window", replace(base, window_left=2**20)),
                        ("cap", replace(base, logit_cap=30.0)),
                        ("lse", replace(base, lse=True)),
                    ),
                    peers=False,
                    quick=base.mode == "tree" and lengths == even(32, 4 * K),
                    title=f"{base.name}, options",
                )
            )
        # the last draft step of one word, and the first of two
        cells.append(
            Cell(
                draft(lengths, 8, 7),
                (("2 words", draft(lengths, 8, 8)),),
                peers=False,
                title=f"{draft(lengths, 8, 7).name}, words",
            )
        )
    for batch, lengths in ((8, (32 * K, 64 * K, 128 * K)), (64, (4 * K, 8 * K, 16 * K))):
        cells.append(_growth("context", [tree(even(batch, n), *SMALL) for n in lengths]))
    cells.append(_growth("context", [chain(even(32, n * K)) for n in (8, 16, 32)]))
    batches = [tree(even(batch, 2 * K), *SMALL) for batch in (64, 128, 256, 512)]
    return [*cells, _growth("batch", batches)]


def _growth(what: str, cases: list[Case]) -> Cell:
    variants = tuple((case.size, case) for case in cases[1:])
    title = f"growth of {what}, {cases[0].name} to {cases[-1].size}"
    return Cell(cases[0], variants, peers=False, title=title)


def _latent() -> list[Cell]:
    cells = []
    for heads in (16, 128):
        four, alike = chain(even(8, 32 * K), 4), tree(even(8, 32 * K), 2, 2, 4)
        cells += [
            Cell(mla(chain(even(1, K)), heads)),
            Cell(mla(chain(even(32, 8 * K), 4), heads)),
            Cell(mla(chain(even(1, 8 * K)), heads)),
            Cell(mla(chain(even(16, 16 * K)), heads), quick=heads == 16),
            Cell(mla(chain(even(64, 4 * K)), heads)),
            Cell(mla(chain(MIXED), heads)),
            Cell(mla(chain(even(1, 8 * K), 4), heads)),
            # no peer takes trees; the chain beside them does as much work
            Cell(mla(four, heads), (("tree", mla(alike, heads)),), quick=heads == 16),
        ]
    return [
        *cells,
        *(Cell(mla(chain(even(16, 16 * K)), 16, size)) for size in (1, 16)),
        Cell(mla(chain(even(128, K)), 16)),
        Cell(mla(chain(MIXED, 4), 16)),
        Cell(mla(chain(even(8, 16 * K), 8), 16)),
        Cell(mla(tree(even(8, 8 * K), *SMALL), 16), peers=False),
    ]


def _float8() -> list[Cell]:
    """The same lengths in float8, against bfloat16 within the cell."""
    first = tree(even(32, 4 * K), *SMALL)
    cases = [
        tree(even(1, 100), *SMALL),
        tree(even(1, 4 * K), *SMALL),
        tree(even(1, 128 * K), *SMALL),
        tree(even(8, 8 * K), *MEDIUM),
        tree(even(8, 8 * K), *LARGE),
        first,
        tree(even(8, 32 * K), *SMALL),
        tree(even(32, 32 * K), *SMALL),
        tree(MIXED, *SMALL),
        tree(even(8, 32 * K), *SMALL, heads=(8, 1)),
        tree(even(16, 8 * K), *SMALL, head_dim=64),
        tree(even(16, 4 * K), *SMALL, heads=(16, 4), head_dim=256),
        chain(even(8, 8 * K)),
        chain(even(32, 4 * K)),
        chain(even(64, 16 * K)),
        chain(even(8, 8 * K), 8),
        draft(even(32, 4 * K), 8, 2),
        prompt(even(8, 8 * K), 512),
        *(
            with_page(case, 64)
            for case in (
                tree(even(8, 8 * K), *MEDIUM),
                first,
                tree(even(8, 32 * K), *SMALL),
                chain(even(32, 4 * K)),
            )
        ),
    ]
    return [Cell(float8(case), (("bfloat16", case),), quick=case == first) for case in cases]


def _fixed() -> list[Cell]:
    cases = [
        tree(even(1, 100), *SMALL),
        tree(even(1, 4 * K), *SMALL),
        tree(even(8, 8 * K), *MEDIUM),
        tree(even(32, 4 * K), *SMALL),
        tree(even(8, 32 * K), *SMALL),
        tree(MIXED, *SMALL),
        tree(even(8, 8 * K), *LARGE),
        tree(even(128, 512), *SMALL),
        chain(even(1, 4 * K)),
        chain(even(8, 8 * K)),
        chain(even(32, 4 * K)),
        chain(even(8, 8 * K), 8),
        draft(even(8, 8 * K), 8, 2),
        extend(even(8, 8 * K), 6),
    ]
    return [
        Cell(
            case,
            (("deterministic", fixed(case)),),
            peers=False,
            quick=case == cases[3],
            title=f"{case.name}, two orders",
        )
        for case in cases
    ]


def _sinks() -> list[Cell]:
    """With sinks and without in turn: the 8B shape, and gpt-oss's with its window and without."""
    oss: dict[str, Any] = {"heads": (64, 8), "head_dim": 64}
    cases = [
        chain(even(1, 8 * K)),
        chain(even(32, 4 * K)),
        tree(even(1, 4 * K), *SMALL),
        tree(even(8, 8 * K), *MEDIUM),
        tree(even(32, 4 * K), *SMALL),
        tree(even(8, 8 * K), *LARGE),
        draft(even(32, 4 * K), 8, 2),
        prompt(even(8, 8 * K), 512),
        fixed(tree(even(8, 8 * K), *MEDIUM)),
        float8(tree(even(32, 4 * K), *SMALL)),
        prompt(even(8, 8 * K), 512, **oss),
        *(
            case
            for window in (-1, 127)
            for case in (
                chain(even(32, 4 * K), window_left=window, **oss),
                tree(even(8, 8 * K), *MEDIUM, window_left=window, **oss),
                tree(even(64, 4 * K), *MEDIUM, window_left=window, **oss),
            )
        ),
    ]
    return [
        Cell(
            case,
            (("sinks", sinks(case)),),
            peers=False,
            quick=case == cases[4],
            title=f"{case.name}, sinks",
        )
        for case in cases
    ]


def parts() -> dict[str, Part]:
    """Return the full set."""
    found = [
        Part("trees", "Tree verify", _trees()),
        Part("shapes", "Head shapes and float16", _shapes()),
        Part("pages", "Pages of 16 and 64 tokens", _pages()),
        Part("chains", "Decode and chain verify", _chains()),
        Part("drafts", "Draft decode", _drafts()),
        Part("extends", "Draft extend and prompts", _extends()),
        Part("options", "Options and growth", _options()),
        Part("latent", "Latent attention (MLA)", _latent()),
        Part("float8", "Keys and values in float8", _float8()),
        Part("fixed", "Deterministic mode", _fixed()),
        Part("sinks", "Attention sinks", _sinks()),
    ]
    return {part.name: part for part in found}


def quick() -> Part:
    """Return a few cells of every part."""
    cells = [cell for part in parts().values() for cell in part.cells if cell.quick]
    return Part("quick", "Quick set", cells)


def only(part: Part, text: str) -> Part:
    """Return the part with the cells whose name contains ``text``."""
    return replace(part, cells=[cell for cell in part.cells if text in cell.name])
