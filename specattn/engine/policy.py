"""Policies choose the next step's config by what recent ones gained."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median, median_low
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from specattn.engine.resting import Rest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specattn.config import SpecConfig

    #: Seconds of a step (or any unit, the same for all) by config and batch size.
    StepCost = Callable[[SpecConfig, int], float]

# step times that count per bucket: few enough to follow a context that grows
_TIMES = 15
# those that stay when all have left the window: one alone may be wrong
_KEPT = 3


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
        # by bucket: times, and how many of these are of steps that have left the window
        self._times: dict[int, deque[float]] = {}
        self._left: dict[int, int] = {}

    def add(self, gained: Sequence[int], sign: int = 1) -> None:
        """Count gains of at least 1; ``sign`` -1 undoes it."""
        self.steps += sign
        for tokens in gained:
            for depth in range(tokens):
                self.reached[depth] += sign

    def timed(self, bucket: int, seconds: float | None, sign: int = 1) -> None:
        """Note a step's time, if known.

        ``sign`` -1 says that the oldest step has left the window. Its time leaves when there are
        enough others.
        """
        if seconds is None:
            return
        times = self._times.setdefault(bucket, deque())
        left = self._left.get(bucket, 0)
        if sign > 0:
            times.append(seconds)
        else:
            left += 1
        while left and len(times) > _KEPT:
            times.popleft()
            left -= 1
        self._left[bucket] = left

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

        They are of the window. If all have left it, the latest few to do so are kept.
        """
        times = self._times.get(bucket)
        # of two the shorter: what disturbs a step makes it longer
        return median_low(list(times)[-_TIMES:]) if times else None

    def timings(self, bucket: int) -> int:
        """Return how many times of a bucket are known."""
        return len(self._times.get(bucket, ()))


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
    bare : Acceptance, optional
        The same of plain steps that leave the draft out, where an engine has such: it asks its
        policy by `RestingPolicy.drafts`.
    ready : int, optional
        Requests of the next step whose draft has read their texts; None is all.
    prompt_seconds : float
        What prompts take per token of the texts, of late.
    """

    batch: int
    bucket: int
    current: SpecConfig
    configs: tuple[SpecConfig, ...]
    acceptance: Mapping[SpecConfig, Acceptance]
    bare: Acceptance | None = None
    ready: int | None = None
    prompt_seconds: float = 0.0


class Policy(Protocol):
    """Chooses a step's config."""

    def __call__(self, observed: Observed) -> SpecConfig:
        """Return one of ``observed.configs``; called on the host before every step.

        What it returns must follow from the tokens of steps before, and from nothing that is
        drawn for the step itself: then sampled tokens keep the target's
        distribution.
        """


@runtime_checkable
class RestingPolicy(Policy, Protocol):
    """A policy that may let a draft model rest."""

    def drafts(self, observed: Observed) -> bool:
        """Return whether prompts and plain steps run the draft.

        It is called after the policy, with the same observations, and by itself before prompts run:
        for the batch that there will be, without ``ready``. Where it returns False, both cost what
        they cost without a draft. A request whose prompt or step left the draft out is not
        ``ready`` from then on: it may take part in steps that draft, but hardly gains by them.
        """


class _Engine:
    """What a policy remembers of an engine."""

    def __init__(self, config: SpecConfig) -> None:
        # the config that it keeps to, and for how many steps it has
        self.config, self.held = config, 0
        self.steps = 0
        # by config that cannot win: from which step on it is asked again whether it can
        self.hopeless: dict[SpecConfig, int] = {}
        # None if the draft does not rest
        self.rest: Rest | None = None


class GoodputPolicy:
    """Takes the config that promises most tokens per second.

    A config's goodput is its expected tokens per request and step over the seconds of a step at
    this batch size, the quantity that TurboSpec maximises (arXiv:2406.14066); the expectation is
    `expected_tokens`. Small batches thus get deep and wide trees, large ones shallow trees or
    none, and texts that are easy to draft deeper ones than others. A config that the window knows
    nothing of is tried, and again later: neighbouring steps are of one passage of a text. One that
    would lose even if all its drafts were kept is not.

    A draft model has to read prompts, too, and every token of plain steps. Where plain decoding is
    the best without all that, the draft rests. What a step takes then is a guess at first: a rest
    that begins by it lasts until such steps were timed. Now and then, and at a batch size where it
    was not judged yet, the next prompts go through it, and two ``prior`` of steps draft.

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
        Steps a config is tried for if the window holds fewer of it, and times that it is judged by.
    prior : float
        Steps' worth of trust in what other configs say; see `expected_tokens`.
    judging : float
        The share of its time that judging a draft may take while it rests.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    def __init__(
        self,
        cost: StepCost | None = None,
        *,
        margin: float = 0.02,
        hold: int = 16,
        trials: int = 3,
        prior: float = 4.0,
        judging: float = 0.01,
    ) -> None:
        # NaN is out of every range
        if not (margin >= 0 and hold >= 1 and trials >= 0 and prior > 0 and judging > 0):
            raise ValueError(
                "margin and trials must be at least 0, hold at least 1, prior and judging above 0, "
                f"got {margin}, {trials}, {hold}, {prior} and {judging}"
            )
        self.cost, self.margin, self.hold = cost, margin, hold
        self.trials, self.prior, self.judging = trials, prior, judging
        self._engines: WeakKeyDictionary[Acceptance, _Engine] = WeakKeyDictionary()

    def __call__(self, observed: Observed) -> SpecConfig:
        """Return the config of the next step."""
        engine = self._of(observed)
        engine.steps += 1
        if engine.rest is not None:
            return self._at_rest(observed, engine, engine.rest)
        engine.held += 1
        if (untried := self._untried(observed, engine)) is not None:
            return untried
        if engine.config in observed.configs and engine.held < self.hold:
            return engine.config
        outlook = self._outlook(observed)
        if self._is_plain_best(outlook):
            engine.rest = Rest()
            if self._is_bare_known(observed):
                self._go_on(engine.rest, outlook, engine)
            return outlook.plain
        goodput = outlook.next_step()
        best = max(goodput, key=lambda config: goodput[config])
        if engine.config not in goodput:  # there is no room for it, for now
            return best
        if goodput[best] > goodput[engine.config] * (1 + self.margin):
            engine.config, engine.held = best, 0
        return engine.config

    def drafts(self, observed: Observed) -> bool:
        """Return whether prompts and plain steps run the draft."""
        engine = self._of(observed)
        return engine.rest is None or self._is_due(observed, engine, engine.rest)

    def goodput(self, observed: Observed) -> dict[SpecConfig, float]:
        """Return tokens per request and second (or unit of ``cost``), by config.

        These are what each would come to in the long run, with all requests ready. Where a draft
        may rest, it rests in plain decoding, and other configs pay for its part of prompts, too:
        half as large a part as that of a plain step.

        Parameters
        ----------
        observed : Observed
            What recent steps gained, and the configs that may be chosen: those get a number.

        Raises
        ------
        ValueError
            If ``cost`` returns what is not above 0.
        """
        return self._outlook(observed).in_the_long_run()

    def _of(self, observed: Observed) -> _Engine:
        # each engine counts for itself, and so tells by any of its counts which one it is
        count = next(iter(observed.acceptance.values()))
        if count not in self._engines:
            self._engines[count] = _Engine(observed.current)
        return self._engines[count]

    def _outlook(self, observed: Observed) -> _Outlook:
        resting = self._of(observed).rest is not None
        return _Outlook(observed, self.cost, self.prior, resting=resting)

    def _untried(self, observed: Observed, engine: _Engine) -> SpecConfig | None:
        """Return a config that is known too little, and might win."""
        counts = {config: observed.acceptance[config] for config in observed.configs}
        timings = {config: count.timings(observed.bucket) for config, count in counts.items()}
        known = {config: count.steps for config, count in counts.items()}
        plain = _plain(observed)
        if not plain.num_steps and timings.get(plain) and len(known) > 1:
            # it gains one token: nothing is to be learnt but how long it takes
            known[plain] = timings[plain]
        spaced = (engine.held - 1) % self.hold == 0
        few = [
            config
            for config, steps in known.items()
            if steps < self.trials
            and engine.steps >= engine.hopeless.get(config, 0)
            # of two times one may be wrong: where the host is late, a step seems longer, and the
            # next one shorter
            and (spaced or not steps or (self.cost is None and timings[config] < self.trials))
        ]
        for config in sorted(few, key=lambda one: known[one]):
            if not self._is_hopeless(observed, config):
                return config
            engine.hopeless[config] = engine.steps + self.hold
        return None

    def _is_hopeless(self, observed: Observed, config: SpecConfig) -> bool:
        """Whether a config would lose even if all drafts were kept."""
        timings = observed.acceptance[config].timings(observed.bucket)
        if not config.num_steps or (self.cost is None and timings < self.trials):
            return False
        outlook = self._outlook(observed)
        return (config.num_steps + 1) / outlook.costs[config] < max(outlook.next_step().values())

    def _is_plain_best(self, outlook: _Outlook) -> bool:
        """Return whether plain decoding without the draft is the best."""
        observed, plain = outlook.observed, outlook.plain
        if observed.bare is None or plain not in observed.configs:
            return False
        timings = (
            count.timings(observed.bucket)
            for config, count in observed.acceptance.items()
            if config.num_steps
        )
        if self.cost is None and sum(timings) < self.trials:
            return False  # what drafts gain may be of another load's texts
        goodput = outlook.in_the_long_run()
        others = [promised for config, promised in goodput.items() if config != plain]
        # a rest to time such steps costs a batch its drafts, so it had better come early
        doubt = self._doubt(observed) if self._is_bare_known(observed) else -self.margin
        return bool(others) and goodput[plain] > max(others) * (1 + doubt)

    def _doubt(self, observed: Observed) -> float:
        """Return the share by which plain decoding must differ from drafts."""
        drafted = sum(
            count.reached[0] for config, count in observed.acceptance.items() if config.num_steps
        )
        # a request's tokens in a step vary by about half their mean
        return max(self.margin, 0.5 / math.sqrt(max(drafted, 1)))

    def _at_rest(self, observed: Observed, engine: _Engine, rest: Rest) -> SpecConfig:
        """Return plain decoding, or what the draft is judged by."""
        plain = _plain(observed)
        drafts = [config for config in observed.configs if config.num_steps]
        # None is all
        nobody_ready = observed.ready == 0
        if nobody_ready or not drafts or not self._is_due(observed, engine, rest):
            return plain
        outlook = self._outlook(observed)
        goodput = outlook.in_the_long_run()
        best = max(drafts, key=lambda config: goodput[config])
        if rest.drafted < self._judgement:
            rest.drafted += 1
            return best
        # where a guess began the rest, or another batch size, plain decoding has to be better
        doubt = self._doubt(observed) if observed.bucket in rest.due else -self.margin
        if goodput[best] < goodput[plain] * (1 + doubt):
            self._go_on(rest, outlook, engine)
            return plain
        engine.rest, engine.config, engine.held = None, best, 0
        return best

    def _is_due(self, observed: Observed, engine: _Engine, rest: Rest) -> bool:
        """Return whether a draft at rest is to be judged."""
        return self._is_bare_known(observed) and rest.is_due(observed.bucket, engine.steps)

    def _is_bare_known(self, observed: Observed) -> bool:
        """Return whether plain steps without the draft were timed, or are told."""
        timings = 0 if observed.bare is None else observed.bare.timings(observed.bucket)
        return self.cost is not None or timings >= self.trials

    @property
    def _judgement(self) -> float:
        """Steps that draft before a draft at rest is judged."""
        return 2 * self.prior

    def _go_on(self, rest: Rest, outlook: _Outlook, engine: _Engine) -> None:
        """Let the draft rest, until judging it again has taken its share."""
        assert outlook.bare is not None
        drafts = [cost for config, cost in outlook.costs.items() if config.num_steps]
        longer = max(min(drafts) / outlook.bare - 1, 0.1)
        pause = self._judgement * longer / self.judging
        rest.go_on(outlook.observed.bucket, engine.steps + pause)


class _Outlook:
    """What a step of each config costs, and gains.

    Parameters
    ----------
    observed : Observed
        What recent steps gained, and took.
    cost : callable or None
        As of `GoodputPolicy`.
    prior : float
        Steps' worth of trust in what other configs say.
    resting : bool
        Whether prompts left the draft out of late.

    Attributes
    ----------
    plain : SpecConfig
        Plain decoding, or what drafts least deep.
    costs : dict
        By config: seconds of a step in which the draft reads all tokens.
    bare : float or None
        The same of a plain step without the draft, where there are such.
    tokens : dict
        Expected tokens per request and step, by config that may be chosen.
    """

    def __init__(
        self, observed: Observed, cost: StepCost | None, prior: float, *, resting: bool
    ) -> None:
        self.observed, self.plain = observed, _plain(observed)
        self._measured, self._resting = cost is None, resting
        self.costs = _measured(observed) if cost is None else _told(observed, cost)
        self.bare = None if observed.bare is None else self._without_draft(observed.bare)
        drafted = [count for config, count in observed.acceptance.items() if config.num_steps]
        steps = sum(count.steps for count in drafted)
        # the requests of a step weigh as one; there may be steps that told nothing
        told = sum(count.reached[0] for count in drafted)
        batch = max(told / steps, 1) if steps else observed.batch
        self.tokens = {
            config: expected_tokens(observed.acceptance, config, prior * batch)
            for config in observed.configs
        }

    def next_step(self) -> dict[SpecConfig, float]:
        """Return the next step's goodput: some requests may not be ready."""
        observed = self.observed
        ready = 1.0 if observed.ready is None else observed.ready / observed.batch
        return {
            config: (1 + ready * (tokens - 1)) / self.costs[config]
            for config, tokens in self.tokens.items()
        }

    def in_the_long_run(self) -> dict[SpecConfig, float]:
        """Return goodput with all requests ready; see `GoodputPolicy.goodput`."""
        costs, prompts = self.costs, 0.0
        if self.bare is not None:
            costs = costs | {self.plain: self.bare}
            if self._measured:
                prompts = self.observed.batch * self.observed.prompt_seconds * self._part()
        return {
            config: 1 / (costs[config] / tokens + (prompts if config.num_steps else 0.0))
            for config, tokens in self.tokens.items()
        }

    def _part(self) -> float:
        """Return what the draft adds to prompts, as a share of these.

        It adds half of what it adds to a plain step, where its kernels wait for each other.
        """
        assert self.bare is not None
        added = max(self.costs[self.plain] / self.bare - 1, 0.0) / 2
        return added if self._resting else added / (1 + added)

    def _without_draft(self, bare: Acceptance) -> float:
        """Return the cost of a plain step without the draft."""
        plain = self.costs[self.plain]
        if not self._measured:
            return plain
        seconds = bare.seconds(self.observed.bucket)
        if seconds is not None:
            return seconds
        # as if the draft took as long as for a token of a config that drafts
        each = [(cost - plain) / one.num_steps for one, cost in self.costs.items() if one.num_steps]
        return max(plain - max(min(each, default=0.0), 0.0), plain / 2)


def _told(observed: Observed, cost: StepCost) -> dict[SpecConfig, float]:
    """Return told costs of what may be chosen, and of plain decoding."""
    costs = {
        config: cost(config, observed.batch) for config in (*observed.configs, _plain(observed))
    }
    for config, found in costs.items():
        if not found > 0:
            raise ValueError(f"cost must be above 0, got {found} for {config}")
    return costs


def _measured(observed: Observed) -> dict[SpecConfig, float]:
    """Return the costs of all configs: measured ones, and others in proportion."""
    rough = {config: rough_cost(config, observed.batch) for config in observed.acceptance}
    measured = {
        config: count.seconds(observed.bucket) for config, count in observed.acceptance.items()
    }
    ratios = [seconds / rough[config] for config, seconds in measured.items() if seconds]
    scale = median(ratios) if ratios else 1.0
    return {config: measured[config] or rough[config] * scale for config in rough}


def _plain(observed: Observed) -> SpecConfig:
    """Return plain decoding, or what drafts least deep."""
    return min(observed.acceptance, key=lambda config: config.num_steps)


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
        for count in acceptance.values():
            if depth < len(count.reached):
                tries += count.reached[depth - 1]
                hits += count.reached[depth]
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
