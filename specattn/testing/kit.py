"""The conformance kit: every declared capability as named checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch

from specattn.backends import load_backend
from specattn.errors import UnsupportedError
from specattn.testing import capabilities, determinism, replay
from specattn.testing.grid import FULL, QUICK, SMOKE, scenarios
from specattn.testing.oracle import ConformanceError, Tolerances
from specattn.testing.setting import MODES, Geometry, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specattn.backends.base import BackendFactory

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
                raise self._failure(error.broken, error.detail) from error
            except UnsupportedError as error:
                if self.refusable:
                    raise
                raise self._failure("capabilities", f"declared, yet refused: {error}") from error
            except Exception as error:
                detail = f"{type(error).__name__}: {error}"
                raise self._failure(self.broken, detail) from error

    def _failure(self, broken: str, detail: str) -> ConformanceError:
        return ConformanceError(broken, f"{self.role} {self.backend!r} in {self.name}: {detail}")


def conformance(
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
    found = [
        *_forwards(setting, LEVELS[level], evicts),
        *_replays(setting, LEVELS[level], validates),
    ]
    yield from (check for check in found if check.broken not in leave_out)


def _forwards(setting: Setting, depth: int, evicts: bool) -> Iterator[Check]:
    """Yield the checks that are one forward."""
    declared, name = setting.factory.capabilities, setting.factory.name
    dtypes = setting.dtypes or declared.dtypes
    for scenario in scenarios(replace(declared, dtypes=dtypes), evicts=evicts):
        if scenario.level <= depth and all(getattr(declared, n) for n in scenario.needs):
            yield Check(
                scenario.name,
                scenario.broken,
                name,
                partial(scenario, setting),
                refusable=scenario.broken != "modes",
            )


def _replays(setting: Setting, depth: int, validates: bool) -> Iterator[Check]:
    """Yield the checks that are more than one forward."""
    for level, name, broken, run in _bodies(setting, validates):
        if level <= depth:
            yield Check(name, broken, setting.factory.name, run)


def _bodies(
    setting: Setting, validates: bool
) -> Iterator[tuple[int, str, str, Callable[[], None]]]:
    """Yield level, name, property and body of those."""
    declared = setting.factory.capabilities
    yield SMOKE, "refusals", "capabilities", partial(capabilities.refusals, setting)
    yield SMOKE, "host_mirror", "host mirror", partial(capabilities.host_mirror, setting)
    yield QUICK, "interleaved_modes", "buckets", partial(replay.interleaved_modes, setting)
    for kind, need in (("tree", "trees"), ("lists", "lists")):
        if getattr(declared, need):
            run = partial(replay.steps, setting, kind)
            yield QUICK, f"draft_steps-{kind}", "draft steps", run
    if declared.trees:
        yield from _blind(setting)
    per_mode = {
        "growth": ("growth", replay.growth),
        "new_trees": ("new trees", replay.new_trees),
        "buckets": ("buckets", replay.buckets),
        "layers": ("layers", replay.layers),
        "slots": ("permuted slots", replay.permuted_slots),
        "inputs": ("inputs unchanged", replay.inputs_unchanged),
        "results": ("results", replay.results),
        "poisoned_padding": ("padding", replay.poisoned_padding),
    }
    if setting.device.type == "cuda":
        per_mode["no_sync"] = ("host sync", capabilities.no_sync)
        per_mode["graphs"] = ("graphs", capabilities.graphs)
    everywhere = {"layers", "inputs", "results", "slots"}
    if declared.deterministic:
        yield from _determinism(setting)
    if declared.kv_dtypes:
        per_mode["scaled_layers"] = ("stored dtypes", replay.scaled_layers)
        everywhere.add("scaled_layers")
    if declared.sinks:
        per_mode["sink_layers"] = ("sinks", replay.sink_layers)
        everywhere.add("sink_layers")
    if declared.lse:
        per_mode["no_lse"] = ("lse", replay.without_lse)
        everywhere.add("no_lse")
    if validates:
        per_mode["bad_input"] = ("bad input", capabilities.bad_input)
        everywhere.add("bad_input")
    for name in ("decode", "tree_verify", "draft_tree"):
        if name in setting.modes():
            run = partial(replay.shared_prefixes, setting, MODES[name])
            yield QUICK, f"{name}-shared_prefixes", "shared prefixes", run
    smoke = {("tree_verify", option) for option in ("growth", "bad_input", "scaled_layers")}
    for option, (broken, body) in per_mode.items():
        for name, mode in setting.modes().items():
            if mode.kind == "extend" and option not in everywhere:
                continue
            level = SMOKE if (name, option) in smoke else QUICK
            yield level, f"{name}-{option}", broken, partial(body, setting, MODES[name])


def _blind(setting: Setting) -> Iterator[tuple[int, str, str, Callable[[], None]]]:
    """Yield rows without keys, under options that may choose another kernel."""
    declared = setting.factory.capabilities
    optional: dict[str, dict[str, Any]] = {
        "cap": {"logit_cap": 1.5},
        "sinks": {"sinks": torch.float32},
        "deterministic": {"deterministic": True},
    }
    variants = {name: form for name, form in optional.items() if getattr(declared, name)}
    dtypes = setting.dtypes or declared.dtypes
    variants |= {str(dtype): {"dtype": dtype} for dtype in dtypes}
    # backends may serve these beside 16 bits alone
    small = min(dtypes, key=attrgetter("itemsize"))
    variants |= {str(kv): {"dtype": small, "kv_dtype": kv} for kv in declared.kv_dtypes}
    variants |= {"decode": {"q_len": 1, "tail_len": 5}, "no_lse": {"lse": False}}
    for name, form in variants.items():
        name = f"blind_rows-{name.removeprefix('torch.')}"
        yield QUICK, name, "rows without keys", partial(replay.blind_rows, setting, **form)


def _determinism(setting: Setting) -> Iterator[tuple[int, str, str, Callable[[], None]]]:
    """Yield what must be the same bit for bit, replays among it."""
    setting, declared = replace(setting, deterministic=True), setting.factory.capabilities
    modes = setting.modes()
    for name, mode in modes.items():
        bodies: dict[str, Callable[..., None]] = {
            "batches": determinism.same_batches,
            "paths": determinism.same_paths,
        }
        if mode.kind == "extend":
            bodies = {"pieces": determinism.same_prompts}
        elif mode.kind == "lists":
            bodies = {}  # compared with the others' paths
        for option, body in bodies.items():
            level = SMOKE if (name, option) == ("tree_verify", "paths") else QUICK
            yield level, f"{name}-same_{option}", "deterministic", partial(body, setting, mode)
            if declared.sinks:
                sinks = partial(body, setting, mode, sinks=torch.float32)
                yield QUICK, f"{name}-same_{option}_sinks", "deterministic", sinks
    replayed = {"growth": ("growth", replay.growth), "layers": ("layers", replay.layers)}
    if setting.device.type == "cuda":
        replayed["no_sync"] = ("host sync", capabilities.no_sync)
        replayed["graphs"] = ("graphs", capabilities.graphs)
    for name in [n for n in ("tree_verify", "draft_tree", "draft_lists") if n in modes]:
        for option, (broken, body) in replayed.items():
            run = partial(body, setting, modes[name])
            yield QUICK, f"{name}-deterministic_{option}", broken, run
    for kind, need in (("tree", "draft_tree"), ("lists", "draft_lists")):
        if need in modes:
            run = partial(replay.steps, setting, kind)
            yield QUICK, f"deterministic_draft_steps-{kind}", "draft steps", run
