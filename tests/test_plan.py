"""Index planning, without tensors: plans are obeyed with symbols, so that every parenthesis can be read.

Fast and on its own, because mutation testing runs it for every mutant of plan.py and lengths.py.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest

from logdepth.scanning.lengths import Lengths
from logdepth.scanning.plan import MAX_PARTS, Part, Plan, RowsToTake, _at, _RowsMaker, build_plan


def symbols(items: list[Any]) -> np.ndarray:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def take(rows: RowsToTake, matrices: list[np.ndarray]) -> np.ndarray:
    """Read as the sweeps do, and check what a plan promises about what it reads."""
    if rows.index is not None:
        assert (rows.whole, rows.parts) == (None, ())
        assert (rows.index >= 0).all()
        assert len(rows.indexed) > 1
        assert all(len(matrices[matrix]) for matrix in rows.indexed), "an empty matrix is never worth reading"
        taken = np.concatenate([matrices[matrix] for matrix in rows.indexed])[rows.index]
    else:
        assert len(rows.parts) <= MAX_PARTS
        assert rows.indexed == ()
        taken = np.concatenate([symbols([]), *(take_part(part, matrices[part.matrix]) for part in rows.parts)])
    wholes = [number for number, matrix in enumerate(matrices) if list(taken) == list(matrix)]
    if not rows.count:
        assert rows.whole == (wholes[0] if wholes else None), "an empty matrix at hand saves cutting one"
    elif len(rows.parts) == 1 and rows.parts[0].matrix in wholes:
        assert rows.whole == rows.parts[0].matrix
    else:
        assert rows.whole is None
    assert len(taken) == rows.count
    return taken


def take_part(part: Part, matrix: np.ndarray) -> np.ndarray:
    assert part.count > 0
    if part.index is None:
        taken = matrix[part.start : part.start + part.count]
    else:
        assert part.start == 0
        assert (part.index >= 0).all()
        assert (np.diff(part.index) != 1).any(), "consecutive rows need no index"
        taken = matrix[part.index]
    assert len(taken) == part.count
    return taken


def merged(name: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    assert len(left) == len(right) > 0, "no call without rows"
    return symbols([(name, *pair) for pair in zip(left, right, strict=True)])


def obey(plan: Plan, elements: np.ndarray, blocks: np.ndarray, prefixes: np.ndarray, edges: np.ndarray) -> Any:
    """The sweeps of sweep.py, on symbols."""
    assert plan.num_stored == len(blocks) == len(prefixes)
    nodes = [take(plan.elements, [elements])]
    for level in plan.levels[:-1]:
        left, right = take(level.up_left, [blocks, nodes[-1]]), take(level.up_right, [nodes[-1]])
        nodes.append(merged("up", left, right))
    before = symbols([])
    new_blocks, new_prefixes = [], []
    for level in reversed(plan.levels[plan.lowest :]):
        fresh = nodes.pop()
        extended, extending = take(level.extended, [before, edges]), take(level.extending, [fresh])
        folded = merged("down", extended, extending) if level.extended.count else symbols([])
        ending = take(level.ending, [prefixes, fresh, folded])
        assert len(edges) or not level.keeps_edges, "there is nothing to keep"
        edges = np.concatenate([edges, ending]) if level.keeps_edges or not len(ending) else ending
        before = take(level.before, [prefixes, fresh, folded, extended, edges])
        new_blocks.extend(take(level.blocks, [blocks, fresh]))
        new_prefixes.extend(ending)
    order = range(len(new_blocks)) if plan.by_document is None else plan.by_document
    assert plan.by_document is None or list(order) != sorted(order), "what is in order needs no index"
    outputs = list(take(plan.outputs, [before]))
    return outputs, [new_blocks[number] for number in order], [new_prefixes[number] for number in order]


class Document:
    """One sequence, and what the definition says of it. Elements are (document, position)."""

    def __init__(self, number: int) -> None:
        self.number = number

    def block(self, level: int, node: int) -> Any:
        if level == 0:
            return (self.number, node)
        return ("up", self.block(level - 1, 2 * node), self.block(level - 1, 2 * node + 1))

    def state(self, length: int) -> list[tuple[int, Any, Any]]:
        """(level, block, the prefix that ends with it), highest level first."""
        held: list[tuple[int, Any, Any]] = []
        done = 0
        for level in reversed(range(length.bit_length())):
            if length >> level & 1:
                block = self.block(level, done >> level)
                held.append((level, block, ("down", held[-1][2], block) if held else block))
                done += 1 << level
        return held


def table(documents: list[Document], lengths: list[int]) -> tuple[list[Any], list[Any]]:
    """The state's two tables: by level, highest first, and then by document."""
    held = [
        (-level, document.number, block, prefix)
        for document, length in zip(documents, lengths, strict=True)
        for level, block, prefix in document.state(length)
    ]
    held.sort(key=lambda one: one[:2])
    return [block for *_, block, _ in held], [prefix for *_, prefix in held]


def check(olds: list[int], news: list[int], stride: int | None = None, every_prefix: bool = True) -> Plan:
    """Plan it, obey it, and compare with the definition; returns the plan."""
    documents = [Document(number) for number in range(len(olds))]
    totals = [old + new for old, new in zip(olds, news, strict=True)]
    old, new = Lengths.of(np.array(olds, dtype=np.int64)), Lengths.of(np.array(news, dtype=np.int64))
    depth = old.levels_touched(old.plus(new))
    above, below = old.split(depth)
    starts = np.cumsum([0, *news[:-1]]) if stride is None else np.arange(len(news)) * stride
    num_elements = sum(news) if stride is None else stride * len(news)
    indices: list[np.ndarray] = []

    def as_index(index: np.ndarray) -> np.ndarray:
        indices.append(index)
        return index

    plan = build_plan(
        below.array(),
        new.array(),
        above.array() > 0,
        starts,
        num_elements,
        every_prefix=every_prefix,
        as_index=as_index,
    )
    assert plan.nbytes == sum(index.nbytes for index in indices)
    assert plan.num_elements == num_elements
    assert len(plan.levels) == depth

    elements = symbols(["padding"] * num_elements)
    for document, start, count, before in zip(documents, starts, news, olds, strict=True):
        elements[start : start + count] = symbols([(document.number, before + t) for t in range(count)])
    blocks, prefixes = table(documents, olds)
    num_kept = len(blocks) - plan.num_stored
    edges = [
        next(prefix for level, _, prefix in reversed(document.state(old)) if level >= depth)
        for document, old in zip(documents, olds, strict=True)
        if old >> depth
    ]
    outputs, new_blocks, new_prefixes = obey(
        plan, elements, symbols(blocks[num_kept:]), symbols(prefixes[num_kept:]), symbols(edges)
    )

    if not every_prefix:
        expected = [document.state(total)[-1][2] for document, total in zip(documents, totals, strict=True)]
        assert outputs == expected
        return plan
    expected = [
        document.state(old + t + 1)[-1][2]
        for document, old, count in zip(documents, olds, news, strict=True)
        for t in range(count)
    ]
    assert outputs == expected
    assert (blocks[:num_kept] + new_blocks, prefixes[:num_kept] + new_prefixes) == table(documents, totals)
    filled = [start + t for start, count in zip(starts.tolist(), news, strict=True) for t in range(count)]
    if filled == list(range(num_elements)):
        assert plan.valid is None
    else:
        assert plan.valid.tolist() == filled
    return plan


def all_rows(plan: Plan) -> list[RowsToTake]:
    names = ("up_left", "up_right", "extended", "extending", "before", "blocks", "ending")
    return [getattr(level, name) for level in plan.levels for name in names]


def reads_slices(rows: RowsToTake) -> bool:
    return rows.index is None and all(part.index is None for part in rows.parts)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_fresh_batches_read_slices_alone(batch: int) -> None:
    """Of one length, from the start: but for the way in and the way out, nothing is read through an index."""
    for length in (*range(1, 36), 127, 128):
        plan = check([0] * batch, [length] * batch, stride=length)
        assert all(reads_slices(rows) for rows in all_rows(plan))
        assert all(len(level.up_left.parts) <= 1 for level in plan.levels)
        assert not any(level.keeps_edges and level.ending.count for level in plan.levels)
        assert plan.by_document is None
        assert plan.num_stored == 0


def test_matrices_that_are_read_whole_are_not_cut() -> None:
    plan = check([0], [8], stride=8)
    top = plan.levels[-1]
    assert top.ending.whole == 1
    assert top.extended == RowsToTake(0, 0, (), None, ())
    assert plan.levels[0].extended.whole == 0
    assert plan.levels[0].up_left == RowsToTake(4, None, (Part(1, 0, 4, None),), None, ())
    carry = check([5], [1], stride=1)
    assert carry.levels[0].up_right.whole == 0
    assert carry.levels[1].extended.whole == 1
    assert carry.levels[1].extending.whole == 0


@pytest.mark.parametrize("batch", [1, 3])
def test_continued_batches(batch: int) -> None:
    for old, new in product(range(12), range(1, 12)):
        check([old] * batch, [new] * batch, stride=new)


def test_steps() -> None:
    for old in range(130):
        plan = check([old] * 2, [1, 1], stride=1)
        assert plan.lowest == len(plan.levels) - 1, "a step folds once, at the level where the carry ends"
        assert plan.levels[plan.lowest].before.count == 2, "and reads nothing but the two edges"


def test_steps_of_rows_at_different_lengths() -> None:
    check(list(range(40)), [1] * 40, stride=1)
    check([0, 0, 7, 1], [0, 1, 1, 1], stride=1)


def test_every_history_with_every_continuation_at_once() -> None:
    both = list(product((0, 1, 2, 3, 5, 6, 7, 8, 12), range(10)))
    olds, news = [old for old, _ in both], [new for _, new in both]
    check(olds, news)
    check(olds, news, stride=11)
    check(olds[::-1], news[::-1], stride=9)


@pytest.mark.parametrize("seed", range(12))
def test_random_packs(seed: int) -> None:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 9))
    news = generator.integers(0, 30, count).tolist()
    check([0] * count, news)
    check(generator.integers(0, 70, count).tolist(), news, stride=30)


def test_ragged_packs_read_few_rows_through_an_index() -> None:
    """Nothing but the edges that lone nodes extend, and in the end the state's order."""
    plan = check([0] * 12, [5, 30, 1, 0, 17, 64, 3, 2, 9, 31, 33, 8])
    for level in plan.levels:
        for rows in (level.up_left, level.up_right, level.extending, level.before, level.blocks, level.ending):
            assert reads_slices(rows)
        assert level.extended.index is None
        assert all(part.index is None or part.matrix == 1 for part in level.extended.parts)
    assert plan.by_document is not None


def test_last_prefixes_alone() -> None:
    for length in range(1, 70):
        plan = check([0, 0], [length, length], stride=length, every_prefix=False)
        assert sum(level.extended.count for level in plan.levels) == 2 * (length.bit_count() - 1)
        assert plan.valid is None
        assert plan.lowest == (length & -length).bit_length() - 1
        assert [level.before.count for level in plan.levels[plan.lowest + 1 :]] == [0] * (
            len(plan.levels) - plan.lowest - 1
        )
    check([0] * 9, [3, 1, 8, 5, 13, 2, 6, 21, 4], every_prefix=False)
    check([0] * 3, [3, 1, 8], stride=9, every_prefix=False)


def test_folds_are_made_once() -> None:
    """Each prefix that is no block of its own costs one fold."""
    for length in range(1, 70):
        plan = check([0], [length])
        assert sum(level.extended.count for level in plan.levels) == length - length.bit_length()
        assert sum(level.up_right.count for level in plan.levels) == length - length.bit_count()


def test_how_rows_are_read() -> None:
    """As runs while there are few, then through an index a matrix, then through one over all of them."""
    nine, make = symbols(list("abcdefghi")), _RowsMaker(lambda index: index)
    every_other = np.arange(0, 2 * MAX_PARTS, 2)
    many = symbols(list(range(2 * MAX_PARTS + 2)))

    runs = make(_at(0, every_other), len(many))
    assert list(take(runs, [many])) == every_other.tolist()
    assert len(runs.parts) == MAX_PARTS
    assert make.nbytes == 0

    more = make(_at(0, np.append(every_other, 1)), len(many))
    assert list(take(more, [many])) == [*every_other.tolist(), 1]
    assert len(more.parts) == 1
    assert make.nbytes == 8 * (MAX_PARTS + 1)

    mixed = make(np.concatenate([_at(2, every_other), _at(1, np.arange(3, 6)), _at(2, every_other[::-1])]), 5, 9, 14)
    read = list(take(mixed, [symbols([None] * 5), nine, many]))
    assert read == [*every_other.tolist(), "d", "e", "f", *every_other.tolist()[::-1]]
    assert [part.index is None for part in mixed.parts] == [False, True, False]

    woven = make(np.ravel(np.column_stack([_at(0, every_other), _at(2, every_other)])), len(many), 0, len(many))
    assert list(take(woven, [many, symbols([]), many])) == np.repeat(every_other, 2).tolist()
    assert woven.indexed == (0, 2)


class TestLengths:
    def test_common(self) -> None:
        lengths = Lengths.of(np.array([4, 4, 4]))
        assert lengths == (3, 4, None)
        assert lengths.array().tolist() == [4, 4, 4]
        assert lengths.array().dtype == np.int64
        assert lengths.key == (3, 4)
        assert (lengths.total, lengths.longest) == (12, 4)

    def test_each(self) -> None:
        lengths = Lengths.of(np.array([4, 5]))
        assert lengths.common is None
        assert lengths.num_rows == 2
        assert lengths.array().tolist() == [4, 5]
        assert lengths.key == np.array([4, 5]).tobytes()
        assert (lengths.total, lengths.longest) == (9, 5)

    def test_no_rows(self) -> None:
        lengths = Lengths.of(np.array([], dtype=np.int64))
        assert lengths == (0, 0, None)
        assert (lengths.total, lengths.longest, lengths.array().tolist()) == (0, 0, [])

    def test_plus(self) -> None:
        assert Lengths(2, 3, None).plus(Lengths(2, 4, None)) == (2, 7, None)
        assert Lengths(2, 3, None).plus(Lengths.of(np.array([1, 2]))).array().tolist() == [4, 5]
        assert Lengths.of(np.array([2, 1])).plus(Lengths.of(np.array([1, 2]))) == (2, 3, None)

    def test_split(self) -> None:
        assert Lengths(2, 13, None).split(2) == ((2, 3, None), (2, 1, None))
        above, below = Lengths.of(np.array([13, 6])).split(2)
        assert above.array().tolist() == [3, 1]
        assert below.array().tolist() == [1, 2]

    def test_levels_touched(self) -> None:
        assert Lengths(2, 7, None).levels_touched(Lengths(2, 8, None)) == 4
        assert Lengths(2, 8, None).levels_touched(Lengths(2, 9, None)) == 1
        assert Lengths(2, 8, None).levels_touched(Lengths(2, 8, None)) == 0
        assert Lengths(2, 7, None).levels_touched(Lengths.of(np.array([8, 7]))) == 4
        assert Lengths.of(np.array([7, 6])).levels_touched(Lengths(2, 7, None)) == 1
