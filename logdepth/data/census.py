"""The census of a corpus: one pass that counts and hashes all text and checks it against the known edition."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from logdepth.atomic import write_json
from logdepth.checksums import mismatch, seal
from logdepth.data.cache import cache_folder, cache_key, read_sealed
from logdepth.data.corpus import Corpus
from logdepth.data.passages import Split
from logdepth.errors import UserError
from logdepth.progress import Progress

VERSION = 2
REMEDY = "remove it, and the corpus is read again"


class Counts(NamedTuple):
    """Counts and checksum of one split's raw text, before tokenization."""

    documents: int
    words: int
    line_ends: int
    bytes: int
    sha256: str


Census = dict[Split, Counts]


def census_of(corpus: Corpus) -> Census:
    """Return the counts of every split, from the cache if the source has not changed."""
    source = corpus.source()
    path = _path_of(corpus, source)
    if source is not None and path.exists():
        saved = read_sealed(path, REMEDY)
        counts = saved["splits"]
        if (saved["corpus"], saved["source"], list(counts)) != (corpus.name, source, list(corpus.splits)):
            raise mismatch(path, REMEDY)  # it is another corpus's file
        return {split: Counts(**counts[split]) for split in corpus.splits}
    census = _count(corpus)
    _check(corpus, census)
    if source is not None:
        counts = {split: census[split]._asdict() for split in corpus.splits}
        write_json(path, seal({"corpus": corpus.name, "source": source, "splits": counts}))
    return census


def _path_of(corpus: Corpus, source: dict[str, Any] | None) -> Path:
    return cache_folder() / "census" / f"{cache_key([VERSION, corpus.name, corpus.splits, source])}.json"


class TextHash:
    """An incremental hash of a split's text. In corpora of separate documents it also covers the boundaries."""

    def __init__(self, separated: bool) -> None:
        self.separated = separated
        self.sha256 = hashlib.sha256()

    def update(self, encoded: bytes, ends_document: bool) -> None:
        self.sha256.update(encoded)
        if self.separated and ends_document:
            self.sha256.update(b"\xff")  # a byte that UTF-8 never contains

    def hexdigest(self) -> str:
        return self.sha256.hexdigest()


def refuse_changed_text(corpus: Corpus, census: Census, hashes: dict[Split, TextHash]) -> None:
    """Raise a UserError if the text read now differs from the text of the census: its files changed in between."""
    for split, one in hashes.items():
        if one.hexdigest() != census[split].sha256:
            # The files may have changed without a new size or time, so the cached census may be of other text.
            _path_of(corpus, corpus.source()).unlink(missing_ok=True)
            raise UserError(
                f"corpus '{corpus.name}': its {split} text changed during preparation; run the same command again"
            )


def _count(corpus: Corpus) -> Census:
    documents, words, line_ends, num_bytes = (dict.fromkeys(corpus.splits, 0) for _ in range(4))
    hashes = {split: TextHash(corpus.separated) for split in corpus.splits}
    done = 0
    with Progress(f"reading {corpus.name}", unit="bytes") as progress:
        for split, text, ends_document in corpus.passages():
            try:
                encoded = text.encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"corpus '{corpus.name}': a document contains a lone surrogate, which UTF-8 cannot encode: "
                    f"{text[:40]!r}; repair or remove the document"
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
        for split in corpus.splits
    }


def _check(corpus: Corpus, census: Census) -> None:
    for split, counts in census.items():
        known = corpus.known.get(split)
        if known is not None and (counts.words, counts.line_ends) != (known.words, known.line_ends):
            raise UserError(
                f"corpus '{corpus.name}': the {split} split has {counts.words:,} words and {counts.line_ends:,} line "
                f"ends instead of {known.words:,} and {known.line_ends:,}, so it is a different edition; "
                "to train on this text unchanged, use --data.corpus text"
            )


def checksums_are_known(corpus: Corpus, census: Census) -> bool | None:
    """Return whether all checksums match the known edition; None if the corpus has no known edition."""
    if not corpus.known:
        return None
    return all(census[split].sha256 == known.sha256 for split, known in corpus.known.items())
