"""Plans are built once, found again, and forgotten when they take too much room."""

import numpy as np
import torch

from logdepth import scan
from logdepth.scanning.arguments import Layout
from logdepth.scanning.lengths import Lengths
from logdepth.scanning.plan_cache import PLAN_OVERHEAD_BYTES, PLANS, PlanCache
from tests.toy import Counting

CPU = torch.device("cpu")


def plan_of_length(cache: PlanCache, length: int) -> object:
    none = Lengths(1, 0, None)
    return cache.plan(none, none, Layout(Lengths(1, length, None), length, length), CPU)


def test_a_training_loop_builds_each_plan_once() -> None:
    PLANS.clear()
    built = PLANS.num_built
    for _ in range(5):
        scan(Counting(), torch.zeros(3, 50, 1))
        scan(Counting(), torch.zeros(3, 50, 1), lengths=[50, 20, 3])
    assert PLANS.num_built == built + 2


def test_equal_lengths_are_one_plan_however_they_are_given() -> None:
    PLANS.clear()
    built = PLANS.num_built
    for lengths in (None, [50, 50, 50], torch.tensor([50, 50, 50]), np.array([50, 50, 50])):
        scan(Counting(), torch.zeros(3, 50, 1), lengths=lengths)
    assert PLANS.num_built == built + 1


def test_a_stream_needs_few_plans() -> None:
    """A step depends on where its carry ends and on whether anything lies above, not on the length."""
    PLANS.clear()
    built, state = PLANS.num_built, None
    for _ in range(1000):
        state = scan(Counting(), torch.zeros(2, 1, 1), state).state
    assert PLANS.num_built - built <= 2 * (1000).bit_length()


def test_what_was_used_least_recently_goes_first() -> None:
    cache = PlanCache(3 * PLAN_OVERHEAD_BYTES)
    first = plan_of_length(cache, 1)
    plan_of_length(cache, 2)
    plan_of_length(cache, 3)
    assert plan_of_length(cache, 1) is first
    plan_of_length(cache, 4)
    assert cache.num_built == 4
    assert cache.num_bytes == 3 * PLAN_OVERHEAD_BYTES
    assert plan_of_length(cache, 1) is first
    plan_of_length(cache, 2)
    assert cache.num_built == 5


def test_one_large_plan_is_kept_and_pushes_the_others_out() -> None:
    cache = PlanCache(2 * PLAN_OVERHEAD_BYTES)
    plan_of_length(cache, 1)
    large = plan_of_length(cache, 100_000)
    assert large.nbytes > cache.max_bytes
    assert cache.num_bytes == large.nbytes + PLAN_OVERHEAD_BYTES
    assert plan_of_length(cache, 100_000) is large
    cache.clear()
    assert cache.num_bytes == 0
