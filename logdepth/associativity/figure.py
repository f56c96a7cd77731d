"""The figure of a study: distances by level, one panel per layer, and on the right perplexity with other trees."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from logdepth import drawing
from logdepth.associativity.outcome import SCAN, Associativity
from logdepth.associativity.triples import LAWS, Law

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IN_WORDS: dict[Law, str] = {
    "up": "up-sweep ⊙",
    "down": "down-sweep ⊙",
    "mixed": "mixed: a ⊙down (b ⊙up c)",
}
LOGARITHMIC_FROM = 3.0
"""Ratio to the scan's perplexity above which the axis is logarithmic, so that small differences stay visible."""

LEAST_SHOWN = 0.05
"""Minimum percentage that the linear scale spans on either side."""


def draw(found: Associativity, path: Path) -> None:
    """Save the figure as `path`.svg and `path`.png."""
    drawing.save(drawn(found), path)


@drawing.house_style()
def drawn(found: Associativity) -> "Figure":
    """Return the figure."""
    figure, axes = drawing.new_figure(4.4 * (1 + found.num_layers), 3.8, columns=1 + found.num_layers)
    for layer, one in enumerate(axes[:-1]):
        _draw_distances(one, found, layer)
    top = max(1.1, *(one.get_ylim()[1] for one in axes[:-1]))
    for one in axes[:-1]:
        one.set_ylim(0, top)
    axes[0].legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    _draw_trees(axes[-1], found)
    return figure


def _draw_distances(axes: "Axes", found: Associativity, layer: int) -> None:
    """Draw one colour per law: solid for the trained model, dashed for untrained ones, dotted for a's influence."""
    here = [one for one in found.distances if one.layer == layer]
    laws = [law for law in LAWS if any(one.law == law for one in here)]
    levels = [one.level for one in here if one.law == laws[0]]
    for law, colour in zip(laws, drawing.COLOURS, strict=False):
        points = [one for one in here if one.law == law]
        values = [one.distance for one in points]
        errors = [one.error or 0.0 for one in points]
        axes.errorbar(levels, values, yerr=errors, color=colour, marker="o", zorder=3)
        if law != "mixed":  # its influence equals that of the law "down"
            axes.plot(levels, [one.influence for one in points], color=colour, linestyle=":")
        untrained = [baseline for one in points if (baseline := found.over_seeds(one))]
        if untrained:
            low = [one.distance - (one.deviation or 0.0) for one in untrained]
            high = [one.distance + (one.deviation or 0.0) for one in untrained]
            axes.plot(levels, [one.distance for one in untrained], color=colour, linestyle="--", linewidth=1.2)
            axes.fill_between(levels, low, high, color=colour, alpha=0.15, linewidth=0)
        if len(laws) > 1:
            axes.plot([], [], color=colour, marker="o", label=IN_WORDS[law])
    ink = drawing.INK if len(laws) > 1 else drawing.COLOURS[0]
    axes.plot([], [], color=ink, label="trained")
    if found.untrained:
        axes.plot([], [], color=ink, linestyle="--", linewidth=1.2, label="untrained")
    axes.plot([], [], color=ink, linestyle=":", label="influence of a, trained")
    axes.axhline(1.0, color=drawing.FAINT, linewidth=0.8, label="unrelated texts")
    axes.set_xticks(levels, [f"{1 << level:,}" for level in levels])
    axes.set_xlabel("tokens in each of the blocks a, b, c")
    axes.set_ylabel("distance relative to unrelated texts")
    axes.set_title("(a ⊙ b) ⊙ c versus a ⊙ (b ⊙ c)" + (f", layer {layer + 1}" if found.num_layers > 1 else ""))


def _draw_trees(axes: "Axes", found: Associativity) -> None:
    names = list(found.trees)
    ratios = [found.over_scan(name) for name in names]
    logarithmic = max((ratio for ratio in ratios if math.isfinite(ratio)), default=1.0) > LOGARITHMIC_FROM
    for place, (name, ratio) in enumerate(zip(names, ratios, strict=True)):
        error = found.error_over_scan(name) or 0.0
        if math.isfinite(ratio):
            shown, shown_error = (ratio, error) if logarithmic else (100 * (ratio - 1), 100 * error)
            colour = drawing.INK if name == SCAN else drawing.COLOURS[0]
            axes.plot([1.0 if logarithmic else 0.0, shown], [place, place], color=colour, linewidth=1.0, alpha=0.5)
            axes.errorbar([shown], [place], xerr=[shown_error], color=colour, marker="o", markersize=5, capsize=2.5)
        axes.annotate(
            f"{found.trees[name].whole.token_perplexity:,.2f}" if math.isfinite(ratio) else "overflows",
            (1, place),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.axvline(1.0 if logarithmic else 0.0, color=drawing.INK, linewidth=0.8)
    axes.margins(x=0.12)
    if logarithmic:
        axes.set_xscale("log")
    else:  # do not magnify differences by rounding
        left, right = axes.get_xlim()
        axes.set_xlim(min(left, -LEAST_SHOWN), max(right, LEAST_SHOWN))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("token perplexity relative to the scan" + ("" if logarithmic else ": increase in %"))
    axes.set_title("perplexity with other trees")
