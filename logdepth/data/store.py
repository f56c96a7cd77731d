"""Token stores: one split as a memory-mapped `.bin` file of token ids and a `.json` file that describes it.

The `.json` file is sealed and has the checksum of the `.bin` file, which is verified when its tokens are first used.
"""

import shlex
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logdepth.atomic import write_json
from logdepth.checksums import checksum_of_bytes, mismatch, seal
from logdepth.config import from_dict
from logdepth.data.cache import read_sealed
from logdepth.data.passages import Split
from logdepth.errors import UserError

Tokens = NDArray[np.integer[Any]]
DTYPES = ("<u2", "<u4")
_verified: set[tuple[int, ...]] = set()
"""Identities of the `.bin` files that this process has verified, so that each is read once for this."""


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """The contents of the `.json` file of a `.bin` file."""

    corpus: str
    split: Split
    dtype: str
    """NumPy type of a token id: little-endian uint16 (`<u2`) or uint32 (`<u4`)."""
    vocab_size: int
    tokenizer_hash: str
    text_sha256: str
    tokens: int
    unknown: int
    """Number of unknown tokens. Each replaces text that the tokenizer cannot represent, so that text is lost."""
    documents: int
    words: int
    line_ends: int
    bytes: int
    separator: int | None
    """The token after every document; None if the split is one stream."""
    tokens_sha256: str | None = None
    """Checksum of the `.bin` file; None in stores of older versions."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "tokens", "unknown", "documents", "words", "line_ends", "bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")


class TokenStore:
    """The memory-mapped tokens of one split.

    Args:
        tokens: the tokens.
        info: what is known about them.
        file: the file that holds them, to be verified when they are first used.
    """

    def __init__(self, tokens: Tokens, info: StoreInfo, file: Path | None = None) -> None:
        self._tokens, self.info, self.file = tokens, info, file

    @classmethod
    def open(cls, folder: Path, split: Split) -> "TokenStore":
        sidecar, file = folder / f"{split}.json", folder / f"{split}.bin"
        remedy = remedy_for(folder)
        fields = read_sealed(sidecar, remedy, since="tokens_sha256")
        try:
            info = from_dict(StoreInfo, fields, split)
        except UserError as error:
            raise UserError(f"{sidecar} is damaged or was written by another version ({error}); {remedy}") from None
        expected = info.tokens * np.dtype(info.dtype).itemsize
        found = file.stat().st_size if file.is_file() else 0
        if found != expected:
            raise UserError(f"{file} has {found:,} bytes instead of {expected:,}; {remedy}")
        tokens = np.memmap(file, dtype=info.dtype, mode="r") if found else np.zeros(0, dtype=info.dtype)
        return cls(tokens, info, file)

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens. Those of a file are verified when they are first used, because this reads all of them."""
        self.verify()
        return self._tokens

    def verify(self) -> None:
        """Verify the checksum of the tokens, unless this process has done so already."""
        if self.file is not None and len(self):
            status = self.file.stat()
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if identity not in _verified:
                self._verify(self.file)
                _verified.add(identity)

    def _verify(self, file: Path) -> None:
        remedy = remedy_for(file.parent)
        if self.info.tokens_sha256 is None:  # of an older version: only what would crash can be found
            highest = int(self._tokens.max())
            if highest >= self.info.vocab_size:
                what = f"token {highest:,}, but its vocabulary has {self.info.vocab_size:,} tokens"
                raise UserError(f"{file} is damaged: it has {what}; {remedy}")
        elif checksum_of_bytes(self._tokens) != self.info.tokens_sha256:
            raise mismatch(file, remedy)

    def __len__(self) -> int:
        return len(self._tokens)

    def refuse_if_nothing_to_predict(self) -> None:
        """Raise a UserError if the split has fewer than two tokens, or no words that a loss could be shared among."""
        info = self.info
        where = "the text" if info.split == "all" else f"the {info.split} split of '{info.corpus}'"
        if len(self) < 2:
            raise UserError(f"{where} has fewer than two tokens, so there is nothing to predict; add text to it")
        if not info.words + info.line_ends or not info.bytes:
            raise UserError(f"{where} has no words, so there is nothing to measure; add text to it")

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """Return `length` tokens starting at `start`; fewer at the end of the split."""
        return self.tokens[start : start + length].astype(np.int64)


def write_sidecar(folder: Path, info: StoreInfo) -> None:
    """Write the `.json` file of a split whose `.bin` file is complete."""
    file = folder / f"{info.split}.bin"
    tokens = np.memmap(file, dtype=info.dtype, mode="r") if info.tokens else np.zeros(0, dtype=info.dtype)
    write_json(folder / f"{info.split}.json", seal(asdict(replace(info, tokens_sha256=checksum_of_bytes(tokens)))))


def remedy_for(folder: Path) -> str:
    """Return what to do if a file of a store is damaged."""
    return f"remove {shlex.quote(str(folder))} and prepare the corpus again"


def dtype_for(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 2**16 else "<u4"
