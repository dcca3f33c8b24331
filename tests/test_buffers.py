from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specattn.batch import Phase, RowLayout
from specattn.buffers import BufferSet, buf, fingerprint, send_parts
from specattn.plan import (
    AttnInputs,
    MultiStepDims,
    MultiStepInputs,
    causal_words,
    mask_words,
)


@dataclass(frozen=True)
class Pair(BufferSet):
    plain: Tensor = buf(lambda d: (d,), torch.int32)
    marked: Tensor = buf(
        lambda d: (d,), lambda _: torch.float32, lambda d: torch.arange(1.0, d + 1)
    )


def test_buffers_start_as_padding():
    full = Pair.alloc(3, 3, torch.device("cpu"))
    assert full.plain.tolist() == [[0] * 3] * 3
    assert full.marked.tolist() == [[1.0, 2.0, 3.0]] * 3


def test_buckets_share_addresses():
    full = Pair.alloc(5, 3, torch.device("cpu"))
    assert full.bind(2).plain.data_ptr() == full.plain.data_ptr()
    assert fingerprint(a=full.bind(2)) == fingerprint(a=full.bind(2))
    assert fingerprint(a=full.bind(2)) != fingerprint(a=full.bind(3))


def test_a_padded_row_keeps_its_own_bit():
    for q_len, tail in [(1, 1), (4, 4), (3, 9), (65, 65), (2, 66), (64, 128)]:
        words = causal_words(RowLayout(q_len, tail, Phase.VERIFY))
        assert words.shape == (q_len, mask_words(tail))
        for row in range(q_len):
            bits = {
                64 * w + b
                for w in range(words.shape[1])
                for b in range(64)
                if int(words[row, w]) >> b & 1
            }
            first = tail - q_len
            assert bits == set(range(first, first + row + 1))


@pytest.mark.parametrize(("steps", "topk"), [(0, 3), (3, 2), (9, 8)])
def test_a_padding_draft_node_sees_itself(steps, topk):
    dims = MultiStepDims(steps, topk)
    words = MultiStepInputs.alloc(2, dims, torch.device("cpu")).words
    assert words.shape == (2, steps, topk, -(-steps * topk // 64))
    for row in words.flatten(1, 2).tolist():
        for node, own in enumerate(row):
            bits = {64 * w + b for w, word in enumerate(own) for b in range(64) if word >> b & 1}
            assert bits == {node}


def test_attention_inputs_start_as_padding():
    inputs = AttnInputs.alloc(2, RowLayout(2, 2, Phase.VERIFY), torch.device("cpu"))
    assert inputs.tail_words.tolist() == [[[1], [3]]] * 2
    assert not inputs.req_pool_indices.any()
    assert not inputs.tail_slots.any()


def test_lists_of_any_length_are_sent_as_tensors_that_are_aligned():
    lists = [[1, 2, 3], [], [4], [5, 6], []]
    sent = send_parts(lists, torch.device("cpu"))
    assert [one.tolist() for one in sent] == lists
    assert {one.data_ptr() % 16 for one in sent if len(one)} == {sent[0].data_ptr() % 16}
