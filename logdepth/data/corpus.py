"""The base class of corpora. A corpus yields text and is independent of the tokenizer; `CORPORA` lists them all."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from logdepth.data.locate import refuse_unprintable
from logdepth.data.passages import SPLITS, Passage, Split
from logdepth.errors import UserError


class Known(NamedTuple):
    """The counts and checksum of a split's known edition."""

    words: int
    line_ends: int
    sha256: str


class Corpus(ABC):
    """A source of text in three splits."""

    summary: ClassVar[str]
    """A one-line description for `logdepth corpora`."""
    separated: ClassVar[bool]
    """Whether an end-of-document token follows each document. Otherwise each split is one stream of text."""
    splits: ClassVar[tuple[Split, ...]] = SPLITS
    """The parts into which the text is divided."""
    known: ClassVar[Mapping[Split, Known]] = {}
    """Word counts and checksums of the splits, for a corpus with a fixed edition."""

    def __init__(self, data_dir: Path | None = None, paths: Sequence[Path] = ()) -> None:
        """Create the corpus without reading it.

        Args:
            data_dir: root data directory.
            paths: files or folders of text, for corpora that accept them.
        """
        if paths:
            raise UserError(f"corpus '{self.name}' takes no --data.paths; use them with --data.corpus text")
        self.data_dir = data_dir

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def source(self) -> dict[str, Any] | None:
        """Return facts that change whenever the text may have changed (files, sizes, times), or None if unknown."""

    def notes(self) -> list[str]:
        """Return lines for the preparation report, such as how each file was split."""
        return []

    def why_empty(self, split: Split) -> str:
        """Return why a split is empty and what to do about it, for an error message."""
        return f"it has too few documents for a {split} split; add documents"

    @abstractmethod
    def passages(self) -> Iterator[Passage]:
        """Iterate over all text in a fixed order. Every call yields the same passages."""


def files_as_source(files: Sequence[Path]) -> dict[str, Any]:
    """Return each file's absolute path, size and modification time.

    Paths are absolute because two folders may hold files with the same relative name, size and time.
    """
    found = {}
    for file in files:
        path = file.resolve()
        refuse_unprintable(path)
        found[str(path)] = [path.stat().st_size, path.stat().st_mtime_ns]
    return found
