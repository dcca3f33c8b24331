"""Steps over the heads that read a target's last state: EAGLE, MTP (NEXTN), latent attention."""

from __future__ import annotations

import pytest

from tests.integrations.sglang import heads
from tests.integrations.sglang.test_algorithm import result

pytestmark = pytest.mark.sglang


def run(*arguments: str) -> tuple[list[list[int]], list[int]]:
    """Return texts, and verify forwards, of a process of its own."""
    found = result("heads", *arguments)
    return [tokens for tokens, _ in found], [count for _, count in found]


def test_trees_of_a_latent_target_with_an_mtp_layer(tmp_path):
    """Texts are transformers', verify forwards those of SGLang's own algorithm."""
    folder = tmp_path / "latent"
    wanted = heads.latent(folder)
    tree = "3", "2", "6"
    texts, verified = run(str(folder), "", "SPECATTN", *tree)
    assert texts == wanted
    assert min(verified) < heads.NEW - 6
    assert run(str(folder), "", "NEXTN", *tree) == (wanted, verified)


def test_chains_of_an_eagle_head(tmp_path):
    folder, head = tmp_path / "target", tmp_path / "head"
    wanted = heads.eagle(folder, head)
    chain = "3", "1", "4"
    texts, verified = run(str(folder), str(head), "SPECATTN", *chain)
    assert texts == wanted
    assert min(verified) < heads.NEW - 6
    assert run(str(folder), str(head), "EAGLE", *chain) == (wanted, verified)
