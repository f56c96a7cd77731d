"""Token stores: one split as a memory-mapped `.bin` file of token ids and a `.json` file that describes it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logdepth.atomic import read_json, write_json
from logdepth.data.passages import Split
from logdepth.errors import UserError

Tokens = NDArray[np.integer[Any]]


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


class TokenStore:
    """The memory-mapped tokens of one split."""

    def __init__(self, tokens: Tokens, info: StoreInfo) -> None:
        self.tokens = tokens
        self.info = info

    @classmethod
    def open(cls, folder: Path, split: Split) -> "TokenStore":
        sidecar, file = folder / f"{split}.json", folder / f"{split}.bin"
        try:
            info = StoreInfo(**read_json(sidecar))
        except TypeError as error:
            raise UserError(
                f"{sidecar} was written by another version ({error}); remove {folder} and prepare the corpus again"
            ) from None
        expected = info.tokens * np.dtype(info.dtype).itemsize
        found = file.stat().st_size if file.is_file() else 0
        if found != expected:
            raise UserError(
                f"{file} has {found:,} bytes instead of {expected:,}; remove {folder} and prepare the corpus again"
            )
        tokens = np.memmap(file, dtype=info.dtype, mode="r") if found else np.zeros(0, dtype=info.dtype)
        return cls(tokens, info)

    def __len__(self) -> int:
        return len(self.tokens)

    def refuse_if_nothing_to_predict(self) -> None:
        """Raise a UserError if the split has fewer than two tokens."""
        if len(self) < 2:
            where = f"the {self.info.split} split of '{self.info.corpus}'"
            raise UserError(f"{where} has fewer than two tokens, so there is nothing to predict; add text to it")

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """Return `length` tokens starting at `start`; fewer at the end of the split."""
        return self.tokens[start : start + length].astype(np.int64)


def write_sidecar(folder: Path, info: StoreInfo) -> None:
    write_json(folder / f"{info.split}.json", asdict(info))


def dtype_for(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 2**16 else "<u4"
