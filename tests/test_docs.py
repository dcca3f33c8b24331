"""The documentation says what is true: its programs run, its pictures and names are the code's."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import runpy
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import specattn
from specattn import Engine, Request, SpecConfig, inspect
from specattn.cli import graphs
from specattn.cli.app import app
from specattn.engine.metrics import EngineMetrics
from specattn.models import HFTarget
from tests.test_inspect import TREE
from tests.tiny import TinyTarget

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAIR = Path(str(files("specattn"))) / "pair"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def target() -> HFTarget:
    return HFTarget.from_pretrained(PAIR / "target", dtype=torch.float32, device=DEVICE)


def plain_texts(prompts: list[str], count: int) -> list[str]:
    return list(_plain_texts(tuple(prompts), count))


@cache
def _plain_texts(prompts: tuple[str, ...], count: int) -> list[str]:
    config = SpecConfig(0, 1, 1, max_context_len=512, max_num_reqs=len(prompts))
    encoded = [target().tokenizer(text).input_ids for text in prompts]
    results = Engine(target(), None, config).generate(
        [Request(ids, max_new_tokens=count, ignore_eos=True) for ids in encoded]
    )
    return [target().tokenizer.decode(result.tokens) for result in results]


def test_ones_own_loop_writes_what_plain_decoding_writes():
    folder = ROOT / "docs" / "examples"
    example = runpy.run_path(str(folder / "own_loop.py"))
    texts = plain_texts(example["PROMPTS"], 12)
    assert example["main"](12) == texts
    for other in ("phases.py", "own_cache.py"):
        assert runpy.run_path(str(folder / other))["main"](12) == texts, other


def test_a_proposer_of_ones_own_writes_what_plain_decoding_writes(capsys):
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "bigram_proposer.py"))
    assert example["main"](24) == plain_texts(example["PROMPTS"], 24)
    rates = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert min(rates) > 1.2


def test_a_proposer_on_the_host_writes_what_plain_decoding_writes(capsys):
    """It has read the texts when they are written again."""
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "suffix_proposer.py"))
    assert example["main"](24) == plain_texts(example["PROMPTS"], 24)
    *_, last = capsys.readouterr().out.splitlines()
    assert min(map(float, last.split()[-2:])) > 4


def test_attention_alone_sees_a_tree_as_its_paths():
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "own_attention.py"))
    assert example["main"]() < 2e-5


def test_generating_inside_transformers_writes_what_plain_decoding_writes(capsys):
    path = ROOT / "docs" / "examples" / "transformers_generate.py"
    example = runpy.run_path(str(path))
    assert example["main"](12) == plain_texts(example["PROMPTS"], 12)
    assert capsys.readouterr().out.startswith(example["PROMPTS"][0])


def test_drawn_texts_under_a_schema_are_values_of_it(capsys):
    pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "grammars.py"))
    found = example["main"](4)
    assert len({json.dumps(value) for value in found}) > 1
    for value in found:
        assert set(value) == {"name", "public", "versions"}
        assert isinstance(value["name"], str)
        assert isinstance(value["public"], bool)
        assert set(value["versions"]) <= {"3.11", "3.12", "3.13"}
    assert capsys.readouterr().out.count("\n") == 5


def test_a_policy_of_ones_own_writes_what_plain_decoding_writes():
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "policy.py"))
    assert example["main"](12) == plain_texts(example["PROMPTS"], 12)


def test_streams_write_what_plain_decoding_writes(capsys):
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "streaming.py"))
    assert example["main"](12) == plain_texts(example["PROMPTS"], 12)
    assert "a thread: " in capsys.readouterr().out


def test_the_programs_of_the_requests_page_run(capsys):
    page = (ROOT / "docs" / "requests.md").read_text()
    engine = Engine(
        TinyTarget(),
        None,
        SpecConfig(0, 1, 1, 64, 2),
        detokenize=lambda tokens: "".join(f"{token} " for token in tokens),
    )
    names = {"prompt": [3, 1, 4], "engine": engine, "request": Request([3, 1, 4], 5)}
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, "requests.md", "exec"), names)
    text = capsys.readouterr().out

    async def collect(server):
        return [piece async for piece in names["answer"](server, names["request"])]

    with names["AsyncEngine"](engine) as server:
        assert "".join(asyncio.run(collect(server))) == text != ""


def test_prometheus_is_told_what_the_monitoring_page_says():
    client = pytest.importorskip("prometheus_client", reason="not installed here")
    page = (ROOT / "docs" / "monitoring.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    engine = Engine(TinyTarget(), None, SpecConfig(0, 1, 1, 64, 2))
    engine.generate([Request([3, 1, 4], 5), Request([5], 1)])
    names = {"engine": engine}
    exec(compile(program, "monitoring.md", "exec"), names)
    told = client.generate_latest(client.REGISTRY).decode().splitlines()
    for line in ("waiting 0.0", "prompt_tokens_total 4.0", "generated_tokens_total 6.0"):
        assert f"specattn_{line}" in told
    assert 'specattn_finished_total{reason="length"} 2.0' in told


def test_every_number_of_the_monitoring_page_is_one():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert named == {name for name in dir(EngineMetrics) if name[0] != "_"} | {
        field.name for field in fields(EngineMetrics)
    }


def test_the_program_of_the_quick_start_runs(capsys):
    page = (ROOT / "docs" / "quick_start.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = program.replace("path/to/", f"{PAIR}/").replace("tokens=64", "tokens=8")
    exec(compile(program, "quick_start.md", "exec"), {})
    text, accepted = capsys.readouterr().out.rsplit(" ", 1)
    assert text
    assert float(accepted) >= 1


def test_the_sample_of_graphs_is_the_recorded_one(capsys):
    found = json.loads((ROOT / "bench" / "results" / "graphs_h200.json").read_text())
    (warm,) = [run for run in found["runs"] if run["cache"] == "warm"]
    graphs.show(warm)
    want = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    page = (ROOT / "docs" / "quick_start.md").read_text()
    command = found["command"].removesuffix(" --json")
    (sample,) = re.findall(rf"\$ {command}\n(.*?)\n```", page, re.DOTALL)
    first, last = (part.splitlines() for part in sample.split("...\n"))
    assert first == want[: len(first)]
    assert last == want[-len(last) :]


def anchors(page: Path) -> set[str]:
    """The names by which headings can be linked, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_the_model_of_the_models_page_runs(capsys, caplog):
    page = (ROOT / "docs" / "models.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    exec(compile(program, "models.md", "exec"), {})
    assert len(json.loads(capsys.readouterr().out)) == 8
    assert caplog.messages == []


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").rglob("*.md"))], ids=names)
def test_lines_of_code_fit_beside_the_sites_menus(page):
    """At the size of `docs/stylesheets/code.css`."""
    for block in re.findall(r"^```.*?^```", page.read_text(), re.DOTALL | re.MULTILINE):
        assert max(map(len, block.splitlines())) <= 88, block


def defined(module: Path) -> set[str]:
    """The public classes, functions and methods of a module."""
    found = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
            parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.FunctionDef)]
            found |= {f"{node.name}.{one.name}" for one in parts}
    return {name for name in found if not re.search(r"(^|\.)_", name)}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = page.parent / link if link else page
        assert there.exists(), link
        known = defined if there.suffix == ".py" else anchors
        assert not anchor or anchor in known(there), f"{link}#{anchor}"


def test_links_of_the_site_lead_to_pages_and_to_the_reference():
    site = runpy.run_path(str(ROOT / "docs" / "make_site.py"))["site_text"]
    for depth, page, want in (
        (0, "[a](../specattn/batch.py#DraftTree)", "[a](api/common.md#specattn.batch.DraftTree)"),
        (1, "[a](../../specattn/cache/kv_pool.py)", "[a](../api/cache.md#specattn.cache.kv_pool)"),
        # a package that is documented without its modules, and a module that is left out
        (0, "[a](../specattn/kernels/step/triton.py)", "[a](api/kernels.md#specattn.kernels.step)"),
        (0, "[a](../specattn/kernels/mla/gluon.py#f)", "[a](api/kernels.md#specattn.kernels.mla)"),
        (1, "[a](../../CONTRIBUTING.md#docs)", "[a](../contributing.md#docs)"),
        (0, "[a](../tests/tiny.py), [b](shapes.md#c)", "a, [b](shapes.md#c)"),
    ):
        assert site(page, depth) == want


def test_the_site_has_every_page():
    menu = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert menu == pages | {"changelog.md", "contributing.md"}


# a checkpoint's, and a reader's own
OTHERS = {"config.json", "conftest.py"}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_files_that_pages_name_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    homes = [ROOT, ROOT / "specattn", ROOT / "specattn" / "backends", ROOT / "bench" / "results"]
    for name in set(re.findall(r"`([\w./-]+\.(?:py|md|json|svg))`", text)) - OTHERS:
        assert any((home / name).exists() for home in homes), name


def test_every_page_is_two_links_from_the_readme():
    def linked(page: Path) -> set[Path]:
        links = re.findall(r"\]\((?!https?:)([^)#]+\.md)", page.read_text())
        return {(page.parent / link).resolve() for link in links}

    first = linked(ROOT / "README.md")
    guides = {*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/index.md")}
    assert not guides - first.union(*map(linked, first))


def test_the_readme_has_the_measured_numbers():
    """Every \"... times\" is of a table on top of a page, or of steps or servers of SGLang."""
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page.split("<!-- results: summary -->")[1].split("<!-- end -->")[0]
    table += (ROOT / "docs" / "published.md").read_text().split("## In short")[1].split("##")[0]
    found = {float(value) for value in re.findall(r" ([\d.]+)x(?=[ :])", table)}
    for name, ours in (("steps", "fused"), ("fp8", "fused"), ("hybrids", "steps")):
        record = ROOT / "bench" / "results" / f"engines_h200_{name}.jsonl"
        times = {
            (line["side"], line.get("weights"), line["setting"], line["batch"], line["context"]): (
                line["ms"]
            )
            for line in map(json.loads, record.read_text().splitlines())
        }
        found |= {times["fa3", *place] / times[ours, *place] for _, *place in times}
    record = ROOT / "bench" / "results" / "served_h200_published.jsonl"
    rates = {
        (line["side"], line["clients"]): line["tokens_per_s"]
        for line in map(json.loads, record.read_text().splitlines())
    }
    found |= {rates["specattn", clients] / rates["eagle3", clients] for _, clients in rates}
    said = re.findall(r"(\d+\.\d+) times", (ROOT / "README.md").read_text())
    assert said
    for number in said:
        digits = len(number.split(".")[1])
        assert float(number) in {round(value, digits) for value in found}, number


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_names_that_pages_give_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for name in sorted(set(re.findall(r"`specattn((?:\.\w+)+)[`(]", text))):
        found, at = import_module("specattn"), "specattn"
        for part in name.strip(".").split("."):
            at = f"{at}.{part}"
            try:
                found = getattr(found, part, None) or import_module(at)
            except ModuleNotFoundError as missing:
                if missing.name != "xgrammar":  # an extra need not be installed
                    raise
                break


def test_the_reference_lists_the_names_at_the_top():
    page = (ROOT / "docs" / "api" / "index.md").read_text().split("## Names at the top")[1]
    assert set(re.findall(r"`(\w+)`", page)) - {"specattn"} == set(specattn.__all__)


def test_pictures_are_those_of_the_code():
    page = (ROOT / "docs" / "shapes.md").read_text()
    for request, prefix in enumerate((3, 5)):
        column = slice(0, 32) if request == 0 else slice(32, None)
        for picture in (
            inspect.tree(TREE, request=request),
            inspect.mask(TREE.words[request], prefix),
        ):
            lines = [line[column].rstrip() for line in page.splitlines()]
            drawn = picture.splitlines()
            assert drawn in [lines[at : at + len(drawn)] for at in range(len(lines))]


def test_options_exist():
    commands = get_command(app).commands.values()
    known = {name for command in commands for param in command.params for name in param.opts}
    known |= {"--help", "--version"}
    for name in (
        "README.md",
        "docs/quick_start.md",
        "docs/numerics.md",
        "docs/own_loop.md",
        "docs/adaptive.md",
        "docs/models.md",
    ):
        text = re.sub(r"pip install .*", "", (ROOT / name).read_text())
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
            assert option in known, f"{name}: {option}"


def test_the_changelog_knows_the_version():
    assert f"## [{specattn.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
