"""Documents from files: txt, jsonl and parquet, plain or compressed with gz, xz or zst, streamed."""

import contextlib
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from logdepth.errors import UserError

COMPRESSIONS = (".gz", ".xz", ".zst")
JSON_LINES = (".jsonl", ".ndjson")
PLAIN = (".txt", ".md", ".tokens", ".raw")
PARQUET = (".parquet",)


def kind_of(file: Path) -> str | None:
    """The suffix that says what a file holds, compression aside; None where it is not one of ours."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in COMPRESSIONS]
    kind = suffixes[-1] if suffixes else ""
    return kind if kind in (*JSON_LINES, *PLAIN, *PARQUET) else None


def documents(file: Path) -> Iterator[str]:
    """The texts of a file of documents: jsonl with a "text" field, or parquet with such a column."""
    if kind_of(file) in PARQUET:
        yield from _parquet(file)
        return
    with opened(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _text_of(line, f"{file}:{number}")


def lines(file: Path) -> Iterator[str]:
    """The lines of a text file, each with its end, as they are."""
    with opened(file) as stream:
        yield from stream


@contextlib.contextmanager
def opened(file: Path) -> Iterator[TextIO]:
    """The decompressed text, line ends as they are; what is damaged becomes an error that names the file."""
    try:
        with _decompressed(file) as stream, io.TextIOWrapper(stream, encoding="utf-8", newline="\n") as text:
            yield text
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError) as error:
        raise UserError(f"{file} is damaged or cut short ({error}); get it again") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None


@contextlib.contextmanager
def _decompressed(file: Path) -> Iterator[BinaryIO]:
    if file.suffix == ".zst":
        zstandard = _needed("zstandard", file)
        with file.open("rb") as compressed, zstandard.ZstdDecompressor().stream_reader(compressed) as stream:
            try:
                yield stream
            except zstandard.ZstdError as error:
                raise UserError(f"{file} is damaged or cut short ({error}); get it again") from None
        return
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    with openers.get(file.suffix, open)(file, "rb") as stream:
        yield stream


def _text_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg})") from None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        found = f"fields {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise UserError(f'{where} has no "text" field that is a string; it has {found}')
    return text


def _parquet(file: Path) -> Iterator[str]:
    parquet = _needed("pyarrow.parquet", file)
    try:
        table = parquet.ParquetFile(file)
        if "text" not in table.schema_arrow.names:
            raise UserError(f'{file} has no "text" column; it has {", ".join(table.schema_arrow.names)}')
        for batch in table.iter_batches(columns=["text"], batch_size=256):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"{file} is damaged or no parquet file ({str(error).splitlines()[0]})") from None


def _needed(module: str, file: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise UserError(f"reading {file} needs {package}: `pip install 'logdepth[data]'`") from None
