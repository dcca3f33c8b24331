"""Drawn tokens have plain decoding's distribution under processors: three, against a product."""

from __future__ import annotations

from functools import cache, partial

import pytest

from specattn.engine.engine import Engine
from specattn.speculative.sampling.params import SamplingParams
from tests.grammars import Remainders, constrained_logits
from tests.processors import dense_logits, no_path, processed
from tests.processors import three_tokens as distribution_of
from tests.samples import sampled, star
from tests.speculative import three_tokens
from tests.speculative.three_tokens import DEVICE, PROMPT, SETTINGS

__all__ = ["DEVICE"]

MANY = 500
DRAWN = partial(SamplingParams, 1.5, 3)
PARAMS = {
    "min-p": SamplingParams(1.5, min_p=0.25),
    "repetition": DRAWN(repetition_penalty=2.5),
    "presence": DRAWN(presence_penalty=2.0),
    "frequency": DRAWN(frequency_penalty=2.0),
    "bias": DRAWN(logit_bias={4: 4.0, 45: 3.0, 17: -2.0}),
    "bad words": DRAWN(bad_words=[[4, 17], [17, 45, 14], [9, 4], [22]]),
    "allowed": DRAWN(allowed_tokens=range(0, 61, 2)),
    "three": DRAWN(min_p=0.1, frequency_penalty=1.0, logit_bias={14: 3.0, 17: 2.0}),
}
#: Their third token depends on the second: half of it is on the path of one step.
STRONG = DRAWN(repetition_penalty=3.0, frequency_penalty=2.0, logit_bias={14: 5.0, 4: 5.0, 17: 5.0})


@pytest.fixture(scope="module")
def models():
    return three_tokens.make_models()


@pytest.fixture(scope="module")
def engines(models):
    """The engine of a setting: requests of any parameters, one batch after another."""
    return cache(lambda setting: Engine(*models, SETTINGS[setting], buckets=[250]))


def p_value(run: Engine, wanted, params: SamplingParams, **options) -> float:
    return three_tokens.drawn_p_value(run, wanted, params=params, **options)


def distribution(models, params: SamplingParams):
    def logits(output):
        return processed(dense_logits(models[0], [*PROMPT, *output]), PROMPT, output, params)

    return distribution_of(logits, params)


@sampled(star, setting=["tree", "chain"], name=["three", *list(PARAMS)[:-1]])
def test_three_tokens_have_the_distribution_of_plain_decoding(models, engines, name, setting):
    wanted = distribution(models, PARAMS[name])
    assert p_value(engines(setting), wanted, PARAMS[name]) > 1e-3


def test_rejection_sampling_keeps_the_distribution(models, engines):
    wanted = distribution(models, PARAMS["three"])
    assert p_value(engines("rejection"), wanted, PARAMS["three"]) > 1e-3


def test_a_history_without_the_path_fails_the_same_test(monkeypatch):
    """The control, on a CPU: every node is processed as the root is."""
    monkeypatch.setattr(three_tokens, "DEVICE", "cpu")
    models = three_tokens.make_models()
    wanted = distribution(models, STRONG)
    run = Engine(*models, SETTINGS["tree"], buckets=[250])
    assert p_value(run, wanted, STRONG, draws=MANY) > 1e-3
    monkeypatch.setattr("specattn.kernels.processors._path", no_path)
    assert p_value(run, wanted, STRONG, draws=MANY) < 1e-8


@pytest.mark.parametrize("setting", ["plain", "chain", "tree"])
def test_constrained_tokens_have_the_distribution_of_plain_constrained_decoding(
    models, engines, setting
):
    params = DRAWN(frequency_penalty=0.5)
    wanted = distribution_of(lambda out: constrained_logits(models[0], PROMPT, out, params), params)
    grammar = partial(Remainders, PROMPT)
    assert p_value(engines(setting), wanted, params, grammar=grammar) > 1e-3
