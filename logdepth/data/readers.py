"""Stream documents from txt, jsonl and parquet files, uncompressed or compressed with gz, xz or zst."""

import contextlib
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

from logdepth.errors import UserError

COMPRESSIONS = (".gz", ".xz", ".zst")
JSON_LINES = (".jsonl", ".ndjson")
PLAIN = (".txt", ".md", ".tokens", ".raw")
PARQUET = (".parquet",)


def kind_of(file: Path) -> str | None:
    """Return the suffix of a file's format in lower case, without that of its compression.

    It is empty for a file without such a suffix, which may be plain text, and None if the format is not supported.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() not in COMPRESSIONS]
    kind = suffixes[-1] if suffixes else ""
    return kind if kind in ("", *JSON_LINES, *PLAIN, *PARQUET) else None


def is_plain(file: Path) -> bool:
    """Return whether a file is read as plain text, one document, rather than as rows of documents."""
    return kind_of(file) in ("", *PLAIN)


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
    openers: dict[str, Any] = {".xz": _open_xz, ".gz": gzip.open, ".zst": _open_zst}
    with openers.get(file.suffix.lower(), open)(file, "rb") as stream:
        yield stream


@contextlib.contextmanager
def _open_xz(file: Path, mode: str) -> Iterator[BinaryIO]:
    frames = _Frames(file.open(mode), lzma.LZMADecompressor, padding=4)
    with frames.compressed, io.BufferedReader(frames, 2**20) as stream:
        yield stream


@contextlib.contextmanager
def _open_zst(file: Path, mode: str) -> Iterator[BinaryIO]:
    zstandard = _needed("zstandard", file)
    frames = _Frames(file.open(mode), lambda: zstandard.ZstdDecompressor().decompressobj())
    with frames.compressed, io.BufferedReader(frames, 2**20) as stream:
        try:
            yield stream
        except zstandard.ZstdError as error:
            raise UserError(f"{file} is damaged or truncated ({error}); replace it with an intact copy") from None


class _Frames(io.RawIOBase):
    """Reads all compressed frames of a file in order, and nothing else.

    zstandard's own reader stops after one frame and accepts a truncated one. lzma's ignores what follows the last.

    Args:
        compressed: the file.
        decompressor: returns a decompressor for one frame.
        padding: zero bytes that may follow a frame, as a multiple of this number; 0 if none may.
    """

    def __init__(self, compressed: IO[bytes], decompressor: Callable[[], Any], padding: int = 0) -> None:
        self.compressed, self.decompressor, self.padding = compressed, decompressor, padding
        self.frame: Any = None
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self.ready:
            if self.frame is None or self.frame.eof:
                block = self._next_frame()
                if not block:
                    return 0
                self.frame = self.decompressor()
            else:
                block = self.compressed.read(2**14)
                if not block:
                    raise EOFError("the last frame is incomplete")
            self.ready = memoryview(self.frame.decompress(block))
        count = min(len(target), len(self.ready))
        target[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count

    def _next_frame(self) -> bytes:
        """Return the first bytes of the next frame; none at the end of the file."""
        if self.frame is None:
            return self.compressed.read(2**14)
        block: bytes = self.frame.unused_data or self.compressed.read(2**14)
        zeros = 0
        while self.padding and block:
            rest = block.lstrip(b"\0")
            zeros += len(block) - len(rest)
            if rest:
                block = rest
                break
            block = self.compressed.read(2**14)
        if zeros and zeros % self.padding:
            raise EOFError(f"{zeros} zero bytes follow a frame")
        return block


def _text_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}); each line must be one JSON object") from None
    except ValueError:
        raise UserError(f"{where} has a number with too many digits; shorten it or remove it") from None
    except RecursionError:
        raise UserError(f"{where} has brackets that are nested too deeply; remove them") from None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        found = f"the fields {_listed(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        if isinstance(row, dict) and "text" in row:
            found = f"{text!r:.60}"
        raise UserError(f'{where} must have a "text" field that is a string; it has {found}')
    return text


def _parquet(file: Path) -> Iterator[str]:
    pyarrow, parquet = _needed("pyarrow", file), _needed("pyarrow.parquet", file)
    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        if names.count("text") != 1:
            raise UserError(f'{file} must have one "text" column; it has the columns {_listed(names)}: rename one')
        kind = table.schema_arrow.field("text").type
        values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if str(values) not in ("string", "large_string", "string_view"):
            raise UserError(f'{file}: its "text" column must hold strings; got {kind}: convert it')
        for batch in table.iter_batches(columns=["text"], batch_size=256):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{file} is damaged or not a parquet file ({reason}); replace it with an intact copy") from None


def _listed(names: Iterable[str]) -> str:
    """Return names for a message of one line: quoted, and no more than a few."""
    quoted = [repr(name) for name in names]
    return ", ".join(quoted[:8]) + (f", … ({len(quoted)} in total)" if len(quoted) > 8 else "")


def _needed(module: str, file: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise UserError(f"reading {file} requires {package}; install it with `pip install '.[data]'`") from None
