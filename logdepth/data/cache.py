"""Where what was made from corpora is kept: censuses, tokenizers and token stores. All of it can be made again."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "LOGDEPTH_CACHE"


def cache_folder() -> Path:
    """$LOGDEPTH_CACHE, or `logdepth` in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logdepth"


def key_of(facts: Any) -> str:
    """A name for what is made from these facts alone."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
