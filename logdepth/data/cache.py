"""The cache of everything derived from corpora: censuses, tokenizers and token stores. It is safe to delete."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "LOGDEPTH_CACHE"


def cache_folder() -> Path:
    """Return $LOGDEPTH_CACHE; if it is not set, `logdepth` in the user's cache directory."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logdepth"


def cache_key(facts: Any) -> str:
    """Return a hash of `facts`, for naming an artifact that depends only on them."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
