"""The targets, what was measured against each, and the verdicts."""

from benchmarks.speed.sizes import NO_NETS
from speed_page.measured import Report, Result, number
from speed_page.tables import NOTHING, table

TITLES = {
    "forward at 512: flash Transformer / ours": "forward pass, 512 tokens: time of sinusoidal Transformer / ours",
    "forward at 2,976: flash Transformer / ours": "forward pass, 2,976 tokens: time of sinusoidal Transformer / ours",
    "forward at 2,976: FlexAttention ALiBi / ours": "forward pass, 2,976 tokens: time of ALiBi Transformer / ours",
    "forward at 65,536: flash Transformer / ours": "forward pass, 65,536 tokens: time of sinusoidal Transformer / ours",
    "forward: time / floor, leaves of every token": "forward pass: time / floor (leaves per token)",
    "forward: time / floor, leaves as run": "forward pass: time / floor (leaves as run)",
    "forward of 65,536 tokens in one row: time / that in rows of 512": (
        "forward pass of one sequence of 65,536 tokens: time / time in sequences of 512"
    ),
    "forward of 1,048,576 tokens in one row: time a token / that at 512": (
        "forward pass of one sequence of 1,048,576 tokens: time per token / time per token at 512"
    ),
    "training step 32×512: best Transformer / ours": "training step, 32×512: time of fastest Transformer / ours",
    "training: peak memory, ours / leanest Transformer's": "training step: peak memory, ours / leanest Transformer",
    "training step 4×8,192: best Transformer / ours": "training step, 4×8,192: time of fastest Transformer / ours",
    "training step 32×512: time / floor, leaves of every token": (
        "training step, 32×512: time / floor (leaves per token)"
    ),
    "training step 32×512: time / floor, leaves as run": "training step, 32×512: time / floor (leaves as run)",
    "decoding, batch 1, after 65,536 tokens: tokens/s, ours / Transformer's": (
        "decoding, batch 1, after 65,536 tokens: tokens/s, ours / Transformer"
    ),
    "decoding, batch 256, after 8,192 tokens: tokens/s, ours / Transformer's": (
        "decoding, batch 256, after 8,192 tokens: tokens/s, ours / Transformer"
    ),
    "decoding, batch 256, after 8,192 tokens: bytes of state, ours / Transformer's": (
        "decoding, batch 256, after 8,192 tokens: bytes of state, ours / Transformer"
    ),
    "seconds from process start to the end of the first training step": (
        "time from process start to the end of the first training step, in seconds"
    ),
    "97.4M, training 32×512: FLOPs done / (time × 989 TFLOP/s)": (
        "97.4M parameters, training step, 32×512: FLOPs / (time × 989 TFLOP/s)"
    ),
}
"""Target in result files → its name on the pages."""
WORDS = {"rows of ": "sequences of ", "rows at ": "sequences at ", "TFLOP a step": "TFLOP per step"}
"""Words in result files → words on the pages."""
VERDICTS = {"stretch": "**stretch**", "bar": "**met**", "missed": "missed", None: "not measured"}


def summary(report: Report) -> str:
    """Return one line per target with the worst ratio of each model, without variants that recompute."""
    lines = []
    for what, rows in by_bar(report).items():
        shown = [row for row in rows if "recomputing" not in row["model"]]
        with_nets = [row for row in shown if not row["model"].startswith(NO_NETS)]
        without = [row for row in shown if row["model"].startswith(NO_NETS)]
        lines.append([title_of(what), *_limits(rows[0]), _worst(with_nets), _worst(without)])
    return table(("worst ratio of each model", "target", "stretch target", "both nets", "no nets"), lines)


def _limits(row: Result) -> tuple[str, str]:
    """Return the target, and the stretch target if there is one."""
    sign = "≤" if row["at_most"] else "≥"
    return f"{sign} {row['bar']:.3g}", "" if row["stretch"] is None else f"{sign} {row['stretch']:.3g}"


def _worst(rows: list[Result]) -> str:
    """Return the worst ratio; not measured if any is missing, as that could have been the worst."""
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
                plain(row["model"]),
                plain(row["against"]),
                *("–" if row[whose] is None else f"{number(row[whose])} {row['unit']}" for whose in ("ours", "theirs")),
                ratio(row),
                VERDICTS[row["met"]],
            ]
            for row in rows
        ]
        head = ("model", "compared with", "ours", "theirs", "ratio", "verdict")
        limits = f"target {bar}, stretch target {stretch}" if stretch else f"target {bar}"
        parts.append(f"**{title_of(what)}** ({limits})\n\n{table(head, lines)}")
    return "\n\n".join(parts) or NOTHING


def title_of(what: str) -> str:
    """Return the name of a target on the pages."""
    return TITLES.get(what, what)


def plain(text: str) -> str:
    """Return a name from a result file in the words of the pages."""
    for old, new in WORDS.items():
        text = text.replace(old, new)
    return text


def ratio(row: Result) -> str:
    """Format a ratio, with a fourth digit where it is within 1 % of the target."""
    near = row["ratio"] is not None and abs(row["ratio"] / row["bar"] - 1) < 0.01
    return f"{row['ratio']:#.4g}" if near else number(row["ratio"])
