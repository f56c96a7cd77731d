"""`logdepth corpora`: what there is to train on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.data import CORPORA
from logdepth.data.text import Text


@dataclass(frozen=True, kw_only=True)
class CorporaCommand:
    """List the corpora. All but pydocs and text are read from $LOGDEPTH_DATA or --data-dir, or fetched from the hub."""

    data_dir: Path | None = None
    """The folder above those of the corpora (default: $LOGDEPTH_DATA)."""
    json: Switch = False
    """Print them as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(CorporaCommand, arguments, "corpora")
    found = {name: _is_here(name, command.data_dir) for name in CORPORA}
    if command.json:
        print_json({name: {"summary": corpus.summary, "here": found[name]} for name, corpus in CORPORA.items()})
    else:
        here = {True: "yes", False: "no", None: "yours"}
        rows = [(name, here[found[name]], corpus.summary) for name, corpus in CORPORA.items()]
        print_table(("corpus", "here", "what it is"), rows)
    return 0


def _is_here(name: str, data_dir: Path | None) -> bool | None:
    """Whether its files were found; None where they are named by whoever trains."""
    return None if CORPORA[name] is Text else CORPORA[name](data_dir).source() is not None
