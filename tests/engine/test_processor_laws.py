"""Drawn tokens have the law of plain decoding under processors: three tokens, against a product."""

from __future__ import annotations

from functools import partial

import pytest

from specattn.engine.engine import Engine
from specattn.speculative.sampling import SamplingParams
from tests.grammars import Remainders, constrained_logits
from tests.processors import dense_logits, joint_law, no_path, processed
from tests.samples import sampled, star
from tests.speculative import laws
from tests.speculative.laws import DEVICE, PROMPT, SETTINGS

__all__ = ["DEVICE"]

MANY = 1500
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
    return laws.make_models()


def p_value(models, setting: str, law, params: SamplingParams, **options) -> float:
    run = Engine(*models, SETTINGS[setting], buckets=[250])
    return laws.p_value_of(run, law, params=params, **options)


def law_of(models, params: SamplingParams):
    def logits(output):
        return processed(dense_logits(models[0], [*PROMPT, *output]), PROMPT, output, params)

    return joint_law(logits, params)


@sampled(star, setting=["tree", "chain"], name=["three", *list(PARAMS)[:-1]])
def test_three_tokens_have_the_law_of_plain_decoding(models, name, setting):
    law = law_of(models, PARAMS[name])
    assert p_value(models, setting, law, PARAMS[name]) > 1e-3


def test_rejection_sampling_keeps_the_law(models):
    law = law_of(models, PARAMS["three"])
    assert p_value(models, "rejection", law, PARAMS["three"]) > 1e-3


def test_a_history_without_the_path_fails_the_same_test(monkeypatch):
    """The control, on a CPU: every node is processed as the root is."""
    monkeypatch.setattr(laws, "DEVICE", "cpu")
    models = laws.make_models()
    law = law_of(models, STRONG)
    assert p_value(models, "tree", law, STRONG, draws=MANY) > 1e-3
    monkeypatch.setattr("specattn.kernels.processors._path", no_path)
    assert p_value(models, "tree", law, STRONG, draws=MANY) < 1e-30


@pytest.mark.parametrize("setting", ["plain", "chain", "tree"])
def test_constrained_tokens_have_the_law_of_plain_constrained_decoding(models, setting):
    params = DRAWN(frequency_penalty=0.5)
    law = joint_law(lambda out: constrained_logits(models[0], PROMPT, out, params), params)
    assert p_value(models, setting, law, params, grammar=partial(Remainders, PROMPT)) > 1e-3
