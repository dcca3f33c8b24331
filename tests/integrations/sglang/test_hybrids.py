"""Steps over targets with Gated DeltaNet layers, whose states stay SGLang's."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn.batch import AcceptResult
from tests.integrations.sglang import INSTALLED, hybrids
from tests.integrations.sglang.hybrids import AGAIN, CHUNKED, NEW, PROMPTS, SETTINGS
from tests.integrations.sglang.test_algorithm import result

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.sglang

OLD = False
if INSTALLED:
    from specattn.integrations.sglang import names

    OLD = names.release() == names.OLD

engines = pytest.mark.skipif(not OLD, reason="hybrid targets are served inside SGLang 0.5.15")


@functools.cache
def target(kind: str, folder: Path) -> Any:
    return hybrids.write(kind, folder)


@functools.cache
def plain(kind: str, folder: Path, prompt: tuple[int, ...]) -> list[int]:
    """Transformers' greedy text."""
    ids = torch.tensor([prompt])
    # past all ends: no token has this number
    ends = {"eos_token_id": -1, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    out = target(kind, folder).generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **ends
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("hybrids")


@engines
@pytest.mark.slow
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_texts_are_those_of_transformers(setting, folders):
    """Several at once, after hits of the radix cache, and after rejected drafts."""
    chosen = SETTINGS[setting]
    folder = folders / chosen.kind
    target(chosen.kind, folder)
    found = result("hybrids", setting, str(folder))
    texts = [plain(chosen.kind, folder, tuple(one)) for one in PROMPTS]
    parts = {
        "first": PROMPTS,
        "again": AGAIN,
        "longer": hybrids.longer(texts),
        "chunked": CHUNKED,
    }
    for part, prompts in parts.items():
        wanted = [plain(chosen.kind, folder, tuple(one)) for one in prompts]
        assert [one["tokens"] for one in found[part]] == wanted, part
    # some drafts were kept, and some were not
    counts = [one["verified"] for one in found["first"]]
    assert min(counts) < NEW - 6
    assert max(counts) > NEW // 4
    cached = {part: [one["cached"] for one in found[part]] for part in parts}
    # of a whole prompt, and at the end of a chunk
    assert cached["chunked"][0] == 0
    assert min(cached["chunked"][1:]) >= 64
    if chosen.options.get("mamba_radix_cache_strategy") == "extra_buffer":
        # where a step came to a multiple of the interval
        assert cached["longer"][::2] == [24, 64, 40]
    else:
        assert cached["again"][1] == len(hybrids.LONG)


@pytest.mark.usefixtures("active")
def test_grammars_are_refused_where_a_state_would_be_ahead_of_its_text():
    from specattn.integrations.sglang.requests import refuse

    params = SimpleNamespace(
        max_new_tokens=9,
        frequency_penalty=0,
        presence_penalty=0,
        repetition_penalty=1,
        min_p=0,
        logit_bias=None,
        min_new_tokens=0,
        temperature=0.0,
        top_k=1,
        top_p=1.0,
    )
    usual = {"sampling_params": params, "return_hidden_states": False, "return_logprob": False}
    for grammars, name in ((True, None), (False, "no_buffer")):
        reqs = [SimpleNamespace(**usual, grammar=one, to_finish=None) for one in (object(), None)]
        refuse(reqs, processed=True, grammars=grammars)
        assert reqs[1].to_finish is None
        assert (reqs[0].to_finish is None) == grammars
        assert name is None or name in reqs[0].to_finish.message


@pytest.mark.usefixtures("active")
def test_a_checkpoint_is_the_path_up_to_a_multiple_of_the_interval():
    from specattn.integrations.sglang.memory import Checkpoints

    places = torch.tensor([[0, 0], [5, 6], [7, 8], [9, 10], [11, 12]])
    lengths = torch.tensor([0, 14, 16, 8, 15], dtype=torch.int32)
    kept = Checkpoints(8, places, torch.tensor([0, 1, 0, 1, 0]), lengths)
    index = torch.full((5, 5), -1, dtype=torch.int32)
    paths = {0: [0], 1: [0, 3, 4, 6], 2: [0, 1], 3: [0, 2, 5, 7], 4: [0]}
    for at, path in paths.items():
        index[at, : len(path)] = torch.tensor(path, dtype=torch.int32)
    none = torch.zeros(5, 5, dtype=torch.int64)
    accepted = AcceptResult(index, none, (index >= 0).sum(1).int(), none[:, 0])
    # padding; one that goes past a multiple; one that begins at one; one short of it; one that
    # just comes to it
    found, into = kept.of(accepted, torch.tensor([0, 1, 2, 3, 4]))
    assert into.tolist() == [0, 6, 0, 0, 11]
    assert found.tolist() == [
        [-1] * 5,
        [0, 3, -1, -1, -1],
        [-1] * 5,
        [-1] * 5,
        [0, -1, -1, -1, -1],
    ]
