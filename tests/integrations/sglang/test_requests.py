"""What of options and requests is refused, and how requests draw; no engine runs."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from specattn.errors import UnsupportedError
from specattn.integrations.sglang import names
from specattn.speculative.sampling.processors import ProcessorStates, token_bitmask
from tests.integrations.sglang.engine import PAIR

pytestmark = pytest.mark.sglang
PROCESSED = (
    "penalties, min_p, biases, min_new_tokens, grammars and log-probabilities with "
    "SPECATTN_SGLANG_PROCESSED=0"
)


def arguments(**changed):
    """Return options that are served, and those that are changed."""
    served = {
        "model_path": str(PAIR / "target"),
        "revision": None,
        "speculative_algorithm": "SPECATTN",
        "speculative_draft_model_path": str(PAIR / "draft"),
        "speculative_draft_model_revision": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "max_running_requests": None,
        "enable_mixed_chunk": True,
    }
    return SimpleNamespace(**served | changed)


def algorithm():
    from specattn.integrations.sglang.algorithm import SpecAttnAlgorithm

    return SpecAttnAlgorithm(names.ALGORITHM, lambda args: None, supports_overlap=True)


def request(new=8, prompt=4, rid="one", **asked):
    params = {
        "max_new_tokens": new,
        "sampling_seed": None,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "min_new_tokens": 0,
        "stop_token_ids": None,
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 1.0,
    }
    own = {"return_logprob": False, "return_hidden_states": False, "grammar": None}
    own |= {"logprob": SimpleNamespace(top_logprobs_num=2, token_ids_logprob=None)}
    own |= {"eos_token_ids": {2}, "tokenizer": None, "output_ids": []}
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[1] * prompt,
        to_finish=None,
        sampling_params=SimpleNamespace(**params | {k: asked[k] for k in asked if k in params}),
        **own | {k: asked[k] for k in asked if k in own},
    )


def test_options_that_are_not_served_are_named_at_once():
    asked = arguments(enable_lora=True, pp_size=2, speculative_draft_model_path=None)
    with pytest.raises(UnsupportedError) as raised:
        algorithm().handle_server_args(asked)
    assert len(raised.value.reasons) == 3
    for part in ("enable_lora=True", "pp_size=2", "speculative_draft_model_path"):
        assert part in str(raised.value)


def test_every_option_is_one_of_sglangs():
    from sglang.srt.server_args import ServerArgs

    from specattn.integrations.sglang.algorithm import SERVED

    known = {*dir(ServerArgs), *ServerArgs.__annotations__}
    assert SERVED.keys() <= known


def test_what_is_not_said_is_chosen():
    asked = arguments()
    algorithm().handle_server_args(asked)
    tree = asked.speculative_num_steps, asked.speculative_eagle_topk
    assert (*tree, asked.speculative_num_draft_tokens) == (3, 1, 4)
    assert (asked.max_running_requests, asked.enable_mixed_chunk) == (48, False)
    chain = arguments(speculative_num_steps=5, speculative_eagle_topk=1, max_running_requests=7)
    algorithm().handle_server_args(chain)
    assert (chain.speculative_num_draft_tokens, chain.max_running_requests) == (6, 7)


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ((None, 8, None), "must be given together, got None, 8, None"),
        ((4, None, 16), "must be given together, got 4, None, 16"),
        ((4, 5, None), "must be given together, got 4, 5, None"),
        ((2, 2, 8), "num_draft_tokens must be 2..7"),
        ((4, 5, 300), "num_draft_tokens must be 1..256"),
    ],
)
def test_what_is_no_tree_is_refused_before_a_model_is_loaded(tree, named):
    steps, topk, nodes = tree
    asked = arguments(
        speculative_num_steps=steps, speculative_eagle_topk=topk, speculative_num_draft_tokens=nodes
    )
    with pytest.raises(UnsupportedError, match=named):
        algorithm().handle_server_args(asked)


HEAD = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 12, "target_layer_ids": [0, 2]},
}
TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def of_block(folder, tree=(None, None, None), size=None, **changed):
    """Return options for a DFlash head whose settings are changed."""
    (folder / "config.json").write_text(json.dumps(HEAD | changed))
    return arguments(
        speculative_draft_model_path=str(folder),
        speculative_dflash_block_size=size,
        **dict(zip(TREE, tree, strict=True)),
    )


@pytest.mark.parametrize(
    ("tree", "size", "changed", "wanted"),
    [
        ((None, None, None), None, {}, (7, 1, 8, 8)),
        # as SGLang's own algorithm for such heads takes them
        ((None, None, 4), None, {}, (3, 1, 4, 4)),
        ((None, None, 4), 4, {}, (3, 1, 4, 4)),
        ((None, None, None), 4, {"sample_from_anchor": True}, (4, 1, 5, 4)),
        ((7, 1, None), None, {}, (7, 1, 8, 8)),
        ((7, 4, 16), None, {}, (7, 4, 16, 8)),
        ((3, 8, 64), 4, {}, (3, 8, 64, 4)),
    ],
)
def test_a_dflash_head_is_known_by_its_settings(tmp_path, tree, size, changed, wanted):
    asked = of_block(tmp_path, tree, size, **changed)
    # SGLang asks again, by the new name
    for _ in range(2):
        algorithm().handle_server_args(asked)
        assert asked.speculative_algorithm == names.DFLASH
        assert tuple(getattr(asked, name) for name in TREE) == wanted[:3]
        assert asked.speculative_dflash_block_size == wanted[3]


@pytest.mark.parametrize(
    ("tree", "size", "changed", "named"),
    [
        ((8, 4, 16), None, {}, "num_steps must be at most 7, the tokens that a block of 8 drafts"),
        ((3, 1, 4), None, {}, "num_draft_tokens must be at least 8, the slots that the head's"),
        ((None, None, 16), 8, {}, "must be given together, got None, None, 16"),
        (
            (None, None, 16),
            None,
            {},
            r"block_size must be 2\.\.8, tokens of the head's block, got 16",
        ),
        ((7, 300, 16), None, {}, r"ranks must be 1\.\.255"),
        ((2, 2, 8), 3, {}, r"num_draft_tokens must be 2\.\.7 with ranks 2"),
        ((None, None, None), None, {"speculators_model_type": "dflash"}, "layout of speculators"),
        ((None, None, None), None, {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ((None, None, None), None, {"conv_kernel_size": 3}, "conv_kernel_size 3"),
        ((None, None, None), None, {"block_size": None}, "has no block_size"),
    ],
)
def test_blocks_that_are_refused_before_a_model_is_loaded(tmp_path, tree, size, changed, named):
    with pytest.raises(UnsupportedError, match=named):
        algorithm().handle_server_args(of_block(tmp_path, tree, size, **changed))


def test_trees_of_larger_batches_over_a_block(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECATTN_SGLANG_TREES", "24:3-1-4")
    algorithm().handle_server_args(of_block(tmp_path, (7, 4, 16)))
    monkeypatch.setenv("SPECATTN_SGLANG_TREES", "24:7-5-16")
    with pytest.raises(UnsupportedError, match="no more branches and nodes than 7-4-16"):
        algorithm().handle_server_args(of_block(tmp_path, (7, 4, 16)))


@pytest.mark.parametrize("layers", [[2, 0], [0, 0], [1, 3]])
def test_states_that_sglang_does_not_give_are_refused(tmp_path, layers):
    from specattn.integrations.sglang.blocks import BlockHead

    read = HEAD["dflash_config"] | {"target_layer_ids": layers}
    path = of_block(tmp_path, dflash_config=read).speculative_draft_model_path
    target = SimpleNamespace(model_config=SimpleNamespace(num_hidden_layers=4, vocab_size=13))
    draft = SimpleNamespace(model_config=SimpleNamespace(model_path=path, revision=None))
    with pytest.raises(UnsupportedError, match=r"SGLang gives states after layers 0\.\.2, in asc"):
        BlockHead.of(target, draft)


def test_a_target_that_gives_no_states_is_refused():
    from specattn.integrations.sglang.blocks import BlockHead

    with pytest.raises(UnsupportedError, match="object has no set_dflash_layers_to_capture"):
        BlockHead(None, (1, 3), (-1,), 1.0).capture(SimpleNamespace(model=object()))


@pytest.mark.parametrize(
    ("trees", "named"),
    [
        ("24", "must be like '24:3-1-4,64:2-1-3', got '24'"),
        ("1:3-1-4", "must be like"),
        ("24:3-1-4,", "must be like"),
        ("24:3-6-4", "no more branches and nodes than 4-5-16, got '24:3-6-4'"),
        ("24:4-5-21", "no more branches and nodes than 4-5-16, got '24:4-5-21'"),
        ("24:0-1-1", "must name trees that draft"),
        ("24:2-2-8", "num_draft_tokens must be 2..7"),
    ],
)
def test_trees_of_larger_batches_that_are_refused(monkeypatch, trees, named):
    monkeypatch.setenv("SPECATTN_SGLANG_TREES", trees)
    tree = {"speculative_num_steps": 4, "speculative_eagle_topk": 5}
    with pytest.raises(UnsupportedError, match=named):
        algorithm().handle_server_args(arguments(**tree, speculative_num_draft_tokens=16))


def test_an_unknown_way_to_quantise_the_head_is_refused(monkeypatch):
    monkeypatch.setenv("SPECATTN_SGLANG_DRAFT_QUANTIZATION", "int4")
    named = "SPECATTN_SGLANG_DRAFT_QUANTIZATION must be fp8, fp8-channel, fp8-weights or None, got"
    with pytest.raises(UnsupportedError, match=f"{named} 'int4'"):
        algorithm().handle_server_args(arguments())


def test_a_dflash_head_is_not_quantised(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECATTN_SGLANG_DRAFT_QUANTIZATION", "fp8")
    with pytest.raises(
        UnsupportedError, match="fp8 is of EAGLE-3 heads, and this is a DFlash head"
    ):
        algorithm().handle_server_args(of_block(tmp_path, (7, 4, 16)))


def test_batch_sizes_are_shared_out_among_trees(monkeypatch):
    from specattn.integrations.sglang.algorithm import larger_trees
    from specattn.integrations.sglang.steps import shared_out

    monkeypatch.setenv("SPECATTN_SGLANG_TREES", "64:2-1-3,24:3-1-4")
    trees = {0: (4, 5, 16), **larger_trees((4, 5, 16))}
    assert trees == {0: (4, 5, 16), 24: (3, 1, 4), 64: (2, 1, 3)}
    assert list(trees) == [0, 24, 64]
    assert shared_out([1, 16, 24, 48, 64], trees) == [[1, 16], [24, 48], [64]]
    assert shared_out([1, 16, 32], [0]) == [[1, 16, 32]]
    with pytest.raises(ValueError, match=r"from 24, 64 requests on, and batch sizes \[1, 48\]"):
        shared_out([1, 48], trees)


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("LlamaForCausalLMEagle3", "SPECATTN"),
        ("LlamaForCausalLMEagle", "SPECATTN_EAGLE"),
        ("MiMoMTP", "SPECATTN_EAGLE"),
    ],
)
def test_the_head_says_whether_the_target_gives_several_states(tmp_path, kind, chosen):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]}))
    asked = arguments(speculative_draft_model_path=str(tmp_path))
    algorithm().handle_server_args(asked)
    assert asked.speculative_algorithm == chosen


def test_a_target_with_mtp_layers_is_its_own_head(tmp_path):
    settings = {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    asked = arguments(model_path=str(tmp_path), speculative_draft_model_path=None)
    algorithm().handle_server_args(asked)
    assert asked.speculative_draft_model_path == str(tmp_path)
    assert asked.speculative_algorithm == "SPECATTN_EAGLE"


def test_a_missing_name_refuses_the_algorithm_alone(monkeypatch):
    monkeypatch.setattr(names, "STEP_NAMES", {"json.gone": ()})
    assert names.problems() == []
    with pytest.raises(UnsupportedError, match=r"json\.gone"):
        algorithm().handle_server_args(arguments())


def test_a_name_that_steps_import_refuses_the_algorithm_by_name(monkeypatch):
    from sglang.srt.managers import schedule_batch

    for name in ("worker", "steps"):
        monkeypatch.delitem(sys.modules, f"specattn.integrations.sglang.{name}", raising=False)
    monkeypatch.delattr(schedule_batch, "get_alloc_reserve_per_decode")
    (reason,) = names.step_problems()
    assert "cannot import name 'get_alloc_reserve_per_decode'" in reason


def test_every_method_that_is_replaced_is_in_the_table():
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    from specattn.integrations.sglang.algorithm import RowMap
    from specattn.integrations.sglang.worker import SpecAttnWorker

    pairs = ((SpecAttnWorker, EAGLEWorkerV2, names.STEP_WORKER), (RowMap, FutureMap, names.MAP))
    for own, theirs, path in pairs:
        # what Python itself puts there
        own_names = {name for name in vars(own) if not name.startswith(("__", "_abc"))}
        replaced = {name for name in own_names if hasattr(theirs, name)}
        assert {f"{path}.{name}" for name in replaced} <= names.STEP_NAMES.keys()


def test_the_algorithm_answers_all_that_sglang_asks():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    asked = {
        name
        for name, value in vars(SpeculativeAlgorithm).items()
        if callable(value) and not name.startswith("_")
    }
    # how its own members are found and made
    asked -= {"from_string", "register"}
    assert [name for name in sorted(asked) if not hasattr(algorithm(), name)] == []


@pytest.mark.usefixtures("active")
def test_the_plug_in_is_active():
    """SGLang knows backend and algorithm, and has every name that they use."""


@pytest.mark.parametrize(
    ("asked", "named", "without"),
    [
        ({}, "", ""),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, "", PROCESSED),
        ({"return_logprob": True, "grammar": object()}, "", PROCESSED),
        ({"return_hidden_states": True}, "hidden states", "hidden states"),
        ({"logit_bias": {"5": 1.0}, "min_new_tokens": 3}, "", PROCESSED),
        ({"frequency_penalty": 3.0}, "frequency_penalty must be", PROCESSED),
        # its prompt gives the only token, so that it takes no step
        ({"return_hidden_states": True, "new": 1}, "", ""),
    ],
)
def test_requests_are_refused_by_name(asked, named, without):
    from specattn.integrations.sglang.requests import refuse

    for processed, wanted in ((True, named), (False, without)):
        req = request(**asked)
        refuse([req], processed=processed)
        if not wanted:
            assert req.to_finish is None
            continue
        assert req.to_finish.message.startswith(f"SPECATTN does not serve {wanted}")
        assert req.to_finish.status_code == 400


def test_seeds_are_the_requests_own_or_derived_alike():
    from specattn.integrations.sglang.requests import seed_of

    assert seed_of(request(sampling_seed=7), 1) == 7
    assert seed_of(request(sampling_seed=2**63), 1) == -(2**63)
    derived = [seed_of(request(rid=rid), base) for rid, base in (("a", 1), ("b", 1), ("a", 2))]
    assert len(set(derived)) == 3
    assert seed_of(request(rid="a"), 1) == derived[0]


def test_answers_end_while_a_step_has_room():
    from specattn.integrations.sglang.requests import shorten

    reqs = [request(new, prompt) for new, prompt in ((8, 4), (8, 15), (None, 4), (5, 30))]
    shorten(reqs, 20)
    assert [req.sampling_params.max_new_tokens for req in reqs] == [8, 5, 16, 1]


class Counting:
    """A grammar of SGLang's kind: a token may follow if it is above the one before."""

    def __init__(self, vocab: int) -> None:
        self.vocab, self.text = vocab, [0]

    def is_terminated(self) -> bool:
        return self.text[-1] == self.vocab - 1

    def accept_token(self, token: int) -> None:
        assert token > self.text[-1]
        self.text.append(token)

    def rollback(self, count: int) -> None:
        del self.text[-count:]

    def fill_vocab_mask(self, mask, at: int) -> None:
        mask[at] = token_bitmask(range(self.text[-1] + 1, self.vocab), self.vocab)


def test_a_grammar_is_asked_along_a_tree_and_left_as_it_was():
    from specattn.integrations.sglang.processed import TreeGrammar

    vocab, tokens, parents = 40, [0, 5, 3, 33, 2, 39, 7], [-1, 0, 0, 1, 1, 3, 5]
    grammar, mask = Counting(vocab), torch.full((len(tokens), 2), -1, dtype=torch.int32)
    TreeGrammar(grammar).fill(tokens, parents, mask)
    for node in (0, 1, 2, 3):
        wanted = token_bitmask(range(tokens[node] + 1, vocab), vocab)
        assert mask[node].tolist() == wanted.tolist()
    # what is not allowed, what ends the text, and what would follow that
    assert (mask[4:] == -1).all()
    assert grammar.text == [0]


def test_rows_of_processed_requests_are_written_and_cleared():
    """A request that was taken back comes with what it has written; prompts are not penalised."""
    from specattn.integrations.sglang.processed import Processed

    def admit(req):
        batch = SimpleNamespace(reqs=[req], req_pool_indices_cpu=torch.tensor([2]))
        processed.admit(batch)

    states = ProcessorStates.alloc(4, 40, torch.device("cpu"))
    processed = Processed(states)
    admit(request(output_ids=[9]))
    assert not states.history.any()
    admit(request(frequency_penalty=0.5, output_ids=[5, 7, 5]))
    assert states.history[2].nonzero().flatten().tolist() == [5, 7]
    assert states.history[2, [5, 7]].tolist() == [4, 2]
    assert (processed.among([1, 3]), processed.among([1, 2])) == (False, True)
    admit(request(min_p=0.25, min_new_tokens=3, prompt=6, output_ids=[]))
    assert (states.min_p[2].item(), states.ends_from[2].item()) == (0.25, 9)
    admit(request(output_ids=[]))
    assert not processed.among([2])
    assert (states.kinds[2].item(), states.min_p[2].item()) == (0, 0)


def test_a_request_of_one_token_may_ask_for_anything():
    """SGLang's sampler chooses that token, where it alone does what was asked for."""
    from specattn.integrations.sglang import processed, requests

    biases = {str(token): 1.0 for token in range(600)}
    asked = [{}, {"logit_bias": biases}, {"min_p": 0.1}, {"grammar": object()}]
    reqs = [request(new=1, **one) for one in asked]
    rows = processed.Processed(ProcessorStates.alloc(5, 640, torch.device("cpu")))
    rows.admit(SimpleNamespace(reqs=reqs, req_pool_indices_cpu=torch.arange(1, 5)))
    assert [rows.among([row]) for row in range(1, 5)] == [False, False, True, True]
    assert requests.their_first(reqs, processed=True) == [1, 3]
    assert requests.their_first(reqs, processed=False) == [1, 2, 3]
