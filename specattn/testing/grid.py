"""Modes times options: what every single forward must get right."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from specattn.batch import Phase
from specattn.errors import UnsupportedError
from specattn.testing.oracle import ConformanceError
from specattn.testing.setting import MODES, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specattn.backends.base import Capabilities
    from specattn.testing.setting import Setting

SMOKE, QUICK, FULL = range(3)
LENGTHS = [33, 0, 70, 5]
# of float8 keys and values
SCALES = (0.7, 1.9)
TREES = ("decode", "tree_verify", "draft_lists", "prompt_extend")
# capabilities, by the options that take them
NEEDS = {
    "window_left": "window",
    "logit_cap": "cap",
    "sinks": "sinks",
    "deterministic": "deterministic",
}


@dataclass(frozen=True)
class Scenario:
    """One forward of a mode, from a level on.

    Parameters
    ----------
    name : str
        ``"mode-option"``.
    broken : str
        The property to blame.
    mode : Mode
        What runs.
    level : int
        From which level on: 0 is smoke, 1 quick and 2 full.
    needs : tuple of str
        Capabilities it takes, the mode's included.
    lengths : list of int
        Prefix length of every request.
    options : dict
        Of `Setting.case`.
    """

    name: str
    broken: str
    mode: Mode
    level: int = QUICK
    needs: tuple[str, ...] = ()
    lengths: list[int] = field(default_factory=lambda: LENGTHS)
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, setting: Setting) -> None:
        """Run it."""
        self.run(setting, self.options)

    def run(self, setting: Setting, options: dict[str, Any], *, lse: bool | None = None) -> None:
        """Run it with these options; ``lse`` is that of `Session.forward`."""
        case = setting.case(self.mode, self.lengths, **options)
        try:
            setting.session(case).forward(None, self.broken, lse=lse)
        except ConformanceError as error:
            # what is evicted is no option of the layer
            said = [f"{name} {value}" for name, value in options.items() if name != "evict"]
            said += ["no lse"] if lse is False else []
            detail = ", ".join([error.detail, *said])
            raise ConformanceError(error.broken, detail) from error


class WithoutLse(Scenario):
    """The same, and no lse is asked for."""

    def __call__(self, setting: Setting) -> None:
        """Run it."""
        self.run(setting, self.options, lse=False)


class OddWidths(Scenario):
    """Values are wider than keys, unless the backend refuses that."""

    def __call__(self, setting: Setting) -> None:
        """Run it."""
        try:
            self.run(setting, {"head_dim": 48, "v_head_dim": 64, **self.options})
        except UnsupportedError:
            self.run(setting, self.options)


class LargeLogits(Scenario):
    """One visible key decides, however far its logit is from 0.

    Hidden keys weigh nothing beside a logit of -10,000, and an exponential of 10,000 is none. Each
    query sees one key, so no logit need be precise.
    """

    def __call__(self, setting: Setting) -> None:
        """Run it over numbers: what is not finite is the backend's."""
        case = setting.case(self.mode, self.lengths, **self.options)
        # logits of some 7,000 whatever the heads' width; libraries mask with -50,000
        case.sm_scale = 7e3 * case.q.shape[2] ** -0.5
        for pool in (case.k_cache, case.v_cache):
            pool.nan_to_num_(0.5)
        try:
            # a logit that cancels has few digits, and so would the lse
            setting.session(case).forward(None, self.broken, lse=False)
        except ConformanceError as error:
            raise ConformanceError(self.broken, error.detail) from error


def scenarios(declared: Capabilities, *, evicts: bool) -> Iterator[Scenario]:
    """Yield every scenario of a backend's dtypes and pages.

    Parameters
    ----------
    declared : Capabilities
        Those of the backend.
    evicts : bool
        Whether to yield those in which keys outside every window are gone, too.
    """
    for name, mode in MODES.items():
        level = SMOKE if name in ("decode", "tree_verify", "prompt_extend") else QUICK
        yield Scenario(name, "modes", mode, level, mode.needs)
    yield from _options(declared.dtypes, max(16, declared.page_size))
    yield from _stored(declared, max(16, declared.page_size))
    yield from _sinks(declared.dtypes)
    if evicts:
        gone = {"evicted": (QUICK, {"window_left": 9}), "evicted_0": (FULL, {"window_left": 0})}
        yield from _sweep("unused memory", gone)
    yield from _pages(declared.page_size)
    yield from _together(declared)
    yield from _shapes()
    yield from _trees()
    yield from _edges()


def _sweep(
    broken: str,
    variants: dict[str, tuple[int, dict[str, Any]]],
    modes: tuple[str, ...] = tuple(MODES),
    lengths: list[int] = LENGTHS,
    kind: type[Scenario] = Scenario,
) -> Iterator[Scenario]:
    """Every variant, ``(level, options)``, of every mode."""
    for variant, (level, options) in variants.items():
        needs = tuple(need for option, need in NEEDS.items() if option in options)
        for name in modes:
            mode = MODES[name]
            # the interpreter gets one mode of what the others share
            found = QUICK if level == SMOKE and name != "tree_verify" else level
            yield kind(
                f"{name}-{variant}", broken, mode, found, mode.needs + needs, lengths, options
            )


def _window(left: int) -> dict[str, Any]:
    return {"window_left": left, "evict": False}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _options(dtypes: tuple[torch.dtype, ...], page: int) -> Iterator[Scenario]:
    windows = ((QUICK, 0), (SMOKE, 9), (FULL, 1), (FULL, 69), (FULL, 1000))
    yield from _sweep(
        "window", {f"window_{left}": (level, _window(left)) for level, left in windows}
    )
    # tiles in front of the window, none of whose keys are seen
    yield from _sweep("window", {"window_69_long": (QUICK, _window(69))}, TREES, lengths=[1300, 3])
    cap: dict[str, Any] = {"logit_cap": 1.5, "scale": 2.0}
    capped = {
        "cap": (SMOKE, cap),
        "cap_30": (FULL, {"logit_cap": 30.0}),
        "cap_window": (FULL, {"logit_cap": 2.0} | _window(9)),
    }
    yield from _sweep("cap", capped)
    for dtype in dtypes:
        form: dict[str, Any] = {"dtype": dtype}
        paged = FULL, form | {"page_size": page} | _window(20)
        variants = {_short(dtype): (QUICK, form), f"{_short(dtype)}_window_page_{page}": paged}
        yield from _sweep("dtypes", variants)
    exact: dict[str, Any] = {"deterministic": True}
    exactly = {
        "deterministic": (QUICK, exact),
        "deterministic_cap": (FULL, exact | cap),
        "deterministic_window": (FULL, exact | _window(20)),
    }
    yield from _sweep("deterministic", exactly, lengths=[126, 0, 70, 5])
    yield from _sweep("scale", {"scale_3": (QUICK, {"scale": 3.0})}, TREES)
    yield from _sweep("scale", {"sharp": (FULL, {"scale": 20.0})})


def _stored(declared: Capabilities, page: int) -> Iterator[Scenario]:
    for stored, dtype in product(declared.kv_dtypes, declared.dtypes):
        name = f"{_short(stored)}_{_short(dtype)}"
        form = {"dtype": dtype, "kv_dtype": stored, "kv_scales": SCALES}
        variants = {
            name: (SMOKE if dtype == torch.float16 else QUICK, form),
            f"{name}_cap": (FULL, form | {"logit_cap": 1.5, "scale": 2.0}),
            f"{name}_window_page_{page}": (FULL, form | {"page_size": page} | _window(20)),
        }
        yield from _sweep("stored dtypes", variants)


def _sinks(dtypes: tuple[torch.dtype, ...]) -> Iterator[Scenario]:
    sinks: dict[str, Any] = {"sinks": torch.float32}
    variants = {
        "sinks": (SMOKE, sinks),
        "sinks_cap": (FULL, sinks | {"logit_cap": 1.5}),
        "sinks_window": (QUICK, sinks | _window(9)),
    }
    yield from _sweep("sinks", variants)
    own = {f"sinks_{_short(d)}": (QUICK, {"dtype": d, "sinks": d}) for d in dtypes}
    yield from _sweep("sinks", own, TREES)
    yield from _sweep("sinks", {"sinks_long": (FULL, sinks)}, lengths=[2500, 64])


def _pages(least: int) -> Iterator[Scenario]:
    """Yield page sizes for a backend of ``least``, and prefixes around them."""
    swept = {page for page in (4, 16, 64) if not page % least}
    if least > 1:
        swept |= {least, 2 * least}
    for page in sorted(swept):
        yield from _sweep(
            "pages",
            {f"page_{page}": (FULL if page > 128 else QUICK, {"page_size": page})},
            lengths=[page - 1, 0, page, 2 * page + 3, 1],
        )
    long = max(16, least)
    yield from _sweep(
        "long prefixes", {f"long_page_{long}": (FULL, {"page_size": long})}, lengths=[2500, 64]
    )


def _together(declared: Capabilities) -> Iterator[Scenario]:
    """Yield whatever is declared at once.

    Kernels are chosen by more than one option.
    """
    options: dict[str, Any] = {"page_size": max(16, declared.page_size)}
    options["dtype"] = min(declared.dtypes, key=attrgetter("itemsize"))
    if declared.window:
        options |= _window(20)
    if declared.cap:
        options["logit_cap"] = 2.0
    if declared.sinks:
        options["sinks"] = torch.float32
    variants = {"all": (QUICK, options)}
    if declared.kv_dtypes:
        stored = {"kv_dtype": declared.kv_dtypes[0], "kv_scales": SCALES}
        variants["all_stored"] = (QUICK, options | stored)
    yield from _sweep("options together", variants, kind=OddWidths)


def _shapes() -> Iterator[Scenario]:
    heads = {
        QUICK: ((3, 3), (6, 2), (32, 2)),
        FULL: ((8, 2), (5, 1), (7, 1), (8, 1), (16, 1), (32, 8)),
    }
    for level, counts in heads.items():
        swept = {f"heads_{q}_{kv}": (level, {"heads": (q, kv)}) for q, kv in counts}
        yield from _sweep("heads", swept, TREES)
    widths = {
        QUICK: ((128, 128), (80, 80)),
        FULL: ((96, 96), (256, 256), (192, 128), (32, 48), (576, 512)),
    }
    for level, sizes in widths.items():
        wide = {f"head_{k}_{v}": (level, {"head_dim": k, "v_head_dim": v}) for k, v in sizes}
        yield from _sweep("head sizes", wide, TREES)
    # narrower and wider values; libraries have kernels of their own without an lse
    yield from _sweep("head sizes", {"head_64_48": (QUICK, {"head_dim": 64, "v_head_dim": 48})})
    wider = {"head_48_64_no_lse": (QUICK, {"head_dim": 48, "v_head_dim": 64})}
    yield from _sweep("head sizes", wider, kind=WithoutLse)
    yield from _sweep("empty prefixes", {"no_prefix": (QUICK, {})}, lengths=[0, 0])
    yield from _sweep("batches", {"one_request": (FULL, {})}, lengths=[41])
    yield from _sweep(
        "batches", {"batch_of_19": (QUICK, {})}, TREES, lengths=[7 * i % 41 for i in range(19)]
    )
    yield from _sweep("padding", {"padded": (QUICK, {"pads": 3})}, tuple(MODES)[:-1])
    yield from _sweep("long prefixes", {"long": (FULL, {})}, lengths=[4000, 3, 0, 1027])


def _trees() -> Iterator[Scenario]:
    for q_len in (1, 2, 17, 32, 33, 63, 64, 65, 130):
        mode = Mode("tree", {"mode": "tree", "q_len": q_len})
        level = QUICK if q_len in (17, 64, 65) else FULL
        yield Scenario(f"tree_of_{q_len}", "trees", mode, level, ("trees",), [20, 3])
    for q_len, tail in ((4, 31), (7, 70), (3, 128), (20, 130), (5, 300)):
        mode = Mode("tree", {"mode": "any", "q_len": q_len, "tail_len": tail})
        level = FULL if tail in (128, 130) else QUICK
        yield Scenario(f"any_bits_{tail}", "trees", mode, level, ("trees",), [33, 9, 40])
    for topk, step in ((1, 0), (2, 1), (8, 8), (10, 2)):
        level = FULL if topk < 8 else QUICK
        options = {
            "mode": "draft" if topk > 1 else "chain",
            "q_len": topk,
            "tail_len": topk * (step + 1),
            "phase": Phase.DRAFT,
        }
        mode = Mode("tree", options)
        yield Scenario(f"draft_{topk}_step_{step}", "trees", mode, level, mode.needs, [33, 0])
        mode = Mode("lists", {"topk": topk, "step": step})
        yield Scenario(f"lists_{topk}_step_{step}", "trees", mode, level, mode.needs, [33, 0])


def _edges() -> Iterator[Scenario]:
    """Yield edges of numbers."""
    # positions of any bits are random, so some visible bits are of later positions
    future = Mode("tree", {"mode": "any", "q_len": 6, "tail_len": 31})
    needs = ("trees", "window")
    yield Scenario("any_bits_window", "window", future, QUICK, needs, [33, 9, 40], _window(3))
    alone = Mode("tree", {"mode": "alone", "q_len": 9, "tail_len": 9})
    first = Mode("lists", {"topk": 3, "step": 0})
    for name, mode in (("decode", MODES["decode"]), ("tree_verify", alone), ("draft_lists", first)):
        yield LargeLogits(
            f"{name}-large_logits", "large logits", mode, QUICK, mode.needs, [0, 0, 0, 0]
        )
    small = {
        "decode": MODES["decode"],
        "tree_verify": Mode("tree", {"mode": "tree", "q_len": 2}),
        "draft_lists": Mode("lists", {"topk": 1, "step": 1}),
        "prompt_extend": MODES["prompt_extend"],
    }
    for name, mode in small.items():
        yield Scenario(f"{name}-long_8193", "long prefixes", mode, QUICK, mode.needs, [8193, 3])
