"""Engines that change their setting from step to step, and what decides it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.configs import SpeculativeConfigs, smaller_configs
from specattn.engine.engine import Engine, Request
from specattn.engine.policy import Acceptance, GoodputPolicy, Observed, expected_tokens, rough_cost
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.churn import Dice
from tests.engines import engine as tiny_engine
from tests.samples import half, sampled
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9], [32, 38, 4], [6]]
TREES = [(3, 1, 4), (3, 8, 16), (1, 1, 2), (0, 1, 1), (5, 2, 9)]
CHAINS = [(3, 1, 4), (6, 1, 7), (1, 1, 2), (0, 1, 1)]
DEEP, SHALLOW, PLAIN = SpecConfig(6, 1, 7), SpecConfig(2, 1, 3), SpecConfig(0, 1, 1)


def engine(trees, policy, context=96, **options) -> Engine:
    options = {"backend": "torch_native", "buckets": (2, 5), "page_size": 2} | options
    options |= {"context": context, "device": DEVICE, "policy": policy}
    return tiny_engine(*trees, rows=5, **options)


def drain(run: Engine, requests: list[Request], *, ahead: bool) -> list:
    """Decode with requests that join while others run."""
    waiting, results = list(requests), []
    while run.num_running or waiting:
        if waiting and run.num_running < 4:
            results += run.add([waiting.pop(0)])
        run.step(ahead=ahead)
    return results


@pytest.mark.parametrize(
    ("sampling", "cudagraph", "ahead"),
    [
        (False, "full", True),
        (False, "piecewise", False),
        (True, "full", True),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_switching_every_step_changes_no_token(backend, sampling, cudagraph, ahead):
    """Requests join, end, and reach their context's end under any sequence of settings."""
    dice = Dice(5)
    run = engine(
        CHAINS if sampling else TREES,
        dice,
        56,
        backend=backend,
        cudagraph=cudagraph,
        sampling=sampling,
    )
    new = [12, 99, 5, 33, 99]
    requests = [Request(p, n) for p, n in zip(PROMPTS, new, strict=True)]
    results = drain(run, requests, ahead=ahead)
    for result, prompt, count in zip(results, PROMPTS, new, strict=True):
        assert result.finish_reason == ("length" if count < 99 else "context")
        assert result.tokens == dense_greedy(run.target.model, prompt, len(result.tokens))
    run.clear()
    check_books(run.table)
    assert set(run.configs.used) == set(run.configs.all)
    assert {observed.current for observed in dice.seen} == set(run.configs.all)
    assert any(len(observed.configs) < len(run.configs.all) for observed in dice.seen), (
        "near the end of a context wide settings are not offered"
    )


def test_requests_of_one_likely_token_stay_greedy():
    """Steps that draw and steps that do not, of every setting."""
    run = engine(TREES, Dice(1))
    drawn = SamplingParams(temperature=0.7, top_k=1, seed=3)
    out = run.generate([Request(PROMPTS[0], 20, drawn), Request(PROMPTS[1], 20)])
    for result, prompt in zip(out, PROMPTS, strict=False):
        assert result.tokens == dense_greedy(run.target.model, prompt, 20)


def test_settings_share_states_pools_and_graph_memory():
    run = engine(TREES, Dice())
    assert run.states.drafting["topk_tokens"].shape[1] == 8
    assert len(run.decoders) == len(TREES)
    for decoder in run.decoders:
        assert decoder.states is run.states
        assert decoder.table is run.table
        assert decoder.runner.recorder is run.decoders[0].runner.recorder
        assert decoder.runner.buckets == [2, 5]
        (part,) = decoder.modes
        assert decoder.runner.captured(part) == [2, 5]
    assert list(run.graphs()) == list(run.configs.all)
    for decoder, reports in zip(run.decoders, run.graphs().values(), strict=True):
        assert reports == decoder.report()
        assert [report.bucket for report in reports] == [5, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_context_len", 80),
        ("max_num_reqs", 4),
        ("page_size", 4),
        ("draft_sampling", True),
    ],
)
def test_settings_that_share_no_buffers_are_refused_by_name(field, value):
    config = SpecConfig(3, 1, 4, 96, 5)
    other = replace(config, num_steps=2, num_draft_tokens=3, **{field: value})
    with pytest.raises(ValueError, match=f"{field} must be the same in all configs, got .* and"):
        Engine(TinyTarget(), TinyDraft(), config, configs=[other], backend="torch_native")


def test_a_policy_must_choose_what_it_is_given():
    run = engine([(3, 1, 4), (1, 1, 2)], lambda observed: SHALLOW)
    with pytest.raises(ValueError, match="policy must return one of the configs"):
        run.generate([Request([1], 9)])
    assert run.table.num_free_rows == 5


@pytest.mark.parametrize("trees", [CHAINS, CHAINS[:1]], ids=["several", "one"])
def test_steps_count_that_gained_something_for_somebody(trees):
    """Not one launched ahead for requests that had ended, nor what those gained beside others."""
    run = engine(trees, Dice(4) if len(trees) > 1 else None)
    for count in range(9, 15):
        before = run.configs.used.total(), run.configs.gained.total()
        out = run.generate([Request([1], count)])
        assert run.configs.used.total() - before[0] == out[0].steps
        assert run.configs.gained.total() - before[1] == sum(out[0].accept_lens)
        assert sum(out[0].accept_lens) == count - 1, "tokens past the end are counted"
    launched = sum(decoder.runner.stats.replays.total() for decoder in run.decoders)
    assert launched > run.configs.used.total(), "no step was launched for nobody"

    run = engine(trees, Dice(4) if len(trees) > 1 else None)
    out = run.generate([Request(prompt, 9 + 7 * at) for at, prompt in enumerate(PROMPTS)])
    assert run.configs.advanced.total() == sum(result.steps for result in out)
    assert run.configs.gained.total() == sum(sum(result.accept_lens) for result in out)
    assert run.configs.used.total() == max(result.steps for result in out)


def test_one_setting_is_not_measured():
    run = engine([(3, 1, 4)], None)
    run.generate([Request([1], 9)])
    assert not run.configs.adaptive
    assert run.configs.acceptance[run.config].steps == 0
    assert run.configs.used[run.config] > 0


def test_acceptance_is_that_of_the_window():
    configs = SpeculativeConfigs([DEEP, SHALLOW], None, [1, 4], window=3)
    configs.count(DEEP, [7, 1], 5, 0.5)  # four tokens lay past an end
    configs.count(SHALLOW, [3, 0, 2], 5, None)
    configs.count(replace(DEEP, num_steps=1, num_draft_tokens=2), [2], 2, 9.0)
    deep, shallow = configs.acceptance.values()
    assert (deep.steps, deep.mean, deep.by_depth) == (1, 4.0, (0.5,) * 6)
    assert (shallow.steps, shallow.mean, shallow.by_depth) == (1, 2.5, (1.0, 0.5))
    assert (deep.seconds(4), deep.seconds(1), shallow.seconds(4)) == (0.5, None, None)
    assert configs.gained == {DEEP: 5, SHALLOW: 5}
    for tokens in (1, 2):
        configs.count(SHALLOW, [tokens], tokens, 0.1 * tokens)
    assert (deep.steps, deep.mean, deep.by_depth) == (0, 0.0, (0.0,) * 6)
    assert shallow.steps == 3
    assert shallow.by_depth == (3 / 4, 1 / 4)
    assert shallow.seconds(1) == pytest.approx(0.1), "what is disturbed takes longer"


def test_a_steps_time_is_that_of_the_bucket_it_ran_in():
    """Whoever had ended rode along, and is looked for where the next batch runs."""
    configs = SpeculativeConfigs([DEEP, SHALLOW], None, [1, 4])
    configs.count(DEEP, [0, 2, 0], 2, 0.5)
    deep = configs.acceptance[DEEP]
    assert (deep.seconds(4), deep.seconds(1)) == (0.5, None)
    configs.count(SHALLOW, [1, 2, 1, 1], 5, 0.25)
    seen, prior = [], 4.0
    configs.policy = lambda observed: seen.append(observed) or SHALLOW
    for batch in (2, 3, 4):
        configs.choose([99] * batch)
        goodput = GoodputPolicy(prior=prior).goodput(seen[-1])
        for config, seconds in ((DEEP, 0.5), (SHALLOW, 0.25)):
            # one request and four, in two steps
            tokens = expected_tokens(configs.acceptance, config, prior * 2.5)
            assert goodput[config] == pytest.approx(tokens / seconds)


def test_times_leave_with_their_steps():
    """What a host was busy with, or compiled, is forgotten; a few are kept, however old."""
    configs = SpeculativeConfigs([DEEP, SHALLOW], None, [1, 4], window=20)
    for _ in range(20):
        configs.count(DEEP, [7], 7, 9.0)
    configs.count(DEEP, [7] * 4, 28, 2.0)
    for _ in range(20):
        configs.count(SHALLOW, [3], 3, None)
    deep, shallow = configs.acceptance.values()
    assert (deep.seconds(1), deep.seconds(4), shallow.seconds(1)) == (9.0, 2.0, None)
    assert (deep.timings(1), deep.timings(4), shallow.timings(1)) == (3, 1, 0)
    for _ in range(2):
        configs.count(DEEP, [7], 7, 0.5)
    assert (deep.seconds(1), deep.timings(1)) == (0.5, 3)
    for at in range(40):
        configs.count(DEEP, [7], 7, 100.0 + at)
    assert deep.seconds(1) == 132.0, "the median of the last 15"


def test_buckets_may_come_in_any_order():
    """Captures come largest first, and a batch takes the smallest bucket that holds it."""
    seen = []

    def first(observed):
        seen.append((observed.batch, observed.bucket))
        return observed.configs[0]

    run = engine(TREES[:2], first, 40, buckets=(3, 5, 1))
    assert [report.bucket for report in run.decoders[0].report()] == [5, 3, 1]
    requests = [Request(prompt, 3 + 4 * at) for at, prompt in enumerate(PROMPTS)]
    requests[-1] = Request(list(range(1, 30)), 99)
    for request, result in zip(requests, run.generate(requests), strict=True):
        want = dense_greedy(run.target.model, request.prompt, len(result.tokens))
        assert result.tokens == want
    run.configs.choose([40])
    assert set(seen) >= {(5, 5), (2, 3), (1, 1)}
    for batch, bucket in ((1, 1), (2, 3), (4, 5)):
        decoder = run.decoders[0]
        assert decoder.runner.ready(decoder.modes, batch)[0].bucket == bucket
    # made late, for the largest alone
    plain = run.decoder(run.config.plain())
    assert [report.bucket for report in plain.report()] == [5]


def test_a_policy_that_raises_keeps_no_tokens_back():
    """Those of the step in flight come with the next call, which asks for no step ahead."""
    asked = []

    def policy(observed):
        asked.append(observed)
        if len(asked) > 1:
            raise ValueError("no such luck")
        return observed.configs[0]

    run = engine(TREES[:2], policy)
    (result,) = run.add([Request(PROMPTS[0], 20)])
    with pytest.raises(ValueError, match="no such luck"):
        run.step(ahead=True)
    ((_, new),) = run.step(ahead=True)
    assert len(asked) == 2
    assert [result.tokens[0], *new] == result.tokens
    assert result.tokens == dense_greedy(run.target.model, PROMPTS[0], len(result.tokens))


def observed(gains: dict[SpecConfig, list[int]], batch: int = 1, current=DEEP) -> Observed:
    acceptance = {config: Acceptance(config) for config in gains}
    for config, tokens in gains.items():
        for one in tokens:
            acceptance[config].add([one])
    return Observed(batch, batch, current, tuple(gains), acceptance)


def test_expected_tokens_are_the_mean_where_much_is_known():
    gains = {DEEP: [7, 3, 1, 2] * 100, SHALLOW: [3, 1] * 100, PLAIN: [1] * 100}
    seen = observed(gains)
    for config, tokens in gains.items():
        wanted = sum(tokens) / len(tokens)
        assert expected_tokens(seen.acceptance, config, 1e-6) == pytest.approx(wanted, rel=1e-4)
    # what ran little is judged by what ran much: rates per depth carry over
    seen = observed({DEEP: [5] * 400, SHALLOW: [], PLAIN: []})
    assert expected_tokens(seen.acceptance, SHALLOW) == pytest.approx(3, abs=0.05)
    assert expected_tokens(seen.acceptance, PLAIN) == 1
    seen = observed({DEEP: [], SHALLOW: [3] * 400})
    assert 6 < expected_tokens(seen.acceptance, DEEP) < 7, "depths unseen go on as those seen"
    seen = observed({DEEP: [], SHALLOW: []})
    assert expected_tokens(seen.acceptance, DEEP) == pytest.approx(sum(0.5**d for d in range(7)))


@pytest.mark.parametrize("prior", [0.5, 4.0, 100.0])
def test_without_data_every_depth_is_kept_every_other_time(prior):
    seen = observed({DEEP: [], SHALLOW: [], PLAIN: []})
    assert expected_tokens(seen.acceptance, SHALLOW, prior) == 1 + 1 / 2 + 1 / 4
    assert expected_tokens(seen.acceptance, PLAIN, prior) == 1
    assert expected_tokens(seen.acceptance, DEEP, prior) == sum(0.5**d for d in range(7))


def test_little_data_counts_as_little():
    """By hand, for a request that kept one of two tokens, and a config that has none."""
    pooled = (1 + 4 * 0.5) / 5, (4 * 0.6) / 5
    own = (1 + 4 * 0.6) / 5, (4 * 0.48) / 5
    seen = observed({SHALLOW: [2], replace(SHALLOW, topk=2): []})
    rates = [expected_tokens(seen.acceptance, config) for config in seen.configs]
    assert rates == pytest.approx([1 + own[0] + own[0] * own[1], 1 + pooled[0] * (1 + pooled[1])])


def test_a_depth_is_judged_by_those_who_reached_it():
    """By hand: of four requests two reached depth 1, and one of these depth 2."""
    first = (2 + 4 * 0.5) / (4 + 4)
    second = (1 + 4 * first) / (2 + 4)
    seen = observed({SHALLOW: [1, 1, 2, 3], replace(SHALLOW, topk=2): []})
    found = [expected_tokens(seen.acceptance, config) for config in seen.configs]
    own = (2 + 4 * first) / (4 + 4), (1 + 4 * second) / (2 + 4)
    assert found == pytest.approx([1 + own[0] * (1 + own[1]), 1 + first * (1 + second)])


def test_goodput_follows_acceptance_and_batch_size():
    """Deep where drafts hold, shallow where they do not, plain where the batch is large."""
    good, bad = [7, 6, 7, 5] * 20, [1, 1, 2, 1] * 20

    def choice(tokens, batch, cost=rough_cost):
        gains = {DEEP: tokens, SHALLOW: [min(n, 3) for n in tokens], PLAIN: [1] * len(tokens)}
        return GoodputPolicy(cost, hold=1)(observed(gains, batch, current=SHALLOW))

    assert choice(good, 1) is DEEP
    assert choice(bad, 1) is SHALLOW
    assert choice(bad, 400) is PLAIN
    assert choice(good, 1, lambda config, batch: 1 + config.num_steps) is SHALLOW


def test_the_requests_of_a_step_weigh_as_one():
    """Steps of eight requests that gain alike say what steps of one do."""
    alone, beside = observed({DEEP: [], SHALLOW: []}), observed({DEEP: [], SHALLOW: []}, batch=8)
    for config, tokens in ((DEEP, 5), (DEEP, 1), (SHALLOW, 3)):
        alone.acceptance[config].add([tokens])
        beside.acceptance[config].add([tokens] * 8)
    policy = GoodputPolicy(lambda config, batch: 1.0)
    assert policy.goodput(alone) == pytest.approx(policy.goodput(beside))


@pytest.mark.parametrize("seed", [1, 14, 21])
def test_passages_that_differ_are_not_taken_for_the_configs(seed):
    """Texts that first repeat their prompts, then are new: lookup gains all or nothing."""
    dice, texts = random.Random(seed), []
    for _ in range(11):
        # how many more tokens a lookup gets right, by place
        copied = range(dice.randint(45, 140), 0, -1)
        texts += [0, 0, 0, *copied, *[0] * dice.randint(25, 70)]

    def speed(chains: list[SpecConfig]) -> float:
        """Return tokens per unit of time; all steps take about as long."""
        configs = SpeculativeConfigs(chains, None, [1])
        place, time = 0, 0.0
        while place < len(texts):
            config = configs.current = configs.choose([99])
            gained = 1 + min(texts[place], config.num_steps)
            seconds = 1 + 0.01 * config.num_steps
            configs.count(config, [gained], gained, seconds)
            place, time = place + gained, time + seconds
        return place / time

    deep, shallow = SpecConfig(7, 1, 8), SpecConfig(3, 1, 4)
    fixed = speed([deep])
    assert fixed > 1.1 * speed([shallow])
    assert speed([deep, shallow, PLAIN]) > 0.97 * fixed


def test_a_switch_waits_and_must_be_worth_it():
    gains = {DEEP: [4] * 50, SHALLOW: [3] * 50}
    seen = observed(gains, current=SHALLOW)

    def calls(cost, **options) -> list[SpecConfig]:
        policy = GoodputPolicy(cost, **options)
        return [policy(seen) for _ in range(8)]

    worth = {DEEP: 1.0, SHALLOW: 0.80}  # 4 / 1 against 3 / 0.8: 6.7 % more
    assert calls(lambda c, b: worth[c], hold=5) == [SHALLOW] * 4 + [DEEP] * 4
    assert calls(lambda c, b: worth[c], hold=5, margin=0.1) == [SHALLOW] * 8
    assert calls(lambda c, b: worth[c], hold=5) == calls(lambda c, b: worth[c], hold=5)


def test_what_was_switched_to_is_held_as_long():
    """And what has been held long enough is left as soon as another is better."""
    best = [DEEP]
    policy = GoodputPolicy(lambda config, _: 1.0 if config == best[0] else 9.0, hold=3)
    seen = observed({DEEP: [4] * 50, SHALLOW: [3] * 50}, current=SHALLOW)
    assert [policy(seen) for _ in range(3)] == [SHALLOW, SHALLOW, DEEP]
    best[0] = SHALLOW
    assert [policy(seen) for _ in range(3)] == [DEEP, DEEP, SHALLOW]
    assert [policy(seen) for _ in range(5)] == [SHALLOW] * 5
    best[0] = DEEP
    assert policy(seen) is DEEP


def test_what_is_not_known_is_tried_and_what_does_not_fit_is_left_out():
    costs, gained = {DEEP: 3.0, SHALLOW: 2.0, PLAIN: 1.5}, {DEEP: 4, SHALLOW: 2, PLAIN: 1}
    policy = GoodputPolicy(lambda config, _: costs[config], trials=2, hold=4)
    seen = observed({DEEP: [4] * 9, SHALLOW: [2], PLAIN: []})
    chosen = []
    for _ in range(14):
        chosen.append(policy(seen))
        seen.acceptance[chosen[-1]].add([gained[chosen[-1]]])
    assert chosen == [PLAIN, *[DEEP] * 3, SHALLOW, *[DEEP] * 3, PLAIN, *[DEEP] * 5]
    tight = replace(seen, configs=(SHALLOW, PLAIN))
    assert policy(tight) is SHALLOW
    assert policy(seen) is DEEP, "what was chosen comes back"


def test_what_cannot_win_is_not_tried():
    """Not even if all its tokens were kept."""
    for cost, tried in ((2.9, True), (3.1, False)):
        costs = {DEEP: 7.0, SHALLOW: cost, PLAIN: 1.5}
        policy = GoodputPolicy(lambda config, _, costs=costs: costs[config])
        seen = observed({DEEP: [7] * 50, SHALLOW: [], PLAIN: []}, current=DEEP)
        chosen = set()
        for _ in range(40):
            chosen.add(policy(seen))
            seen.acceptance[PLAIN].add([1])
        assert (SHALLOW in chosen) is tried


def test_a_config_is_timed_often_enough_before_it_is_judged():
    """A host that is late makes a step seem longer, and the next one shorter."""
    policy = GoodputPolicy()
    seen = observed({DEEP: [4] * 50, SHALLOW: [], PLAIN: []}, batch=4)
    for _ in range(15):
        seen.acceptance[DEEP].timed(4, 4.0)
    chosen = []
    times = {PLAIN: iter((1.95, 0.5, 1.4, 1.4)), SHALLOW: iter((2.9, 0.5, 2.2, 2.2))}
    for _ in range(6):
        chosen.append(policy(seen))
        seen.acceptance[chosen[-1]].add([1 + chosen[-1].num_steps // 2])
        seen.acceptance[chosen[-1]].timed(4, next(times[chosen[-1]]))
    assert sorted(chosen, key=lambda one: one.num_steps) == [PLAIN] * 3 + [SHALLOW] * 3
    assert policy(seen) is DEEP


def test_measured_times_decide_where_there_are_any():
    seen = observed({DEEP: [4] * 50, SHALLOW: [3] * 50, PLAIN: [1] * 50}, batch=4)
    policy = GoodputPolicy(hold=1)
    for _ in range(3):
        seen.acceptance[DEEP].timed(4, 0.020)
        seen.acceptance[SHALLOW].timed(4, 0.010)
        seen.acceptance[PLAIN].timed(1, 1e-9)  # of another bucket
    seen.acceptance[SHALLOW].timed(4, 5.0)  # an outlier
    goodput = policy.goodput(seen)
    assert goodput[DEEP] == pytest.approx(200, rel=0.1)
    assert goodput[SHALLOW] == pytest.approx(300, rel=0.1)
    assert 40 < goodput[PLAIN] < 200, "what was not measured costs in proportion"
    assert policy(seen) is SHALLOW


@pytest.mark.parametrize("trees", [TREES[:1], TREES[:1] * 2], ids=["one", "one_twice"])
def test_a_policy_without_a_choice_is_refused(trees):
    with pytest.raises(ValueError, match=r"policy has nothing to choose from: configs must hold"):
        engine(trees, GoodputPolicy())


@pytest.mark.parametrize(
    "options",
    [
        {"margin": -1},
        {"hold": 0},
        {"trials": -1},
        {"prior": 0},
        {"margin": float("nan")},
        {"prior": float("nan")},
    ],
)
def test_senseless_policies_are_refused(options):
    with pytest.raises(ValueError, match="must be at least 0"):
        GoodputPolicy(**options)


@pytest.mark.parametrize("cost", [0, -1.5, float("nan")])
def test_costs_that_are_none_are_refused(cost):
    policy = GoodputPolicy(lambda config, batch: cost if config == PLAIN else 1.0, hold=1)
    with pytest.raises(ValueError, match=f"cost must be above 0, got {cost} for SpecConfig"):
        policy(observed({DEEP: [3] * 9, PLAIN: [1] * 9}))


def test_the_policy_finds_the_best_setting_of_an_engine():
    """Drafts are deep where they cost next to nothing, and none are made where they cost much."""
    trees = [(3, 1, 4), (1, 1, 2), (0, 1, 1)]
    found = {}
    for price in (0.01, 5.0):
        cost = GoodputPolicy(lambda c, b, price=price: 1 + price * c.num_steps, hold=4)
        run = engine(trees, cost)
        run.generate([Request(p, 40) for p in PROMPTS[:2]])
        found[price] = {c.num_steps: count for c, count in run.configs.used.items()}
    assert max(found[0.01], key=found[0.01].get) == 3
    assert max(found[5.0], key=found[5.0].get) == 0


class Listed(list):
    """A policy that is the list of what it chose, and so false at first."""

    def __call__(self, observed: Observed) -> SpecConfig:
        self.append(observed.configs[-1])
        return self[-1]


def test_a_policy_that_is_empty_is_one():
    policy = Listed()
    engine(CHAINS, policy).generate([Request([3, 1], 9)])
    assert set(policy) == {SpecConfig(0, 1, 1, 96, 5, 2)}


class Noted:
    """A policy, and what it chose."""

    def __init__(self, policy) -> None:
        self.policy, self.chosen = policy, []

    def __call__(self, observed: Observed) -> SpecConfig:
        self.chosen.append(self.policy(observed))
        return self.chosen[-1]


@sampled(
    half,
    trees={"same_settings": [(2, 1, 3), (1, 1, 2), (0, 1, 1)], "others": [(3, 1, 4), (1, 1, 2)]},
    turns={"in_turns": True, "one_after_the_other": False},
)
def test_engines_that_share_a_policy_choose_as_if_alone(trees, turns):
    """The other engine leaves deep trees, and would keep this one from beginning with its own."""

    def goodput() -> GoodputPolicy:
        return GoodputPolicy(lambda c, b: 1 + 5 * c.num_steps, hold=7)

    def chosen(policy, *, beside: Engine | None = None) -> list[SpecConfig]:
        noted = Noted(policy)
        run = engine(trees, noted)
        run.add([Request([3, 1], 40)])
        if beside is not None:
            beside.add([Request([5], 60)])
        while run.num_running:
            run.step()
            if beside is not None:
                beside.step()
        return noted.chosen

    shared = goodput()
    other = engine([(2, 1, 3), (1, 1, 2), (0, 1, 1)], shared)
    if not turns:
        other.generate([Request([5], 60)])
        assert max(other.configs.used, key=other.configs.used.get).num_steps == 0
    alone = chosen(goodput())
    assert len(set(alone)) > 1
    assert chosen(shared, beside=other if turns else None) == alone


@pytest.mark.parametrize("tree", [(5, 1, 6), (1, 1, 2), (5, 8, 32), (1, 4, 5), (4, 2, 5)], ids=str)
def test_settings_around_one_cost_less(tree):
    config = SpecConfig(*tree, max_num_reqs=3)
    found = smaller_configs(config)
    assert found[0] is config
    assert found[-1].num_steps == 0
    assert len(set(found)) == len(found) >= 2
    for one in found[1:]:
        assert one.reserve_len <= config.reserve_len
        assert (one.num_draft_tokens, one.topk) < (config.num_draft_tokens + 1, config.topk + 1)
        assert one.max_num_reqs == 3
    assert smaller_configs(found[-1]) == found[-1:]


@pytest.mark.gpu
def test_settings_replay_their_graphs_and_share_a_pool():
    run = engine(TREES, Dice(2), backend="triton")
    requests = [Request(p, 40) for p in PROMPTS[:4]]
    torch.cuda.synchronize()
    out = drain(run, requests, ahead=True)
    for result, prompt in zip(out, PROMPTS, strict=False):
        assert result.tokens == dense_greedy(run.target.model, prompt, 40)
    recorders = {id(decoder.runner.recorder) for decoder in run.decoders[: len(TREES)]}
    assert len(recorders) == 1
    launched = Counter()
    for decoder in run.decoders[: len(TREES)]:
        (part,) = decoder.modes
        assert decoder.runner.recorded(part)
        launched[decoder.config] = decoder.runner.stats.replays[part]
        assert not decoder.runner.stats.eager
    # one may have been on its way when the last text ended
    assert (launched - run.configs.used).total() in (0, 1)
    assert run.configs.used <= launched
