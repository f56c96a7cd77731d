"""Blocks read by kernels are those that plain torch reads: values and gradients, in the same bits each time."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from logdepth.ops import block_reading, block_reading_kernel, kernels
from logdepth.ops.block_reading import BlockRead, read_blocks
from logdepth.scanning import read_index as reads
from logdepth.scanning.read_index import read_index
from tests.memory_chunks import DEVICE, Chunks

CASES: dict[str, dict[str, Any]] = {
    "one-piece": {"counts": [1]},
    "two-pieces": {"counts": [2], "heads": 2},
    "many-levels": {"counts": [19], "levels": 3},
    "ragged": {"counts": [5, 0, 3, 1], "heads": 2, "levels": 1},
    "continued": {"counts": [3, 0, 4, 1], "old": [5, 2, 0, 7]},
    "fold": {"counts": [4, 3], "weighted": False},
    "odd-widths": {"counts": [4], "key_width": 24, "value_width": 40, "size": 7},
    "narrow": {"counts": [3], "key_width": 3, "value_width": 5, "size": 1},
    "wide-keys": {"counts": [3], "key_width": 128, "value_width": 16},
    "wide-values": {"counts": [3], "key_width": 16, "value_width": 128, "size": 16},
    "wide-values-of-many-tokens": {"counts": [3], "key_width": 16, "value_width": 100, "size": 64},
    "wide-keys-of-many-tokens": {"counts": [3], "key_width": 100, "value_width": 16, "size": 64},
    "chunks-of-32": {"counts": [3], "key_width": 32, "value_width": 64, "size": 32},
    "chunks-of-64": {"counts": [4], "key_width": 64, "value_width": 64, "size": 64, "heads": 2},
}


def assert_exact(chunks: Chunks, tolerance: float = 3e-6) -> None:
    found, exact = chunks.run(torch.float32, by_kernels=True), chunks.run(torch.float64, by_kernels=False)
    for name, one in found.items():
        assert one.shape == exact[name].shape
        assert (one.double() - exact[name]).norm() <= tolerance * exact[name].norm(), name


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    assert_exact(Chunks.random(**CASES[name]))


def test_blocks_with_many_readers_are_shared_among_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "MAX_SHARE", 2)
    chunks = Chunks.random([13, 6], heads=2)
    assert_exact(chunks)
    with kernels(True):
        table = chunks.tree({name: one.float() for name, one in chunks.inputs.items()}).table(*chunks.readers())
    assert table is not None
    assert table.reads.num_partial == 2 + 3  # of 13 pieces, 4 and 5 read the same block; of 6 at most 2
    assert len(table.reads.summed) == 2


def test_a_piece_may_take_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reading_kernel, "ROWS", 16)
    assert_exact(Chunks.random([4], size=40))


def test_the_same_bits_each_time() -> None:
    chunks = Chunks.random([7, 2], heads=2, size=20)
    once, again = (chunks.run(torch.float32, by_kernels=True) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@settings(max_examples=50)
@given(
    which=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 12)), max_size=40, unique=True),
    share=st.integers(1, 5),
)
def test_lists_of_reads(which: list[tuple[int, int, int]], share: int) -> None:
    """Every read is listed once for its piece and once in a share of its block; every block is written once."""
    columns = [np.array(column, dtype=np.int64) for column in zip(*which, strict=True)] or [np.zeros(0, np.int64)] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads, "MAX_SHARE", share)
        index = read_index(torch.device("cpu"), *columns, num_readers=10, num_blocks=13)
    first, block, level, entry, reader = (one.tolist() for one in index[:5])
    start, target, summed, sum_start = (one.tolist() for one in index[5:9])
    found = []
    for piece in range(10):
        entries = range(first[piece], first[piece + 1])
        assert [level[one] for one in entries] == sorted(level[one] for one in entries)
        found += [(piece, level[one], block[one]) for one in entries]
    assert sorted(found) == sorted(which)

    places = list(target)
    for number, one in enumerate(summed):
        for place in range(sum_start[number], sum_start[number + 1]):
            places[places.index(13 + place)] = one
    assert set(places) == set(range(13))
    assert sorted(target)[13 - len(summed) :] == [13 + one for one in range(index.num_partial)]
    of_shares = []
    for number, place in enumerate(places):
        part = range(start[number], start[number + 1])
        assert len(part) <= share
        of_shares += [entry[one] for one in part]
        assert all(block[entry[one]] == place and found[entry[one]][0] == reader[one] for one in part)
    assert sorted(of_shares) == list(range(len(which)))
    assert index.nbytes == sum(one.nbytes for one in index[:9])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)], ids=str)
def test_outputs_and_their_gradients_lie_as_they_may(order: tuple[int, ...]) -> None:
    """By head and then by token, or the other way round, as tokens do; or with gaps."""
    chunks = Chunks.random([3], heads=2, size=5)
    inputs = {name: one.float() for name, one in chunks.inputs.items()}
    back = [order.index(one) for one in range(4)]
    results = []
    for apart in (False, True):
        outputs, queries = inputs["outputs"].clone().requires_grad_(), inputs["queries"].clone().requires_grad_()
        laid = outputs
        if apart:
            laid = torch.cat([outputs.permute(order)] * 2, dim=1)[:, : outputs.shape[order[1]]].permute(back)
        with kernels(True):
            read = read_blocks(
                laid, queries, list, chunks.tree(inputs).table(*chunks.readers()), inputs["slopes"], inputs["bias"]
            )
        grad = torch.linspace(-1, 1, read.numel(), device=DEVICE).view(read.shape)
        grad = grad.permute(order).contiguous().permute(back) if apart else grad
        results.append((read, *torch.autograd.grad(read, [outputs, queries], grad)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_where_there_is_no_kernel_plain_torch_reads() -> None:
    chunks = Chunks.random([3])
    with kernels(True):
        assert chunks.tree(chunks.inputs).table(*chunks.readers()) is None  # float64
    with kernels(False):
        assert chunks.tree({name: one.float() for name, one in chunks.inputs.items()}).table(*chunks.readers()) is None
    wide = torch.zeros(1, 1, 2, 130, device=DEVICE)
    with kernels(True):
        assert block_reading.has_kernel(wide[..., :128], 128)
        assert not block_reading.has_kernel(wide, 16)
        assert not block_reading.has_kernel(wide[..., :16], 130)
        assert not block_reading.has_kernel(wide[..., :16].bfloat16(), 16)


def test_pieces_that_read_nothing_stay_as_they_are() -> None:
    outputs, queries = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    read = BlockRead(0, torch.tensor([1]), torch.randn(1, 4 * 8))
    found = read_blocks(outputs, queries, lambda: [read], None)
    assert torch.equal(found[0], outputs[0])
    assert not torch.equal(found[1], outputs[1])


def test_second_derivatives_are_refused() -> None:
    chunks = Chunks.random([3])
    inputs = {name: one.float().requires_grad_() for name, one in chunks.inputs.items()}
    with kernels(True):
        tree = chunks.tree(inputs)
        read = read_blocks(inputs["outputs"], inputs["queries"], list, tree.table(*chunks.readers()))
    with pytest.raises(RuntimeError, match="kernels do not support create_graph=True"):
        torch.autograd.grad(read.square().sum(), inputs["queries"], create_graph=True)
