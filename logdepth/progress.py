"""Progress of long work on stderr: a live bar on a terminal, plain lines from time to time elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, Self

PLAIN_SECONDS = 10.0
SHARE_TO_JUDGE_BY = 0.01
"""Of the work: before, it may all have been getting ready."""


class Progress:
    """One piece of work with a known or unknown total, in units that the caller names; % is a unit too."""

    def __init__(self, label: str, total: float | None = None, *, unit: str = "steps", done: float = 0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self.first = done
        self.started = time.monotonic()
        self.last_line = self.started
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
            self._line("")  # work that was long enough for lines gets a last one

    def update(self, done: float, note: str = "") -> None:
        """Tell how far the work is; cheap enough for every step."""
        self.done = done
        if self.bar is not None:
            self.bar.update(self.task, completed=done, note=note)
        elif time.monotonic() - self.last_line >= PLAIN_SECONDS:
            self._line(note)

    def skip(self, done: float) -> None:
        """So far it was before: what took no time now says nothing of how long the rest takes."""
        self.first += done - self.done
        self.update(done)

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def remark(self, line: str) -> None:
        """A line that whoever asked for the work should know: something is not as they may think."""
        self.say(line)

    def _line(self, note: str) -> None:
        self.last_line = time.monotonic()
        seconds = self.last_line - self.started
        of = f"/{self.total:,}" if self.total is not None and self.unit != "%" else ""
        left = ""
        if self.total is not None and self.done - self.first > SHARE_TO_JUDGE_BY * (self.total - self.first):
            left = f", {in_words((self.total - self.done) * seconds / (self.done - self.first))} left"
        note = f", {note}" if note else ""
        done = f"{self.done:.0f}" if self.unit == "%" else f"{self.done:,}"
        print(f"{self.label}: {done}{of} {self.unit}{note}{left}", file=sys.stderr, flush=True)


class Part:
    """One of the pieces of a larger work: progress in it is progress of the whole, by its share."""

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
        self.whole.update(self.before + self.share * done / self.total, f"{self.label}: {note}" if note else self.label)

    def say(self, line: str) -> None:
        self.whole.say(f"{self.label}: {line}")

    def remark(self, line: str) -> None:
        self.say(line)


def in_words(seconds: float) -> str:
    """A duration as people say it: 45 s, 3 min 20 s, 2 h 5 min."""
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
