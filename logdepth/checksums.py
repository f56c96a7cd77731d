"""Checksums: what is written to be read back carries a SHA-256 of its content, which is verified when it is read.

A JSON file is sealed: its field `sha256` covers all other fields, however they are formatted. Tensors and tokens have
a checksum over their bytes. Files of older versions carry no checksums; one line per folder says so.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from logdepth.errors import UserError

CHECKSUM = "sha256"
"""Field of a sealed mapping with the checksum of all other fields."""
BLOCK_BYTES = 2**23
"""Bytes that one thread hashes at a time."""
HANDED_OVER_BYTES = 2**21
"""Size in bytes from which a buffer is hashed by other threads. Below, handing it over takes longer than hashing it."""
_folders_without_checksums: set[Path] = set()


def checksum_of(value: Any) -> str:
    """Return the checksum of a JSON-compatible value. The order of fields and the formatting do not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def checksum_of_bytes(data: Any) -> str:
    """Return the checksum of a contiguous buffer, such as bytes or an array, hashed by all cores.

    It is the SHA-256 of the buffer's size and of the SHA-256 of each of its blocks.
    """
    blocks = _blocks(data)
    if len(blocks) < 2:  # no other thread could help
        return _combined(blocks, map(_digest, blocks))
    with hashing_threads() as threads:
        return start_checksum(data, threads)()


def hashing_threads() -> ThreadPoolExecutor:
    """Return threads for `start_checksum`, as many as there are cores. They are started when they are needed."""
    return ThreadPoolExecutor(os.cpu_count())


def start_checksum(data: Any, threads: Executor) -> Callable[[], str]:
    """Start to compute `checksum_of_bytes` of a contiguous buffer; return a function that waits for the result.

    The buffer must not change until then.
    """
    blocks = _blocks(data)
    if sum(map(len, blocks)) < HANDED_OVER_BYTES:
        checksum = _combined(blocks, map(_digest, blocks))
        return lambda: checksum
    digests = [threads.submit(_digest, block) for block in blocks]
    return lambda: _combined(blocks, (digest.result() for digest in digests))


def seal(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON file with their checksum as the last field."""
    return {**fields, CHECKSUM: checksum_of(fields)}


def unseal(saved: Mapping[str, Any], path: Path, remedy: str, *, required: bool = False) -> dict[str, Any]:
    """Return the fields without their checksum. Raise a UserError if they do not match it.

    Args:
        saved: the content of a file that `seal` made, or of a file of an older version.
        path: the file, for messages.
        remedy: what to do if it is damaged or edited, for the message.
        required: whether a missing checksum is an error. Otherwise, one line says that there is none.
    """
    fields = {name: value for name, value in saved.items() if name != CHECKSUM}
    if CHECKSUM in saved:
        if saved[CHECKSUM] != checksum_of(fields):
            raise mismatch(path, remedy)
    elif required:
        raise UserError(f"{path} has lost its checksum: it is damaged or was edited; {remedy}")
    else:
        say_without_checksums(path.parent)
    return fields


def mismatch(path: Path, remedy: str) -> UserError:
    """Return the error for content that does not match its checksum."""
    return UserError(f"{path} does not match its checksum: it is damaged, or was edited after it was written; {remedy}")


def say_without_checksums(folder: Path) -> None:
    """Print, once per folder and process, that the folder's files were written without checksums."""
    if folder not in _folders_without_checksums:
        _folders_without_checksums.add(folder)
        print(
            f"{folder} was written by an older logdepth: its files carry no checksums, so damage and edits cannot be "
            "detected",
            file=sys.stderr,
        )


def _blocks(data: Any) -> list[memoryview]:
    view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    return [view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES)]


def _digest(block: memoryview) -> bytes:
    return hashlib.sha256(block).digest()


def _combined(blocks: list[memoryview], digests: Iterable[bytes]) -> str:
    size = sum(map(len, blocks))
    return hashlib.sha256(size.to_bytes(8, "little") + b"".join(digests)).hexdigest()
