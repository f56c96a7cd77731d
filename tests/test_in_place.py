"""Without a backward pass, results of merges take the places of operands: the same answers, and no copies."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from logdepth.fused import FusedOperator, in_place, operators, products
from logdepth.fused.in_place import InPlace

from logdepth import ScanState, reduce, scan
from logdepth.capture import Captured, for_replays
from logdepth.kernels import linear
from logdepth.scanning.plan_cache import PLANS
from logdepth.scanning.program import Program, program_of
from tests.fused_models import (
    DEVICE,
    elements_of,
    few_programs,  # noqa: F401
    on_gpu,
    operator_of,
    reproducible_products,  # noqa: F401
    state_of,
)
from tests.test_kernels_products import small_tiles  # noqa: F401


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans in place although they are small, and nothing is replayed."""
    monkeypatch.setattr(operators, "for_replays", lambda: True)
    monkeypatch.setattr(operators, "fits_states", lambda *_: True)


grc_kinds = pytest.mark.parametrize("kind", ["alone", "up", "every"])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[InPlace | None]:
    """Programs in place that scans looked for; none is left from other tests."""
    PLANS.clear()
    all_found: list[InPlace | None] = []
    real = operators.in_place_of

    def looked_for(*arguments: Any) -> InPlace | None:
        all_found.append(real(*arguments))
        return all_found[-1]

    monkeypatch.setattr(operators, "in_place_of", looked_for)
    return all_found


@torch.no_grad()
def assert_scans_alike(operator: Any, elements: Tensor, state: ScanState | None = None, **lengths: Any) -> None:
    before = elements.clone()
    fast, plain = (scan(one, elements, state, **lengths) for one in (FusedOperator(operator), operator))
    for one, other in zip(_tensors(fast), _tensors(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(elements, before)


def _tensors(scanned: Any) -> list[Tensor]:
    return [scanned.prefixes, scanned.state.blocks, scanned.state.prefixes]


@grc_kinds
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 16), (2, 13), (1, 31)])
def test_scans_in_place(kind: str, shape: tuple[int, int], found: list[InPlace | None]) -> None:
    assert_scans_alike(operator_of(kind), elements_of(*shape))
    (placed,) = found
    assert placed is not None
    assert placed.outputs is None


@pytest.mark.parametrize("new", [1, 5, 8, 14])
@pytest.mark.parametrize("before", [[3, 0], [4, 4], [7, 8]])
def test_scans_that_go_on(before: list[int], new: int, found: list[InPlace | None]) -> None:
    operator = operator_of("up")
    assert_scans_alike(operator, elements_of(2, new), state_of(operator, before))
    assert found[0] is not None


@pytest.mark.parametrize("lengths", [[14, 9], [0, 14], [1, 2]])
def test_rows_of_their_own_lengths(lengths: list[int], found: list[InPlace | None]) -> None:
    assert_scans_alike(operator_of("up"), elements_of(2, 14), lengths=lengths)
    assert found[0] is not None


def test_packed_rows(found: list[InPlace | None]) -> None:
    assert_scans_alike(operator_of("up"), elements_of(23), cu_seqlens=[0, 9, 9, 22, 23])
    assert found[0] is not None


@torch.no_grad()
def test_the_last_prefixes_alone(found: list[InPlace | None]) -> None:
    operator, elements = operator_of("every"), elements_of(3, 13)
    torch.testing.assert_close(
        reduce(FusedOperator(operator), elements), reduce(operator, elements), rtol=1e-4, atol=1e-4
    )
    assert found[0] is not None


@torch.no_grad()
def test_elements_of_another_dtype_than_the_products(found: list[InPlace | None]) -> None:
    operator, elements = operator_of("up"), elements_of(2, 13)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        fast = scan(FusedOperator(operator), elements)
    assert found[0] is not None
    assert fast.prefixes.dtype == torch.float32
    torch.testing.assert_close(fast.prefixes, scan(operator, elements).prefixes, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_elements_in_room_become_the_answers(mode: Any) -> None:
    operator, elements = operator_of("up"), elements_of(2, 13)
    fused = FusedOperator(operator)
    with mode():
        written = fused.room(26, elements).view(elements.shape).copy_(elements)
        prefixes = scan(fused, written).prefixes
        torch.testing.assert_close(prefixes, scan(operator, elements).prefixes, rtol=1e-4, atol=1e-4)
    assert prefixes.data_ptr() == written.data_ptr()


def test_autograd_knows_that_elements_were_overwritten() -> None:
    fused, factors = FusedOperator(operator_of("alone")), torch.ones(2, 3, 8, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        written = fused.room(6, factors).view(factors.shape).copy_(elements_of(2, 3))
    product = (factors * written).sum()
    with torch.no_grad():
        scan(fused, written)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_room_does_not_outlive_a_sweep_that_fails() -> None:
    fused, elements = FusedOperator(operator_of("alone")), elements_of(2, 3).detach()
    with torch.no_grad():
        written = fused.room(6, elements).view(elements.shape).copy_(elements)
        with pytest.raises(TypeError, match=r"elements are torch\.float64"):
            scan(fused, elements.double())
        scan(fused, written)
    assert torch.equal(written, elements)


@torch.no_grad()
def test_answers_keep_nothing_else_alive() -> None:
    operator = operator_of("up")
    prefixes = scan(FusedOperator(operator), elements_of(2, 1), state_of(operator, [7, 7])).prefixes
    assert prefixes.untyped_storage().nbytes() == prefixes.nbytes


def test_room_is_for_all_that_was_written_and_for_one_kind_of_scan() -> None:
    operator, elements = operator_of("up"), elements_of(12, 1).detach()
    fused, state = FusedOperator(operator), state_of(operator, [1, 1, 1, 1])
    with torch.no_grad():
        written = fused.room(12, elements).view(elements.shape).copy_(elements)
        scan(fused, written[:4], state)  # of a third, with as many stored states as there is room for
        assert torch.equal(written, elements)
        written = fused.room(12, elements).view(elements.shape).copy_(elements)
    scan(fused, written.view(1, 12, -1)[:, :4])
    assert torch.equal(written, elements)
    written = fused.room(4, elements).view(4, 1, -1).copy_(elements[:4])
    with torch.no_grad():
        scan(fused, written, state)
    assert torch.equal(written, elements[:4])


def test_looked_for_once(found: list[InPlace | None], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Program] = []
    real = in_place._in_place
    monkeypatch.setattr(in_place, "_in_place", lambda program: made.append(program) or real(program))
    fused, elements, before = FusedOperator(operator_of("up")), elements_of(2, 6), PLANS.num_bytes
    with torch.inference_mode():
        for _ in range(3):
            scan(fused, elements)
    assert len(made) == 1
    assert len(found) == 3
    (plan,) = PLANS._plans.values()
    assert plan.derived_nbytes["in place"] > 0
    assert PLANS.num_bytes > before


@grc_kinds
@pytest.mark.parametrize("shape", [(3, 16), (2, 24), (4, 12)])
def test_pairs_that_are_left_out(
    kind: str, shape: tuple[int, int], found: list[InPlace | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "FEWEST_ROWS", 2)
    monkeypatch.setattr(in_place, "MOST_LEFT_OUT", 1.0)
    assert_scans_alike(operator_of(kind), elements_of(*shape))
    (placed,) = found
    assert placed is not None
    lowest = placed.down[-1]
    assert lowest.spacing == (1, 1, 2)
    assert int((lowest.to < 0).sum()) == shape[0] - 1
    assert not any((call.to < 0).any() for call in placed.up)


@pytest.mark.parametrize(
    ("shape", "lengths"), [((2, 13), None), ((3, 11), None), ((2, 14), [14, 9]), ((3, 9), [9, 0, 5])]
)
def test_pairs_that_cannot_be_evenly_spaced(
    shape: tuple[int, int], lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANS.clear()
    monkeypatch.setattr(linear, "FEWEST_ROWS", 2)
    monkeypatch.setattr(in_place, "MOST_LEFT_OUT", 9.0)
    assert_scans_alike(operator_of("up"), elements_of(*shape), lengths=lengths)
    PLANS.clear()


def test_few_pairs_are_left_out_of_many_merges() -> None:
    left = torch.tensor([[1, 3, 5], [9, 11, 13], [17, 19, 21]]).flatten()
    assert in_place._evenly_spaced(left, left + 1, DEVICE).spacing is None  # too few merges
    many = (16 * torch.arange(linear.FEWEST_ROWS)[:, None] + torch.arange(1, 15, 2)).flatten()  # one of eight
    assert in_place._evenly_spaced(many, many + 1, DEVICE).spacing is None
    enough = (64 * torch.arange(linear.FEWEST_ROWS)[:, None] + torch.arange(1, 63, 2)).flatten()  # one of 32
    assert in_place._evenly_spaced(enough, enough + 1, DEVICE).spacing == (1, 1, 2)
    most = (128 * torch.arange(linear.FEWEST_ROWS)[:, None] + torch.arange(1, 127, 2)).flatten()  # one of 64
    placed = in_place._evenly_spaced(most, most + 1, DEVICE)
    assert placed.spacing == (1, 1, 2)
    assert int((placed.to < 0).sum()) == linear.FEWEST_ROWS - 1
    uneven = most + 1
    uneven[5] += 1
    assert in_place._evenly_spaced(most, uneven, DEVICE).right.tolist() == uneven.tolist()
    before = in_place._evenly_spaced(most + 1, most, DEVICE)  # the right one first
    assert len(before.left) == len(most)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="for the interpreter; a GPU does so by itself with enough rows")
@pytest.mark.usefixtures("small_tiles")
@grc_kinds
def test_products_read_pairs_where_they_lie(
    kind: str, found: list[InPlace | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "FEWEST_ROWS", 2)
    monkeypatch.setattr(in_place, "MOST_LEFT_OUT", 1.0)
    monkeypatch.setattr(products, "fits", lambda x, _weight: len(x) > 1)
    read: list[tuple[int, ...]] = []
    real = products.linear_activated

    def reading(x: Tensor, *arguments: Any, **settings: Any) -> None:
        read.append(tuple(x.shape))
        real(x, *arguments, **settings)

    monkeypatch.setattr(products, "linear_activated", reading)
    operator = operator_of(kind, width=16)
    assert_scans_alike(operator, torch.randn(3, 16, 16))
    # Up, then down: two pairs are left out where rows have several.
    assert [rows for rows, *pair in read if pair == [2, 16]] == [24, 12, 6, 3, 3, 11, 23]


def test_no_such_program_where_a_row_would_be_read_too_late() -> None:
    program = _program_of(elements_of(1, 8))
    assert in_place._in_place(program) is not None
    overwritten = program.calls[0].right[:1].long()
    for name in ("outputs", "blocks", "prefixes"):
        assert in_place._in_place(program._replace(**{name: overwritten})) is None
    first, *others = program.calls
    again = first._replace(result=program.num_states, first=program.num_merges)
    twice = program._replace(calls=(first, again, *others), num_states=program.num_states + first.num_merges)
    assert in_place._in_place(twice) is None
    for left, right in (([0, 1], [1, 3]), ([0, 2], [1, 1])):  # within a call: read by one, written by another
        call = first._replace(left=torch.tensor(left), right=torch.tensor(right), num_merges=2)
        nothing = torch.tensor([], dtype=torch.int64)
        alone = program._replace(calls=(call,), outputs=nothing, blocks=nothing, prefixes=nothing)
        assert in_place._in_place(alone) is None


@pytest.mark.parametrize("late", ["left", "right"])
def test_no_such_program_where_an_operand_is_read_too_late(late: str) -> None:
    program = _program_of(elements_of(1, 8))
    first, nothing = program.calls[0], torch.tensor([], dtype=torch.int64)
    overwritten, fresh = first.right[:1], first.left[:1]
    operands = (overwritten, fresh) if late == "left" else (fresh, overwritten)
    call = first._replace(left=operands[0], right=operands[1], num_merges=1, result=program.num_states)
    both = program._replace(calls=(first, call), num_states=program.num_states + 1)
    assert in_place._in_place(both._replace(outputs=nothing, blocks=nothing, prefixes=nothing)) is None


def _program_of(elements: Tensor) -> Program:
    """Of a scan of these elements."""
    PLANS.clear()
    scan(operator_of("alone"), elements)
    (plan,) = PLANS._plans.values()
    return program_of(plan, 0, elements.device)


@pytest.mark.parametrize("case", ["gradients", "dropout", "mlp-ldru"])
def test_not_where_something_is_kept_or_dropped_or_cannot(case: str, found: list[InPlace | None]) -> None:
    operator = operator_of("ldru" if case == "mlp-ldru" else "up", dropout=0.5 if case == "dropout" else 0.0)
    with torch.set_grad_enabled(case == "gradients"):
        scan(FusedOperator(operator), elements_of(2, 5))
    assert not found


@torch.no_grad()
def test_not_where_it_does_not_pay(found: list[InPlace | None], monkeypatch: pytest.MonkeyPatch) -> None:
    fused, elements = FusedOperator(operator_of("up")), elements_of(2, 12)
    asked: list[Any] = []
    monkeypatch.setattr(operators, "fits_states", lambda *about: asked.append(about))
    scan(fused, elements)
    assert asked == [(3, 8, torch.float32, elements.device)]
    monkeypatch.setattr(operators, "fits_states", lambda *_: True)
    monkeypatch.setattr(operators, "for_replays", lambda: False)
    scan(fused, elements)
    assert not found


@on_gpu
@torch.no_grad()
def test_captured_scans_are_in_place_from_the_last_warm_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "for_replays", for_replays)
    fused, elements = FusedOperator(operator_of("up")), elements_of(4, 16)
    captured = Captured(lambda given: scan(fused, given).prefixes, say=pytest.fail)
    expected = scan(fused, elements).prefixes
    PLANS.clear()
    in_place_by_now = []
    for _ in range(4):
        torch.testing.assert_close(captured(elements), expected, rtol=1e-4, atol=1e-4)
        (plan,) = PLANS._plans.values()
        in_place_by_now.append(plan.derived.get("in place") is not None)
    assert in_place_by_now == [False, True, True, True]


@on_gpu
@torch.no_grad()
def test_nothing_is_worked_out_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, elements = FusedOperator(operator_of("up")), elements_of(4, 16)
    with monkeypatch.context() as patch:
        patch.setattr(operators, "for_replays", lambda: False)
        expected = scan(fused, elements).prefixes  # its plan is there, but none in place
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefixes = scan(fused, elements).prefixes
    graph.replay()
    torch.testing.assert_close(prefixes, expected, rtol=1e-4, atol=1e-4)
