"""Elements that are written where a scan has room for its states are not copied; the answers are the same."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from logdepth.fused import FusedOperator, operators

from logdepth import scan
from tests.fused_models import (
    DEVICE,
    assert_same,
    elements_of,
    few_programs,  # noqa: F401
    operator_of,
    outcome,
    reproducible_products,  # noqa: F401
    state_of,
    weights_of,
)
from tests.test_fused import every_kind
from tests.test_fused_lm import CONFIGS, plain_and_fused, tokens_of


def written_in_room(fused: FusedOperator, elements: Tensor) -> tuple[Tensor, Tensor]:
    """The same elements where a scan has room behind them, to be differentiated; and all of that room."""
    written = fused.room(elements.shape[0] * elements.shape[1], elements)
    assert fused._room is not None
    states = fused._room.states.fill_(float("nan"))
    return written.view(elements.shape).copy_(elements.detach()).requires_grad_(), states


@every_kind
@pytest.mark.parametrize("before", [None, [3, 0]])
def test_elements_with_room_behind_them_are_not_copied(kind: str, before: list[int] | None) -> None:
    operator, elements = operator_of(kind), elements_of(2, 14)
    state = None if before is None else state_of(operator, before)
    tables = [] if state is None else [state.blocks, state.prefixes]
    fused = FusedOperator(operator)
    written, room = written_in_room(fused, elements)
    outcomes = []
    for one, its_elements in ((FusedOperator(operator), elements), (fused, written)):
        prefixes, after = scan(one, its_elements, state)
        inputs = [its_elements, *tables, *weights_of(operator).values()]
        outcomes.append(outcome([prefixes, after.blocks, after.prefixes], inputs))
    assert_same(outcomes[1], outcomes[0], tolerance=0.0)
    assert torch.equal(written, elements)
    assert not room[28:60].isnan().any()  # states


@pytest.mark.parametrize("some", [slice(None, None, 2), slice(13)])
def test_room_is_for_one_scan_of_all_elements_as_they_were_written(some: slice) -> None:
    operator, elements = operator_of("up"), elements_of(1, 14)
    fused = FusedOperator(operator)
    written, room = written_in_room(fused, elements)
    found, wanted = (scan(by, written[:, some]).prefixes for by in (fused, operator))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    scan(fused, written)
    assert torch.equal(written, elements)
    assert room[14:].isnan().all()


def test_room_that_is_too_small_or_too_large_or_of_another_dtype() -> None:
    operator = operator_of("up")
    fused = FusedOperator(operator)
    many, room = written_in_room(fused, elements_of(4, 2))  # would keep what it does not need
    found, wanted = (scan(by, many).prefixes for by in (fused, operator))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert room[8:].isnan().all()
    written, room = written_in_room(fused, elements_of(1, 14))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        low, wanted = (scan(by, written).prefixes for by in (fused, FusedOperator(operator)))
    assert torch.equal(low, wanted)
    assert room[14:].isnan().all()
    one, _ = written_in_room(fused, elements_of(1, 1))
    state = state_of(operator, [7])  # more states than there is room for
    found, wanted = (scan(by, one, state).prefixes for by in (fused, operator))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", ["paper", "bare"])
def test_leaves_are_not_copied_for_the_scan(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = plain_and_fused(CONFIGS[config])
    fits, found = operators._fits, []
    monkeypatch.setattr(operators, "_fits", lambda *arguments: found.append(fits(*arguments)) or found[-1])
    tokens = tokens_of(2, 14)
    fused.loss(tokens, tokens).backward()
    with torch.no_grad(), fused.eval().weights_held():
        fused(tokens)
    assert found == [True, True]
