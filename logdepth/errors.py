"""UserError: an error that the user can correct. Its message of one line names the problem, the value and a remedy."""

import difflib
import re
from collections.abc import Iterable

MIN_SIMILARITY = 0.6
"""Similarity, from 0 to 1, from which a known name is suggested for a mistyped one."""

REFUSED_SIZE = r"allocate [\d.]+ \w+|Storage size calculation overflowed.*|Overflow when unpacking long|int too large.*"
"""What torch, NumPy and Python say of a size for which there is no memory, or which is no 64-bit number."""


class UserError(Exception):
    """An error that the user can correct. The command line prints it without a traceback and exits with code 2."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the most similar known name, or else a list of the known names."""
    names = list(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=MIN_SIMILARITY)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there are: {', '.join(names[:8])}" + (f", … ({len(names)} in total)" if len(names) > 8 else "")


def not_enough_memory(error: Exception) -> str | None:
    """Return the message for an error of a size for which there is no memory; None for any other error."""
    refused = re.search(REFUSED_SIZE, str(error))
    if not refused and not isinstance(error, MemoryError):
        return None
    detail = f" ({refused[0]})" if refused else ""
    return f"not enough memory{detail}; choose smaller sizes, such as the model's width, the batch or the context"
