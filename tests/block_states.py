"""States of models and blocks: all their tensors, and whether two of them are the same."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from logdepth.blocks import KeyValueState
from logdepth.scanning import TreeState


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def tensors_of(state: Any) -> Iterator[Tensor]:
    """Every tensor of a state, of however many parts."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, TreeState):
        yield from (state.lengths, *(getattr(state, table) for table in state.tables))
    elif state is not None:
        for part in state:
            yield from tensors_of(part)


def clones_of(state: Any) -> list[Tensor]:
    return [one.detach().clone() for one in tensors_of(state)]


def same_state(actual: Any, expected: Any) -> None:
    """Also where columns of keys and values are in another order, which nothing reads."""
    assert type(actual) is type(expected)
    if isinstance(actual, KeyValueState):
        for mine, others in zip(_rows_of(actual), _rows_of(expected), strict=True):
            for one, other in zip(mine, others, strict=True):
                close(one, other)
    elif isinstance(actual, Tensor):
        close(actual, expected)
    elif isinstance(actual, TreeState):
        for one, other in zip(tensors_of(actual), tensors_of(expected), strict=True):
            close(one, other)
    elif actual is not None:
        for one, other in zip(actual, expected, strict=True):
            same_state(one, other)


def _rows_of(state: KeyValueState) -> Iterator[tuple[Tensor, ...]]:
    """Positions, keys and values of each row, in the order of positions."""
    for row, positions in enumerate(state.positions):
        order = positions.argsort()[(positions < 0).sum() :]
        yield positions[order], state.keys[row, :, order], state.values[row, :, order]
