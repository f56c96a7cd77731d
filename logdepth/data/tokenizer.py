"""SentencePiece BPE tokenizers, one per corpus and settings, cached under a hash of the text and the settings."""

import hashlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece

from logdepth.atomic import new_folder, write_json
from logdepth.checksums import mismatch, seal
from logdepth.data.cache import cache_folder, cache_key, read_sealed
from logdepth.data.census import Census, TextHash, refuse_changed_text
from logdepth.data.corpus import Corpus
from logdepth.data.passages import place_of
from logdepth.errors import UserError
from logdepth.progress import Progress

VERSION = 2
MIN_VOCAB = 8
MAX_PIECE_BYTES = 16_000
"""Maximum bytes encoded at once, because encoding takes superlinear time. Splitting at spaces changes no token."""
LINES = re.compile(r"[^\n]*\n|[^\n]+")
MAX_WORD = 3_600
"""Maximum characters without a space that the tokenizer is trained on at once. SentencePiece ends the process at more
than 65,535, after a normalisation that replaces a character by up to 18."""
LONG_WORDS = re.compile(rf"(?<![^ \n])[^ \n]{{{MAX_WORD + 1},}}")
BETWEEN_WORDS = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Settings of a SentencePiece BPE tokenizer.

    The defaults are the paper's: full character coverage, NFKC normalisation, line breaks become spaces.
    """

    vocab_size: int = 1_500
    """Vocabulary size V, in pieces."""
    lossless: bool = False
    """Preserve all text: no normalisation, line breaks kept, unknown characters encoded as bytes, for which 256 pieces
    are needed. Only U+2581 changes: it becomes a space. Recipes for the corpus 'text' are lossless by default."""
    sample_bytes: int = 100_000_000
    """Bytes of text to train the tokenizer on, approximately. Larger corpora are sampled by hash."""

    def __post_init__(self) -> None:
        if not MIN_VOCAB <= self.vocab_size < 2**31:
            raise ValueError(f"vocab_size must be at least {MIN_VOCAB} and below 2**31; got {self.vocab_size}")
        if not 1 <= self.sample_bytes < 2**63:
            raise ValueError(f"sample_bytes must be from 1 to below 2^63; got {self.sample_bytes}")

    def settings(self) -> dict[str, Any]:
        """Return the arguments for SentencePiece's trainer."""
        shared: dict[str, Any] = {"model_type": "bpe", "vocab_size": self.vocab_size, "minloglevel": 2}
        shared["max_sentence_length"] = 2**30  # the default skips lines above 4,192 bytes
        if not self.lossless:
            return shared | {"character_coverage": 1.0}
        return shared | {
            "character_coverage": 0.9995,  # byte_fallback encodes the rest
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
        except RuntimeError:
            raise UserError("not a SentencePiece model") from None

    @classmethod
    def load(cls, file: Path, *, expected_hash: str | None = None, remedy: str = "restore the file") -> "Tokenizer":
        """Load a `tokenizer.model` file.

        Args:
            file: the file.
            expected_hash: the hash that the file must have, if it is known.
            remedy: what to do if the file is missing or damaged, for the message.
        """
        if not file.is_file():
            raise UserError(f"{file} does not exist: the tokenizer is missing; {remedy}")
        model = file.read_bytes()
        if expected_hash is not None and hash_of(model) != expected_hash:
            raise mismatch(file, remedy)
        try:
            return cls(model)
        except UserError as error:
            raise UserError(f"{file} is damaged: {error}; {remedy}") from None

    @cached_property
    def hash(self) -> str:
        return hash_of(self.model)

    @property
    def vocab_size(self) -> int:
        size: int = self.processor.get_piece_size()
        return size

    @property
    def end_of_document(self) -> int:
        """The token that follows each document in corpora of separate documents."""
        token: int = self.processor.eos_id()
        return token

    @property
    def unknown(self) -> int:
        """The token for text that the vocabulary cannot represent."""
        token: int = self.processor.unk_id()
        return token

    def encode(self, text: str) -> list[int]:
        """Return the tokens of one text."""
        return [token for piece in self.encode_many(list(pieces(text))) for token in piece]

    def encode_many(self, texts: list[str], num_threads: int = -1) -> list[list[int]]:
        """Return the tokens of each text; by default, use all cores."""
        encoded: list[list[int]] = self.processor.encode(texts, num_threads=num_threads)
        return encoded

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.processor.decode(list(tokens))
        # SentencePiece writes spaces as U+2581. Where the training text had none, this comes back from single bytes.
        return text.replace("\u2581", " ")


def hash_of(model: bytes) -> str:
    """Return the hash of a SentencePiece model by which stores name their tokenizer."""
    return hashlib.sha256(model).hexdigest()[:16]


def pieces(text: str) -> Iterator[str]:
    """Split a text into lines, and long lines at spaces. Encoding the pieces gives the tokens of the whole text."""
    for line in LINES.findall(text):
        yield from _split_line(line)


def trained_tokenizer(corpus: Corpus, census: Census, config: TokenizerConfig) -> Tokenizer:
    """Return the corpus's tokenizer from the cache; train it if it is not there."""
    key = cache_key([VERSION, census["train"].sha256, asdict(config), config.settings()])
    folder = cache_folder() / "tokenizers" / f"{corpus.name}-{config.vocab_size}-{key}"
    facts: dict[str, Any] = {
        "corpus": corpus.name,
        "text_sha256": census["train"].sha256,
        "config": asdict(config),
        "settings": config.settings(),
    }
    if not folder.is_dir():
        share = min(1.0, config.sample_bytes / census["train"].bytes)
        with Progress(f"tokenizer of {config.vocab_size:,} pieces for {corpus.name}", unit="bytes") as progress:
            sample = _Sample(corpus, share, progress)
            model = _train(sample, config, corpus.name)
        refuse_changed_text(corpus, census, {"train": sample.hash})
        with new_folder(folder) as partial:
            (partial / "tokenizer.model").write_bytes(model)
            training = {
                "sampled_share": share,
                "sampled_bytes": sample.bytes,
                "sentencepiece": sentencepiece.__version__,
            }
            write_json(partial / "tokenizer.json", seal(facts | training | {"tokenizer_hash": hash_of(model)}))
    return _load_cached(folder, facts)


def _load_cached(folder: Path, facts: dict[str, Any]) -> Tokenizer:
    """Load a tokenizer from the cache. Raise a UserError if it is damaged, or not the one that `facts` describe."""
    file = folder / "tokenizer.json"
    remedy = f"remove {shlex.quote(str(folder))} and prepare the corpus again"
    saved = read_sealed(file, remedy, since="tokenizer_hash")
    if any(saved.get(name) != fact for name, fact in facts.items()):
        raise mismatch(file, remedy)
    return Tokenizer.load(folder / "tokenizer.model", expected_hash=saved.get("tokenizer_hash"), remedy=remedy)


class _Sample:
    """The lines of the training split; for a large corpus, those of a sample of passages selected by hash."""

    def __init__(self, corpus: Corpus, share: float, progress: Progress) -> None:
        self.corpus, self.share, self.progress = corpus, share, progress
        self.bytes = 0
        self.hash = TextHash(corpus.separated)
        """Hash of all text of the split, sampled or not."""
        self.error: BaseException | None = None
        """The exception raised while reading, because SentencePiece passes on only its text."""

    def __iter__(self) -> Iterator[str]:
        try:
            for split, text, ends_document in self.corpus.passages():
                if split == "train":
                    encoded = text.encode()
                    self.hash.update(encoded, ends_document)
                    if self._is_sampled(encoded):
                        self.bytes += len(encoded)
                        self.progress.update(self.bytes, f"{self.bytes / 1e6:.0f} MB read")
                        yield from LONG_WORDS.sub(_cut_word, text).split("\n")
        except BaseException as error:
            self.error = error
            raise

    def _is_sampled(self, encoded: bytes) -> bool:
        return self.share >= 1.0 or place_of(encoded, b"sample") < self.share


def _cut_word(match: re.Match[str]) -> str:
    word = match[0]
    return "\n".join(word[start : start + MAX_WORD] for start in range(0, len(word), MAX_WORD))


def _train(sample: _Sample, config: TokenizerConfig, corpus: str) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample), model_writer=model, **config.settings()
        )
    except RuntimeError as error:
        if sample.error is not None:
            raise sample.error from None
        limit = re.search(r"to a value <= (\d+)", str(error))
        needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        if needed:
            what = "its characters and all bytes" if config.lossless else "its characters"
            advice = f"{what} require at least {needed[1]} pieces; set --data.tokenizer.vocab-size to that or more"
        elif limit and int(limit[1]) >= MIN_VOCAB:
            advice = f"set --data.tokenizer.vocab-size to at most {limit[1]}"
        else:  # SentencePiece names lines of its source here
            raise UserError(
                f"corpus '{corpus}': its train split has too little text for a tokenizer; add text to it"
            ) from None
        raise UserError(
            f"corpus '{corpus}' does not support a vocabulary of {config.vocab_size:,} pieces: {advice}"
        ) from None
    return model.getvalue()


def _split_line(line: str, max_bytes: int = MAX_PIECE_BYTES) -> Iterator[str]:
    """Split a line into parts of about `max_bytes` bytes. Each part but the first begins with a single space."""
    start, width = 0, 1 if line.isascii() else 4
    while (len(line) - start) * width > max_bytes:
        space = BETWEEN_WORDS.search(line, start + max_bytes // width)
        if space is None:
            break
        yield line[start : space.start()]
        start = space.start()
    yield line[start:]
