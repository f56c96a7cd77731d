"""Draws docs/figures/scan.svg: the blocks that the up-sweep builds, and the prefixes that the down-sweep folds."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

NUM_ELEMENTS = 13
COLOURS = ("#cfd8e6", "#8fb3d9", "#4f83bf", "#27548a")
INK = "#1c2733"
FAINT = "#7a8794"


def box(axes: Axes, start: float, row: float, count: int, level: int, text: str) -> None:
    """One block: as wide as the elements it covers, coloured by its level."""
    patch = FancyBboxPatch(
        (start + 0.07, row + 0.12), count - 0.14, 0.76,
        boxstyle="round,pad=0,rounding_size=0.14", facecolor=COLOURS[level], edgecolor="none",
    )  # fmt: skip
    axes.add_patch(patch)
    axes.text(
        start + count / 2, row + 0.47, text, ha="center", va="center", fontsize=8.5,
        color="white" if level >= 2 else INK,
    )  # fmt: skip


def finish(axes: Axes, title: str, top: float) -> None:
    axes.set_title(title, fontsize=11, color=INK, loc="left", pad=8)
    axes.set_xlim(-2.6, NUM_ELEMENTS + 0.2)
    axes.set_ylim(-0.2, top)
    axes.axis("off")


def draw_blocks(axes: Axes) -> None:
    for level in range(4):
        size = 1 << level
        for index in range(NUM_ELEMENTS // size):
            text = f"e{index}" if level == 0 else f"{index * size}…{(index + 1) * size - 1}"
            box(axes, index * size, level, size, level, text)
        axes.text(-0.35, level + 0.47, f"level {level}", ha="right", va="center", fontsize=9, color=FAINT)
    finish(axes, "Up-sweep: complete pairs merge, 10 merges in 3 calls", 4.3)


def draw_prefixes(axes: Axes) -> None:
    for length in range(1, NUM_ELEMENTS + 1):
        row, start = NUM_ELEMENTS - length, 0
        for level in reversed(range(4)):
            if length >> level & 1:
                size = 1 << level
                text = f"e{start}" if level == 0 else f"{start}…{start + size - 1}"
                box(axes, start, row, size, level, text)
                if start:
                    axes.text(start, row + 0.47, "⊙", ha="center", va="center", fontsize=10, color="#c2410c")
                start += size
        axes.text(-0.35, row + 0.47, f"prefix {length}", ha="right", va="center", fontsize=9, color=FAINT)
    finish(axes, "Down-sweep: a shorter prefix ⊙ one block, 9 merges in 3 calls", NUM_ELEMENTS + 0.2)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "logdepth"  # the same file every time
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), width_ratios=(1, 1))
    draw_blocks(left)
    draw_prefixes(right)
    figure.patch.set_facecolor("white")
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "scan.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
