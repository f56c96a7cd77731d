"""Context-free tasks against Python: a parser, reversed, sorted and a list as the stack; ListOps against a reader."""

import re
import statistics
from collections import Counter
from itertools import product

import numpy as np
import pytest

from logdepth.tasks import TASKS, Case, constant_accuracy
from logdepth.tasks.context_free import BucketSort, ReverseString
from logdepth.tasks.listops import MAX_DEPTH, ListOps

LENGTHS = (*range(1, 24), 40, 41, 77)


def value_of(text: str) -> int:
    """The value of an expression, without Python's own rules of precedence: (left ∘ right), −d, (d) or d."""
    position = 0

    def operand() -> int:
        nonlocal position
        sign = text[position]
        position += 1
        if sign == "−":
            return -operand()
        if sign.isdigit():
            return int(sign)
        assert sign == "("
        left = operand()
        operator = text[position]
        position += 1
        if operator == ")":
            return left
        right = operand()
        assert text[position] == ")"
        position += 1
        return {"+": left + right, "−": left - right, "×": left * right}[operator]

    value = operand()
    assert position == len(text)
    return value


def test_brackets_have_the_value_of_a_parser() -> None:
    chosen = TASKS["bracket-arithmetic"]
    for length in LENGTHS:
        examples = chosen.sample(np.random.default_rng(length), 20, Case(length))
        assert examples.mask.tolist() == [[False] * (length - 1) + [True]] * 20
        for tokens, targets in zip(examples.tokens.tolist(), examples.targets.tolist(), strict=True):
            text = "".join(map(chosen.token_text, tokens))
            assert targets[-1] == value_of(text) % 5 == eval(text.replace("−", "-").replace("×", "*")) % 5


def test_expressions_have_the_shapes_of_the_paper() -> None:
    chosen = TASKS["bracket-arithmetic"]
    shapes = {1: r"\d", 2: r"−\d", 3: r"\(\d\)", 4: r"\(−\d\)", 5: r"\(\d[+−×]\d\)", 6: r"\((−\d[+−×]\d|\d[+−×]−\d)\)"}
    for length, shape in shapes.items():
        tokens = chosen.sample(np.random.default_rng(0), 300, Case(length)).tokens
        texts = {"".join(map(chosen.token_text, row)) for row in tokens.tolist()}
        assert all(re.fullmatch(shape, text) for text in texts)
        assert set(re.findall(r"\d", "".join(texts))) == set("01234")
        assert length < 5 or {"+", "−", "×"} <= set("".join(texts))
    rows = chosen.sample(np.random.default_rng(0), 3000, Case(9)).tokens.tolist()
    splits = Counter(_left_length("".join(map(chosen.token_text, row))) for row in rows)
    assert set(splits) == {1, 2, 3, 4, 5}
    assert min(splits.values()) > 500


def _left_length(text: str) -> int:
    """How many symbols the left operand of the outermost operator has."""
    for split in range(1, len(text) - 2):
        left, operator, right = text[1 : split + 1], text[split + 1], text[split + 2 : -1]
        if operator in "+−×" and _is_expression(left) and _is_expression(right):
            return split
    raise AssertionError(text)


def _is_expression(text: str) -> bool:
    try:
        value_of(text)
    except (AssertionError, IndexError, KeyError):
        return False
    return True


@pytest.mark.parametrize("num_letters", [2, 5])
@pytest.mark.parametrize("length", LENGTHS)
def test_letters_are_reversed_and_sorted(length: int, num_letters: int) -> None:
    reverse = ReverseString(title="", num_letters=num_letters)
    bucket = BucketSort(title="", num_letters=num_letters)
    for chosen, expected in ((reverse, lambda letters: letters[::-1]), (bucket, sorted)):
        examples = chosen.sample(np.random.default_rng(length), 5, Case(length))
        assert examples.mask.tolist() == [[False] * length + [True] * length] * 5
        for tokens, targets in zip(examples.tokens.tolist(), examples.targets.tolist(), strict=True):
            letters, blanks = tokens[:length], tokens[length:]
            assert blanks == [num_letters] * length
            assert max(letters) < num_letters
            assert targets[length:] == list(expected(letters))


@pytest.mark.parametrize("length", LENGTHS)
def test_the_stack_is_a_list(length: int) -> None:
    examples = TASKS["stack"].sample(np.random.default_rng(length), 25, Case(length))
    for tokens, targets, mask in zip(*(part.tolist() for part in examples), strict=True):
        stack: list[int] = []
        actions = [token >= 2 for token in tokens[:length]]
        assert actions == sorted(actions)  # first what the stack holds, then actions
        assert not actions[0]
        assert length == 1 or actions[-1]
        for token in tokens[:length]:
            if token == 2:
                stack = stack[:-1]
            else:
                stack.append(token % 3)
        assert tokens[length:] == [5] * (length + 1)
        expected = [*stack[::-1], 2]
        assert mask == [False] * length + [True] * len(expected) + [False] * (length + 1 - len(expected))
        assert targets[length:][: len(expected)] == expected


def test_pops_from_an_empty_stack_occur() -> None:
    examples = TASKS["stack"].sample(np.random.default_rng(0), 500, Case(12))
    assert (examples.mask.sum(axis=1) == 1).any()
    sizes = (examples.tokens[:, :12] < 2).sum(axis=1)
    assert set(sizes.tolist()) == set(range(1, 12))


def read_lists(words: list[str]) -> tuple[int, int, int]:
    """The value of ListOps by its words, its depth and its greatest number of arguments."""
    operators = {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda numbers: int(statistics.median(numbers)),
        "[SM": lambda numbers: sum(numbers) % 10,
    }
    depth = most = 0
    open_lists: list[tuple[str, list[int]]] = [("", [])]
    for word in words:
        if word.startswith("["):
            open_lists.append((word, []))
            depth = max(depth, len(open_lists) - 1)
        elif word == "]":
            operator, numbers = open_lists.pop()
            assert len(numbers) >= 2
            most = max(most, len(numbers))
            open_lists[-1][1].append(operators[operator](numbers))
        else:
            open_lists[-1][1].append(int(word))
    ((_, (value,)),) = open_lists
    return value, depth, most


def test_listops_have_the_value_that_a_reader_finds() -> None:
    chosen = TASKS["listops"]
    for length in (1, *range(4, 24), 41, 64, 100, 101, 333):
        examples = chosen.sample(np.random.default_rng(length), 20, Case(length))
        assert examples.tokens.shape == (20, length)
        assert examples.mask.tolist() == [[False] * (length - 1) + [True]] * 20
        for tokens, targets in zip(examples.tokens.tolist(), examples.targets.tolist(), strict=True):
            value, depth, most = read_lists([chosen.token_text(token) for token in tokens])
            assert targets[-1] == value
            assert depth <= MAX_DEPTH
            assert most <= 5


def shape_of(tokens: list[int]) -> tuple[object, ...]:
    """Nested tuples of a list, without operators and digits."""
    open_lists: list[list[object]] = [[]]
    for token in tokens:
        if token < 10:
            open_lists[-1].append(0)
        elif token < 14:
            open_lists.append([])
        else:
            found = tuple(open_lists.pop())
            open_lists[-1].append(found)
    return tuple(open_lists[0])


def shapes(sizes: tuple[int, ...]) -> list[tuple[object, ...]]:
    """All shapes of several arguments of these sizes."""
    if not sizes:
        return [()]
    first, *rest = sizes
    heads: list[object] = [0] if first == 1 else []
    for count in range(2, 6):
        heads += [
            shape
            for parts in product(range(1, first), repeat=count)
            if sum(parts) == first - 2
            for shape in shapes(parts)
        ]
    return [(head, *tail) for head in heads for tail in shapes(tuple(rest))]


def probability(shape: object) -> float:
    """Of a shape in the original generator: a list with 0.25, of 2 to 5 arguments."""
    if shape == 0:
        return 0.75
    assert isinstance(shape, tuple)
    return float(np.prod([0.25 / 4, *map(probability, shape)]))


@pytest.mark.parametrize("length", [9, 11])
def test_shapes_of_lists_are_as_likely_as_in_the_original(length: int) -> None:
    count = 6000
    tokens = TASKS["listops"].sample(np.random.default_rng(0), count, Case(length)).tokens
    found = Counter(shape_of(row)[0] for row in tokens.tolist())
    everything = [shape for (shape,) in shapes((length,))]
    total = sum(map(probability, everything))
    chi = sum((seen - (mean := count * probability(shape) / total)) ** 2 / mean for shape, seen in found.items())
    assert set(found) == set(everything)
    assert chi < len(found) + 4 * (2 * len(found)) ** 0.5


def test_depth_is_limited() -> None:
    """Long lists reach the limit, and none exceeds it; the original generator has digits only there."""
    tokens = ListOps(title="").sample(np.random.default_rng(0), 60, Case(800)).tokens
    depths = [int(np.cumsum((row >= 10) * 1 - (row == 14) * 2).max()) for row in tokens]
    assert max(depths) == MAX_DEPTH
    assert min(depths) > 8


def test_operators_and_digits_are_uniform() -> None:
    tokens = ListOps(title="").sample(np.random.default_rng(0), 400, Case(60)).tokens
    counts = np.bincount(tokens.ravel(), minlength=15)
    for group in (counts[:10], counts[10:14]):
        assert group.max() < 1.1 * group.mean()
    assert counts[10:14].sum() == counts[14]


@pytest.mark.parametrize("name", ["bracket-arithmetic", "reverse", "stack", "bucket-sort", "listops"])
def test_chance_is_the_best_constant_answer(name: str) -> None:
    examples = TASKS[name].sample(np.random.default_rng(0), 1500, Case(200))
    assert constant_accuracy(examples) == pytest.approx(TASKS[name].chance, abs=0.05)


@pytest.mark.parametrize(
    ("name", "case", "says"),
    [
        ("reverse", Case(0), "length is 0: an example has at least 1 symbol"),
        ("stack", Case(-4), "length is -4"),
        ("bucket-sort", Case(4, 2), "items is 2: the length says it all here, give 0"),
        ("listops", Case(0), "length is 0: lists have 1 or 4 to 2000 symbols"),
        ("listops", Case(3), "length is 3"),
        ("listops", Case(2001), "length is 2001"),
        ("listops", Case(8, 1), "items is 1"),
    ],
)
def test_cases_that_do_not_exist_are_refused(name: str, case: Case, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TASKS[name].sample(np.random.default_rng(0), 1, case)


def test_alphabets_of_one_letter_are_refused() -> None:
    for kind in (ReverseString, BucketSort):
        with pytest.raises(ValueError, match="num_letters is 1: give at least 2"):
            kind(title="", num_letters=1)
