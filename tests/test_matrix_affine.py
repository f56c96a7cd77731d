"""Merges of affine maps by kernels: of pairs and of whole trees, in place of plain torch's."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from logdepth import build_tree, scan
from logdepth.operators.matrix_affine import MatrixAffineOperator
from logdepth.ops import kernels
from tests.memory_chunks import DEVICE, Chunks, chunk_elements

WIDTHS = [(16, 16), (3, 5), (24, 40), (64, 64), (128, 16), (16, 128)]


def assert_close(actual: Tensor, exact: Tensor) -> None:
    assert actual.shape == exact.shape
    assert actual.dtype == torch.float32
    assert (actual.double() - exact).norm() <= 2e-6 * exact.norm()


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_merge(widths: tuple[int, int]) -> None:
    operator = MatrixAffineOperator(2, *widths)
    exact = [chunk_elements(operator, 3).requires_grad_() for _ in range(2)]
    operands = [one.detach().float().requires_grad_() for one in exact]
    direction = torch.randn(3, operator.width, device=DEVICE)
    with kernels(True):
        found = operator(*operands)
        again = operator(*operands)
    expected = operator(*exact)
    assert torch.equal(found, again)
    assert_close(found, expected)
    found_grads = torch.autograd.grad(found, operands, direction)
    for one, other in zip(found_grads, torch.autograd.grad(expected, exact, direction.double()), strict=True):
        assert_close(one, other)


def test_no_rows_and_rows_apart() -> None:
    operator = MatrixAffineOperator(1, 4, 4)
    rows = chunk_elements(operator, 6).float()
    with kernels(True):
        assert operator(rows[:0], rows[:0]).shape == (0, operator.width)
        found = operator(rows[::2], rows[1::2])
    assert_close(found, operator(rows[::2].double(), rows[1::2].double()))


def test_a_scan() -> None:
    operator = MatrixAffineOperator(1, 16, 16)
    exact = chunk_elements(operator, 7)[None].requires_grad_()
    elements = exact.detach().float().requires_grad_()
    with kernels(True):
        found = scan(operator, elements).prefixes
    expected = scan(operator, exact).prefixes
    assert_close(found, expected)
    (grad,), (exact_grad,) = (torch.autograd.grad(y.sum(), x) for y, x in ((found, elements), (expected, exact)))
    assert_close(grad, exact_grad)


@pytest.mark.parametrize(
    ("counts", "old"),
    [([6], [0]), ([1, 5, 0, 8], [0, 0, 0, 0]), ([3, 0, 4, 1], [5, 2, 0, 7]), ([0, 0], [3, 4]), ([2, 1], [16, 1])],
    ids=str,
)
def test_a_tree_is_the_plain_one(counts: list[int], old: list[int]) -> None:
    """The state, what prefixes read as levels, and the same from the table."""
    chunks = Chunks.random(counts, old=old)
    inputs = {name: one.float() for name, one in chunks.inputs.items()}
    with kernels(True):
        tree = chunks.tree(inputs)
        continued = build_tree(chunks.operator, inputs["elements"], tree.state, cu_seqlens=[0, *accumulate(counts)])
    plain = chunks.tree(chunks.inputs)
    again = build_tree(chunks.operator, chunks.inputs["elements"], plain.state, cu_seqlens=[0, *accumulate(counts)])
    for one, other in ((tree, plain), (continued, again)):
        assert one.state.lengths.tolist() == other.state.lengths.tolist()
        assert_close(one.state.blocks, other.state.blocks)

    rows, prefixes = chunks.readers()
    rows, prefixes = [*rows, *range(len(counts))], [*prefixes, *(a + b for a, b in zip(counts, old, strict=True))]
    for chosen in ((), (rows, prefixes)):
        expected = {
            (read.level, reader): block
            for read in plain.reads(*chosen)
            for reader, block in zip(read.readers.tolist(), read.blocks, strict=True)
        }
        table = tree.table(*chosen)
        assert table is not None
        every = torch.cat([table.leaves, table.merged])
        first, block, level = (one.tolist() for one in table.reads[:3])
        found = {
            (level[entry], reader): every[block[entry]]
            for reader in range(len(first) - 1)
            for entry in range(first[reader], first[reader + 1])
        }
        by_level = {
            (read.level, reader): block
            for read in tree.reads(*chosen)
            for reader, block in zip(read.readers.tolist(), read.blocks, strict=True)
        }
        assert set(found) == set(by_level) == set(expected)
        for key, one in expected.items():
            assert_close(found[key], one)
            assert torch.equal(found[key], by_level[key])


def test_what_was_changed_merges_as_it_says() -> None:
    class Reversed(MatrixAffineOperator):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return super().forward(right, left)

    rows = torch.zeros(2, 2 * 16 * 32, device=DEVICE)
    operator = MatrixAffineOperator(2, 16, 16)
    with kernels(True):
        assert operator.merges_with(rows) is not None
        assert operator.merges_with(rows.double()) is None
        assert Reversed(2, 16, 16).merges_with(rows) is None
        assert MatrixAffineOperator(1, 8, 130).merges_with(rows) is None
        operator.register_forward_hook(lambda *_: None)
        assert operator.merges_with(rows) is None
    with kernels(False):
        assert MatrixAffineOperator(2, 16, 16).merges_with(rows) is None


def test_a_table_of_the_plain_tree_is_none() -> None:
    assert build_tree(torch.add, torch.randn(1, 5, 3)).table() is None
