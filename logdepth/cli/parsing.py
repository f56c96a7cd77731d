"""Parse command-line flags into dataclasses with tyro, and convert its error messages to one line."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import sys
import typing
from collections.abc import Container, Sequence
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from logdepth.blocks import BLOCKS
from logdepth.blocks.spec import block_config, block_text
from logdepth.errors import MIN_SIMILARITY, UserError
from logdepth.models import LMConfig

Command = TypeVar("Command")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A boolean flag without a negated form."""
BLOCKS_TYPE = typing.get_type_hints(LMConfig)["blocks"]
RULE = re.compile(r"[-+─╭╮╰╯ ]*")
"""A line of tyro's box without text."""


PATH_FLAGS = ("--out", "--resume", "--config", "--data-dir", "--data.paths", "--train.init-from")
"""Flags whose values may look like the name of a recipe or a corpus."""
LIST_FLAGS = tuple(
    f"--{one}"
    for one in [
        "model.blocks",
        "data.paths",
        "train.parallel",
        "paths",
        "contexts",
        "models",
        "tasks",
        "seeds",
        "others",
        "space",
    ]
)
"""Flags that take several values."""
CLEARER_MESSAGES = {
    r"([Uu]nrecognized options: --model\.blocks)\b.*": r"\1; only hybrids and the architectures on webmix have it",
    r"no type matching (\S+) could be instantiated from \[(.*)\]": r"expected \1; got \2",
    r"Could not find valid parse for arguments: \[(.*)\]": r"cannot read \1",
    r"Exceeds the limit .* value has (\d+) digits; use sys.set_int_max_str_digits.*limit": r"got \1 digits; give fewer",
    r"invalid literal for int\(\) with base 10: (.*)": r"expected an integer; got \1",
    r"could not convert string to float: (.*)": r"expected a number; got \1",
}
"""Maps patterns of messages of Python and tyro to clearer messages."""


def _blocks_as_words(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """How `--model.blocks scan attention:window=128 mlp` is read and shown in the help."""
    # tyro writes the type in another way where a recipe has two blocks: Tuple, which is not equal to tuple.
    if typing.get_origin(info.type) is not tuple or typing.get_args(info.type) != typing.get_args(BLOCKS_TYPE):
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{'|'.join(BLOCKS)}][:FIELD=VALUE,…] ...",
        instance_from_str=lambda words: tuple(_block(word) for word in words),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda blocks: [one if isinstance(one, str) else block_text(one) for one in blocks],
    )


def _block(word: str) -> Any:
    try:
        return block_config(word)
    except UserError as error:
        raise ValueError(str(error)) from None


REGISTRY = ConstructorRegistry()
REGISTRY.primitive_rule(_blocks_as_words)


def parse(command: type[Command], arguments: Sequence[str], verb: str, default: Any = tyro.MISSING_NONPROP) -> Command:
    """Parse arguments into a command. Fields without a flag have their values from `default` or the class."""
    _refuse_repeated_lists(arguments)
    for flag in PATH_FLAGS:
        value_of(flag, arguments)  # refuses an empty one
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            parsed: Command = tyro.cli(
                command,
                args=list(arguments),
                prog=f"logdepth {verb}",
                default=default,
                config=(tyro.conf.AvoidSubcommands,),
                registry=REGISTRY,
            )
            return _without_empty_lists(parsed, arguments)
    except ValueError as error:  # a config class rejected a value
        raise UserError(str(error)) from None
    except SystemExit as stopped:
        if stopped.code not in (0, None):
            raise UserError(_one_line(captured.getvalue())) from None
        sys.stderr.write(captured.getvalue())
        raise


def _without_empty_lists(command: Command, arguments: Sequence[str]) -> Command:
    """Raise a UserError if a list flag of the command has no value, which would otherwise mean the default.

    Lists within configs are not checked: they may be empty.
    """
    for field in dataclasses.fields(command):  # type: ignore[arg-type]
        flag = f"--{field.name.replace('_', '-')}"
        if flag in arguments and getattr(command, field.name) == ():
            raise UserError(f"{flag} has no value; give at least one value, or remove the flag")
    return command


def _refuse_repeated_lists(arguments: Sequence[str]) -> None:
    """Raise a UserError if a flag for several values is repeated: the values given first would be ignored."""
    flags = [argument.partition("=")[0] for argument in arguments]
    for flag in LIST_FLAGS:
        if flags.count(flag) > 1:
            raise UserError(f"{flag} is given {flags.count(flag)} times; give it once, with all of its values")


def with_separate_contexts(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--contexts 32,128` as `--contexts 32 128`."""
    separate: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("-"):
            flag, *value = argument.split("=", 1)
            separate += [flag, *value[0].split(",")] if flag == "--contexts" and value else [argument]
        else:
            separate += [one for one in argument.split(",") if one] if flag == "--contexts" else [argument]
    return separate


def refuse_both(one: str, other: str, arguments: Sequence[str]) -> None:
    """Raise a UserError if both flags are given and one of them would be ignored."""
    flags = {argument.partition("=")[0] for argument in arguments}
    if {one, other} <= flags:
        raise UserError(f"give {one} or {other}, not both")


def named_first(arguments: Sequence[str], known: Container[str]) -> str | None:
    """Return the name that determines which flags exist: a known name, else the first argument unless it is a flag."""
    for before, argument in itertools.pairwise(["", *arguments]):
        if argument in known and before not in PATH_FLAGS:
            return argument
    return arguments[0] if arguments and not arguments[0].startswith("-") else None


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the value of a flag that must be known before the other flags are parsed; None if it is absent.

    An empty path raises a UserError: a shell makes it of a variable that is not set, and it would mean this folder.
    """
    value = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        if argument == flag:
            value = following
        elif argument.startswith(f"{flag}="):
            value = argument.removeprefix(f"{flag}=")
        if value is not None:
            break
    if value == "" and flag in PATH_FLAGS:
        raise UserError(f"{flag} is empty; give a path, or remove the flag")
    return value


def _one_line(boxed: str) -> str:
    """Convert tyro's boxed error message to one line, with the first suggested flag."""
    lines = [line.strip(" │|") for line in boxed.splitlines()]
    parts = [list(group) for is_rule, group in itertools.groupby(lines[1:], RULE.fullmatch) if not is_rule]
    message = " ".join(parts[0]).strip() if parts else "invalid arguments"
    message = re.sub(r"^Error parsing (run\.)?", "", message)
    for pattern, clearer in CLEARER_MESSAGES.items():
        message = re.sub(pattern, clearer, message)
    missing = re.match(r"Missing from [\w ]+: (\S+)", message)
    message = f"{missing[1]} is missing" if missing else message[:1].lower() + message[1:].rstrip(".")
    suggestions = " ".join(line for part in parts[1:] if part[0].startswith("Perhaps you meant") for line in part)
    wrong, meant = (re.search(r"--[\w.-]+", text) for text in (message, suggestions))
    if meant and (wrong is None or _are_similar(wrong[0], meant[0])):
        return f"{message}; did you mean {meant[0]}?"
    return message if message.endswith("?") else f"{message}; --help lists the options"


def _are_similar(wrong: str, meant: str) -> bool:
    """Return whether the last parts of two flags are similar enough for a suggestion."""
    one, other = (flag.removeprefix("--").rsplit(".", 1)[-1] for flag in (wrong, meant))
    return difflib.SequenceMatcher(None, one, other).ratio() >= MIN_SIMILARITY
