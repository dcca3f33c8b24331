"""A published model behind servers: SGLang plain, with its EAGLE-3, with our steps; our engine.

Chats about HumanEval's problems, greedy, as long as the model makes them; so many clients at once,
each of whom asks the next one when it has an answer. All servers get the same tokens at
``/v1/completions``, and stream. With 16 bits the share of texts that are plain decoding's of as
many clients is told; with ``--dtype float32`` all have to be. Before a load is timed it runs once,
so that nothing compiles in it, and SGLang forgets its prefixes.

    python -m bench.engines.served --target TARGET --head FOLDER --problems HumanEval.jsonl.gz \
        --seconds 580 --out FOLDER
    python -m bench.engines.served --random --seconds 580 --out FOLDER
    python -m bench.engines.served --report FOLDER/served.jsonl [--page docs/served.md]

With ``--random`` nothing else is needed: weights are random, of Qwen2.5-1.5B's shape, prompts have
75 to 225 random tokens, answers 80 to 160, and every step is made to gain as much as in
`bench.engines`. Lines are written after every load. The same command goes on where the time was up:
what FOLDER/served.jsonl has is not measured again. ``--together 3`` starts three servers at once,
which need room on the device; they are loaded one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request as Post
from urllib.request import urlopen

import torch

from bench.engines import stream_client
from bench.engines.cells import FUSED, OWN, SETTINGS, SPARE, Job, write_shape
from bench.engines.decode_log import intervals
from bench.engines.report import read
from bench.engines.serving import (
    BATCHES,
    CLIENTS,
    EACH,
    FEWEST,
    START_SECONDS,
    await_answer,
    flags,
    launched,
    write_tokenizer,
)
from bench.engines.sglang_side import FORCED
from bench.engines.sglang_side import options as sglang_options
from bench.load.cells import CELLS, SMALL, shape_of
from bench.load.figures import rounded, times
from bench.published import problems
from bench.suite import tables
from bench.suite.machine import machine
from bench.suite.report import MARKED
from specattn.engine.request import Request
from specattn.models import HFTarget

if TYPE_CHECKING:
    from collections.abc import Sequence
    from re import Match

    Line = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """A server.

    Parameters
    ----------
    backend : str
        SGLang's attention, `FUSED` or `OWN`, as of a `Job`.
    setting : str
        A key of `SETTINGS`.
    title : str
        What the table calls it.
    """

    backend: str
    setting: str
    title: str


SIDES = {
    "plain": Side("fa3", "plain", "SGLang, plain"),
    "eagle3": Side("fa3", "tree", "SGLang, EAGLE-3, `fa3`, tree"),
    "eagle3-chain": Side("fa3", "chain", "SGLang, EAGLE-3, `fa3`, chain"),
    "specattn": Side(FUSED, "tree", "SGLang, SPECATTN, tree"),
    "specattn-chain": Side(FUSED, "chain", "SGLang, SPECATTN, chain"),
    "engine": Side(OWN, "tree", "`AsyncEngine`, tree"),
    "engine-chain": Side(OWN, "chain", "`AsyncEngine`, chain"),
    "engine-plain": Side(OWN, "plain", "`AsyncEngine`, plain"),
}
#: What is measured unless it is named, plain decoding first: the others are compared with it.
ASKED = ("plain", "eagle3", "specattn", "specattn-chain", "engine", "engine-chain")
PLAIN = ASKED[0]
# servers that have less than this left are not started
LEAST = 60.0
COLUMNS = {
    "tokens_per_s": ("{:,.0f}", "tokens/s"),
    "over_plain": ("{:.2f}x", "over plain"),
    "ttft_ms": ("{:.1f}", "first token, ms"),
    "ttft_p99_ms": ("{:.1f}", "99th"),
    "itl_ms": ("{:.2f}", "between tokens, ms"),
    "itl_p99_ms": ("{:.2f}", "99th"),
    "gap_p99_ms": ("{:.1f}", "gap, 99th"),
    "accepted_per_step": ("{:.2f}", "tokens/step"),
    "equal_to_plain": ("{:.0%}", "texts of plain"),
}


@dataclass(frozen=True)
class Work:
    """What all servers are asked.

    Parameters
    ----------
    name : str
        Of the model.
    models : tuple of Path
        Folders of a target and its head.
    tokenizer : Path
        That of the target.
    requests : list of Request
        In their order.
    forced : bool
        Whether weights are random, and steps made to gain what `SETTINGS` says.
    """

    name: str
    models: tuple[Path, Path]
    tokenizer: Path
    requests: list[Request]
    forced: bool

    @property
    def longest(self) -> int:
        """The most tokens of a text."""
        return max(len(one.prompt) + one.max_new_tokens for one in self.requests)

    def some(self, clients: int) -> list[Request]:
        """Return as many requests as a number of clients gets."""
        return self.requests[: max(FEWEST, EACH * clients)]


def work_of(options: argparse.Namespace) -> Work:
    """Return what the command line asks for."""
    if options.random:
        shape, cell = shape_of(SMALL), CELLS["1.5b-32"]
        folder = options.out / f"models-{SMALL}"
        models, tokenizer = write_shape(shape, folder), folder / "tokenizer"
        write_tokenizer(models[0], tokenizer)
        cell = replace(cell, count=max(FEWEST, EACH * max(options.clients)))
        requests = cell.requests(shape.target.vocab_size, 0)
        return Work(f"random {shape.name}", models, tokenizer, requests, forced=True)
    from transformers import AutoTokenizer

    target = as_folder(options.target, options.out)
    prompts = problems(options.problems, AutoTokenizer.from_pretrained(target))[: options.count]
    requests = [Request(prompt, options.new) for prompt in prompts]
    return Work(target.name, (target, options.head), target, requests, forced=False)


def as_folder(target: Path, out: Path) -> Path:
    """Return a model's folder, made of its GGUF file if it is one: SGLang reads weights from it."""
    if target.suffix != ".gguf":
        return target
    folder = out / target.stem
    # it is written last
    if not (folder / "tokenizer_config.json").exists():
        model = HFTarget.from_pretrained(str(target), dtype=torch.bfloat16)
        model.restore()
        # plain weights by now, which it would refuse to write
        model.module.hf_quantizer = None
        if hasattr(model.module.config, "quantization_config"):
            del model.module.config.quantization_config
        model.module.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
    return folder


def command_of(side: Side, work: Work, options: argparse.Namespace) -> tuple[list[str], int]:
    """Return what starts a server, and its port; SGLang's differ in their drafts alone."""
    most = max(options.clients)
    job = Job(side.backend, side.setting, ((most, work.longest),))
    asked = sglang_options(job, work.models)
    context = work.longest + SPARE
    if side.backend == OWN:
        own = {"target": work.models[0], "tokenizer": work.tokenizer, "port": asked["port"]}
        own |= {"setting": side.setting, "rows": most, "buckets": batches(most)}
        own |= {"context": context, "dtype": options.dtype, "forced": work.forced}
        own |= {"stream_interval": options.stream_interval}
        own |= {"head": work.models[1]} if side.setting != PLAIN else {}
        return [sys.executable, "-m", "bench.engines.own_server", *flags(own)], asked["port"]
    del asked["skip_tokenizer_init"]
    asked |= {"tokenizer_path": work.tokenizer, "context_length": context}
    asked |= {"cuda_graph_bs_decode": batches(most)}
    asked |= {"stream_interval": options.stream_interval}
    asked |= {"dtype": options.dtype, "disable_prefill_cuda_graph": not options.prefill_graphs}
    if not work.forced:
        asked |= {"load_format": "auto", "disable_radix_cache": False}
    return [sys.executable, "-m", "sglang.launch_server", *flags(asked)], asked["port"]


def batches(most: int) -> list[int]:
    """Return the batches whose steps are graphs, on all sides."""
    return [*(size for size in BATCHES if size < most), most]


def environment_of(side: Side, work: Work) -> dict[str, str]:
    """Return the environment of a server."""
    found = {name: value for name, value in os.environ.items() if name != FORCED}
    steps, _, _, gained = SETTINGS[side.setting]
    forced = {FORCED: str(gained)} if work.forced and steps else {}
    return found | {"SPECATTN_SGLANG_FUSED": "1"} | forced


class Server:
    """A server that runs, and what it has gained since it was last looked at.

    Parameters
    ----------
    name : str
        A key of `SIDES`.
    port : int
        Where it listens.
    log : Path
        What it prints.
    """

    def __init__(self, name: str, port: int, log: Path) -> None:
        self.name, self.port, self.log = name, port, log
        self.side, self.address = SIDES[name], f"http://127.0.0.1:{port}"

    def forget(self) -> None:
        """Have SGLang drop the prefixes that it keeps; our engine keeps none."""
        if self.side.backend != OWN:
            # it waits for requests that are about to end
            with urlopen(Post(f"{self.address}/flush_cache?timeout=10", method="POST")) as answer:
                answer.read()

    def look(self) -> None:
        """Begin to count what steps gain."""
        self._at = self.log.stat().st_size
        self._before = self._counts() if self.side.backend == OWN else {}

    def accepted(self) -> float | None:
        """Return the tokens of a request and step since then; None if the server said nothing."""
        if self.side.backend == OWN:
            counts = {n: count - self._before[n] for n, count in self._counts().items()}
        else:
            # until the log has come to the file
            time.sleep(0.5)
            with self.log.open("rb") as file:
                file.seek(self._at)
                lines = intervals(file.read().decode(errors="replace"))
            counts = {}
            for line in lines:
                counts[line.length] = counts.get(line.length, 0) + line.running
        steps = sum(counts.values())
        return sum(n * count for n, count in counts.items()) / steps if steps else None

    def _counts(self) -> dict[float, int]:
        """Return how often a request of ours gained so many tokens."""
        name, found = 'specattn_gained_total{tokens="', {}
        with urlopen(f"{self.address}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(name):
                    tokens, count = line.removeprefix(name).split('"} ')
                    found[float(tokens)] = int(count)
        return found


def load(server: Server, work: Work, clients: int, until: float) -> tuple[Line, list[str]]:
    """Load a server twice, the first time to warm it up; return a line and the texts.

    Raises
    ------
    TimeoutError
        If the time is up before the answers are there.
    """
    requests = work.some(clients)
    # random texts have no end
    more = {"ignore_eos": True} if work.forced and server.side.backend != OWN else {}

    def ask() -> list[stream_client.Answer]:
        asked = stream_client.load(server.port, requests, clients, more)
        return asyncio.run(asyncio.wait_for(asked, until - time.time()))

    ask()
    server.forget()
    server.look()
    begin = time.perf_counter()
    answers = ask()
    line = rounded({**times(answers, begin), "accepted_per_step": server.accepted()})
    return line, [answer.text for answer in answers]


def measure(
    server: Server, work: Work, options: argparse.Namespace, until: float, **head: Any
) -> None:
    """Load a server with every number of clients that the record lacks, while there is time."""
    record = options.out / "served.jsonl"
    for clients in missing(server.name, options):
        line, texts = load(server, work, clients, until)
        mine, theirs = (
            options.out / f"texts-{name}-{clients}.json" for name in (server.name, PLAIN)
        )
        mine.write_text(json.dumps(texts))
        if theirs.exists() and not work.forced:
            pairs = zip(texts, json.loads(theirs.read_text()), strict=True)
            line["equal_to_plain"] = sum(one == other for one, other in pairs) / len(texts)
        line = {"side": server.name, "clients": clients, "model": work.name, **head, **line}
        print(json.dumps(line), flush=True)
        with record.open("a") as file:
            file.write(json.dumps(line | {"machine": machine(options.commit)}) + "\n")
        if options.dtype == "float32" and line.get("equal_to_plain", 1.0) < 1.0:
            raise RuntimeError(f"{server.name}: texts in float32 are not plain decoding's")


def missing(name: str, options: argparse.Namespace) -> list[int]:
    """Return the numbers of clients of a side that the record lacks."""
    record = options.out / "served.jsonl"
    lines = read(record) if record.exists() else []
    known = {line["clients"] for line in lines if line["side"] == name}
    return [clients for clients in options.clients if clients not in known]


def run(options: argparse.Namespace) -> list[str]:
    """Measure sides while there is time; return those that failed or were left out."""
    until, work = time.time() + options.seconds, work_of(options)
    left: list[str] = []
    sides = [name for name in options.sides if missing(name, options)]
    for at in range(0, len(sides), options.together):
        names = sides[at : at + options.together]
        if until - time.time() < LEAST:
            left += names
            continue
        with ExitStack() as stack:
            servers = started(names, work, options, until, stack)
            left += [name for name in names if name not in servers]
            for name, (server, seconds) in servers.items():
                try:
                    head = {"dtype": options.dtype, "stream_interval": options.stream_interval}
                    measure(server, work, options, until, **head, start_s=seconds)
                except (RuntimeError, OSError, EOFError):
                    traceback.print_exc()
                    left.append(name)
    return left


def started(
    names: Sequence[str],
    work: Work,
    options: argparse.Namespace,
    until: float,
    stack: ExitStack,
) -> dict[str, tuple[Server, float]]:
    """Start servers side by side; return those that answer, and after how many seconds."""
    begin, found, processes = time.time(), {}, {}
    for name in names:
        command, port = command_of(SIDES[name], work, options)
        server = Server(name, port, options.out / f"server-{name}.log")
        environment = environment_of(server.side, work)
        processes[server] = stack.enter_context(launched(command, server.log, environment))
    for server, process in processes.items():
        try:
            late = min(until, begin + START_SECONDS)
            await_answer(server.name, process, server.address, server.log, late)
            found[server.name] = server, round(time.time() - begin, 1)
        except RuntimeError:
            traceback.print_exc()
    return found


def table(lines: Sequence[Line]) -> str:
    """Return the measurements as Markdown."""
    plain = {line["clients"]: line["tokens_per_s"] for line in lines if line["side"] == PLAIN}
    order = list(SIDES)
    rows = []
    for line in sorted(lines, key=lambda one: (one["clients"], order.index(one["side"]))):
        if theirs := plain.get(line["clients"]):
            line = line | {"over_plain": line["tokens_per_s"] / theirs}
        cells = (
            shown.format(line[name]) if line.get(name) is not None else tables.NONE
            for name, (shown, _) in COLUMNS.items()
        )
        rows.append([str(line["clients"]), SIDES[line["side"]].title, *cells])
    return tables.table(["clients", "server", *(head for _, head in COLUMNS.values())], rows)


def report(lines: Sequence[Line]) -> str:
    """Return what was measured, and the table."""
    machines = dict.fromkeys(tables.versions(line["machine"]) for line in lines)
    what = dict.fromkeys(f"{line['model']} in {line['dtype']}" for line in lines)
    return f"{'; '.join(what)}. {'; '.join(machines)}.\n\n{table(lines)}"


def write(page: Path, text: str) -> None:
    """Put a text where a page has its place."""

    def fill(match: Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}\n{text}\n\n{end}" if name == "served" else match[0]

    page.write_text(MARKED.sub(fill, page.read_text()))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="folder or GGUF file of a model")
    parser.add_argument("--head", type=Path, help="folder of its EAGLE-3 head, in SGLang's layout")
    parser.add_argument("--problems", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--random", action="store_true", help="random weights in place of these")
    parser.add_argument("--out", type=Path, help="folder of results and logs")
    parser.add_argument("--seconds", type=float, default=1e4, help="what all may take")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=ASKED)
    parser.add_argument("--clients", nargs="+", type=int, default=CLIENTS, help="how many at once")
    parser.add_argument("--together", type=int, default=1, help="servers that start at once")
    parser.add_argument("--count", type=int, default=164, help="most problems")
    parser.add_argument("--new", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of a part")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--commit", help="what the lines call this version")
    parser.add_argument(
        "--no-prefill-graphs",
        dest="prefill_graphs",
        action="store_false",
        help="SGLang runs prompts without CUDA graphs, which need a compiler",
    )
    parser.add_argument("--report", type=Path, help="print the table of a record")
    parser.add_argument("--page", type=Path, help="and write it into this page")
    options = parser.parse_args(argv)
    if options.report is None:
        if options.out is None:
            parser.error("--out is needed")
        if not options.random and None in (options.target, options.head, options.problems):
            parser.error("--target, --head and --problems are needed, or --random")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    if options.report:
        text = report(read(options.report))
        print(text)
        if options.page:
            write(options.page, text)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    left = run(options)
    if (options.out / "served.jsonl").exists():
        print(table(read(options.out / "served.jsonl")))
    if left:
        raise SystemExit(f"failed, or left out for lack of time: {', '.join(left)}")


if __name__ == "__main__":
    main()
