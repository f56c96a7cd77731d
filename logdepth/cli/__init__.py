"""The command line: `logdepth VERB …`. Each verb is one file in this package and one entry in `VERBS`.

A user error prints one line on stderr and exits with code 2. Results go to stdout, and everything else to stderr.
"""

import errno
import importlib
import sys
from collections.abc import Sequence

from logdepth import __version__
from logdepth.cli.process import (
    discard_output,
    end_on_interrupt,
    exit_on_interrupt,
    prepare_streams,
    raise_on_interrupt,
)
from logdepth.cli.ranks import complain, is_one_of_several, meet_others, run_as_rank
from logdepth.errors import UserError, did_you_mean, not_enough_memory

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
    "export": "write a run as a model for Hugging Face or ONNX Runtime, and such a model as a run",
    "serve": "serve a run to OpenAI's clients and to browsers",
    "corpora": "list the corpora",
    "tasks": "list the tasks of state tracking, recall and counting, or print examples of one",
    "recipes": "list the recipes with their parameter counts",
    "check": "check the scan against its definition on all devices",
    "completion": "print a completion script for bash, zsh, tcsh or fish",
}

OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
"""Errors of a write to stdout. Files have their names in the error."""
MAX_MESSAGE = 1_000
"""Number of characters of an error's message that are printed at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit code. Without arguments, this process is the program, and they are its own."""
    if arguments is None:
        exit_on_interrupt()
        prepare_streams()
        try:
            if is_one_of_several():
                run_as_rank(lambda: main(sys.argv[1:]))
            return main(sys.argv[1:])
        finally:
            end_on_interrupt()
    program = f"logdepth {arguments[0]}".strip() if arguments else "logdepth"
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # so that it fails here, if at all, and not when the interpreter exits
    except KeyboardInterrupt:
        complain(f"{program}: interrupted")
        return 130
    except BrokenPipeError:  # the process that reads stdout has exited
        discard_output()
        return 141
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        complain(_on_one_line(f"{program}: {_shortened(reason)}"))
        if isinstance(error, OSError):
            discard_output()
        return 2


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        print(_overview())
        return 2
    verb, *rest = arguments
    if verb in ("-h", "--help"):
        print(_overview())
        return 0
    if verb == "--version":
        print(f"logdepth {__version__}")
        return 0
    if verb not in VERBS:
        raise UserError(f"there is no verb '{verb}'{did_you_mean(verb, VERBS)}")
    if is_one_of_several():
        meet_others(verb)
    module = importlib.import_module(f"logdepth.cli.{verb}")
    raise_on_interrupt()
    code: int = module.run(rest)
    return code


def _reason(error: Exception) -> str | None:
    """What to tell the user about an error; None if it is a defect of the program, which needs its traceback."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        if error.filename is not None:
            return f"cannot use {error.filename}: {error.strerror}; check this path and its permissions"
        if error.errno in OUTPUT_ERRORS:
            return f"cannot write to stdout: {error.strerror}; send the output elsewhere, or free some space"
        return None
    return not_enough_memory(error)


def _shortened(reason: str) -> str:
    """Without the middle of a long message, which a long value has made so; what to do is at its end."""
    return reason if len(reason) <= MAX_MESSAGE else f"{reason[: MAX_MESSAGE // 2]} … {reason[-MAX_MESSAGE // 2 :]}"


def _on_one_line(text: str) -> str:
    """With line breaks, control characters and the like escaped, which a name may have that is quoted in a message."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


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
