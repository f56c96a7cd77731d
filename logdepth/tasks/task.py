"""What a task is: examples that are generated, a question at some of their positions, and one right answer to each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


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
    """`[batch, length]`, from 0 to below the task's `num_classes`: the answer after each token; 0 where none is asked."""
    mask: Booleans
    """`[batch, length]`: the positions at which an answer is asked."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A family of examples of any length, without data files.

    A subclass is a frozen dataclass, whose fields select a member of the family. The answer at a position depends only
    on the tokens up to it, so that every model that reads from left to right can give it.
    """

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
        """Accuracy of the best guess that does not look at the tokens, in the limit of long examples."""

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


def training_batch(task: Task, seed: int, step: int, batch: int, cases: Sequence[Case] | None = None) -> Examples:
    """The batch of a training step, of one case drawn from `cases`, by default all of the task's training cases."""
    rng = np.random.default_rng([seed, 0, step])
    cases = task.train_cases if cases is None else cases
    return task.sample(rng, batch, cases[int(rng.integers(len(cases)))])


def held_out_batch(task: Task, seed: int, case: Case, batch: int, number: int = 0) -> Examples:
    """A batch of a test, which no training step has: `number` counts the batches of a case."""
    return task.sample(np.random.default_rng([seed, 1, case.length, case.items, number]), batch, case)
