"""Recall: pairs of keys and values, data tokens among noise, and a needle in a long text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from logdepth.tasks.task import Booleans, Case, Examples, Integers, Task


@dataclass(frozen=True, kw_only=True)
class MultiQueryRecall(Task):
    """Multi-query associative recall, MQAR, of Zoology (Arora et al., arXiv 2312.04927).

    An example of `Case(length, items)` starts with `items` pairs: key, value, key, value, …. The keys differ from each
    other and come from 1 to below half of the vocabulary; the values differ and come from its upper half. The rest of
    the example consists of slots of two tokens. Every key occurs once more, as a query, at the start of a slot of its
    own; its value is asked there, and nothing is asked elsewhere. The keys choose slots one after another: slot g = 1,
    2, … with probability proportional to g^(power_a − 1) among the free ones, so that distances from the pairs to the
    queries follow a power law. All other tokens are uniform over the whole vocabulary, as in Zoology. A filler may thus
    equal a key, but only after the pairs: the value of a key is what followed its first occurrence.

    Classes are tokens, so that a head can share the weights of the embedding; only values are right answers. In
    training, the five cases are equally likely and examples are always new, where Zoology has 100,000 examples of 64/4
    and 20,000 of each other case. Zoology tests at 64/4, 64/8, 64/16, 128/32, 256/64, 512/128 and 1,024/256.
    """

    family: ClassVar[str] = "recall"

    vocab_size: int = 8192
    """Number of tokens, keys and values together."""
    power_a: float = 0.01
    """One more than the exponent of the power law of slots; 1 makes all slots equally likely."""

    def __post_init__(self) -> None:
        if self.vocab_size < 4 or self.vocab_size % 2:
            raise ValueError(f"vocab_size is {self.vocab_size}: give an even number of at least 4")
        if not 0 < self.power_a <= 1:
            raise ValueError(f"power_a is {self.power_a}: give a number above 0 and at most 1")

    @property
    def num_symbols(self) -> int:
        return self.vocab_size

    @property
    def num_classes(self) -> int:
        return self.vocab_size

    @property
    def chance(self) -> float:
        return 2 / self.vocab_size

    @property
    def train_cases(self) -> Sequence[Case]:
        return [Case(64, 4), Case(128, 8), Case(256, 16), Case(256, 32), Case(256, 64)]

    @property
    def test_cases(self) -> Sequence[Case]:
        return [*self.train_cases, Case(512, 64), Case(512, 128), Case(1024, 128), Case(1024, 256)]

    def sample(self, rng: Generator, batch: int, case: Case) -> Examples:
        length, pairs, half = case.length, case.items, self.vocab_size // 2
        _check_size(case, least=4 * pairs, what="pairs of keys and values")
        if pairs > half - 1:
            raise ValueError(f"case {case} has {pairs} pairs: a vocabulary of {self.vocab_size} has {half - 1} keys")
        keys = 1 + _distinct(rng, batch, half - 1, pairs)
        values = half + _distinct(rng, batch, half, pairs)
        tokens = rng.integers(self.vocab_size, size=(batch, length))
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values

        gaps = np.arange(1, (length - 2 * pairs) // 2 + 1)
        # In a race of exponential clocks, each next arrival is drawn in proportion to the rates of those still racing.
        arrivals = rng.standard_exponential((batch, len(gaps))) / gaps ** (self.power_a - 1)
        queries = 2 * pairs + 2 * np.argsort(arrivals, axis=1)[:, :pairs]

        targets, mask = _nothing_asked(tokens)
        np.put_along_axis(tokens, queries, keys, axis=1)
        np.put_along_axis(targets, queries, values, axis=1)
        np.put_along_axis(mask, queries, True, axis=1)
        return Examples(tokens, targets, mask)


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Selective copying (Gu and Dao, arXiv 2312.00752): copying (Arjovsky et al., arXiv 1511.06464) from among noise.

    An example of `Case(length, items)` ends with `items` blanks. Before them are `items` data tokens, independent and
    uniform, at uniformly random places; all other places hold the noise token. The i-th blank asks for the i-th data
    token. The data tokens are the symbols 0 to below `num_data`, which are the classes; the last two symbols are noise
    and blank.

    Mamba's paper has 16 symbols, with 16 data tokens in sequences of 4,096, and trains at the length of its test. We
    keep the symbols, count the blanks in the length, train on at most 256 tokens and test on up to 65,536.
    """

    family: ClassVar[str] = "recall"

    num_data: int = 14
    """Number of different data tokens."""

    def __post_init__(self) -> None:
        if self.num_data < 2:
            raise ValueError(f"num_data is {self.num_data}: give at least 2 different data tokens")

    @property
    def num_symbols(self) -> int:
        return self.num_data + 2

    @property
    def num_classes(self) -> int:
        return self.num_data

    @property
    def chance(self) -> float:
        return 1 / self.num_data

    def token_text(self, token: int) -> str:
        return str(token) if token < self.num_data else "-?"[token - self.num_data]

    @property
    def train_cases(self) -> Sequence[Case]:
        return [Case(64, 4), Case(128, 8), Case(256, 16)]

    @property
    def test_cases(self) -> Sequence[Case]:
        return [Case(length, 16) for length in (256, 512, 1024, 2048, 4096, 16384, 65536)]

    def sample(self, rng: Generator, batch: int, case: Case) -> Examples:
        _check_size(case, least=2 * case.items, what="data tokens and blanks")
        first_blank = case.length - case.items
        noise, blank = self.num_data, self.num_data + 1
        data = rng.integers(self.num_data, size=(batch, case.items))
        tokens = np.full((batch, case.length), noise)
        np.put_along_axis(tokens, np.sort(_distinct(rng, batch, first_blank, case.items)), data, axis=1)
        tokens[:, first_blank:] = blank
        targets, mask = _nothing_asked(tokens)
        targets[:, first_blank:] = data
        mask[:, first_blank:] = True
        return Examples(tokens, targets, mask)


@dataclass(frozen=True, kw_only=True)
class Passkey(Task):
    """Passkey retrieval (Mohtashami and Jaggi, arXiv 2305.16300) with random tokens in place of English.

    An example of `Case(length, items)` is filler, a needle, more filler and a question. The needle is a key marker and
    `items` digits, independent and uniform from 0 to 9; its depth is uniform over all places where it fits. The
    question is the last `items` tokens: a question marker, at which the first digit is asked, and then all digits
    except the last, at each of which the next digit is asked. The model thus sees the right digits before the one that
    it answers, and accuracy counts digits, not whole keys.

    Filler tokens are independent and uniform over their own vocabulary, where the paper repeats a few sentences: random
    filler cannot be memorised. As in the paper, no digit occurs in the filler; the paper states the key twice in its
    needle, we once. Symbols 0 to 9 are the digits, 10 is the key marker, 11 is the question marker, and all others are
    filler.
    """

    family: ClassVar[str] = "recall"

    num_fillers: int = 256
    """Number of different filler tokens."""

    def __post_init__(self) -> None:
        if self.num_fillers < 1:
            raise ValueError(f"num_fillers is {self.num_fillers}: give at least 1 filler token")

    @property
    def num_symbols(self) -> int:
        return 12 + self.num_fillers

    @property
    def num_classes(self) -> int:
        return 10

    @property
    def chance(self) -> float:
        return 1 / 10

    def token_text(self, token: int) -> str:
        return {10: "key", 11: "?"}.get(token, str(token))

    @property
    def train_cases(self) -> Sequence[Case]:
        return [Case(length, 5) for length in (64, 128, 256, 512, 1024, 2048)]

    @property
    def test_cases(self) -> Sequence[Case]:
        return [Case(length, 5) for length in (2048, 4096, 8192, 16384, 32768, 65536)]

    def sample(self, rng: Generator, batch: int, case: Case) -> Examples:
        length, digits = case
        _check_size(case, least=2 * digits + 1, what="digits and the question")
        key_marker, question_marker, first_filler = 10, 11, 12
        key = rng.integers(10, size=(batch, digits))
        tokens = rng.integers(first_filler, self.num_symbols, size=(batch, length))
        needle = np.concatenate([np.full((batch, 1), key_marker), key], axis=1)
        depth = rng.integers(length - 2 * digits, size=(batch, 1))
        np.put_along_axis(tokens, depth + np.arange(digits + 1), needle, axis=1)
        tokens[:, -digits] = question_marker
        tokens[:, length - digits + 1 :] = key[:, :-1]
        targets, mask = _nothing_asked(tokens)
        targets[:, -digits:] = key
        mask[:, -digits:] = True
        return Examples(tokens, targets, mask)


def _check_size(case: Case, least: int, what: str) -> None:
    if case.items < 1:
        raise ValueError(f"case {case} has {case.items} {what}: ask for at least 1, as in {case.length}/1")
    if case.length < least:
        raise ValueError(
            f"case {case} is too short: {case.items} {what} take at least {least} tokens; lengthen it or ask for fewer"
        )


def _distinct(rng: Generator, batch: int, below: int, count: int) -> Integers:
    """`[batch, count]` different numbers from 0 to below `below`, in random order, by Floyd's algorithm."""
    last = np.arange(below - count, below)
    numbers = rng.integers(last + 1, size=(batch, count))
    for i in range(1, count):
        taken = (numbers[:, :i] == numbers[:, i : i + 1]).any(axis=1)
        numbers[taken, i] = last[i]
    return rng.permuted(numbers, axis=1)


def _nothing_asked(tokens: Integers) -> tuple[Integers, Booleans]:
    return np.zeros_like(tokens), np.zeros(tokens.shape, dtype=bool)
