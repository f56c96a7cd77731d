"""Reading the blocks of prefixes: the definition, however the elements are batched, split, padded or packed."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logdepth import ScanState, Tree, TreeState, build_tree, scan
from logdepth.scanning import reference
from logdepth.scanning.plan_cache import PLANS
from tests.toy import (
    WIDTH,
    Counting,
    Toy,
    assert_same,
    boundaries,
    gradients,
    padded,
    random_elements,
    sequences,
)

row_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)
history_and_news = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6)


def visit(level: int, carry: Tensor, block: Tensor) -> Tensor:
    """Far from any symmetry: each visit depends on the level, on the block and on the visits before."""
    return torch.tanh(0.7 * carry + (level + 1) * block.roll(1, dims=-1) - 0.3 * block * carry)


def definition(operator: Toy, sequence: Tensor, start: int = 0) -> Tensor:
    """What prefixes of lengths start + 1 … n have seen after all visits, from zero."""
    seen = []
    for blocks in reference.sequence_blocks(operator, sequence)[start:]:
        carry = sequence.new_zeros(WIDTH)
        assert list(blocks) == sorted(blocks)
        for level, block in blocks.items():
            carry = visit(level, carry, block)
        seen.append(carry)
    return torch.stack(seen) if seen else sequence.new_zeros(0, WIDTH)


def visited(tree: Tree, count: int, *chosen: Sequence[int]) -> Tensor:
    """What `count` prefixes have seen after all visits, from zero."""
    carry = torch.zeros(count, WIDTH, dtype=torch.float64)
    levels = []
    for read in tree.reads(*chosen):
        seen = visit(read.level, carry.index_select(0, read.readers), read.blocks)
        carry = carry.index_copy(0, read.readers, seen)
        levels.append(read.level)
    assert levels == sorted(set(levels))
    return carry


@pytest.mark.parametrize("length", [*range(1, 18), 23, 31, 32, 33, 41, 61, 64, 65, 127, 131])
def test_reads_are_the_definition(length: int) -> None:
    operator, elements = Toy(), random_elements(2, length, WIDTH).requires_grad_()
    actual = visited(build_tree(operator, elements), 2 * length)
    expected = torch.cat([definition(operator, row) for row in elements])
    assert_same(actual, expected)
    inputs = [elements, *operator.parameters()]
    for ours, theirs in zip(gradients([actual], inputs), gradients([expected], inputs), strict=True):
        assert_same(ours, theirs, 1e-9)


def test_a_fold_of_what_is_read_is_the_prefix() -> None:
    """From the latest block to the earliest, an associative operator can fold onto the left."""
    elements = random_elements(3, 37, WIDTH)
    carry = torch.zeros(3 * 37, WIDTH, dtype=torch.float64)
    for read in build_tree(torch.add, elements).reads():
        carry = carry.index_add(0, read.readers, read.blocks)
    assert_same(carry.view(3, 37, WIDTH), elements.cumsum(1))


@settings(max_examples=25)
@given(lengths=row_lengths)
def test_padded_and_packed_sequences_are_separate(lengths: list[int]) -> None:
    operator, rows = Toy(), sequences(lengths)
    expected = [definition(operator, row) for row in rows]
    longest = max(lengths)
    batch = visited(build_tree(operator, padded(rows), lengths=lengths), len(lengths) * longest)
    for number, row in enumerate(expected):
        assert_same(batch.view(len(lengths), longest, WIDTH)[number, : len(row)], row)
    bounds = boundaries(lengths)
    assert_same(visited(build_tree(operator, torch.cat(rows), cu_seqlens=bounds), bounds[-1]), torch.cat(expected))


@settings(max_examples=25)
@given(splits=history_and_news)
def test_continuing_from_any_lengths_is_the_whole(splits: list[tuple[int, int]]) -> None:
    operator, wholes = Toy(), sequences([old + new for old, new in splits])
    olds, news = [old for old, _ in splits], [new for _, new in splits]
    before = [whole[:old] for whole, old in zip(wholes, olds, strict=True)]
    after = [whole[old:] for whole, old in zip(wholes, olds, strict=True)]
    state = build_tree(operator, padded(before), lengths=olds).state
    expected = [definition(operator, whole, old) for whole, old in zip(wholes, olds, strict=True)]
    packed = build_tree(operator, torch.cat(after), state, cu_seqlens=boundaries(news))
    assert_same(visited(packed, sum(news)), torch.cat(expected))
    batch = build_tree(operator, padded(after), state, lengths=news)
    seen = visited(batch, len(news) * max(news)).view(len(news), max(news), WIDTH)
    for number, row in enumerate(expected):
        assert_same(seen[number, : len(row)], row)
    scanned = scan(operator, padded(wholes), lengths=[len(whole) for whole in wholes]).state
    for found in (packed.state, batch.state):
        assert found.lengths.tolist() == scanned.lengths.tolist()
        assert_same(found.blocks, scanned.blocks)


@pytest.mark.parametrize("length", [1, 2, 3, 31, 64, 65, 131])
def test_one_by_one_is_the_whole(length: int) -> None:
    operator, elements = Toy(), random_elements(2, length, WIDTH)
    state, parts = TreeState.empty(2, WIDTH, dtype=torch.float64), []
    for element in elements.split(1, dim=1):
        tree = build_tree(operator, element, state)
        parts.append(visited(tree, 2))
        state = tree.state
    expected = torch.stack([definition(operator, row) for row in elements])
    assert_same(torch.stack(parts, dim=1), expected)


@settings(max_examples=25)
@given(length=st.integers(1, 70), cuts=st.lists(st.integers(0, 70), max_size=5))
def test_split_anywhere_is_the_whole_with_gradients(length: int, cuts: list[int]) -> None:
    operator, elements = Toy(), random_elements(2, length, WIDTH).requires_grad_()
    state, parts = None, []
    for start, end in pairwise([0, *sorted(min(cut, length) for cut in cuts), length]):
        tree = build_tree(operator, elements[:, start:end], state)
        parts.append(visited(tree, 2 * (end - start)).view(2, -1, WIDTH))
        state = tree.state
    actual = torch.cat(parts, dim=1)
    expected = visited(build_tree(operator, elements), 2 * length).view(2, -1, WIDTH)
    assert_same(actual, expected)
    inputs = [elements, *operator.parameters()]
    for ours, theirs in zip(gradients([actual], inputs), gradients([expected], inputs), strict=True):
        assert_same(ours, theirs, 1e-9)


@settings(max_examples=25)
@given(splits=history_and_news, data=st.data())
def test_chosen_prefixes(splits: list[tuple[int, int]], data: st.DataObject) -> None:
    """Also that of the old state itself, any of them more than once, and none."""
    operator, wholes = Toy(), sequences([old + new for old, new in splits])
    state = build_tree(
        operator,
        padded([whole[:old] for whole, (old, _) in zip(wholes, splits, strict=True)]),
        lengths=[old for old, _ in splits],
    ).state
    one = st.integers(0, len(splits) - 1).flatmap(
        lambda row: st.tuples(st.just(row), st.integers(splits[row][0], sum(splits[row])))
    )
    chosen = data.draw(st.lists(one, max_size=8))
    after = [whole[old:] for whole, (old, _) in zip(wholes, splits, strict=True)]
    tree = build_tree(operator, padded(after), state, lengths=[new for _, new in splits])
    found = visited(tree, len(chosen), [row for row, _ in chosen], [length for _, length in chosen])
    for carry, (row, length) in zip(found, chosen, strict=True):
        expected = definition(operator, wholes[row][:length])[-1] if length else torch.zeros(WIDTH).double()
        assert_same(carry, expected)


@settings(max_examples=25)
@given(lengths=row_lengths, data=st.data())
def test_selected_rows_go_on_as_they_would(lengths: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    operator, more = Toy(), random_elements(len(lengths), 5, WIDTH, seed=50)
    state = build_tree(operator, padded(sequences(lengths)), lengths=lengths).state
    expected = visited(build_tree(operator, more, state), 5 * len(lengths)).view(-1, 5, WIDTH)
    chosen = build_tree(operator, more[rows], state.select(rows))
    assert_same(visited(chosen, 5 * len(rows)).view(-1, 5, WIDTH), expected[rows])
    joined = TreeState.concatenate([state.select([row]) for row in rows])
    assert torch.equal(joined.blocks, state.select(rows).blocks)


@pytest.mark.parametrize(("length", "old"), [(1, 0), (5, 0), (6, 3), (3, 5), (8, 8), (0, 7)])
def test_gradcheck_into_the_incoming_state(length: int, old: int) -> None:
    operator = Toy()
    state = build_tree(operator, random_elements(2, old, WIDTH)).state
    elements = random_elements(2, length, WIDTH, seed=1).requires_grad_()

    def run(elements: Tensor, blocks: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        tree = build_tree(operator, elements, TreeState(state.row_lengths, blocks))
        last = visited(tree, 2, [0, 1], [old + length] * 2)
        return visited(tree, 2 * length), last, tree.state.blocks

    inputs = (elements, state.blocks.detach().requires_grad_(), *operator.parameters())
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_calls_are_logarithmic_and_merges_fewer_than_elements(length: int) -> None:
    counting = Counting()
    tree = build_tree(counting, random_elements(3, length, 1))
    assert len(counting.calls) == length.bit_length() - 1
    assert counting.rows == 3 * (length - length.bit_count())
    assert len(tree.reads()) == length.bit_length()


def test_a_state_owns_its_storage_and_holds_blocks_only() -> None:
    elements = random_elements(1, 13, WIDTH)
    state = build_tree(lambda left, right: right, elements).state
    assert state.nbytes == WIDTH * 8 * 3
    assert state.blocks.untyped_storage().data_ptr() != elements.untyped_storage().data_ptr()
    assert repr(state) == "TreeState(lengths=[13], width=3, dtype=torch.float64, device='cpu')"
    assert not build_tree(Toy(), elements.requires_grad_()).state.detach().blocks.requires_grad
    assert state.to(torch.float32).blocks.dtype == torch.float32


def test_nothing_new_keeps_the_state() -> None:
    state = build_tree(Toy(), random_elements(2, 7, WIDTH)).state
    tree = build_tree(Toy(), padded(sequences([3, 4])), state, lengths=[0, 0])
    assert tree.state is state
    assert tree.reads() == []
    assert [read.level for read in tree.reads([1], [7])] == [0, 1, 2]
    assert build_tree(Toy(), random_elements(0, WIDTH), cu_seqlens=[0]).reads() == []
    assert build_tree(Toy(), random_elements(0, 5, WIDTH)).reads([], []) == []


def test_lists_are_made_once() -> None:
    def run(lengths: list[int]) -> None:
        tree = build_tree(torch.add, random_elements(2, 9, 1), lengths=lengths)
        tree.reads()
        tree.reads([0, 1, 1], [3, 4, 2])

    run([9, 5])
    built = PLANS.num_built
    run([9, 5])
    assert PLANS.num_built == built
    run([9, 6])
    assert PLANS.num_built == built + 3


def test_reads_in_inference_mode_leave_later_ones_alone() -> None:
    elements = random_elements(2, 21, WIDTH)
    with torch.inference_mode():
        expected = visited(build_tree(Toy(), elements), 42).clone()
    elements = elements.clone().requires_grad_()
    actual = visited(build_tree(Toy(), elements), 42)
    assert_same(actual.detach(), expected)
    actual.sum().backward()


def test_what_makes_no_sense_is_refused() -> None:
    tree = build_tree(Toy(), random_elements(2, 5, WIDTH), build_tree(Toy(), random_elements(2, 3, WIDTH)).state)
    with pytest.raises(ValueError, match="give both rows and prefixes, or neither"):
        tree.reads([0])
    with pytest.raises(ValueError, match="rows and prefixes must be equally many; got 2 and 1"):
        tree.reads([0, 1], [4])
    with pytest.raises(IndexError, match="row 2 is out of range for a tree of 2 sequences"):
        tree.reads([0, 2], [4, 4])
    with pytest.raises(ValueError, match="sequence 1 has no prefix of length 2 here; its state ends at 3, and its new"):
        tree.reads([0, 1], [4, 2])
    with pytest.raises(ValueError, match="sequence 0 has no prefix of length 9 here"):
        tree.reads([0], [9])
    with pytest.raises(TypeError, match="state must be a TreeState, as an earlier tree returned it; got Tensor"):
        build_tree(Toy(), random_elements(2, 5, WIDTH), torch.zeros(2))
    with pytest.raises(TypeError, match="state must be a ScanState, as an earlier scan returned it; got TreeState"):
        scan(Toy(), random_elements(2, 5, WIDTH), tree.state)
    assert isinstance(ScanState.empty(1, 2), TreeState)
