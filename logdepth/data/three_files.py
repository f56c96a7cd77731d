"""Corpora with one text file per split, read as a stream of lines from local files or from the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from logdepth.data.corpus import Corpus, files_as_source
from logdepth.data.locate import hub_rows, local_files, looked_for
from logdepth.data.passages import SPLITS, Passage, Split
from logdepth.data.readers import lines

HUB_SPLITS: dict[Split, str] = {"train": "train", "valid": "validation", "test": "test"}


class ThreeFiles(Corpus):
    """A corpus with one text file per split."""

    separated = False
    folder: ClassVar[str]
    pattern: ClassVar[str]
    """Name of a split's file; {} is replaced by the split."""
    hub_name: ClassVar[str]
    hub_config: ClassVar[str | None] = None

    @staticmethod
    def line_of(row: dict[str, Any]) -> str:
        """Return the line of the original file that a row of the hub's dataset represents."""
        raise NotImplementedError

    def source(self) -> dict[str, Any] | None:
        files = self._files()
        return files_as_source(files) if files else None

    def passages(self) -> Iterator[Passage]:
        files = self._files()
        for number, split in enumerate(SPLITS):
            if files:
                yield from (Passage(split, line, False) for line in lines(files[number]))
                continue
            missing = looked_for(self.name, self.data_dir, f"{self.folder}/{self.pattern.format(split)}")
            for row in hub_rows(self.hub_name, self.hub_config, HUB_SPLITS[split], missing):
                yield Passage(split, self.line_of(row), False)

    def _files(self) -> list[Path] | None:
        return local_files(self.data_dir, self.folder, [self.pattern.format(split) for split in SPLITS])
