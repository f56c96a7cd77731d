"""The census of a corpus: one pass over all text that counts and hashes it, and checks it against what is known."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from logdepth.atomic import read_json, write_json
from logdepth.data.cache import cache_folder, key_of
from logdepth.data.corpus import Corpus
from logdepth.data.passages import SPLITS, Split
from logdepth.errors import UserError
from logdepth.progress import Progress

VERSION = 1


class Counts(NamedTuple):
    """Of the raw text of one split, before any tokenizer."""

    documents: int
    words: int
    line_ends: int
    bytes: int
    sha256: str


Census = dict[Split, Counts]


def census_of(corpus: Corpus) -> Census:
    """Counts of every split; read again only where the source may have changed."""
    source = corpus.source()
    path = _path_of(corpus, source)
    if source is not None and path.exists():
        saved: dict[str, Any] = read_json(path)
        return {split: Counts(**saved[split]) for split in SPLITS}
    census = _count(corpus)
    _check(corpus, census)
    if source is not None:
        write_json(path, {split: census[split]._asdict() for split in SPLITS})
    return census


def _path_of(corpus: Corpus, source: dict[str, Any] | None) -> Path:
    return cache_folder() / "census" / f"{key_of([VERSION, corpus.name, source])}.json"


class TextHash:
    """The hash of a split's text; documents that run together have another."""

    def __init__(self, separated: bool) -> None:
        self.separated = separated
        self.sha256 = hashlib.sha256()

    def update(self, encoded: bytes, ends_document: bool) -> None:
        self.sha256.update(encoded)
        if self.separated and ends_document:
            self.sha256.update(b"\xff")  # never in UTF-8

    def hexdigest(self) -> str:
        return self.sha256.hexdigest()


def refuse_changed_text(corpus: Corpus, census: Census, hashes: dict[Split, TextHash]) -> None:
    """An error where what was read now is not what the census counted: its files were changed meanwhile."""
    for split, one in hashes.items():
        if one.hexdigest() != census[split].sha256:
            _path_of(corpus, corpus.source()).unlink(
                missing_ok=True
            )  # it may be of text that was changed without a trace
            raise UserError(f"corpus '{corpus.name}': its {split} text changed while it was prepared; run this again")


def _count(corpus: Corpus) -> Census:
    documents, words, line_ends, num_bytes = (dict.fromkeys(SPLITS, 0) for _ in range(4))
    hashes = {split: TextHash(corpus.separated) for split in SPLITS}
    done = 0
    with Progress(f"reading {corpus.name}", unit="bytes") as progress:
        for split, text, ends_document in corpus.passages():
            try:
                encoded = text.encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"corpus '{corpus.name}': a document has half a surrogate pair, which is no text: {text[:40]!r}"
                ) from None
            documents[split] += ends_document
            words[split] += len(text.split())
            line_ends[split] += text.count("\n")
            num_bytes[split] += len(encoded)
            hashes[split].update(encoded, ends_document)
            done += len(encoded)
            progress.update(done, f"{done / 1e6:.0f} MB")
    return {
        split: Counts(
            documents[split] if corpus.separated else 1,
            words[split],
            line_ends[split],
            num_bytes[split],
            hashes[split].hexdigest(),
        )
        for split in SPLITS
    }


def _check(corpus: Corpus, census: Census) -> None:
    for split, counts in census.items():
        known = corpus.known.get(split)
        if known is not None and (counts.words, counts.line_ends) != (known.words, known.line_ends):
            raise UserError(
                f"corpus '{corpus.name}': the {split} split has {counts.words:,} words and {counts.line_ends:,} line "
                f"ends instead of {known.words:,} and {known.line_ends:,}, so it is another edition; "
                "train on it as it is with --data.corpus text"
            )


def checksums_are_known(corpus: Corpus, census: Census) -> bool | None:
    """Whether every byte is that of the known edition; None where no edition is known."""
    if not corpus.known:
        return None
    return all(census[split].sha256 == known.sha256 for split, known in corpus.known.items())
