"""The command line: `logdepth VERB …`. Verbs only, no logic; each is one file here and one entry in `VERBS`.

A user's mistake is one line on stderr and exit code 2. Results go to stdout, everything else to stderr.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from logdepth import __version__
from logdepth.errors import UserError, did_you_mean

VERBS = {
    "reproduce": "the paper's experiment on a corpus: all models, tables, figures, a report",
    "report": "a study's tables, figures and page, from its result files",
    "prepare": "make a corpus's tokenizer and token stores",
    "train": "train a recipe, or resume a run",
    "sweep": "search a recipe's hyperparameters with Optuna, alone or with other workers",
    "evaluate": "perplexity of a run, at any context length",
    "time": "time of a model against context length",
    "associativity": "how far a run's operator is from associative, and what other trees cost it",
    "generate": "text from a run",
    "corpora": "list the corpora",
    "recipes": "list the recipes, with parameter counts",
    "check": "the scan against its definition, on this machine",
    "completion": "shell completion for bash, zsh, tcsh or fish",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit code."""
    verb, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if verb in ("", "-h", "--help"):
        print(_overview())
        return 0 if verb else 2
    if verb == "--version":
        print(f"logdepth {__version__}")
        return 0
    try:
        if verb not in VERBS:
            raise UserError(f"there is no verb '{verb}'{did_you_mean(verb, VERBS)}")
        code: int = importlib.import_module(f"logdepth.cli.{verb}").run(rest)
    except UserError as error:
        print(f"logdepth {verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"logdepth {verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _overview() -> str:
    lines = [f"  {verb:<15}{summary}" for verb, summary in VERBS.items()]
    return "\n".join(
        [
            "usage: logdepth VERB [OPTIONS]        (logdepth VERB --help for its options)",
            "",
            "Log-depth recurrent language models.",
            "",
            *lines,
            "",
            "To begin with: logdepth reproduce pydocs, or logdepth train pydocs-ar-grc",
        ]
    )
