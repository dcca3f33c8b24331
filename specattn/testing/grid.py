"""Modes times options: what every single forward must get right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from specattn.errors import UnsupportedError
from specattn.testing.cases import as_chunk
from specattn.testing.oracle import ConformanceError
from specattn.testing.setting import MODES, Mode, draft

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
class Rule:
    """A check of whatever backend declares what it needs.

    Parameters
    ----------
    name : str
        Of the check, e.g. ``"mode-option"``.
    broken : str
        The property to blame.
    body : callable
        Takes the `Setting`.
    level : int
        From which level on: 0 is smoke, 1 quick and 2 full.
    needs : tuple of str
        Capabilities it takes, and ``"cuda"``, ``"validates"`` or ``"evicts"``.
    """

    name: str
    broken: str
    body: Callable[[Setting], None]
    level: int = QUICK
    needs: tuple[str, ...] = ()


def forward(
    setting: Setting, mode: Mode, lengths: list[int], options: dict[str, Any], *, lse: bool = True
) -> None:
    """Hold one forward to the oracle; an error says the options."""
    case = setting.case(mode, lengths, **options)
    try:
        setting.session(case, lse=lse).forward()
    except ConformanceError as error:
        # what is evicted is no option of the layer
        said = [f"{name} {value}" for name, value in options.items() if name != "evict"]
        said += [] if lse else ["no lse"]
        raise ConformanceError(error.broken, ", ".join([error.detail, *said])) from error


def odd_widths(setting: Setting, mode: Mode, lengths: list[int], options: dict[str, Any]) -> None:
    """Values are wider than keys, unless the backend refuses that."""
    try:
        forward(setting, mode, lengths, {"head_dim": 48, "v_head_dim": 64, **options})
    except UnsupportedError:
        forward(setting, mode, lengths, options)


def large_logits(setting: Setting, mode: Mode, lengths: list[int], options: dict[str, Any]) -> None:
    """One visible key decides, however far its logit is from 0.

    Hidden keys weigh nothing beside a logit of -10,000, and an exponential of 10,000 is none. Each
    query sees one key, so no logit need be precise. Pools hold numbers: what is not finite is the
    backend's.
    """
    case = setting.case(mode, lengths, **options)
    # logits of some 7,000 whatever the heads' width; libraries mask with -50,000
    case.sm_scale = 7e3 * case.q.shape[2] ** -0.5
    for pool in (case.k_cache, case.v_cache):
        pool.nan_to_num_(0.5)
    try:
        # a logit that cancels has few digits, and so would the lse
        setting.session(case, lse=False).forward()
    except ConformanceError as error:
        raise ConformanceError("large logits", error.detail) from error


def chunk(setting: Setting, mode: Mode, lengths: list[int], options: dict[str, Any]) -> None:
    """Hold a chunk of prompts, bound on padding, to the oracle."""
    if setting.declared.host_plan:
        # engines run their prompts by themselves
        return
    case = setting.case(mode, lengths, **options)
    session = setting.session(as_chunk(case, pieces=3, rows=7, empty=True))
    session.schedule()
    session.fill_and_run()
    session.load(as_chunk(case, pieces=3, rows=7))
    session.schedule()
    session.fill_and_run()
    # what padding gets is nobody's
    session.verdict(padding=False)


def forwards(setting: Setting) -> Iterator[Rule]:
    """Yield every rule that is one forward of a backend's."""
    declared = setting.declared
    for name, mode in MODES.items():
        level = SMOKE if name in ("decode", "tree_verify", "prompt_extend") else QUICK
        yield _rule(name, "modes", mode, level)
    yield from _options(declared.dtypes, max(16, declared.page_size))
    yield from _stored(declared, max(16, declared.page_size))
    yield from _sinks(declared.dtypes)
    gone = {"evicted": (QUICK, {"window_left": 9}), "evicted_0": (FULL, {"window_left": 0})}
    for rule in _sweep("unused memory", gone):
        yield replace(rule, needs=(*rule.needs, "evicts"))
    yield from _pages(declared.page_size)
    yield from _together(declared, setting.small)
    yield from _shapes()
    yield from _trees()
    yield from _edges()


def _rule(
    name: str,
    broken: str,
    mode: Mode,
    level: int = QUICK,
    *,
    lengths: list[int] = LENGTHS,
    body: Callable[..., None] = forward,
    **options: Any,
) -> Rule:
    """Return the rule of one forward, which needs what its options do."""
    needs = mode.needs + tuple(need for option, need in NEEDS.items() if option in options)
    run = partial(body, mode=mode, lengths=lengths, options=options)
    return Rule(name, broken, run, level, needs)


def _sweep(
    broken: str,
    variants: dict[str, tuple[int, dict[str, Any]]],
    modes: tuple[str, ...] = tuple(MODES),
    **more: Any,
) -> Iterator[Rule]:
    """Every variant, ``(level, options)``, of every mode."""
    for variant, (level, options) in variants.items():
        for name in modes:
            # the interpreter gets one mode of what the others share
            found = QUICK if level == SMOKE and name != "tree_verify" else level
            yield _rule(f"{name}-{variant}", broken, MODES[name], found, **more, **options)


def _window(left: int) -> dict[str, Any]:
    return {"window_left": left, "evict": False}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _options(dtypes: tuple[torch.dtype, ...], page: int) -> Iterator[Rule]:
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


def _stored(declared: Capabilities, page: int) -> Iterator[Rule]:
    for stored, dtype in product(declared.kv_dtypes, declared.dtypes):
        name = f"{_short(stored)}_{_short(dtype)}"
        form = {"dtype": dtype, "kv_dtype": stored, "kv_scales": SCALES}
        variants = {
            name: (SMOKE if dtype == torch.float16 else QUICK, form),
            f"{name}_cap": (FULL, form | {"logit_cap": 1.5, "scale": 2.0}),
            f"{name}_window_page_{page}": (FULL, form | {"page_size": page} | _window(20)),
        }
        yield from _sweep("stored dtypes", variants)


def _sinks(dtypes: tuple[torch.dtype, ...]) -> Iterator[Rule]:
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


def _pages(least: int) -> Iterator[Rule]:
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


def _together(declared: Capabilities, dtype: torch.dtype) -> Iterator[Rule]:
    """Yield whatever is declared at once.

    Kernels are chosen by more than one option.
    """
    options: dict[str, Any] = {"page_size": max(16, declared.page_size), "dtype": dtype}
    optional = {"window": _window(20), "cap": {"logit_cap": 2.0}, "sinks": {"sinks": torch.float32}}
    for name, form in optional.items():
        options |= form if getattr(declared, name) else {}
    variants = {"all": (QUICK, options)}
    if declared.kv_dtypes:
        stored = {"kv_dtype": declared.kv_dtypes[0], "kv_scales": SCALES}
        variants["all_stored"] = (QUICK, options | stored)
    yield from _sweep("options together", variants, body=odd_widths)


def _shapes() -> Iterator[Rule]:
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
    yield from _sweep("head sizes", wider, body=partial(forward, lse=False))
    yield from _sweep("empty prefixes", {"no_prefix": (QUICK, {})}, lengths=[0, 0])
    yield from _sweep("batches", {"one_request": (FULL, {})}, lengths=[41])
    yield from _sweep(
        "batches", {"batch_of_19": (QUICK, {})}, TREES, lengths=[7 * i % 41 for i in range(19)]
    )
    yield from _sweep("padding", {"padded": (QUICK, {"pads": 3})}, tuple(MODES)[:-1])
    yield from _sweep("long prefixes", {"long": (FULL, {})}, lengths=[4000, 3, 0, 1027])


def _trees() -> Iterator[Rule]:
    for q_len in (1, 2, 17, 32, 33, 63, 64, 65, 130):
        mode = Mode("tree", {"mode": "tree", "q_len": q_len})
        level = QUICK if q_len in (17, 64, 65) else FULL
        yield _rule(f"tree_of_{q_len}", "trees", mode, level, lengths=[20, 3])
    for q_len, tail in ((4, 31), (7, 70), (3, 128), (20, 130), (5, 300)):
        mode = Mode("tree", {"mode": "any", "q_len": q_len, "tail_len": tail})
        level = FULL if tail in (128, 130) else QUICK
        yield _rule(f"any_bits_{tail}", "trees", mode, level, lengths=[33, 9, 40])
    for topk, step in ((1, 0), (2, 1), (8, 8), (10, 2)):
        level = FULL if topk < 8 else QUICK
        for kind, mode in (
            ("draft", draft("tree", topk, step)),
            ("lists", draft("lists", topk, step)),
        ):
            yield _rule(f"{kind}_{topk}_step_{step}", "trees", mode, level, lengths=[33, 0])


def _edges() -> Iterator[Rule]:
    """Yield edges of numbers."""
    # positions of any bits are random, so some visible bits are of later positions
    future = Mode("tree", {"mode": "any", "q_len": 6, "tail_len": 31})
    yield _rule("any_bits_window", "window", future, lengths=[33, 9, 40], **_window(3))
    alone = Mode("tree", {"mode": "alone", "q_len": 9, "tail_len": 9})
    first = draft("lists", 3, 0)
    for name, mode in (("decode", MODES["decode"]), ("tree_verify", alone), ("draft_lists", first)):
        large = f"{name}-large_logits"
        yield _rule(large, "large logits", mode, lengths=[0, 0, 0, 0], body=large_logits)
    small = {
        "decode": MODES["decode"],
        "tree_verify": Mode("tree", {"mode": "tree", "q_len": 2}),
        "draft_lists": draft("lists", 1, 1),
        "prompt_extend": MODES["prompt_extend"],
    }
    for name, how in (("", {}), ("-window_9", _window(9)), ("-page_4", {"page_size": 4})):
        chunks = f"prompt_extend-chunk{name}"
        yield _rule(chunks, "chunks", MODES["prompt_extend"], body=chunk, **how)
    for name, mode in small.items():
        yield _rule(f"{name}-long_8193", "long prefixes", mode, lengths=[8193, 3])
