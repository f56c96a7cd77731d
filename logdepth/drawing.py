"""The style of all figures, and how they are saved. matplotlib is an optional dependency."""

import contextlib
import html
import importlib.util
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logdepth.atomic import replacing
from logdepth.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1c2733"
FAINT = "#7a8794"
COLOURS = ("#2f74c0", "#d9730d", "#2a9d6f", "#b0569e", "#c8453b", "#8a7a1f", "#4b9db8", "#7d6ad0")
"""Line colours that are distinguishable on white and on black, also for most colour-blind readers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LARGEST_SCALE = 1.25
"""How much larger than drawn a figure may become on a page."""
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.hashsalt": "logdepth",  # makes SVG files reproducible
}


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise a UserError if matplotlib is not installed. Call this before work whose outcome includes figures."""
    if not can_draw():
        raise UserError("figures need matplotlib; install it with: pip install '.[report]'")


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """Apply the project's style to figures, as a context manager or a decorator."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float = 5.4, height: float = 4.2, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """Create a figure with a row of axes, without opening a window. Sizes are in inches."""
    from matplotlib.figure import Figure

    with house_style():
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)
    return figure, list(axes[0])


def save(figure: "Figure", path: Path) -> None:
    """Save a figure as `path`.svg and `path`.png with a white background."""
    for suffix in ("svg", "png"):
        with replacing(path.with_name(f"{path.name}.{suffix}")) as partial:
            partial.write_bytes(_drawn(figure, suffix, transparent=False))


def save_svg(figure: "Figure", path: Path, source: str) -> None:
    """Save a figure as SVG. `source`, which describes the drawn data, is stored in its metadata for `source_of`."""
    with replacing(path) as partial:
        partial.write_bytes(_drawn(figure, "svg", transparent=False, source=source))


def source_of(path: Path) -> str | None:
    """Return the `source` that `save_svg` stored in an SVG file; None if there is none."""
    found = re.search(r"<dc:source>(.*?)</dc:source>", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return found and html.unescape(found[1])


def as_svg(figure: "Figure", name: str, caption: str) -> str:
    """Return a figure as SVG for an HTML page: no background, and text in the colour of the page.

    `name` is prefixed to all ids, so that figures on one page do not conflict.
    """
    drawn = _drawn(figure, "svg", transparent=True).decode()
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", drawn)
    label = f'role="img" aria-label="{html.escape(caption)}"'
    widest = rf'style="max-width: calc({LARGEST_SCALE} * \1pt)"'  # a small figure alone on a page is not blown up
    return re.sub(r'width="([\d.]+)pt" height="[\d.]+pt"', rf"{label} {widest}", drawn, count=1)


def _drawn(figure: "Figure", suffix: str, *, transparent: bool, source: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with house_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        metadata = {"Date": None, "Source": source} if suffix == "svg" else {"Software": None}
        figure.savefig(buffer, format=suffix, dpi=150, transparent=transparent, metadata=metadata)
    return buffer.getvalue()
