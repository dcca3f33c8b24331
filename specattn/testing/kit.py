"""The conformance kit: every declared capability as named checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from specattn.backends import load_backend
from specattn.errors import UnsupportedError
from specattn.testing import capabilities, determinism, replay
from specattn.testing.cases import Geometry
from specattn.testing.grid import FULL, NEEDS, QUICK, SMOKE, Rule, forwards
from specattn.testing.oracle import OWN, ConformanceError, Tolerances
from specattn.testing.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specattn.backends.base import BackendFactory
    from specattn.testing.setting import Kind, Mode

Level = Literal["smoke", "quick", "full"]
LEVELS: dict[str, int] = {"smoke": SMOKE, "quick": QUICK, "full": FULL}


@dataclass(frozen=True)
class Check:
    """One property of a backend in one situation; call it.

    Calling it raises `ConformanceError` if the property does not hold, and
    `specattn.errors.UnsupportedError` if the backend refuses the situation by name.

    Parameters
    ----------
    name : str
        Unique within a suite, e.g. ``"tree_verify-window_9"``.
    broken : str
        The property, as docs/conformance.md lists it.
    backend : str
        Who is tested.
    run : callable
        Without arguments.
    refusable : bool
        Whether a refusal is an answer; where it is declared without conditions it is not.
    role : str
        What ``backend`` is, in messages.
    """

    name: str
    broken: str
    backend: str
    run: Callable[[], None]
    refusable: bool = True
    role: str = "backend"

    def __call__(self) -> None:
        """Run the check, with random numbers of its own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                self.run()
            except ConformanceError as error:
                broken = self.broken if error.broken == OWN else error.broken
                raise self._failure(broken, error.detail) from error
            except UnsupportedError as error:
                if self.refusable:
                    raise
                raise self._failure("capabilities", f"declared, yet refused: {error}") from error
            except Exception as error:
                detail = f"{type(error).__name__}: {error}"
                raise self._failure(self.broken, detail) from error

    def _failure(self, broken: str, detail: str) -> ConformanceError:
        return ConformanceError(broken, f"{self.role} {self.backend!r} in {self.name}: {detail}")


def conformance(  # noqa: PLR0913 - as its docstring says
    backend: str | BackendFactory,
    device: torch.device | str,
    level: Level = "quick",
    *,
    geometry: Geometry | None = None,
    tolerances: Tolerances | None = None,
    dtypes: tuple[torch.dtype, ...] = (),
    validates: bool = False,
    evicts: bool = False,
    whole_pages: bool = False,
    leave_out: tuple[str, ...] = (),
) -> Iterator[Check]:
    """Yield a check for everything a backend declares.

    Parameters
    ----------
    backend : str or BackendFactory
        A registered name, a backend's class, or a composite.
    device : torch.device or str
        Where it runs.
    level : {"smoke", "quick", "full"}
        ``smoke`` is a dozen forwards, for interpreters; ``quick`` has every property, in seconds
        on a CPU; ``full`` has every combination of modes and options, and long prefixes.
    geometry : Geometry, optional
        A layer that the backend serves, if not 4 query heads over 2 KV heads of 64.
    tolerances : Tolerances, optional
        What the library's arithmetic allows.
    dtypes : tuple of torch.dtype
        Those to test; all that are declared if empty. For builds of a library without the
        kernels of some dtype.
    validates : bool
        Whether the backend refuses wrong tensors with a ValueError that names them.
    evicts : bool
        Whether it never touches a key outside every window, so that its slot may be
        given away; a library that masks whole tiles does not.
    whole_pages : bool
        Whether it loads pages whole, so that the slots past a request's last key must hold
        numbers, as the pool's zeros are.
    leave_out : tuple of str
        Properties not to check here; say why where you do.

    Raises
    ------
    UnsupportedError
        If the backend cannot run on the device at all, with its reasons.
    """
    factory = load_backend(backend)
    device = torch.device(device)
    reasons = factory.reasons(None, device)
    if reasons:
        raise UnsupportedError(f"backend {factory.name!r} on {device}", reasons)
    setting = Setting(
        factory, device, tolerances or Tolerances(), geometry or Geometry(), dtypes, whole_pages
    )
    said = {"validates": validates, "evicts": evicts, "cuda": device.type == "cuda"}
    held = vars(setting.declared) | said
    for rule in (*forwards(setting), *_turns(setting)):
        asked = rule.level <= LEVELS[level] and rule.broken not in leave_out
        if asked and all(held[need] for need in rule.needs):
            run = partial(rule.body, setting)
            plain = rule.broken == "modes"
            yield Check(rule.name, rule.broken, factory.name, run, refusable=not plain)


# property, body and needs of what runs in every mode, prompts left out and with them
_BUCKETED: dict[str, tuple[str, Callable[..., None], tuple[str, ...]]] = {
    "growth": ("growth", replay.growth, ()),
    "new_trees": ("new trees", partial(replay.growth, batches=[[33, 5, 0]] * 4), ()),
    "buckets": ("buckets", replay.buckets, ()),
    "poisoned_padding": ("padding", replay.poisoned_padding, ()),
    "no_sync": ("host sync", capabilities.no_sync, ("cuda",)),
    "graphs": ("graphs", capabilities.graphs, ("cuda",)),
}
_EVERYWHERE: dict[str, tuple[str, Callable[..., None], tuple[str, ...]]] = {
    "layers": ("layers", replay.layers, ()),
    "slots": ("permuted slots", replay.permuted_slots, ()),
    "inputs": ("inputs unchanged", replay.inputs_unchanged, ()),
    "results": ("results", replay.results, ()),
    "scaled_layers": ("stored dtypes", replay.scaled_layers, ("kv_dtypes",)),
    "sink_layers": ("sinks", replay.sink_layers, ("sinks",)),
    "no_lse": ("lse", replay.without_lse, ("lse",)),
    "bad_input": ("bad input", capabilities.bad_input, ("validates",)),
}
_SMOKE = [f"tree_verify-{option}" for option in ("growth", "bad_input", "scaled_layers")]


def _turns(setting: Setting) -> Iterator[Rule]:
    """Yield the rules that are more than one forward."""
    yield Rule("refusals", "capabilities", capabilities.refusals, SMOKE)
    yield Rule("host_mirror", "host mirror", capabilities.host_mirror, SMOKE)
    yield Rule("interleaved_modes", "buckets", replay.interleaved_modes)
    kinds: tuple[tuple[Kind, str], ...] = (("tree", "trees"), ("lists", "lists"))
    for kind, need in kinds:
        run, exact = partial(replay.steps, kind=kind), _exact(replay.steps, kind=kind)
        yield Rule(f"draft_steps-{kind}", "draft steps", run, needs=(need,))
        both = (need, "deterministic")
        yield Rule(f"deterministic_draft_steps-{kind}", "draft steps", exact, needs=both)
    yield from _blind(setting)
    if setting.declared.deterministic:
        yield from _determinism(setting.modes())
    for name, mode in setting.modes().items():
        if name in ("decode", "tree_verify", "draft_tree"):
            run = partial(replay.shared_prefixes, mode=mode)
            yield Rule(f"{name}-shared_prefixes", "shared prefixes", run)
        bodies = _EVERYWHERE if mode.kind == "extend" else _BUCKETED | _EVERYWHERE
        for option, (broken, body, needs) in bodies.items():
            title = f"{name}-{option}"
            level = SMOKE if title in _SMOKE else QUICK
            yield Rule(title, broken, partial(body, mode=mode), level, needs)


def _blind(setting: Setting) -> Iterator[Rule]:
    """Yield rows without keys, under options that may choose another kernel."""
    declared = setting.declared
    variants: dict[str, dict[str, Any]] = {
        "cap": {"logit_cap": 1.5},
        "sinks": {"sinks": torch.float32},
        "deterministic": {"deterministic": True},
        "decode": {"q_len": 1, "tail_len": 5},
        "no_lse": {"lse": False},
    }
    variants |= {str(dtype): {"dtype": dtype} for dtype in declared.dtypes}
    small = {"dtype": setting.small}
    variants |= {str(kv): small | {"kv_dtype": kv} for kv in declared.kv_dtypes}
    for name, form in variants.items():
        title = f"blind_rows-{name.removeprefix('torch.')}"
        needs = "trees", *(NEEDS[option] for option in form if option in NEEDS)
        run = partial(replay.blind_rows, **form)
        yield Rule(title, "rows without keys", run, needs=needs)


def _determinism(modes: dict[str, Mode]) -> Iterator[Rule]:
    """Yield what must be the same bit for bit, replays among it."""
    for name, mode in modes.items():
        bodies = {"batches": determinism.same_batches, "paths": determinism.same_paths}
        if mode.kind == "extend":
            bodies = {"pieces": determinism.same_prompts}
        elif mode.kind == "lists":
            bodies = {}  # compared with the others' paths
        for option, body in bodies.items():
            title = f"{name}-same_{option}"
            level = SMOKE if title == "tree_verify-same_paths" else QUICK
            yield Rule(title, "deterministic", _exact(body, mode=mode), level)
            sinks = _exact(body, mode=mode, sinks=torch.float32)
            yield Rule(f"{title}_sinks", "deterministic", sinks, needs=("sinks",))
    replayed = _BUCKETED | _EVERYWHERE
    for name in [n for n in ("tree_verify", "draft_tree", "draft_lists") if n in modes]:
        for option in ("growth", "layers", "no_sync", "graphs"):
            broken, body, needs = replayed[option]
            title = f"{name}-deterministic_{option}"
            yield Rule(title, broken, _exact(body, mode=modes[name]), needs=needs)


def _exact(body: Callable[..., None], **options: Any) -> Callable[[Setting], None]:
    """Return a body that runs where forwards are deterministic."""
    return lambda setting: body(replace(setting, deterministic=True), **options)
