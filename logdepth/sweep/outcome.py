"""What came of a sweep: tables and figures in its folder, written by whoever finished a trial last.

best.json                the best trial's fields that are not the recipe's, for --config of `train` and `reproduce`
sweep.json               the sweep whole: what was searched, every trial, the best; serves as --config too
trials.csv               every trial
history, importance      figures, .svg and .png: losses in order; how much of them each field explains
"""

import csv
import io
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from logdepth.atomic import write_json, write_text
from logdepth.drawing import can_draw
from logdepth.sweep.ledger import OVER, Ledger

REASON, SECONDS, STEPS = "reason", "seconds", "steps"
"""Attributes of a trial that is over: why it was pruned, what it took."""
FEWEST_FOR_IMPORTANCE = 4
STATES = {TrialState.FAIL: "waiting"}
"""A trial that failed and is not gone on with yet waits for it."""


def rows_of(ledger: Ledger, limit: int) -> list[dict[str, Any]]:
    """One for each trial of the sweep, known by the number of its first attempt."""
    rows = []
    for place, origin in enumerate(ledger.origins):
        attempts = ledger.attempts(origin)
        if place < limit or attempts[-1].state in OVER:
            rows.append(_row(origin, attempts))
    return rows


def _row(origin: int, attempts: list[FrozenTrial]) -> dict[str, Any]:
    last = attempts[-1]
    return {
        "trial": origin,
        "state": STATES.get(last.state, last.state.name.lower()),
        "loss": last.value if last.state in OVER else None,
        "params": last.system_attrs.get("fixed_params", {}) | last.params,
        "steps": last.user_attrs.get(STEPS),
        "seconds": last.user_attrs.get(SECONDS),
        "attempts": len(attempts),
        "reason": last.user_attrs.get(REASON),
    }


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    complete = [row for row in rows if row["state"] == "complete"]
    return min(complete, key=lambda row: (row["loss"], row["trial"]), default=None)


def write_tables(out: Path, record: dict[str, Any]) -> None:
    """sweep.json and trials.csv, and best.json where there is a best."""
    write_json(out / "sweep.json", record)
    if record["best"] is not None:
        write_json(out / "best.json", {"recipe": record["recipe"], "config": record["best_config"]})
    names = list(record["space"])
    facts = ("trial", "state", "loss", "steps", "seconds", "attempts")
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow((*facts, *names, "reason"))
    for row in record["trials"]:
        values = [row["params"].get(name) for name in names]
        writer.writerow((*(row[fact] for fact in facts), *values, row["reason"]))
    write_text(out / "trials.csv", text.getvalue())


def draw(out: Path, rows: list[dict[str, Any]], study: optuna.Study) -> str | None:
    """The figures; returns what was left out, and why."""
    if not can_draw():
        return "no figures: they need matplotlib; pip install '.[sweep]'"
    _draw_history(out / "history", rows)
    complete = sum(row["state"] == "complete" for row in rows)
    if complete < FEWEST_FOR_IMPORTANCE:
        return f"no figure of importance: it needs {FEWEST_FOR_IMPORTANCE} complete trials, there are {complete}"
    _draw_importance(out / "importance", optuna.importance.get_param_importances(study), complete)
    return None


def _draw_history(path: Path, rows: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    from logdepth.drawing import COLOURS, FAINT, INK, house_style, new_figure, save

    with house_style():
        figure, (axes,) = new_figure(6.4, 3.6)
        for state, colour in (("pruned", FAINT), ("complete", COLOURS[0])):
            points = [(row["trial"], row["loss"]) for row in rows if row["state"] == state and row["loss"] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), "o", color=colour, label=state)
        best, trials, losses = float("inf"), [], []
        for row in rows:
            if row["state"] == "complete":
                best = min(best, row["loss"])
            if best < float("inf") and row["loss"] is not None:
                trials.append(row["trial"])
                losses.append(best)
        if trials:
            axes.step(trials, losses, where="post", color=INK, label="best so far")
            axes.legend()
        axes.set_xlabel("trial")
        axes.set_ylabel("validation loss")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        save(figure, path)


def _draw_importance(path: Path, importance: dict[str, float], complete: int) -> None:
    from logdepth.drawing import COLOURS, house_style, new_figure, save

    names = list(importance)[::-1]
    with house_style():
        figure, (axes,) = new_figure(6.4, 1.2 + 0.35 * len(names))
        axes.barh(names, [importance[name] for name in names], color=COLOURS[0], height=0.6)
        axes.set_xlabel(f"share of the difference between good trials and all {complete} (PED-ANOVA)")
        axes.set_xlim(0, 1)
        save(figure, path)
