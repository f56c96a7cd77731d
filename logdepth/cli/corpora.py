"""`logdepth corpora`: list the corpora."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.data import CORPORA
from logdepth.data.text import Text


@dataclass(frozen=True, kw_only=True)
class CorporaCommand:
    """List the corpora.

    All except pydocs and text are read from the root data directory, or fetched from the Hugging Face hub.
    """

    data_dir: Path | None = None
    """Root data directory; by default $LOGDEPTH_DATA."""
    json: Switch = False
    """Print the list as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(CorporaCommand, arguments, "corpora")
    found = {name: _is_here(name, command.data_dir) for name in CORPORA}
    if command.json:
        print_json({name: {"summary": corpus.summary, "here": found[name]} for name, corpus in CORPORA.items()})
    else:
        available = {True: "yes", False: "no", None: "–"}
        rows = [(name, available[found[name]], corpus.summary) for name, corpus in CORPORA.items()]
        print_table(("corpus", "available", "description"), rows)
    return 0


def _is_here(name: str, data_dir: Path | None) -> bool | None:
    """Return whether a corpus's files were found; None for the corpus 'text', whose files the user names."""
    return None if CORPORA[name] is Text else CORPORA[name](data_dir).source() is not None
