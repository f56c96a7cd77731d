"""Recall tasks against a dictionary, a filter and a search."""

from collections import Counter

import numpy as np
import pytest

from logdepth.tasks import TASKS, Case
from logdepth.tasks.recall import MultiQueryRecall, Passkey, SelectiveCopying
from logdepth.tasks.task import Examples


def rows(examples: Examples) -> list[tuple[list[int], list[int], list[bool]]]:
    return list(zip(*(part.tolist() for part in examples), strict=True))


@pytest.mark.parametrize("case", [Case(4, 1), Case(5, 1), Case(8, 2), Case(64, 4), Case(64, 16), Case(131, 7)])
@pytest.mark.parametrize("vocab_size", [64, 8192])
def test_queries_are_answered_by_a_dictionary(case: Case, vocab_size: int) -> None:
    chosen, half = MultiQueryRecall(title="", vocab_size=vocab_size), vocab_size // 2
    for tokens, targets, mask in rows(chosen.sample(np.random.default_rng(0), 30, case)):
        pairs = tokens[: 2 * case.items]
        keys, values = pairs[0::2], pairs[1::2]
        assert len(set(keys)) == len(set(values)) == case.items
        assert all(0 < key < half <= value < vocab_size for key, value in zip(keys, values, strict=True))
        found = dict(zip(keys, values, strict=True))
        queries = [place for place, asked in enumerate(mask) if asked]
        assert sorted(tokens[place] for place in queries) == sorted(keys)
        assert all(place >= 2 * case.items and place % 2 == 0 for place in queries)
        assert all(targets[place] == found[tokens[place]] for place in queries)
        assert not any(target for target, asked in zip(targets, mask, strict=True) if not asked)


def test_queries_of_zoology_come_soon() -> None:
    """The first slots are the likeliest by a power law, and with an exponent of 0 all are equally likely."""
    case = Case(64, 1)
    for power_a, least, most in ((0.01, 0.20, 0.30), (1.0, 0.01, 0.06)):
        mask = MultiQueryRecall(title="", power_a=power_a).sample(np.random.default_rng(0), 3000, case).mask
        places = Counter(mask.argmax(axis=1).tolist())
        assert set(places) == set(range(2, 64, 2))
        assert least < places[2] / 3000 < most
    # 1 : 1/2^0.99 : 1/3^0.99 …
    mask = MultiQueryRecall(title="", power_a=0.01).sample(np.random.default_rng(0), 20_000, case).mask
    places = Counter(mask.argmax(axis=1).tolist())
    weights = np.arange(1, 32) ** -0.99
    for slot in (1, 2, 5, 20):
        assert places[2 * slot] / 20_000 == pytest.approx(weights[slot - 1] / weights.sum(), rel=0.15)


def test_keys_and_values_are_uniform() -> None:
    tokens = MultiQueryRecall(title="", vocab_size=16).sample(np.random.default_rng(0), 3000, Case(20, 5)).tokens
    for column in range(10):
        counts = Counter(tokens[:, column].tolist())
        assert set(counts) == (set(range(8, 16)) if column % 2 else set(range(1, 8)))
        assert min(counts.values()) > 0.75 * 3000 / len(counts)
    pairs = Counter(map(tuple, tokens[:, [0, 2]].tolist()))
    assert len(pairs) == 7 * 6


@pytest.mark.parametrize("case", [Case(2, 1), Case(3, 1), Case(7, 3), Case(64, 4), Case(101, 50)])
def test_data_tokens_are_what_is_not_noise(case: Case) -> None:
    chosen = SelectiveCopying(title="", num_data=5)
    places = Counter()
    for tokens, targets, mask in rows(chosen.sample(np.random.default_rng(0), 40, case)):
        body, blanks = tokens[: -case.items], tokens[-case.items :]
        assert blanks == [6] * case.items
        assert [token for token in body if token != 5] == targets[-case.items :]
        assert max(targets) < 5
        assert mask == [False] * len(body) + [True] * case.items
        places.update(place for place, token in enumerate(body) if token != 5)
    assert len(places) > 0.9 * min(case.length - case.items, 40 * case.items)


@pytest.mark.parametrize("case", [Case(3, 1), Case(4, 1), Case(11, 5), Case(12, 5), Case(200, 5)])
def test_the_passkey_is_what_follows_the_marker(case: Case) -> None:
    chosen, digits = Passkey(title="", num_fillers=9), case.items
    depths = set()
    for tokens, targets, mask in rows(chosen.sample(np.random.default_rng(0), 60, case)):
        assert len(tokens) == case.length
        assert tokens.count(10) == tokens.count(11) == 1
        depth = tokens.index(10)
        key = tokens[depth + 1 : depth + 1 + digits]
        assert max(key) < 10
        assert tokens[-digits:] == [11, *key[:-1]]
        assert targets[-digits:] == key
        assert mask == [False] * (case.length - digits) + [True] * digits
        filler = tokens[:depth] + tokens[depth + 1 + digits : -digits]
        assert all(12 <= token < 21 for token in filler)
        depths.add(depth)
    last = case.length - 2 * digits - 1
    assert min(depths) <= last // 4
    assert max(depths) >= last - last // 4 - 1
    assert last > 3 or depths == set(range(last + 1))


def test_answers_are_uniform() -> None:
    for name, least in (("passkey", 900), ("selective-copying", 0)):
        examples = TASKS[name].sample(np.random.default_rng(0), 2000, Case(64, 5))
        counts = np.bincount(examples.targets[examples.mask])
        assert len(counts) == TASKS[name].num_classes
        assert counts.min() > max(least, 0.85 * counts.mean())
        assert TASKS[name].chance == 1 / len(counts)


@pytest.mark.parametrize("name", ["selective-copying", "passkey"])
def test_the_longest_examples_are_made(name: str) -> None:
    chosen = TASKS[name]
    examples = chosen.sample(np.random.default_rng(0), 1, chosen.test_cases[-1])
    assert examples.tokens.shape == (1, 65536)


@pytest.mark.parametrize(
    ("name", "case", "says"),
    [
        ("mqar", Case(64), "case 64 has 0 pairs of keys and values: ask for at least 1, as in 64/1"),
        ("mqar", Case(15, 4), "case 15/4 is too short: 4 pairs of keys and values take at least 16 tokens"),
        ("mqar", Case(100_000, 4096), "case 100000/4096 has 4096 pairs: a vocabulary of 8192 has 4095 keys"),
        ("selective-copying", Case(9, 5), "case 9/5 is too short: 5 data tokens and blanks take at least 10 tokens"),
        ("selective-copying", Case(9), "case 9 has 0 data tokens"),
        ("passkey", Case(10, 5), "case 10/5 is too short: 5 digits and the question take at least 11 tokens"),
        ("passkey", Case(10, -1), "has -1 digits"),
    ],
)
def test_cases_that_do_not_exist_are_refused(name: str, case: Case, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TASKS[name].sample(np.random.default_rng(0), 1, case)


def test_wrong_settings_are_refused() -> None:
    for settings, says in (({"vocab_size": 7}, "vocab_size is 7"), ({"power_a": 0}, "power_a is 0")):
        with pytest.raises(ValueError, match=says):
            MultiQueryRecall(title="", **settings)
    with pytest.raises(ValueError, match="num_data is 1: give at least 2"):
        SelectiveCopying(title="", num_data=1)
    with pytest.raises(ValueError, match="num_fillers is 0: give at least 1"):
        Passkey(title="", num_fillers=0)
