"""Writes docs/results.md, its figures docs/figures/results-*.svg and the README's table, all from results/.

What is written by hand of that page is in docs/results.in.md. What is not there yet is said to be so, in one line.
"""

import argparse
import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from logdepth.associativity import LAWS, Associativity, Distance
from logdepth.associativity import drawn as associativity_drawn
from logdepth.atomic import read_json, write_text
from logdepth.drawing import save_svg
from logdepth.errors import UserError
from logdepth.report.content import by_row, caveat, device_of, paper_numbers, tables, three_units, title_of
from logdepth.report.figures import draw_contexts, draw_positions, draw_times, draw_training, side_by_side
from logdepth.report.table import Cell, Spread, Table, as_markdown
from logdepth.results import Results, RunResult, TimingResult, read_results, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panels = dict[str, Callable[[Axes], None]]

ROOT = Path(__file__).parent.parent.parent
TEMPLATE = ROOT / "docs" / "results.in.md"
STUDIES = {
    "wikitext2": "WikiText-2, paper's settings",
    "wikitext2-tuned": "WikiText-2, tuned",
    "wikitext2-tuned-deep": "WikiText-2, tuned, deeper",
    "wikitext2-post-merge": "WikiText-2, net on all merges",
    "ptb": "PTB, V = 1.5k",
    "ptb-1k": "PTB, V = 1k",
    "ptb-tuned": "PTB, tuned",
    "webmix": "webmix",
}
"""Folder of results/ → name in tables. A folder NAME-MORE is shown with NAME: each config of a model needs its own."""
IN_README = ("wikitext2", "wikitext2-tuned")
NO_STUDIES = {"demo", "sweeps", "associativity"}
TRAINED, LONGEST = 512, 2976
SHOWN_LENGTHS = (32, 160, TRAINED, 1056, 2080, LONGEST)
"""Of the 25 that were measured; where one was not, the nearest."""
NOTHING = "*Not run yet.*"
VERDICTS = {"stretch": "**stretch**", "bar": "**met**", "missed": "missed"}
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"


class Kept(NamedTuple):
    """All that results/ holds."""

    folder: Path
    studies: dict[str, Results]
    """In the order of `STUDIES`; those that are not in it last."""
    sweeps: dict[str, dict[str, Any]]
    associativity: dict[str, Associativity]


class Plan(NamedTuple):
    """A figure that is to be drawn."""

    caption: str
    source: str
    """Names the data, by a hash: a figure of other data is told by it without being drawn again."""
    draw: "Callable[[], Figure]"


class Finding(NamedTuple):
    """What a study says of a bar."""

    text: str
    value: float | None = None
    """To be judged, where there is something to judge."""


Find = Callable[[list[RunResult]], Finding | None]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What was to be reached, and how to tell from a study's runs. Lower is better."""

    what: str
    paper: str
    wanted: str
    hoped: str = ""
    bar: float | None = None
    stretch: float | None = None
    studies: tuple[str, ...]
    find: Find
    every: bool = False
    """Whether every study must reach it; else it is enough that one does."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder of result files")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where results.md and figures/ go")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="whose table is written")
    given = parser.parse_args(arguments)
    try:
        kept = read_kept(given.results)
        readme = with_block(given.readme.read_text(encoding="utf-8"), readme_block(kept))
        planned = plans(kept)
        for name, plan in planned.items():
            save_svg(plan.draw(), figure_path(given.docs, name), plan.source)
        for file in (given.docs / "figures").glob("results-*.svg"):
            if file not in {figure_path(given.docs, name) for name in planned}:
                file.unlink()
        write_text(given.docs / "results.md", page(kept))
        write_text(given.readme, readme)
    except UserError as error:
        sys.exit(f"draw_results: {error}")


def figure_path(docs: Path, name: str) -> Path:
    return docs / "figures" / f"results-{name}.svg"


def read_kept(folder: Path) -> Kept:
    known = list(STUDIES)
    names = [
        one.name for one in folder.iterdir() if one.is_dir() and one.name not in NO_STUDIES and any(one.glob("*.json"))
    ]
    names.sort(key=lambda name: (known.index(home) if (home := home_of(name)) else len(known), name))
    return Kept(
        folder,
        {name: read_results(folder / name) for name in names},
        {path.stem: _sweep(path) for path in sorted((folder / "sweeps").glob("*.json"))},
        {
            path.stem: Associativity.from_dict(read_json(path), str(path))
            for path in sorted((folder / "associativity").glob("*.json"))
        },
    )


def home_of(name: str) -> str | None:
    """The study with which a folder is shown: its own, or the longest that its name goes on from."""
    return max((study for study in STUDIES if f"{name}-".startswith(f"{study}-")), key=len, default=None)


def label_of(name: str) -> str:
    home = home_of(name)
    more = "" if home is None else name.removeprefix(home).strip("-").replace("-", " ")
    return name if home is None else f"{STUDIES[home]}, {more}" if more else STUDIES[home]


def _sweep(path: Path) -> dict[str, Any]:
    saved = read_json(path)
    if not isinstance(saved, dict) or not {"recipe", "space", "config", "best", "trials"} <= saved.keys():
        raise UserError(f"{path} is not the sweep.json of a sweep; move it away")
    return saved


def page(kept: Kept) -> str:
    def filled(place: re.Match[str]) -> str:
        part, _, study = place[1].partition(":")
        return study_section(kept, study) if part == "study" else SECTIONS[part](kept)

    text = re.sub(r"\{\{([\w:-]+)\}\}", filled, TEMPLATE.read_text(encoding="utf-8"))
    generated = "<!-- made by docs/figures/draw_results.py from results.in.md and results/: edit those -->\n"
    return generated + re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def headline(kept: Kept) -> str:
    rows = list(headline_rows(kept.studies))
    if not rows:
        return NOTHING
    note = (
        f"At {TRAINED} tokens, the length of training; means over seeds ± standard deviation. The paper's numbers are "
        "perplexities a token, and stand here where text and vocabulary may be the same."
    )
    heads = ("study", "model", *HEADLINE_HEADS, "paper")
    return _markdown(Table(name="headline", title="", note=note, heads=heads, rows=tuple(rows)))


HEADLINE_HEADS = (
    "token perplexity",
    "word perplexity",
    "bits per byte",
    f"at {LONGEST:,} / at {TRAINED}",
    "seeds",
    "parameters",
)


def headline_rows(studies: dict[str, Results]) -> Iterator[tuple[Cell, ...]]:
    """A row a model; the study's name stands at its first."""
    for name, results in studies.items():
        paper, label = paper_numbers(results.runs) if results.runs else {}, label_of(name)
        for row, seeds in by_row(results.runs).items():
            cells = (label, title_of(row), *three_units(seeds), over_trained(seeds))
            yield (*cells, len(seeds), f"{seeds[0].parameters / 1e6:.1f}M", paper.get(row, "–"))
            label = ""


def over_trained(seeds: Sequence[RunResult]) -> Spread | None:
    """Perplexity at the longest context over that at the length of training, seed by seed."""
    ratios = [
        long.token_perplexity / short.token_perplexity
        for run in seeds
        if (long := run.at(LONGEST)) and (short := run.at(TRAINED))
    ]
    return Spread.of(ratios, 3) if ratios else None


def caveats(kept: Kept) -> str:
    """Each once, with the studies that it is for."""
    found: dict[str, list[str]] = {}
    for name, results in kept.studies.items():
        if results.runs:
            found.setdefault(caveat(results.runs), []).append(label_of(name))
    return "\n".join(f"- *{'; '.join(names)}.* {words}" for words, names in found.items())


def bars(kept: Kept) -> str:
    rows = []
    for bar in BARS:
        found = dict(_findings(kept, bar))
        texts = [
            finding.text if len(bar.studies) == 1 else f"{label_of(n)}: {finding.text}" for n, finding in found.items()
        ]
        rows.append(
            (bar.what, bar.paper, bar.wanted, bar.hoped, "<br>".join(texts), verdict(bar, list(found.values())))
        )
    heads = ("what", "paper", "bar", "stretch", "measured", "verdict")
    return _markdown(Table(name="bars", title="", note="", heads=heads, rows=tuple(rows)))


def _findings(kept: Kept, bar: Bar) -> Iterator[tuple[str, Finding]]:
    for name, results in kept.studies.items():
        if home_of(name) in bar.studies and (found := bar.find(results.runs)):
            yield name, found


def verdict(bar: Bar, findings: Sequence[Finding]) -> str:
    if not findings:
        return "not run yet"
    if bar.bar is None:
        return "shown"
    values = [one.value for one in findings if one.value is not None]
    if not values or (bar.every and len(values) < len(findings)):
        return "too few seeds"
    worst = max(values) if bar.every else min(values)
    if bar.stretch is not None and worst <= bar.stretch:
        return VERDICTS["stretch"]
    return VERDICTS["bar" if worst <= bar.bar else "missed"]


def of_model(row: str, value: Callable[[Sequence[RunResult]], Spread | None], most: float = math.inf) -> Find:
    """A number of a model, where it has at most so many million parameters, as tables round them."""

    def find(runs: list[RunResult]) -> Finding | None:
        seeds = by_row(runs).get(row, [])
        found = value(seeds) if seeds and round(seeds[0].parameters / 1e6, 1) <= most else None
        return Finding(str(found), found.mean) if found else None

    return find


def order(runs: list[RunResult]) -> Finding | None:
    """All models, best first."""
    found = sorted(((three_units(seeds)[2], row) for row, seeds in by_row(runs).items()), key=lambda one: one[0].mean)
    return Finding(" < ".join(f"{title_of(row)} {bits}" for bits, row in found)) if len(found) > 1 else None


def below(lower: str, higher: str, fewest: int = 3) -> Find:
    """Every seed of one model below every seed of another: the greatest of its perplexities over the others' least."""

    def find(runs: list[RunResult]) -> Finding | None:
        models = by_row(runs)
        if lower not in models or higher not in models:
            return None
        ours, theirs = ([run.main.token_perplexity for run in models[row]] for row in (lower, higher))
        text = f"{Spread.of(ours)} and {Spread.of(theirs)}"
        enough = min(len(ours), len(theirs)) >= fewest
        return Finding(text, max(ours) / min(theirs) if enough else None)

    return find


def gap(ours: str, theirs: str) -> Find:
    """Bits per byte of one model above those of another."""

    def find(runs: list[RunResult]) -> Finding | None:
        models = by_row(runs)
        if ours not in models or theirs not in models:
            return None
        bits = [three_units(models[row])[2].mean for row in (ours, theirs)]
        return Finding(f"{bits[0] - bits[1]:+.4f} ({bits[0]:.4f} and {bits[1]:.4f})")

    return find


GRC, MLP_LDRU, ALIBI, SINUSOIDAL = "ar-grc", "ar-mlp-ldru", "transformer-alibi", "transformer-sinusoidal"
BARS = (
    Bar(
        what="PTB, AR-GRC of at most 3.5M, bits per byte",
        paper="1.316 if V = 1k, 1.202 if V = 1.5k",
        wanted="≤ 1.30",
        hoped="≤ 1.202",
        bar=1.30,
        stretch=1.202,
        studies=("ptb", "ptb-1k", "ptb-tuned"),
        find=of_model(GRC, lambda seeds: three_units(seeds)[2], most=3.5),
    ),
    Bar(
        what="PTB, order of the four models after tuning, bits per byte",
        paper="sinusoidal < ALiBi < AR-GRC < AR-MLP-LDRU",
        wanted="shown with deviations",
        studies=("ptb-tuned",),
        find=order,
    ),
    Bar(
        what="WikiText-2 `.tokens`, AR-GRC of at most 16.6M, tuned, word perplexity",
        paper="– (raw text: about 418)",
        wanted="≤ 92",
        hoped="≤ 80",
        bar=92,
        stretch=80,
        studies=("wikitext2-tuned", "wikitext2-tuned-deep"),
        find=of_model(GRC, lambda seeds: three_units(seeds)[1], most=16.6),
    ),
    Bar(
        what="WikiText-2, AR-GRC below AR-MLP-LDRU, token perplexity",
        paper="90.74 < 122.81",
        wanted="every seed of 3 below every seed of 3",
        bar=1 - 1e-12,
        studies=("wikitext2", "wikitext2-tuned"),
        find=below(GRC, MLP_LDRU),
        every=True,
    ),
    Bar(
        what=f"AR-GRC, perplexity at {LONGEST:,} / at {TRAINED}, in every study",
        paper="about 1",
        wanted="≤ 1.00",
        hoped="≤ 0.97",
        bar=1.00,
        stretch=0.97,
        studies=tuple(STUDIES),
        find=of_model(GRC, over_trained),
        every=True,
    ),
    Bar(
        what="the same, Transformer with sinusoidal positions",
        paper="rises sharply",
        wanted="shown",
        studies=tuple(STUDIES),
        find=of_model(SINUSOIDAL, over_trained),
    ),
    Bar(
        what="AR-GRC above the Transformer with ALiBi, bits per byte: webmix beside WikiText-2",
        paper="larger on OpenWebText2 than on WikiText-2",
        wanted="shown",
        studies=("wikitext2", "webmix"),
        find=gap(GRC, ALIBI),
    ),
)
"""What we set out to reach. Thresholds are here and nowhere else."""


def study_section(kept: Kept, study: str) -> str:
    found = {name: results for name, results in kept.studies.items() if home_of(name) == study}
    titled = len(found) > 1 or study not in found
    return "\n\n".join(one_study(kept, name, titled=titled) for name in found) or NOTHING


def others(kept: Kept) -> str:
    names = [name for name in kept.studies if home_of(name) is None]
    return "\n\n".join(f"## {name}\n{one_study(kept, name, titled=False)}" for name in names)


def one_study(kept: Kept, name: str, *, titled: bool) -> str:
    made = {table.name: table for table in tables(kept.studies[name])}
    figures = {end: figure_link(kept, f"{name}-{end}") for end in ("lengths", "training", "times")}
    times = [_markdown(_thinned(table)) for key, table in made.items() if key.startswith("times-")]
    parts = [
        f"### {label_of(name)}" if titled else "",
        *(_markdown(made[key]) for key in ("perplexity", "hyperparameters") if key in made),
        figures["lengths"],
        _markdown(_thinned(made["contexts"])) if "contexts" in made else "",
        figures["times"],
        *times,
        figures["training"],
    ]
    return "\n\n".join(part for part in parts if part)


def _thinned(table: Table) -> Table:
    """A few lengths: all would be too many for a page."""
    lengths = [row[0] for row in table.rows if isinstance(row[0], int)]
    shown = {min(lengths, key=lambda one: abs(one - wanted)) for wanted in SHOWN_LENGTHS}
    if len(shown) == len(lengths):
        return table
    note = f"{table.note} Here are {len(shown)} of {len(lengths)} lengths; the result files have all."
    return replace(table, note=note, rows=tuple(row for row in table.rows if row[0] in shown))


def figure_link(kept: Kept, name: str, folder: str = "figures") -> str:
    plan = plans(kept).get(name)
    return f"![{plan.caption}]({folder}/results-{name}.svg)\n\n*{plan.caption}*" if plan else ""


def plans(kept: Kept) -> dict[str, Plan]:
    """Name → the figures of the page and of the README."""
    found = {}
    for name, (runs, timings) in kept.studies.items():
        source, label = source_of(kept, name), label_of(name)
        if runs:
            bands = "; bands: one standard deviation over seeds" if len({run.config.seed for run in runs}) > 1 else ""
            lengths: Panels = {
                "Perplexity by context length": partial(draw_contexts, runs=runs),
                "Loss by position in the window": partial(draw_positions, runs=runs),
            }
            found[f"{name}-lengths"] = Plan(
                f"{label}: test perplexity by context length, and loss by position in windows of "
                f"{runs[0].positions.context:,} tokens. Dashed: the length of training{bands}.",
                source,
                partial(side_by_side, lengths),
            )
            found[f"{name}-training"] = Plan(
                f"{label}: validation loss in training, a line for every seed.",
                source,
                partial(side_by_side, {"Validation loss in training": partial(draw_training, runs=runs)}),
            )
        if timings:
            found[f"{name}-times"] = Plan(
                f"{label}: time a token by context length; every batch has about as many tokens. Bands: quartiles.",
                source,
                partial(side_by_side, _time_panels(timings)),
            )
    for name, one in kept.associativity.items():
        found[f"associativity-{slug(name)}"] = Plan(
            f"{name}: distances by size of blocks, and perplexity with other trees.",
            source_of(kept, f"associativity/{name}.json"),
            partial(associativity_drawn, one),
        )
    return found | _readme_plans(kept)


def _time_panels(timings: Sequence[TimingResult]) -> "Panels":
    """A number where two sittings were on a device of one name."""
    return {
        f"Forward pass, {device_of(one)}" + (f" ({number})" if number else ""): partial(draw_times, result=one)
        for number, one in enumerate(timings)
    }


def _readme_plans(kept: Kept) -> dict[str, Plan]:
    studies = {name: kept.studies[name] for name in IN_README if name in kept.studies}
    found = {}
    panels: Panels = {label_of(name): partial(draw_contexts, runs=runs) for name, (runs, _) in studies.items() if runs}
    if panels:
        source = "; ".join(source_of(kept, name) for name in studies)
        caption = "Test perplexity against context length; dashed: the length of training"
        found["perplexity"] = Plan(caption, source, partial(side_by_side, panels))
    timed = {name: results.timings for name, results in studies.items() if results.timings}
    if timed:
        name, timings = next(iter(timed.items()))
        on_gpu = [one for one in timings if one.environment["device"] != "cpu"]
        caption = "Time a token of a forward pass against context length"
        drawing = partial(side_by_side, _time_panels((on_gpu or timings)[:1]))
        found["time"] = Plan(caption, source_of(kept, name), drawing)
    return found


def source_of(kept: Kept, name: str) -> str:
    """A file or folder of results/, and a hash of what is in it."""
    path, total = kept.folder / name, hashlib.sha256()
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return f"results/{name} {total.hexdigest()}"


def sweeps(kept: Kept) -> str:
    return "\n\n".join(_markdown(_sweep_table(name, one)) for name, one in kept.sweeps.items()) or NOTHING


def _sweep_table(name: str, sweep: dict[str, Any]) -> Table:
    best, train = sweep["best"], sweep["config"]["train"]
    states = [trial["state"] for trial in sweep["trials"]]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    length = f"{train['max_steps']:,} steps" if train["max_steps"] else f"{train['epochs']} epochs"
    rows = [
        (field, _where(one), "–" if best is None else _value(best["params"].get(field)))
        for field, one in sweep["space"].items()
    ]
    ended = "" if best is None else f" Best: trial {best['trial']}, validation loss {best['loss']:.4f}."
    return Table(
        name=name,
        title=f"{name}: {len(states)} trials",
        note=f"{counted}. A trial spans {length} unless that is searched.{ended}",
        heads=("field", "searched", "best"),
        rows=tuple(rows),
    )


def _where(one: Any) -> str:
    if isinstance(one, list):
        return ", ".join(map(_value, one))
    ends = f"{_value(one['low'])} to {_value(one['high'])}"
    step = "" if one["step"] is None else f", in steps of {_value(one['step'])}"
    return f"{ends}, logarithmic" if one["log"] else ends + step


def _value(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def associativity(kept: Kept) -> str:
    parts = []
    for name, found in kept.associativity.items():
        parts += [
            figure_link(kept, f"associativity-{slug(name)}"),
            _markdown(_distances(name, found)),
            _markdown(_trees(name, found)),
        ]
    return "\n\n".join(parts) or NOTHING


def _distances(name: str, found: Associativity) -> Table:
    """A row for each size of blocks in each layer, three columns for each law."""
    laws = [law for law in LAWS if any(one.law == law for one in found.distances)]
    rows: dict[tuple[int, int], dict[str, Distance]] = {}
    for one in found.distances:
        rows.setdefault((one.layer, one.level), {})[one.law] = one
    deep = found.num_layers > 1
    heads = [
        f"{law}: {what}" if len(laws) > 1 else what
        for law in laws
        for what in ("distance", "influence", "untrained distance")
    ]
    return Table(
        name=f"distances-{name}",
        title=f"{name}: distance from associative",
        note=f"{found.num_windows} windows of {found.context:,} tokens; ± standard error. Untrained: mean over seeds ± "
        "deviation." + (f" Laws: {'; '.join(f'*{law}* {LAWS[law]}' for law in laws)}." if len(laws) > 1 else ""),
        heads=(*(["layer"] if deep else []), "tokens in a block", *heads),
        rows=tuple(
            (
                *([layer + 1] if deep else []),
                1 << level,
                *(cell for law in laws for cell in _cells(found, by_law.get(law))),
            )
            for (layer, level), by_law in rows.items()
        ),
    )


def _cells(found: Associativity, one: Distance | None) -> Iterable[Cell]:
    if one is None:
        return None, None, None
    untrained = found.over_seeds(one)
    beside = None if untrained is None else Spread(untrained.distance, untrained.deviation, 3)
    return Spread(one.distance, one.error, 3), Spread(one.influence, None, 3), beside


def _trees(name: str, found: Associativity) -> Table:
    rows = tuple(
        (
            tree,
            Spread(one.whole.token_perplexity, None),
            Spread(found.over_scan(tree), found.error_over_scan(tree), 4),
            Spread(one.whole.bits_per_byte, None, 4),
        )
        for tree, one in found.trees.items()
    )
    heads = ("tree", "token perplexity", "over the scan's", "bits per byte")
    return Table(
        name=f"trees-{name}",
        title=f"{name}: other trees",
        note="± standard error over parts of the text.",
        heads=heads,
        rows=rows,
    )


def origins(kept: Kept) -> str:
    lines = [f"- *{label_of(name)}*, `results/{name}/`: {_origin(results)}" for name, results in kept.studies.items()]
    return "\n".join(lines) or NOTHING


def _origin(results: Results) -> str:
    """One line: what was typed, which seeds, on what, when, how long."""
    runs, timings = results
    commands = dict.fromkeys([run.made.command for run in runs] + [timing.made for timing in timings])
    environments = [run.environment for run in runs] + [timing.environment for timing in timings]
    devices, torches = ({str(one.get(fact)): None for one in environments} for fact in ("device", "torch"))
    facts = [" · ".join(f"`{command}`" for command in commands)]
    if runs:
        seeds, days = sorted({run.config.seed for run in runs}), sorted({run.made.at[:10] for run in runs})
        hours = sum(run.made.training_seconds for run in runs) / 3600
        facts += [f"seeds {' '.join(map(str, seeds))}", f"{len(runs)} runs, {hours:.2g} hours of training"]
        facts += [days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"]
    return "; ".join([*facts, ", ".join(devices), f"torch {', '.join(torches)}"]) + "."


SECTIONS: dict[str, Callable[[Kept], str]] = {
    "headline": headline,
    "caveats": caveats,
    "bars": bars,
    "others": others,
    "sweeps": sweeps,
    "associativity": associativity,
    "origins": origins,
}
"""What stands at `{{name}}` in the template, besides `{{study:NAME}}`."""


def readme_block(kept: Kept) -> str:
    """The table and figures of the README."""
    rows = [row[:-1] for row in headline_rows({name: kept.studies[name] for name in IN_README if name in kept.studies})]
    if not rows:
        return NOTHING + "\n"
    table = _markdown(
        Table(name="readme", title="", note="", heads=("study", "model", *HEADLINE_HEADS), rows=tuple(rows))
    )
    planned = plans(kept)
    links = [
        f"![{planned[one].caption}](docs/figures/results-{one}.svg)" for one in ("perplexity", "time") if one in planned
    ]
    return "\n\n".join([table.strip(), *links]) + "\n"


def with_block(readme: str, block: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"the README has no place for the table: it must hold {BEGIN.strip()} and {END}")
    return before + begin + block + end + after


def _markdown(table: Table) -> str:
    """Without a title where the page has one."""
    return as_markdown(table).removeprefix("****").strip()


if __name__ == "__main__":
    main()
