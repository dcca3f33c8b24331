"""Policies choose the next step's config by what recent ones gained."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median, median_low
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specattn.config import SpecConfig

    #: Seconds of a step (or any unit, the same for all) by config and batch size.
    StepCost = Callable[[SpecConfig, int], float]

# step times that count per bucket: few enough to follow a context that grows
_TIMES = 15


class Acceptance:
    """The gains of one config's recent steps, and their times.

    Parameters
    ----------
    config : SpecConfig
        The config.

    Attributes
    ----------
    steps : int
        Its steps in the window.
    reached : list of int
        ``[num_steps + 1]``: how often a request kept at least d draft tokens, by d; ``reached[0]``
        counts every request of every step.
    """

    def __init__(self, config: SpecConfig) -> None:
        self.steps = 0
        self.reached = [0] * (config.num_steps + 1)
        self._times: dict[int, deque[float]] = {}

    def add(self, gained: Sequence[int], sign: int = 1) -> None:
        """Count gains of at least 1; ``sign`` -1 undoes it."""
        self.steps += sign
        for tokens in gained:
            for depth in range(tokens):
                self.reached[depth] += sign

    def timed(self, bucket: int, seconds: float | None, sign: int = 1) -> None:
        """Note a step's time, if known.

        ``sign`` -1 drops the oldest of several.
        """
        if seconds is None:
            return
        times = self._times.setdefault(bucket, deque())
        if sign > 0:
            times.append(seconds)
        elif len(times) > 1:
            times.popleft()

    @property
    def mean(self) -> float:
        """Mean tokens per request and step, bonus included; 0 if none."""
        return sum(self.reached) / self.reached[0] if self.reached[0] else 0.0

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Shares of steps that kept at least 1, 2, ... draft tokens."""
        counted = max(self.reached[0], 1)
        return tuple(count / counted for count in self.reached[1:])

    def seconds(self, bucket: int) -> float | None:
        """Return the median time of a bucket's last steps, None without any.

        They are of the window. If all have left it, the latest to do so is kept.
        """
        times = self._times.get(bucket)
        # of two the shorter: what disturbs a step makes it longer
        return median_low(list(times)[-_TIMES:]) if times else None


@dataclass(frozen=True)
class Observed:
    """Observations that a policy chooses by.

    Steps in flight are not among them yet.

    Parameters
    ----------
    batch, bucket : int
        Requests of the next step, and the captured batch size that holds them.
    current : SpecConfig
        The config of the last step; at first the engine's own.
    configs : tuple of SpecConfig
        What may be chosen: those of the engine that some request's context has room for, in the
        engine's order.
    acceptance : mapping
        By config, all of the engine's. These are live: read, do not keep.
    """

    batch: int
    bucket: int
    current: SpecConfig
    configs: tuple[SpecConfig, ...]
    acceptance: Mapping[SpecConfig, Acceptance]


class Policy(Protocol):
    """Chooses a step's config."""

    def __call__(self, observed: Observed) -> SpecConfig:
        """Return one of ``observed.configs``; called on the host before every step.

        What it returns must follow from the tokens of steps before, and from nothing that is
        drawn for the step itself: then sampled tokens keep the target's
        distribution.
        """


class GoodputPolicy:
    """Takes the config that promises most tokens per second.

    A config's goodput is its expected tokens per request and step over the seconds of a step at
    this batch size, the quantity that TurboSpec maximises (arXiv:2406.14066); the expectation is
    `expected_tokens`. Small batches thus get deep and wide trees, large ones shallow trees or
    none, and texts that are easy to draft deeper ones than others. A config that the window knows
    nothing of is tried, and again later: neighbouring steps are of one passage of a text.

    What it chooses follows from the observations of an engine alone, also where it serves several;
    with ``cost``, not even from measured times.

    Parameters
    ----------
    cost : callable, optional
        ``cost(config, batch)``: a step's seconds, or any unit, above 0. By default what was
        measured, and where nothing was, `rough_cost` in the proportion of what was.
    margin : float
        Another config must promise this much more, as a share, to be switched to.
    hold : int
        Steps that a config is kept for before it is left, and from a trial to the next.
    trials : int
        Steps a config is tried for if the window holds fewer of it.
    prior : float
        Steps' worth of trust in what other configs say; see `expected_tokens`.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    def __init__(
        self,
        cost: StepCost | None = None,
        *,
        margin: float = 0.05,
        hold: int = 16,
        trials: int = 3,
        prior: float = 4.0,
    ) -> None:
        # NaN is out of every range
        if not (margin >= 0 and hold >= 1 and trials >= 0 and prior > 0):
            raise ValueError(
                "margin and trials must be at least 0, hold at least 1 and prior above 0, "
                f"got {margin}, {trials}, {hold} and {prior}"
            )
        self.cost, self.margin, self.hold = cost, margin, hold
        self.trials, self.prior = trials, prior
        # by engine: the config that it steps with, and for how many steps
        self._chosen: WeakKeyDictionary[Acceptance, tuple[SpecConfig, int]] = WeakKeyDictionary()

    def __call__(self, observed: Observed) -> SpecConfig:
        """Return the config of the next step."""
        # each engine counts for itself, and so tells by any of its counts which one it is
        engine = next(iter(observed.acceptance.values()))
        chosen, steps = self._chosen.setdefault(engine, (observed.current, 0))
        self._chosen[engine] = chosen, steps + 1
        least = min(observed.configs, key=lambda config: observed.acceptance[config].steps)
        known = observed.acceptance[least].steps
        if known < self.trials and (not known or steps % self.hold == 0):
            return least
        if chosen in observed.configs and steps + 1 < self.hold:
            return chosen
        goodput = self.goodput(observed)
        best = max(goodput, key=lambda config: goodput[config])
        if chosen not in goodput:  # there is no room for it, for now
            return best
        if goodput[best] > goodput[chosen] * (1 + self.margin):
            self._chosen[engine] = best, 0
            return best
        return chosen

    def goodput(self, observed: Observed) -> dict[SpecConfig, float]:
        """Return tokens per request and second (or unit of ``cost``), by config.

        Parameters
        ----------
        observed : Observed
            What recent steps gained, and the configs that may be chosen: those get a number.

        Raises
        ------
        ValueError
            If ``cost`` returns what is not above 0.
        """
        costs, prior = self._costs(observed), self.prior * observed.batch
        return {
            config: expected_tokens(observed.acceptance, config, prior) / costs[config]
            for config in observed.configs
        }

    def _costs(self, observed: Observed) -> dict[SpecConfig, float]:
        if self.cost is not None:
            costs = {config: self.cost(config, observed.batch) for config in observed.configs}
            for config, cost in costs.items():
                if not cost > 0:
                    raise ValueError(f"cost must be above 0, got {cost} for {config}")
            return costs
        rough = {config: rough_cost(config, observed.batch) for config in observed.acceptance}
        measured = {
            config: found.seconds(observed.bucket) for config, found in observed.acceptance.items()
        }
        ratios = [known / rough[config] for config, known in measured.items() if known]
        scale = median(ratios) if ratios else 1.0
        return {config: measured[config] or rough[config] * scale for config in rough}


def expected_tokens(
    acceptance: Mapping[SpecConfig, Acceptance], config: SpecConfig, prior: float = 4.0
) -> float:
    """Return the expected tokens per request and step, bonus included.

    ``1 + sum_d q_1 q_2 ... q_d`` over the depths, where q_d is the chance that depth d is kept
    given that depth d - 1 was: Leviathan et al. (arXiv:2211.17192, equation 1) with a rate per
    depth. Each rate is the config's own, shrunk towards that of all configs together as if
    ``prior`` requests had said so; theirs at a depth is shrunk towards theirs at the depth before.
    So a config that ran little is judged by the others, and depths that nobody reached by those
    that somebody did.

    Parameters
    ----------
    acceptance : mapping
        By config, as in `Observed`.
    config : SpecConfig
        One of those.
    prior : float
        Requests' worth of trust in what other configs say; above 0.
    """
    total, path, pooled = 1.0, 1.0, 0.5
    own = acceptance[config].reached
    for depth in range(1, config.num_steps + 1):
        tries = hits = 0
        for found in acceptance.values():
            if depth < len(found.reached):
                tries += found.reached[depth - 1]
                hits += found.reached[depth]
        pooled = (hits + prior * pooled) / (tries + prior)
        path *= (own[depth] + prior * pooled) / (own[depth - 1] + prior)
        total += path
    return total


def rough_cost(config: SpecConfig, batch: int) -> float:
    """Estimate a step's cost in plain decoding steps.

    It serves until there is a measurement. A target forward reads its weights once, whatever the
    rows, up to some hundred of them; then it costs by the row. A forward of an EAGLE head costs
    about a tenth.

    Parameters
    ----------
    config : SpecConfig
        The config of the step.
    batch : int
        Its requests.
    """
    rows = batch * config.num_draft_tokens
    return max(1.0, rows / 256) + 0.1 * config.num_steps
