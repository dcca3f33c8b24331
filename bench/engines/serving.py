"""SGLang's server under load, by SGLang's own bench: its EAGLE-3 beside our steps.

Dummy weights of 8B and forced acceptance, as in `bench.engines`; prompts of random tokens, and a
tokenizer in which every id has a text, without which no token would be streamed. With ``--pair`` it
is the shipped pair, and nothing is forced. `bench.engines.served` loads published models.

    python -m bench.engines.serving --out FOLDER
    python -m bench.engines.serving --table FOLDER/serving.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import urlopen

from bench.engines.cells import FUSED, Job, write_models
from bench.engines.sglang_side import FORCED, LAYERS, force, options
from bench.shipped import PAIR
from bench.suite import tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIDES = ("fa3", FUSED)
CLIENTS = (1, 8, 32, 64)
PROMPT, ANSWER = 1024, 256
# requests of each client, and the fewest of all
EACH, FEWEST = 4, 16
START_SECONDS, LOAD_SECONDS = 300.0, 180.0
# batches whose decode is a graph, for every side alike
BATCHES = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64]
# the bench imports a package for data sets that it does not read here
CLIENT = """
import sys, types
try:
    import datasets
except ImportError:
    sys.modules["datasets"] = found = types.ModuleType("datasets")
    found.load_dataset = None
from sglang.benchmark.serving import cli_main
cli_main()
"""
COLUMNS = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "first token, ms",
    "p99_ttft_ms": "99th",
    "median_itl_ms": "between tokens, ms",
    "p99_itl_ms": "99th",
    "median_tpot_ms": "per token, ms",
}


def flags(found: dict[str, Any]) -> list[str]:
    """Return an engine's arguments as a server's options."""
    out: list[str] = []
    for name, value in found.items():
        option = "--" + name.replace("_", "-")
        if value is False:
            continue
        out.append(option)
        if isinstance(value, list):
            out += map(str, value)
        elif value is not True:
            out.append(str(value))
    return out


def server_options(side: str, setting: str, models: tuple[Path, Path], *, pair: bool) -> list[str]:
    """Return a server's options; sides differ in backend and algorithm alone."""
    places = ((max(CLIENTS), PROMPT + ANSWER),)
    job = Job(side, setting, places, "tokens" if pair else "bench")
    force(job)
    found = options(job, models)
    del found["skip_tokenizer_init"]
    if not pair:
        found["cuda_graph_bs_decode"] = BATCHES
    return flags(found)


def write_tokenizer(model: Path, folder: Path | None = None) -> None:
    """Write a tokenizer of a model of which every id is a word: its number.

    It goes to the model's folder, or to another one: Qwen2's keeps no tokenizer but Qwen2's.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = folder or model
    folder.mkdir(exist_ok=True)
    ids = json.loads((model / "config.json").read_text())["vocab_size"]
    words = {str(token): token for token in range(ids)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@contextmanager
def serving(side: str, arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Run a server of SGLang; give its address once it answers."""
    address = f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}"
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    with launched(command, log) as process:
        await_answer(side, process, address, log, time.time() + START_SECONDS)
        yield address


@contextmanager
def launched(
    command: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; end it and all that it has started."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_answer(
    side: str, process: subprocess.Popen[bytes], address: str, log: Path, until: float
) -> None:
    """Wait until a server answers, which has to be in time."""
    while not answers(address):
        if process.poll() is not None or time.time() > until:
            raise RuntimeError(f"{side} did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.5)


def answers(address: str) -> bool:
    """Return whether a server is up."""
    try:
        with urlopen(f"{address}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def load(address: str, model: Path, clients: int, sizes: tuple[int, int], out: Path) -> None:
    """Have SGLang's bench ask; it appends a line to ``out``."""
    asked = {
        "backend": "sglang",
        "base_url": address,
        "model": model,
        "tokenizer": model,
        "dataset_name": "random-ids",
        "random_input_len": sizes[0],
        "random_output_len": sizes[1],
        "random_range_ratio": 1.0,
        "num_prompts": max(FEWEST, EACH * clients),
        "max_concurrency": clients,
        # what a batch of that size compiles at its first use is not timed
        "warmup_requests": clients,
        "tokenize_prompt": True,
        "disable_tqdm": True,
        "output_file": out,
        "seed": clients,
    }
    command = [sys.executable, "-c", CLIENT, *flags(asked)]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=LOAD_SECONDS)


def measure(side: str, options: argparse.Namespace, models: tuple[Path, Path]) -> None:
    """Start a side's server and load it with every number of clients."""
    out, raw = options.out / "serving.jsonl", options.out / f"raw-{side}.jsonl"
    raw.unlink(missing_ok=True)
    arguments = server_options(side, options.setting, models, pair=options.pair)
    if options.gained is not None:
        os.environ[FORCED] = str(options.gained)
    begin = time.time()
    with serving(side, arguments, options.out / f"server-{side}.log") as address:
        start = time.time() - begin
        print(f"{side} answers after {start:.1f} s", flush=True)
        for clients in options.clients:
            load(address, models[0], clients, (options.prompt, options.answer), raw)
            found = json.loads(raw.read_text().splitlines()[-1])
            kept = {name: found[name] for name in (*COLUMNS, "completed", "accept_length")}
            line = {"side": side, "setting": options.setting, "clients": clients, **kept}
            if not options.pair:
                line["gained"] = float(os.environ[FORCED])
            with out.open("a") as file:
                file.write(json.dumps(line | {"start_s": round(start, 1)}) + "\n")


def table(lines: list[dict[str, Any]]) -> str:
    """Return the measurements as Markdown."""
    rows = [
        [line["setting"], str(line["clients"]), line["side"]]
        + [f"{line[name]:.1f}" for name in COLUMNS]
        for line in sorted(lines, key=lambda one: (one["setting"], one["clients"]))
    ]
    return tables.table(["setting", "clients", "side", *COLUMNS.values()], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of results and logs")
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--setting", choices=("tree", "chain"), default="tree")
    parser.add_argument("--gained", type=float, help="tokens of a step, else the setting's")
    parser.add_argument(
        "--clients",
        nargs="*",
        type=int,
        default=CLIENTS,
        help="how many at once; none: start alone",
    )
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of an answer")
    parser.add_argument("--pair", action="store_true", help="the shipped pair, nothing forced")
    parser.add_argument("--table", type=Path, help="print the table of results")
    options = parser.parse_args(arguments)
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    if options.out is None:
        parser.error("--out is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.pair:
        models = PAIR / "target", PAIR / "draft"
    else:
        models = write_models(options.out / f"models-{LAYERS}", LAYERS)
        write_tokenizer(models[0])
    failed = []
    for side in options.sides:
        try:
            measure(side, options, models)
        except (RuntimeError, OSError, subprocess.SubprocessError):
            traceback.print_exc()
            failed.append(side)
    if (found := options.out / "serving.jsonl").exists():
        main(["--table", str(found)])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
