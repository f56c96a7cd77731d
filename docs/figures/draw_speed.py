"""Draws docs/figures/speed-*.svg and writes docs/performance.md, all from results/speed-*.json.

What is written by hand of that page is in docs/performance.in.md.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logdepth.atomic import write_text
from logdepth.drawing import COLOURS, FAINT, INK, MARKERS, house_style, new_figure

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.speed import bars  # noqa: E402
from benchmarks.speed.sizes import ALIBI, BOTH_NETS, NO_NETS, OURS, SINUSOIDAL, SINUSOIDAL_8, THEIRS  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = dict[str, Any]
Result = dict[str, Any]
STYLES = {
    # AR-GRC, ALiBi and sinusoidal positions as in figures of studies; 1 is AR-MLP-LDRU there.
    name: (COLOURS[number], MARKERS[number])
    for name, number in {BOTH_NETS: 0, NO_NETS: 4, SINUSOIDAL: 3, ALIBI: 2, SINUSOIDAL_8: 5}.items()
}
VERDICTS = {"stretch": "**stretch**", "bar": "**met**", "missed": "missed", None: "not measured"}
NOTHING = "*Not measured yet.*"
FIGURES = {
    "forward": "time a token of a forward pass against context length",
    "training": "time and peak memory of a training step",
    "decoding": "tokens a second and bytes of state in decoding",
    "curves": "training loss of the same runs, plain and accelerated",
}


def main() -> None:
    report = latest_report()
    if report is not None:
        for name, figure in drawn(report).items():
            with house_style():
                figure.savefig(Path(__file__).with_name(f"speed-{name}.svg"), metadata={"Date": None})
    write_text(ROOT / "docs" / "performance.md", page(report))


def latest_report(folder: Path = ROOT / "results") -> Report | None:
    """The run that the page shows; None before there is one."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("speed-*.json"))]
    return max((one for one in reports if not one["smoke"]), key=lambda report: report["date"], default=None)


def page(report: Report | None) -> str:
    template = (ROOT / "docs" / "performance.in.md").read_text(encoding="utf-8")

    def filled(place: re.Match[str]) -> str:
        name = place[1]
        if report is None:
            return "" if name.endswith("_figure") else NOTHING
        if name.endswith("_figure"):
            figure = name.removesuffix("_figure")
            return f"![{FIGURES[figure]}](figures/speed-{figure}.svg)"
        return SECTIONS[name](report)

    text = re.sub(r"\{\{(\w+)\}\}", filled, template)
    generated = "<!-- made by docs/figures/draw_speed.py from performance.in.md and results/: edit those -->\n"
    return generated + re.sub(r"\n{3,}", "\n\n", text)


def results(report: Report, part: str) -> list[Result]:
    """What a part measured, without what failed."""
    return bars.fitting(report["parts"].get(part, {"results": []})["results"])


def measured(report: Report) -> dict[str, list[Result]]:
    return {name: part["results"] for name, part in report["parts"].items()}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown; the first column to the left, the others to the right."""
    head, rows = list(head), [list(row) for row in rows]
    if not rows:
        return NOTHING
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Three digits or so, as a table wants them."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def ratio(row: Result) -> str:
    """A digit more where three would not tell which side of the bar it is on."""
    near = row["ratio"] is not None and abs(row["ratio"] / row["bar"] - 1) < 0.01
    return f"{row['ratio']:.4g}" if near else number(row["ratio"])


def machine(report: Report) -> str:
    facts, clocks = report["machine"], report["clocks"]
    undone = [
        f"{name}: {failed} of {len(part['results'])} measurements failed"
        for name, part in report["parts"].items()
        if (failed := sum("failed" in one for one in part["results"]))
    ]
    text = (
        f"The run of {report['date']}: one {facts['device']}, torch {facts['torch']}, CUDA {facts['cuda']}, "
        f"Triton {facts.get('triton', 'none')}, Python {facts['python']}; its parts took "
        + ", ".join(f"{part['seconds']:.0f} s ({name})" for name, part in report["parts"].items())
        + "."
    )
    if clocks["after"]:
        during = {name: one["clocks"]["clocks.sm"] for name, one in report["parts"].items() if one.get("clocks")}
        text += f" Driver {clocks['after'].get('driver_version')}."
        if during:
            listed = ", ".join(f"{name} {clock}" for name, clock in during.items())
            text += f" Clock of the processors just after each part, when they may idle: {listed}."
    later = {
        name: part["date"]
        for name, part in report["parts"].items()
        if part.get("date", report["date"]) != report["date"]
    }
    text += f" Measured later: {', '.join(f'{name} on {date}' for name, date in later.items())}." if later else ""
    notes = {
        note: None for part in report["parts"].values() for one in part["results"] for note in one.get("notes", ())
    }
    text += f" Not done: {'; '.join(undone)}." if undone else ""
    return text + (f" Our models ran without some of their CUDA graphs: {'; '.join(notes)}." if notes else "")


def summary(report: Report) -> str:
    """One line a bar, with the worst of each model's ratios; ours that recompute are left to the details."""
    lines = []
    for what, rows in by_bar(report).items():
        shown = [row for row in rows if "recomputing" not in row["model"]]
        sign = "≤" if rows[0]["at_most"] else "≥"
        stretch = "" if rows[0]["stretch"] is None else f"{sign} {number(rows[0]['stretch'])}"
        with_nets = [row for row in shown if not row["model"].startswith(NO_NETS)]
        without = [row for row in shown if row["model"].startswith(NO_NETS)]
        lines.append([what, f"{sign} {number(rows[0]['bar'])}", stretch, _worst(with_nets), _worst(without)])
    return table(("the worst ratio of each model, not recomputing", "bar", "stretch", "both nets", "no nets"), lines)


def _worst(rows: list[Result]) -> str:
    """Not measured, if any of them is not: it could have been the worst."""
    if not rows:
        return ""
    if any(row["ratio"] is None for row in rows):
        return VERDICTS[None]
    row = (max if rows[0]["at_most"] else min)(rows, key=lambda row: row["ratio"])
    return f"{ratio(row)}, {VERDICTS[row['met']]}"


def by_bar(report: Report) -> dict[str, list[Result]]:
    whats = dict.fromkeys(row["what"] for row in report["rows"])
    return {what: [row for row in report["rows"] if row["what"] == what] for what in whats}


def verdicts(report: Report) -> str:
    parts = []
    for what, rows in by_bar(report).items():
        sign = "≤" if rows[0]["at_most"] else "≥"
        stretch = "" if rows[0]["stretch"] is None else f", stretch {sign} {number(rows[0]['stretch'])}"
        lines = [
            [
                row["model"],
                row["against"],
                *("–" if row[whose] is None else f"{number(row[whose])} {row['unit']}" for whose in ("ours", "theirs")),
                ratio(row),
                VERDICTS[row["met"]],
            ]
            for row in rows
        ]
        head = ("model", "against", "ours", "theirs", "ratio", "verdict")
        parts.append(f"**{what}**: bar {sign} {number(rows[0]['bar'])}{stretch}\n\n{table(head, lines)}")
    return "\n\n".join(parts) or NOTHING


def forward(report: Report) -> str:
    found, everything = results(report, "forward"), measured(report)
    contexts = sorted({one["context"] for one in found})
    rows = []
    for model in (*OURS, *THEIRS):
        rows.append([model, *_cells(found, contexts, model, lambda one: one["milliseconds"])])
        if model in OURS:
            for kind, words in bars.FLOORS.items():
                floor = lambda one, kind=kind: bars.floor_milliseconds(everything, one.get(f"flops_{kind}"))  # noqa: E731
                alone = lambda one, kind=kind: one.get(f"products_{kind}", {}).get("milliseconds")  # noqa: E731
                rows.append([f"its floor, {words}", *_cells(found, contexts, model, floor)])
                rows.append([f"its products alone, {words}", *_cells(found, contexts, model, alone)])
    tokens = max((one["tokens"] for one in found if one["model"] in THEIRS), default=0)
    longest = f"; {contexts[-1]:,} in one row in the last column" if contexts and contexts[-1] > tokens else ""
    note = f"Milliseconds of {tokens:,} tokens (as near as whole rows come) in rows of a length{longest}."
    return f"{note}\n\n{table(['', *(f'{one:,}' for one in contexts)], rows)}"


def _cells(found: list[Result], contexts: list[int], model: str, value: Callable[[Result], float | None]) -> list[str]:
    cells = []
    for context in contexts:
        fitting = bars.fitting(found, model=model, context=context)
        cells.append(number(value(fitting[0])) if fitting else "–")
    return cells


def training(report: Report) -> str:
    found = sorted(results(report, "training"), key=lambda one: one["context"])
    return table(("", "step", "ms", "quartiles", "tokens/s", "peak memory, MiB"), (_training_row(one) for one in found))


def training_floor(report: Report) -> str:
    everything = measured(report)
    rows = []
    for one in results(report, "training"):
        if "products_as_run" in one:
            floors = [bars.floor_milliseconds(everything, one[f"flops_{kind}"]) for kind in bars.FLOORS]
            alone = [one[f"products_{kind}"]["milliseconds"] for kind in bars.FLOORS]
            cells = (one["milliseconds"], *floors, *alone)
            rows.append([one["model"], f"{one['batch']}×{one['context']:,}", *map(number, cells)])
    words = bars.FLOORS.values()
    head = ["ms", "step", "measured", *(f"floor, {one}" for one in words), *(f"products alone, {one}" for one in words)]
    return table(head, rows)


def large(report: Report) -> str:
    found = results(report, "large")
    head = ("97.4M, vocabulary 50,000", "step", "ms", "quartiles", "tokens/s", "peak memory, MiB", "TFLOP counted")
    return table(head, ([*_training_row(one), number(1e-12 * one["flops_as_run"])] for one in found))


def _training_row(one: Result) -> list[str]:
    return [
        variant(one),
        f"{one['batch']}×{one['context']:,}",
        number(one["milliseconds"]),
        " – ".join(number(quartile) for quartile in one["quartiles"]),
        number(one["tokens_per_second"]),
        number(mebibytes(one)),
    ]


def variant(one: Result) -> str:
    extra = "recomputing" if one.get("recompute") else one.get("loss")
    return f"{one['model']}, {extra}" if extra else str(one["model"])


def mebibytes(one: Result) -> float | None:
    return None if one["peak_bytes"] is None else one["peak_bytes"] / 2**20


def decoding(report: Report) -> str:
    rows = [
        [
            one["model"],
            str(one["batch"]),
            places_of(one),
            number(1e3 * one["milliseconds"]),
            number(one["tokens_per_second"]),
            number(one["state_bytes"]),
        ]
        for one in sorted(results(report, "decoding"), key=lambda one: one["batch"])
    ]
    return table(("", "batch", "tokens before", "µs a step", "tokens/s", "bytes of state"), rows)


def places_of(one: Result) -> str:
    """How many tokens the rows had read."""
    return f"{one['absorbed']:,}" + (f" ± {one['spread']}" if one["spread"] else "")


def startup(report: Report) -> str:
    rows = (
        [f"caches of compiled kernels {one['caches']}", *(number(one["all_steps_seconds"][step]) for step in (0, -1))]
        for one in results(report, "startup")
    )
    return table(("seconds from process start to the end of", "the first step", "the first replayed step"), rows)


def rates(report: Report) -> str:
    rows = [
        ["×".join(f"{side:,}" for side in one["shape"]), number(1e-12 * one["flops_per_second"]) + " TFLOP/s"]
        if one["what"] == "product"
        else ["copy, bytes read and written", number(1e-12 * one["bytes_per_second"]) + " TB/s"]
        for one in results(report, "rates")
    ]
    return table(("bfloat16 matrix product", "reached"), rows)


SECTIONS: dict[str, Callable[[Report], str]] = {
    "machine": machine,
    "summary": summary,
    "verdicts": verdicts,
    "forward": forward,
    "training": training,
    "training_floor": training_floor,
    "large": large,
    "decoding": decoding,
    "startup": startup,
    "rates": rates,
    "same_results": lambda _: same_results(),
}
"""What stands at `{{name}}` in the template."""


def comparison() -> Report:
    """What benchmarks/accelerated.py found."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "results").glob("accelerated-*.json")]
    if not reports:
        sys.exit("no results/accelerated-*.json: run benchmarks/accelerated.py first")
    found: Report = max(reports, key=lambda report: str(report["environment"]))
    return found


def same_results() -> str:
    found = comparison()
    rows = [
        [f"{one['context']:,}", f"{one['plain']:.4f}", f"{one['accelerated']:.4f}", f"{one['ratio']:.6f}"]
        for one in found["evaluations"]
    ]
    ends = [
        [str(one["seed"]), "accelerated" if one["accelerated"] else "plain"]
        + [f"{perplexity:.2f}" for _, perplexity in one["valid_perplexity"]]
        for one in found["runs"]
    ]
    steps = [f"after step {step}" for step, _ in found["runs"][0]["valid_perplexity"]]
    return (
        f"`python benchmarks/accelerated.py`: `{found['recipe']}` for {found['steps']} steps. Test perplexity of one "
        "checkpoint (seed 0, trained plain), evaluated both ways:\n\n"
        + table(["context", "plain", "accelerated", "ratio"], rows)
        + "\n\nValidation perplexity of the same runs, trained both ways (same weights and batches at the start; "
        "dropout drops other numbers):\n\n" + table(["seed", "path", *steps], ends)
    )


def drawn(report: Report) -> "dict[str, Figure]":
    return {
        "forward": draw_forward(report),
        "training": draw_training(report),
        "decoding": draw_decoding(report),
        "curves": draw_curves(),
    }


@house_style()
def draw_curves() -> "Figure":
    figure, (axes,) = new_figure(8, 3.8)
    for one in comparison()["runs"]:
        steps, losses = zip(*one["loss"], strict=True)
        style = {
            "ls": "-" if one["accelerated"] else "--",
            "c": COLOURS[2 * one["seed"] + one["accelerated"]],
            "lw": 1.2,
        }
        path = "accelerated" if one["accelerated"] else "plain"
        axes.plot(steps, losses, label=f"seed {one['seed']}, {path}", **style)
    axes.set_xlabel("steps")
    axes.set_ylabel("training loss, nats a token")
    axes.legend(fontsize=8.5)
    return figure


@house_style()
def draw_forward(report: Report) -> "Figure":
    figure, (axes,) = new_figure(8, 4.6)
    found, everything = results(report, "forward"), measured(report)
    for model, (colour, marker) in STYLES.items():
        ones = sorted(bars.fitting(found, model=model), key=lambda one: one["context"])
        places = [one["context"] for one in ones]
        heights = [_nanoseconds(one, one["milliseconds"]) for one in ones]
        axes.plot(places, heights, marker, ls="-", c=colour, label=model)
        floors = [bars.floor_milliseconds(everything, one.get("flops_every_token")) for one in ones]
        if model in OURS and floors and None not in floors:
            heights = [_nanoseconds(one, floor or 0) for one, floor in zip(ones, floors, strict=True)]
            axes.plot(places, heights, ls=":", c=colour, label=f"floor of {model}, leaves of every token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens in a row")
    axes.set_ylabel("nanoseconds a token")
    axes.set_xticks([512, 2976, 8192, 65_536, 1_048_576])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(fontsize=8.5)
    return figure


def _nanoseconds(one: Result, milliseconds: float) -> float:
    return 1e6 * milliseconds / float(one["tokens"])


@house_style()
def draw_training(report: Report) -> "Figure":
    """The faster loss of each Transformer."""
    figure, (times, memory) = new_figure(10, 4.6, columns=2)
    found = results(report, "training")
    best: list[Result] = []
    for batch, context in sorted({(one["batch"], one["context"]) for one in found}, key=lambda shape: shape[1]):
        for model in (*OURS, *THEIRS):
            for recompute in (False, True) if model in OURS else (None,):
                facts = {"model": model, "batch": batch, "context": context, "recompute": recompute}
                best += filter(None, [bars.fastest(bars.fitting(found, **facts))])
    names = [f"{one['batch']}×{one['context']:,}, {variant({**one, 'loss': None})}" for one in best]
    colours = [STYLES[one["model"]][0] for one in best]
    _bars(times, names, [one["milliseconds"] for one in best], colours, "milliseconds a training step")
    _bars(memory, [""] * len(best), [mebibytes(one) or 0 for one in best], colours, "MiB at the peak")
    return figure


@house_style()
def draw_decoding(report: Report) -> "Figure":
    figure, (speed, state) = new_figure(10, 3.6, columns=2)
    found = sorted(results(report, "decoding"), key=lambda one: one["batch"])
    names = [f"batch {one['batch']} after {places_of(one)}, {one['model']}" for one in found]
    colours = [STYLES[one["model"]][0] for one in found]
    _dots(speed, names, [one["tokens_per_second"] for one in found], colours, "tokens a second")
    _dots(state, [""] * len(found), [one["state_bytes"] for one in found], colours, "bytes of state")
    return figure


def _dots(axes: "Axes", names: list[str], values: list[float], colours: list[str], label: str) -> None:
    """On a logarithmic axis, where the length of a bar would mean nothing."""
    axes.scatter(values, range(len(values)), c=colours, s=45, zorder=3)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    for place, value in enumerate(values):
        axes.annotate(f"   {shortened(value)}", (value, place), va="center", fontsize=7.5, color=INK)
    axes.margins(x=0.25, y=0.1)


def shortened(value: float) -> str:
    for size, sign in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{sign}"
    return f"{value:.3g}"


def _bars(axes: "Axes", names: list[str], values: list[float], colours: list[str], label: str) -> None:
    axes.barh(range(len(values)), values, color=colours)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)
    for place, value in enumerate(values):
        axes.annotate(f" {number(value)}", (value, place), va="center", fontsize=7.5, color=INK)
    axes.margins(x=0.18)
    axes.spines["left"].set_color(FAINT)


if __name__ == "__main__":
    main()
