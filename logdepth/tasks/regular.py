"""Regular languages of the LDRU paper: parity, counting modulo 5, brackets of bounded depth, Tomita's, prefixes.

They are its 21: parity, even pairs, cycle navigation, modular arithmetic from left to right, D_n for six n, five of
Tomita's languages and six of prefixes. Modular arithmetic that multiplies first, as in Delétang et al., is one more.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import pi, sin
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from logdepth.tasks.automaton import Automaton, StringSampler
from logdepth.tasks.task import TEST_LENGTHS, TRAIN_LENGTHS, Booleans, Case, Examples, Integers, LengthTask

MODULUS = 5
PLUS, MINUS, TIMES = range(MODULUS, MODULUS + 3)
"""Symbols of the arithmetic; those below are its digits."""

OPEN, CLOSE = 0, 1
"""Symbols of D_n."""


@dataclass(frozen=True, kw_only=True)
class _Regular(LengthTask):
    """A task that a finite automaton solves. The answer is defined, and asked, after every symbol.

    An encoder answers at the last position only: see `last_only`.
    """

    family: ClassVar[str] = "regular-languages"

    @cached_property
    def automaton(self) -> Automaton:
        """The automaton, which is the definition of the task."""
        return self._automaton()

    @abstractmethod
    def _automaton(self) -> Automaton:
        """Make the automaton."""

    @property
    def num_symbols(self) -> int:
        return self.automaton.num_symbols

    @property
    def num_classes(self) -> int:
        return self.automaton.num_answers

    def draw(self, rng: Generator, batch: int, length: int) -> Examples:
        tokens = self._strings(rng, batch, length)
        return Examples(tokens, self.automaton.answer(tokens), np.ones(tokens.shape, dtype=bool))

    def _strings(self, rng: Generator, batch: int, length: int) -> Integers:
        """Draw strings: by default, all are equally likely."""
        return rng.integers(self.num_symbols, size=(batch, length))


@dataclass(frozen=True, kw_only=True)
class Parity(_Regular):
    """Parity (Delétang et al., arXiv 2207.02098): class 1 if the number of ones is odd. Symbols are uniform bits."""

    def _automaton(self) -> Automaton:
        return Automaton.explore(0, 2, lambda state, bit: state ^ bit, lambda state: state)

    @property
    def chance(self) -> float:
        return 1 / 2


@dataclass(frozen=True, kw_only=True)
class EvenPairs(_Regular):
    """Even pairs (Delétang et al., arXiv 2207.02098): class 1 if the number of neighbours 01 and 10 is odd.

    That is so if the first and the last bit differ. Symbols are uniform bits.
    """

    def _automaton(self) -> Automaton:
        start: tuple[int, ...] = ()
        return Automaton.explore(
            start, 2, lambda state, bit: (state[0] if state else bit, bit), lambda state: int(len(set(state)) == 2)
        )

    @property
    def chance(self) -> float:
        return 1 / 2


@dataclass(frozen=True, kw_only=True)
class CycleNavigation(_Regular):
    """Cycle navigation (Delétang et al., arXiv 2207.02098): the place on a circle of five after all steps.

    Symbols 0, 1 and 2 are steps by −1, 0 and +1, independent and uniform. The walk starts at place 0.
    """

    def _automaton(self) -> Automaton:
        return Automaton.explore(0, 3, lambda place, step: (place + step - 1) % MODULUS, lambda place: place)

    @property
    def chance(self) -> float:
        return 1 / MODULUS

    def token_text(self, token: int) -> str:
        return ("−1", "0", "+1")[token]


@dataclass(frozen=True, kw_only=True)
class ModularArithmetic(_Regular):
    """Modular arithmetic without brackets: the value modulo 5 of an expression such as 2+3×4−1.

    Symbols are the digits 0 to 4, then +, − and ×, independent and uniform at their places. The LDRU paper evaluates
    strictly from left to right, (2+3)×4−1; Delétang et al. (arXiv 2207.02098) multiply first, 2+(3×4)−1. The answer
    after an operator is the value of what stands before it.

    Both papers shorten even lengths by one, to that of an expression. Training lengths here are therefore the odd ones,
    equally likely, and so are the test lengths. Strings of even length exist; they end with an operator.
    """

    multiply_first: bool = False
    """Whether products come before sums. If not, evaluation is from left to right."""

    def _automaton(self) -> Automaton:
        # The value is sum + term. From left to right, the sum is always 0. The last operator waits for its operand.
        start: tuple[int, int, int | None] = (0, 0, PLUS)
        return Automaton.explore(start, MODULUS + 3, self._next, lambda state: (state[0] + state[1]) % MODULUS)

    def _next(self, state: tuple[int, int, int | None], symbol: int) -> tuple[int, int, int | None]:
        total, term, operator = state
        if symbol >= MODULUS:
            return total, term, symbol
        if operator is None:  # a digit after a digit, which no expression has
            return state
        if operator == TIMES:
            return total, term * symbol % MODULUS, None
        signed = symbol if operator == PLUS else -symbol
        if self.multiply_first:
            return (total + term) % MODULUS, signed % MODULUS, None
        return 0, (term + signed) % MODULUS, None

    @property
    def chance(self) -> float:
        """The share of zeros, the most frequent value.

        From left to right, a product is 0 if an operand is. Of z = ⅔ · ⅕ + ⅓ · (z + (1 − z)/5), the share of zeros
        after one more operator and digit, the solution is 3/11. With products first, a long sum is uniform.
        """
        return 1 / 5 if self.multiply_first else 3 / 11

    @property
    def train_cases(self) -> Sequence[Case]:
        return [Case(length) for length in TRAIN_LENGTHS if length % 2]

    @property
    def test_cases(self) -> Sequence[Case]:
        """Test lengths, of which the even ones are shortened by one."""
        return [Case(length - 1 + length % 2) for length in TEST_LENGTHS]

    def token_text(self, token: int) -> str:
        return "01234+−×"[token]

    def _strings(self, rng: Generator, batch: int, length: int) -> Integers:
        tokens = rng.integers(MODULUS, size=(batch, length))
        tokens[:, 1::2] = rng.integers(PLUS, TIMES + 1, size=(batch, length // 2))
        return tokens


@dataclass(frozen=True, kw_only=True)
class PrefixSymbols(_Regular):
    """The language family P_{p,q} of the LDRU paper: name the first p symbols of a string over q symbols.

    Classes are the q^p prefixes in lexicographic order, and one more, the last, for strings shorter than p. Symbols are
    independent and uniform.
    """

    prefix: int
    """Symbols to remember, p."""
    alphabet: int
    """Number of different symbols, q."""

    def __post_init__(self) -> None:
        if self.prefix < 1 or self.alphabet < 2:
            raise ValueError(
                f"prefix is {self.prefix} and alphabet is {self.alphabet}: give at least 1 symbol to remember, of 2"
            )

    def _automaton(self) -> Automaton:
        prefixes = product(range(self.alphabet), repeat=self.prefix)
        number = {prefix: i for i, prefix in enumerate(prefixes)}
        start: tuple[int, ...] = ()
        return Automaton.explore(
            start,
            self.alphabet,
            lambda state, symbol: (*state, symbol)[: self.prefix],
            lambda state: number.get(state, len(number)),
        )

    @property
    def chance(self) -> float:
        return 1 / (self.num_classes - 1)

    def answer_text(self, answer: int) -> str:
        if answer == self.alphabet**self.prefix:
            return "short"
        return np.base_repr(answer, self.alphabet).zfill(self.prefix)


@dataclass(frozen=True, kw_only=True)
class _Membership(_Regular):
    """Is a string in a language? Class 1 if it is accepted, at the last position and for every beginning of it.

    Accepted and rejected strings are equally likely; where a length has only one of the two, all strings are of this
    one. Either is of one of several kinds with equal probability, among those that the length has, and all strings of a
    kind are equally likely. One kind of accepted strings is all of them. Two kinds of rejected strings are all of them,
    and near misses, which are accepted strings with one changed symbol.

    Beginnings of strings are not balanced. `chance` is that of all positions, in the limit of long strings, and
    `chance_at_end` that of whole strings. See also `balancing_weights`.
    """

    @property
    def num_classes(self) -> int:
        return 2

    @property
    @abstractmethod
    def accepted_beginnings(self) -> float:
        """Share of accepted ones among the beginnings of the strings drawn, in the limit of long strings."""

    @property
    def chance(self) -> float:
        return max(self.accepted_beginnings, 1 - self.accepted_beginnings)

    @property
    def chance_at_end(self) -> float:
        return 1 / 2

    @property
    def accepts_odd_lengths(self) -> bool:
        """Whether some strings of odd length are accepted."""
        return True

    @property
    def test_cases(self) -> Sequence[Case]:
        """Test lengths. Odd ones are lengthened by one if all of their strings are rejected, which shows little."""
        return [Case(length if self.accepts_odd_lengths else length + length % 2) for length in TEST_LENGTHS]

    def answer_text(self, answer: int) -> str:
        return ("no", "yes")[answer]

    def _accepted(self) -> list[Booleans]:
        """Kinds of accepted strings, as sets of states in which they end; the first has all accepted strings."""
        return [self.automaton.answers == 1]

    def _rejected(self) -> list[Booleans]:
        """Kinds of rejected strings likewise, besides changes of one symbol; the first has all rejected strings."""
        return [self.automaton.answers == 0]

    @cached_property
    def _sampler(self) -> tuple[StringSampler, int]:
        """A sampler of all kinds, the accepted ones first, and their number."""
        accepted = self._accepted()
        return StringSampler(self.automaton, [*accepted, *self._rejected()]), len(accepted)

    def _strings(self, rng: Generator, batch: int, length: int) -> Integers:
        sampler, num_accepted = self._sampler
        possible = sampler.possible(length)
        accepted = np.flatnonzero(possible[:num_accepted])
        rejected = num_accepted + np.flatnonzero(possible[num_accepted:])
        if not (len(accepted) and len(rejected)):
            return sampler.draw(rng, rng.choice([*accepted, *rejected], size=batch), length)

        near_miss = len(possible)  # one more kind: accepted, then changed
        is_rejected = rng.integers(2, size=batch).astype(bool)
        kinds = np.where(is_rejected, rng.choice([*rejected, near_miss], size=batch), rng.choice(accepted, size=batch))
        missing = np.flatnonzero(kinds == near_miss)
        kinds[missing] = rng.choice(accepted, size=len(missing))
        tokens = sampler.draw(rng, kinds, length)
        if len(missing):
            tokens[missing], found = self.automaton.change_one(rng, tokens[missing], answer=0)
            lost = missing[~found]  # no change of one symbol leaves the language
            tokens[lost] = sampler.draw(rng, np.full(len(lost), num_accepted), length)
        return tokens


@dataclass(frozen=True, kw_only=True)
class BoundedBrackets(_Membership):
    """The language D_n of the LDRU paper: balanced brackets of depth at most n. Symbol 0 opens and symbol 1 closes.

    D_1 = (01)* and D_n = (0 D_{n−1} 1)*. Besides random strings and changes of one symbol, rejected strings are of
    three more kinds:

    - unclosed: without a violation, but with at least one open bracket at the end;
    - too deep: balanced, with exactly one bracket that opens at depth n; the next one closes it;
    - too early: balanced, with exactly one bracket that closes at depth 0; the next one opens.

    Half of the accepted strings are drawn among those that reach depth n. In strings of 40 symbols a depth such as 12
    is rare, so that random strings would not show what is accepted. The paper's accepted strings come from a random
    walk, and its rejected ones are random only: most long ones go wrong within a few symbols.

    Odd lengths have no accepted string. As in the paper, they are trained too; unlike there, test lengths are even.

    Accepted beginnings are rare: they end at depth 0.
    """

    depth: int
    """The greatest depth that is accepted, n."""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth is {self.depth}: give at least 1")

    @property
    def accepts_odd_lengths(self) -> bool:
        return False

    def _automaton(self) -> Automaton:
        # A state is the depth, and what happened so far; None is beyond repair. A shallow string becomes deep at depth
        # n. An excursion to −1 or n + 1 makes it too early or too deep.
        start: tuple[int, str] | None = (0, "shallow")
        return Automaton.explore(start, 2, self._next, lambda state: int(state in ((0, "shallow"), (0, "deep"))))

    def _next(self, state: tuple[int, str] | None, symbol: int) -> tuple[int, str] | None:
        if state is None:
            return None
        depth, past = state[0] + (1 if symbol == OPEN else -1), state[1]
        if 0 <= depth <= self.depth:
            return depth, "deep" if past == "shallow" and depth == self.depth else past
        if past in ("too early", "too deep"):
            return None
        return depth, "too early" if depth < 0 else "too deep"

    def _ends(self, depths: Sequence[int], *pasts: str) -> Booleans:
        ends = set(product(depths, pasts))
        return np.array([name in ends for name in self.automaton.names])

    def _accepted(self) -> list[Booleans]:
        return [*super()._accepted(), self._ends([0], "deep")]

    def _rejected(self) -> list[Booleans]:
        unclosed = self._ends(range(1, self.depth + 1), "shallow", "deep")
        return [*super()._rejected(), unclosed, self._ends([0], "too deep"), self._ends([0], "too early")]

    @property
    def accepted_beginnings(self) -> float:
        """Three quarters of the share of depth 0 in a long accepted string, 2/(n + 2) · sin²(π/(n + 2)).

        The share is that of the random walk that stays in 0 to n. Unclosed strings have it too. Those that are too deep
        or too early, and near misses, have half of it on average, and random strings nothing: 1/2 + 1/10 · (1 + 3/2).
        """
        return 1.5 / (self.depth + 2) * sin(pi / (self.depth + 2)) ** 2

    def token_text(self, token: int) -> str:
        return "()"[token]


@dataclass(frozen=True, kw_only=True)
class _TomitaLanguage:
    """One of Tomita's languages over bits."""

    table: list[list[int]]
    """The automaton: for each state, the next one after 0 and after 1."""
    accepted: tuple[int, ...]
    """States that accept."""
    accepted_beginnings: float
    """Share of accepted beginnings in the limit of long strings, as `_Membership` draws them."""


TOMITA: dict[int, _TomitaLanguage] = {
    # q₁: after an odd run of ones. q₂, q₃: in a run of zeros after it, even and odd.
    # A long accepted string is in q₃ for a share of 0.1124; a near miss dies halfway on average: 5/8 · (1 − 0.1124).
    3: _TomitaLanguage(table=[[0, 1], [3, 0], [3, 1], [2, 4], [4, 4]], accepted=(0, 1, 2), accepted_beginnings=0.5548),
    # The state counts the last zeros. A near miss dies halfway on average: 1/2 + 1/4 · 1/2.
    4: _TomitaLanguage(table=[[1, 0], [2, 0], [3, 0], [3, 3]], accepted=(0, 1, 2), accepted_beginnings=5 / 8),
    # Parities of zeros and ones, as two bits.
    5: _TomitaLanguage(table=[[2, 1], [3, 0], [0, 3], [1, 2]], accepted=(0,), accepted_beginnings=1 / 4),
    # Zeros minus ones modulo 3.
    6: _TomitaLanguage(table=[[1, 2], [2, 0], [0, 1]], accepted=(0,), accepted_beginnings=1 / 3),
    # The number of runs so far. A near miss dies after a share of 0.65 on average: 1/2 + 1/4 · 0.65.
    7: _TomitaLanguage(
        table=[[0, 1], [2, 1], [2, 3], [4, 3], [4, 4]], accepted=(0, 1, 2, 3), accepted_beginnings=0.6625
    ),
}


@dataclass(frozen=True, kw_only=True)
class Tomita(_Membership):
    """Tomita's languages 3 to 7 over bits (Tomita, 1982), the automata as in the LDRU paper.

    3: no odd run of ones is followed directly by an odd run of zeros. 4: no 000. 5: even numbers of zeros and of ones.
    6: the number of zeros minus that of ones is divisible by 3. 7: 0*1*0*1*.

    Of long random strings, nearly all are rejected by 3, 4 and 7; all languages are drawn as `_Membership` says. Odd
    lengths have no accepted string in language 5; they are trained but not tested. Lengths below 2, 3 and 4 have no
    rejected string in 3, 4 and 7.
    """

    number: int
    """Which of the languages, 3 to 7."""

    def __post_init__(self) -> None:
        if self.number not in TOMITA:
            raise ValueError(f"number is {self.number}: choose one of {', '.join(map(str, TOMITA))}")

    @property
    def accepts_odd_lengths(self) -> bool:
        return self.number != 5

    def _automaton(self) -> Automaton:
        language = TOMITA[self.number]
        answers = np.isin(np.arange(len(language.table)), language.accepted).astype(np.int64)
        return Automaton(table=np.array(language.table), answers=answers)

    @property
    def accepted_beginnings(self) -> float:
        return TOMITA[self.number].accepted_beginnings
