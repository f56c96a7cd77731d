"""Any local text: files or folders of txt, jsonl and parquet, uncompressed or compressed.

A file whose name contains the word train, valid (val, dev, validation) or test belongs to that split. Otherwise the
documents of jsonl and parquet files are split by hash. A text file is divided by position: the last 5 % are test, the
5 % before them valid, and the rest train.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from logdepth.data.corpus import Corpus, files_as_source
from logdepth.data.passages import Passage, Split, split_by_hash
from logdepth.data.readers import PLAIN, documents, kind_of, lines
from logdepth.errors import UserError

HELD_OUT = 0.05
NAMED_SPLITS: dict[str, Split] = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}


class Text(Corpus):
    summary = "your own files or folders (--data.paths): txt, jsonl or parquet, uncompressed or gz, xz, zst"
    separated = True

    def __init__(self, data_dir: Path | None = None, paths: Sequence[Path] = ()) -> None:
        super().__init__(data_dir)
        if not paths:
            raise UserError("corpus 'text' needs files or folders to read; set --data.paths (in evaluate: --paths)")
        self.paths = tuple(paths)

    def files(self) -> list[Path]:
        found: list[Path] = []
        for path in self.paths:
            if not path.exists():
                raise UserError(f"corpus 'text': {path} does not exist; correct --data.paths (in evaluate: --paths)")
            inside = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
            readable = [file for file in inside if kind_of(file) is not None]
            if not readable:
                raise UserError(
                    f"corpus 'text': {path} contains no txt, md, jsonl or parquet file; choose another path"
                )
            found += readable
        return found

    def source(self) -> dict[str, Any] | None:
        return files_as_source(self.files())

    def notes(self) -> list[str]:
        return [f"{file}: {_named_split(file) or _way_to_split(file)}" for file in self.files()]

    def passages(self) -> Iterator[Passage]:
        for file in self.files():
            split = _named_split(file)
            if kind_of(file) in PLAIN:
                yield from _text_passages(file, split)
            else:
                yield from (Passage(split or split_by_hash(text, HELD_OUT), text, True) for text in documents(file))


def _named_split(file: Path) -> Split | None:
    """Return the split that a file's name states, as in train-00.txt or wiki.valid.tokens; None if it states none."""
    named = {NAMED_SPLITS[word] for word in re.split(r"[^a-z]+", file.name.lower()) if word in NAMED_SPLITS}
    return named.pop() if len(named) == 1 else None


def _way_to_split(file: Path) -> str:
    return "divided into train, valid and test" if kind_of(file) in PLAIN else "documents split by hash"


def _text_passages(file: Path, split: Split | None) -> Iterator[Passage]:
    """Yield a text file's lines: one document if `split` is given, otherwise three, one per split."""
    total = 0
    if split is None:
        total = sum(len(line.encode()) for line in lines(file))
    done, held, held_split = 0, "", split or "train"
    for line in lines(file):
        place = split or _split_at(done / total)
        if held:
            yield Passage(held_split, held, place != held_split)
        held, held_split = line, place
        done += len(line.encode())
    if held:
        yield Passage(held_split, held, True)


def _split_at(place: float) -> Split:
    if place < 1 - 2 * HELD_OUT:
        return "train"
    return "valid" if place < 1 - HELD_OUT else "test"
