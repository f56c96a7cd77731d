"""checkpoint=True: the same values and gradients, from operands alone."""

from concurrent.futures import ThreadPoolExecutor

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


class Gated(nn.Module):
    """Two linear layers, so that weights have names with dots in them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
        self.outer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(torch.cat([left, right], dim=-1)))) + right


def weight_gradients(operator: nn.Module, elements: Tensor, checkpoint: bool) -> list[Tensor]:
    operator.zero_grad()
    scan(operator, elements, checkpoint=checkpoint).prefixes.square().sum().backward()
    return [weight.grad.clone() for weight in operator.parameters()]


def assert_same_weight_gradients(operator: nn.Module) -> None:
    elements = random_elements(2, 30, WIDTH)
    ours, theirs = (weight_gradients(operator, elements, checkpoint) for checkpoint in (True, False))
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other, 1e-9)


def test_hooks_on_weights_fire_once() -> None:
    operator = Gated()
    operator.inner.weight.register_hook(lambda grad: grad * 0.5)
    assert_same_weight_gradients(operator)


def test_tied_and_parametrized_weights() -> None:
    """Tied one by one, and as a module that has two names; and the operator is itself again afterwards."""
    operator = Gated()
    nn.utils.parametrizations.weight_norm(operator.inner)
    operator.inner.bias = operator.outer.bias
    operator.twin = operator.outer
    before = dict(operator.named_parameters(remove_duplicate=False))
    assert_same_weight_gradients(operator)
    after = dict(operator.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)


def test_under_hooks_on_saved_tensors() -> None:
    """As when the model around it is offloaded or checkpointed itself."""
    operator, elements = Gated(), random_elements(2, 30, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one):
        ours = weight_gradients(operator, elements, checkpoint=True)
    for one, other in zip(ours, weight_gradients(operator, elements, checkpoint=False), strict=True):
        assert_same(one, other, 1e-9)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_those_of_the_forward_pass(frozen: bool) -> None:
    """functional_call lends a module other weights for the forward pass alone."""
    operator, elements = Gated().requires_grad_(not frozen), random_elements(1, 30, WIDTH).requires_grad_()
    lent = {name: (weight * 0.5).detach().requires_grad_() for name, weight in operator.named_parameters()}

    class Model(nn.Module):
        def __init__(self, checkpoint: bool) -> None:
            super().__init__()
            self.operator, self.checkpoint = operator, checkpoint

        def forward(self, elements: Tensor) -> Tensor:
            return scan(self.operator, elements, checkpoint=self.checkpoint).prefixes

    weights = {f"operator.{name}": weight for name, weight in lent.items()}
    inputs = [elements, *lent.values()]
    ours, theirs = (
        gradients([torch.func.functional_call(Model(checkpoint), weights, (elements,))], inputs)
        for checkpoint in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other, 1e-9)


def test_freezing_after_the_forward_pass() -> None:
    operator, elements = Gated().requires_grad_(False), random_elements(1, 30, WIDTH).requires_grad_()
    prefixes = scan(operator, elements, checkpoint=True).prefixes
    operator.requires_grad_(True)
    prefixes.sum().backward()
    assert all(weight.grad is None for weight in operator.parameters())
    prefixes = scan(operator, elements, checkpoint=True).prefixes
    operator.requires_grad_(False)
    prefixes.sum().backward()


def test_second_derivatives_are_refused_and_not_lost() -> None:
    elements = random_elements(1, 9, WIDTH).requires_grad_()
    prefixes = scan(Gated(), elements, checkpoint=True).prefixes
    with pytest.raises(RuntimeError, match="does not support create_graph=True"):
        torch.autograd.grad(prefixes.sum(), elements, create_graph=True)


def test_a_hidden_weight_is_found_when_nothing_else_learns() -> None:
    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)]

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left * self.hidden[0] - right

    with pytest.raises(RuntimeError, match="also reads a tensor of shape"):
        scan(Hiding(), random_elements(2, 9, WIDTH), checkpoint=True).prefixes.sum().backward()


def test_an_operator_without_gradients() -> None:
    class Constant(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return (left + right).detach()

    elements = random_elements(1, 9, WIDTH).requires_grad_()
    ours = gradients([scan(Constant(), elements, checkpoint=True).prefixes], [elements])
    assert_same(ours[0], gradients([scan(Constant(), elements).prefixes], [elements])[0])


class Scaled(Toy):
    """Has a buffer, and counts its calls in another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.7, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(left * self.scale, right)


def test_buffers_are_those_of_the_forward_pass() -> None:
    operator, elements = Scaled(), random_elements(1, 30, WIDTH).requires_grad_()
    expected = gradients([scan(operator, elements).prefixes], [elements])
    operator.calls.zero_()
    prefixes = scan(operator, elements, checkpoint=True).prefixes
    calls = int(operator.calls)
    operator.scale.mul_(3)
    for _ in range(2):
        weight = random_elements(*prefixes.shape, seed=99)
        (grad,) = torch.autograd.grad((prefixes * weight).sum(), elements, retain_graph=True)
        assert_same(grad, expected[0], 1e-9)
    assert operator.calls == calls, "recomputing leaves buffers as they are"


def test_buffers_that_learn() -> None:
    operator, elements = Scaled(), random_elements(1, 30, WIDTH)
    operator.scale.requires_grad_()
    inputs = [operator.scale, operator.weight]
    ours = gradients([scan(operator, elements, checkpoint=True).prefixes], inputs)
    for one, other in zip(ours, gradients([scan(operator, elements).prefixes], inputs), strict=True):
        assert_same(one, other, 1e-9)


def test_a_change_of_mode_is_an_error() -> None:
    operator = Gated()
    prefixes = scan(operator, random_elements(1, 9, WIDTH), checkpoint=True).prefixes
    operator.eval()
    with pytest.raises(RuntimeError, match=r"was switched between train\(\) and eval\(\)"):
        prefixes.sum().backward()


def test_cached_parametrizations_are_refused() -> None:
    operator = Gated()
    nn.utils.parametrizations.weight_norm(operator.inner)
    with nn.utils.parametrize.cached(), pytest.raises(RuntimeError, match=r"inside parametrize.cached\(\)"):
        scan(operator, random_elements(1, 9, WIDTH), checkpoint=True)


def test_one_operator_in_several_threads() -> None:
    operator, elements = Gated(), random_elements(1, 60, WIDTH)
    weight = operator.inner.weight

    def gradient(checkpoint: bool = True) -> Tensor:
        return torch.autograd.grad(scan(operator, elements, checkpoint=checkpoint).prefixes.square().sum(), weight)[0]

    expected = gradient(checkpoint=False)
    with ThreadPoolExecutor(3) as threads:
        for one in threads.map(lambda _: gradient(), range(24)):
            assert_same(one, expected, 1e-9)
