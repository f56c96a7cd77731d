"""SentencePiece BPE: trained per corpus and vocabulary, kept under a hash of text and settings."""

import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece

from logdepth.atomic import new_folder, write_json
from logdepth.data.cache import cache_folder, key_of
from logdepth.data.census import Census, TextHash, refuse_changed_text
from logdepth.data.corpus import Corpus
from logdepth.data.passages import place_of
from logdepth.errors import UserError
from logdepth.progress import Progress

VERSION = 2
LONGEST_PIECE = 16_000
"""Encoding a line takes more than linear time; longer ones are cut at a space, which changes no token."""
LINES = re.compile(r"[^\n]*\n|[^\n]+")
BETWEEN_WORDS = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """SentencePiece BPE. The defaults are the paper's: full character coverage, NFKC, line breaks become spaces."""

    vocab_size: int = 1_500
    """V, pieces in the vocabulary."""
    lossless: bool = False
    """Keep all text: no normalisation, line breaks kept, unknown characters as bytes (but U+2581 becomes a space)."""
    sample_bytes: int = 100_000_000
    """Train the tokenizer on about this much text; larger corpora are sampled by hash."""

    def __post_init__(self) -> None:
        if not 8 <= self.vocab_size < 2**31:
            raise ValueError(f"vocab_size must be at least 8; got {self.vocab_size}")
        if self.sample_bytes < 1:
            raise ValueError(f"sample_bytes must be at least 1; got {self.sample_bytes}")

    def settings(self) -> dict[str, Any]:
        """What SentencePiece's trainer is given."""
        shared: dict[str, Any] = {"model_type": "bpe", "vocab_size": self.vocab_size, "minloglevel": 2}
        shared["max_sentence_length"] = 2**30  # by default it would skip lines above 4,192 bytes
        if not self.lossless:
            return shared | {"character_coverage": 1.0}
        return shared | {
            "character_coverage": 0.9995,  # the rest are bytes
            "normalization_rule_name": "identity",
            "byte_fallback": True,
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
        }


class Tokenizer:
    """A trained SentencePiece model."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"not a SentencePiece model ({error})") from None

    @classmethod
    def load(cls, file: Path) -> "Tokenizer":
        if not file.is_file():
            raise UserError(f"{file} is not there: the tokenizer is missing")
        try:
            return cls(file.read_bytes())
        except UserError as error:
            raise UserError(f"{file} is damaged: {error}") from None

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.model).hexdigest()[:16]

    @property
    def vocab_size(self) -> int:
        size: int = self.processor.get_piece_size()
        return size

    @property
    def end_of_document(self) -> int:
        """The token that keeps documents apart, where a corpus has documents."""
        token: int = self.processor.eos_id()
        return token

    @property
    def unknown(self) -> int:
        """The token of text that the vocabulary cannot spell."""
        token: int = self.processor.unk_id()
        return token

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, whole."""
        return [token for piece in self.encode_many(list(pieces(text))) for token in piece]

    def encode_many(self, texts: list[str], num_threads: int = -1) -> list[list[int]]:
        """The tokens of each text, on all cores."""
        encoded: list[list[int]] = self.processor.encode(texts, num_threads=num_threads)
        return encoded

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.processor.decode(list(tokens))
        return text


def pieces(text: str) -> Iterator[str]:
    """The text in lines, long ones cut at a space: encoding them one by one gives the tokens of the whole."""
    for line in LINES.findall(text):
        yield from _cut(line)


def trained_tokenizer(corpus: Corpus, census: Census, config: TokenizerConfig) -> Tokenizer:
    """The corpus's tokenizer, trained where there is none yet."""
    key = key_of([VERSION, census["train"].sha256, asdict(config), config.settings()])
    folder = cache_folder() / "tokenizers" / f"{corpus.name}-{config.vocab_size}-{key}"
    if not folder.is_dir():
        share = min(1.0, config.sample_bytes / census["train"].bytes)
        with Progress(f"tokenizer of {config.vocab_size:,} pieces for {corpus.name}", unit="bytes") as progress:
            sample = _Sample(corpus, share, progress)
            model = _train(sample, config, corpus.name)
        refuse_changed_text(corpus, census, {"train": sample.hash})
        with new_folder(folder) as partial:
            (partial / "tokenizer.model").write_bytes(model)
            facts = {
                "corpus": corpus.name,
                "text_sha256": census["train"].sha256,
                "config": asdict(config),
                "sampled_share": share,
                "sampled_bytes": sample.bytes,
                "settings": config.settings(),
                "sentencepiece": sentencepiece.__version__,
            }
            write_json(partial / "tokenizer.json", facts)
    return Tokenizer.load(folder / "tokenizer.model")


class _Sample:
    """The training split's lines; of a large corpus, a share of passages that their hashes choose."""

    def __init__(self, corpus: Corpus, share: float, progress: Progress) -> None:
        self.corpus, self.share, self.progress = corpus, share, progress
        self.bytes = 0
        self.hash = TextHash(corpus.separated)
        """Of all the text of the split, chosen or not."""
        self.error: BaseException | None = None
        """What went wrong while reading: SentencePiece would only hand on its text."""

    def __iter__(self) -> Iterator[str]:
        try:
            for split, text, ends_document in self.corpus.passages():
                if split == "train":
                    encoded = text.encode()
                    self.hash.update(encoded, ends_document)
                    if self._chosen(encoded):
                        self.bytes += len(encoded)
                        self.progress.update(self.bytes, f"{self.bytes / 1e6:.0f} MB read")
                        yield from text.split("\n")
        except BaseException as error:
            self.error = error
            raise

    def _chosen(self, encoded: bytes) -> bool:
        return self.share >= 1.0 or place_of(encoded, b"sample") < self.share


def _train(sample: _Sample, config: TokenizerConfig, corpus: str) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample), model_writer=model, **config.settings()
        )
    except RuntimeError as error:
        if sample.error is not None:
            raise sample.error from None
        reason = str(error).strip().splitlines()[-1]
        limit = re.search(r"<= (\d+)", reason)
        needed = re.search(r"required_chars\. \d+ vs (\d+)", reason)
        advice = f"set --data.tokenizer.vocab-size to at most {limit[1]}" if limit else reason
        advice = f"it needs at least {needed[1]} pieces for its characters" if needed else advice
        raise UserError(
            f"corpus '{corpus}' does not give a vocabulary of {config.vocab_size:,} pieces: {advice}"
        ) from None
    return model.getvalue()


def _cut(line: str, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """The line in parts of about `longest` bytes at most; cuts are at lone spaces, which start the next part."""
    start, width = 0, 1 if line.isascii() else 4
    while (len(line) - start) * width > longest:
        space = BETWEEN_WORDS.search(line, start + longest // width)
        if space is None:
            break
        yield line[start : space.start()]
        start = space.start()
    yield line[start:]
