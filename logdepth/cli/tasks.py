"""`logdepth tasks`: list the tasks, or print examples of one."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.errors import UserError
from logdepth.tasks import TASKS, Case, Examples, Task, held_out_batch, task_named

SHORT = 12
"""Least number of tokens of an example, by default, if the task has training examples of this length."""
MAX_TOKENS = 100_000
"""Number of tokens that are printed at most."""
LINE = 100
"""Characters per line of printed tokens."""
LABEL = len("answers")


@dataclass(frozen=True, kw_only=True)
class TasksCommand:
    """List the tasks, or print examples of one: what it shows of state tracking, recall or counting.

    Training examples are short, test examples are longer.
    """

    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[TASK]")] = ""
    """Name of the task whose examples are printed; without it, all tasks are listed."""
    length: str = ""
    """Length of the examples in tokens, or LENGTH/ITEMS, such as 64/4 for four pairs of keys and values; by default
    that of a short training example."""
    count: int = 3
    """Number of examples."""
    seed: int = 0
    """Random seed of the examples."""
    json: Switch = False
    """Print the list or the examples as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(TasksCommand, arguments, "tasks")
    if not command.task:
        for flag in ("--length", "--count", "--seed"):
            if any(argument.partition("=")[0] == flag for argument in arguments):
                raise UserError(f"{flag} is for examples of one task; name the task, as in: logdepth tasks parity")
        _list(command.json)
        return 0
    chosen = task_named(command.task)
    case = _case(command.length) if command.length else _short_case(chosen)
    if command.count < 1:
        raise UserError(f"--count must be at least 1; got {command.count}")
    if command.seed < 0:
        raise UserError(f"--seed must be at least 0; got {command.seed}")
    if case.length * command.count > MAX_TOKENS:
        raise UserError(f"--length and --count ask for more than {MAX_TOKENS:,} tokens; ask for fewer")
    try:
        examples = held_out_batch(chosen, command.seed, case, command.count)
    except ValueError as error:
        raise UserError(f"{command.task}: {error}") from None
    if command.json:
        found = [{"tokens": tokens, "answers": answers} for tokens, answers in _rows(examples)]
        print_json({"task": command.task, "case": str(case), "examples": found})
    else:
        _print(command.task, chosen, case, examples)
    return 0


def _list(as_json: bool) -> None:
    if as_json:
        print_json(
            {
                name: {
                    "family": one.family,
                    "title": one.title,
                    "symbols": one.num_symbols,
                    "classes": one.num_classes,
                    "train": [str(case) for case in one.train_cases],
                    "test": [str(case) for case in one.test_cases],
                    "chance": one.chance,
                    "chance_at_end": one.chance_at_end,
                }
                for name, one in TASKS.items()
            }
        )
        return
    heads = ("task", "family", "title", "symbols", "classes", "trained on", "tested on", "chance", "at end")
    rows = [
        (
            name,
            one.family,
            one.title,
            one.num_symbols,
            one.num_classes,
            f"{one.train_cases[0]}–{one.train_cases[-1]}",
            f"{one.test_cases[0]}–{one.test_cases[-1]}",
            float(f"{one.chance:.3g}"),
            float(f"{one.chance_at_end:.3g}"),
        )
        for name, one in TASKS.items()
    ]
    print_table(heads, rows)


def _case(text: str) -> Case:
    found = re.fullmatch(r"([0-9]{1,18})(?:/([0-9]{1,18}))?", text)
    if found is None:
        raise UserError(f"--length: expected tokens, such as 40, or tokens/items, such as 64/4; got {text!r}")
    return Case(int(found[1]), int(found[2] or 0))


def _short_case(chosen: Task) -> Case:
    cases = chosen.train_cases
    return next((case for case in cases if case.length >= SHORT), cases[-1])


def _rows(examples: Examples) -> Iterator[tuple[list[int], list[int | None]]]:
    """The tokens and the answers of each example; an answer is None where none is asked."""
    for tokens, targets, mask in zip(*(part.tolist() for part in examples), strict=True):
        yield tokens, [answer if asked else None for answer, asked in zip(targets, mask, strict=True)]


def _print(name: str, chosen: Task, case: Case, examples: Examples) -> None:
    note = "" if examples.mask.all() else "; · where no answer is asked"
    print(f"{name}: {chosen.title} ({chosen.family}), length {case}{note}")
    for tokens, answers in _rows(examples):
        token_texts = [chosen.token_text(token) for token in tokens]
        answer_texts = ["·" if answer is None else chosen.answer_text(answer) for answer in answers]
        width = max(map(len, (*token_texts, *answer_texts)))
        per_line = max(1, (LINE - LABEL) // (width + 1))
        print()
        for start in range(0, len(tokens), per_line):
            for label, texts in (("tokens", token_texts), ("answers", answer_texts)):
                print(label.ljust(LABEL), *(text.rjust(width) for text in texts[start : start + per_line]))
