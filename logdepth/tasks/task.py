"""What a task is: examples that are generated, a question at some of their positions, and one right answer to each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Floats = NDArray[np.float64]

TRAIN_LENGTHS = range(1, 41)
TEST_LENGTHS = (10, 20, 40, *sorted({256, *range(41, 501, 9)}))
"""The lengths of Delétang et al. (arXiv 2207.02098) are 1 to 40 in training and all up to 500 in tests.

Ours beyond training are 41, 50, 59, … 500, and 256, where others report results. Odd and even lengths alternate, and
all remainders of division by 2, 4, … 32 occur: the shape of a tree depends on them.
"""


class Case(NamedTuple):
    """How large an example is."""

    length: int
    """Tokens."""
    items: int = 0
    """What must be remembered, such as pairs of keys and values; 0 where the length says it all."""

    def __str__(self) -> str:
        return f"{self.length}/{self.items}" if self.items else str(self.length)


class Examples(NamedTuple):
    """A batch of examples of one length."""

    tokens: Integers
    """`[batch, length]`, from 0 to below the task's `num_symbols`."""
    targets: Integers
    """`[batch, length]`, from 0 to below the task's `num_classes`: the answers; 0 where none is asked."""
    mask: Booleans
    """`[batch, length]`: the positions at which an answer is asked."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A kind of example of any length, without data files.

    A subclass is a frozen dataclass, whose fields select one of several such tasks. The answer at a position depends
    only on the tokens up to it, so that every model that reads from left to right can give it.
    """

    family: ClassVar[str]
    """A key of `FAMILIES`."""

    title: str
    """As tables print it."""

    @property
    @abstractmethod
    def num_symbols(self) -> int:
        """Number of different tokens."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of different answers."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of the best constant answer at all positions that are asked, in the limit of long examples."""

    @property
    def chance_at_end(self) -> float:
        """Likewise at the last position only, which is what `last_only` asks."""
        return self.chance

    @property
    @abstractmethod
    def train_cases(self) -> Sequence[Case]:
        """The cases of training, easiest first, drawn with equal probability."""

    @property
    @abstractmethod
    def test_cases(self) -> Sequence[Case]:
        """The cases that results report, most of them beyond those of training."""

    @abstractmethod
    def sample(self, rng: Generator, batch: int, case: Case) -> Examples:
        """Draw examples. Raise ValueError with one clear line for a case that does not exist."""

    def token_text(self, token: int) -> str:
        """A token as `logdepth tasks` prints it."""
        return str(token)

    def answer_text(self, answer: int) -> str:
        """A class as `logdepth tasks` prints it."""
        return str(answer)


@dataclass(frozen=True, kw_only=True)
class LengthTask(Task):
    """A task whose cases are lengths only: trained on 1 to 40, tested on up to 500."""

    @property
    def train_cases(self) -> Sequence[Case]:
        return [Case(length) for length in TRAIN_LENGTHS]

    @property
    def test_cases(self) -> Sequence[Case]:
        return [Case(length) for length in TEST_LENGTHS]

    def sample(self, rng: Generator, batch: int, case: Case) -> Examples:
        if case.length < 1:
            raise ValueError(f"length is {case.length}: an example has at least 1 symbol")
        if case.items:
            raise ValueError(f"items is {case.items}: the length says it all here, give 0")
        return self.draw(rng, batch, case.length)

    @abstractmethod
    def draw(self, rng: Generator, batch: int, length: int) -> Examples:
        """Draw examples of a length of at least 1."""


def training_batch(task: Task, seed: int, step: int, batch: int, cases: Sequence[Case] | None = None) -> Examples:
    """The batch of a training step, of one case drawn from `cases`, by default all of the task's training cases."""
    rng = np.random.default_rng([seed, 0, step])
    cases = task.train_cases if cases is None else cases
    return task.sample(rng, batch, cases[int(rng.integers(len(cases)))])


def held_out_batch(task: Task, seed: int, case: Case, batch: int, number: int = 0) -> Examples:
    """A batch of a test, which no training step has: `number` counts the batches of a case."""
    return task.sample(np.random.default_rng([seed, 1, case.length, case.items, number]), batch, case)


def last_only(examples: Examples) -> Examples:
    """The same examples with one question each, at the last position: what an encoder of whole sequences answers.

    Raise ValueError if a last position is not asked.
    """
    if not examples.mask[:, -1].all():
        raise ValueError("these examples ask nothing at their last position, so they have no single answer")
    targets, mask = np.zeros_like(examples.targets), np.zeros_like(examples.mask)
    targets[:, -1], mask[:, -1] = examples.targets[:, -1], True
    return Examples(examples.tokens, targets, mask)


def constant_accuracy(examples: Examples) -> float:
    """The accuracy of the best constant answer on these examples: their chance level."""
    asked = examples.targets[examples.mask]
    return float(np.bincount(asked).max() / len(asked))


def balancing_weights(examples: Examples) -> Floats:
    """`[batch, length]`: a weight for each position that is asked, which sum to 1, equally for each class that occurs.

    The accuracy that they weight is the mean over the classes of the accuracy among positions with that answer. A
    constant answer scores one over the number of classes, however rare some of them are.
    """
    counts = np.bincount(examples.targets[examples.mask])
    share = np.divide(1.0, counts * np.count_nonzero(counts), where=counts > 0, out=np.zeros(len(counts)))
    return np.where(examples.mask, share[np.where(examples.mask, examples.targets, 0)], 0.0)
