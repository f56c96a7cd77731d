"""Finding a corpus: local files first, then the Hugging Face hub by name, else an error that says what to put where."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from logdepth.errors import UserError

DATA_VARIABLE = "LOGDEPTH_DATA"


def data_folder(data_dir: Path | None) -> Path | None:
    """The folder above those of the corpora: the one given, or that of the environment. It is only read."""
    if data_dir is None:
        named = os.environ.get(DATA_VARIABLE)
        data_dir = Path(named) if named else None
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"the data folder {data_dir} is not there; set --data-dir or {DATA_VARIABLE} to one that is")
    return data_dir


def local_files(data_dir: Path | None, folder: str, names: Sequence[str]) -> list[Path] | None:
    """The named files of a corpus's folder, or None where any is missing."""
    parent = data_folder(data_dir)
    if parent is None:
        return None
    files = [parent / folder / name for name in names]
    return files if all(file.is_file() for file in files) else None


def local_shards(data_dir: Path | None, folder: str, pattern: str) -> list[Path]:
    """The files of a corpus's folder that match, sorted by name."""
    parent = data_folder(data_dir)
    return sorted((parent / folder).glob(pattern)) if parent is not None else []


def hub_rows(name: str, config: str | None, split: str, missing: str) -> Iterator[dict[str, Any]]:
    """The rows of a data set on the Hugging Face hub; `missing` says which local file was looked for."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{missing}, or `pip install '.[hub]'` to fetch {name} from the hub") from None
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        yield from rows
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{missing}; the hub did not give {name} either ({reason})") from None


def looked_for(corpus: str, data_dir: Path | None, what: str) -> str:
    """The first half of the error for files that are not there."""
    parent = data_folder(data_dir)
    if parent is None:
        return f"corpus '{corpus}' needs {what} in a data folder, and none is set: give --data-dir or {DATA_VARIABLE}"
    return f"corpus '{corpus}': looked for {parent / what} and did not find it: put it there"
