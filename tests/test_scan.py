"""The laws of the scan: it is its definition, however the elements are batched, split, padded or packed."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logdepth import ScanState, reduce, scan
from logdepth.scanning import reference
from tests.toy import (
    LENGTHS,
    WIDTH,
    Toy,
    assert_same,
    boundaries,
    definition,
    gradients,
    padded,
    random_elements,
    sequences,
    toy_pair,
)

row_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)
history_and_news = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6)


def weights(pair: tuple[Toy, Toy]) -> list[Tensor]:
    return [weight for operator in pair for weight in operator.parameters()]


def test_the_definition_is_the_binary_decomposition() -> None:
    def spell(left: Tensor, right: Tensor) -> Tensor:
        """Keeps the parenthesisation: 2 left + 3 right tells every tree of these sizes apart."""
        return 2 * left + 3 * right

    e = torch.arange(1, 14, dtype=torch.float64)[:, None] ** 3
    o = spell
    eight = o(o(o(e[0], e[1]), o(e[2], e[3])), o(o(e[4], e[5]), o(e[6], e[7])))
    thirteen = o(o(eight, o(o(e[8], e[9]), o(e[10], e[11]))), e[12])
    assert reference.scan(spell, e[None])[0, 12] == thirteen
    assert scan(spell, e[None]).prefixes[0, 12] == thirteen


@pytest.mark.parametrize("length", LENGTHS)
def test_scan_is_its_definition(length: int) -> None:
    pair = toy_pair()
    elements = random_elements(2, length, WIDTH).requires_grad_()
    actual, expected = scan(pair, elements).prefixes, reference.scan(pair, elements)
    assert_same(actual, expected)
    inputs = [elements, *weights(pair)]
    for ours, theirs in zip(gradients([actual], inputs), gradients([expected], inputs), strict=True):
        assert_same(ours, theirs, 1e-9)


def test_scan_is_its_definition_at_2976() -> None:
    pair = toy_pair()
    elements = random_elements(1, 2976, WIDTH).requires_grad_()
    actual, expected = scan(pair, elements).prefixes, reference.scan(pair, elements)
    assert_same(actual, expected)
    for ours, theirs in zip(gradients([actual], [elements]), gradients([expected], [elements]), strict=True):
        assert_same(ours, theirs, 1e-9)


@pytest.mark.parametrize("length", LENGTHS)
def test_reduce_is_the_last_prefix(length: int) -> None:
    pair = toy_pair()
    elements = random_elements(3, length, WIDTH).requires_grad_()
    actual, expected = reduce(pair, elements), scan(pair, elements).prefixes[:, -1]
    assert_same(actual, expected)
    inputs = [elements, *weights(pair)]
    for ours, theirs in zip(gradients([actual], inputs), gradients([expected], inputs), strict=True):
        assert_same(ours, theirs, 1e-9)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_reduce_of_ragged_rows_is_each_alone(lengths: list[int]) -> None:
    pair, rows = toy_pair(), sequences(lengths)
    expected = torch.stack([definition(pair, row)[-1] for row in rows])
    assert_same(reduce(pair, padded(rows), lengths=lengths), expected)
    assert_same(reduce(pair, torch.cat(rows), cu_seqlens=boundaries(lengths)), expected)


@pytest.mark.parametrize("length", [1, 2, 3, 31, 64, 65, 131])
def test_stream_is_scan(length: int) -> None:
    pair = toy_pair()
    elements = random_elements(2, length, WIDTH)
    whole = scan(pair, elements)
    state, prefixes = None, []
    for position in range(length):
        one, state = scan(pair, elements[:, position : position + 1], state)
        prefixes.append(one)
    assert_same(torch.cat(prefixes, dim=1), whole.prefixes)
    assert_same(state.blocks, whole.state.blocks)
    assert_same(state.prefixes, whole.state.prefixes)
    assert state.lengths.tolist() == [length, length]


@given(cuts=st.lists(st.integers(0, 25), min_size=1, max_size=5))
def test_split_anywhere_is_whole(cuts: list[int]) -> None:
    """Values, and gradients through the states that chunks hand on."""
    pair = toy_pair()
    elements = random_elements(2, sum(cuts), WIDTH).requires_grad_()
    whole = scan(pair, elements)
    state, prefixes = None, []
    for start, stop in pairwise(boundaries(cuts)):
        chunk, state = scan(pair, elements[:, start:stop], state)
        prefixes.append(chunk)
    actual = torch.cat(prefixes, dim=1)
    assert_same(actual, whole.prefixes)
    assert_same(state.prefixes, whole.state.prefixes)
    inputs = [elements, *weights(pair)]
    ours = gradients([actual, state.blocks, state.prefixes], inputs) if sum(cuts) else ()
    theirs = gradients([whole.prefixes, whole.state.blocks, whole.state.prefixes], inputs) if sum(cuts) else ()
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other, 1e-9)


@given(lengths=row_lengths)
def test_packed_is_each_alone(lengths: list[int]) -> None:
    pair, documents = toy_pair(), sequences(lengths)
    packed = torch.cat(documents).requires_grad_()
    result = scan(pair, packed, cu_seqlens=boundaries(lengths))
    expected = torch.cat([definition(pair, part) for part in packed.split(lengths)])
    assert result.state.lengths.tolist() == lengths
    assert_same(result.prefixes, expected)
    if sum(lengths):
        inputs = [packed, *weights(pair)]
        for ours, theirs in zip(gradients([result.prefixes], inputs), gradients([expected], inputs), strict=True):
            assert_same(ours, theirs, 1e-9)


@given(lengths=row_lengths)
def test_padded_is_unpadded(lengths: list[int]) -> None:
    pair, rows = toy_pair(), sequences(lengths)
    batch = padded(rows).requires_grad_()
    result = scan(pair, batch, lengths=torch.tensor(lengths))
    for number, length in enumerate(lengths):
        assert_same(result.prefixes[number, :length], definition(pair, rows[number]))
        assert (result.prefixes[number, length:] == 0).all()
    if sum(lengths):
        (grad,) = gradients([result.prefixes], [batch])
        alone = [row.requires_grad_() for row in rows]
        weight = random_elements(*batch.shape, seed=99)
        for number, length in enumerate(lengths):
            assert (grad[number, length:] == 0).all()
            if length:
                loss = (definition(pair, alone[number]) * weight[number, :length]).sum()
                assert_same(grad[number, :length], torch.autograd.grad(loss, alone[number])[0], 1e-9)


@given(both=history_and_news, packed=st.booleans())
def test_mixed_length_continuation_is_each_alone(both: list[tuple[int, int]], packed: bool) -> None:
    pair = toy_pair()
    wholes = sequences([old + new for old, new in both])
    olds, news = [old for old, _ in both], [new for _, new in both]
    first = [whole[:old] for whole, old in zip(wholes, olds, strict=True)]
    second = [whole[old:] for whole, old in zip(wholes, olds, strict=True)]
    state = scan(pair, padded(first), lengths=olds).state
    if packed:
        result = scan(pair, torch.cat(second), state, cu_seqlens=boundaries(news))
        answers = result.prefixes.split(news)
    else:
        result = scan(pair, padded(second), state, lengths=news)
        answers = [row[:new] for row, new in zip(result.prefixes, news, strict=True)]
    assert result.state.lengths.tolist() == [old + new for old, new in both]
    for number, (whole, old) in enumerate(zip(wholes, olds, strict=True)):
        assert_same(answers[number], definition(pair, whole)[old:])
        alone = scan(pair, whole[None]).state
        row = result.state.select([number])
        assert_same(row.blocks, alone.blocks)
        assert_same(row.prefixes, alone.prefixes)


@given(both=history_and_news)
def test_mixed_length_continuation_has_the_gradients_of_each_alone(both: list[tuple[int, int]]) -> None:
    pair = toy_pair()
    wholes = [one.requires_grad_() for one in sequences([old + new for old, new in both])]
    olds, news = [old for old, _ in both], [new for _, new in both]
    state = ScanState.concatenate(
        [scan(pair, whole[None, :old]).state for whole, old in zip(wholes, olds, strict=True)]
    )
    packed = torch.cat([whole[old:] for whole, old in zip(wholes, olds, strict=True)])
    if not len(packed):
        return
    ours = gradients([scan(pair, packed, state, cu_seqlens=boundaries(news)).prefixes], wholes)
    alone = [scan(pair, whole[None]).prefixes[0, old:] for whole, old in zip(wholes, olds, strict=True)]
    theirs = gradients([torch.cat(alone)], wholes)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other, 1e-9)


@given(length=st.integers(2, 70), data=st.data())
def test_causal(length: int, data: st.DataObject) -> None:
    """Changing an element changes its own prefix, and none before it; the prefixes never see the total length."""

    def operator(left: Tensor, right: Tensor) -> Tensor:
        return 0.5 * left + right

    at = data.draw(st.integers(0, length - 1))
    elements = random_elements(1, length, WIDTH)
    changed = elements.clone()
    changed[:, at] += 1
    before, after = scan(operator, elements).prefixes, scan(operator, changed).prefixes
    assert torch.equal(before[:, :at], after[:, :at])
    assert ((before[:, at] - after[:, at]).abs() > 0.9).all()
    assert torch.equal(scan(operator, elements[:, : at + 1]).prefixes, before[:, : at + 1])


@given(lengths=row_lengths, data=st.data())
def test_continuing_from_reordered_rows_is_reordering_the_continuation(lengths: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    pair = toy_pair()
    state = scan(pair, padded(sequences(lengths)), lengths=lengths).state
    more = random_elements(len(lengths), 5, WIDTH, seed=50)
    expected = scan(pair, more, state)
    actual = scan(pair, more[rows], state.select(rows))
    assert_same(actual.prefixes, expected.prefixes[rows])
    reordered = expected.state.select(rows)
    assert actual.state.lengths.tolist() == reordered.lengths.tolist()
    assert_same(actual.state.blocks, reordered.blocks)
    assert_same(actual.state.prefixes, reordered.prefixes)


@pytest.mark.parametrize(("length", "old"), [(1, 0), (5, 0), (6, 3), (3, 5), (8, 8), (7, 1)])
def test_gradcheck(length: int, old: int) -> None:
    pair = toy_pair()
    state = scan(pair, random_elements(2, old, WIDTH)).state
    elements = random_elements(2, length, WIDTH, seed=1).requires_grad_()
    blocks, prefixes = state.blocks.detach().requires_grad_(), state.prefixes.detach().requires_grad_()

    def run(elements: Tensor, blocks: Tensor, prefixes: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        result = scan(pair, elements, ScanState(state.row_lengths, blocks, prefixes))
        return result.prefixes, result.state.blocks, result.state.prefixes

    inputs = (elements, blocks, prefixes, *weights(pair))
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_the_sweeps_use_their_own_operators() -> None:
    up_rows, down_rows = [], []

    def up(left: Tensor, right: Tensor) -> Tensor:
        up_rows.append(len(left))
        return left

    def down(left: Tensor, right: Tensor) -> Tensor:
        down_rows.append(len(left))
        return left

    scan((up, down), random_elements(1, 13, 2))
    assert sum(up_rows) == 13 - 3  # 13 = 0b1101 leaves three blocks
    assert sum(down_rows) == 13 - 4  # 1, 2, 4 and 8 are blocks as they stand


def test_prefixes_of_nothing_are_in_the_graph() -> None:
    elements = padded(sequences([3, 4])).requires_grad_()
    scan(Toy(), elements, lengths=[0, 0]).prefixes.sum().backward()
    assert (elements.grad == 0).all()


def test_a_scan_in_inference_mode_leaves_later_ones_alone() -> None:
    elements = random_elements(2, 83, WIDTH)
    with torch.inference_mode():
        expected = scan(Toy(), elements).prefixes.clone()
    elements = elements.clone().requires_grad_()
    actual = scan(Toy(), elements).prefixes
    assert_same(actual.detach(), expected)
    actual.sum().backward()


def test_shapes_without_data() -> None:
    elements = torch.empty(2, 13, WIDTH, device="meta")
    result = scan(lambda left, right: left + right, elements)
    assert result.prefixes.shape == elements.shape
    assert result.state.nbytes == 2 * 2 * 3 * WIDTH * 4
    assert scan(lambda left, right: left + right, torch.empty(2, 5, 0)).prefixes.shape == (2, 5, 0)


@pytest.mark.parametrize("shape", [(0, 0, 3), (0, 5, 3), (2, 0, 3)])
def test_nothing_in_nothing_out(shape: tuple[int, int, int]) -> None:
    elements = torch.empty(shape, dtype=torch.float64)
    result = scan(Toy(), elements)
    assert result.prefixes.shape == elements.shape
    assert result.state.lengths.tolist() == [0] * shape[0]
    assert result.state.nbytes == 0


def test_scanning_nothing_more_keeps_the_state() -> None:
    first = scan(Toy(), random_elements(2, 7, WIDTH))
    again = scan(Toy(), random_elements(2, 0, WIDTH), first.state)
    assert again.state is first.state
    nowhere = scan(Toy(), padded(sequences([3, 4])), first.state, lengths=[0, 0])
    assert nowhere.state is first.state
    assert (nowhere.prefixes == 0).all()
    packed = scan(Toy(), random_elements(0, WIDTH), first.state, cu_seqlens=[0, 0, 0])
    assert packed.state is first.state


def test_no_documents_at_all() -> None:
    result = scan(Toy(), random_elements(0, WIDTH), cu_seqlens=[0])
    assert result.prefixes.shape == (0, WIDTH)
    assert len(result.state) == 0
    assert reduce(Toy(), random_elements(0, WIDTH), cu_seqlens=[0]).shape == (0, WIDTH)


def test_answers_do_not_share_memory_with_elements() -> None:
    """Not even those of single elements, which are their own prefixes."""
    elements = random_elements(2, 1, WIDTH)
    for answer in (scan(Toy(), elements).prefixes, reduce(Toy(), elements)):
        before = elements.clone()
        answer.zero_()
        assert torch.equal(elements, before)


def test_elements_need_not_be_contiguous() -> None:
    elements = random_elements(WIDTH, 9, 2).permute(2, 1, 0)
    assert not elements.is_contiguous()
    assert_same(scan(Toy(), elements).prefixes, reference.scan(Toy(), elements))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    operator = Toy().to(dtype)
    elements = random_elements(2, 37, WIDTH).to(dtype)
    result = scan(operator, elements)
    assert result.prefixes.dtype == result.state.dtype == dtype
    expected = reference.scan(operator, elements)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert_same(result.prefixes, expected, tolerance)
