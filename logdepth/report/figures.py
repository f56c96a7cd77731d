"""Draw the figures of a study from its results."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from logdepth.drawing import COLOURS, FAINT, INK, MARKERS, house_style, new_figure
from logdepth.recipes import ordered_rows
from logdepth.report.content import by_row, device_of, title_of
from logdepth.results import PositionLoss, Results, RunResult, TimingResult, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POSITION_BINS_PER_OCTAVE = 2
Model = TypeVar("Model")


@house_style()
def figures(results: Results) -> "dict[str, tuple[str, Figure]]":
    """Return each figure's caption and figure, by name."""
    found: dict[str, tuple[str, Figure]] = {}
    runs, timings = results.runs, results.timings
    if runs:
        bands = " Bands: one standard deviation over seeds." if len({run.config.seed for run in runs}) > 1 else ""
        trained = " The dashed line is the training length."
        found["perplexity-context"] = (
            f"A curve that stays flat beyond the training length extrapolates; a rising one does not.{trained}{bands}",
            _single("Perplexity by context length", lambda axes: draw_contexts(axes, runs)),
        )
        found["position-loss"] = (
            f"All models read the same windows, so common bumps are due to the text.{trained}{bands}",
            _single("Loss by position in the window", lambda axes: draw_positions(axes, runs)),
        )
        for name in texts_with_positions(runs):
            found[f"position-loss-{slug(name)}"] = (
                f"The same weights on {name}. All models read the same windows.{trained}{bands}",
                _single(
                    f"Loss by position in the window, {name}",
                    lambda axes, name=name: draw_positions(axes, runs, name),  # type: ignore[misc]
                ),
            )
    for number, timing in enumerate(timings):
        found["time-context" + (f"-{number + 1}" if number else "")] = (
            f"Forward pass on {device_of(timing)}; all batches have about the same number of tokens. A flat curve "
            "means time in proportion to length. Bands: quartiles.",
            _single("Time per token by context length", lambda axes, timing=timing: draw_times(axes, timing)),  # type: ignore[misc]
        )
    if runs:
        figure = _single("Validation loss in training", lambda axes: draw_training(axes, runs))
        found["training"] = "One line per seed.", figure
    if runs and timings:
        trained = f"{runs[0].data.corpus}, trained at {runs[0].config.train.context:,} tokens"
        figure = side_by_side(
            {
                trained: lambda axes: draw_contexts(axes, runs),
                f"forward pass, {device_of(timings[0])}": lambda axes: draw_times(axes, timings[0]),
            }
        )
        found["overview"] = "Perplexity and time per token by context length.", figure
    return found


@house_style()
def side_by_side(panels: "Mapping[str, Callable[[Axes], None]]") -> "Figure":
    """Draw panels next to each other with one common legend. `panels` maps each title to a drawing function."""
    figure, axes = new_figure(4.8 * len(panels), 4.2, columns=len(panels))
    for one, (title, draw) in zip(axes, panels.items(), strict=True):
        draw(one)
        one.set_title(title)
    legend_below(figure, columns=2 * len(panels))
    return figure


def draw_contexts(axes: "Axes", runs: Sequence[RunResult]) -> None:
    """Draw test perplexity by context length, one line per model."""
    models = numbered(by_row(runs), runs[0].data.corpus)
    draw_context_lines(axes, [(number, title_of(row), seeds) for number, (row, seeds) in models])


def draw_context_lines(axes: "Axes", lines: Sequence[tuple[int, str, Sequence[RunResult]]]) -> None:
    """Draw test perplexity by context length. A line is its colour number, its label and its runs, one per seed."""
    for number, label, seeds in lines:
        contexts = sorted({one.context for run in seeds for one in run.test})
        values = [[one.token_perplexity for run in seeds if (one := run.at(context))] for context in contexts]
        _line(axes, number, label, contexts, values)
    _mark_training(axes, [run for _, _, seeds in lines for run in seeds])
    axes.set_yscale("log")
    _plain_ticks(axes)
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("test token perplexity")


def draw_positions(axes: "Axes", runs: Sequence[RunResult], text: str | None = None) -> None:
    """Draw loss by position in the window, one line per model, on the test split or on the other text of this name."""
    for number, (row, seeds) in numbered(by_row(runs), runs[0].data.corpus):
        found = [positions for run in seeds if (positions := positions_on(run, text)) is not None]
        binned = [dict(binned_positions(positions)) for positions in found]
        places = sorted(set.intersection(*map(set, binned))) if binned else []
        if places:
            _line(axes, number, title_of(row), places, [[one[place] for one in binned] for place in places])
    _mark_training(axes, runs)
    _plain_ticks(axes)
    axes.set_xlabel("position in the window, tokens")
    axes.set_ylabel("loss, nats per token" if text else "test loss, nats per token")


def positions_on(run: RunResult, text: str | None) -> PositionLoss | None:
    """Return a run's loss by position on the test split, or on the other text of this name; None if it has none."""
    if text is None:
        return run.positions
    return next((other.positions for other in run.others if other.name == text), None)


def texts_with_positions(runs: Sequence[RunResult]) -> list[str]:
    """Return the names of other texts on which some run has its loss by position."""
    return list(dict.fromkeys(other.name for run in runs for other in run.others if other.positions is not None))


def _mark_training(axes: "Axes", runs: Sequence[RunResult]) -> None:
    for trained in {run.config.train.context for run in runs}:
        axes.axvline(trained, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))


def draw_times(axes: "Axes", result: TimingResult) -> None:
    """Draw time per token by context length, one line per model, with bands from quartile to quartile."""
    for number, (_, model) in numbered({model.row: model for model in result.models}, result.corpus):
        contexts = [one.context for one in model.timings]
        tokens = [one.context * one.batch_size for one in model.timings]
        middle = [1e3 * one.milliseconds / count for one, count in zip(model.timings, tokens, strict=True)]
        low = [1e3 * one.lower_quartile / count for one, count in zip(model.timings, tokens, strict=True)]
        high = [1e3 * one.upper_quartile / count for one, count in zip(model.timings, tokens, strict=True)]
        axes.fill_between(contexts, low, high, color=colour_of(number), alpha=0.15, linewidth=0)
        axes.plot(contexts, middle, color=colour_of(number), marker=marker_of(number), label=title_of(model.row))
    axes.set_yscale("log")
    _plain_ticks(axes)
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("microseconds per token")


def draw_training(axes: "Axes", runs: Sequence[RunResult]) -> None:
    """Draw validation loss by training step, one line per run."""
    from matplotlib.ticker import MaxNLocator

    for number, (row, seeds) in numbered(by_row(runs), runs[0].data.corpus):
        for place, run in enumerate(seeds):
            steps, losses = [one.step for one in run.valid_curve], [one.loss for one in run.valid_curve]
            label = title_of(row) if not place else None
            axes.plot(steps, losses, color=colour_of(number), marker=marker_of(number), markersize=3, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss, nats per token")


def _single(title: str, draw: "Callable[[Axes], None]") -> "Figure":
    figure, (axes,) = new_figure()
    draw(axes)
    axes.set_title(title)
    legend_below(figure, columns=2)
    return figure


def legend_below(figure: "Figure", columns: int) -> None:
    """Place one legend below the panels, with each model once."""
    named = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)


def _line(axes: "Axes", number: int, label: str, places: Sequence[int], values: Sequence[Sequence[float]]) -> None:
    """Draw the mean over seeds; with several seeds, add a band of one standard deviation."""
    means = [statistics.mean(one) for one in values]
    if any(len(one) > 1 for one in values):
        spread = [statistics.stdev(one) if len(one) > 1 else 0.0 for one in values]
        low = [mean - one for mean, one in zip(means, spread, strict=True)]
        high = [mean + one for mean, one in zip(means, spread, strict=True)]
        axes.fill_between(places, low, high, color=colour_of(number), alpha=0.15, linewidth=0)
    axes.plot(places, means, color=colour_of(number), marker=marker_of(number), label=label)


def binned_positions(positions: PositionLoss) -> Iterator[tuple[int, float]]:
    """Average loss over bins of positions. Bins widen with the position, because few tokens are at distant ones."""
    parts = list(zip(positions.bin_ends, positions.nats, positions.tokens, strict=True))
    start, first, edge = 0, 0, 1.0
    while first < len(parts):
        edge *= 2 ** (1 / POSITION_BINS_PER_OCTAVE)
        last = first + 1
        while last < len(parts) and parts[last][0] <= round(edge):
            last += 1
        counted = [(loss, count) for _, loss, count in parts[first:last] if loss is not None]
        weight = sum(count for _, count in counted)
        end = parts[last - 1][0]
        if weight:
            yield (start + 1 + end) // 2, sum(loss * count for loss, count in counted) / weight
        start, first = end, last


def _plain_ticks(axes: "Axes") -> None:
    """Scale the length axis by powers of two, and write all numbers without exponents."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        wide, narrow = LogLocator(subs=(1, 2, 5)), LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
        axes.yaxis.set_major_locator(wide if high / low > 12 else narrow if high / low > 3 else MaxNLocator(6))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.tick_params(which="minor", length=0)
    axes.tick_params(colors=INK)


def numbered(rows: "Mapping[str, Model]", corpus: str) -> "Iterator[tuple[int, tuple[str, Model]]]":
    """Iterate over models with their colour numbers. A model has the same number in all figures of a corpus."""
    known = ordered_rows(corpus, rows)
    places = [*known, *(row for row in rows if row not in known)]
    return ((places.index(row), (row, model)) for row, model in rows.items())


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def marker_of(number: int) -> str:
    return MARKERS[number % len(MARKERS)]
