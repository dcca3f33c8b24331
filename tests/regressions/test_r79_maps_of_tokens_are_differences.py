"""R79: verl-SpeCo#67, verl-SpeCo#66, NVIDIA-NeMo/Automodel#2447.

A map from draft tokens to target tokens held ids where differences were read, or the other way:
drafts were other tokens than those meant, and a reduced vocabulary without a map was taken for the
first tokens of the whole.

A map of ids is refused by name, though each of them would stay in range as a difference; and so is
a reduced vocabulary without one.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specattn.errors import ModelError
from specattn.models import HFTarget, load_draft
from tests.models.conftest import TINY
from tests.models.heads import VD, V, eagle3_tensors, write


@pytest.fixture(scope="module")
def target() -> HFTarget:
    config = AutoConfig.for_model("llama", **TINY | {"num_hidden_layers": 4})
    return HFTarget.from_model(AutoModelForCausalLM.from_config(config).eval())


def tensors(ids: torch.Tensor, d2t: torch.Tensor, marked: bool):
    found = eagle3_tensors() | {"d2t": d2t}
    found["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    if not marked:
        del found["t2d"]
    return found


@pytest.mark.parametrize("marked", [True, False], ids=["with t2d", "without t2d"])
@pytest.mark.parametrize("every", [5, VD], ids=["with gaps", "the first tokens"])
def test_ids_are_told_from_differences(target, tmp_path, every, marked):
    """Each id stays in range, and differs from the others, when it is read as a difference."""
    own = torch.arange(VD)
    ids = own + own // every
    assert int((ids + own).max()) < V
    assert (ids + own).unique().numel() == VD
    head = load_draft(write(tmp_path, tensors(ids, ids - own, marked)), target)
    assert torch.equal(head.to_target(own), ids)
    with pytest.raises(ModelError, match=r"has target ids in d2t .*expected each one's difference"):
        load_draft(write(tmp_path, tensors(ids, ids, marked)), target)


def test_a_reduced_vocabulary_needs_a_map(target, tmp_path):
    found = eagle3_tensors()
    del found["d2t"], found["t2d"]
    with pytest.raises(ModelError, match=rf"draft_vocab_size {VD} .* no tensor d2t"):
        load_draft(write(tmp_path, found, draft_vocab_size=VD), target)
