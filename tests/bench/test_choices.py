"""What `auto` takes follows from the result files by a rule."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from bench.suite import cases, choices
from bench.suite.batch import Arena, Batch
from bench.suite.peers import own
from bench.suite.results import Found, Line, PartFound, read
from bench.suite.run import describe
from specattn.backends import fastest
from specattn.backends.fastest import Choice
from tests.bench.test_report import RESULTS

MACHINE = {"device": "a card", "capability": "9.0", "torch": "2", "date": "today"}
LATENT = {"latent": True, "heads": (128, 1), "head_dim": 576, "page_size": 64}


def found(name: str, gain: float, peer: str = "FA3", **more) -> Found:
    """A cell in which a peer takes 1 / gain of the own kernel's time."""
    case = describe(cases.make(name, **more))
    lines = [Line(who, case, us, 1.0, 1.0, 1.0) for who, us in (("specattn", gain), (peer, 1.0))]
    return Found("part", name, case, lines[0], {}, {peer: lines[1]})


def of(*cells: Found, machine=MACHINE) -> list[Choice]:
    """The choices of a capability, as the library reads them."""
    made = choices.choices([PartFound("part", machine, list(cells))])
    return [Choice(**one) for one in made["9.0"]["auto"]]


def in_float8(name: str, gain: float, **more) -> Found:
    """A cell in which bfloat16 takes so many times as long as float8."""
    case = describe(cases.float8(cases.make(name, **more)))
    lines = [Line(who, case, us, 1.0, 1.0, 1.0) for who, us in (("float8", 1.0), ("wide", gain))]
    return Found("part", name, case, lines[0], {"bfloat16": lines[1]})


def test_the_record_is_what_the_results_say():
    recorded = json.loads(fastest.RECORD.read_text())
    assert choices.choices(read(RESULTS)).items() <= recorded.items(), "specattn bench --report"


def test_a_key_is_the_beginning_of_a_choice():
    assert [field.name for field in fields(Choice)][: len(choices.NAMES)] == list(choices.NAMES)


def test_prompts_that_all_gain_are_taken_for_any_batch():
    (choice,) = of(found("8 x 8k prompt 512", 1.21), found("1 x 8k prompt 8k", 1.0001))
    assert (choice.backend, choice.forwards, choice.page_size) == ("fa3", "prompts", 1)
    assert (choice.batch, choice.cells, choice.least) == (1, 2, 1.0)
    assert choice.gain == pytest.approx(1.1, abs=1e-3)
    assert choice.measured == "a card: torch 2, today"


@pytest.mark.parametrize(
    "cells",
    [
        [found("8 x 8k prompt 512", 1.2), found("1 x 8k prompt 8k", 0.99)],
        [found("8 x 8k prompt 512", 1.02), found("1 x 8k prompt 8k", 1.03)],
        [found("8 x 8k prompt 512", 1.2, window_left=100)],
        [found("8 x 8k prompt 512", 1.2, stored="float8_e4m3fn")],
        [found("8 x 8k prompt 512", 1.2, sinks=True)],
        [found("8 x 8k prompt 512", 1.2, logit_cap=1.0)],
        [found("8 x 8k prompt 512", 1.2, "FlashInfer causal")],
        [found("8 x 8k decode", 1.2), found("8 x 8k chain 4", 1.2), found("8 x 8k tree 4-3-8", 2)],
        [found("8 x 8k extend 1..6", 1.2)],
    ],
    ids=[
        "one loses",
        "noise",
        "window",
        "float8",
        "sinks",
        "cap",
        "no backend",
        "others",
        "extend",
    ],
)
def test_who_is_not_taken(cells):
    assert not of(*cells)


def test_decode_is_taken_from_the_batch_on_that_gains():
    four, *more = (
        found(f"{batch} x 8k decode", gain, "FlashMLA", **LATENT)
        for batch, gain in ((4, 0.8), (1, 1.3), (16, 1.2), (8, 1.1))
    )
    (choice,) = of(four, *more)
    assert (choice.latent_heads, choice.batch, choice.cells) == (128, 8, 2)
    assert choice.least == 1.1
    (every,) = of(*more)
    assert every.batch == 1
    assert not of(four)


def test_forwards_heads_pages_and_dtypes_are_apart():
    made = of(
        *(
            found(name, 1.2, "FlashMLA", **(LATENT | more))
            for name in ("8 x 8k decode", "8 x 8k chain 4")
            for more in ({}, {"heads": (64, 1)})
        ),
        found("8 x 8k prompt 512", 1.2, page_size=64),
        found("8 x 8k prompt 512", 1.2, dtype="float16"),
        found("8 x 8k prompt 512", 1.2, head_dim=64),
    )
    assert len(made) == len({replace(one, gain=0.0) for one in made}) == 7


def test_float8_loses_here_and_gains_there():
    """A line per head size; cells that gain are apart from those that lose, also of one q_len."""
    part = PartFound(
        "part",
        MACHINE,
        [
            in_float8("1 x 4k tree 4-3-8", 0.875),
            in_float8("8 x 8k tree 4-3-8", 1.25),
            in_float8("1 x 128k chain 8", 1.5),
            in_float8("32 x 4k decode", 1.0),
            in_float8("8 x 8k prompt 512", 0.75, head_dim=64),
            found("8 x 8k decode", 2.0),
        ],
    )
    lines = choices.choices([part])["9.0"]["float8"]
    assert list(lines) == ["64", "128"]
    what = "against bfloat16, by query tokens of a request over cached tokens of the batch: "
    card = "a card: torch 2, today"
    assert lines["64"] == f"{what}slower at 512 over 65,536 (0.75x); faster at none; {card}"
    assert lines["128"] == (
        f"{what}slower at 1 over 131,072 (1.00x), 8 over 4,096 (0.88x); "
        f"faster at 8 over 65,536 to 131,072 (1.25x to 1.50x); {card}"
    )
    table = choices.shown_float8([part])
    assert "| 9.0 | 128 | 8 | 65,536 to 131,072 | **1.25x to 1.50x** | 2 |" in table
    assert table.count("\n") == 1 + 4


def test_another_devices_choices_stay(tmp_path):
    record = tmp_path / "fastest.json"
    record.write_text('{"8.0": {}, "9.0": {"auto": [1]}}')
    part = PartFound("part", MACHINE, [found("8 x 8k prompt 512", 1.2)])
    assert choices.write([part], record) == record
    written = json.loads(record.read_text())
    assert written["8.0"] == {}
    assert Choice(**written["9.0"]["auto"][0]).backend == "fa3"
    choices.write([replace(part, machine={"device": "unknown"})], record)
    assert json.loads(record.read_text()) == written


def test_the_variant_says_who_ran():
    case = replace(cases.make("9 prompt 3", heads=(4, 2), head_dim=16), auto=True)
    arena = Arena(torch.device("cpu"), only_one=True)
    arena.reserve([case])
    contestant = own(case)(Batch(case, arena))
    assert (contestant.name, contestant.detail()) == ("specattn", {"backend": "torch_native"})
    assert case.name.endswith("auto")


def test_the_record_is_part_of_the_package():
    assert fastest.RECORD.is_relative_to(Path(fastest.__file__).parent)
