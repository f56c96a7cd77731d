"""Word problems against permutations that are applied one after another, and what is held out."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from logdepth.tasks import Case, constant_accuracy
from logdepth.tasks.groups import GROUPS, SEEN_PAIRS_ONLY, GroupWords, held_out_pairs, multiplication_table

ORDERS = {"S3": 6, "S4": 24, "A5": 60, "S5": 120, "Z60": 60}


def where_points_go(elements: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Follow each point through all elements, the first one first."""
    found = []
    for start in range(len(elements[0])):
        point = start
        for element in elements:
            point = element[point]
        found.append(point)
    return tuple(found)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("held_out", [0.0, 0.2])
def test_every_prefix_is_the_product_of_its_elements(group: str, held_out: float) -> None:
    words = GroupWords(title="", group=group, held_out=held_out)
    cases = [Case(length) for length in (1, 2, 3, 4, 5, 7, 16, 33)]
    for case in [*cases, *(Case(case.length, SEEN_PAIRS_ONLY) for case in cases if held_out)]:
        examples = words.sample(np.random.default_rng(0), 6, case)
        assert examples.tokens.shape == (6, case.length)
        assert examples.mask.all()
        for tokens, targets in zip(examples.tokens.tolist(), examples.targets.tolist(), strict=True):
            elements = [GROUPS[group][token] for token in tokens]
            for end in range(1, case.length + 1):
                assert GROUPS[group][targets[end - 1]] == where_points_go(elements[:end])


@pytest.mark.parametrize("group", GROUPS)
def test_groups_are_groups(group: str) -> None:
    elements, table = GROUPS[group], multiplication_table(group)
    assert len(set(elements)) == len(elements) == ORDERS[group]
    assert elements[0] == tuple(range(len(elements[0])))
    everyone = list(range(len(elements)))
    assert all(sorted(line) == everyone for line in [*table.tolist(), *table.T.tolist()])
    assert (table == table.T).all() == (group == "Z60")
    if group == "A5":
        signs = [round(np.linalg.det(np.eye(5)[list(element)])) for element in elements]
        assert signs == [1] * 60
    if group == "Z60":
        assert table.tolist() == [[(a + b) % 60 for b in range(60)] for a in range(60)]


def test_elements_are_uniform() -> None:
    words = GroupWords(title="", group="S3")
    examples = words.sample(np.random.default_rng(0), 500, Case(20))
    for numbers in (examples.tokens, examples.targets):
        counts = np.bincount(numbers.ravel(), minlength=6)
        assert counts.min() > 1500
        assert counts.max() < 1850
    assert constant_accuracy(examples) == pytest.approx(words.chance, abs=0.02)


@pytest.mark.parametrize(("group", "held_out", "count"), [("S5", 0.1, 12), ("Z60", 0.1, 6), ("S3", 0.5, 3)])
def test_held_out_pairs_never_occur_in_training(group: str, held_out: float, count: int) -> None:
    words = GroupWords(title="", group=group, held_out=held_out)
    pairs = held_out_pairs(group, count)
    assert words.num_held_out == count
    assert (pairs.sum(axis=0) == count).all()
    assert (pairs.sum(axis=1) == count).all()
    order = len(pairs)
    trained = words.sample(np.random.default_rng(0), 8 * order, Case(65, SEEN_PAIRS_ONLY)).tokens
    seen = Counter(pair for row in trained.tolist() for pair in pairwise(row))
    assert not any(pairs[pair] for pair in seen)
    assert len(seen) > 0.99 * (order**2 - pairs.sum())  # and all others do
    elements = np.bincount(trained[:, -1], minlength=order)
    assert elements.max() < 30
    tested = words.sample(np.random.default_rng(0), 200, Case(64)).tokens
    unseen = pairs[tested[:, :-1], tested[:, 1:]].mean()
    assert unseen == pytest.approx(count / order, rel=0.15)
    assert all(case.items == SEEN_PAIRS_ONLY for case in words.train_cases)
    assert all(case.items == 0 for case in words.test_cases)


@pytest.mark.parametrize(
    ("group", "held_out", "case", "says"),
    [
        ("S6", 0.0, Case(4), "group is 'S6': choose one of S3, S4, A5, S5, Z60"),
        ("S3", 0.01, Case(4), "held_out is 0.01: give 0, or a share that holds out at least one"),
        ("S3", 1.0, Case(4), "held_out is 1.0"),
        ("S3", 0.0, Case(0), "length is 0: a word has at least 1 element"),
        ("S3", 0.0, Case(4, 1), "items is 1: give 0, or 1 where pairs are held out"),
        ("S3", 0.5, Case(4, 2), "items is 2"),
    ],
)
def test_what_does_not_exist_is_refused(group: str, held_out: float, case: Case, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GroupWords(title="", group=group, held_out=held_out).sample(np.random.default_rng(0), 1, case)
