"""Every operator of `OPERATORS`, and what is special about each."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from logdepth import scan
from logdepth.operators import (
    GRC,
    MLPLDRU,
    OPERATORS,
    AffineOperator,
    MLPLDRUConfig,
    PostMerge,
    PostMergeConfig,
)
from logdepth.ops.linear import variance_scaling_
from logdepth.scanning import reference
from tests.toy import assert_same, gradients, random_elements

WIDTH = 8


def num_parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> nn.Module:
    return OPERATORS[request.param](width=WIDTH).build().double()


def test_it_keeps_shape_and_dtype(operator: nn.Module) -> None:
    left, right = random_elements(5, WIDTH), random_elements(5, WIDTH, seed=1)
    merged = operator(left, right)
    assert merged.shape == left.shape
    assert merged.dtype == left.dtype


def test_rows_do_not_mix(operator: nn.Module) -> None:
    left, right = random_elements(5, WIDTH), random_elements(5, WIDTH, seed=1)
    assert_same(operator(left, right)[2:3], operator(left[2:3], right[2:3]))


def test_operands_have_an_order(operator: nn.Module) -> None:
    left, right = random_elements(5, WIDTH), random_elements(5, WIDTH, seed=1)
    assert not torch.allclose(operator(left, right), operator(right, left))


def test_it_scans_as_defined(operator: nn.Module) -> None:
    elements = random_elements(2, 21, WIDTH).requires_grad_()
    inputs = [elements, *operator.parameters()]
    actual, expected = scan(operator, elements).prefixes, reference.scan(operator, elements)
    assert_same(actual, expected, 1e-10)
    for ours, theirs in zip(gradients([actual], inputs), gradients([expected], inputs), strict=True):
        assert_same(ours, theirs, 1e-8)


def test_configs_are_frozen_and_refuse_what_they_do_not_know() -> None:
    for config in OPERATORS.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            config(width=WIDTH).width = 3
        with pytest.raises(TypeError):
            config(width=WIDTH, depth=2)
        with pytest.raises(TypeError):
            config(WIDTH)


def test_grc_is_its_equation() -> None:
    cell = GRC(WIDTH).double()
    a, b = random_elements(4, WIDTH), random_elements(4, WIDTH, seed=1)
    hidden = nn.functional.silu(torch.cat([a, b], 1) @ cell.hidden.weight.T + cell.hidden.bias)
    y = hidden @ cell.gates.weight.T + cell.gates.bias
    sigma = lambda gate: 1 / (1 + torch.exp(-gate))  # noqa: E731
    z = sigma(y[:, :8]) * a + sigma(y[:, 8:16]) * b + sigma(y[:, 16:24]) * y[:, 24:]
    expected = (z - z.mean(1, keepdim=True)) / (z.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    assert_same(cell(a, b), expected)


def test_grc_size() -> None:
    """W1: 2D → 4D, W2: 4D → 4D, their biases, and the norm."""
    assert num_parameters(GRC(WIDTH)) == 8 * WIDTH**2 + 4 * WIDTH + 16 * WIDTH**2 + 4 * WIDTH + 2 * WIDTH


def test_grc_dropout_falls_on_pair_and_hidden_layer() -> None:
    cell = GRC(WIDTH, dropout=0.5)
    dropped = []
    cell.dropout.register_forward_hook(lambda _, inputs, output: dropped.append((inputs[0].shape[-1], output)))
    cell(torch.ones(9, WIDTH), torch.ones(9, WIDTH))
    assert [width for width, _ in dropped] == [2 * WIDTH, 4 * WIDTH]
    assert all((output == 0).any() for _, output in dropped)
    cell.eval()
    left = torch.randn(3, WIDTH)
    assert torch.equal(cell(left, left), cell(left, left))


@pytest.mark.parametrize("width", [0, -1])
@pytest.mark.parametrize("operator", [GRC, MLPLDRU])
def test_states_without_numbers_are_refused(operator: type[GRC | MLPLDRU], width: int) -> None:
    with pytest.raises(ValueError, match="widths must be at least 1"):
        operator(width)


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="activation 'swish' is unknown; choose from relu, silu, gelu"):
        GRC(WIDTH, activation="swish")


@pytest.mark.parametrize("original", [True, False])
def test_mlp_ldru_is_its_equation(original: bool) -> None:
    config = MLPLDRUConfig.original(WIDTH) if original else MLPLDRUConfig(width=WIDTH)
    unit = config.build().double()
    for weight in unit.parameters():
        weight.data += 0.1 * random_elements(*weight.shape)
    act = nn.functional.relu if original else nn.functional.silu

    def linear(layer: nn.Linear, x: Tensor) -> Tensor:
        return x @ layer.weight.T + layer.bias

    x, y = random_elements(4, WIDTH), random_elements(4, WIDTH, seed=1)
    w = linear(unit.weights, act(linear(unit.second, act(linear(unit.first, torch.cat([x, y], 1))))))
    if not original:
        w = (w - w.mean(1, keepdim=True)) / (w.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        w = w * unit.norm.weight + unit.norm.bias
    mixed = linear(unit.left_value, w[:, :8] * x) + linear(unit.right_value, w[:, 8:] * y)
    assert_same(unit(x, y), linear(unit.out, mixed))


def test_mlp_ldru_starts_with_identities() -> None:
    unit = MLPLDRU(WIDTH)
    for layer in (unit.left_value, unit.right_value, unit.out):
        assert torch.equal(layer.weight, torch.eye(WIDTH))
        assert (layer.bias == 0).all()


def test_mlp_ldru_size() -> None:
    mlp = (4 + 8 + 8) * WIDTH**2 + (2 + 4 + 2) * WIDTH
    values = 3 * (WIDTH**2 + WIDTH)
    assert num_parameters(MLPLDRUConfig.original(WIDTH).build()) == mlp + values
    assert num_parameters(MLPLDRUConfig(width=WIDTH).build()) == mlp + values + 4 * WIDTH


@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_variance_scaling_has_the_deviation_asked_for(scale: float) -> None:
    weight = variance_scaling_(torch.empty(300, 500), scale)
    expected = math.sqrt(scale / 400)
    assert weight.std().item() == pytest.approx(expected, rel=0.02)
    assert weight.abs().max() <= 2 * expected / 0.879
    assert weight.abs().max() > 1.9 * expected / 0.88


def test_the_variants_differ_in_their_initialisation() -> None:
    original, ours = MLPLDRUConfig.original(64).build(), MLPLDRUConfig(width=64).build()
    for name in ("first", "second", "weights"):
        ratio = getattr(original, name).weight.std() / getattr(ours, name).weight.std()
        assert ratio.item() == pytest.approx(math.sqrt(1 / 0.02), rel=0.1)


def test_post_merge_is_its_equation() -> None:
    post = PostMergeConfig.original(WIDTH).build(AffineOperator(WIDTH)).double()
    a, b = random_elements(4, WIDTH), random_elements(4, WIDTH, seed=1)
    x = post.operator(a, b)
    fc = torch.relu(x @ post.hidden.weight.T + post.hidden.bias) @ post.out.weight.T + post.out.bias
    z = x + fc
    expected = (z - z.mean(1, keepdim=True)) / (z.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    assert_same(post(a, b), expected)
    assert post.hidden.weight.shape == (4 * WIDTH, WIDTH)


def test_post_merge_after_every_merge_or_in_the_up_sweep_alone() -> None:
    post = PostMergeConfig(width=WIDTH).build(GRC(WIDTH)).double()
    elements = random_elements(1, 13, WIDTH)
    every, up_only = scan(post, elements).prefixes, scan((post, post.operator), elements).prefixes
    assert_same(every, reference.scan(post, elements))
    assert_same(up_only, reference.scan((post, post.operator), elements))
    assert_same(every[:, 7], up_only[:, 7])  # a prefix of 8 is one block, no fold
    assert not torch.allclose(every[:, 6], up_only[:, 6])


def test_post_merge_dropout_falls_on_what_is_added() -> None:
    post = PostMerge(AffineOperator(WIDTH), WIDTH, dropout=1.0)
    a, b = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    assert_same(post(a, b), nn.functional.layer_norm(post.operator(a, b), (WIDTH,)), 1e-6)


def test_affine_scan_is_the_linear_recurrence() -> None:
    elements = random_elements(2, 97, WIDTH).sigmoid()
    scale, shift = elements.chunk(2, dim=-1)
    prefixes = scan(AffineOperator(WIDTH), elements).prefixes
    h = torch.zeros(2, WIDTH // 2, dtype=torch.float64)
    for position in range(97):
        h = scale[:, position] * h + shift[:, position]
        assert_same(prefixes[:, position, WIDTH // 2 :], h)
        assert_same(prefixes[:, position, : WIDTH // 2], scale[:, : position + 1].prod(dim=1))


def test_affine_needs_an_even_width() -> None:
    with pytest.raises(ValueError, match="width must be even, half for a and half for b; got 5"):
        AffineOperator(5)
