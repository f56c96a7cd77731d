"""The sweeps of each study: the search space and the best trial of every model, side by side."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from logdepth.report.content import title_of
from logdepth.report.table import Cell
from results_page.figures import figure, sweeps_figure
from results_page.kept import Kept, Sweep, label_of
from results_page.markdown import NOTHING, table


def sweeps(kept: Kept) -> str:
    parts = [
        part
        for study, searched in kept.sweeps.items()
        for part in (figure(kept, sweeps_figure(study)), _side_by_side(study, searched))
    ]
    return "\n\n".join(parts) or NOTHING


def _side_by_side(study: str, sweeps: Mapping[str, Sweep]) -> str:
    """Return a table with one row per searched field and range, and one column per model."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row, sweep in sweeps.items():
        best = sweep["best"]["params"] if sweep["best"] else {}
        for field, where in sweep["space"].items():
            found.setdefault((field, _searched(where)), {})[row] = _value(best.get(field))
    rows: list[tuple[Cell, ...]] = [(*place, *(best.get(row) for row in sweeps)) for place, best in found.items()]
    losses = (f"{sweep['best']['loss']:.4f}" if sweep["best"] else None for sweep in sweeps.values())
    rows += [("validation loss", "", *losses), ("trials", "", *map(_counted, sweeps.values()))]
    lengths = ", ".join(dict.fromkeys(_length(sweep["config"]["train"]) for sweep in sweeps.values()))
    note = f"Values of the best trial of each model. A trial spans {lengths} unless that is searched. "
    note += "A trial is pruned when it is worse than the median of the others."
    heads = ("field", "searched", *map(title_of, sweeps))
    return table(heads, rows, title=f"{label_of(study)}: sweeps", note=note)


def _counted(sweep: Sweep) -> str:
    states = Counter(trial["state"] for trial in sweep["trials"])
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _length(train: Mapping[str, Any]) -> str:
    return f"{train['max_steps']:,} steps" if train["max_steps"] else f"{train['epochs']} epochs"


def _searched(where: Any) -> str:
    """Return a search space as text: a list of values, or a range."""
    if isinstance(where, list):
        return ", ".join(map(_value, where))
    ends = f"{_value(where['low'])} to {_value(where['high'])}"
    if where["log"]:
        return f"{ends}, logarithmic"
    return ends if where["step"] is None else f"{ends}, in steps of {_value(where['step'])}"


def _value(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
