"""Tasks that show what a model can compute: state tracking, recall, counting. `TASKS` lists them.

To add a task, add one file and one entry here.
"""

from logdepth.errors import UserError, did_you_mean
from logdepth.tasks.context_free import BracketArithmetic, BucketSort, ReverseString, StackManipulation
from logdepth.tasks.groups import GroupWords
from logdepth.tasks.listops import ListOps
from logdepth.tasks.recall import MultiQueryRecall, Passkey, SelectiveCopying
from logdepth.tasks.regular import (
    BoundedBrackets,
    CycleNavigation,
    EvenPairs,
    ModularArithmetic,
    Parity,
    PrefixSymbols,
    Tomita,
)
from logdepth.tasks.task import (
    Case,
    Examples,
    Task,
    balancing_weights,
    constant_accuracy,
    held_out_batch,
    last_only,
    training_batch,
)

FAMILIES = {
    "regular-languages": "finite automata: parity, counting, brackets of bounded depth",
    "context-free": "stacks and counting: nested expressions, reversal, sorting",
    "groups": "word problems of finite groups: the product of all elements so far",
    "recall": "find what was read long ago: keys and values, data among noise, a needle",
}
"""What the tasks of a family have in common."""

TASKS: dict[str, Task] = {
    "parity": Parity(title="Parity"),
    "even-pairs": EvenPairs(title="Even pairs"),
    "cycle-navigation": CycleNavigation(title="Cycle navigation"),
    "modular-arithmetic": ModularArithmetic(title="Modular arithmetic"),
    "modular-arithmetic-precedence": ModularArithmetic(title="Modular arithmetic, × first", multiply_first=True),
    "d2": BoundedBrackets(title="D₂", depth=2),
    "d3": BoundedBrackets(title="D₃", depth=3),
    "d4": BoundedBrackets(title="D₄", depth=4),
    "d6": BoundedBrackets(title="D₆", depth=6),
    "d8": BoundedBrackets(title="D₈", depth=8),
    "d12": BoundedBrackets(title="D₁₂", depth=12),
    "tomita-3": Tomita(title="Tomita 3", number=3),
    "tomita-4": Tomita(title="Tomita 4", number=4),
    "tomita-5": Tomita(title="Tomita 5", number=5),
    "tomita-6": Tomita(title="Tomita 6", number=6),
    "tomita-7": Tomita(title="Tomita 7", number=7),
    "p-1-2": PrefixSymbols(title="P₁,₂", prefix=1, alphabet=2),
    "p-1-4": PrefixSymbols(title="P₁,₄", prefix=1, alphabet=4),
    "p-2-2": PrefixSymbols(title="P₂,₂", prefix=2, alphabet=2),
    "p-2-4": PrefixSymbols(title="P₂,₄", prefix=2, alphabet=4),
    "p-4-2": PrefixSymbols(title="P₄,₂", prefix=4, alphabet=2),
    "p-4-4": PrefixSymbols(title="P₄,₄", prefix=4, alphabet=4),
    "bracket-arithmetic": BracketArithmetic(title="Modular arithmetic with brackets"),
    "reverse": ReverseString(title="Reverse string"),
    "stack": StackManipulation(title="Stack manipulation"),
    "bucket-sort": BucketSort(title="Bucket sort"),
    "listops": ListOps(title="ListOps"),
    "s3": GroupWords(title="S₃", group="S3"),
    "s4": GroupWords(title="S₄", group="S4"),
    "a5": GroupWords(title="A₅", group="A5"),
    "s5": GroupWords(title="S₅", group="S5"),
    "z60": GroupWords(title="Z₆₀", group="Z60"),
    "s5-held-out": GroupWords(title="S₅, a tenth of pairs held out", group="S5", held_out=0.1),
    "z60-held-out": GroupWords(title="Z₆₀, a tenth of pairs held out", group="Z60", held_out=0.1),
    "mqar": MultiQueryRecall(title="MQAR"),
    "selective-copying": SelectiveCopying(title="Selective copying"),
    "passkey": Passkey(title="Passkey"),
}

LDRU_LANGUAGES = tuple(
    name for name, one in TASKS.items() if one.family == "regular-languages" and name != "modular-arithmetic-precedence"
)
"""The 21 regular languages of the LDRU paper (arXiv 2605.26035)."""


def task_named(name: str) -> Task:
    """The task of a name. Raise UserError, with the name that was probably meant, if there is none."""
    if name not in TASKS:
        raise UserError(f"there is no task '{name}'{did_you_mean(name, TASKS)}")
    return TASKS[name]


def tasks_of(family: str) -> dict[str, Task]:
    """The tasks of a family by name. Raise UserError if there is no such family."""
    if family not in FAMILIES:
        raise UserError(f"there is no family of tasks '{family}'{did_you_mean(family, FAMILIES)}")
    return {name: one for name, one in TASKS.items() if one.family == family}


__all__ = [
    "FAMILIES",
    "LDRU_LANGUAGES",
    "TASKS",
    "Case",
    "Examples",
    "Task",
    "balancing_weights",
    "constant_accuracy",
    "held_out_batch",
    "last_only",
    "task_named",
    "tasks_of",
    "training_batch",
]
