"""Each bar, what was measured against it, and whether it was met."""

from benchmarks.speed.sizes import NO_NETS
from speed_page.measured import Report, Result, number
from speed_page.tables import NOTHING, table

VERDICTS = {"stretch": "**stretch**", "bar": "**met**", "missed": "missed", None: "not measured"}


def summary(report: Report) -> str:
    """One line a bar, with the worst of each model's ratios; ours that recompute are left to the details."""
    lines = []
    for what, rows in by_bar(report).items():
        shown = [row for row in rows if "recomputing" not in row["model"]]
        with_nets = [row for row in shown if not row["model"].startswith(NO_NETS)]
        without = [row for row in shown if row["model"].startswith(NO_NETS)]
        lines.append([what, *_limits(rows[0]), _worst(with_nets), _worst(without)])
    return table(("the worst ratio of each model, not recomputing", "bar", "stretch", "both nets", "no nets"), lines)


def _limits(row: Result) -> tuple[str, str]:
    """The bar, and the stretch where there is one."""
    sign = "≤" if row["at_most"] else "≥"
    return f"{sign} {row['bar']:.3g}", "" if row["stretch"] is None else f"{sign} {row['stretch']:.3g}"


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
        bar, stretch = _limits(rows[0])
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
        limits = f"bar {bar}, stretch {stretch}" if stretch else f"bar {bar}"
        parts.append(f"**{what}**: {limits}\n\n{table(head, lines)}")
    return "\n\n".join(parts) or NOTHING


def ratio(row: Result) -> str:
    """A digit more where three would not tell which side of the bar it is on."""
    near = row["ratio"] is not None and abs(row["ratio"] / row["bar"] - 1) < 0.01
    return f"{row['ratio']:#.4g}" if near else number(row["ratio"])
