"""The sweeps: what each searched, and what came out best."""

from collections import Counter
from typing import Any

from results_page.kept import Kept
from results_page.markdown import NOTHING, table


def sweeps(kept: Kept) -> str:
    return "\n\n".join(_one_sweep(name, sweep) for name, sweep in kept.sweeps.items()) or NOTHING


def _one_sweep(name: str, sweep: dict[str, Any]) -> str:
    best, train, trials = sweep["best"], sweep["config"]["train"], sweep["trials"]
    states = Counter(trial["state"] for trial in trials)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    length = f"{train['max_steps']:,} steps" if train["max_steps"] else f"{train['epochs']} epochs"
    ended = f" Best: trial {best['trial']}, validation loss {best['loss']:.4f}." if best else ""
    found = best["params"] if best else {}
    return table(
        ("field", "searched", "best"),
        ((field, _searched(where), _value(found.get(field))) for field, where in sweep["space"].items()),
        title=f"{name}: {len(trials)} trials",
        note=f"{counted}. A trial spans {length} unless that is searched.{ended}",
    )


def _searched(where: Any) -> str:
    """A list of values, or a range."""
    if isinstance(where, list):
        return ", ".join(map(_value, where))
    ends = f"{_value(where['low'])} to {_value(where['high'])}"
    if where["log"]:
        return f"{ends}, logarithmic"
    return ends if where["step"] is None else f"{ends}, in steps of {_value(where['step'])}"


def _value(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
