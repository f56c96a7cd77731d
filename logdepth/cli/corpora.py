"""`logdepth corpora`: what there is to train on."""

from collections.abc import Sequence
from dataclasses import dataclass

from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.data import CORPORA


@dataclass(frozen=True, kw_only=True)
class CorporaCommand:
    """List the corpora. All but pydocs and text are read from $LOGDEPTH_DATA or --data-dir, or fetched from the hub."""

    json: Switch = False
    """Print them as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(CorporaCommand, arguments, "corpora")
    summaries = {name: corpus.summary for name, corpus in CORPORA.items()}
    if command.json:
        print_json(summaries)
    else:
        print_table(("corpus", "what it is"), list(summaries.items()))
    return 0
