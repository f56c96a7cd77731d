"""Muon: torch's own for matrices, each slice by itself beyond, under a learning rate of any kind."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from logdepth.training.muon import Muon, orthogonalised

ADJUSTMENTS = ["original", "match_rms_adamw"]
SHAPES = [(8, 8), (5, 13), (13, 5), (1, 7), (7, 1), (1, 1), (64, 48)]


def gradients_of(shape: tuple[int, ...], steps: int = 6) -> list[Tensor]:
    torch.manual_seed(sum(shape))
    return [torch.randn(shape) * 10.0 ** (step - 3) for step in range(steps)]


def trained(
    kind: Any, shape: tuple[int, ...], gradients: list[Tensor], rates: list[Any], **options: Any
) -> list[Tensor]:
    """A weight after each step."""
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(shape))
    optimizer = kind([weight], lr=rates[0], **options)
    found = []
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = gradient.clone()
        optimizer.step()
        found.append(weight.detach().clone())
    return found


RATES = [0.1, 0.2, 0.3, 0.05, 0.01, 0.5]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.95, 0.1), (0.0, 0.0), (0.5, 1.0)])
def test_it_is_torchs_for_matrices(
    shape: tuple[int, int], adjustment: Any, momentum: float, weight_decay: float
) -> None:
    options: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay}
    gradients = gradients_of(shape)
    ours = trained(Muon, shape, gradients, RATES, adjustment=adjustment, **options)
    theirs = trained(torch.optim.Muon, shape, gradients, RATES, adjust_lr_fn=adjustment, **options)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


@settings(max_examples=25)
@given(
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    adjustment=st.sampled_from(ADJUSTMENTS),
)
def test_more_dimensions_are_a_batch_of_matrices(lead: list[int], rows: int, columns: int, adjustment: Any) -> None:
    shape = (*lead, rows, columns)
    gradients = gradients_of(shape, steps=3)
    weights = nn.Parameter(torch.ones(shape))
    slices = [nn.Parameter(torch.ones(rows, columns)) for _ in weights.flatten(0, -3)]
    together, apart = Muon([weights], lr=0.1, adjustment=adjustment), Muon(slices, lr=0.1, adjustment=adjustment)
    for gradient in gradients:
        weights.grad = gradient
        for one, part in zip(slices, gradient.flatten(0, -3), strict=True):
            one.grad = part
        together.step()
        apart.step()
        # A product of a batch rounds to bfloat16 in another order.
        torch.testing.assert_close(weights.flatten(0, -3), torch.stack(slices), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(5, 13), (3, 5, 4)])
@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
def test_a_tensor_is_as_good_a_learning_rate_as_a_number(shape: tuple[int, ...], adjustment: Any) -> None:
    gradients = gradients_of(shape)
    numbers = trained(Muon, shape, gradients, RATES, adjustment=adjustment)
    tensors = trained(Muon, shape, gradients, [torch.tensor(rate) for rate in RATES], adjustment=adjustment)
    assert all(torch.equal(left, right) for left, right in zip(numbers, tensors, strict=True))


class NoHostReads(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal"), name
        return function(*arguments, **(settings or {}))


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_a_step_reads_nothing_back(rate: Any) -> None:
    weight = nn.Parameter(torch.ones(3, 4, 5))
    optimizer = Muon([weight], lr=rate)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        with NoHostReads():
            optimizer.step()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoHostReads():
        torch.tensor(1.0).item()


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (3, 48, 32), (2, 2, 16, 16)])
def test_singular_values_are_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    found = torch.linalg.svdvals(orthogonalised(torch.randn(shape)).float())
    assert orthogonalised(torch.randn(shape)).shape == shape
    assert found.min() > 0.2
    assert found.max() < 1.4


def test_matrices_of_zeros_stay_finite() -> None:
    assert (orthogonalised(torch.zeros(3, 4)) == 0).all()
    assert (orthogonalised(torch.zeros(2, 3, 4)) == 0).all()


def test_weights_without_a_gradient_stay_and_vectors_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    Muon([weight]).step()
    assert (weight == 1).all()
    with pytest.raises(ValueError, match=r"Muon is for matrices; got a parameter of shape \(3,\)"):
        Muon([nn.Parameter(torch.ones(3))])
