"""Stream documents from txt, jsonl and parquet files, uncompressed or compressed with gz, xz or zst."""

import contextlib
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from logdepth.errors import UserError

COMPRESSIONS = (".gz", ".xz", ".zst")
JSON_LINES = (".jsonl", ".ndjson")
PLAIN = (".txt", ".md", ".tokens", ".raw")
PARQUET = (".parquet",)


def kind_of(file: Path) -> str | None:
    """Return the suffix of a file's format without that of its compression; None if the format is not supported."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in COMPRESSIONS]
    kind = suffixes[-1] if suffixes else ""
    return kind if kind in (*JSON_LINES, *PLAIN, *PARQUET) else None


def documents(file: Path) -> Iterator[str]:
    """Iterate over the documents of a jsonl file with a "text" field or a parquet file with a "text" column."""
    if kind_of(file) in PARQUET:
        yield from _parquet(file)
        return
    with opened(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _text_of(line, f"{file}:{number}")


def lines(file: Path) -> Iterator[str]:
    """Iterate over the lines of a text file, line ends included and unchanged."""
    with opened(file) as stream:
        yield from stream


@contextlib.contextmanager
def opened(file: Path) -> Iterator[TextIO]:
    """Open a file as decompressed text with unchanged line ends. Damaged data raises a UserError naming the file."""
    try:
        with _decompressed(file) as stream, io.TextIOWrapper(stream, encoding="utf-8", newline="\n") as text:
            yield text
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8"
        ) from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{file} is damaged or truncated ({error}); replace it with an intact copy") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None


@contextlib.contextmanager
def _decompressed(file: Path) -> Iterator[BinaryIO]:
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".zst": _open_zst}
    with openers.get(file.suffix, open)(file, "rb") as stream:
        yield stream


@contextlib.contextmanager
def _open_zst(file: Path, mode: str) -> Iterator[BinaryIO]:
    zstandard = _needed("zstandard", file)
    with file.open(mode) as compressed, io.BufferedReader(_ZstFrames(compressed, zstandard), 2**20) as stream:
        try:
            yield stream
        except zstandard.ZstdError as error:
            raise UserError(f"{file} is damaged or truncated ({error}); replace it with an intact copy") from None


class _ZstFrames(io.RawIOBase):
    """Reads all frames of a file in order. zstandard's own reader stops after one and accepts a truncated frame."""

    def __init__(self, compressed: Any, zstandard: Any) -> None:
        self.compressed, self.zstandard = compressed, zstandard
        self.frame: Any = None
        self.ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self.ready:
            block = (self.frame.unused_data if self.frame is not None and self.frame.eof else b"") or (
                self.compressed.read(2**17)
            )
            if not block:
                if self.frame is not None and not self.frame.eof:
                    raise EOFError("the last frame is incomplete")
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
            self.ready = self.frame.decompress(block)
        count = min(len(target), len(self.ready))
        target[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count


def _text_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}); each line must be one JSON object") from None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        found = f"fields {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise UserError(f'{where} must have a "text" field that is a string; it has {found}')
    return text


def _parquet(file: Path) -> Iterator[str]:
    parquet = _needed("pyarrow.parquet", file)
    try:
        table = parquet.ParquetFile(file)
        if "text" not in table.schema_arrow.names:
            raise UserError(f'{file} must have a "text" column; it has {", ".join(table.schema_arrow.names)}')
        if "string" not in str(table.schema_arrow.field("text").type):
            raise UserError(f'{file}: its "text" column must hold strings; got {table.schema_arrow.field("text").type}')
        for batch in table.iter_batches(columns=["text"], batch_size=256):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"{file} is damaged or not a parquet file ({str(error).splitlines()[0]})") from None


def _needed(module: str, file: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise UserError(f"reading {file} requires {package}; install it with `pip install '.[data]'`") from None
