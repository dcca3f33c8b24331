"""What `SamplingParams` make of what they are given."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from specattn.engine.request import Request
from specattn.speculative.sampling.params import SamplingParams


@pytest.mark.parametrize("asked", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_a_choice_among_tokens_needs_a_temperature(asked):
    """One that is left out; 0 is greedy, as everywhere."""
    ((name, value),) = asked.items()
    wanted = f"temperature must be a number beside {name}={value}, 0 is greedy, got None"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        SamplingParams(**asked)
    assert not SamplingParams(0.0, **asked).drawn
    assert SamplingParams(0.7, **asked).drawn
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert SamplingParams(**off) == SamplingParams() == SamplingParams(0)
    # what was made greedy stays so
    assert replace(SamplingParams(), **asked).temperature == 0
    with pytest.raises(ValueError, match=r"beside top_k=3 and top_p=0\.5, 0"):
        SamplingParams(top_k=3, top_p=0.5)


def test_a_top_k_of_minus_one_is_off():
    assert SamplingParams(1.0, -1) == SamplingParams(1.0, 0)
    assert SamplingParams(top_k=-1) == SamplingParams()
    with pytest.raises(ValueError, match="top_k must be 0 or -1"):
        SamplingParams(1.0, -2)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_of_what_is_not_finite_a_bias_may_only_be_minus_infinity(value):
    assert SamplingParams(logit_bias={3: -math.inf}).logit_bias == ((3, -math.inf),)
    with pytest.raises(ValueError, match="every logit_bias must be finite or -inf, got"):
        SamplingParams(logit_bias={3: value})


def test_one_stop_string_is_not_its_characters():
    assert Request([3], stop="end").stop == ("end",)
    assert Request([3], stop=["end", "\n"]).stop == ("end", "\n")
    for nothing in ("", [""], ["end", 3]):
        with pytest.raises(ValueError, match="stop must be texts that are not empty"):
            Request([3], stop=nothing)
