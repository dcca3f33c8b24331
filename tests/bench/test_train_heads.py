"""Heads that the trainer makes: what they learn, and that the library loads just these."""

from __future__ import annotations

import json
import math
import shutil
import sys
from argparse import Namespace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bench.tools.train_heads import __main__ as commands
from bench.tools.train_heads.dflash import DFlash
from bench.tools.train_heads.eagle3 import Eagle3, chain_bases
from bench.tools.train_heads.layouts import save
from bench.tools.train_heads.prompts import SUBJECTS, THINGS, Prompts, held_out, runs
from bench.tools.train_heads.teacher import Teacher, layers_for, spread
from bench.tools.train_heads.texts import Batch, Texts, Writer, all_runs
from specattn.cache.kv_pool import KVPool
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request, RequestOutput
from specattn.models import HFTarget, load_dflash, load_draft
from specattn.models.hub import PAIR
from specattn.speculative.model import ModelSlot
from specattn.speculative.proposers.block import bind_block
from tests.models.conftest import DenseAttend

SHAPE = {
    "vocab_size": 3072,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# problems of two lines, as files of them have
PROBLEM = "def strange(values):\n    return the sum of all values that are above their own mean"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A target of random weights that is sure of its tokens, with the pair's tokenizer."""
    folder = tmp_path_factory.mktemp("target-0.1-")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, initializer_range=0.2))
    with torch.no_grad():
        model.lm_head.weight *= 3
    model.save_pretrained(folder)
    for file in (PAIR / "target").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Sources, some of which are held out."""
    folder = tmp_path_factory.mktemp("library")
    for number in range(40):
        body = "".join(f"    total += values[{at}] * {number}\n" for at in range(6))
        code = (
            f'def mixed_{number}(values):\n    """Mix."""\n    total = 0\n{body}    return total\n'
        )
        (folder / f"file_{number}.py").write_text(code)
    return folder


def run(monkeypatch, command, *args):
    monkeypatch.setattr(sys, "argv", ["train_heads", command, *map(str, args)])
    commands.main()


def write(monkeypatch, target, library, out, *args):
    small = ("--minutes", 0, "--length", 40, "--rows", 32, "--part", 32, "--stdlib", library)
    run(monkeypatch, "texts", "--target", target, "--out", out, *small, *args)


@pytest.fixture(scope="module")
def texts(tmp_path_factory, target_folder, library):
    out = tmp_path_factory.mktemp("texts")
    with pytest.MonkeyPatch.context() as patch:
        write(patch, target_folder, library, out)
    return out


def head_of(kind: str, target: HFTarget, states=(1, 3, 4)) -> Eagle3 | DFlash:
    torch.manual_seed(1)
    if kind == "eagle3":
        ids = torch.randperm(SHAPE["vocab_size"])[:300].sort().values
        return Eagle3(layers_for(target, 1, 80), states, ids, unroll=3)
    return DFlash(layers_for(target, 2, 80), states, 200, block=6, anchors=4)


@pytest.fixture(params=["eagle3", "dflash"])
def kind(request) -> str:
    return request.param


def batch_of(length: int = 30) -> Batch:
    tokens = torch.randint(1, SHAPE["vocab_size"], (2, length))
    return Batch(tokens, torch.tensor([7, 4]), torch.tensor([length, length - 9]), 5)


def trained(kind, target_folder, tmp_path, layout):
    """A head that is a little away from its start, as it is and as the library loads it."""
    target = HFTarget.from_pretrained(target_folder)
    head, batch = head_of(kind, target), batch_of()
    teacher = Teacher(target, head.states)
    head.start(teacher, batch)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save(head, head.settings(layout, teacher), tmp_path)
    # what is stored is rounded, and computed with here
    stored = load_file(tmp_path / "model.safetensors")
    stored["fc.weight"] = stored["fc.weight"].float() * head.fc.scale
    head.load_state_dict(stored)
    features, *_ = teacher(batch.tokens)
    loaded = {"eagle3": load_draft, "dflash": load_dflash}[kind](tmp_path, teacher.target())
    assert loaded.features == head.states
    return head, loaded, teacher, batch.tokens[:1], features[:1]


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
@torch.no_grad()
def test_the_eagle3_head_is_the_one_that_is_loaded(target_folder, tmp_path, layout):
    head, loaded, teacher, tokens, features = trained("eagle3", target_folder, tmp_path, layout)
    steps = list(head.unroll(tokens, teacher.embed, features))
    assert torch.equal(loaded.target_ids, head.draft_ids)
    for base in (0, 11, 26):
        attend = DenseAttend(loaded.layers)
        at = torch.arange(base + 1)
        out = loaded.forward(
            tokens[0, 1 : base + 2], loaded.combine(features[0, : base + 1]), at, attend.at(at)
        )
        logits, state = out.logits[-1:], out.hidden_states[-1:]
        for step, hidden in enumerate(steps):
            if step:
                here = torch.tensor([base + step])
                token = tokens[0, base + 1 + step : base + 2 + step]
                out = loaded.forward(token, state, here, attend.at(here))
                logits, state = out.logits, out.hidden_states
            want = head.logits(hidden[0, base])
            assert (logits[0] - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
@torch.no_grad()
def test_the_dflash_head_is_the_one_that_is_loaded(target_folder, tmp_path, layout):
    head, loaded, teacher, rows, features = trained("dflash", target_folder, tmp_path, layout)
    anchors, size, length = torch.tensor([[5, 17]]), head.block, rows.shape[1]
    want = teacher.lm_head(head(rows, teacher.embed, features, anchors))[0]
    pool = KVPool(loaded.layers, 64, "cpu")
    slots = 1 + torch.randperm(63)[: length + 2 * size].to(torch.int32)
    table = torch.zeros(3, 40, dtype=torch.int32)
    table[1:, :length] = slots[:length]
    loaded.write_context(
        loaded.combine(features[0]), torch.arange(length), pool, slots[None, :length]
    )
    positions = anchors[0][:, None] + torch.arange(size)
    attention = bind_block(
        ModelSlot.of(loaded, pool, "torch_native").backend,
        loaded.block.views,
        table,
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=anchors[0].to(torch.int32),
        positions=positions,
        anchors=positions[:, :1].repeat(1, size),
        slots=slots[length:].view(2, size),
    )
    attention.fill()
    ids = torch.full((2, size), loaded.block.mask_token_id)
    ids[:, 0] = rows[0, anchors[0]]
    got = loaded.forward_block(ids.flatten(), positions.flatten(), attention).view(2, size, -1)
    # place 1 holds the first draft
    assert loaded.block.first_draft == 1
    assert (got[:, 1:] - want).norm() <= 1e-5 * want.norm()


@torch.no_grad()
def test_channels_that_drown_others_do_not_decide_how_a_head_starts(kind, target_folder):
    """Published models have such: with them a head would begin sure of what is wrong."""
    target = HFTarget.from_pretrained(target_folder)
    target.embed_tokens.weight[:, 3] += 200
    target.module.model.norm.weight[3] = 20
    head, batch = head_of(kind, target), batch_of()
    teacher = Teacher(target, head.states)
    assert teacher(batch.tokens)[1][..., 3].abs().min() > 100
    head.start(teacher, batch)
    even = math.log(300 if kind == "eagle3" else SHAPE["vocab_size"])
    losses, _ = head.losses(batch, teacher)
    assert losses.max() < 2 * even


def test_every_step_of_a_chain_is_counted_by_what_it_predicts():
    batch = batch_of(12)
    batch = Batch(batch.tokens, torch.tensor([5, 1]), torch.tensor([12, 7]), 0)
    bases, left = chain_bases(batch)
    found = {
        (int(base), step) for base, count in zip(bases, left, strict=True) for step in range(count)
    }
    want = set()
    for row, (prompt, length) in enumerate([(5, 12), (1, 7)]):
        for base in range(12):
            for step in range(12):
                # the head reads the token after the base, and each of its own
                predicted = base + 2 + step
                if base + 2 >= prompt and predicted < length:
                    want.add((row * 12 + base, step))
    assert found == want


@torch.no_grad()
def test_the_losses_are_those_of_the_texts(kind, target_folder):
    target = HFTarget.from_pretrained(target_folder)
    head, batch = head_of(kind, target), batch_of()
    teacher = Teacher(target, head.states)
    head.start(teacher, batch)
    losses, agreement = (one.tolist() for one in head.losses(batch, teacher))
    features, _, logits = teacher(batch.tokens)
    sums: dict[int, list[tuple[float, bool]]] = {at: [] for at in range(len(head.weights))}
    if kind == "eagle3":
        for step, hidden in enumerate(head.unroll(batch.tokens, teacher.embed, features)):
            for row in range(2):
                for base in range(
                    int(batch.prompt_lens[row]) - 2, int(batch.lengths[row]) - 2 - step
                ):
                    wanted = logits[row, base + 1 + step]
                    drafted = head.logits(hidden[row, base]).log_softmax(-1)
                    right = int(head.draft_ids[drafted.argmax()]) == int(wanted.argmax())
                    probs = wanted[head.draft_ids].softmax(-1)
                    in_draft = bool(head.t2d[wanted.argmax()])
                    entropy = -float((probs * drafted).sum()) if in_draft else None
                    sums[step].append((entropy, right))
    else:
        drawn = torch.rand(2, 4, generator=torch.Generator().manual_seed(batch.seed))
        for row in range(2):
            prompt, length = int(batch.prompt_lens[row]), int(batch.lengths[row])
            anchors = [prompt + int(one * (length - 1 - prompt)) for one in drawn[row]]
            states = head(
                batch.tokens[row : row + 1], teacher.embed, features[row : row + 1],
                torch.tensor([anchors]),
            )  # fmt: skip
            for anchor, block in zip(
                anchors, teacher.lm_head(states[0]).log_softmax(-1), strict=True
            ):
                assert prompt <= anchor < length - 1
                for place, drafted in enumerate(block):
                    if anchor + 1 + place < length:
                        token = int(batch.tokens[row, anchor + 1 + place])
                        sums[place].append((-float(drafted[token]), int(drafted.argmax()) == token))
    for at, found in sums.items():
        entropies = [entropy for entropy, _ in found if entropy is not None]
        assert losses[at] == pytest.approx(sum(entropies) / max(1, len(entropies)), rel=1e-4)
        assert agreement[at] == pytest.approx(sum(right for _, right in found) / len(found))


def greedy_texts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [one.tokens for one in engine.generate([Request(prompt, 20) for prompt in prompts])]


def test_a_head_learns_and_drafts_plain_decodings_text(
    kind, target_folder, texts, tmp_path, monkeypatch
):
    more = {
        "eagle3": ("--draft-vocab", 400, "--unroll", 3),
        "dflash": ("--block", 4, "--anchors", 6, "--layout", "speculators"),
    }
    made = ("--target", target_folder, "--texts", texts, "--batch-tokens", 512, "--seed", 3)
    small = ("--steps", 20, "--lr", 5e-3, "--measure", 4, *more[kind])
    run(monkeypatch, kind, "--out", tmp_path, *made, *small)
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] == 20
    # of texts that it has not seen
    assert record["held_out"][-1]["loss"] < 0.9 * record["held_out"][0]["loss"]
    assert len(record["held_out"][-1]["agreement"]) == 3
    assert record["acceptance"]["equal_to_plain"] == record["acceptance"]["texts"] == 1

    target = HFTarget.from_pretrained(target_folder)
    head = {"eagle3": load_draft, "dflash": load_dflash}[kind](tmp_path, target)
    prompts = [[5, 6, 7], [900, 20, 33, 4, 17]]
    drafted = Engine(target.with_features(head.features), head, SpecConfig(3, 1, 4, 64, 2))
    plain = Engine(HFTarget.from_pretrained(target_folder), None, SpecConfig(0, 1, 1, 64, 2))
    assert greedy_texts(drafted, prompts) == greedy_texts(plain, prompts)

    again = tmp_path / "again"
    run(monkeypatch, kind, "--out", again, *made, *small, "--measure", 0)
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path, again))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_texts_go_on_where_they_were_stopped(target_folder, library, texts, tmp_path, monkeypatch):
    out = tmp_path / "texts"
    shutil.copytree(texts, out)
    first = (out / "part-00000.safetensors").read_bytes()
    write(monkeypatch, target_folder, library, out)
    assert (out / "part-00000.safetensors").read_bytes() == first
    both, record = Texts.load([out])
    assert [part["texts"] for part in record["parts"]] == [32, 32]
    assert not torch.equal(both.tokens[:30], both.tokens[32:62])
    again = tmp_path / "again"
    write(monkeypatch, target_folder, library, again)
    assert (again / "part-00000.safetensors").read_bytes() == first
    with pytest.raises(SystemExit, match="texts of another seed"):
        write(monkeypatch, target_folder, library, out, "--seed", 1)


def test_folders_of_several_seeds_are_read_as_one(texts, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(texts, other)
    with pytest.raises(SystemExit, match=r"the same seed: \[0, 0\]"):
        Texts.load([texts, other])
    kept = json.loads((other / "texts.json").read_text())
    (other / "texts.json").write_text(json.dumps(kept | {"seed": 7}))
    one, (both, record) = Texts.load([texts])[0], Texts.load([texts, other])
    assert torch.equal(both.tokens, torch.cat([one.tokens, one.tokens]))
    assert record["seed"] == [0, 7]
    assert record["parts"] == 2 * kept["parts"]
    (other / "texts.json").write_text(json.dumps(kept | {"seed": 7, "length": 9}))
    with pytest.raises(SystemExit, match="differ in length"):
        Texts.load([texts, other])


def test_texts_are_the_targets_own(target_folder, texts):
    """Greedy answers are transformers' own, and the seed gives both kinds to both sides."""
    found, record = Texts.load([texts])
    assert record["target"] == target_folder.name
    assert record["parts"][0]["new_tokens"] == int((found.lengths - found.prompt_lens).sum())
    assert {*found.greedy[found.held_out].tolist()} == {True, False} == {*found.greedy.tolist()}
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    for row in found.greedy.nonzero()[:3, 0]:
        prompt, length = int(found.prompt_lens[row]), int(found.lengths[row])
        ids = found.tokens[row, :length].long()
        out = model.generate(ids[None, :prompt], max_length=length, do_sample=False)
        assert torch.equal(out[0], ids)


def test_batches_hold_every_row_once(texts):
    found, _ = Texts.load([texts])
    rows = (~found.held_out).nonzero()[:, 0]
    batches = found.batches(rows, 256, 0, torch.device("cpu"))
    seen: list[tuple[int, ...]] = []
    while len(seen) < len(rows):
        batch = next(batches)
        assert batch.tokens.numel() <= 256
        seen += [
            tuple(row[:length].tolist())
            for row, length in zip(batch.tokens, batch.lengths, strict=True)
        ]
    want = [tuple(found.tokens[row, : found.lengths[row]].tolist()) for row in rows]
    assert sorted(seen) == sorted(want)
    answers = [
        found.tokens[row, found.prompt_lens[row] : found.lengths[row]].tolist() for row in rows
    ]
    counts = torch.bincount(torch.tensor([*chain(*answers)]), minlength=3072)
    assert torch.equal(found.counts(3072), counts)


def test_held_out_prompts_share_nothing_with_the_others(library):
    prompts, again, other = (Prompts(seed, library) for seed in (4, 4, 5))
    sides: dict[bool, list[str]] = {False: [], True: []}
    for number in range(480):
        text, _ = prompts.at(number)
        assert text == again.at(number)[0]
        sides[held_out(number)].append(text)
    assert len(sides[True]) == 30
    for topic in (*THINGS, *SUBJECTS, *(f"mixed_{number}(" for number in range(40))):
        told = [any(topic in text for text in sides[side]) for side in (False, True)]
        assert not all(told), topic
    source = Prompts(4, library, 0)
    assert not any(source.at(number)[1] for number in range(60))
    assert sides[True] != [other.at(number)[0] for number in range(15, 480, 16)]


def test_a_text_that_repeats_a_problem_is_left_out(tmp_path, library):
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"task": "one", "prompt": PROBLEM}) + "\n")
    recited = PROBLEM.replace("\n    ", "\n\t\t").upper()
    answers = {"recites": f"Sure: {recited}, as asked", "differs": PROBLEM[:50]}

    class Tokenizer:
        chat_template = "any"

        def apply_chat_template(self, turns, **_):
            return [1, 2, 3]

        def __call__(self, text):
            return SimpleNamespace(input_ids=[4, 5])

        def batch_decode(self, texts):
            return [answers["recites" if 77 in text else "differs"] for text in texts]

    class Fake:
        config = Namespace(max_num_reqs=5)

        def generate(self, requests):
            assert len(requests) <= 5
            return [RequestOutput([77 if one.sampling.seed % 3 else 7] * 9) for one in requests]

    writer = Writer(Fake(), Tokenizer(), Prompts(0, library), all_runs([file]), 20, [0.0, 0.8])
    tensors, left_out = writer.write(range(12, 21))
    assert (left_out, len(tensors["lengths"])) == (6, 3)
    assert not (tensors["tokens"] == 77).any()
    assert tensors["held_out"].tolist() == [False, True, False]
    assert runs("a b") == set()


def test_states_that_are_read():
    assert spread(28, 3) == (2, 14, 25)
    assert spread(28, 5) == (2, 8, 14, 19, 25)
    for layers in range(2, 40):
        for count in (1, 3, 5):
            states = spread(layers, count)
            assert states[0] > 0
            assert states[-1] < layers


def test_texts_without_a_held_out_one_are_refused(target_folder, texts, tmp_path, monkeypatch):
    shutil.copytree(texts, tmp_path / "few")
    file = tmp_path / "few" / "part-00000.safetensors"
    save_file({name: one[:10] for name, one in load_file(file).items()}, file)
    made = ("--target", target_folder, "--texts", tmp_path / "few", "--out", tmp_path)
    with pytest.raises(SystemExit, match="no greedy text is held out"):
        run(monkeypatch, "eagle3", *made)


def test_a_head_trains_within_its_minutes(target_folder, texts, tmp_path, monkeypatch):
    # seven steps, however long they take
    ticks = iter(range(10_000))
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 16)
    monkeypatch.setattr("bench.tools.train_heads.fit.time", clock)
    made = ("--target", target_folder, "--texts", texts, "--out", tmp_path)
    small = ("--minutes", 1 / 60, "--batch-tokens", 128, "--measure", 0, "--block", 3)
    run(monkeypatch, "dflash", *made, *small)
    record = json.loads((tmp_path / "training.json").read_text())
    assert 3 < record["steps"] < 16
    assert record["held_out"][0]["step"] == 0
    assert record["held_out"][-1]["step"] == record["steps"]
