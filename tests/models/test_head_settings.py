"""Settings of heads are obeyed, refused by name, or logged; none is dropped silently."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn import Engine, Request, SpecConfig
from specattn.config import AttnConfig
from specattn.errors import ModelError
from specattn.models import HFTarget, load_dflash, load_draft
from tests.models import test_dflash as dflash
from tests.models.heads import (
    HT,
    VD,
    T,
    V,
    eagle3_tensors,
    eagle_tensors,
    layer_tensors,
    write,
)
from tests.models.papers import eagle3_layer, rms, rotate, rotate_neighbours, under

if TYPE_CHECKING:
    from pathlib import Path

    from tests.models.papers import Turn

IDS = "eagle_aux_hidden_state_layer_ids"
STATED: dict[str, Any] = {IDS: [0, 1, 2], "draft_vocab_size": VD}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def partly(turn: Turn, count: int) -> Turn:
    """Rotate the first ``count`` dimensions only."""
    return lambda x, positions, theta: torch.cat(
        [turn(x[..., :count], positions, theta), x[..., count:]], -1
    )


ROPES = [
    ({"is_neox_style": True, "partial_rotary_factor": 1.0}, rotate),
    ({"is_neox_style": False}, rotate_neighbours),
    ({"rope_is_neox_style": False}, rotate_neighbours),
    ({"rope_interleave": True}, rotate_neighbours),
    ({"partial_rotary_factor": 0.5}, partly(rotate, 12)),
    ({"rotary_pct": 0.25}, partly(rotate, 6)),
    (
        {"rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.75}},
        partly(rotate, 18),
    ),
    ({"partial_rotary_factor": 0.5, "is_neox_style": False}, partly(rotate_neighbours, 12)),
]


def beside_the_paper(target, head, tensors, dense, **how):
    """What a head's forward gives, and its layer's hidden states in float64."""
    torch.manual_seed(3)
    ids, x, positions = torch.randint(0, V, (T,)), torch.randn(T, HT), torch.arange(4, 4 + T)
    embeds, layer = target.embed_tokens.weight[ids].double(), under(tensors, "midlayer.")
    want = eagle3_layer(embeds, x.double(), layer, positions, 5000.0, **how)
    return head.forward(ids, x, positions, dense(head.layers).at(positions)), want


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("changes", "turn"), ROPES)
def test_ropes(target, dense, tmp_path, changes, turn) -> None:
    tensors = eagle3_tensors(biases=("q", "k", "v"))
    head = load_draft(write(tmp_path, tensors, **STATED, **changes), target)
    out, want = beside_the_paper(target, head, tensors, dense, turn=turn)
    close(out.hidden_states, want)


@pytest.mark.parametrize(("changes", "turn"), ROPES[1:6])
def test_ropes_of_blocks(target, tmp_path, changes, turn) -> None:
    """Their heads have norms, and their context is rotated by itself."""
    tensors = dflash.dflash_tensors()
    head = load_dflash(dflash.write(tmp_path, tensors, **changes), target)
    features = torch.randn(T, 3 * HT)
    got = dflash.run(head, features, [T], backend="torch_native")
    embeds = target.embed_tokens.weight[[0, *[V - 1] * 5]].double()
    seen = dflash.masks(T, 6, causal=False, window=None)
    want = dflash.reference(tensors, embeds, features.double(), [seen, seen], turn)
    dflash.close(got, want @ target.lm_head.weight.double().T)


SLIDING = {"layer_types": ["sliding_attention"]}
WINDOWS = [
    ({"sliding_window": 4} | SLIDING, 4),
    ({"sliding_window": 4, "use_sliding_window": False, "layer_types": ["full_attention"]}, None),
    ({"sliding_window": 4, "use_sliding_window": False}, None),
    ({"sliding_window": None, "use_sliding_window": False}, None),
    ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 28}, None),
    ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, 4),
    ({"sliding_window": 4}, 4),
    ({"use_swa": True, "sliding_window": 4}, 4),
    ({"eagle_config": {"use_swa": True, "swa_window_size": 4}}, 4),
    ({"use_swa": False, "swa_window_size": 4}, None),
    ({"transformer_layer_config": {"sliding_window": 4} | SLIDING}, 4),
]


@pytest.mark.parametrize(("changes", "window"), WINDOWS)
def test_windows(target, dense, tmp_path, changes, window) -> None:
    tensors = eagle3_tensors()
    head = load_draft(write(tmp_path, tensors, **STATED, **changes), target)
    out, want = beside_the_paper(target, head, tensors, dense, window=window or T)
    close(out.hidden_states, want)


def test_windows_of_several_layers(target, tmp_path) -> None:
    tensors = eagle_tensors() | layer_tensors("layers.1.", HT, wide=False)
    types = ["full_attention", "sliding_attention"]
    changes = {"num_hidden_layers": 2, "layer_types": types, "sliding_window": 4}
    head = load_draft(write(tmp_path, tensors, **changes), target)
    assert head.layers == (AttnConfig(4, 2, 24), AttnConfig(4, 2, 24, window_left=3))


def test_a_head_with_a_window_drafts_for_its_target(target, tmp_path) -> None:
    changes = {"sliding_window": 3, **SLIDING}
    head = load_draft(write(tmp_path, eagle3_tensors(), **STATED, **changes), target)
    config = SpecConfig(3, 2, 6, 64, 1)
    texts = [
        Engine(target.with_features(features), draft, one, graphs=False).generate(
            [Request([5, 6, 7, 8, 9, 10, 11], 12)]
        )[0]
        for features, draft, one in (
            (head.features, head, config),
            ((), None, SpecConfig(0, 1, 1, 64, 1)),
        )
    ]
    assert texts[0].tokens == texts[1].tokens


@pytest.mark.parametrize("causal", [True, False])
def test_use_swa_of_blocks(target, tmp_path, causal) -> None:
    """Windows of all layers; those of blocks that see ahead are the first token's."""
    tensors, window = dflash.dflash_tensors(), 4
    settings = {"use_swa": True, "swa_window_size": window, "causal": causal}
    changes = {"sliding_window": window, "layer_types": ["full_attention"] * 2}
    changes |= {"dflash_config": dflash.CONFIG["dflash_config"] | settings}
    head = load_dflash(dflash.write(tmp_path, tensors, **changes), target)
    features = torch.randn(T, 3 * HT)
    got = dflash.run(head, features, [T], backend="torch_native")
    embeds = target.embed_tokens.weight[[0, *[V - 1] * 5]].double()
    seen = dflash.masks(T, 6, causal=causal, window=window if causal else None)
    if not causal:
        seen &= torch.arange(T + 6) > T - window
    want = dflash.reference(tensors, embeds, features.double(), [seen, seen])
    dflash.close(got, want @ target.lm_head.weight.double().T)


@pytest.mark.usefixtures("path")
def test_logit_scale(target, dense, tmp_path) -> None:
    tensors = eagle3_tensors()
    head = load_draft(write(tmp_path, tensors, **STATED, logit_scale=0.25), target)
    ids, x, positions = torch.randint(0, V, (T,)), torch.randn(T, HT), torch.arange(T)
    out = head.forward(ids, x, positions, dense(head.layers).at(positions))
    normed = rms(out.hidden_states.double(), tensors["norm.weight"].double())
    close(out.logits, normed @ tensors["lm_head.weight"].double().T / 4)


@pytest.mark.parametrize(
    "changes",
    [
        {IDS: [0, 1, 3]},
        {"eagle_config": {"layer_ids": [0, 1, 3]}},
        {"aux_hidden_state_layer_ids": [0, 1, 3]},
        {"eagle_config": {IDS: [0, 1, 3], "layer_ids": [0, 1, 3]}},
    ],
)
def test_layer_ids(target, tmp_path, changes) -> None:
    assert load_draft(write(tmp_path, eagle3_tensors(), **changes), target).features == (1, 2, 4)


def test_layer_ids_of_a_block(target, tmp_path) -> None:
    settings = {"layer_ids": [0, 2, 4], "mask_token_id": V - 1}
    folder = dflash.write(tmp_path, dflash.dflash_tensors(), dflash_config=settings)
    assert load_dflash(folder, target).features == (1, 3, 5)


def refusal(folder: Path, target: HFTarget, load: Any = load_draft) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, target)
    assert caught.value.argument == "draft"
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder} ")


UNSERVED = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "use_gemma_norm": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2,
    "logits_scaling": 8.0,
    "attention_sink_bias": True,
    "parallel_drafting": True,
    "projector_type": "domino",
}


@pytest.mark.parametrize(("key", "value"), UNSERVED.items())
def test_what_no_head_computes_is_refused(target, tmp_path, key, value) -> None:
    why = f"has {key} {value!r} in config.json, which no "
    folder = write(tmp_path / "eagle3", eagle3_tensors(), **STATED, **{key: value})
    assert refusal(folder, target) == f"{why}EAGLE-3 head here has"
    folder = write(tmp_path / "eagle", eagle_tensors(), eagle_config={key: value})
    assert refusal(folder, target) == f"{why}EAGLE head here has"
    folder = dflash.write(tmp_path / "dflash", dflash.dflash_tensors(), **{key: value})
    assert refusal(folder, target, load_dflash) == f"{why}DFlash head here has"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_causal": False}, "is_causal False in config.json, which no EAGLE-3 head here has"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3 in config.json; expected a"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor 2 in config.json; expected a share"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor 0 in config.json; expected a share"),
        (
            {"partial_rotary_factor": 0.5, "rotary_pct": 0.25},
            "rotary_pct 0.25 in config.json, and partial_rotary_factor 0.5, which mean the same",
        ),
        ({"logit_scale": 0}, "logit_scale 0 in config.json; expected a positive number"),
        ({"logit_scale": "x"}, "logit_scale 'x' in config.json; expected a positive number"),
        (SLIDING, "no sliding_window in config.json"),
        ({"layer_types": ["chunked"]}, "layer_types ['chunked'] in config.json; expected 1 of "),
        (
            {"use_swa": True, "swa_window_size": 4, "sliding_window": 5},
            "sliding_window 5 in config.json, and swa_window_size 4, which mean the same",
        ),
        (
            {"layer_ids": [0, 1, 3]},
            f"layer_ids [0, 1, 3] in config.json, and {IDS} [0, 1, 2], which mean the same",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters {'full_attention': {'rope_theta': 10000.0}} in config.json; expected ",
        ),
    ],
)
def test_settings_that_are_wrong(target, tmp_path, changes, reason) -> None:
    folder = write(tmp_path, eagle3_tensors(), **STATED | changes)
    assert refusal(folder, target).startswith(f"has {reason}")


def test_ropes_that_contradict_each_other(target, tmp_path) -> None:
    changes = {"is_neox_style": True, "rope_interleave": True}
    assert refusal(write(tmp_path, eagle3_tensors(), **STATED, **changes), target) == (
        "says in several ways how its rope pairs dimensions: {'is_neox_style': True, "
        "'rope_interleave': True}"
    )


def warnings(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_what_nothing_reads_is_logged_in_a_line(target, tmp_path, caplog) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0, "odd": 1}
    changes = {"zoom": 2, "eagle_config": {"depth_scale": 0.5}, "rope_parameters": rope}
    folder = write(tmp_path, eagle3_tensors(), **STATED, **changes)
    load_draft(folder, target)
    assert warnings(caplog) == [
        f"{folder} has settings in config.json that nothing here reads: "
        "depth_scale, rope_parameters.odd, zoom"
    ]


def test_guesses_are_announced(target, tmp_path, caplog) -> None:
    load_draft(write(tmp_path, eagle3_tensors()), target)
    assert [line.removeprefix(f"{tmp_path} ") for line in warnings(caplog)] == [
        f"has no {IDS} in config.json: it reads the states that enter layers (2, 2, 2), as most "
        "heads"
    ]
    caplog.clear()
    caplog.set_level(logging.INFO, "specattn")
    load_draft(write(tmp_path, eagle3_tensors(), **STATED), target)
    assert [one.getMessage() for one in caplog.records] == [
        f"{tmp_path} has {IDS} [0, 1, 2] in config.json, which engines read in several ways: here "
        "as the states that leave these layers"
    ]
    caplog.clear()
    speculators = {"speculators_model_type": "eagle3"}
    load_draft(write(tmp_path, eagle3_tensors(), **STATED, **speculators), target)
    (line,) = warnings(caplog)
    assert line.startswith(f"{tmp_path} has no norm_before_residual in config.json: taken for fals")
    caplog.clear()
    load_draft(write(tmp_path, eagle3_tensors(), **STATED, sliding_window=4), target)
    (line,) = warnings(caplog)
    assert line.endswith("but no layer_types: taken for layers from 0 on")


# What trainers write besides sizes, without an effect.
SPECFORGE = {
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    **{"initializer_range": 0.02, "max_window_layers": 48, "pretraining_tp": 1},
    **{"rope_scaling": None, "sliding_window": None, "use_sliding_window": False},
    **{"tie_word_embeddings": False, "transformers_version": "4.53.2", "use_cache": True},
    **{"target_hidden_size": HT, "target_model_type": "llama", "num_local_experts": 16},
    **{"additional_fc": False, "reuse_target_lm_head": True, "experts_per_token": 4},
}
MODEL_OPTIMIZER = {
    **{"mlp_bias": False, "pad_token_id": None, "rope_theta": 5000.0},
    "eagle_config": {
        **{IDS: [0, 1, 2], "use_aux_hidden_state": True, "parallel_draft_step": 1},
        **{"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True},
        **{"use_mtp_layernorm": False, "has_lm_head": True},
    },
}
BLOCK = {
    **SPECFORGE,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "layer_types": ["full_attention"] * 2,
    "attention_sink_bias": False,
    "dflash_config": dflash.CONFIG["dflash_config"] | {"causal": False, "projector_type": "dflash"},
}


@pytest.mark.parametrize("changes", [SPECFORGE, MODEL_OPTIMIZER])
def test_published_settings_are_known(target, tmp_path, caplog, changes) -> None:
    load_draft(write(tmp_path / "eagle3", eagle3_tensors(), **STATED | changes), target)
    load_dflash(dflash.write(tmp_path / "dflash", dflash.dflash_tensors(), **BLOCK), target)
    assert not warnings(caplog)
