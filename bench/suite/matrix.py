"""The parts of the full set; the quick set is a few cells of each."""

from __future__ import annotations

from dataclasses import replace

from .cases import (
    Case,
    Cell,
    K,
    Part,
    chain,
    draft,
    even,
    extend,
    mla,
    prompt,
    ragged,
    tree,
    with_page,
)

SMALL, MEDIUM, WIDE = (4, 3, 8), (4, 5, 16), (8, 5, 32)
LARGE, HUGE = (8, 7, 64), (8, 7, 128)
MIXED = (64 * K, *even(31, 2 * K))


def _trees() -> list[Cell]:
    cells = [
        Cell(tree(even(1, length), *SMALL), quick=length in (100, 4 * K))
        for length in (100, K, 4 * K, 32 * K, 128 * K)
    ]
    cells += [
        Cell(tree(even(8, K), *MEDIUM)),
        Cell(tree(even(8, 8 * K), *MEDIUM), quick=True),
        Cell(tree(even(8, 32 * K), *MEDIUM)),
        Cell(tree(even(32, 4 * K), *SMALL), quick=True),
        Cell(tree(even(32, 32 * K), *SMALL)),
        Cell(tree(MIXED, *SMALL), quick=True),
        Cell(tree(ragged(32, 800, 8 * K), *SMALL)),
        Cell(tree(even(128, 512), *SMALL)),
        Cell(tree(even(512, 512), *SMALL)),
    ]
    for shape in ((8, 3, 16), WIDE, LARGE, HUGE):
        cells.append(Cell(tree(even(8, 8 * K), *shape), quick=shape == LARGE))
    return [*cells, Cell(tree(even(1, 32 * K), *LARGE))]


def _shapes() -> list[Cell]:
    return [
        Cell(tree(even(1, 8 * K), *SMALL, heads=(8, 1))),
        Cell(tree(even(8, 32 * K), *SMALL, heads=(8, 1)), quick=True),
        Cell(tree(even(64, 4 * K), *SMALL, heads=(8, 1))),
        Cell(tree(even(8, 8 * K), *SMALL, heads=(16, 8))),
        Cell(tree(even(8, 8 * K), *SMALL, heads=(64, 8))),
        Cell(tree(even(16, 8 * K), *SMALL, head_dim=64)),
        Cell(tree(even(16, 4 * K), *SMALL, heads=(16, 4), head_dim=256), quick=True),
        Cell(tree(even(8, 8 * K), *MEDIUM, dtype="float16")),
        Cell(tree(even(32, 4 * K), *SMALL, dtype="float16")),
    ]


def _pages() -> list[Cell]:
    """Pages against page 1 within the cell: the layout of the pool is all that differs."""
    cells = []
    for lengths, shape in (
        (even(1, 4 * K), SMALL), (even(8, 8 * K), MEDIUM), (even(8, 32 * K), SMALL),
        (even(8, 8 * K), LARGE),
    ):
        case = tree(lengths, *shape)
        for size in (16, 64):
            cells.append(Cell(
                with_page(case, size), (("page 1", case),),
                quick=size == 64 and shape == MEDIUM,
            ))
    return [
        *cells,
        Cell(chain(even(8, 8 * K), 8, page_size=64)),
        Cell(chain(even(8, 8 * K), 1, page_size=64)),
        Cell(chain(even(1, 4 * K), 1, page_size=64)),
    ]


def _chains() -> list[Cell]:
    sizes = [
        even(1, K), even(1, 8 * K), even(8, 8 * K), even(32, 4 * K), even(64, 16 * K),
        even(128, K), even(512, 512),
    ]
    return [
        *(Cell(chain(size), quick=size == even(8, 8 * K)) for size in sizes),
        Cell(chain(even(1, K), 4)), Cell(chain(even(8, 8 * K), 4)),
        Cell(chain(even(1, 8 * K), 8)), Cell(chain(even(8, 8 * K), 8), quick=True),
        Cell(chain(even(32, 8 * K), 8)), Cell(chain(MIXED, 8)),
    ]


def _drafts() -> list[Cell]:
    return [
        *(Cell(draft(even(8, 8 * K), 8, step), quick=step == 2) for step in range(7)),
        *(Cell(draft(even(8, 8 * K), 4, step)) for step in (0, 2, 4)),
        Cell(draft(even(1, 8 * K), 8, 2)), Cell(draft(even(1, 8 * K), 4, 2)),
        Cell(draft(even(32, 4 * K), 8, 2)),
    ]


def _extends() -> list[Cell]:
    return [
        Cell(extend(even(8, 8 * K), 6), quick=True), Cell(extend(even(32, 4 * K), 6)),
        Cell(extend(even(128, K), 6)), Cell(extend(MIXED, 8)),
        Cell(prompt(even(8, 8 * K), 512), quick=True), Cell(prompt(even(1, 8 * K), 8 * K)),
        Cell(prompt(even(1, 64 * K), 512)), Cell(prompt(even(1, 0), 8 * K)),
    ]


def _options() -> list[Cell]:
    """Options in memory-bound cells, and growth: variants of our own, replayed in turn."""
    cells = []
    for lengths in (even(32, 4 * K), even(8, 32 * K)):
        base = tree(lengths, *SMALL)
        cells.append(Cell(base, (
            # a window that cuts nothing off: its price, not its gain
            ("window", replace(base, window_left=2**20)),
            ("cap", replace(base, logit_cap=30.0)),
            ("lse", replace(base, lse=True)),
        ), peers=False, quick=lengths == even(32, 4 * K)))
        # the last draft step of one word, and the first of two
        cells.append(Cell(
            draft(lengths, 8, 7), (("2 words", draft(lengths, 8, 8)),), peers=False
        ))
    for batch, lengths in ((8, (32 * K, 64 * K, 128 * K)), (64, (4 * K, 8 * K, 16 * K))):
        cases = [tree(even(batch, length), *SMALL) for length in lengths]
        cells.append(_growth("context", cases))
    batches = [tree(even(batch, 2 * K), *SMALL) for batch in (64, 128, 256, 512)]
    return [*cells, _growth("batch", batches)]


def _growth(what: str, cases: list[Case]) -> Cell:
    variants = tuple((case.size, case) for case in cases[1:])
    title = f"growth of {what}, {cases[0].size} to {cases[-1].size}"
    return Cell(cases[0], variants, peers=False, title=title)


def _latent() -> list[Cell]:
    cells = []
    for heads in (16, 128):
        cells += [
            Cell(mla(chain(even(1, 8 * K)), heads)),
            Cell(mla(chain(even(16, 16 * K)), heads), quick=heads == 16),
            Cell(mla(chain(even(8, 32 * K), 4), heads), quick=heads == 16),
            Cell(mla(chain(MIXED), heads)),
        ]
    return [
        *cells,
        Cell(mla(chain(even(16, 16 * K)), 16, 1)),
        Cell(mla(chain(even(128, K)), 16)),
        Cell(mla(tree(even(8, 32 * K), 2, 2, 4), 16), peers=False),
    ]


def _float8() -> list[Cell]:
    """Our own float8 pools against our own 16-bit ones, replayed in turn."""
    cases = [
        tree(even(1, 100), *SMALL), tree(even(1, 4 * K), *SMALL), tree(even(1, 128 * K), *SMALL),
        tree(even(8, 8 * K), *MEDIUM), tree(even(8, 8 * K), *LARGE),
        tree(even(32, 4 * K), *SMALL), tree(even(8, 32 * K), *SMALL),
        tree(even(32, 32 * K), *SMALL), tree(MIXED, *SMALL),
        tree(even(8, 32 * K), *SMALL, heads=(8, 1)), tree(even(16, 8 * K), *SMALL, head_dim=64),
        tree(even(16, 4 * K), *SMALL, heads=(16, 4), head_dim=256),
        tree(even(8, 32 * K), *SMALL, page_size=64),
        chain(even(32, 4 * K)), chain(even(64, 16 * K)), chain(even(8, 8 * K), 8),
        draft(even(8, 8 * K), 8, 2), prompt(even(8, 8 * K), 512),
    ]
    return [
        Cell(
            replace(case, stored="float8_e4m3fn"), (("bfloat16", case),), peers=False,
            quick=case.mode == "tree" and case.lengths == even(32, 4 * K),
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
        Part("float8", "Float8 keys and values", _float8()),
    ]
    return {part.name: part for part in found}


def quick() -> Part:
    """Return a few cells of every part."""
    cells = [cell for part in parts().values() for cell in part.cells if cell.quick]
    return Part("quick", "Quick set", cells)


def only(part: Part, text: str) -> Part:
    """Return the part with the cells whose name contains ``text``."""
    return replace(part, cells=[cell for cell in part.cells if text in cell.name])
