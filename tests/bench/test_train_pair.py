"""The DFlash head that the pair's script trains is the one that the library loads."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from bench.tools.train_pair.__main__ import save_head
from bench.tools.train_pair.dflash import DenseDFlash
from bench.tools.train_pair.sizes import TINY
from bench.tools.train_pair.target import DenseTarget, new_target
from bench.tools.train_pair.train_dflash import (
    BatchSource,
    dflash_config,
    draw_anchors,
    new_dflash,
    place_losses,
    train_dflash,
)
from bench.tools.train_pair.train_head import OnPolicy, on_policy_rows
from specattn.cache.kv_pool import KVPool
from specattn.models import HFTarget, load_dflash
from specattn.speculative.block import ContextStore, bind_block
from specattn.speculative.model import ModelSlot

MASK = 200


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return new_target(TINY).requires_grad_(False).eval()


def dense(model) -> DenseTarget:
    return DenseTarget(model, TINY.rope_theta)


def written(model, seconds: float = 0.0):
    stream = torch.randint(1, TINY.vocab, (4000,))
    return stream, on_policy_rows(dense(model), stream, size=TINY, seconds=seconds)


def test_the_dense_head_is_the_head_that_is_loaded(model, tmp_path):
    torch.manual_seed(1)
    save_head(new_dflash(TINY, dense(model), MASK), dflash_config(TINY, MASK), tmp_path)
    # from_model changes how its model attends
    target = HFTarget.from_model(copy.deepcopy(model))
    head = load_dflash(tmp_path, target)
    rows, anchors = torch.randint(1, TINY.vocab, (1, 30)), torch.tensor([[5, 17]])
    _, aux = dense(model).forward(rows, aux_layers=TINY.block_features)
    trained = DenseDFlash(dflash_config(TINY, MASK), model.model.embed_tokens.weight)
    trained.load_state_dict(load_file(tmp_path / "model.safetensors"))
    want = trained.logits(trained(rows, aux, anchors))[0]

    states = model(rows, output_hidden_states=True).hidden_states
    features = torch.cat([states[at][0] for at in head.features.hidden_states], -1)
    size, pool = head.block.size, KVPool(head.layers, 64, "cpu")
    slots = 1 + torch.randperm(63)[: 30 + 2 * size].to(torch.int32)
    table = torch.zeros(3, 40, dtype=torch.int32)
    table[1:, :30] = slots[:30]
    head.write_context(
        head.combine(features), torch.arange(30), ContextStore(pool, slots[None, :30])
    )
    positions = anchors[0][:, None] + torch.arange(size)
    attention = bind_block(
        ModelSlot.of(head, pool, "torch_native").backend,
        head.block.views,
        table,
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=anchors[0].to(torch.int32),
        positions=positions,
        anchors=positions[:, :1].repeat(1, size),
        slots=slots[30:].view(2, size),
    )
    attention.fill()
    ids = torch.full((2, size), head.block.mask_token_id)
    ids[:, 0] = rows[0, anchors[0]]
    got = head.forward_block(ids.flatten(), positions.flatten(), attention).view(2, size, -1)
    # place 1 holds the first draft
    assert head.block.first_draft == 1
    assert (got[:, 1:] - want).norm() <= 1e-5 * want.norm()


def test_anchors_stay_in_what_the_target_wrote(model):
    stream, rows = written(model)
    anchors = draw_anchors(rows, 200, TINY.block_size)
    assert (anchors >= rows.prompt_lens[:, None]).all()
    assert anchors.max() == TINY.row_len - TINY.block_size
    for step in range(2):
        batch, at = BatchSource(rows, stream, TINY, 3).draw(step)
        assert (at >= batch.prompt_lens[:, None]).all()
        assert at.max() <= batch.tokens.shape[1] - TINY.block_size
    greedy = rows.temperatures == 0
    assert 0 < greedy.sum() < len(greedy)


def greedy_of(rows: OnPolicy) -> OnPolicy:
    return OnPolicy(*(part[rows.temperatures == 0] for part in rows))


def test_greedy_rows_are_their_own_labels(model):
    greedy = greedy_of(written(model)[1])
    head = new_dflash(TINY, dense(model), MASK)
    anchors = draw_anchors(greedy, 4, TINY.block_size)
    loss, _ = place_losses(head, dense(model), greedy, anchors, TINY)
    _, aux = dense(model).forward(greedy.tokens, aux_layers=TINY.block_features)
    log_q = head.logits(head(greedy.tokens, aux, anchors)).log_softmax(-1)
    text = greedy.tokens.unfold(1, TINY.block_size, 1)[torch.arange(len(anchors))[:, None], anchors]
    want = -log_q.gather(-1, text[..., 1:, None]).mean((0, 1, 3))
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-4)


def test_the_head_learns(model):
    torch.manual_seed(2)
    # an untrained target's own law is all but even: only greedy text can be learned
    rows = greedy_of(written(model)[1])
    head, anchors = new_dflash(TINY, dense(model), MASK), draw_anchors(rows, 4, TINY.block_size)
    optimizer, losses = torch.optim.AdamW(head.parameters(), 5e-3), []
    for _ in range(40):
        loss = place_losses(head, dense(model), rows, anchors, TINY)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]


def test_a_run_leaves_curves_of_every_place(model, monkeypatch):
    # seven steps, however long they take
    clock = itertools.count()
    told = SimpleNamespace(monotonic=lambda: next(clock) / 16)
    monkeypatch.setattr("bench.tools.train_pair.train_target.time", told)
    stream, rows = written(model)
    head = new_dflash(TINY, dense(model), MASK)
    before = head.fc.weight.clone()
    curves = train_dflash(head, dense(model), (rows, stream, rows), size=TINY, seconds=0.5, rows=2)
    assert curves["steps"] == 7
    assert not torch.equal(head.fc.weight, before)
    assert len(curves["held_out"]["loss"]) == len(curves["held_out_agreement"]) >= 2
    assert all(len(shares) == TINY.block_size - 1 for shares in curves["held_out_agreement"])
