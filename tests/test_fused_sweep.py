"""A scan by kernels equals the plain one, in every layout and continuation.

Kernels run on a GPU where there is one, otherwise in Triton's interpreter.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from logdepth import ScanState, scan
from logdepth.operators.fused import merges
from logdepth.ops import few_rows_kernel, kernels
from logdepth.ops.activation import ActivationName
from logdepth.scanning import Operator, OperatorPair, reference
from tests.fused_models import (
    DEVICE,
    WIDTH,
    Outcome,
    assert_same,
    assert_slopes,
    elements_of,
    few_programs,  # noqa: F401
    on_gpu,
    operator_of,
    outcome,
    projected,
    reduce_by,
    reproducible_products,  # noqa: F401
    scan_by,
    state_of,
    weights_of,
    why_plain,
)

KINDS_WITH_DROPOUT = ["grc", "up", "every", "ldru-up", "ldru-every"]
every_kind_with_dropout = pytest.mark.parametrize("kind", KINDS_WITH_DROPOUT)
every_kind = pytest.mark.parametrize("kind", [*KINDS_WITH_DROPOUT, "ldru"])


def assert_scans_agree(
    operator: Operator | OperatorPair, elements: Tensor, state: ScanState | None = None, **layout: Any
) -> Outcome:
    """Prefixes and tables, and the gradients of elements, of the old tables and of every weight."""
    inputs = [elements, *weights_of(operator).values(), *(() if state is None else (state.blocks, state.prefixes))]
    outcomes = []
    for by_kernels in (False, True):
        prefixes, after = scan_by(by_kernels, operator, elements, state, **layout)
        outcomes.append(outcome((prefixes, after.blocks, after.prefixes), inputs))
    assert_same(outcomes[1], outcomes[0])
    return outcomes[1]


# The scan


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        *(("up", length) for length in range(1, 18)),
        *itertools.product(["grc", "every", "ldru", "ldru-up", "ldru-every"], [1, 2, 7, 12]),
    ],
)
def test_it_equals_the_definition_and_the_plain_scan(kind: str, length: int) -> None:
    operator, elements = operator_of(kind), elements_of(1 if length > 5 else 2, length)
    fused = assert_scans_agree(operator, elements)
    with kernels(False):
        expected = reference.scan(operator, elements)
    torch.testing.assert_close(fused.results[0], expected, rtol=1e-4, atol=1e-4)


@every_kind
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_every_activation(kind: str, activation: ActivationName) -> None:
    assert_scans_agree(operator_of(kind, activation=activation), elements_of(1, 7))


@every_kind
@pytest.mark.parametrize("lengths", [(5, 0, 6, 1), (0, 3)])
def test_ragged(kind: str, lengths: tuple[int, ...]) -> None:
    elements = torch.randn(len(lengths), max(lengths) + 2, WIDTH, device=DEVICE)
    for row, length in zip(elements, lengths, strict=True):
        row[length:] = float("nan")  # what is read of it shows
    assert_scans_agree(operator_of(kind), elements.requires_grad_(), lengths=lengths)


@every_kind
def test_packed(kind: str) -> None:
    assert_scans_agree(operator_of(kind), elements_of(12), cu_seqlens=[0, 5, 5, 6, 12])


@pytest.mark.parametrize(
    ("kind", "before"),
    [*(("up", before) for before in range(1, 9)), *itertools.product(["grc", "every", "ldru", "ldru-up"], [3, 6])],
)
def test_it_continues_from_a_state_of_every_small_length(kind: str, before: int) -> None:
    operator = operator_of(kind)
    for length in (1, 4):
        assert_scans_agree(operator, elements_of(1, length), state_of(operator, [before]))


@every_kind
def test_it_continues_rows_of_different_lengths(kind: str) -> None:
    operator = operator_of(kind)
    assert_scans_agree(operator, elements_of(4, 5), state_of(operator, [3, 0, 4, 5]), lengths=[5, 2, 0, 3])


def test_a_stream_is_the_whole() -> None:
    operator, elements = operator_of("up"), elements_of(1, 11)
    prefixes, state = [], None
    for part in elements.split([1, 1, 1, 4, 1, 3], dim=1):
        some, state = scan_by(True, operator, part, state)
        prefixes.append(some)
    whole = scan_by(False, operator, elements).prefixes
    inputs = [elements, *weights_of(operator).values()]
    assert_same(outcome([torch.cat(prefixes, dim=1)], inputs), outcome([whole], inputs))


@every_kind
def test_reduce(kind: str) -> None:
    operator, elements, lengths = operator_of(kind), elements_of(3, 7), [7, 1, 6]
    inputs = [elements, *weights_of(operator).values()]
    fused, plain = (reduce_by(by_kernels, operator, elements, lengths=lengths) for by_kernels in (True, False))
    assert_same(outcome([fused], inputs), outcome([plain], inputs))


@pytest.mark.parametrize("kind", ["up", "ldru-up"])
def test_odd_widths(kind: str) -> None:
    operator = operator_of(kind, width=5)
    elements = torch.randn(2, 6, 5, device=DEVICE).requires_grad_()
    assert_scans_agree(operator, elements)


@every_kind
def test_nothing_to_scan(kind: str) -> None:
    operator = operator_of(kind)
    for shape in ((2, 0), (0, 3)):
        found = assert_scans_agree(operator, elements_of(*shape))
        assert found.results[0].shape == (*shape, WIDTH)
    assert_scans_agree(operator, elements_of(2, 0), state_of(operator, [3, 1]))
    assert_scans_agree(operator, elements_of(0), cu_seqlens=[0, 0])


def test_documents_of_a_pack_do_not_see_each_other() -> None:
    """Exactly: nothing of a document moves where another is exchanged."""
    operator, elements, bounds = operator_of("up"), elements_of(12).detach(), [0, 5, 6, 12]
    before = scan_by(True, operator, elements, cu_seqlens=bounds).prefixes
    for first, last in itertools.pairwise(bounds):
        others = elements.clone()
        others[first:last] = -elements[first:last]
        after = scan_by(True, operator, others, cu_seqlens=bounds).prefixes
        changed = (after != before).any(dim=1)
        assert changed[first:last].all()
        assert int(changed.sum()) == last - first


def test_elements_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="operator has width 8, but elements have width 5"), kernels(True):
        scan(operator_of("grc"), torch.randn(1, 3, 5, device=DEVICE))


@every_kind
def test_double_precision_takes_the_plain_path(kind: str) -> None:
    operator, elements = operator_of(kind), elements_of(2, 3).detach().double()
    (operator[0] if isinstance(operator, tuple) else operator).double()  # type: ignore[union-attr]
    reason = why_plain(operator, elements)
    assert reason is not None
    assert "float32 at most" in reason
    with kernels(True):
        prefixes = scan(operator, elements).prefixes
    assert prefixes.dtype == torch.float64
    assert torch.equal(prefixes, scan_by(False, operator, elements).prefixes)


@pytest.mark.parametrize("kind", ["grc", "ldru-up"])
def test_under_autocast_prefixes_have_the_elements_dtype_and_may_be_scanned_again(kind: str) -> None:
    operator, elements = operator_of(kind), elements_of(2, 5)
    results = []
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        for by_kernels in (False, True):
            prefixes, state = scan_by(by_kernels, operator, elements)
            assert prefixes.dtype == state.dtype == elements.dtype
            results.append(scan_by(by_kernels, operator, prefixes, state).prefixes)
    assert results[1].dtype == results[0].dtype
    torch.testing.assert_close(results[1], results[0], rtol=0.1, atol=0.1)


# What the backward pass keeps, and what it computes again


@pytest.fixture
def kept_traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward pass kept traces."""
    kept: list[bool] = []
    forward = merges.Merges.forward

    def watched(self: merges.Merges, traces: merges.Traces | None) -> None:
        kept.append(traces is not None)
        forward(self, traces)

    monkeypatch.setattr(merges.Merges, "forward", watched)
    return kept


def test_traces_are_kept_where_something_learns(kept_traces: list[bool]) -> None:
    operator, elements = operator_of("up"), elements_of(2, 5)
    scan_by(True, operator, elements)
    scan_by(True, operator, elements.detach())
    scan_by(True, operator, elements, checkpoint=True)
    with torch.no_grad():
        scan_by(True, operator, elements)
    for weight in weights_of(operator).values():
        weight.requires_grad_(False)
    scan_by(True, operator, elements.detach())
    assert kept_traces == [True, True, False, False, False]


@every_kind
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_computing_again_gives_the_same_gradients(kind: str, dropout: float) -> None:
    operator, elements = operator_of(kind, dropout=dropout), elements_of(1, 7)
    inputs, outcomes = [elements, *weights_of(operator).values()], []
    for checkpoint in (False, True):
        torch.manual_seed(3)
        outcomes.append(outcome([scan_by(True, operator, elements, checkpoint=checkpoint).prefixes], inputs))
    assert_same(*outcomes, tolerance=1e-5)


@every_kind
def test_computing_again_is_the_plain_scan(kind: str) -> None:
    operator = operator_of(kind)
    assert_scans_agree(operator, elements_of(3, 5), state_of(operator, [3, 0, 6]), lengths=[5, 2, 0], checkpoint=True)


def test_the_backward_pass_can_run_twice() -> None:
    operator, elements = operator_of("up"), elements_of(2, 6)
    loss = projected([scan_by(True, operator, elements).prefixes])
    inputs = [elements, *weights_of(operator).values()]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_a_backward_pass_that_failed_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, elements = operator_of("grc"), elements_of(1, 7)
    total = scan_by(True, operator, elements).prefixes.square().sum()
    (expected,) = torch.autograd.grad(total, elements, retain_graph=True)
    total = scan_by(True, operator, elements).prefixes.square().sum()
    original = merges.Merges.backward

    def failing(*arguments: Any) -> Any:
        original(*arguments)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(merges.Merges, "backward", failing)
        with pytest.raises(MemoryError):
            torch.autograd.grad(total, elements, retain_graph=True)
    (repeated,) = torch.autograd.grad(total, elements)
    torch.testing.assert_close(repeated, expected)


# Dropout


@every_kind_with_dropout
def test_dropout_follows_the_seed_and_the_mode(kind: str) -> None:
    operator, elements = operator_of(kind, dropout=0.4), elements_of(1, 5).detach()

    def prefixes(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return scan_by(True, operator, elements).prefixes

    assert torch.equal(prefixes(1), prefixes(1))
    assert not torch.equal(prefixes(1)[:, 1:], prefixes(2)[:, 1:])
    (operator[0] if isinstance(operator, tuple) else operator).eval()  # type: ignore[union-attr]
    assert torch.equal(prefixes(1), prefixes(2))
    torch.testing.assert_close(prefixes(1), scan_by(False, operator, elements).prefixes, rtol=1e-4, atol=1e-4)


def test_pairs_hidden_layers_and_what_the_net_adds_are_dropped() -> None:
    """After a single merge, a dropped number shows as a line of noughts in the gradient of the matrix beside it."""
    for dropout in (0.0, 0.4):
        operator = operator_of("up", dropout=dropout)
        loss = projected([scan_by(True, operator, elements_of(1, 2)).prefixes])
        weights = weights_of(operator)
        matrices = [weights[name] for name in ("operator.hidden.weight", "operator.gates.weight", "out.weight")]
        pair, hidden, added = torch.autograd.grad(loss, matrices)
        for lines in (pair.t(), hidden.t(), added):
            dropped = (lines == 0).all(dim=1)
            assert not dropped.all()
            assert dropped.any() == (dropout > 0)


@every_kind_with_dropout
def test_gradients_under_dropout_are_the_slope(kind: str) -> None:
    operator, elements = operator_of(kind, dropout=0.3), elements_of(1, 5)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return projected([scan_by(True, operator, elements).prefixes])

    assert_slopes(loss, [[elements], *([weight] for weight in weights_of(operator).values())])


def test_second_derivatives_are_refused() -> None:
    """Gradients of gradients would be wrong without notice where the second pass asks for some tensors only."""
    operator, elements = operator_of("every"), elements_of(1, 5)
    loss = projected([scan_by(True, operator, elements).prefixes])
    with pytest.raises(RuntimeError, match="do not support create_graph=True"):
        torch.autograd.grad(loss, elements, create_graph=True)


@pytest.mark.parametrize("kind", ["every", "ldru-every"])
def test_a_backward_pass_under_autocast_rounds_no_more(kind: str) -> None:
    operator, elements = operator_of(kind), elements_of(2, 5)
    weights = list(weights_of(operator).values())
    with torch.autocast(DEVICE.type, torch.bfloat16):
        losses = [projected([scan_by(True, operator, elements).prefixes]) for _ in range(2)]
        inside = torch.autograd.grad(losses[0], weights)
    outside = torch.autograd.grad(losses[1], weights)
    for one, other in zip(inside, outside, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@every_kind
def test_small_levels_where_nothing_is_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the products for few rows, which a GPU has for fewer bits than the interpreter multiplies."""
    rows: list[int] = []

    def fits(x: Tensor) -> bool:
        rows.append(len(x))
        return len(x) <= 3

    monkeypatch.setattr(few_rows_kernel, "fits", fits)
    operator, elements = operator_of(kind), elements_of(1, 13)
    with torch.no_grad():
        fused, plain = (scan_by(by_kernels, operator, elements).prefixes for by_kernels in (True, False))
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    assert {1, 3, 6} <= set(rows)
    rows.clear()
    scan_by(True, operator, elements)
    assert not rows, "what a backward pass needs is left by other kernels"


@on_gpu
@every_kind
def test_many_rows_on_a_gpu(kind: str) -> None:
    """Enough for the products that are made for many rows, where nothing is kept."""
    operator = operator_of(kind, width=64, shaken_by=0.02)  # with more, states without a norm grow to 1e13
    elements = torch.randn(20, 1000, 64, device="cuda")
    with torch.no_grad():
        exact = scan_by(False, operator, elements).prefixes
        with torch.autocast("cuda", torch.bfloat16):
            prefixes, plain = (scan_by(by_kernels, operator, elements).prefixes for by_kernels in (True, False))
    assert (prefixes - exact).norm() < 1.5 * (plain - exact).norm() < 0.2 * exact.norm()
