"""From a corpus to token stores: census, tokenizer, encoding. Results that are in the cache are reused."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from logdepth.atomic import new_folder
from logdepth.data.cache import cache_folder, cache_key
from logdepth.data.census import Census, TextHash, census_of, checksums_are_known, refuse_changed_text
from logdepth.data.corpora import CORPORA
from logdepth.data.corpus import Corpus
from logdepth.data.passages import SPLITS, Passage, Split
from logdepth.data.store import StoreInfo, TokenStore, dtype_for, remedy_for, write_sidecar
from logdepth.data.text import WholeText
from logdepth.data.tokenizer import Tokenizer, TokenizerConfig, pieces, trained_tokenizer
from logdepth.errors import UserError, did_you_mean
from logdepth.progress import Progress

VERSION = 2
BATCH_CHARACTERS = 4_000_000
"""Characters of text encoded in one call: enough to occupy all cores with little memory."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus and its tokenizer."""

    corpus: str = "pydocs"
    """Name of the corpus; `logdepth corpora` lists them."""
    paths: tuple[Path, ...] = ()
    """Files or folders to read for the corpus 'text'."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Settings of the tokenizer."""

    def __post_init__(self) -> None:
        if self.corpus not in CORPORA:
            raise ValueError(f"there is no corpus '{self.corpus}'{did_you_mean(self.corpus, CORPORA)}")
        for path in self.paths:
            if "\0" in str(path):
                raise ValueError(f"paths: {str(path)!r} contains a NUL character, which no name may; correct the path")


class Prepared(NamedTuple):
    """The tokenizer and token stores of a corpus."""

    key: str
    """The name of the cache folder. It changes with the text, the tokenizer and its settings."""
    folder: Path
    tokenizer: Tokenizer
    stores: dict[Split, TokenStore]
    notes: list[str]
    """Lines for the preparation report, such as how each file was split."""
    known_edition: bool | None
    """Whether the checksums match the known edition; None if no edition is known or the source was not read."""


def prepare(
    config: DataConfig,
    data_dir: Path | None = None,
    tokenizer: Tokenizer | None = None,
    separated: bool = True,
) -> Prepared:
    """Return the tokenizer and token stores of a corpus; train and encode only what the cache lacks.

    Args:
        config: the corpus and its tokenizer settings.
        data_dir: root data directory.
        tokenizer: an existing tokenizer to use instead of the corpus's own, to evaluate a model on other text. The
            corpus then needs no training split.
        separated: if False, documents follow each other without an end-of-document token, for models that were
            trained without one.
    """
    return _prepared(CORPORA[config.corpus](data_dir, config.paths), config.tokenizer, tokenizer, separated)


def prepare_other(
    data: DataConfig,
    tokenizer: Tokenizer,
    corpus: str,
    paths: tuple[Path, ...] = (),
    data_dir: Path | None = None,
    *,
    whole: bool = False,
) -> Prepared:
    """Prepare another corpus, or files of text, with the tokenizer of a model that was trained on `data`.

    Args:
        data: the data of the model.
        tokenizer: the tokenizer of the model.
        corpus: name of the corpus.
        paths: files or folders to read for the corpus 'text'.
        data_dir: root data directory.
        whole: whether files of text are left undivided. Their split is then `all`.
    """
    separated = CORPORA[data.corpus].separated  # a model trained on one stream never saw an end-of-document token
    if whole:
        return _prepared(WholeText(data_dir, paths), data.tokenizer, tokenizer, separated)
    return prepare(replace(data, corpus=corpus, paths=paths), data_dir, tokenizer, separated)


def _prepared(corpus: Corpus, config: TokenizerConfig, tokenizer: Tokenizer | None, separated: bool) -> Prepared:
    census = census_of(corpus)
    for split in corpus.splits if tokenizer is None else ():
        if not census[split].bytes:
            raise UserError(f"corpus '{corpus.name}': its {split} split is empty: {corpus.why_empty(split)}")
    if tokenizer is None:
        if not census["train"].words:
            raise UserError(f"corpus '{corpus.name}': its train split has only white space; add text to it")
        tokenizer = trained_tokenizer(corpus, census, config)
    separator = tokenizer.end_of_document if corpus.separated and separated else None
    texts = [census[split].sha256 for split in corpus.splits]
    key = _key(corpus.name, tokenizer.vocab_size, texts, tokenizer.hash, separator)
    folder = _folder_of(key)
    if not folder.is_dir():
        with new_folder(folder) as partial:
            (partial / "tokenizer.model").write_bytes(tokenizer.model)
            _encode(corpus, census, tokenizer, separator, partial)
    edition = checksums_are_known(corpus, census)
    return open_prepared(key, corpus.splits)._replace(notes=corpus.notes(), known_edition=edition)


def open_prepared(key: str, splits: Sequence[Split] = SPLITS) -> Prepared:
    """Open the cached result of `prepare` by its key. The corpus is not read."""
    folder = _folder_of(key)
    if not is_prepared(key):
        raise UserError(f"the token store {folder} does not exist; create it with `logdepth prepare`")
    remedy = remedy_for(folder)
    stores = {split: TokenStore.open(folder, split) for split in splits}
    infos = [store.info for store in stores.values()]
    shared = {(info.corpus, info.vocab_size, info.tokenizer_hash, info.separator) for info in infos}
    corpus, vocab_size, tokenizer_hash, separator = shared.pop()
    texts = [info.text_sha256 for info in infos]
    if shared or key != _key(corpus, vocab_size, texts, tokenizer_hash, separator):
        raise UserError(
            f"{folder} does not hold what its name says: its files are damaged, were edited or are those of another "
            f"corpus; {remedy}"
        )
    tokenizer = Tokenizer.load(folder / "tokenizer.model", expected_hash=tokenizer_hash, remedy=remedy)
    return Prepared(key, folder, tokenizer, stores, [], None)


def is_prepared(key: str) -> bool:
    return os.path.isdir(_folder_of(key))  # noqa: PTH112  (False, not an error, for any bad name)


def _key(corpus: str, vocab_size: int, texts: list[str], tokenizer_hash: str, separator: int | None) -> str:
    """Return the name of a store, which is determined by the hashes of its splits' texts and of its tokenizer."""
    return f"{corpus}-{vocab_size}-{cache_key([VERSION, texts, tokenizer_hash, separator])}"


def _folder_of(key: str) -> Path:
    return cache_folder() / "stores" / key


def _encode(corpus: Corpus, census: Census, tokenizer: Tokenizer, separator: int | None, folder: Path) -> None:
    """Write every split's tokens in one pass over the text, with bounded memory."""
    dtype = dtype_for(tokenizer.vocab_size)
    num_tokens, num_unknown = dict.fromkeys(corpus.splits, 0), dict.fromkeys(corpus.splits, 0)
    hashes = {split: TextHash(corpus.separated) for split in corpus.splits}
    done, total = 0, sum(counts.bytes for counts in census.values())
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(f"encoding {corpus.name}", total, unit="bytes"))
        files: dict[Split, BinaryIO] = {
            split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in corpus.splits
        }
        for batch in _batches(corpus.passages()):
            for split, tokens in _encoded(batch, tokenizer, separator).items():
                array = np.array(tokens, dtype=dtype)
                files[split].write(array.tobytes())
                num_tokens[split] += len(array)
                num_unknown[split] += int((array == tokenizer.unknown).sum())
            for split, text, ends_document in batch:
                encoded = text.encode()
                hashes[split].update(encoded, ends_document)
                done += len(encoded)
            progress.update(done, f"{sum(num_tokens.values()) / 1e6:.1f} M tokens")
    refuse_changed_text(corpus, census, hashes)
    for split in corpus.splits:
        counts = census[split]
        info = StoreInfo(
            corpus=corpus.name,
            split=split,
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            tokenizer_hash=tokenizer.hash,
            text_sha256=counts.sha256,
            tokens=num_tokens[split],
            unknown=num_unknown[split],
            documents=counts.documents,
            words=counts.words,
            line_ends=counts.line_ends,
            bytes=counts.bytes,
            separator=separator,
        )
        write_sidecar(folder, info)


def _batches(passages: Iterator[Passage]) -> Iterator[list[Passage]]:
    batch, characters = [], 0
    for passage in passages:
        batch.append(passage)
        characters += len(passage.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(batch: list[Passage], tokenizer: Tokenizer, separator: int | None) -> dict[Split, list[int]]:
    """Return the tokens of each split: documents in order, each followed by the separator."""
    cut = [list(pieces(passage.text)) for passage in batch]
    encoded = iter(tokenizer.encode_many([piece for one in cut for piece in one]))
    tokens: dict[Split, list[int]] = {passage.split: [] for passage in batch}
    for passage, one in zip(batch, cut, strict=True):
        for _ in one:
            tokens[passage.split].extend(next(encoded))
        if passage.ends_document and separator is not None:
            tokens[passage.split].append(separator)
    return tokens
