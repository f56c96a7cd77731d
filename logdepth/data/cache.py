"""The cache of everything derived from corpora: censuses, tokenizers and token stores. It is safe to delete.

What is read back is verified: the JSON files are sealed, and name the checksums of the files beside them.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from logdepth.atomic import read_json
from logdepth.checksums import unseal
from logdepth.data.locate import refuse_unprintable
from logdepth.errors import UserError

CACHE_VARIABLE = "LOGDEPTH_CACHE"


def cache_folder() -> Path:
    """Return $LOGDEPTH_CACHE; if it is not set, `logdepth` in the user's cache directory."""
    named = os.environ.get(CACHE_VARIABLE)
    folder = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logdepth"
    refuse_unprintable(folder)
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # it is made when something is written
    except OSError as error:
        raise UserError(
            f"cannot use the cache folder {folder}: {error.strerror}; set {CACHE_VARIABLE} to another folder"
        ) from None
    return folder


def cache_key(facts: Any) -> str:
    """Return a hash of `facts`, for naming an artifact that depends only on them."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def read_sealed(path: Path, remedy: str, since: str | None = None) -> dict[str, Any]:
    """Return the fields of a sealed JSON file of the cache. Raise a UserError if it is damaged or was edited.

    Args:
        path: the file.
        remedy: what to do if it is damaged, for the message.
        since: a field that only sealed files have. A file without it may be of an older version, without a checksum.
    """
    try:
        saved = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None
    if not isinstance(saved, dict):
        raise UserError(f"{path} is damaged or was edited: it holds a {type(saved).__name__}; {remedy}")
    return unseal(saved, path, remedy, required=since is None or since in saved)
