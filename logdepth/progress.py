"""Progress of long-running work on stderr: a live bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from types import TracebackType
from typing import Any, Self

FIRST_SECONDS = 1.0
"""Seconds until the first line if stderr is not a terminal."""
PLAIN_SECONDS = 10.0
"""Seconds between later lines."""
ROUGH_FRACTION = 0.01
"""Completed fraction of the work up to which the remaining time is a rough estimate, because setup may dominate."""


class Progress:
    """The progress of one piece of work, in units that the caller names, with a known or unknown total."""

    def __init__(self, label: str, total: float | None = None, *, unit: str = "steps", done: float = 0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self.first = done
        self.started = time.monotonic()
        self.last_line = self.started
        self.said: str | None = None
        """The line that was said last."""
        self.remarked: set[str] = set()
        self.bar: Any = None
        if sys.stderr.isatty():
            self.bar = _bar()
            self.task = self.bar.add_task(label, total=total, completed=done, note="")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif kind is None and self.done > self.first and self.last_line > self.started:
            self._line("")  # a last line, if the work was long enough to print any

    def update(self, done: float, note: str = "") -> None:
        """Set the completed amount. This is cheap enough to call at every step."""
        self.done = done
        if self.bar is not None:
            self.bar.update(self.task, completed=done, note=note)
        elif time.monotonic() - self.last_line >= self._seconds_between_lines():
            self._line(note)

    def skip(self, done: float) -> None:
        """Set the completed amount to work that was done earlier. It does not enter the estimate of remaining time."""
        self.first += done - self.done
        self.update(done)

    def say(self, line: str) -> None:
        """Print a line that remains visible, unless it is the same as the one before."""
        if line == self.said:
            return
        self.said = line
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def remark(self, line: str, label: str = "") -> None:
        """Print a line about something that the user may not expect, once: parts with other labels do not repeat it."""
        if line not in self.remarked:
            self.remarked.add(line)
            self.say(label + line)

    def _seconds_between_lines(self) -> float:
        return PLAIN_SECONDS if self.last_line > self.started else min(FIRST_SECONDS, PLAIN_SECONDS)

    def _line(self, note: str) -> None:
        self.last_line = time.monotonic()
        seconds = self.last_line - self.started
        of = f"/{self.total:,.15g}" if self.total is not None and self.unit != "%" else ""
        left = ""
        if self.total is not None and self.done > self.first:
            roughly = "roughly " if self.done - self.first <= ROUGH_FRACTION * (self.total - self.first) else ""
            left = f", {roughly}{in_words((self.total - self.done) * seconds / (self.done - self.first))} left"
        note = f", {note}" if note else ""
        done = f"{self.done:.0f}" if self.unit == "%" else f"{self.done:,.15g}"
        self.say(f"{self.label}: {done}{of} {self.unit}{note}{left}")


class Part:
    """One part of a larger piece of work. Its progress advances the whole in proportion to its share."""

    def __init__(self, whole: Progress, label: str, total: float, share: float, *, done: float = 0) -> None:
        self.whole, self.label, self.total, self.share = whole, label, total, share
        self.before = whole.done
        if done:
            whole.skip(self.before + share * done / total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, done: float, note: str = "") -> None:
        """Set the completed amount of this part."""
        self.whole.update(self.before + self.share * done / self.total, f"{self.label}: {note}" if note else self.label)

    def say(self, line: str) -> None:
        """Print a line that remains visible, with the label of this part."""
        self.whole.say(f"{self.label}: {line}")

    def remark(self, line: str) -> None:
        """Print a line about something that the user may not expect, once in the whole work."""
        self.whole.remark(line, f"{self.label}: ")


def in_words(seconds: float) -> str:
    """Format a duration, such as 45 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        TextColumn("{task.percentage:.0f} %"),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        expand=True,
    )
