"""UserError: a mistake that its user can mend. The message is one line: what was wrong, the value, and what to do."""

import difflib
from collections.abc import Iterable

CLOSE = 0.6
"""How alike, of 1, what was typed and what may have been meant have to be."""


class UserError(Exception):
    """Shown without a traceback by the command line, which then exits with code 2."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the list of what there is where nothing is close."""
    names = list(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=CLOSE)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there are: {', '.join(names[:8])}" + (f", … ({len(names)} in all)" if len(names) > 8 else "")
