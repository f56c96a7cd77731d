"""Context-free and context-sensitive tasks of Delétang et al.: arithmetic with brackets, reversal, a stack, sorting."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from logdepth.tasks.task import Examples, Integers, LengthTask

MODULUS = 5
PLUS, MINUS, TIMES, OPEN, CLOSE = range(MODULUS, MODULUS + 5)
"""Symbols of the arithmetic; those below are its digits."""

POP, PUSH_0, PUSH_1 = 2, 3, 4
"""Actions on the stack; 0 and 1 are what it holds."""

END_OF_STACK = 2
"""The class that ends an answer of the stack."""


@dataclass(frozen=True, kw_only=True)
class _ContextFree(LengthTask):
    """A task of this file. `Case.length` counts the symbols of the input."""

    family: ClassVar[str] = "context-free"


@dataclass(frozen=True, kw_only=True)
class BracketArithmetic(_ContextFree):
    """Modular arithmetic with brackets (Delétang et al., arXiv 2207.02098): the value modulo 5 of an expression.

    Symbols are the digits 0 to 4, then +, −, ×, ( and ). An expression of 1 to 4 symbols is d, −d, (d) or (−d) with a
    uniform digit d. A longer one is (left ∘ right) with a uniform operator ∘ of the three, where the length of the left
    operand is uniform among those that leave both operands at least one symbol. Every length exists, and minus is unary
    as well as binary: (3−−2) is an expression. Their paper has all three operators; their public code has × only on
    request.

    The value is asked at the last symbol only. No beginning of an expression is an expression itself, so a value at
    every prefix is not defined. Delétang et al. append one blank to the input and ask there.
    """

    @property
    def num_symbols(self) -> int:
        return MODULUS + 5

    @property
    def num_classes(self) -> int:
        return MODULUS

    @property
    def chance(self) -> float:
        """The share of zeros, the most frequent value because products favour it.

        It is a fifth for single digits and grows slowly with the length. Of z = ⅔·(z² + (1 − z)²/4) + ⅓·(2z − z²), the
        share after a uniform operator on two independent operands with share z, the stable solution is a third.
        """
        return 1 / 3

    def token_text(self, token: int) -> str:
        return "01234+−×()"[token]

    def draw(self, rng: Generator, batch: int, length: int) -> Examples:
        # Rows lie one after the other in flat arrays. All expressions of one depth are drawn at once, outermost first.
        tokens = np.empty(batch * length, dtype=np.int64)
        values = np.empty_like(tokens)  # of the expression that starts at a position
        starts, sizes = length * np.arange(batch), np.full(batch, length)
        levels = []
        while len(starts):
            bracketed = sizes >= 3
            tokens[starts[bracketed]] = OPEN
            tokens[(starts + sizes - 1)[bracketed]] = CLOSE

            leaf = sizes <= 4
            leaf_starts, leaf_sizes = starts[leaf], sizes[leaf]
            places = leaf_starts + leaf_sizes // 2
            digits = rng.integers(MODULUS, size=len(places))
            negative = leaf_sizes % 2 == 0
            tokens[places] = digits
            tokens[places[negative] - 1] = MINUS
            values[leaf_starts] = np.where(negative, -digits, digits) % MODULUS

            starts, sizes = starts[~leaf], sizes[~leaf]
            left_sizes = rng.integers(1, sizes - 3)
            lefts, middles = starts + 1, starts + 1 + left_sizes
            operators = rng.integers(PLUS, TIMES + 1, size=len(starts))
            tokens[middles] = operators
            levels.append((starts, lefts, middles + 1, operators))
            starts = np.concatenate([lefts, middles + 1])
            sizes = np.concatenate([left_sizes, sizes - left_sizes - 3])

        for starts, lefts, rights, operators in reversed(levels):
            left, right = values[lefts], values[rights]
            values[starts] = np.choose(operators - PLUS, [left + right, left - right, left * right]) % MODULUS

        targets = np.zeros((batch, length), dtype=np.int64)
        targets[:, -1] = values[::length]
        mask = np.zeros(targets.shape, dtype=bool)
        mask[:, -1] = True
        return Examples(tokens.reshape(batch, length), targets, mask)


@dataclass(frozen=True, kw_only=True)
class ReverseString(_ContextFree):
    """Reversal (Delétang et al., arXiv 2207.02098): the input from its last symbol to its first.

    The input is `Case.length` letters, independent and uniform over `num_letters`; the paper has 2. As many blanks
    follow, the last symbol of the alphabet, and blank i asks for letter i from the end. Earlier answers are not shown.
    Classes are the letters.
    """

    num_letters: int = 2
    """Number of different letters."""

    def __post_init__(self) -> None:
        _check_letters(self.num_letters)

    @property
    def num_symbols(self) -> int:
        return self.num_letters + 1

    @property
    def num_classes(self) -> int:
        return self.num_letters

    @property
    def chance(self) -> float:
        return 1 / self.num_letters

    def token_text(self, token: int) -> str:
        return str(token) if token < self.num_letters else "?"

    def draw(self, rng: Generator, batch: int, length: int) -> Examples:
        letters = rng.integers(self.num_letters, size=(batch, length))
        return _ask_after(letters, letters[:, ::-1], blank=self.num_letters)


@dataclass(frozen=True, kw_only=True)
class BucketSort(_ContextFree):
    """Bucket sort (Delétang et al., arXiv 2207.02098): the letters of the input in ascending order.

    The input is `Case.length` letters, independent and uniform over `num_letters`; the paper has 5. As many blanks
    follow, the last symbol of the alphabet, and blank i asks for letter i of the sorted input. Earlier answers are not
    shown. Classes are the letters. The paper counts this task as context-sensitive.
    """

    num_letters: int = 5
    """Number of different letters."""

    def __post_init__(self) -> None:
        _check_letters(self.num_letters)

    @property
    def num_symbols(self) -> int:
        return self.num_letters + 1

    @property
    def num_classes(self) -> int:
        return self.num_letters

    @property
    def chance(self) -> float:
        """Accuracy of a constant answer.

        Letters are about equally frequent in a long input, so the number of a blank as a share of the length gives its
        answer away: a model that knows both, and nothing else, is right at 77 % of the blanks of 40 letters and at
        93 % of those of 500.
        """
        return 1 / self.num_letters

    def token_text(self, token: int) -> str:
        return str(token) if token < self.num_letters else "?"

    def draw(self, rng: Generator, batch: int, length: int) -> Examples:
        letters = rng.integers(self.num_letters, size=(batch, length))
        return _ask_after(letters, np.sort(letters, axis=1), blank=self.num_letters)


@dataclass(frozen=True, kw_only=True)
class StackManipulation(_ContextFree):
    """Stack manipulation (Delétang et al., arXiv 2207.02098): what a stack holds after a list of actions.

    The input is the stack from bottom to top, uniform zeros and ones, followed by actions, uniform over pop (symbol 2),
    push 0 (3) and push 1 (4). The stack has at least one symbol and at most all but one, with equal probability; an
    input of one symbol has no action. A pop from an empty stack does nothing.

    `Case.length` + 1 blanks follow, symbol 5. They ask for the final stack from top to bottom, classes 0 and 1, and
    then, once, for its end, class 2. Nothing is asked after that; earlier answers are not shown. Delétang et al. train
    the blanks after the end too, with answer 0, and leave them out of the accuracy as we do.
    """

    @property
    def num_symbols(self) -> int:
        return 6

    @property
    def num_classes(self) -> int:
        return 3

    @property
    def chance(self) -> float:
        return 1 / 2

    def token_text(self, token: int) -> str:
        return ("0", "1", "pop", "push0", "push1", "?")[token]

    def answer_text(self, answer: int) -> str:
        return ("0", "1", "end")[answer]

    def draw(self, rng: Generator, batch: int, length: int) -> Examples:
        num_initial = rng.integers(1, max(length, 2), size=(batch, 1))
        initial = rng.integers(2, size=(batch, length))
        actions = rng.integers(POP, PUSH_1 + 1, size=(batch, length))
        inputs = np.where(np.arange(length) < num_initial, initial, actions)

        stack = np.zeros((length + 1, batch), dtype=np.int64)
        height, rows = np.zeros(batch, dtype=np.int64), np.arange(batch)
        for symbols in np.ascontiguousarray(inputs.T):
            stack[height, rows] = symbols % PUSH_0  # what a pop writes lies above the stack
            height = np.where(symbols == POP, np.maximum(height - 1, 0), height + 1)

        from_top = height[:, None] - 1 - np.arange(length + 1)
        answers = np.where(from_top >= 0, stack[from_top, rows[:, None]], 0)
        answers[from_top == -1] = END_OF_STACK
        examples = _ask_after(inputs, answers, blank=PUSH_1 + 1)
        examples.mask[:, length:] = from_top >= -1
        return examples


def _check_letters(num_letters: int) -> None:
    if num_letters < 2:
        raise ValueError(f"num_letters is {num_letters}: give at least 2 different letters")


def _ask_after(inputs: Integers, answers: Integers, *, blank: int) -> Examples:
    """The inputs, then a blank for each symbol of the answers, at which it is asked."""
    tokens = np.concatenate([inputs, np.full_like(answers, blank)], axis=1)
    targets = np.concatenate([np.zeros_like(inputs), answers], axis=1)
    mask = np.zeros(tokens.shape, dtype=bool)
    mask[:, inputs.shape[1] :] = True
    return Examples(tokens, targets, mask)
