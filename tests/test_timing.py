"""Timing: what is reported, not how fast anything is."""

import pytest
import torch

from logdepth.timing import time_model
from tests.small_models import SMALL_MODELS, VOCAB


@pytest.mark.parametrize("name", ["ar-grc", "transformer-alibi", "transformer-sinusoidal"])
@pytest.mark.parametrize("what", ["forward", "train"])
def test_every_length_is_timed(name: str, what: str) -> None:
    model = SMALL_MODELS[name].build(VOCAB)
    timings = list(time_model(model, [8, 32], batch_tokens=64, what=what, repeats=3, warmups=1))
    assert [(one.context, one.batch_size) for one in timings] == [(8, 8), (32, 2)]
    for one in timings:
        assert 0 < one.fastest <= one.milliseconds
        assert one.lower_quartile <= one.milliseconds <= one.upper_quartile
        assert one.tokens_per_second == pytest.approx(64 / (one.milliseconds / 1e3))
        assert one.repeats == 3
        attention = {"ar-grc": None, "transformer-alibi": "ALiBi as additive mask", "transformer-sinusoidal": "causal"}[
            name
        ]
        assert one.attention is None if attention is None else attention in one.attention
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_size_holds_at_every_length() -> None:
    timings = list(time_model(SMALL_MODELS["ar-grc"].build(VOCAB), [3, 5], batch_size=2, repeats=1))
    assert [one.batch_size for one in timings] == [2, 2]
    assert torch.is_grad_enabled()
