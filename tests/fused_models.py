"""What tests of fused scans share: operators with weights that hide nothing, scans, and outcomes to compare."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from logdepth import ScanState, reduce, scan
from logdepth.operators import GRC, MLPLDRU, PostMerge
from logdepth.operators.fused import FusedOperator
from logdepth.ops import kernels
from logdepth.ops.activation import ActivationName
from logdepth.scanning import Operator, OperatorPair, ScanResult
from logdepth.scanning.merge import operator_pair

WIDTH = 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def reproducible_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a program, and a partial sum, at a time."""
    if DEVICE.type == "cpu":
        for module in [one for name, one in sys.modules.items() if name.startswith("logdepth.")]:
            for limit in {"MAX_PROGRAMS", "MULTIPROCESSORS", "MOST"} & set(vars(module)):
                monkeypatch.setattr(module, limit, 2)


def shaken(module: nn.Module, by: float = 0.2) -> None:
    """Every parameter off its first value: biases of nought and scales of one would hide errors."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += by * torch.randn_like(parameter)


def operator_of(
    kind: str, *, activation: ActivationName = "silu", dropout: float = 0.0, width: int = WIDTH, shaken_by: float = 0.2
) -> Operator | OperatorPair:
    """A GRC or an MLP-LDRU alone, or with a net after merges of the up-sweep, or after every merge."""
    operator: GRC | MLPLDRU
    if kind.startswith("ldru"):
        operator = MLPLDRU(width, activation=activation)
    else:
        operator = GRC(width, activation=activation, dropout=dropout)
    post = PostMerge(operator, width, activation=activation, dropout=dropout)
    shaken(post, shaken_by)
    post.to(DEVICE)
    scope = kind.removeprefix("ldru-")
    return (post, operator) if scope == "up" else post if scope == "every" else operator


def weights_of(operator: Operator | OperatorPair) -> dict[str, nn.Parameter]:
    module = operator[0] if isinstance(operator, tuple) else operator
    assert isinstance(module, nn.Module)
    return dict(module.named_parameters())


def elements_of(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH).to(DEVICE).requires_grad_()


def state_of(operator: Operator | OperatorPair, lengths: Sequence[int]) -> ScanState:
    """A state of rows of these lengths, its tables to be differentiated."""
    state = scan_by(False, operator, elements_of(len(lengths), max(lengths)), lengths=lengths).state
    tables = (one.detach().requires_grad_() for one in (state.blocks, state.prefixes))
    return ScanState(state.row_lengths, *tables)


def why_plain(operator: Operator | OperatorPair, elements: Tensor) -> str | None:
    """None where a scan of such elements runs by kernels; otherwise the reason."""
    up, down = operator_pair(operator)
    assert isinstance(up, FusedOperator)
    with kernels(True):
        reason = up.why_plain(down, elements)
        assert (up.sweep_with(down, elements) is None) == (reason is not None)
    return reason


def scan_by(
    by_kernels: bool, operator: Operator | OperatorPair, elements: Tensor, state: ScanState | None = None, **layout: Any
) -> ScanResult:
    """A scan by kernels, which must apply, or without any."""
    assert not by_kernels or why_plain(operator, elements) is None
    with kernels(by_kernels):
        return scan(operator, elements, state, **layout)


def reduce_by(by_kernels: bool, operator: Operator | OperatorPair, elements: Tensor, **layout: Any) -> Tensor:
    assert not by_kernels or why_plain(operator, elements) is None
    with kernels(by_kernels):
        return reduce(operator, elements, **layout)


class Outcome(NamedTuple):
    results: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


def projected(results: Sequence[Tensor]) -> Tensor:
    """A fixed random projection of results: no symmetry hides an error."""
    generator = torch.Generator().manual_seed(99)
    parts = [(one * torch.randn(one.shape, generator=generator).to(DEVICE)).sum() for one in results]
    return torch.stack(parts).sum()


def outcome(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> Outcome:
    gradients = torch.autograd.grad(projected(results), inputs, allow_unused=True, materialize_grads=True)
    return Outcome(tuple(one.detach() for one in results), gradients)


def assert_same(actual: Outcome, expected: Outcome, tolerance: float = 1e-4) -> None:
    """Values closely, gradients by norm: what counts of a rounding error is how it adds up."""
    for one, other in zip(actual.results, expected.results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    for one, other in zip(actual.gradients, expected.gradients, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= tolerance * max(1.0, float(other.norm()))


def assert_slopes(loss: Callable[[], Tensor], groups: Sequence[Sequence[Tensor]]) -> None:
    """The gradients of each group are the slope of the loss along themselves; `loss` fixes its own seed."""
    every = [one for group in groups for one in group]
    all_gradients = iter(torch.autograd.grad(loss(), every))
    for group in groups:
        gradients = [next(all_gradients) for _ in group]
        norm = torch.stack([one.norm() for one in gradients]).norm()
        losses = []
        with torch.no_grad():
            for step in (1e-2, -2e-2, 1e-2):  # there, to the other side, and back
                for one, gradient in zip(group, gradients, strict=True):
                    one += step * gradient / norm
                if step != 1e-2 or not losses:
                    losses.append(float(loss()))
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float(norm), rel=2e-2)
