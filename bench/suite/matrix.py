"""The parts of the full set, whose cases are named as tables show them; some are the quick set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .cases import Case, Cell, Part, fixed, float8, make, mla

#: Names of the quick set's cells.
QUICK = (
    "1 x 100 tree 4-3-8; 1 x 4k tree 4-3-8; 32 x 4k tree 4-3-8; 1 x 64k + 31 x 2k tree 4-3-8; "
    "8 x 8k tree 4-5-16; 8 x 8k tree 8-7-64; 8 x 8k tree 4-3-8 16/4 hd256; "
    "8 x 32k tree 4-3-8 8/1; 8 x 8k tree 4-5-16 page 64; 8 x 8k decode; 8 x 8k chain 8; "
    "8 x 8k draft topk 8 step 2; 8 x 8k extend 1..6; 8 x 8k prompt 512; "
    "32 x 4k tree 4-3-8, options; 16 x 16k decode mla16 page 64; 8 x 32k chain 4 mla16 page 64; "
    "32 x 4k tree 4-3-8 fp8; 32 x 4k tree 4-3-8, two orders; 32 x 4k tree 4-3-8, sinks"
)
MIXED = "1 x 64k + 31 x 2k"


def _named(names: str, **more: Any) -> list[Case]:
    """Return a case per name of those that semicolons divide."""
    return [make(name, **more) for name in names.split("; ")]


def _each(what: str, sizes: str, **more: Any) -> list[Case]:
    """Return a case per size of those that commas divide."""
    return [make(f"{size} {what}", **more) for size in sizes.split(", ")]


def _cells(*cases: list[Case]) -> list[Cell]:
    return [Cell(case) for some in cases for case in some]


def _trees() -> list[Cell]:
    """Sizes with small trees, then every tree at three sizes."""
    small = _each(
        "tree 4-3-8",
        "1 x 100, 1 x 1k, 1 x 4k, 1 x 32k, 1 x 128k, 32 x 4k, 32 x 8k, 32 x 32k, 64 x 1k, 64 x 4k, "
        f"128 x 512, 256 x 1k, 512 x 512, {MIXED}, ragged 32 x 800..8k, ragged 64 x 100..4k",
    )
    medium = _each("tree 4-5-16", "1 x 32k, 8 x 1k, 8 x 8k, 8 x 32k")
    large = (
        _each(f"tree {shape}", "1 x 4k, 8 x 8k, 32 x 4k")
        for shape in ("8-3-16", "8-5-32", "8-7-64", "8-7-128")
    )
    return _cells(small, medium, *large, _each("tree 8-7-64", "1 x 32k"))


def _shapes() -> list[Cell]:
    found = []
    for heads, width in (
        ((8, 1), 128),
        ((16, 8), 128),
        ((64, 8), 128),
        ((32, 8), 64),
        ((16, 4), 256),
    ):
        # with one KV head a token has few bytes
        batch = 32 if heads[1] == 1 else 8
        names = (
            f"1 x 4k tree 4-3-8; {batch} x 8k tree 4-3-8; 8 x 8k tree 8-7-64; "
            f"{batch} x 8k decode; {batch} x 8k draft topk 8 step 2"
        )
        found += _named(names, heads=heads, head_dim=width)
    half = (
        "1 x 4k tree 4-3-8; 8 x 8k tree 4-5-16; 32 x 4k tree 4-3-8; 8 x 8k decode; 8 x 8k chain 8; "
        "8 x 8k draft topk 8 step 2"
    )
    wide = _each("tree 4-3-8", "8 x 32k, 64 x 4k", heads=(8, 1))
    return _cells(found, wide, _named(half, dtype="float16"))


def _pages() -> list[Cell]:
    """Pages against page 1 within the cell: the layout of the pool is all that differs."""
    both = _named(
        "1 x 4k tree 4-3-8; 8 x 8k tree 4-5-16; 8 x 32k tree 4-3-8; 32 x 4k tree 4-3-8; "
        f"8 x 8k tree 8-7-64; {MIXED} tree 4-3-8; 8 x 8k decode; 8 x 8k chain 8"
    )
    large = _named(
        "8 x 8k tree 8-5-32; 64 x 4k tree 4-3-8; 1 x 4k decode; 32 x 4k decode; 8 x 8k chain 4; "
        "8 x 8k draft topk 8 step 2; 8 x 8k extend 1..6; 8 x 8k prompt 512; 1 x 8k prompt 8k"
    )
    large += _named("8 x 32k tree 4-3-8", heads=(8, 1))
    sized = [(case, size) for case in both for size in (16, 64)] + [(case, 64) for case in large]
    return [_auto(Cell(replace(case, page_size=size), (("page 1", case),))) for case, size in sized]


def _auto(cell: Cell) -> Cell:
    """Return the cell beside what ``auto`` takes, where that may be another library."""
    case = cell.case
    if case.mode != "prompt" and case.heads != (128, 1):
        return cell
    return replace(cell, variants=(*cell.variants, ("auto", replace(case, auto=True))))


def _chains() -> list[Cell]:
    return _cells(
        _each(
            "decode",
            "1 x 100, 1 x 1k, 1 x 4k, 1 x 8k, 1 x 32k, 1 x 128k, 8 x 1k, 8 x 8k, 32 x 4k, "
            f"64 x 16k, 128 x 1k, 512 x 512, {MIXED}",
        ),
        _each("chain 4", "1 x 1k, 8 x 1k, 8 x 8k, 32 x 4k"),
        _each("chain 8", f"1 x 1k, 1 x 8k, 8 x 8k, 32 x 8k, 128 x 1k, {MIXED}"),
    )


def _drafts() -> list[Cell]:
    """Every step at one size, one step at every size."""
    return _cells(
        [make(f"8 x 8k draft topk 8 step {step}") for step in range(7)],
        [make(f"8 x 8k draft topk 4 step {step}") for step in range(5)],
        [make(f"1 x 8k draft topk 8 step {step}") for step in (0, 6)],
        _each("draft topk 8 step 2", f"1 x 1k, 1 x 8k, 8 x 1k, 32 x 4k, 128 x 1k, {MIXED}"),
        _each("draft topk 4 step 2", "1 x 8k, 32 x 4k"),
    )


def _extends() -> list[Cell]:
    prompts = (
        "8 x 8k prompt 512; 1 x 8k prompt 8k; 1 x 8k prompt 512; 1 x 64k prompt 512; "
        "1 x 0 prompt 8k"
    )
    found = _cells(
        _each("extend 1..6", "1 x 8k, 8 x 8k, 32 x 4k, 128 x 1k"),
        _each("extend 1..8", MIXED),
        _named(prompts),
        _each("prompt 512", "8 x 8k", dtype="float16"),
        _named("8 x 8k prompt 512; 1 x 8k prompt 8k", head_dim=64),
    )
    return [*map(_auto, found)]


def _options() -> list[Cell]:
    """Options in memory-bound cells, and growth: variants of our own, replayed in turn."""
    cells = []
    for size in ("32 x 4k", "8 x 32k"):
        for base in (make(f"{size} tree 4-3-8"), make(f"{size} decode")):
            variants = (
                # a window that cuts nothing off: its price, not its gain
                ("window", replace(base, window_left=2**20)),
                ("cap", replace(base, logit_cap=30.0)),
                ("lse", replace(base, lse=True)),
            )
            cells.append(Cell(base, variants, peers=False, title=f"{base.name}, options"))
        # the last draft step of one word, and the first of two
        one, two = (make(f"{size} draft topk 8 step {step}") for step in (7, 8))
        cells.append(Cell(one, (("2 words", two),), peers=False, title=f"{one.name}, words"))
    return [
        *cells,
        _growth("context", _each("tree 4-3-8", "8 x 32k, 8 x 64k, 8 x 128k")),
        _growth("context", _each("tree 4-3-8", "64 x 4k, 64 x 8k, 64 x 16k")),
        _growth("context", _each("decode", "32 x 8k, 32 x 16k, 32 x 32k")),
        _growth("batch", _each("tree 4-3-8", "64 x 2k, 128 x 2k, 256 x 2k, 512 x 2k")),
    ]


def _growth(what: str, cases: list[Case]) -> Cell:
    variants = tuple((case.size, case) for case in cases[1:])
    title = f"growth of {what}, {cases[0].name} to {cases[-1].size}"
    return Cell(cases[0], variants, peers=False, title=title)


def _latent() -> list[Cell]:
    cells = []
    for heads in (16, 128):
        names = (
            "1 x 1k decode; 32 x 8k chain 4; 1 x 8k decode; 16 x 16k decode; 64 x 4k decode; "
            f"{MIXED} decode; 1 x 8k chain 4"
        )
        cells += [Cell(mla(case, heads)) for case in _named(names)]
        # no peer takes trees; the chain beside them does as much work
        four, alike = (mla(case, heads) for case in _named("8 x 32k chain 4; 8 x 32k tree 2-2-4"))
        cells.append(Cell(four, (("tree", alike),)))
    # from how many requests on FlashMLA gains
    cells += [Cell(mla(case, 128)) for case in _named("4 x 16k decode; 8 x 16k decode")]
    more = _named(f"128 x 1k decode; {MIXED} chain 4; 8 x 16k chain 8")
    return [
        *map(_auto, cells),
        *(Cell(mla(make("16 x 16k decode"), 16, size)) for size in (1, 16)),
        *(Cell(mla(case, 16)) for case in more),
        Cell(mla(make("8 x 8k tree 4-3-8"), 16), peers=False),
    ]


def _float8() -> list[Cell]:
    """The same lengths in float8, against bfloat16 within the cell."""
    first = (
        "1 x 100 tree 4-3-8; 1 x 4k tree 4-3-8; 1 x 128k tree 4-3-8; 8 x 8k tree 4-5-16; "
        "8 x 8k tree 8-7-64; 32 x 4k tree 4-3-8; 8 x 32k tree 4-3-8; 32 x 32k tree 4-3-8; "
        f"{MIXED} tree 4-3-8"
    )
    last = (
        "8 x 8k decode; 32 x 4k decode; 64 x 16k decode; 8 x 8k chain 8; "
        "32 x 4k draft topk 8 step 2; 8 x 8k prompt 512"
    )
    paged = "8 x 8k tree 4-5-16; 32 x 4k tree 4-3-8; 8 x 32k tree 4-3-8; 32 x 4k decode"
    cases = [
        *_named(first),
        make("8 x 32k tree 4-3-8", heads=(8, 1)),
        make("16 x 8k tree 4-3-8", head_dim=64),
        make("16 x 4k tree 4-3-8", heads=(16, 4), head_dim=256),
        *_named(last),
        *_named(paged, page_size=64),
    ]
    return [Cell(float8(case), (("bfloat16", case),)) for case in cases]


def _fixed() -> list[Cell]:
    cases = _named(
        "1 x 100 tree 4-3-8; 1 x 4k tree 4-3-8; 8 x 8k tree 4-5-16; 32 x 4k tree 4-3-8; "
        f"8 x 32k tree 4-3-8; {MIXED} tree 4-3-8; 8 x 8k tree 8-7-64; 128 x 512 tree 4-3-8; "
        "1 x 4k decode; 8 x 8k decode; 32 x 4k decode; 8 x 8k chain 8; "
        "8 x 8k draft topk 8 step 2; 8 x 8k extend 1..6"
    )
    return [
        Cell(
            case,
            (("deterministic", fixed(case)),),
            peers=False,
            title=f"{case.name}, two orders",
        )
        for case in cases
    ]


def _sinks() -> list[Cell]:
    """With sinks and without in turn: the 8B shape, and gpt-oss's with its window and without."""
    oss: dict[str, Any] = {"heads": (64, 8), "head_dim": 64}
    cases = _named(
        "1 x 8k decode; 32 x 4k decode; 1 x 4k tree 4-3-8; 8 x 8k tree 4-5-16; 32 x 4k tree 4-3-8; "
        "8 x 8k tree 8-7-64; 32 x 4k draft topk 8 step 2; 8 x 8k prompt 512"
    )
    cases += [fixed(make("8 x 8k tree 4-5-16")), float8(make("32 x 4k tree 4-3-8"))]
    cases += _named("8 x 8k prompt 512", **oss)
    for window in (-1, 127):
        names = "32 x 4k decode; 8 x 8k tree 4-5-16; 64 x 4k tree 4-5-16"
        cases += _named(names, window_left=window, **oss)
    return [
        Cell(
            case, (("sinks", replace(case, sinks=True)),), peers=False, title=f"{case.name}, sinks"
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
    names = QUICK.split("; ")
    cells = [cell for part in parts().values() for cell in part.cells if cell.name in names]
    return Part("quick", "Quick set", cells)


def only(part: Part, text: str) -> Part:
    """Return the part with the cells whose name contains ``text``."""
    return replace(part, cells=[cell for cell in part.cells if text in cell.name])
