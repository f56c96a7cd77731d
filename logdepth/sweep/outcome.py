"""The outcome of a sweep: tables and figures in its folder, rewritten by the worker that finished a trial last.

best.json                the best trial's changes to the recipe, for --config of `train` and `reproduce`
sweep.json               the complete record: search space, all trials and the best one; also valid for --config
trials.csv               all trials
history, importance      figures as .svg and .png: losses by trial; importance of each field
"""

import csv
import io
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from logdepth.atomic import write_json, write_text
from logdepth.checksums import seal
from logdepth.drawing import can_draw
from logdepth.sweep.ledger import FINISHED, Ledger

REASON, SECONDS, STEPS = "reason", "seconds", "steps"
"""User attributes of a finished trial: why it was pruned, its training time and its steps."""
MIN_TRIALS_FOR_IMPORTANCE = 4
STATES = {TrialState.FAIL: "waiting"}
"""A failed trial without a later attempt is listed as waiting, because a worker will continue it."""


def rows_of(ledger: Ledger, limit: int) -> list[dict[str, Any]]:
    """Return one row per trial of the sweep. The number of its first attempt identifies a trial."""
    rows = []
    for place, origin in enumerate(ledger.origins):
        attempts = ledger.attempts(origin)
        if place < limit or attempts[-1].state in FINISHED:
            rows.append(_row(origin, attempts))
    return rows


def _row(origin: int, attempts: list[FrozenTrial]) -> dict[str, Any]:
    last = attempts[-1]
    return {
        "trial": origin,
        "state": STATES.get(last.state, last.state.name.lower()),
        "loss": last.value if last.state in FINISHED else None,
        "params": last.system_attrs.get("fixed_params", {}) | last.params,
        "steps": last.user_attrs.get(STEPS),
        "seconds": last.user_attrs.get(SECONDS),
        "attempts": len(attempts),
        "reason": last.user_attrs.get(REASON),
    }


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the completed trial with the lowest loss; None if no trial completed."""
    complete = [row for row in rows if row["state"] == "complete"]
    return min(complete, key=lambda row: (row["loss"], row["trial"]), default=None)


def write_tables(out: Path, record: dict[str, Any]) -> None:
    """Write sweep.json, which is `record`, and trials.csv; also best.json if a trial completed."""
    write_json(out / "sweep.json", record)
    if record["best"] is not None:
        write_json(out / "best.json", seal({"recipe": record["recipe"], "config": record["best_config"]}))
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
    """Draw the figures. Return a message about figures that were skipped, or None."""
    if not can_draw():
        return "no figures: they need matplotlib; install it with pip install '.[sweep]'"
    _draw_history(out / "history", rows)
    complete = sum(row["state"] == "complete" for row in rows)
    if complete < MIN_TRIALS_FOR_IMPORTANCE:
        return f"no importance figure: it needs {MIN_TRIALS_FOR_IMPORTANCE} complete trials; there are {complete}"
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
        axes.set_xlabel(f"importance (PED-ANOVA over {complete} complete trials)")
        axes.set_xlim(0, 1)
        save(figure, path)
