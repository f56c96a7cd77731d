"""Draws docs/figures/benchmark.svg from results/scan-*.json: what a scan costs beside the operator calls it makes."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent.parent
RUNS = {
    "scan-cpu.json": ("two CPU cores, float32", "#27548a", "o", -0.13),
    "scan-h200-bfloat16.json": ("one H200, bfloat16, eager", "#c2410c", "s", 0.13),
}
INK = "#1c2733"
FAINT = "#7a8794"


def floor_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in report["times"] if row["against"] in ("floor", "merges")]


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "logdepth"  # the same file every time
    figure, axes = plt.subplots(figsize=(10, 4.6))
    names: list[str] = []
    for file, (label, colour, marker, shift) in RUNS.items():
        rows = floor_rows(json.loads((ROOT / "results" / file).read_text()))
        names = names or [row["what"] for row in rows]
        heights = [names.index(row["what"]) + shift for row in rows]
        ratios = [row["ratio"] for row in rows]
        errors = [[max(0.0, sign * (bound - row["ratio"])) for row in rows for bound in (row["spread"][side],)]
                  for side, sign in ((0, -1), (1, 1))]  # fmt: skip
        axes.errorbar(ratios, heights, xerr=errors, fmt=marker, color=colour, markersize=5, elinewidth=1.2, label=label)
        bars = [(row["bar"], names.index(row["what"])) for row in rows if row["bar"]]
        if bars:
            axes.scatter(*zip(*bars, strict=True), marker="|", s=220, color=FAINT, label="bar for the CPU")
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8.5, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0.85, 1.65)
    axes.set_xlabel("time / time of the same operator calls on operands that lie ready", color=INK)
    axes.grid(axis="x", color="#e3e8ee", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "benchmark.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
