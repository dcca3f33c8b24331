"""The driver that sets whole engines beside each other, without SGLang and without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

import bench.engines.__main__ as driver
from bench.compat import PINS
from bench.engines import cells, make_bundle, report, serving
from bench.engines.cells import BLOCK, FUSED, OWN, PLACES, SETTINGS, STEPS, WARM, Job
from bench.engines.child import Turn
from bench.engines.decode_log import intervals, steady, summary
from bench.engines.own_side import make, measure
from bench.engines.processes import run
from bench.engines.sglang_side import options, random_prompts
from bench.step_world import Shape
from specattn.models.fused.projection import Projection
from specattn.models.fused.scaled import ScaledProjection

LOG = (
    "[2026-01-01 00:00:00] Decode batch, #running-req: {running}, #token: 4100, token usage: 0.10, "
    "accept len: {length:.2f}, accept rate: 0.20, cuda graph: {graph}, "
    "gen throughput (token/s): {speed:.2f}, #queue-req: 0"
)
# seconds that a run may take, however busy the machine is
HOURS = 1e4
PROMPT = "[2026-01-01 00:00:00] Prefill batch, #new-seq: 2, #new-token: 8192, #running-req: 14"
CHILD = """
import json, pathlib, sys, time
job, out = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
name = f"{job['kind']}-{job['side']}-{job['setting']}"
print("started", name, flush=True)
if job["side"] == "crash":
    raise SystemExit("it fell over")
(out / f"{name}.ready").touch()
while not (out / f"{name}.go").exists():
    time.sleep(0.01)
with (out / "order").open("a") as file:
    file.write(f"begin {job['side']}\\n")
if job["side"] == "hangs":
    time.sleep(600)
line = {"side": job["side"], "setting": job["setting"], "ms": 1.0}
(out / f"{name}.jsonl").write_text(json.dumps(line) + "\\n")
with (out / "order").open("a") as file:
    file.write(f"end {job['side']}\\n")
"""


def log(*found: tuple[int, float, float], graph: bool = True) -> str:
    lines = [
        LOG.format(running=running, length=length, speed=speed, graph=graph)
        for running, length, speed in found
    ]
    return "\n".join([PROMPT, *lines, PROMPT])


def test_intervals_of_a_log():
    found = intervals(log((16, 4.0, 3200.0), (3, 2.5, 750.0)))
    assert [(one.running, one.length, one.graph) for one in found] == [
        (16, 4, True),
        (3, 2.5, True),
    ]
    assert [one.ms for one in found] == [pytest.approx(20.0), pytest.approx(10.0)]


def test_a_log_without_speculation():
    line = LOG.format(running=2, length=1, graph=True, speed=100.0)
    (found,) = intervals(line.replace("accept len: 1.00, accept rate: 0.20, ", ""))
    assert found.length == 1
    assert found.ms == pytest.approx(20.0)


def test_steady_steps_leave_prompts_and_ends_out():
    text = log((4, 4, 1.0), (16, 4, 2.0), (16, 4, 3.0), (16, 4, 4.0), (16, 4, 5.0), (9, 4, 6.0))
    assert [one.speed for one in steady(intervals(text), 16)] == [3.0, 4.0]


def test_summary_is_the_median():
    text = log(*((16, 4, speed) for speed in (1.0, 3200.0, 6400.0, 1600.0, 1.0)))
    found = summary(text, 16, 4)
    assert found["ms"] == pytest.approx(20.0)
    assert (found["least_ms"], found["most_ms"]) == (pytest.approx(10.0), pytest.approx(40.0))
    assert found["tokens_per_s"] == pytest.approx(3200.0)
    assert found["intervals"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (log((16, 4, 1.0)), "no steady steps of 16 requests in 1 lines"),
        (log(*[(16, 4, 1.0)] * 3, graph=False), "without a CUDA graph"),
        (log(*[(16, 2.5, 1.0)] * 3), r"gained \[2.5\] tokens, not 4"),
    ],
)
def test_what_a_log_must_hold(text, message):
    with pytest.raises(ValueError, match=message):
        summary(text, 16, 4)


def test_the_most_telling_job_comes_first():
    jobs = cells.bench_jobs()
    sides = ("fa3", "specattn", STEPS, FUSED, OWN)
    assert [(job.side, job.setting) for job in jobs[:5]] == [(side, "tree") for side in sides]
    assert jobs[0].places[0] == (16, 4096)
    names = [job.name for job in (*jobs, *cells.smoke_jobs())]
    assert len(set(names)) == len(names)


def test_a_job_travels_as_text():
    job = Job("fa3", "tree", ((2, 16), (1, 32)), "smoke", steps=3, seconds=5.0)
    assert Job.from_json(job.to_json()) == job


def test_room_holds_the_largest_place():
    job = Job("fa3", "tree")
    gained = SETTINGS["tree"][3]
    assert job.room(gained) >= max(b * (c + (job.steps + WARM) * gained) for b, c in PLACES)


def test_all_sides_get_the_same_options(tmp_path):
    models = cells.write_models(tmp_path, 2)
    sides = "fa3", "specattn", STEPS
    one, other, steps = (options(Job(side, "tree"), models) for side in sides)
    ports = {"port", "nccl_port"}
    differ = {name for name in one if one[name] != other[name]}
    assert differ - ports == {"attention_backend"}
    differ = {name for name in one if one[name] != steps[name]}
    assert differ - ports == {"speculative_algorithm"}
    assert one["speculative_num_draft_tokens"] == 16
    assert one["max_total_tokens"] >= 64 * 4096
    assert "speculative_algorithm" not in options(Job("fa3", "plain"), models)


def test_models_are_written(tmp_path):
    target, head = cells.write_models(tmp_path, 2)
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 2
    found = json.loads((head / "config.json").read_text())
    assert found["architectures"] == ["LlamaForCausalLMEagle3"]
    assert found["num_hidden_layers"] == 1
    same, block = cells.write_models(tmp_path, 8, BLOCK)
    found = json.loads((block / "config.json").read_text())
    assert (same, found["architectures"]) == (target, ["DFlashDraftModel"])
    assert (found["block_size"], found["num_hidden_layers"]) == (8, 5)
    assert found["dflash_config"]["target_layer_ids"] == [1, 2, 4, 5, 6]
    asked = options(Job(FUSED, BLOCK), (same, block))
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    assert [asked[f"speculative_{name}"] for name in names] == [7, 8, 16]


@pytest.mark.parametrize("setting", cells.MTP)
def test_a_hybrid_target_is_its_own_head(setting, tmp_path):
    models = cells.write_models(tmp_path, 32, setting)
    assert models[0] == models[1]
    found = json.loads((models[0] / "config.json").read_text())
    assert found["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    kinds = found["text_config"]["layer_types"]
    assert (kinds.count("linear_attention"), kinds.count("full_attention")) == (24, 8)
    theirs, ours = (options(Job(side, setting), models) for side in ("triton", STEPS))
    assert (theirs["speculative_algorithm"], ours["speculative_algorithm"]) == ("NEXTN", "SPECATTN")
    assert theirs["enable_multimodal"] is ours["enable_multimodal"] is False
    assert {job.side for job in cells.bench_jobs() if job.setting == setting} == {
        *("fa3", "triton"),
        STEPS,
    }


def test_a_target_of_fp8_weights_is_written(tmp_path):
    """Its head keeps weights of 16 bits."""
    for weights, method in {"fp8": "fp8", "fp8-channel": "compressed-tensors"}.items():
        paths = cells.write_models(tmp_path / weights, 2, weights=weights)
        target, head = (json.loads((path / "config.json").read_text()) for path in paths)
        assert target["quantization_config"] == cells.QUANTISED[weights]
        assert target["quantization_config"]["quant_method"] == method
        assert "quantization_config" not in head


def test_jobs_of_fp8_weights():
    asked = {"smoke": False, "sides": "", "settings": "", "tp": 1, "places": (), "weights": "fp8"}
    jobs = driver.chosen(SimpleNamespace(**asked))
    assert [job.name.removesuffix("-fp8") for job in jobs] == [
        job.name for job in cells.bench_jobs()
    ]
    asked |= {"smoke": True, "sides": "fused,fa3", "places": driver.places("2x64,1x32")}
    jobs = driver.chosen(SimpleNamespace(**asked))
    assert {job.kind for job in jobs} == {"smoke"}
    assert {job.side for job in jobs} == {"fused", "fa3"}
    assert {job.places for job in jobs} == {((2, 64), (1, 32))}
    assert len({job.name for job in jobs}) == len(jobs)
    assert Job.from_json(jobs[0].to_json()) == jobs[0]


def test_dummy_float8_weights_are_random_numbers():
    name = "bench.engines.plugin.specattn_bench_weights"
    fill = importlib.import_module(name).fill
    model = torch.nn.Module()
    stored = torch.zeros(9000, 8, dtype=torch.float8_e4m3fn)
    shapes = {"weight": stored, "weight_scale_inv": torch.zeros(71, 1), "bias": torch.zeros(3)}
    for key, one in shapes.items():
        model.register_parameter(key, torch.nn.Parameter(one, requires_grad=False))
    before = []
    fill(lambda model, low: before.append(low), model, low=0.5)
    assert before == [0.5]
    numbers = model.weight.float() * model.weight_scale_inv[0]
    assert float(numbers.std()) == pytest.approx(6e-4, rel=0.02)
    assert float((numbers == 0).float().mean()) < 1e-3
    assert not model.bias.any()


def test_prompts_share_nothing_and_are_the_same_again():
    prompts = random_prompts(3, 40)
    assert prompts == random_prompts(3, 40)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 3


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    return [sys.executable, str(path)]


def test_jobs_that_start_together_take_turns(tmp_path, command):
    jobs = [Job("a", "tree"), Job("b", "tree"), Job("crash", "tree"), Job("c", "tree")]
    found = list(run(jobs, tmp_path, HOURS, together=2, command=command))
    assert [job for job, _ in found] == jobs
    assert [lines[0].get("ms") for _, lines in found] == [1.0, 1.0, None, 1.0]
    assert found[2][1][0]["error"] == "exit status 1"
    order = (tmp_path / "order").read_text().splitlines()
    assert order == [f"{what} {side}" for side in "abc" for what in ("begin", "end")]


def test_a_job_that_takes_too_long_is_ended(tmp_path, command):
    jobs = [Job("hangs", "tree", seconds=2.0), Job("a", "tree")]
    found = list(run(jobs, tmp_path, HOURS, command=command))
    assert found[0][1][0]["error"] == "out of time"
    assert found[1][1][0]["ms"] == 1.0


def test_nothing_starts_without_time(tmp_path, command):
    ((_, lines),) = run([Job("a", "tree")], tmp_path, 1.0, command=command)
    assert lines[0]["error"] == "no time left"
    assert not (tmp_path / "order").exists()


def test_places_without_time_are_recorded(tmp_path, monkeypatch):
    stopped = SimpleNamespace(time=lambda: 100.0, sleep=time.sleep)
    monkeypatch.setattr("bench.engines.child.time", stopped)
    turn = Turn(Job("fa3", "tree"), tmp_path, 120.0)
    (tmp_path / "bench-fa3-tree.go").touch()
    turn.wait()
    assert (64, 4096) not in list(turn.places())
    lines = report.read(tmp_path / "bench-fa3-tree.jsonl")
    assert [line["error"] for line in lines] == ["no time left"]
    assert lines[0]["batch"] == 64


@pytest.mark.parametrize(
    ("job", "said", "name"),
    [
        (Job("fused", "tree"), {"draft_weights": "fp8"}, "tree draft fp8"),
        (
            Job("fused", "tree", weights="fp8", tp=2),
            {"weights": "fp8", "draft_weights": "fp8", "tp": 2},
            "tree fp8 draft fp8 on 2 GPUs",
        ),
        (Job("fa3", "tree", weights="fp8-channel"), {"weights": "fp8-channel"}, "tree fp8-channel"),
    ],
)
def test_lines_say_what_is_not_usual(tmp_path, monkeypatch, job, said, name):
    monkeypatch.setenv("SPECATTN_SGLANG_DRAFT_QUANTIZATION", "fp8")
    turn = Turn(job, tmp_path, time.time() + 60)
    job.file(tmp_path, "go").touch()
    turn.wait()
    turn.record(batch=1, context=4096, ms=2.0, tokens_per_s=9)
    (line,) = report.read(job.file(tmp_path, "jsonl"))
    assert {key: line[key] for key in line.keys() & {"weights", "draft_weights", "tp"}} == said
    assert report.table([line]).splitlines()[-1].startswith(f"| {name} | 1 x 4096 |")


def test_table_and_gain():
    lines = [
        {"side": side, "setting": "tree", "batch": 16, "context": 4096, "ms": ms, "tokens_per_s": 9}
        for side, ms in (("fa3", 12.0), ("triton", 15.0), ("specattn", 10.0), ("steps", 6.0))
    ]
    more = [lines[0] | {"weights": "fp8"}, {"side": "fa3", "setting": "chain", "error": "late"}]
    text = report.table([*lines, *more])
    assert text.splitlines()[-1].startswith("| tree fp8 | 16 x 4096 | 12.00 ms")
    text = report.table([*lines, more[1]])
    assert text.splitlines()[-1] == (
        "| tree | 16 x 4096 | 12.00 ms, 9/s | 15.00 ms, 9/s | 10.00 ms, 9/s | 6.00 ms, 9/s | 1.20 "
        "| 2.00 |"
    )
    assert len(text.splitlines()) == 3


def test_tokens_are_compared_with_plain_ones():
    def line(side, setting, tokens):
        return {"side": side, "setting": setting, "tokens": tokens, "verified": [2, 3]}

    found = report.compared(
        [
            line("triton", "plain", [[1, 2, 3], [4, 5, 6]]),
            line("fa3", "tree", [[1, 2, 3], [4, 7, 6]]),
            {"side": "specattn", "setting": "tree", "error": "exit status 1"},
        ]
    )
    assert found == ["fa3 tree: 1 of 2 texts equal, common tokens [3, 1], verified [2, 3]"]
    assert "nothing to compare" in report.compared([])[0]


@pytest.mark.parametrize(
    ("setting", "weights"),
    [("chain", ""), ("tree", ""), (BLOCK, ""), ("tree", "fp8"), ("tree", "fp8-channel")],
)
def test_our_engine_gains_what_is_forced(setting, weights):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "max_position_embeddings": 512,
    }
    shape = Shape(
        "tiny",
        LlamaConfig(**sizes, num_hidden_layers=6),
        LlamaConfig(**sizes, num_hidden_layers=1),
        draft_vocab=48,
    )
    job = Job(OWN, setting, ((2, 12),), steps=4, weights=weights)
    torch.manual_seed(0)
    engine, forced = make(job, shape, torch.device("cpu"), torch.float32)
    kind = ScaledProjection if weights else Projection
    assert type(engine.target.model.blocks[0].qkv) is kind
    gained = SETTINGS[setting][3]
    found = measure(engine, random_prompts(2, 12, 96), job.steps, gained)
    assert found["intervals"] >= job.steps - 2
    # steps of trees that were not so deep gain less, and the last one is cut
    if not int(forced.shallow.sum()):
        assert found["gained"] == pytest.approx(gained, abs=0.2)
    assert found["tokens_per_s"] == pytest.approx(2e3 * found["gained"] / found["ms"], rel=0.01)


def test_servers_get_the_same_options(tmp_path, monkeypatch):
    # the driver sets these for its servers
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "")
    monkeypatch.setenv("SPECATTN_SGLANG_FUSED", "")
    models = cells.write_models(tmp_path, 2)
    fa3, steps = (serving.server_options(one, "tree", models, pair=False) for one in serving.SIDES)
    ports = {fa3[fa3.index(f"--{name}") + 1] for name in ("port", "nccl-port")}
    assert {one for one in fa3 if one not in steps} - ports == {"EAGLE3"}
    assert "--skip-tokenizer-init" not in fa3
    at = fa3.index("--cuda-graph-bs-decode") + 1
    assert fa3[at : at + len(serving.BATCHES)] == [str(size) for size in serving.BATCHES]


def test_flags_of_options():
    found = serving.flags({"one_two": 3, "on": True, "off": False, "many": [1, 2]})
    assert found == ["--one-two", "3", "--on", "--many", "1", "2"]


def test_every_token_is_streamed(tmp_path):
    """Each id adds text that nothing holds back, and any prompt has ids."""
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    serving.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = [*range(299, -1, -1), 2, 2]
    texts = [tokenizer.decode(ids[:count], skip_special_tokens=True) for count in range(303)]
    assert all(after.startswith(text) for text, after in pairwise(texts))
    assert all(after.endswith(str(token)) for token, after in zip(ids, texts[1:], strict=True))
    assert tokenizer.encode(texts[-1]) == ids
    assert tokenizer.encode("The capital of France")


def test_what_a_server_is_told_to_gain(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "")
    monkeypatch.setenv("SPECATTN_SGLANG_FUSED", "")
    told = []

    @contextmanager
    def started(side, arguments, log):
        told.append(os.environ["SGLANG_SIMULATE_ACC_LEN"])
        yield "address"

    monkeypatch.setattr(serving, "serving", started)
    for more in ([], ["--gained", "2.4"], ["--setting", "chain"]):
        serving.main(["--out", str(tmp_path), "--sides", "fused", *more, "--clients"])
    assert told == ["4", "2.4", "3"]


def test_a_side_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    line = dict.fromkeys(serving.COLUMNS, 2.0) | {"setting": "tree", "clients": 8}

    def measure(side, options, models):
        if side == "none":
            raise RuntimeError("it did not start")
        (options.out / "serving.jsonl").write_text(json.dumps(line | {"side": side}))

    monkeypatch.setattr(serving, "measure", measure)
    with pytest.raises(SystemExit, match="failed: none"):
        serving.main(["--out", str(tmp_path), "--sides", "none", "fa3"])
    out, err = capsys.readouterr()
    assert "| tree | 8 | fa3 | 2.0 |" in out
    assert "it did not start" in err


def test_table_of_a_loaded_server():
    line = dict.fromkeys(serving.COLUMNS, 2.0) | {"side": "fa3", "setting": "tree", "clients": 8}
    assert serving.table([line]).splitlines()[-1].startswith("| tree | 8 | fa3 | 2.0 |")


@pytest.mark.parametrize("name", make_bundle.RELEASES)
def test_a_bundle_is_what_its_release_pins(name):
    release, pins = make_bundle.RELEASES[name], PINS[f"sglang=={name}"]
    assert pins["torch"].startswith(release.torch)
    assert release.wheels["sglang"] == name
    # else the machine's own transformers is used
    packed = [one for one in release.needs if one.startswith("transformers")]
    assert packed in ([], [f"transformers=={pins['transformers']}"])


def test_a_bundle_is_built_with_its_own_torch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_bundle.torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(make_bundle, "CACHE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_bundle", "--out", "x", "--sglang", "0.5.23"])
    with pytest.raises(SystemExit):
        make_bundle.main()
    assert "SGLang 0.5.23 needs torch 2.14.1, not 2.11.0+cu130" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("size", "folders"), [(5000, [""]), (2000, ["00", "01", "02"])])
def test_parts_of_a_bundle(tmp_path, size, folders):
    whole, text = tmp_path / "site.tar.xz", os.urandom(5000)
    whole.write_bytes(text)
    parts = make_bundle.split(whole, size)
    assert [path.parent for path in parts] == [tmp_path / folder for folder in folders]
    assert max(path.stat().st_size for path in parts) <= size
    # as they lie in one folder
    assert b"".join(path.read_bytes() for path in sorted(parts, key=lambda p: p.name)) == text
    assert [path.parent for path in tmp_path.rglob("env.sh")] == [parts[0].parent]
    assert not whole.exists()


@pytest.mark.skipif(not shutil.which("xz"), reason="needs xz")
def test_a_bundle_is_unpacked_from_its_parts(tmp_path):
    site, out, there = (tmp_path / name for name in ("site", "out", "there"))
    (site / "packed").mkdir(parents=True)
    there.mkdir()
    # nothing that xz makes smaller than two parts
    (site / "packed" / "data").write_bytes(os.urandom(3 << 19))
    (site / "packed" / "__init__.py").write_text("")
    make_bundle.pack(site, out, 1)
    make_bundle.pack(site, out, 1)
    parts = sorted(out.glob("*/site.tar.xz.*"))
    assert len(parts) == 2
    for path in (*parts, out / "00" / "env.sh"):
        shutil.copy(path, there)
    told = os.environ | {"SGL_SITE": str(tmp_path / "unpacked"), "PYTHONPATH": "/newer/torch"}
    root = Path(make_bundle.__file__).parents[2]
    found = subprocess.run(
        ["bash", "-c", f"source {there}/env.sh && echo $PYTHONPATH"],
        cwd=root,
        env=told,
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout == f"{root}:{tmp_path}/unpacked:/newer/torch\n"
    unpacked = tmp_path / "unpacked" / "packed" / "data"
    assert unpacked.read_bytes() == (site / "packed" / "data").read_bytes()
    (entries,) = (tmp_path / "unpacked").glob("specattn-*.dist-info/entry_points.txt")
    assert "[sglang.srt.plugins]" in entries.read_text()


def test_kernels_are_found_by_name(tmp_path):
    """Whatever compiler the other machine has; what is not there is looked up as before."""
    site, work = tmp_path / "site", tmp_path / "work"
    cache = site / "sglang" / "kernels" / "jit" / "utils" / "compile" / "cache.py"
    cache.parent.mkdir(parents=True)
    cache.write_text(
        "import pathlib\n\n\ndef find_prebuilt(*, scope, module_name):\n"
        "    return scope, module_name\n"
    )
    built = work / "jit" / "sm90a" / "one" / "build-1" / "deps-2" / "one.so"
    built.parent.mkdir(parents=True)
    built.write_text("code")
    make_bundle.give_built(work, site)
    module = runpy.run_path(str(cache))
    found = module["find_prebuilt"](scope="scope", module_name="one")
    assert found == site / "jit" / "one" / "one.so"
    assert found.read_text() == "code"
    assert module["find_prebuilt"](scope="scope", module_name="two") == ("scope", "two")
