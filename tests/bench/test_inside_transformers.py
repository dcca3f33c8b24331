"""Every way of `bench.inside_transformers` writes what plain decoding writes."""

from __future__ import annotations

import torch

from bench.inside_transformers import PLAIN, measure
from bench.shipped import plain_target


def test_every_way_is_compared_before_it_is_timed():
    prompts = [[5, 17, 93, 40, 8, 61], [23, 6]]
    results = measure(plain_target("cpu", torch.float32), prompts, 6, 1)
    assert [one["way"].startswith("specattn") for one in results].count(True) == 3
    assert results[0]["way"] == PLAIN
    assert {one["texts_equal_to_plain"] for one in results} == {len(prompts)}
