"""Finite automata: the states along strings, and random strings that end in given states."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.random import Generator

from logdepth.tasks.task import Booleans, Floats, Integers

State = TypeVar("State", bound=Hashable)


def chain(table: Integers, first: Integers, inputs: Integers) -> Integers:
    """`[batch, 1 + inputs]`: states of automata that start at `first` and go from state s to `table[s, input]`."""
    flat, num_inputs = table.ravel(), table.shape[1]
    states = np.empty((1 + inputs.shape[1], len(first)), dtype=np.int64)
    states[0] = first
    for t, row in enumerate(np.ascontiguousarray(inputs.T)):
        states[t + 1] = flat[states[t] * num_inputs + row]
    return np.ascontiguousarray(states.T)


@dataclass(frozen=True, kw_only=True, eq=False)
class Automaton:
    """A Moore machine: a deterministic automaton with an answer in each state. It starts in state 0."""

    table: Integers
    """`[states, symbols]`: the next state."""
    answers: Integers
    """`[states]`: the answer to a string that ends in a state."""

    names: Sequence[Hashable] = ()
    """`[states]`: what each state stands for."""

    @classmethod
    def explore(
        cls,
        start: State,
        num_symbols: int,
        following: Callable[[State, int], State],
        answer: Callable[[State], int],
    ) -> "Automaton":
        """The automaton of functions: the state after a state and a symbol, and the answer in a state."""
        names = [start]
        number = {start: 0}
        table = []
        for state in names:  # grows on the way
            table.append([following(state, symbol) for symbol in range(num_symbols)])
            for found in table[-1]:
                if found not in number:
                    number[found] = len(names)
                    names.append(found)
        numbers = np.array([[number[found] for found in row] for row in table])
        return cls(table=numbers, answers=np.array([answer(state) for state in names]), names=tuple(names))

    @property
    def num_symbols(self) -> int:
        return len(self.table[0])

    @property
    def num_answers(self) -> int:
        return int(self.answers.max()) + 1

    def states(self, tokens: Integers) -> Integers:
        """`[batch, 1 + length]`: the state before the first token and after each."""
        return chain(self.table, np.zeros(len(tokens), dtype=np.int64), tokens)

    def answer(self, tokens: Integers) -> Integers:
        """`[batch, length]`: the answer to each beginning of each string."""
        return self.answers[self.states(tokens)[:, 1:]]

    def change_one(self, rng: Generator, tokens: Integers, answer: int) -> tuple[Integers, Booleans]:
        """Strings that differ in one token and have `answer`, and which strings have such a neighbour; others stay.

        All neighbours with this answer are equally likely.
        """
        batch, length = tokens.shape
        rows = np.arange(batch)
        changed = (tokens[..., None] + np.arange(1, self.num_symbols)) % self.num_symbols  # [batch, length, change]
        after = self.table[self.states(tokens)[:, :-1, None], changed]
        leads = np.repeat((self.answers == answer)[None], batch, axis=0)  # [batch, state]: with the rest of the string
        fits = np.empty(changed.shape, dtype=bool)
        for t in reversed(range(length)):
            fits[:, t] = np.take_along_axis(leads, after[:, t], axis=1)
            leads = np.take_along_axis(leads, self.table.T[tokens[:, t]], axis=1)
        choice = (fits * (1 + rng.random(fits.shape))).reshape(batch, -1).argmax(axis=1)
        found = fits.reshape(batch, -1)[rows, choice]
        result = tokens.copy()
        place = choice // (self.num_symbols - 1)
        result[rows[found], place[found]] = changed.reshape(batch, -1)[rows[found], choice[found]]
        return result, found


class StringSampler:
    """Draws random strings of an automaton. A kind is a set of states; strings of a kind end in one of them.

    All strings of a length and kind are equally likely. From the number of ways to complete a string, which is counted
    from its end, follows the probability of each next symbol.
    """

    def __init__(self, automaton: Automaton, kinds: Sequence[Booleans]) -> None:
        """Create a sampler for `kinds`, a list of `[states]`."""
        self._automaton, self._ends = automaton, np.array(kinds, dtype=float)
        self._possible, self._thresholds = self._count(1)

    def possible(self, length: int) -> Booleans:
        """`[kinds]`: whether there are strings of this length."""
        self._prepare(length)
        possible: Booleans = self._possible[length]
        return possible

    def draw(self, rng: Generator, kinds: Integers, length: int) -> Integers:
        """`[batch, length]`: strings of the kinds `[batch]`, all of which must be possible at this length."""
        self._prepare(length)
        num_states, num_symbols = self._automaton.table.shape
        flat, first = self._automaton.table.ravel(), kinds * num_states
        draws = rng.random((length, 1, len(kinds)))
        states = np.zeros(len(kinds), dtype=np.int64)
        tokens = np.empty((length, len(kinds)), dtype=np.int64)
        for t in range(length):
            thresholds = self._thresholds[length - t - 1].take(first + states, axis=1)
            tokens[t] = (draws[t] >= thresholds).sum(axis=0)
            states = flat[states * num_symbols + tokens[t]]
        return np.ascontiguousarray(tokens.T)

    def _prepare(self, length: int) -> None:
        if length > len(self._thresholds):
            self._possible, self._thresholds = self._count(2 ** (length - 1).bit_length())

    def _count(self, length: int) -> tuple[Booleans, Floats]:
        """The tables for all lengths up to `length`.

        `[length, kind]`: whether there are strings. `[symbols left after the next, next symbol except the last,
        kind · state]`: the probability that the next symbol is this one or one before it.
        """
        table = self._automaton.table
        ways = self._ends  # [kind, state]: the number of ways to complete a string, scaled to at most 1
        possible, thresholds = [ways[:, 0] > 0], []
        for _ in range(length):
            up_to = ways[:, table].cumsum(axis=-1)  # [kind, state, symbol]
            total = up_to[..., -1:]
            share = np.divide(up_to, total, where=total > 0, out=np.zeros_like(up_to))[..., :-1]
            thresholds.append(share.reshape(-1, table.shape[1] - 1).T)
            most = total.max(axis=1)
            ways = total[..., 0] / np.where(most > 0, most, 1)
            possible.append(ways[:, 0] > 0)
        return np.array(possible), np.array(thresholds)
