"""The command line: `logdepth VERB …`. Each verb is one file in this package and one entry in `VERBS`.

A user error prints one line on stderr and exits with code 2. Results go to stdout, and everything else to stderr.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from logdepth import __version__
from logdepth.errors import UserError, did_you_mean

VERBS = {
    "reproduce": "run the paper's experiment on a corpus: all models, tables, figures, a report",
    "report": "write a study's tables, figures and report from its result files",
    "prepare": "create a corpus's tokenizer and token stores",
    "train": "train a recipe, or resume a run",
    "sweep": "search a recipe's hyperparameters with Optuna, with one worker or several",
    "evaluate": "measure a run's perplexity at any context length",
    "time": "measure a model's speed by context length",
    "associativity": "measure how far a run's operator is from associative",
    "generate": "generate text with a run",
    "corpora": "list the corpora",
    "recipes": "list the recipes with their parameter counts",
    "check": "check the scan against its definition on all devices",
    "completion": "print a completion script for bash, zsh, tcsh or fish",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit code."""
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
    except BrokenPipeError:  # the process that reads stdout has exited
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
            "To start: logdepth reproduce pydocs, or logdepth train pydocs-ar-grc",
        ]
    )
