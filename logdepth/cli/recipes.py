"""`logdepth recipes`: list the recipes."""

from collections.abc import Sequence
from dataclasses import dataclass

from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.config import to_dict
from logdepth.recipes import RECIPES, parameters_of


@dataclass(frozen=True, kw_only=True)
class RecipesCommand:
    """List the recipes: the models of the paper's tables, and small ones for pydocs, which needs no download."""

    json: Switch = False
    """Print the recipes as JSON with their complete configs."""


def run(arguments: Sequence[str]) -> int:
    command = parse(RecipesCommand, arguments, "recipes")
    configs = {name: make() for name, make in RECIPES.items()}
    if command.json:
        print_json({name: {"parameters": parameters_of(one), "config": to_dict(one)} for name, one in configs.items()})
        return 0
    heads = ("recipe", "parameters", "corpus", "vocabulary", "batch", "context", "learning rate")
    rows = [
        (
            name,
            parameters_of(one),
            one.data.corpus,
            one.data.tokenizer.vocab_size,
            one.train.batch_size,
            one.train.context,
            f"{one.train.learning_rate:g}",
        )
        for name, one in configs.items()
    ]
    print_table(heads, rows)
    return 0
