"""`logdepth prepare`: create a corpus's tokenizer and token stores."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, named_first, parse
from logdepth.data import CORPORA, DataConfig, prepare
from logdepth.errors import UserError, did_you_mean
from logdepth.progress import in_words
from logdepth.recipes import RECIPES, recipe


@dataclass(frozen=True, kw_only=True)
class PrepareCommand:
    """Create a corpus's tokenizer and token stores, and print their counts."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS|RECIPE")] = "pydocs"
    """Name of a corpus, or of a recipe, which selects its corpus and tokenizer settings."""
    data: DataConfig = field(default_factory=DataConfig)
    """The corpus and its tokenizer."""
    data_dir: Path | None = None
    """Root data directory; by default $LOGDEPTH_DATA."""
    json: Switch = False
    """Print the report as JSON."""


def run(arguments: Sequence[str]) -> int:
    name = named_first(arguments, {*CORPORA, *RECIPES}) or "pydocs"
    default = PrepareCommand(name=name, data=_data_named(name))
    command = parse(PrepareCommand, arguments, "prepare", default)
    if command.name != name:
        raise UserError(f"found two names, '{name}' and '{command.name}'; put the corpus or recipe before the flags")
    start = time.monotonic()
    prepared = prepare(command.data, command.data_dir)
    infos = [store.info for store in prepared.stores.values()]
    if command.json:
        facts = {
            "key": prepared.key,
            "folder": str(prepared.folder),
            "known_edition": prepared.known_edition,
            "notes": prepared.notes,
        }
        print_json(facts | {"splits": {info.split: vars(info) for info in infos}})
        return 0
    edition = {
        True: "; checksums match the known edition",
        False: "; checksums differ from the known edition",
        None: "",
    }
    print(f"{prepared.folder}{edition[prepared.known_edition]}")
    heads = ("split", "tokens", "unknown", "words", "words with line ends", "bytes", "documents", "bytes per token")
    print_table(
        heads,
        [
            (
                info.split,
                info.tokens,
                info.unknown,
                info.words,
                info.words + info.line_ends,
                info.bytes,
                info.documents,
                info.bytes / info.tokens,
            )
            for info in infos
        ],
    )
    for note in prepared.notes:
        print(note)
    print(f"ready after {in_words(time.monotonic() - start)}")
    return 0


def _data_named(name: str) -> DataConfig:
    if name in RECIPES:
        return recipe(name).data
    if name not in CORPORA:
        raise UserError(f"there is no corpus or recipe '{name}'{did_you_mean(name, [*CORPORA, *RECIPES])}")
    of_paper = f"{name.removesuffix('_raw')}-ar-grc"
    if of_paper in RECIPES:
        return replace(recipe(of_paper).data, corpus=name)
    return DataConfig(corpus=name)
