"""Sampling: each setting does what it says, and sorting only the likeliest tokens changes no choice."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logdepth.decoding.sampling import FIRST_CANDIDATES, SamplingConfig, choose, choose_rows, likeliest, penalised

SCORES = np.log([0.5, 0.1, 0.25, 0.15])


def frequencies(config: SamplingConfig, count: int = 4000) -> list[float]:
    generator = np.random.default_rng(0)
    found = Counter(choose(SCORES, config, generator) for _ in range(count))
    return [found[token] / count for token in range(4)]


def test_sampling_is_what_it_says() -> None:
    assert frequencies(SamplingConfig()) == pytest.approx([0.5, 0.1, 0.25, 0.15], abs=0.03)
    assert frequencies(SamplingConfig(top_k=2)) == pytest.approx([2 / 3, 0, 1 / 3, 0], abs=0.03)
    assert frequencies(SamplingConfig(top_k=99)) == pytest.approx([0.5, 0.1, 0.25, 0.15], abs=0.03)
    assert frequencies(SamplingConfig(top_p=0.7)) == pytest.approx([2 / 3, 0, 1 / 3, 0], abs=0.03)
    assert frequencies(SamplingConfig(top_p=0.8)) == pytest.approx([0.5 / 0.9, 0, 0.25 / 0.9, 0.15 / 0.9], abs=0.03)
    assert frequencies(SamplingConfig(top_p=0.01)) == [1, 0, 0, 0]
    assert frequencies(SamplingConfig(temperature=0.0)) == [1, 0, 0, 0]
    squared = np.array([0.25, 0.01, 0.0625, 0.0225])
    assert frequencies(SamplingConfig(temperature=0.5)) == pytest.approx((squared / squared.sum()).tolist(), abs=0.03)


def slow_probabilities(scores: list[float], before: list[int], config: SamplingConfig) -> list[float]:
    """The probability of each token, by the definitions of the settings, one after the other."""
    logits = [
        score if token not in before
        else score / config.repetition_penalty if score > 0
        else score * config.repetition_penalty
        for token, score in enumerate(scores)
    ]  # fmt: skip
    weights = {token: math.exp(logit / config.temperature) for token, logit in enumerate(logits)}
    best_first = sorted(weights, key=lambda token: -weights[token])
    kept = best_first[: config.top_k]
    if config.top_p is not None:
        total, nucleus = sum(weights[token] for token in kept), []
        for token in kept:
            nucleus.append(token)
            if sum(weights[one] for one in nucleus) / total >= config.top_p:
                break
        kept = nucleus
    if config.min_p is not None:
        kept = [token for token in kept if weights[token] >= config.min_p * weights[best_first[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(scores))]


def slow_choice(scores: np.ndarray, config: SamplingConfig, seed: int, before: list[int]) -> int:
    """The choice by the definition, from all tokens in order."""
    probabilities = slow_probabilities(scores.tolist(), before, config)
    order = np.argsort(-penalised(scores, before, config.repetition_penalty), kind="stable")
    cumulative = np.cumsum(np.array(probabilities)[order])
    place = np.searchsorted(cumulative / cumulative[-1], np.random.default_rng(seed).random(), side="right")
    return int(order[place])


configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.one_of(st.none(), st.integers(1, 10), st.integers(60, 300)),
    top_p=st.one_of(st.none(), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.none(), st.floats(0.01, 0.99)),
    repetition_penalty=st.sampled_from([1.0, 0.713, 1.317, 5.03]),
)


@settings(max_examples=300)
@given(
    # Irrational steps between logits keep clear of ties, where rounding would decide what a filter keeps.
    steps=st.lists(st.integers(-40, 40), min_size=1, max_size=9, unique=True),
    before=st.lists(st.integers(0, 8), max_size=6),
    config=configs,
    seed=st.integers(0, 2**32),
)
def test_choices_are_those_of_the_definition(
    steps: list[int], before: list[int], config: SamplingConfig, seed: int
) -> None:
    scores = np.array(steps) * math.sqrt(0.02)
    before = [token for token in before if token < len(scores)]
    assert choose(scores, config, np.random.default_rng(seed), before) == slow_choice(scores, config, seed, before)


@settings(max_examples=100)
@given(
    size=st.sampled_from([FIRST_CANDIDATES, FIRST_CANDIDATES + 1, 700, 1500]),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    config=configs,
    seed=st.integers(0, 2**32),
)
def test_choices_among_many_tokens_are_those_of_the_definition(
    size: int, spread: float, config: SamplingConfig, seed: int
) -> None:
    """Also where the choice is far down, and where nearly all tokens are equally likely."""
    scores = spread * np.random.default_rng(seed + 1).standard_normal(size)
    assert choose(scores, config, np.random.default_rng(seed), [3, 5]) == slow_choice(scores, config, seed, [3, 5])


@settings(max_examples=100)
@given(
    size=st.sampled_from([1, 5, FIRST_CANDIDATES + 1, 700]),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    rows=st.lists(st.tuples(configs, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=4),
    greedy=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_choices_on_a_device_are_the_same(
    size: int, spread: float, rows: list[tuple[SamplingConfig, float]], greedy: bool, seed: int
) -> None:
    class Drawn:
        def __init__(self, number: float) -> None:
            self.number = number

        def random(self) -> float:
            return self.number

    scores = spread * np.random.default_rng(seed).standard_normal((len(rows), size))
    settings = [replace(config, repetition_penalty=1.0) for config, _ in rows]
    if greedy:
        settings[0] = replace(settings[0], temperature=0.0)
    expected = [
        choose(one, config, Drawn(drawn)) for one, config, (_, drawn) in zip(scores, settings, rows, strict=True)
    ]
    assert choose_rows(torch.from_numpy(scores), settings, [drawn for _, drawn in rows]) == expected


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    count=st.integers(1, 50),
)
def test_the_likeliest_come_as_in_a_stable_sort_also_with_ties(scores: list[int], count: int) -> None:
    array = np.array(scores, dtype=np.float64)
    found, whole = likeliest(array, count), np.argsort(-array, kind="stable")
    assert len(found) >= min(count, len(scores))
    assert found.tolist() == whole[: len(found)].tolist()


def test_the_repetition_penalty_is_that_of_ctrl() -> None:
    scores = np.array([2.0, -1.0, 0.0, 3.0])
    assert penalised(scores, [0, 1, 2], 2.0).tolist() == [1.0, -2.0, 0.0, 3.0]
    assert scores.tolist() == [2.0, -1.0, 0.0, 3.0]
    generator = np.random.default_rng(0)
    greedy = SamplingConfig(temperature=0.0, repetition_penalty=2.0)
    assert choose(scores, greedy, generator, []) == 3
    assert choose(scores, greedy, generator, [3, 3]) == 0  # 2 > 3 / 2: once, however often it was there
    assert choose(scores, SamplingConfig(min_p=1.0), generator, [3]) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 0.0},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("inf")},
        {"stop": ("",)},
        {"seed": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        SamplingConfig(**wrong)
