"""Pictures of trees, masks, slots and padding, against drawings made by hand."""

from __future__ import annotations

import time

import pytest
import torch

from specattn import inspect
from specattn.batch import AcceptResult, Candidates, DraftTree, ForwardMode
from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.errors import NotCapturedError, TreeError
from specattn.speculative.step.level import StepPart
from tests.filling import built_tree
from tests.worlds import world

# K = 2, S = 3, n = 6: in request 0 both beams of the last step come from one, in 1 they cross
WORDS = [[1, 3, 5, 11, 19, 43], [1, 3, 5, 11, 21, 53]]
TREE = DraftTree(
    tokens=torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]),
    positions=torch.tensor([[3, 4, 4, 5, 5, 6], [5, 6, 6, 7, 7, 8]]),
    words=torch.tensor(WORDS)[:, :, None],
    retrieve_next_token=torch.tensor([[1, 3, -1, 5, -1, -1], [1, 3, 4, -1, 5, -1]]),
    retrieve_next_sibling=torch.tensor([[-1, 2, -1, 4, -1, -1], [-1, 2, -1, -1, -1, -1]]),
    draft_probs=torch.zeros(2, 3, 0),
)


class Letters:
    def decode(self, ids):
        return "".join(chr(87 + i) for i in ids)


def test_tree_of_numbers():
    assert inspect.tree(TREE) == (
        "0 10 @3\n├─ 1 11 @4\n│  ├─ 3 13 @5\n│  │  └─ 5 15 @6\n│  └─ 4 14 @5\n└─ 2 12 @4"
    )


def test_tree_with_text_probabilities_and_the_accepted_path():
    scores = torch.tensor([[1.0] * 6, [1.0, 0.5, 0.25, 0.1, 0.125, 0.0]])
    accepted = AcceptResult(
        accept_index=torch.tensor([[0, -1, -1, -1], [0, 2, 4, -1]], dtype=torch.int32),
        accept_tokens=torch.tensor([[0, 0, 0, 0], [22, 24, 26, 0]]),
        accept_lens=torch.tensor([1, 3], dtype=torch.int32),
        bonus_tokens=torch.tensor([0, 26]),
    )
    assert inspect.tree(TREE, Letters(), request=1, scores=scores, accepted=accepted) == (
        "0 'k' @5  *\n"
        "├─ 1 'l' @6  p 0.50  path 0.50\n"
        "│  └─ 3 'n' @7  p 0.20  path 0.10\n"
        "└─ 2 'm' @6  p 0.25  path 0.25  *\n"
        "   └─ 4 'o' @7  p 0.50  path 0.12  *\n"
        "      └─ 5 'p' @8  p 0.00  path 0.00\n"
        "accepted 2 of 5 drafts, bonus 'q'"
    )


@pytest.mark.parametrize("to", [0, 1, 6, 99, -2])
def test_a_malformed_tree_is_an_error(to):
    links = TREE.retrieve_next_token.clone()
    links[0, 5] = to
    broken = DraftTree(**(vars(TREE) | {"retrieve_next_token": links}))
    with pytest.raises(TreeError, match=f"leads to node {to}"):
        inspect.tree(broken)


@pytest.mark.parametrize(
    ("request_", "rows"),
    [
        (0, ["#.....", "##....", "#.#...", "##.#..", "##..#.", "##.#.#"]),
        (1, ["#.....", "##....", "#.#...", "##.#..", "#.#.#.", "#.#.##"]),
    ],
)
def test_mask(request_, rows):
    prefix = [3, 5][request_]
    lines = inspect.mask(TREE.words[request_], prefix).splitlines()
    assert lines[0] == "row  prefix  012345"
    assert lines[1:] == [f"  {i}  0..{prefix - 1}    {row}" for i, row in enumerate(rows)]


def test_mask_of_several_words_and_no_prefix():
    nodes = 70
    words = torch.zeros(nodes, 2, dtype=torch.int64)
    for node in range(nodes):  # a chain: every node sees all before it
        for key in range(node + 1):
            words[node, key // 64] |= -(1 << 63) if key % 64 == 63 else 1 << key % 64
    lines = inspect.mask(words, 0).splitlines()
    assert len(lines) == 2 + nodes
    tens = "0" + "".join(f"{tens:>10}" for tens in range(1, 7))
    assert lines[0].split(None, 1)[0] == "0"
    assert lines[0].strip() == tens
    assert lines[1].endswith("0123456789" * 7)
    for node, line in enumerate(lines[2:]):
        assert line.split() == [str(node), "none", "#" * (node + 1) + "." * (nodes - node - 1)]


def test_path_scores_name_the_nodes_that_are_built():
    config = SpecConfig(num_steps=3, topk=2, num_draft_tokens=6)
    scores = torch.tensor([[0.6, 0.4, 0.3, 0.3, 0.2, 0.1, 0.3, 0.05, float("nan"), 0.0]])
    candidates = Candidates(
        scores, torch.arange(10)[None] + 50, torch.tensor([[-1, 0, 1, 2, 3]]), torch.zeros(1, 3, 0)
    )
    lens = torch.tensor([7], dtype=torch.int32)
    tree = built_tree(candidates, torch.tensor([9]), lens, config)
    paths = inspect.path_scores(candidates, config)
    assert paths.shape == (1, 6)
    assert paths[0, 0] == 1
    assert [scores[0, token - 50] for token in tree.tokens[0, 1:].tolist()] == paths[0, 1:].tolist()


def table(**changes) -> SlotTable:
    sizes = {"max_num_reqs": 4, "max_context_len": 64, "num_slots": 64, "page_size": 4}
    return SlotTable(**(sizes | changes))


def test_kv_map():
    books = table()
    assert inspect.kv_map(books) == "row 0: padding, slots 0..3\nfree: 60 slots, 4 rows"
    first = books.allocate()
    books.reserve([first], [10])
    books.commit(first, 10)
    second = books.allocate(share=first, share_len=8)
    books.reserve([second], [9])
    books.commit(second, 9)
    lines = inspect.kv_map(books, SpecConfig(3, 2, 6)).splitlines()
    slots = {row: books.req_to_token[row].tolist() for row in (first, second)}
    assert lines[0].startswith(f"row {first}: 10 committed in slots 4..13, ")
    assert lines[1] == f"  first 8 shared with row {second}"
    at = slots[first][10]
    assert lines[2] == f"  draft step 0: {at}..{at + 1}"
    assert f"  verify, nodes 0..5: {at}" in lines[4]
    assert f"row {second}: 9 committed in slots 4..11 {slots[second][8]}," in "\n".join(lines)
    assert lines[-2:] == [
        "row 0: padding, slots 0..3",
        f"free: {books.num_free_slots} slots, 2 rows",
    ]


def test_kv_map_of_scattered_slots():
    books = table(page_size=1, num_slots=96)
    rows = [books.allocate() for _ in range(2)]
    for length in (3, 10, 30):
        books.reserve(rows, [length, length])
        for row in rows:
            books.commit(row, length)
    for row in rows:
        slots = books.req_to_token[row, :30].tolist()
        text = inspect.kv_map(books).split(f"row {row}: 30 committed in slots ")[1].splitlines()[0]
        runs = [[int(end) for end in run.split("..")] for run in text.split(",")[0].split()]
        assert [slot for run in runs for slot in range(run[0], run[-1] + 1)] == slots


def test_kv_map_of_long_contexts_takes_time_in_proportion():
    books = table(page_size=1, num_slots=300_000, max_context_len=100_000)
    first = books.allocate()
    books.reserve([first], [100_000])
    books.commit(first, 100_000)
    second = books.allocate(share=first, share_len=90_000)
    began = time.process_time()
    lines = inspect.kv_map(books).splitlines()
    assert time.process_time() - began < 20, "looking for every page in every row takes minutes"
    assert lines[1] == f"  first 90000 shared with row {second}"
    assert lines[3] == f"  first 90000 shared with row {first}"


def test_explain_replay():
    one = world("torch_native", [1, 2, 4])
    runner, part = one.decoder.runner, StepPart(ForwardMode.TARGET_VERIFY)
    how = "a recorded CUDA graph" if runner.recorded(part) else "eager over static buffers"
    assert inspect.explain_replay(runner, part, 3).splitlines() == [
        f"target_verify, 3 requests: bucket 4 of [1, 2, 4], {how}",
        "1 row of padding: table row 0, length 0, slots of page 0",
    ]
    assert "padding" not in inspect.explain_replay(runner, part, 2)
    assert "run eagerly" in inspect.explain_replay(runner, part, 5)
    with pytest.raises(NotCapturedError):
        inspect.explain_replay(runner, StepPart(ForwardMode.DECODE), 1)
