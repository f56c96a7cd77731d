"""Draws docs/figures/benchmark.svg from results/scan-*.json: time of scans relative to their operator calls."""

import json
from pathlib import Path

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


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "logdepth"  # the same file every time
    figure, axes = plt.subplots(figsize=(10, 5))
    names: list[str] = []
    for file, (label, colour, marker, shift) in RUNS.items():
        report = json.loads((ROOT / "results" / file).read_text())
        rows = [row for row in report["times"] if row["against"] in ("floor", "merges")]
        names = names or [row["what"] for row in rows]
        heights = [names.index(row["what"]) for row in rows]
        for row, height in zip(rows, heights, strict=True):
            axes.plot(row["spread"], [height + shift] * 2, color=colour, linewidth=1.2)
        memory = f"{label}; peak memory with checkpoint=True: {report['memory']['share']:.0%}"
        shifted = [height + shift for height in heights]
        axes.plot([row["ratio"] for row in rows], shifted, marker, color=colour, markersize=5, label=memory)
        bars = [(row["bar"], height) for row, height in zip(rows, heights, strict=True) if row["bar"]]
        if bars:
            axes.plot(*zip(*bars, strict=True), "|", markersize=15, color=FAINT, label="target for the CPU")
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8.5, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0.85, 1.65)
    label = "time / time of the same operator calls on operands prepared in advance (median, quartiles)"
    axes.set_xlabel(label, color=INK)
    axes.grid(axis="x", color="#e3e8ee", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, fontsize=8.5, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=1)
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "benchmark.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
