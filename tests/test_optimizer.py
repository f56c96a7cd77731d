"""The learning rate at every step, and which weights which optimizer updates how."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from logdepth.runs import TrainConfig
from logdepth.training.optimizer import FLOOR, ModelOptimizer, hidden_matrices, learning_rate
from tests.small_models import SMALL_MODELS


def test_the_learning_rate_rises_and_falls_to_a_thousandth() -> None:
    config = TrainConfig(learning_rate=2.0, warmup_steps=10)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == pytest.approx(2.0)
    assert rates[99] == pytest.approx(0.002)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[54] == pytest.approx(1.0, abs=0.05)
    assert learning_rate(TrainConfig(), 0, 1) == pytest.approx(1e-3)


def test_weight_decay_is_on_matrices_alone() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    decayed, plain = ModelOptimizer(model, TrainConfig(weight_decay=0.5)).adamw.param_groups
    assert {tuple(one.shape) for one in decayed["params"]} == {(3, 4), (4, 4)}
    assert {tuple(one.shape) for one in plain["params"]} == {(4,)}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)


def rates(total_steps: int, **settings: Any) -> list[float]:
    config = TrainConfig(learning_rate=2.0, **settings)
    return [learning_rate(config, step, total_steps) for step in range(total_steps)]


def test_the_cosine_at_its_corners() -> None:
    found = rates(101, warmup_steps=0)
    assert (found[0], found[50], found[100]) == (2.0, pytest.approx(1.001, rel=1e-12), 2.0 * FLOOR)


def test_wsd_at_its_corners() -> None:
    found = rates(100, schedule="wsd", warmup_steps=10)
    assert found[0] == 0.2
    assert found[9:80] == [2.0] * 71
    assert found[80] == 2.0 * (FLOOR + (1 - FLOOR) * (1 - 1 / 20))  # the first of twenty steps that decay
    assert found[89] == 2.0 * (FLOOR + (1 - FLOOR) * 0.5)
    assert found[99] == 2.0 * FLOOR
    falls = np.diff(found[79:])
    assert falls == pytest.approx(np.full(20, -2.0 * (1 - FLOOR) / 20), rel=1e-9)


@pytest.mark.parametrize(
    ("total_steps", "settings", "expected"),
    [
        (1, {}, [2.0]),
        (2, {"decay_fraction": 0.5}, [2.0, 2.0 * FLOOR]),
        (3, {"decay_fraction": 1.0}, [2.0, 2.0 * (FLOOR + (1 - FLOOR) * 0.5), 2.0 * FLOOR]),
        (4, {"decay_fraction": 1.0, "warmup_steps": 2}, [1.0, 2.0, 2.0, 2.0 * FLOOR]),
        (2, {"warmup_steps": 4}, [0.5, 1.0]),
    ],
)
def test_wsd_in_very_short_runs(total_steps: int, settings: dict[str, Any], expected: list[float]) -> None:
    assert rates(total_steps, schedule="wsd", **settings) == expected


@given(
    total_steps=st.integers(1, 200),
    warmup_steps=st.integers(0, 220),
    decay_fraction=st.floats(0, 1, exclude_min=True),
    schedule=st.sampled_from(["cosine", "wsd"]),
)
def test_rates_rise_then_fall_from_the_peak_to_the_floor(
    total_steps: int, warmup_steps: int, decay_fraction: float, schedule: Any
) -> None:
    found = rates(total_steps, warmup_steps=warmup_steps, decay_fraction=decay_fraction, schedule=schedule)
    rising, falling = found[:warmup_steps], found[warmup_steps:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(2.0 * FLOOR <= rate <= 2.0 for rate in falling)
    if len(falling) > 1:
        assert falling[0] == 2.0
        assert falling[-1] == pytest.approx(2.0 * FLOOR) or round(decay_fraction * total_steps) == 0
    if schedule == "wsd":
        decaying = sum(rate < 2.0 for rate in falling)
        assert decaying == min(round(decay_fraction * total_steps), max(0, len(falling) - 1))


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_muon_updates_hidden_matrices_and_adamw_everything_else(name: str) -> None:
    model = SMALL_MODELS[name].build(13)
    optimizer = ModelOptimizer(model, TrainConfig(optimizer="muon", weight_decay=0.5))
    assert optimizer.muon is not None
    by_muon = [one for group in optimizer.muon.param_groups for one in group["params"]]
    by_adamw = [one for group in optimizer.adamw.param_groups for one in group["params"]]
    everything = list(model.parameters())
    assert sorted(map(id, [*by_muon, *by_adamw])) == sorted(map(id, everything)), "each weight once"
    assert len(set(map(id, everything))) == len(everything)
    ends = {id(module.weight) for module in (model.embedding, model.head) if module is not None}
    assert {id(one) for one in by_muon} == {id(one) for one in everything if one.ndim >= 2} - ends
    assert by_muon
    assert all(one.shape[0] != 13 for one in by_muon), "no side of a matrix is the vocabulary"
    (group,) = optimizer.muon.param_groups
    assert (group["weight_decay"], group["adjustment"]) == (0.5, "match_rms_adamw")


def test_frozen_weights_belong_to_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    assert [id(one) for one in hidden_matrices(model)] == [id(model[1].weight)]
    optimizer = ModelOptimizer(model, TrainConfig(optimizer="muon"))
    assert [id(one) for group in optimizer.adamw.param_groups for one in group["params"]] == [id(model[1].bias)]


def one_step(model: nn.Module, optimizer: ModelOptimizer, rate: float | torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step(rate)
    optimizer.zero_grad()
    assert all(one.grad is None for one in model.parameters())


def test_muons_updates_are_as_large_as_adamws() -> None:
    """At the first step, where an update of AdamW has a root mean square of 1: Muon's has 0.2 of its learning rate."""
    for muon_rate, expected in ((None, 0.2), (3e-3, 0.6)):
        model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.LayerNorm(96))
        before = [one.detach().clone() for one in model.parameters()]
        config = TrainConfig(optimizer="muon", learning_rate=1e-3, muon_learning_rate=muon_rate, weight_decay=0.0)
        one_step(model, ModelOptimizer(model, config), 1e-3, seed=0)
        changes = [one - old for one, old in zip(model.parameters(), before, strict=True)]
        matrix, vector, _ = (one.square().mean().sqrt().item() for one in changes)
        assert vector == pytest.approx(1e-3, rel=0.01)
        assert matrix == pytest.approx(1e-3 * expected, rel=0.2)


def test_the_learning_rate_of_each_step_reaches_both() -> None:
    models = [nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = TrainConfig(optimizer="muon", learning_rate=1e-2, muon_learning_rate=2e-2)
    for model, rate_of in zip(models, (float, torch.tensor), strict=True):
        optimizer = ModelOptimizer(model, config)
        for step, rate in enumerate((1e-2, 1e-3, 5e-3)):
            one_step(model, optimizer, rate_of(rate), seed=step)
            assert optimizer.muon is not None
            assert float(optimizer.muon.param_groups[0]["lr"]) == pytest.approx(2 * rate)
            assert float(optimizer.adamw.param_groups[0]["lr"]) == pytest.approx(rate)
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_is_saved_by_name_and_restored_to_the_same_bits(kind: Any) -> None:
    config = TrainConfig(optimizer=kind)
    models = [SMALL_MODELS["sinusoidal-untied"].build(13) for _ in range(2)]
    first, second = (ModelOptimizer(model, config) for model in models)
    for seed in range(3):
        one_step(models[0], first, 1e-2, seed)
    saved = {name: one.clone() for name, one in first.tensors().items()}
    moments = {"adamw": {"exp_avg", "exp_avg_sq", "step"}, "muon": {"momentum_buffer"}}
    matrices = set(map(id, hidden_matrices(models[0]))) if kind == "muon" else set()
    assert saved.keys() == {
        f"{name}/{moment}"
        for name, one in models[0].named_parameters()
        for moment in moments["muon" if id(one) in matrices else "adamw"]
    }
    models[1].load_state_dict(models[0].state_dict())
    second.restore(saved)
    for model, optimizer in zip(models, (first, second), strict=True):
        one_step(model, optimizer, 1e-2, seed=9)
    assert all(torch.equal(left, right) for left, right in zip(*(one.parameters() for one in models), strict=True))
    assert all(torch.equal(one, second.tensors()[name]) for name, one in first.tensors().items())
