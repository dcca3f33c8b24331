"""A request whose target gives no finite logits ends by that; the others of its batch go on."""

from __future__ import annotations

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.samples import half, on_cpu, sampled
from tests.speculative.test_host_plans import PlanningBackend
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

NEW = 14
PROMPTS = [[3, 14, 15, 9, 26, 5], [8, 9, 7, 9], [35, 2]]
KINDS = {
    "nan": lambda row: row.index_fill(1, torch.tensor([7], device=row.device), torch.nan),
    "inf": lambda row: row.index_fill(1, torch.tensor([7], device=row.device), torch.inf),
    "nothing": lambda row: torch.full_like(row, -torch.inf),
}
SAMPLING = {
    "greedy": [SamplingParams()] * 3,
    "sampled": [SamplingParams(0.9, seed=at) for at in range(3)],
    "mixed": [SamplingParams(1.1, 20, 0.9, seed=3), SamplingParams(), SamplingParams(0.8, seed=9)],
}
TREES = {"plain": (0, 1, 1), "chain": (3, 1, 4), "tree": (3, 4, 9)}


class Poisoned(TinyTarget):
    """Gives no finite logits after one token, wherever that comes."""

    token, kind = -1, "nan"

    def forward(self, input_ids, positions, attend, rows=None):
        out = super().forward(input_ids, positions, attend, rows)
        read = input_ids if rows is None else input_ids[rows]
        hit = (read == self.token)[:, None]
        out.logits.copy_(torch.where(hit, KINDS[self.kind](out.logits), out.logits))
        return out


@pytest.fixture(scope="module")
def models():
    return Poisoned(device=DEVICE), TinyDraft(device=DEVICE)


def engine(models, tree="tree", **options) -> Engine:
    config = SpecConfig(*TREES[tree], 96, 3, draft_sampling=options.pop("draft_sampling", False))
    return Engine(*models, config, **{"backend": "torch_native", "buckets": (3,)} | options)


def decode(run: Engine, requests: list[Request], *, ahead: bool) -> list:
    results = run.add(requests)
    while run.running:
        run.step(ahead=ahead)
    return results


def check(models, monkeypatch, sampling, kind, *, ahead, **options) -> None:
    requests = [Request(p, NEW, s) for p, s in zip(PROMPTS, sampling, strict=True)]
    texts = [one.tokens for one in decode(engine(models, **options), requests, ahead=ahead)]
    # comes within a text, and late in no other one
    token = max(
        (token for text in texts for token in text[1:-1]),
        key=lambda token: sum(token not in text for text in texts),
    )
    monkeypatch.setattr(models[0], "token", token)
    monkeypatch.setattr(models[0], "kind", kind)
    run = engine(models, **options)
    results = decode(run, requests, ahead=ahead)
    reasons = [result.finish_reason for result in results]
    assert set(reasons) == {"nonfinite", "length"}
    for result, text in zip(results, texts, strict=True):
        # the token itself is sound: what would follow on it is not
        end = text.index(token) + 1 if token in text[:-1] else len(text)
        assert result.tokens == text[:end]
        assert sum(result.accept_lens) == end - 1
        assert result.finish_reason == ("length" if end == len(text) else "nonfinite")
        assert result.finished_at > result.first_token_at
    check_books(run.table)
    assert run.table.num_free_rows == 3
    models[0].token = -1
    again = decode(run, requests, ahead=ahead)
    assert [one.tokens for one in again] == texts, "rows and slots serve others afterwards"


@sampled(half, sampling=SAMPLING, tree=TREES.keys(), ahead={"waited": False, "ahead": True})
def test_a_request_ends_where_its_logits_are_not_finite(models, monkeypatch, sampling, tree, ahead):
    check(models, monkeypatch, sampling, "nan", ahead=ahead, tree=tree)


@pytest.mark.parametrize("kind", ["inf", "nothing"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_infinite_logits_end_a_request_too(models, monkeypatch, sampling, kind):
    check(models, monkeypatch, SAMPLING[sampling], kind, ahead=True)


@pytest.mark.parametrize(
    "options",
    [
        {"tree": "chain", "draft_sampling": True},
        {"cudagraph": "piecewise"},
        {"tbo": True},
        {"backend": PlanningBackend},
        {"graphs": False},
    ],
    ids=["drawn drafts", "piecewise", "halves", "host plans", "eager"],
)
def test_however_the_step_is_run(models, monkeypatch, options):
    check(models, monkeypatch, SAMPLING["sampled"], "nan", ahead=True, **options)


@on_cpu(half, "temperature", "tree")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_prompt_may_end_a_request(models, monkeypatch, tree, temperature):
    """It gets no token, and never a step; who came with it goes on."""
    drawn = SamplingParams(temperature, seed=4)
    requests = [Request(prompt, NEW, drawn) for prompt in PROMPTS]
    texts = [one.tokens for one in decode(engine(models, tree), requests, ahead=True)]
    token = max(set(range(61)).difference(*texts, *PROMPTS))
    monkeypatch.setattr(models[0], "token", token)
    run, told = engine(models, tree), []
    bad = Request([*PROMPTS[0], token], NEW, drawn)
    first, *others = run.generate([bad, *requests], lambda at, new: told.append((at, new)))
    assert (first.tokens, first.finish_reason, first.steps) == ([], "nonfinite", 0)
    assert [new for at, new in told if at == 0] == [[]]
    assert [one.tokens for one in others] == texts
    check_books(run.table)
