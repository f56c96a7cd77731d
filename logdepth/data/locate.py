"""Find a corpus: local files first, then the Hugging Face hub, else an error that says which file to put where."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from logdepth.errors import UserError

DATA_VARIABLE = "LOGDEPTH_DATA"
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and what Python has in place of bytes that are not UTF-8."""


def data_folder(data_dir: Path | None) -> Path | None:
    """Return the root data directory: `data_dir`, or else $LOGDEPTH_DATA. Nothing is ever written to it."""
    if data_dir is None:
        named = os.environ.get(DATA_VARIABLE)
        data_dir = Path(named) if named else None
    if data_dir is not None and not os.path.isdir(data_dir):  # noqa: PTH112  (False, not an error, for any bad name)
        raise UserError(
            f"the data directory {data_dir} does not exist; set --data-dir or {DATA_VARIABLE} to an existing one"
        )
    return data_dir


def local_files(data_dir: Path | None, folder: str, names: Sequence[str]) -> list[Path] | None:
    """Return the named files of a corpus's folder, or None if any is missing."""
    parent = data_folder(data_dir)
    if parent is None:
        return None
    files = [parent / folder / name for name in names]
    return files if all(file.is_file() for file in files) else None


def local_shards(data_dir: Path | None, folder: str, pattern: str) -> list[Path]:
    """Return the files of a corpus's folder that match `pattern`, sorted by name."""
    parent = data_folder(data_dir)
    if parent is None:
        return []
    return sorted(file for file in (parent / folder).glob(pattern) if file.is_file())


def refuse_unprintable(path: Path, remedy: str = "rename it") -> None:
    """Raise a UserError if a path could be neither printed in one line nor recorded in a file."""
    if UNPRINTABLE.search(str(path)):
        raise UserError(f"the name {os.fsencode(path)!r} is not UTF-8 or has control characters; {remedy}")


def hub_rows(name: str, config: str | None, split: str, missing: str) -> Iterator[dict[str, Any]]:
    """Stream the rows of a dataset on the Hugging Face hub. `missing` is an error text for the missing local file."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{missing}, or `pip install '.[hub]'` to fetch {name} from the hub") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the error below says in one line what failed
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        yield from rows
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{missing}; fetching {name} from the hub failed too ({reason})") from None


def looked_for(corpus: str, data_dir: Path | None, what: str) -> str:
    """Return the first half of the error message for a missing local file."""
    parent = data_folder(data_dir)
    if parent is None:
        return (
            f"corpus '{corpus}' needs {what} in a data directory, and none is set: give --data-dir or {DATA_VARIABLE}"
        )
    return f"corpus '{corpus}': {parent / what} does not exist: put the file there"
