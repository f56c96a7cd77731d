"""checkpoint=True: the same values and gradients, from operands alone."""

import pytest
import torch
from torch import Tensor, nn

from logdepth import scan
from logdepth.operators import GRC, PostMerge
from logdepth.scanning import recompute
from tests.toy import WIDTH, Toy, assert_same, boundaries, gradients, random_elements, toy_pair


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "CHUNK_ROWS", 7)


def as_function(operator: nn.Module) -> object:
    return lambda left, right: operator(left, right)


@pytest.mark.parametrize("wrap", [lambda operator: operator, as_function], ids=["module", "function"])
def test_same_values_and_gradients(wrap: object) -> None:
    pair = toy_pair()
    wrapped = (wrap(pair[0]), wrap(pair[1]))
    lengths = [37, 0, 5, 64]
    elements = random_elements(sum(lengths), WIDTH).requires_grad_()
    inputs = [elements, *pair[0].parameters(), *pair[1].parameters()]
    first = scan(pair, random_elements(4, 11, WIDTH, seed=5)).state.detach()
    for state in (None, first):
        plain = scan(pair, elements, state, cu_seqlens=boundaries(lengths))
        saving = scan(wrapped, elements, state, cu_seqlens=boundaries(lengths), checkpoint=True)
        assert_same(saving.prefixes, plain.prefixes)
        assert_same(saving.state.prefixes, plain.state.prefixes)
        ours, theirs = gradients([saving.prefixes], inputs), gradients([plain.prefixes], inputs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other, 1e-9)


@pytest.mark.parametrize("wrap", [lambda operator: operator, as_function], ids=["module", "function"])
def test_dropout_is_replayed(wrap: object) -> None:
    """Each mask seen in the forward pass is seen again, in chunks of the same rows, and gradients are those of it."""
    masks: list[Tensor] = []

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            mask = nn.functional.dropout(torch.ones_like(left))
            masks.append(mask)
            return self.weight * mask * (left + right)

    operator = Dropping()
    elements = random_elements(1, 40, WIDTH).requires_grad_()
    prefixes = scan(wrap(operator), elements, checkpoint=True).prefixes
    forward_masks = list(masks)
    masks.clear()
    random_before = torch.get_rng_state()
    prefixes.sum().backward()
    assert torch.equal(torch.get_rng_state(), random_before), "recomputing must not disturb the random numbers"
    assert len(masks) == len(forward_masks)
    key = lambda mask: (len(mask), mask.flatten().tolist())  # noqa: E731
    assert sorted(map(key, masks)) == sorted(map(key, forward_masks))
    # The output is linear in the elements for fixed masks, so the gradient reproduces it: sum(grad · x) = sum(out).
    assert_same((elements.grad * elements).sum(), prefixes.sum())


def test_rows_are_bounded() -> None:
    rows = []

    class Watched(Toy):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            rows.append(len(left))
            return super().forward(left, right)

    scan(Watched(), random_elements(1, 100, WIDTH).requires_grad_(), checkpoint=True).prefixes.sum().backward()
    assert max(rows) == 7
    rows.clear()
    with torch.no_grad():
        scan(Watched(), random_elements(1, 100, WIDTH), checkpoint=True)
    assert max(rows) == 50, "without gradients there is nothing to recompute"


def test_nothing_but_operands_is_stored() -> None:
    """What an operator computes on the way is never saved for the backward pass."""
    operator = GRC(8).double()
    elements = random_elements(1, 64, 8).requires_grad_()
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scan(operator, elements, checkpoint=True)
    weights = {tuple(weight.shape) for weight in operator.parameters()}
    assert all(shape[-1] == 8 for shape in saved if len(shape) == 2 and shape not in weights)
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scan(operator, elements)
    assert any(shape[-1] == 32 for shape in saved if len(shape) == 2 and shape not in weights)


def test_unused_and_frozen_weights() -> None:
    class Partial(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))
            self.bias.requires_grad_(False)

    operator = Partial()
    elements = random_elements(1, 30, WIDTH)
    scan(operator, elements, checkpoint=True).prefixes.sum().backward()
    assert operator.unused.grad is None
    assert operator.bias.grad is None
    ours = operator.weight.grad.clone()
    operator.zero_grad()
    scan(operator, elements).prefixes.sum().backward()
    assert_same(ours, operator.weight.grad, 1e-9)


def test_an_operator_that_ignores_an_operand() -> None:
    class Right(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return 2 * right

    elements = random_elements(1, 9, WIDTH).requires_grad_()
    saving = gradients([scan(Right(), elements, checkpoint=True).prefixes], [elements])
    assert_same(saving[0], gradients([scan(Right(), elements).prefixes], [elements])[0])


def test_a_hidden_weight_is_an_error_and_not_a_missing_gradient() -> None:
    class Hiding(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)]

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return super().forward(left, right) * self.hidden[0]

    operator = Hiding()
    elements = random_elements(1, 9, WIDTH)
    with pytest.raises(RuntimeError, match=r"also reads a tensor of shape \(3,\) that requires gradients"):
        scan(operator, elements, checkpoint=True).prefixes.sum().backward()
    scan(as_function(operator), elements, checkpoint=True).prefixes.sum().backward()
    saving = operator.hidden[0].grad.clone()
    operator.hidden[0].grad = None
    scan(operator, elements).prefixes.sum().backward()
    assert_same(saving, operator.hidden[0].grad, 1e-9)


def test_operators_of_the_project() -> None:
    post = PostMerge(GRC(8), 8).double()
    elements = random_elements(2, 23, 8).requires_grad_()
    inputs = [elements, *post.parameters()]
    operators = (post, post.operator)
    ours = gradients([scan(operators, elements, checkpoint=True).prefixes], inputs)
    theirs = gradients([scan(operators, elements).prefixes], inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other, 1e-9)
