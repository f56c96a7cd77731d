"""Each regular language against its definition in plain Python: every prefix, the balance, the distribution."""

import re
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest

from logdepth.tasks import LDRU_LANGUAGES, TASKS, Case, balancing_weights, constant_accuracy, last_only, tasks_of
from logdepth.tasks.automaton import Automaton, StringSampler
from logdepth.tasks.regular import BoundedBrackets, ModularArithmetic, PrefixSymbols, Tomita

LENGTHS = (*range(1, 14), 17, 31, 40, 41, 64, 101, 500)
MEMBERSHIP = [name for name in LDRU_LANGUAGES if name.startswith(("d", "tomita"))]


def arithmetic(tokens: list[int], multiply_first: bool) -> int:
    """The value of the longest beginning that is an expression."""
    text = "".join("01234+-*"[token] for token in tokens)
    if len(text) % 2 == 0:
        text = text[:-1]
    if multiply_first:
        return int(eval(text)) % 5
    value = int(text[0])
    for operation in re.findall(r"[-+*]\d", text):
        value = eval(f"{value}{operation}") % 5
    return value


def in_brackets(tokens: list[int], depth: int) -> bool:
    """D_1 = (01)*, D_n = (0 D_{n−1} 1)*, as a regular expression."""
    pattern = "(01)*"
    for _ in range(depth - 1):
        pattern = f"(0{pattern}1)*"
    return re.fullmatch(pattern, "".join(map(str, tokens))) is not None


def in_tomita(tokens: list[int], number: int) -> bool:
    text = "".join(map(str, tokens))
    if number == 3:
        runs = [run.group() for run in re.finditer("0+|1+", text)]
        pairs = pairwise(runs)
        return not any(left[0] == "1" and len(left) % 2 and len(right) % 2 for left, right in pairs)
    if number == 4:
        return "000" not in text
    if number == 5:
        return text.count("0") % 2 == 0 and text.count("1") % 2 == 0
    if number == 6:
        return (text.count("0") - text.count("1")) % 3 == 0
    return re.fullmatch("0*1*0*1*", text) is not None


def answer(name: str, tokens: list[int]) -> int:
    """The answer to a string, from the definition."""
    if name == "parity":
        return sum(tokens) % 2
    if name == "even-pairs":
        return sum(left != right for left, right in pairwise(tokens)) % 2
    if name == "cycle-navigation":
        return sum((-1, 0, 1)[token] for token in tokens) % 5
    if name.startswith("modular-arithmetic"):
        return arithmetic(tokens, multiply_first=name.endswith("precedence"))
    if name.startswith("p-"):
        prefix, alphabet = map(int, name.split("-")[1:])
        if len(tokens) < prefix:
            return int(alphabet**prefix)
        return int("".join(map(str, tokens[:prefix])), alphabet)
    if name.startswith("d"):
        return int(in_brackets(tokens, int(name[1:])))
    return int(in_tomita(tokens, int(name[-1])))


@pytest.mark.parametrize("name", tasks_of("regular-languages"))
def test_every_prefix_has_the_answer_of_the_definition(name: str) -> None:
    chosen = TASKS[name]
    rng = np.random.default_rng(1)
    for length in LENGTHS:
        examples = chosen.sample(rng, 12 if length < 50 else 4 if length < 500 else 2, Case(length))
        assert examples.tokens.shape == examples.targets.shape == examples.mask.shape
        assert examples.mask.all()
        assert examples.tokens.min() >= 0
        assert examples.tokens.max() < chosen.num_symbols
        assert examples.targets.max() < chosen.num_classes
        for tokens, targets in zip(examples.tokens.tolist(), examples.targets.tolist(), strict=True):
            ends = range(1, length + 1) if length < 20 else {1, 2, length // 2, length - 1, length}
            for end in ends:
                assert targets[end - 1] == answer(name, tokens[:end]), (tokens, end)


@pytest.mark.parametrize("name", MEMBERSHIP)
def test_every_string_of_bits_is_judged_by_the_definition(name: str) -> None:
    """All strings of up to ten bits, also those that are never drawn."""
    automaton = TASKS[name].automaton  # type: ignore[attr-defined]
    for length in (1, 2, 5, 10):
        strings = np.array(list(product((0, 1), repeat=length)))
        assert automaton.answer(strings)[:, -1].tolist() == [answer(name, tokens) for tokens in strings.tolist()]


def test_there_are_21_languages() -> None:
    assert len(LDRU_LANGUAGES) == 21
    depths = [one.depth for one in TASKS.values() if isinstance(one, BoundedBrackets)]
    numbers = [one.number for one in TASKS.values() if isinstance(one, Tomita)]
    prefixes = [(one.prefix, one.alphabet) for one in TASKS.values() if isinstance(one, PrefixSymbols)]
    assert (depths, numbers) == ([2, 3, 4, 6, 8, 12], [3, 4, 5, 6, 7])
    assert prefixes == list(product((1, 2, 4), (2, 4)))
    assert [TASKS[f"p-{p}-{q}"].num_classes for p, q in prefixes] == [3, 5, 5, 17, 17, 257]


@pytest.mark.parametrize("name", MEMBERSHIP)
def test_accepted_and_rejected_strings_are_equally_frequent(name: str) -> None:
    chosen = TASKS[name]
    only_rejected = name.startswith("d") or name == "tomita-5"
    for length in (1, 2, 4, 5, 8, 20, 40, 41, 120):
        targets = chosen.sample(np.random.default_rng(length), 2000, Case(length)).targets[:, -1]
        possible = {answer(name, list(tokens)) for tokens in product((0, 1), repeat=length)} if length < 6 else {0, 1}
        if only_rejected and length % 2:
            possible = {0}
        assert set(targets.tolist()) == possible, length
        if len(possible) == 2:
            assert 0.45 < targets.mean() < 0.55, length


@pytest.mark.parametrize("name", [*LDRU_LANGUAGES, "modular-arithmetic-precedence"])
def test_chance_is_the_best_constant_answer(name: str) -> None:
    chosen = TASKS[name]
    examples = chosen.sample(np.random.default_rng(3), 1200, Case(999 if "arithmetic" in name else 1000))
    tolerance = 0.04 * max(chosen.chance, 0.5) + 1 / chosen.num_classes**0.5 * 0.03
    assert constant_accuracy(examples) == pytest.approx(chosen.chance, abs=tolerance)
    assert constant_accuracy(last_only(examples)) == pytest.approx(chosen.chance_at_end, abs=0.05)
    if chosen.num_classes == 2:
        weights = balancing_weights(examples)
        assert (weights * (examples.targets == 0)).sum() == pytest.approx(1 / 2)


def depths(tokens: list[int]) -> list[int]:
    return np.cumsum(1 - 2 * np.array(tokens)).tolist()


def kind(tokens: list[int], depth: int) -> str:
    """Which kind of brackets a string is, as the docstring names them."""
    path = depths(tokens)
    outside = [at for at in path if not 0 <= at <= depth]
    if not outside:
        return "unclosed" if path[-1] else "deep" if depth in path else "shallow"
    if len(outside) == 1 and path[-1] == 0:
        return {-1: "too early", depth + 1: "too deep"}[outside[0]]
    return "other"


@pytest.mark.parametrize("depth", [2, 4, 12])
def test_brackets_are_of_all_kinds(depth: int) -> None:
    """Of twenty strings, ten are accepted, at least five of them deep; two are of each kind of rejected ones."""
    chosen = BoundedBrackets(title="D", depth=depth)
    tokens = chosen.sample(np.random.default_rng(0), 2000, Case(60)).tokens.tolist()
    counts = Counter(kind(row, depth) for row in tokens)
    assert 900 < counts["deep"] + counts["shallow"] < 1100
    assert counts["deep"] > 450
    assert min(counts[one] for one in ("unclosed", "too early", "too deep")) > 150
    assert 250 < counts["other"] < 500
    # Of those with two symbols too many, which are none of these, half of the rest are one change away.
    others = [row for row in tokens if kind(row, depth) == "other" and abs(depths(row)[-1]) == 2]
    changed = [any(in_brackets([*row[:i], 1 - row[i], *row[i + 1 :]], depth) for i in range(60)) for row in others]
    assert sum(changed) > 60


def test_short_brackets_are_of_the_kinds_that_exist() -> None:
    """Depth 12 takes 24 symbols, and an excursion from it 26."""
    chosen = BoundedBrackets(title="D", depth=12)
    for length, expected in ((22, False), (24, True), (26, True)):
        rows = chosen.sample(np.random.default_rng(0), 600, Case(length)).tokens.tolist()
        kinds = {kind(row, 12) for row in rows}
        assert ("deep" in kinds, "too deep" in kinds) == (expected, length == 26), length


def test_brackets_of_odd_lengths_are_unclosed_or_random() -> None:
    rows = BoundedBrackets(title="D", depth=3).sample(np.random.default_rng(0), 1000, Case(41)).tokens.tolist()
    counts = Counter(kind(row, 3) for row in rows)
    assert set(counts) == {"unclosed", "other"}
    assert min(counts.values()) > 400


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7])
def test_rejected_strings_of_tomita_are_near_misses_and_random(number: int) -> None:
    tokens = Tomita(title="T", number=number).sample(np.random.default_rng(0), 240, Case(40)).tokens.tolist()
    rejected = [row for row in tokens if not in_tomita(row, number)]
    near = [any(in_tomita([*row[:i], 1 - row[i], *row[i + 1 :]], number) for i in range(40)) for row in rejected]
    assert sum(near) > 0.4 * len(near)
    if number in (3, 4, 7):  # in 5 and 6, many random strings are one symbol away
        assert sum(near) < 0.75 * len(near)


def test_near_misses_are_uniform_over_changes() -> None:
    """Of 0101, a change of any symbol leaves D_1; of 11, none leaves Tomita 4."""
    brackets = BoundedBrackets(title="D", depth=1)
    strings, found = brackets.automaton.change_one(np.random.default_rng(0), np.tile([0, 1, 0, 1], (400, 1)), answer=0)
    assert found.all()
    counts = Counter(map(tuple, strings.tolist()))
    assert set(counts) == {(1, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 1), (0, 1, 0, 0)}
    assert min(counts.values()) > 60
    strings, found = Tomita(title="T", number=4).automaton.change_one(
        np.random.default_rng(0), np.array([[1, 1], [1, 0]]), answer=0
    )
    assert not found.any()
    assert strings.tolist() == [[1, 1], [1, 0]]


def test_drawn_strings_are_uniform() -> None:
    """All strings of D_3 with 8 symbols that are accepted, and all that are rejected."""
    automaton = BoundedBrackets(title="D", depth=3).automaton
    accepted = automaton.answers == 1
    sampler = StringSampler(automaton, [accepted, ~accepted])
    for kind in (0, 1):
        strings = [row for row in product((0, 1), repeat=8) if in_brackets(list(row), 3) == (kind == 0)]
        drawn = sampler.draw(np.random.default_rng(kind), np.full(200 * len(strings), kind), 8)
        counts = Counter(map(tuple, drawn.tolist()))
        assert set(counts) == set(strings)
        chi = sum((count - 200) ** 2 / 200 for count in counts.values())
        assert chi < len(strings) + 6 * (2 * len(strings)) ** 0.5


def test_alphabets_of_more_than_two_symbols_are_drawn_uniformly_too() -> None:
    """Strings over three symbols whose sum is 2 modulo 4."""
    automaton = Automaton(table=(np.arange(4)[:, None] + np.arange(3)) % 4, answers=np.array([0, 0, 1, 0]))
    sampler = StringSampler(automaton, [automaton.answers == 1])
    strings = [row for row in product(range(3), repeat=4) if sum(row) % 4 == 2]
    counts = Counter(map(tuple, sampler.draw(np.random.default_rng(0), np.zeros(100 * len(strings), int), 4).tolist()))
    assert set(counts) == set(strings)
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 2 * len(strings)
    changed, found = automaton.change_one(np.random.default_rng(0), np.array([[0, 0], [2, 2]] * 50), answer=1)
    assert found.all()
    counts = Counter(map(tuple, changed.tolist()))
    assert set(counts) == {(2, 0), (0, 2)}
    assert min(counts.values()) > 30


def test_impossible_lengths_are_known() -> None:
    brackets = BoundedBrackets(title="D", depth=2)
    sampler = StringSampler(brackets.automaton, [brackets.automaton.answers == 1])
    assert [bool(sampler.possible(length)[0]) for length in (1, 2, 3, 4, 5, 100, 101)] == [False, True] * 2 + [
        False,
        True,
        False,
    ]


def test_long_strings_stay_balanced() -> None:
    """Counts of strings of 3,000 bits exceed any float; their shares do not."""
    targets = TASKS["d12"].sample(np.random.default_rng(0), 200, Case(3000)).targets[:, -1]
    assert 70 < targets.sum() < 130


def test_tests_have_trees_of_all_shapes_and_strings_of_both_classes() -> None:
    """Beyond training, lengths have all remainders of powers of two, and every length has both answers."""
    for name in LDRU_LANGUAGES:
        lengths = [case.length for case in TASKS[name].test_cases]
        further = [length for length in lengths if length > 40]
        assert len(set(lengths)) == len(lengths)
        assert lengths == sorted(lengths)
        assert further[-1] in (499, 500)
        assert min(further) <= 42
        odd = {length % 2 for length in further}
        assert odd == ({0} if name.startswith("d") or name == "tomita-5" else {1} if "arithmetic" in name else {0, 1})
        assert {length % 16 for length in further} == {place for place in range(16) if place % 2 in odd}
        if name in MEMBERSHIP:
            for length in (lengths[0], further[0], further[1], further[-1]):
                targets = TASKS[name].sample(np.random.default_rng(0), 200, Case(length)).targets[:, -1]
                assert 60 < targets.sum() < 140


def test_arithmetic_has_lengths_of_expressions() -> None:
    chosen = TASKS["modular-arithmetic"]
    assert [case.length for case in chosen.train_cases] == list(range(1, 40, 2))
    assert all(case.length % 2 for case in chosen.test_cases)
    assert 41 in [case.length for case in chosen.test_cases]
    ordered, first = (ModularArithmetic(title="", multiply_first=one).automaton for one in (False, True))
    expression = np.array([[2, 5, 3, 7, 4, 6, 1]])  # 2 + 3 × 4 − 1
    assert ordered.answer(expression).tolist() == [[2, 2, 0, 0, 0, 0, 4]]
    assert first.answer(expression).tolist() == [[2, 2, 0, 0, 4, 4, 3]]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BoundedBrackets(title="D", depth=0), "depth is 0: give at least 1"),
        (lambda: Tomita(title="T", number=2), "number is 2: choose one of 3, 4, 5, 6, 7"),
        (lambda: PrefixSymbols(title="P", prefix=0, alphabet=2), "prefix is 0 and alphabet is 2"),
        (lambda: PrefixSymbols(title="P", prefix=1, alphabet=1), "prefix is 1 and alphabet is 1"),
        (lambda: TASKS["d2"].sample(np.random.default_rng(0), 1, Case(0)), "length is 0"),
        (lambda: TASKS["parity"].sample(np.random.default_rng(0), 1, Case(4, 1)), "items is 1"),
    ],
)
def test_what_does_not_exist_is_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
