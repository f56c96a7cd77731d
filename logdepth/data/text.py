"""Any local text: files or folders of txt, jsonl and parquet, uncompressed or compressed.

A file whose name contains the word train, valid (val, dev, validation) or test belongs to that split. Otherwise the
documents of jsonl and parquet files are split by hash. A text file is divided by position: the last 5 % are test, the
5 % before them valid, and the rest train. It is divided at line ends; if its lines are too few or too long for that,
at white space, or else between any two characters.
"""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from logdepth.data.corpus import Corpus, files_as_source
from logdepth.data.locate import refuse_unprintable
from logdepth.data.passages import SPLITS, Passage, Split, split_by_hash
from logdepth.data.readers import documents, is_plain, kind_of, lines
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
BOUNDARIES = tuple(map(re.compile, (r"\r\n?|\n", r"\s+", "")))
"""Where a text of few lines may be divided, the best places first: line ends of any kind, white space, anywhere."""
CORRECT = "correct --data.paths (in evaluate: --paths)"


class Text(Corpus):
    summary = "your own files or folders (--data.paths): txt, jsonl or parquet, uncompressed or gz, xz, zst"
    separated = True

    def __init__(self, data_dir: Path | None = None, paths: Sequence[Path] = ()) -> None:
        super().__init__(data_dir)
        if not paths:
            raise UserError("corpus 'text' needs files or folders to read; set --data.paths (in evaluate: --paths)")
        self.paths = tuple(paths)

    def files(self) -> list[Path]:
        """Return the files to read, in order.

        In a folder these are the files with the suffix of a known format, or, if there are none, those without any
        suffix. Everything else in it is skipped, as are FIFOs, sockets and devices.
        """
        found: list[Path] = []
        for path in self.paths:
            if not _is_folder(path):
                if kind_of(path) is None:
                    raise UserError(f"corpus 'text': {path} is no txt, md, jsonl or parquet file; choose another path")
                found.append(path)
                continue
            inside = _files_inside(path)
            readable = [file for file in inside if kind_of(file)]
            readable = readable or [file for file in inside if kind_of(file) == "" and not file.name.startswith(".")]
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

    def why_empty(self, split: Split) -> str:
        files = self.files()
        unnamed = [file for file in files if _named_split(file) is None]
        if not unnamed:
            named = ", ".join(f"{file.name} to {_named_split(file)}" for file in files[:4])
            more = f" and {len(files) - 4} more" if len(files) > 4 else ""
            return (
                f"the names of its files assign {named}{more}; add a file with '{split}' in its name, or use names "
                "without such words, so that each file is divided into train, valid and test"
            )
        if any(map(is_plain, unnamed)):
            return f"its files have too little text to be divided; add text, or a file with '{split}' in its name"
        return (
            f"its documents are split by a hash of their text, and none is in {split}; add documents, or a file with "
            f"'{split}' in its name"
        )

    def passages(self) -> Iterator[Passage]:
        return self._passages(cut_lines=self._must_cut_lines)

    @cached_property
    def _must_cut_lines(self) -> bool:
        """Whether a split would be empty if text files were divided at line ends only."""
        found: set[Split] = set()
        for passage in self._passages(cut_lines=False):
            found.add(passage.split)
            if len(found) == len(SPLITS):
                return False
        return True

    def _passages(self, *, cut_lines: bool) -> Iterator[Passage]:
        for file in self.files():
            split = _named_split(file)
            if not is_plain(file):
                yield from (Passage(split or split_by_hash(text, HELD_OUT), text, True) for text in documents(file))
            elif split is None and cut_lines:
                yield from _cut_passages(file)
            else:
                yield from _text_passages(file, split)


class WholeText(Text):
    """Local text that is not divided, for evaluating on all of it. A text file is one document."""

    splits: ClassVar[tuple[Split, ...]] = ("all",)

    @property
    def name(self) -> str:
        return "text"

    def notes(self) -> list[str]:
        return []

    def passages(self) -> Iterator[Passage]:
        for file in self.files():
            if is_plain(file):
                yield from _text_passages(file, "all")
            else:
                yield from (Passage("all", text, True) for text in documents(file))


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder. Raise a UserError if it is neither a folder nor a regular file."""
    refuse_unprintable(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"corpus 'text': {path} does not exist; {CORRECT}") from None
    except OSError as error:  # for example a loop of links, or a name that is too long
        raise UserError(f"corpus 'text': cannot read {path}: {error.strerror}; {CORRECT}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"corpus 'text': {path} is neither a regular file nor a folder; save its text in a file")
    return stat.S_ISDIR(mode)


def _files_inside(folder: Path) -> list[Path]:
    """Return the regular files of a folder and its subfolders, sorted. Links to folders are not followed.

    Raise a UserError if a subfolder cannot be read, or a link to a file with text leads nowhere.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"corpus 'text': cannot read {error.filename}: {error.strerror}; {CORRECT}") from None

    found: list[Path] = []
    for parent, _, names in os.walk(folder, onerror=refuse):
        for file in (Path(parent, name) for name in names):
            if file.is_file():
                found.append(file)
            elif kind_of(file) and _leads_nowhere(file):
                raise UserError(
                    f"corpus 'text': {file} is a link to {file.readlink()}, which does not exist; restore that file, "
                    "or remove the link"
                )
    return sorted(found)


def _leads_nowhere(file: Path) -> bool:
    try:
        file.stat()
    except FileNotFoundError:
        return file.is_symlink()  # else it has just been removed
    except OSError:
        return False
    return False


def _named_split(file: Path) -> Split | None:
    """Return the split that a file's name states, as in train-00.txt or wiki.valid.tokens; None if it states none."""
    named = {NAMED_SPLITS[word] for word in re.split(r"[^a-z]+", file.name.lower()) if word in NAMED_SPLITS}
    return named.pop() if len(named) == 1 else None


def _way_to_split(file: Path) -> str:
    return "divided into train, valid and test" if is_plain(file) else "documents split by hash"


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


def _cut_passages(file: Path) -> Iterator[Passage]:
    """Yield a text file of few lines as three documents, one per split."""
    text = "".join(lines(file))
    start = 0
    for split, end in zip(SPLITS, (*_cuts(text), len(text)), strict=True):
        if start < end:
            yield Passage(split, text[start:end], True)
        start = end


def _cuts(text: str) -> tuple[int, int]:
    """Return where valid and test start. If the text is too short to be divided, both are empty."""
    for boundary in BOUNDARIES:
        found = [boundary.search(text, int(place * len(text))) for place in (1 - 2 * HELD_OUT, 1 - HELD_OUT)]
        valid, test = (len(text) if match is None else match.end() for match in found)
        if 0 < valid < test < len(text):
            return valid, test
    return len(text), len(text)
