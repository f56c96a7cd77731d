"""Differences in loss between models of the study of architectures, paired by seed, with confidence intervals."""

import math
import statistics
from collections.abc import Iterator, Sequence

from logdepth.architectures import TITLES
from logdepth.report.table import Cell, Table
from logdepth.results import Measured, RunResult

TRANSFORMERS = ("rope", "alibi")
PAIRS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("memory-window", TRANSFORMERS),
    ("memory", TRANSFORMERS),
    ("grc-window", TRANSFORMERS),
    ("grc", TRANSFORMERS),
    ("memory-window", ("delta-window",)),
    ("memory", ("delta",)),
    ("memory-window", ("window",)),
)
"""A model, and the models of which the one with the lowest validation loss is its reference."""
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""The 97.5 % quantile of Student's t by degrees of freedom. With more than nine, that of nine is a little too large."""


def paired(runs: Sequence[RunResult]) -> Table:
    """Return the table of differences. Without both models of any pair it has no rows."""
    rows: list[tuple[Cell, ...]] = []
    for model, references in PAIRS:
        reference = _best(runs, references)
        if reference is None:
            continue
        losses, theirs = _losses(runs, model), _losses(runs, reference)
        for text, context in dict.fromkeys((text, context) for text, context, _ in losses):
            seeds = sorted(seed for where, at, seed in losses.keys() & theirs.keys() if (where, at) == (text, context))
            differences = [losses[text, context, seed] - theirs[text, context, seed] for seed in seeds]
            if differences:
                where = (text, context, f"{statistics.mean(differences):+.4f}", interval(differences), len(differences))
                rows.append((TITLES[model], TITLES[reference], *where))
    return Table(
        name="paired",
        title="Differences in loss, nats per token",
        note="The loss of the first model minus that of the second with the same seed; below 0, the first is better. "
        "Where there are several Transformers, the second is the one with the lowest validation loss. The intervals "
        "contain the mean over all seeds with a probability of 95 % (Student's t).",
        heads=("model", "compared with", "text", "context", "difference", "95 % interval", "seeds"),
        rows=tuple(rows),
    )


def interval(differences: Sequence[float]) -> str | None:
    """Return the 95 % confidence interval of the mean; None for a single difference."""
    freedom = len(differences) - 1
    if not freedom:
        return None
    width = STUDENT.get(freedom, STUDENT[9]) * statistics.stdev(differences) / math.sqrt(len(differences))
    mean = statistics.mean(differences)
    return f"{mean - width:+.4f} to {mean + width:+.4f}"


def _best(runs: Sequence[RunResult], rows: Sequence[str]) -> str | None:
    """Return the model with the lowest mean validation loss over the seeds of all; None if there is no run of any."""
    found = {row: {run.config.seed: run.valid_loss for run in runs if run.row == row} for row in rows}
    losses = {row: of_row for row, of_row in found.items() if of_row}
    if not losses:
        return None
    common = set.intersection(*map(set, losses.values()))
    return min(losses, key=lambda row: statistics.mean(losses[row][seed] for seed in common or losses[row]))


def _losses(runs: Sequence[RunResult], row: str) -> dict[tuple[str, int, int], float]:
    """Return the loss by text, context length and seed."""
    return {
        (text, one.context, run.config.seed): one.loss
        for run in runs
        if run.row == row
        for text, measured in _texts(run)
        for one in measured
    }


def _texts(run: RunResult) -> Iterator[tuple[str, Sequence[Measured]]]:
    yield "test split", run.test
    for other in run.others:
        yield other.name, other.test
