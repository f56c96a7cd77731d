"""Every kernel is the plain torch that it stands for: values, gradients, dropout. Without a GPU, in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from logdepth.operators.fused import merges, pairs_kernel
from logdepth.operators.fused.pairs_kernel import add_pair_gradients, gather_pairs
from logdepth.operators.grc import fused as grc_cell
from logdepth.operators.grc.gate_kernel import gate, gate_backward
from logdepth.operators.mlp_ldru.weigh_kernel import weigh, weigh_backward
from logdepth.ops import lookup_kernel, norm_kernel
from logdepth.ops.activation_kernel import activate, activate_backward, slope_programs
from logdepth.ops.column_sums import column_sums
from logdepth.ops.launch import num_programs
from logdepth.ops.lookup_kernel import add_looked_up, leaves, leaves_backward, look_up, order_of, sum_by_token
from logdepth.ops.norm_kernel import (
    fill_normed,
    norm_programs,
    normed_backward,
    residual_normed,
    residual_normed_backward,
)
from logdepth.ops.rows_kernel import scaled, scatter_rows
from tests.kernel_numbers import (
    ACTIVATIONS,
    DEVICE,
    EPS,
    PROGRAMS,
    assert_close,
    dropout,
    exact,
    few_programs,  # noqa: F401
    random,
)

sizes = pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 48), (70, 100)])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


def test_programs_have_several_turns_here() -> None:
    rows, width = 70, 100
    assert num_programs(rows) == norm_programs(rows, width) == PROGRAMS
    assert slope_programs(rows, width) < rows


def assert_sums(before: Tensor, after: Tensor, *expected: Tensor) -> None:
    """Partial sums that were added to what was there; where rows were rounded first, theirs is not."""
    assert_close((after - before).sum(0), torch.cat([one.flatten() for one in expected]), torch.bfloat16)
    assert not torch.equal(before, after)


def operands(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of the operands, each once, among the first 2 · rows + 3 of a matrix of 3 · rows + 3."""
    order = torch.randperm(2 * rows + 3)[: 2 * rows].int().to(DEVICE)
    return order[:rows], order[rows:]


# Pairs


@sizes
@dtypes
def test_pairs_are_gathered_and_their_gradients_added(rows: int, width: int, dtype: torch.dtype) -> None:
    states, (left, right) = random(3 * rows + 3, width, dtype=dtype), operands(rows)
    gathered = torch.empty(rows, 2 * width, dtype=dtype, device=DEVICE)
    gather_pairs(states, left, right, gathered, **dropout())
    assert torch.equal(gathered, torch.cat([states[left], states[right]], dim=1))

    grads, pair_grads = random(3 * rows + 3, width, dtype=dtype), random(rows, 2 * width, dtype=dtype)
    expected = grads.double()
    expected[left] += pair_grads[:, :width]
    expected[right] += pair_grads[:, width:]
    add_pair_gradients(grads, left, right, pair_grads, **dropout())
    assert_close(grads, expected, dtype)


# Gate


def plain_gate(gates: Tensor, left: Tensor, right: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    left_gate, right_gate, new_gate, new = gates.chunk(4, dim=-1)
    mixed = left_gate.sigmoid() * left + right_gate.sigmoid() * right + new_gate.sigmoid() * new
    return F.layer_norm(mixed, mixed.shape[-1:], scale, shift, EPS)


@sizes
@dtypes
def test_gate(rows: int, width: int, dtype: torch.dtype) -> None:
    """The results, and their gradients, are rows of the matrices that the operands and theirs are rows of."""
    (left, right), results = operands(rows), slice(2 * rows + 3, None)
    states, gates = random(3 * rows + 3, width, dtype=dtype), random(rows, 4 * width, dtype=dtype)
    scale, shift = random(width), random(width)
    inputs = exact(gates, states, scale, shift)
    expected = plain_gate(inputs[0], inputs[1][left], inputs[1][right], *inputs[2:])
    gate(gates, states, left, right, scale, shift, EPS, states[results])
    assert_close(states[results], expected.detach(), dtype)

    grads, sums = random(3 * rows + 3, width, dtype=dtype), random(PROGRAMS, 6 * width)
    gates_grad, states_grad, *norm_grads = torch.autograd.grad(expected, inputs, grads[results].double())
    expected_grads, sums_before = grads.double() + states_grad, sums.clone()
    gate_backward(grads[results], gates, states, left, right, scale, EPS, grads, sums)
    assert_close(gates, gates_grad, dtype)
    assert_close(grads, expected_grads, dtype)
    assert_sums(sums_before, sums, gates_grad.sum(0), *norm_grads)


# Activation


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_the_ends_of_their_range(activation: str) -> None:
    before = torch.tensor([[-1e30, -300.0, -100.0, -80.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 80.0, 300.0, 1e30]])
    before, settings = before.to(DEVICE), {"activation": activation, "site": 2, **dropout()}
    (exact_before,) = exact(before)
    expected = ACTIVATIONS[activation](exact_before)
    (slopes,) = torch.autograd.grad(expected.sum(), exact_before)
    hidden, sums = torch.ones_like(before), torch.zeros(1, before.shape[1], device=DEVICE)
    activate_backward(before, hidden, sums, **settings)
    torch.testing.assert_close(hidden.double(), expected.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(before.double(), slopes, rtol=1e-5, atol=1e-7)


@sizes
@dtypes
@activations
def test_activation(activation: str, rows: int, width: int, dtype: torch.dtype) -> None:
    before, settings = random(rows, width, dtype=dtype), {"activation": activation, "site": 2, **dropout()}
    (exact_before,) = exact(before)
    expected = ACTIVATIONS[activation](exact_before)
    hidden = torch.empty_like(before)
    activate(before, hidden, **settings)
    assert_close(hidden, expected.detach(), dtype)
    in_place = before.clone()
    activate(in_place, in_place, **settings)
    assert torch.equal(in_place, hidden)

    grad, sums = random(rows, width, dtype=dtype), random(slope_programs(rows, width), width)
    (before_grad,) = torch.autograd.grad(expected, exact_before, grad.double())
    sums_before = sums.clone()
    activate_backward(before, grad, sums, **settings)
    assert torch.equal(grad, hidden)
    assert_close(before, before_grad, dtype)
    assert_sums(sums_before, sums, before_grad.sum(0))


# Norms


@sizes
@dtypes
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("with_skip", [True, False])
def test_normed(with_skip: bool, silu: bool, rows: int, width: int, dtype: torch.dtype) -> None:
    x, scale, shift = random(rows, width, dtype=dtype), random(width), random(width)
    skip = random(rows, width, dtype=dtype) if with_skip else None
    inputs = exact(x, scale, shift, *([skip] if skip is not None else []))
    expected = F.layer_norm(inputs[0], (width,), inputs[1], inputs[2], EPS) + (inputs[3] if with_skip else 0.0)
    expected = F.silu(expected) if silu else expected
    out = torch.empty_like(x)
    fill_normed(x, scale, shift, skip, out, eps=EPS, silu=silu)
    assert_close(out, expected.detach(), dtype)

    grad, sums = random(rows, width, dtype=dtype), random(norm_programs(rows, width), 3 * width)
    x_grad, scale_grad, shift_grad, *expected_skip_grad = torch.autograd.grad(expected, inputs, grad.double())
    actual_x_grad, skip_grad = torch.empty_like(x), torch.empty_like(x) if with_skip else None
    normed_backward(grad, x, scale, shift, skip, actual_x_grad, skip_grad, sums, eps=EPS, silu=silu)
    assert_close(actual_x_grad, x_grad, dtype)
    for one in expected_skip_grad:
        assert skip_grad is not None
        assert_close(skip_grad, one, dtype)
    assert_sums(torch.zeros_like(sums), sums, scale_grad, shift_grad, x_grad.sum(0))


@sizes
@dtypes
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_residual_normed(rate: float, rows: int, width: int, dtype: torch.dtype) -> None:
    x, added, scale, shift = (
        random(rows, width, dtype=dtype),
        random(rows, width, dtype=dtype),
        random(width),
        random(width),
    )
    settings = {"eps": EPS, **dropout(rate, first=3)}
    grad, sums = random(rows, width, dtype=dtype), random(norm_programs(rows, width), 3 * width)
    actual_x_grad, actual_added_grad, actual_sums = grad.clone(), added.clone(), sums.clone()
    residual_normed_backward(actual_x_grad, x, actual_added_grad, scale, actual_sums, **settings)

    # The gradient is nought where something was dropped: the mask by which forward and backward pass must agree.
    by = (actual_added_grad != 0).double() / (1 - rate)
    assert rows == 1 or (by == 0).any() == (rate > 0)
    inputs = exact(x, added, scale, shift)
    expected = F.layer_norm(inputs[0] + by * inputs[1], (width,), *inputs[2:], EPS)
    x_grad, added_grad, *norm_grads = torch.autograd.grad(expected, inputs, grad.double())
    out = torch.empty_like(x)
    residual_normed(x, added, scale, shift, out, **settings)
    assert_close(out, expected.detach(), dtype)
    assert_close(actual_x_grad, x_grad, dtype)
    assert_close(actual_added_grad, added_grad, dtype)
    assert_sums(sums, actual_sums, *norm_grads, added_grad.sum(0))


@sizes
@dtypes
def test_weighed_pairs(rows: int, width: int, dtype: torch.dtype) -> None:
    raw, pair, grad = (random(rows, width, dtype=dtype) for _ in range(3))
    scale, shift, sums = random(width), random(width), random(norm_programs(rows, width), 3 * width)
    inputs = exact(raw, pair, scale, shift)
    expected = F.layer_norm(inputs[0], (width,), *inputs[2:], EPS) * inputs[1]
    raw_grad, pair_grad, *norm_grads = torch.autograd.grad(expected, inputs, grad.double())
    weighed = torch.empty_like(raw)
    weigh(raw, pair, scale, shift, weighed, eps=EPS)
    assert_close(weighed, expected.detach(), dtype)
    in_place = raw.clone()
    weigh(in_place, pair, scale, shift, in_place, eps=EPS)
    assert torch.equal(in_place, weighed)
    again, actual_raw_grad, actual_pair_grad, actual_sums = (
        grad.clone(),
        raw.clone(),
        torch.empty_like(pair),
        sums.clone(),
    )
    weigh_backward(again, actual_raw_grad, pair, scale, shift, actual_pair_grad, actual_sums, eps=EPS)
    assert_close(again, expected.detach(), dtype)
    assert_close(actual_raw_grad, raw_grad, dtype)
    assert_close(actual_pair_grad, pair_grad, dtype)
    assert_sums(sums, actual_sums, *norm_grads, raw_grad.sum(0))


@pytest.mark.parametrize("rows", [1, 64, 528])
@pytest.mark.parametrize("width", [1, 32, 100])
def test_column_sums(rows: int, width: int) -> None:
    partial = random(rows, width)
    assert_close(column_sums(partial), partial.double().sum(0))
    assert column_sums(partial[:, :0]).shape == (0,)


@sizes
@dtypes
def test_tensors_are_scaled_and_rows_scattered(rows: int, width: int, dtype: torch.dtype) -> None:
    x, values, (left, _) = random(3 * rows + 3, width, dtype=dtype), random(rows, width, dtype=dtype), operands(rows)
    factor = torch.tensor(0.3, device=DEVICE)
    assert_close(scaled(x, factor), x.double() * factor.double(), dtype)
    expected = x.clone()
    expected[left] = values
    scatter_rows(x, left, values)
    assert torch.equal(x, expected)
    scatter_rows(x, left[:0], values[:0])
    assert torch.equal(x, expected)


# Rows by token

VOCAB = 11


def some_tokens(count: int) -> Tensor:
    """The first token often, some of the others seldom, the last never."""
    return (torch.rand(count) ** 3 * (VOCAB - 1)).long().to(DEVICE)


@sizes
@dtypes
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_leaves(rate: float, rows: int, width: int, dtype: torch.dtype) -> None:
    table, tokens, scale, shift = random(VOCAB, width, dtype=dtype), some_tokens(rows), random(width), random(width)
    settings: dict[str, Any] = {"eps": EPS, "rate": rate, "seed": torch.tensor([5], device=DEVICE)}
    kept = kept_of_leaves(rows, width, rate=rate, seed=settings["seed"])[0]
    inputs = exact(table, scale, shift)
    looked_up = inputs[0][tokens]
    expected = looked_up + kept * F.layer_norm(looked_up, (width,), *inputs[1:], EPS)
    out = torch.empty(rows, width, dtype=dtype, device=DEVICE)
    leaves(table, tokens, scale, shift, out, **settings)
    assert_close(out, expected.detach(), dtype)

    grad, rows_grad = random(rows, width, dtype=dtype), torch.empty_like(out)
    expected_rows_grad, *norm_grads = torch.autograd.grad(expected, [looked_up, *inputs[1:]], grad.double())
    sums = leaves_backward(grad, table, tokens, scale, rows_grad, **settings)
    assert_close(rows_grad, expected_rows_grad, dtype)
    assert_sums(torch.zeros_like(sums), sums, *norm_grads)


@sizes
@dtypes
def test_rows_are_looked_up_added_and_summed_by_token(rows: int, width: int, dtype: torch.dtype) -> None:
    table, tokens, x = random(VOCAB, width, dtype=dtype), some_tokens(rows), random(rows, width, dtype=dtype)
    for found in (torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)):
        look_up(table, tokens, found)
        assert torch.equal(found, table[tokens].to(found.dtype))
    expected = x.double() + 0.1 * table.double()[tokens]
    add_looked_up(x, table, tokens, 0.1, x)
    assert_close(x, expected, dtype)
    by_token = torch.zeros(VOCAB, width, dtype=torch.float64, device=DEVICE).index_add(0, tokens, x.double())
    assert_close(sum_by_token(x, order_of(tokens, VOCAB), factor=0.5), 0.5 * by_token)


@pytest.mark.parametrize("counts", [(16,), (15, 1, 16), (3, 33, 0, 12, 20), (17, 15, 64), (0, 0, 5)])
def test_sums_by_token_wherever_chunks_begin_and_end(counts: tuple[int, ...]) -> None:
    tokens = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[torch.randperm(sum(counts))]
    tokens, x = tokens.to(DEVICE), random(sum(counts), 5)
    expected = torch.zeros(len(counts), 5, dtype=torch.float64, device=DEVICE).index_add(0, tokens, x.double())
    assert_close(sum_by_token(x, order_of(tokens, len(counts))), expected)


# Dropout: what each kernel keeps, as multiples of what goes in


def kept_of_pairs(rows: int, width: int, **settings: Any) -> tuple[Tensor, Tensor]:
    left, right = torch.arange(2 * rows, dtype=torch.int32, device=DEVICE).split(rows)
    forward = torch.empty(rows, 2 * width, device=DEVICE)
    gather_pairs(torch.ones(2 * rows, width, device=DEVICE), left, right, forward, **settings)
    backward = torch.zeros(2 * rows, width, device=DEVICE)
    add_pair_gradients(backward, left, right, torch.ones(rows, 2 * width, device=DEVICE), **settings)
    return forward, torch.cat(backward.split(rows), dim=1)


def kept_of_hidden(rows: int, width: int, site: int = 2, **settings: Any) -> tuple[Tensor, Tensor]:
    before, forward, backward = (torch.ones(rows, width, device=DEVICE) for _ in range(3))
    activate(before, forward, activation="relu", site=site, **settings)
    sums = torch.zeros(slope_programs(rows, width), width, device=DEVICE)
    activate_backward(before, backward, sums, activation="relu", site=site, **settings)
    assert torch.equal(backward, forward)
    return forward, before


def kept_of_residual(rows: int, width: int, **settings: Any) -> tuple[Tensor, Tensor]:
    x, added = torch.zeros(rows, width, device=DEVICE), torch.ones(rows, width, device=DEVICE)
    # A large eps leaves LN a tiny multiple of the centred rows: what is above the mean was kept.
    unit, out = torch.ones(width, device=DEVICE), torch.empty_like(x)
    residual_normed(x, added, unit, 0 * unit, out, eps=1.0, **settings)
    grad = torch.randn(rows, width).to(DEVICE)
    sums = torch.zeros(norm_programs(rows, width), 3 * width, device=DEVICE)
    residual_normed_backward(grad, x, added, unit, sums, eps=1.0, **settings)
    by = 1 / (1 - settings["rate"])
    return (out > 0) * by, (added != 0) * by


def kept_of_leaves(rows: int, width: int, *, rate: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves of noughts are the shift, where it is kept."""
    table, tokens = torch.zeros(1, width, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    one, forward, backward = torch.ones(width, device=DEVICE), *(torch.empty(rows, width, device=DEVICE) for _ in "ab")
    leaves(table, tokens, one, one, forward, eps=EPS, rate=rate, seed=seed)
    ones = torch.ones_like(forward)
    sums = leaves_backward(ones, table, tokens, one, backward, eps=EPS, rate=rate, seed=seed)
    assert_close(sums[:, width:].sum(0), forward.sum(0))
    return forward, forward


KEPT = {"pairs": kept_of_pairs, "hidden": kept_of_hidden, "residual": kept_of_residual}
every_dropout = pytest.mark.parametrize("kept_of", KEPT.values(), ids=KEPT)


@every_dropout
def test_dropout_keeps_the_same_in_both_passes_and_its_share(kept_of: Any) -> None:
    rows, width, rate = 100, 100, 0.3
    forward, backward = kept_of(rows, width, **dropout(rate))
    assert torch.equal(forward, backward)
    assert_close(forward[forward > 0], torch.full_like(forward[forward > 0], 1 / (1 - rate)))
    assert abs((forward == 0).double().mean() - rate) < 0.02
    # No row or column is special.
    assert (forward == 0).double().mean(0).max() < 0.6
    assert (forward == 0).double().mean(1).max() < 0.6
    assert (forward[1:] != forward[:-1]).double().mean() > 0.35
    assert (forward[:, 1:] != forward[:, :-1]).double().mean() > 0.35


@every_dropout
def test_dropout_depends_on_the_seed_and_on_the_number_of_the_row(kept_of: Any) -> None:
    whole = kept_of(9, 48, **dropout(0.5))[0]
    assert torch.equal(whole, kept_of(9, 48, **dropout(0.5))[0])
    assert (whole != kept_of(9, 48, **dropout(0.5, seed=6))[0]).double().mean() > 0.3
    for forward_or_backward in kept_of(6, 48, **dropout(0.5, first=3)):
        assert torch.equal(whole[3:], forward_or_backward)


def test_places_that_drop_have_sites_of_their_own() -> None:
    sites = [pairs_kernel.SITE, grc_cell.HIDDEN_SITE, merges.NET_SITE, norm_kernel.SITE, lookup_kernel.SITE]
    assert len(set(sites)) == len(sites)
    assert max(sites) <= 6
    masks = [kept_of_hidden(40, 48, site=site, **dropout(0.5))[0] for site in sites]
    for number, one in enumerate(masks):
        for other in masks[:number]:
            assert 0.4 < (one != other).double().mean() < 0.6
