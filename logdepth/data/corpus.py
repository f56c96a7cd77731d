"""Corpus: where a corpus's text comes from. It knows no tokenizer; one file a corpus, listed in `CORPORA`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from logdepth.data.passages import Passage, Split
from logdepth.errors import UserError


class Known(NamedTuple):
    """What is known of the right edition of a split."""

    words: int
    line_ends: int
    sha256: str


class Corpus(ABC):
    """A source of text in three splits."""

    summary: ClassVar[str]
    """One line for lists."""
    separated: ClassVar[bool]
    """Whether documents are kept apart by an end-of-document token, or each split is one stream of text."""
    known: ClassVar[Mapping[Split, Known]] = {}
    """Word counts and checksums of the splits, where the corpus is the same for everyone."""

    def __init__(self, data_dir: Path | None = None, paths: Sequence[Path] = ()) -> None:
        """`data_dir`: the folder above those of the corpora. `paths`: files or folders, for corpora that take them."""
        if paths:
            raise UserError(f"corpus '{self.name}' takes no --data.paths; only 'text' does")
        self.data_dir = data_dir

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def source(self) -> dict[str, Any] | None:
        """Facts that change when the text may have (files, sizes, times); None where there are none to be had."""

    def notes(self) -> list[str]:
        """Lines for the report of a preparation: what was read, where users may wonder."""
        return []

    @abstractmethod
    def passages(self) -> Iterator[Passage]:
        """All text, in an order that never changes. Reading it again gives the same."""


def files_as_source(files: Sequence[Path]) -> dict[str, Any]:
    """Their whole names: two folders may hold files of one relative name, size and time."""
    return {str(file.resolve()): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
