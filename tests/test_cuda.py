"""On a GPU: the same answers as on the CPU, and no waiting for it where lengths are known."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from logdepth import ScanState, reduce, scan
from logdepth.operators import GRC
from logdepth.ops import kernels
from logdepth.scanning.plan_cache import PLANS
from tests.toy import WIDTH, Toy, assert_same, boundaries, padded, random_elements, sequences, toy_pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

LENGTHS = [5, 0, 37, 64, 1, 131]


def on_both(elements: Tensor, **arguments: object) -> None:
    pair = toy_pair()
    ours = elements.cuda().requires_grad_()
    theirs = elements.clone().requires_grad_()
    expected = scan(pair, theirs, **arguments).prefixes
    expected_grad = torch.autograd.grad((expected * expected).sum(), theirs)[0]
    actual = scan((pair[0].cuda(), pair[1].cuda()), ours, **arguments).prefixes
    actual_grad = torch.autograd.grad((actual * actual).sum(), ours)[0]
    assert_same(actual.cpu(), expected, 1e-11)
    assert_same(actual_grad.cpu(), expected_grad, 1e-8)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("length", [1, 2, 13, 64, 97, 2976])
def test_batches(length: int, checkpoint: bool) -> None:
    on_both(random_elements(3, length, WIDTH), checkpoint=checkpoint)


def test_ragged() -> None:
    on_both(padded(sequences(LENGTHS)).nan_to_num(), lengths=LENGTHS)
    on_both(torch.cat(sequences(LENGTHS)), cu_seqlens=boundaries(LENGTHS))
    packed = torch.cat(sequences(LENGTHS)).cuda()
    on_gpu = torch.tensor(boundaries(LENGTHS), device="cuda")
    expected = scan(Toy(), packed.cpu(), cu_seqlens=boundaries(LENGTHS)).prefixes
    assert_same(scan(Toy().cuda(), packed, cu_seqlens=on_gpu).prefixes.cpu(), expected, 1e-11)


def test_states_travel() -> None:
    first, more = padded(sequences(LENGTHS)), random_elements(len(LENGTHS), 9, WIDTH, seed=7)
    state = scan(Toy(), first, lengths=LENGTHS).state
    expected = scan(Toy(), more, state)
    moved = scan(Toy().cuda(), more.cuda(), state.to("cuda"))
    assert_same(moved.prefixes.cpu(), expected.prefixes, 1e-11)
    assert moved.state.device.type == "cuda"
    rows = [3, 3, 0]
    assert_same(moved.state.select(rows).to("cpu").blocks, expected.state.select(rows).blocks, 1e-11)
    again = ScanState.from_state_dict({name: one.cpu() for name, one in moved.state.state_dict().items()})
    assert again.lengths.tolist() == moved.state.lengths.tolist()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Anything that waits for the GPU is an error in here."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    ("known_plan", "enabled"),
    [(False, False), (True, False), (True, None)],  # kernels look at a new plan on the device, once
    ids=["new plan, plain", "known plan, plain", "known plan, kernels"],
)
def test_the_uniform_path_never_synchronises(known_plan: bool, enabled: bool | None) -> None:
    operator = GRC(32, dropout=0.1).cuda()
    elements = torch.randn(4, 77, 32, device="cuda", requires_grad=True)

    def work() -> None:
        result = scan(operator, elements)
        result.prefixes.sum().backward()
        with torch.no_grad():
            state = result.state.detach()
            for _ in range(5):
                state = scan(operator, elements[:, :1], state).state
            reduce(operator, elements)

    with kernels(enabled):
        work()
    if not known_plan:
        PLANS.clear()
    with no_waiting(), kernels(enabled):
        work()
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting():
        elements.sum().item()


@pytest.mark.parametrize("enabled", [False, None], ids=["plain", "kernels"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_autocast(dtype: torch.dtype, checkpoint: bool, enabled: bool | None) -> None:
    operator = GRC(64).cuda()
    elements = torch.randn(2, 100, 64, device="cuda", requires_grad=True)
    with kernels(False):
        expected = scan(operator, elements).prefixes
    with torch.autocast("cuda", dtype=dtype), kernels(enabled):
        result = scan(operator, elements, checkpoint=checkpoint)
    assert result.prefixes.dtype == torch.float32
    assert (result.prefixes - expected).norm() / expected.norm() < 0.02
    result.prefixes.square().sum().backward()
    assert elements.grad.isfinite().all()


def test_dropout_is_replayed() -> None:
    """The scan of a dropped sum is linear in the elements for fixed masks: sum(grad · x) = sum(out)."""

    class Dropping(torch.nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return torch.nn.functional.dropout(left + right, 0.3)

    elements = torch.randn(1, 9000, 8, device="cuda", dtype=torch.float64, requires_grad=True)
    prefixes = scan(Dropping(), elements, checkpoint=True).prefixes
    (grad,) = torch.autograd.grad(prefixes.sum(), elements)
    assert_same((grad * elements).sum(), prefixes.sum(), 1e-9)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_operator() -> None:
    operator = GRC(32).cuda().double()
    compiled = torch.compile(operator, dynamic=True)
    elements = torch.randn(2, 77, 32, device="cuda", dtype=torch.float64, requires_grad=True)
    actual, expected = scan(compiled, elements).prefixes, scan(operator, elements).prefixes
    assert_same(actual, expected, 1e-9)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((actual * weight).sum(), elements)[0]
    assert_same(ours, torch.autograd.grad((expected * weight).sum(), elements)[0], 1e-8)
