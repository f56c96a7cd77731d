"""From a corpus to token stores: census, tokenizer, encoding. What is there already is not made again."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from logdepth.atomic import new_folder
from logdepth.data.cache import cache_folder, key_of
from logdepth.data.census import Census, TextHash, census_of, checksums_are_known, refuse_changed_text
from logdepth.data.corpora import CORPORA
from logdepth.data.corpus import Corpus
from logdepth.data.passages import SPLITS, Passage, Split
from logdepth.data.store import StoreInfo, TokenStore, dtype_for, write_sidecar
from logdepth.data.tokenizer import Tokenizer, TokenizerConfig, pieces, trained_tokenizer
from logdepth.errors import UserError, did_you_mean
from logdepth.progress import Progress

VERSION = 2
BATCH_CHARACTERS = 4_000_000
"""Text encoded in one call: enough for all cores, little enough for any memory."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, and how it becomes tokens."""

    corpus: str = "pydocs"
    """Name of the corpus."""
    paths: tuple[Path, ...] = ()
    """Files or folders, for the corpus 'text'."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """How it is cut into tokens."""

    def __post_init__(self) -> None:
        if self.corpus not in CORPORA:
            raise ValueError(f"there is no corpus '{self.corpus}'{did_you_mean(self.corpus, CORPORA)}")


class Prepared(NamedTuple):
    """A corpus ready to train on."""

    key: str
    """The name of its folder in the cache: it changes with the text, the tokenizer and its settings."""
    folder: Path
    tokenizer: Tokenizer
    stores: dict[Split, TokenStore]
    notes: list[str]
    """What was read, where users may wonder."""
    known_edition: bool | None
    """Whether its checksums are those of the known edition; None where none is known or the source was not read."""


def prepare(
    config: DataConfig,
    data_dir: Path | None = None,
    tokenizer: Tokenizer | None = None,
    separated: bool = True,
) -> Prepared:
    """The corpus's tokenizer and token stores, made where they are not in the cache yet.

    With a `tokenizer` given, as for evaluating a model on text that is not its own, that one is used, and the corpus
    need not have a training split. Without `separated` documents follow each other without a token between them, for
    models that never saw one.
    """
    corpus = CORPORA[config.corpus](data_dir, config.paths)
    census = census_of(corpus)
    for split in SPLITS if tokenizer is None else ():
        if not census[split].bytes:
            raise UserError(
                f"corpus '{corpus.name}': its {split} split is empty; it needs more documents, or a file of that split"
            )
    if tokenizer is None:
        tokenizer = trained_tokenizer(corpus, census, config.tokenizer)
    separator = tokenizer.end_of_document if corpus.separated and separated else None
    texts = [census[split].sha256 for split in SPLITS]
    key = f"{corpus.name}-{tokenizer.vocab_size}-{key_of([VERSION, texts, tokenizer.hash, separator])}"
    folder = _folder_of(key)
    if not folder.is_dir():
        with new_folder(folder) as partial:
            (partial / "tokenizer.model").write_bytes(tokenizer.model)
            _encode(corpus, census, tokenizer, separator, partial)
    edition = checksums_are_known(corpus, census)
    return open_prepared(key)._replace(notes=corpus.notes(), known_edition=edition)


def prepare_other(
    data: DataConfig, tokenizer: Tokenizer, corpus: str, paths: tuple[Path, ...] = (), data_dir: Path | None = None
) -> Prepared:
    """Another corpus, or files of text, in the tokens of models that were trained on `data`."""
    separated = CORPORA[data.corpus].separated  # a model of one stream never saw a document end
    return prepare(replace(data, corpus=corpus, paths=paths), data_dir, tokenizer, separated)


def open_prepared(key: str) -> Prepared:
    """What `prepare` made under this key, without looking at the corpus."""
    folder = _folder_of(key)
    if not folder.is_dir():
        raise UserError(f"the token store {folder} is not there; make it with `logdepth prepare`")
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    return Prepared(key, folder, tokenizer, {split: TokenStore.open(folder, split) for split in SPLITS}, [], None)


def is_prepared(key: str) -> bool:
    return _folder_of(key).is_dir()


def _folder_of(key: str) -> Path:
    return cache_folder() / "stores" / key


def _encode(corpus: Corpus, census: Census, tokenizer: Tokenizer, separator: int | None, folder: Path) -> None:
    """Writes every split's tokens in one pass over the text, with bounded memory."""
    dtype = dtype_for(tokenizer.vocab_size)
    num_tokens, num_unknown = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    hashes = {split: TextHash(corpus.separated) for split in SPLITS}
    done, total = 0, sum(counts.bytes for counts in census.values())
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(f"encoding {corpus.name}", total, unit="bytes"))
        files: dict[Split, BinaryIO] = {
            split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS
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
    for split in SPLITS:
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
    """The tokens of each split, documents in order, each followed by the separator."""
    cut = [list(pieces(passage.text)) for passage in batch]
    encoded = iter(tokenizer.encode_many([piece for one in cut for piece in one]))
    tokens: dict[Split, list[int]] = {split: [] for split in SPLITS}
    for passage, one in zip(batch, cut, strict=True):
        for _ in one:
            tokens[passage.split].extend(next(encoded))
        if passage.ends_document and separator is not None:
            tokens[passage.split].append(separator)
    return tokens
