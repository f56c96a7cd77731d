"""The figures of the pages."""

from typing import TYPE_CHECKING, Any

from benchmarks.speed import bars
from benchmarks.speed.sizes import ALIBI, BOTH_NETS, NO_NETS, OURS, SINUSOIDAL, SINUSOIDAL_8, THEIRS
from logdepth.drawing import COLOURS, FAINT, INK, MARKERS, house_style, new_figure
from speed_page.acceleration import comparison
from speed_page.measured import Report, Result, measured, mebibytes, number, results, tokens_read, variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = list[tuple[int, float]]
"""Pairs of step and loss."""
STYLES = {
    # AR-GRC, ALiBi and sinusoidal positions as in figures of studies, where 1 is AR-MLP-LDRU.
    name: (COLOURS[number], MARKERS[number])
    for name, number in {BOTH_NETS: 0, NO_NETS: 4, SINUSOIDAL: 3, ALIBI: 2, SINUSOIDAL_8: 5}.items()
}
FIGURES = {
    "forward": "Time per token of a forward pass against sequence length. Dotted: the floor of our models.",
    "training": "Time and peak memory of a training step. Transformers: the faster of their two losses.",
    "decoding": "Tokens per second and bytes of state in decoding, both on logarithmic axes.",
    "curves": "Training loss of the same runs with both paths, and the difference between the paths.",
}


def hardware(report: Report) -> str:
    """Return the device and the precision, for titles."""
    return f"one {report['machine']['device']}, bfloat16"


def drawn(report: Report) -> "dict[str, Figure]":
    return {
        "forward": draw_forward(report),
        "training": draw_training(report),
        "decoding": draw_decoding(report),
        "curves": draw_curves(),
    }


@house_style()
def draw_curves() -> "Figure":
    """Draw the losses of both paths on the left and their differences on the right, as the losses coincide."""
    figure, (axes, apart) = new_figure(9.5, 4.2, columns=2)
    curves = {(one["seed"], one["accelerated"]): one["loss"] for one in comparison()["runs"]}
    first, *others = sorted({seed for seed, _ in curves})
    for (seed, accelerated), losses in curves.items():
        style = {"ls": "-" if accelerated else "--", "c": COLOURS[seed], "lw": 1.2}
        axes.plot(*zip(*losses, strict=True), label=f"seed {seed}" if accelerated else None, **style)
    for accelerated, label in ((True, "accelerated"), (False, "plain")):
        axes.plot([], [], ls="-" if accelerated else "--", c=INK, lw=1.2, label=label)
    for seed in others:
        label = f"plain, seeds {others[0]}–{others[-1]} minus seed {first}" if seed == others[0] else None
        _draw_apart(apart, curves[seed, False], curves[first, False], label, FAINT, ls=":")
    for seed in (first, *others):
        label = f"seed {seed}, accelerated minus plain"
        _draw_apart(apart, curves[seed, True], curves[seed, False], label, COLOURS[seed], lw=1.8)
    axes.set_ylabel("training loss (nats per token)")
    apart.set_ylabel("difference (nats per token)")
    apart.axhline(0.0, color=INK, linewidth=0.8)
    for one in (axes, apart):
        one.set_xlabel("step")
        one.legend(fontsize=8.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    return figure


def _draw_apart(axes: "Axes", one: Curve, other: Curve, label: str | None, colour: str, **style: Any) -> None:
    steps = [step for step, _ in one]
    axes.plot(steps, [a - b for (_, a), (_, b) in zip(one, other, strict=True)], c=colour, label=label, **style)


@house_style()
def draw_forward(report: Report) -> "Figure":
    figure, (axes,) = new_figure(8, 4.6)
    found, everything = results(report, "forward"), measured(report)
    for model, (colour, marker) in STYLES.items():
        ones = sorted(bars.fitting(found, model=model), key=lambda one: one["context"])
        places = [one["context"] for one in ones]
        heights = [_nanoseconds(one, one["milliseconds"]) for one in ones]
        axes.plot(places, heights, marker, ls="-", c=colour, label=model)
        floors = [bars.floor_milliseconds(everything, one.get("flops_as_run")) for one in ones]
        if model in OURS and floors and None not in floors:
            heights = [_nanoseconds(one, floor or 0) for one, floor in zip(ones, floors, strict=True)]
            axes.plot(places, heights, ls=":", c=colour, label=f"floor of {model}, leaves as run")
    axes.set_title(f"Forward pass, {hardware(report)}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("nanoseconds per token")
    axes.set_xticks([512, 2976, 8192, 65_536, 1_048_576])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(fontsize=8.5)
    return figure


def _nanoseconds(one: Result, milliseconds: float) -> float:
    return 1e6 * milliseconds / float(one["tokens"])


@house_style()
def draw_training(report: Report) -> "Figure":
    """Draw the training steps; of each Transformer, the faster loss."""
    found = results(report, "training")
    best: list[Result] = []
    places: list[float] = []
    shapes = sorted({(one["batch"], one["context"]) for one in found}, key=lambda shape: (shape[1], shape[0]))
    for number_of_shape, (batch, context) in enumerate(shapes):
        for model in (*OURS, *THEIRS):
            for recompute in (False, True) if model in OURS else (None,):
                facts = {"model": model, "batch": batch, "context": context, "recompute": recompute}
                best += filter(None, [bars.fastest(bars.fitting(found, **facts))])
        places += [place + 0.7 * number_of_shape for place in range(len(places), len(best))]  # each shape by itself
    figure, (times, memory) = new_figure(10, 1.0 + 0.26 * len(best), columns=2)
    times.set_title(f"Training step, {hardware(report)}")
    names = [f"{one['batch']}×{one['context']:,}, {variant({**one, 'loss': None})}" for one in best]
    colours = [STYLES[one["model"]][0] for one in best]
    _bars(times, places, names, [one["milliseconds"] for one in best], colours, "milliseconds per training step")
    _bars(memory, places, [""] * len(best), [mebibytes(one) or 0 for one in best], colours, "peak memory (MiB)")
    return figure


@house_style()
def draw_decoding(report: Report) -> "Figure":
    found = sorted(results(report, "decoding"), key=lambda one: (one["batch"], one["absorbed"]))
    figure, (speed, state) = new_figure(10, 1.0 + 0.33 * len(found), columns=2)
    speed.set_title(f"Decoding, {hardware(report)}")
    names = [f"batch {one['batch']}, after {tokens_read(one)}, {one['model']}" for one in found]
    colours = [STYLES[one["model"]][0] for one in found]
    _dots(speed, names, [one["tokens_per_second"] for one in found], colours, "tokens per second")
    _dots(state, [""] * len(found), [one["state_bytes"] for one in found], colours, "state (bytes)")
    return figure


def _dots(axes: "Axes", names: list[str], values: list[float], colours: list[str], label: str) -> None:
    """Draw values as dots: on a logarithmic axis the length of a bar has no meaning."""
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
            return f"{number(value / size)}{sign}"
    return number(value)


def _bars(
    axes: "Axes", places: list[float], names: list[str], values: list[float], colours: list[str], label: str
) -> None:
    axes.barh(places, values, color=colours)
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f" {number(value)}", (value, place), va="center", fontsize=7.5, color=INK)
    axes.margins(x=0.18, y=0.02)
    axes.spines["left"].set_color(FAINT)
