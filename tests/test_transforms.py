"""torch.func and torch.compile around and inside the scan."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from logdepth import MemoryLayer, reduce, scan
from logdepth.scanning.plan_cache import PLANS
from tests.toy import WIDTH, Toy, assert_same, gradients, random_elements

ELEMENTS = random_elements(2, 13, WIDTH)


OPERATOR = Toy()


def keep_graph(graphs: list[torch.fx.GraphModule], graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
    """A compiler that changes nothing, and shows what it was given."""
    graphs.append(graph)
    return graph.forward


def prefixes(elements: Tensor) -> Tensor:
    return scan(OPERATOR, elements).prefixes


def test_vmap() -> None:
    stacked = random_elements(4, 2, 13, WIDTH)
    assert_same(vmap(prefixes)(stacked), torch.stack([prefixes(one) for one in stacked]))


def test_vmap_over_weights() -> None:
    operators = [Toy(seed) for seed in range(3)]
    weights = {
        name: torch.stack([dict(operator.named_parameters())[name] for operator in operators])
        for name in ("weight", "bias")
    }

    def run(weights: dict[str, Tensor]) -> Tensor:
        return scan(lambda left, right: functional_call(operators[0], weights, (left, right)), ELEMENTS).prefixes

    assert_same(vmap(run)(weights), torch.stack([scan(operator, ELEMENTS).prefixes for operator in operators]))


def test_grad_and_jacobians() -> None:
    elements = ELEMENTS.clone().requires_grad_()
    weight = random_elements(*ELEMENTS.shape, seed=99)
    expected = gradients([prefixes(elements)], [elements])[0]
    assert_same(grad(lambda x: (prefixes(x) * weight).sum())(ELEMENTS), expected)
    small = ELEMENTS[:1, :5]
    assert_same(jacrev(prefixes)(small), jacfwd(prefixes)(small))


def test_forward_mode() -> None:
    tangent = random_elements(*ELEMENTS.shape, seed=7)
    _, forward = jvp(prefixes, (ELEMENTS,), (tangent,))
    step = 1e-6
    assert_same(forward, (prefixes(ELEMENTS + step * tangent) - prefixes(ELEMENTS - step * tangent)) / (2 * step), 1e-6)


def test_hessian() -> None:
    small = ELEMENTS[:1, :3]
    curvature = hessian(lambda x: prefixes(x).sum())(small).reshape(9, 9)
    assert_same(curvature, curvature.T)
    assert curvature.abs().max() > 0


def test_checkpointing_refuses_torch_func() -> None:
    """Stated in the documentation: recomputation is for plain backward passes."""
    with pytest.raises(RuntimeError, match=r"checkpoint=True does not support torch\.func transforms"):
        grad(lambda x: scan(Toy(), x, checkpoint=True).prefixes.sum())(ELEMENTS)


@pytest.mark.filterwarnings("ignore")
def test_a_scan_inside_a_compiled_function() -> None:
    """The scan leaves the graph; what is around it is compiled, once for all lengths but the first."""
    graphs: list[torch.fx.GraphModule] = []

    def model(elements: Tensor) -> Tensor:
        return prefixes(elements.sin()).cos() + reduce(OPERATOR, elements).sum()

    PLANS.clear()
    torch.compiler.reset()
    compiled = torch.compile(model, backend=partial(keep_graph, graphs))
    for length in (13, 14):
        assert_same(compiled(random_elements(2, length, WIDTH)), model(random_elements(2, length, WIDTH)))
    compiled_so_far = len(graphs)
    assert compiled_so_far > 0
    assert_same(compiled(random_elements(2, 19, WIDTH)), model(random_elements(2, 19, WIDTH)))
    assert len(graphs) == compiled_so_far


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_operator() -> None:
    """A few compilations (a single row or more, views or not) serve every level of every length."""
    graphs: list[torch.fx.GraphModule] = []
    torch.compiler.reset()
    operator = Toy()
    compiled = torch.compile(operator, dynamic=True, backend=partial(keep_graph, graphs))
    elements = random_elements(1, 77, WIDTH).requires_grad_()
    inputs = [elements, *operator.parameters()]
    actual, expected = scan(compiled, elements).prefixes, scan(operator, elements).prefixes
    assert_same(actual, expected)
    for ours, theirs in zip(gradients([actual], inputs), gradients([expected], inputs), strict=True):
        assert_same(ours, theirs, 1e-9)
    compiled_so_far = len(graphs)
    assert compiled_so_far <= 4
    for batch, length in ((3, 50), (1, 64), (2, 99)):
        scan(compiled, random_elements(batch, length, WIDTH).requires_grad_())
    assert len(graphs) == compiled_so_far


class Scanned(nn.Module):
    """A scan as a module, as torch's exporters want it."""

    def __init__(self) -> None:
        super().__init__()
        self.operator = Toy()

    def forward(self, elements: Tensor) -> Tensor:
        return scan(self.operator, elements).prefixes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's exporters
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("make", [Scanned, lambda: MemoryLayer(WIDTH, heads=1).to(ELEMENTS)], ids=["scan", "memory"])
def test_exports_of_one_length_work_and_of_any_length_are_refused(make: Callable[[], nn.Module]) -> None:
    module = make()
    exported = torch.export.export(module, (ELEMENTS,)).module()
    assert_same(exported(ELEMENTS), module(ELEMENTS))
    says = "do not support scans, because a scan's merges depend on the length; use torch.export with fixed shapes"
    with pytest.raises(NotImplementedError, match=says):
        torch.jit.trace(module, (ELEMENTS,))
    length = torch.export.Dim("length", min=2, max=64)
    with pytest.raises(NotImplementedError, match=says):
        torch.export.export(module, (ELEMENTS.clone(),), dynamic_shapes=({1: length},))
