"""The decoder: the scan's answers from any state, few merges, the same memory in every step that recurs."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logdepth.decoding.counter import Apart, Together, next_step
from logdepth.decoding.tables import Tables
from torch import Tensor

from logdepth.decoding import Decoder
from logdepth.models import ScanLM
from tests.decoders import (
    as_graphs,
    built,
    check_steps,
    close,
    decoder_of,
    every_model,
    prefilled,
    random_tokens,
    same_state,
)
from tests.small_models import VOCAB


@every_model
@as_graphs
def test_steps_give_the_logits_of_the_whole(name: str, graphs: bool) -> None:
    model, tokens = built(name), random_tokens(3, 71)
    decoder = decoder_of(model, model.init_state(3), graphs)
    logits = torch.stack([decoder.step(column).clone() for column in tokens.T], dim=1)
    close(logits, model(tokens).detach())


@every_model
@as_graphs
@pytest.mark.parametrize("leaf_table", [False, True], ids=["leaves", "table"])
def test_rows_of_all_lengths_go_on_together(name: str, graphs: bool, leaf_table: bool) -> None:
    model = built(name)
    state = prefilled(model, [*range(71), 1023, 1024])
    decoder = decoder_of(model, state, graphs, leaf_table=leaf_table)
    same_state(decoder.state(), state)
    check_steps(model, state, decoder, 33)


@as_graphs
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40), spread=st.sampled_from([0, 2, 6]))
def test_any_lengths_at_any_distance(graphs: bool, lengths: list[int], spread: int) -> None:
    model = built("plain")
    state = prefilled(model, [length >> spread << spread for length in lengths])
    check_steps(model, state, decoder_of(model, state, graphs), 12)


@as_graphs
def test_rows_that_do_not_fit_the_buckets(graphs: bool) -> None:
    model = built()
    state = prefilled(model, [7] * 39 + [12])  # one apart, so that the others do not go together
    assert not next_step(state.lengths.numpy(), padded=True).recurs
    check_steps(model, state, decoder_of(model, state, graphs), 5)


@as_graphs
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [0, 3, 31, 12]], ids=["together", "apart"])
def test_tables_grow(graphs: bool, lengths: list[int]) -> None:
    model = built()
    state = prefilled(model, lengths)
    decoder = decoder_of(model, state, graphs)
    before = decoder.nbytes
    check_steps(model, state, decoder, 150)
    assert decoder.nbytes > before


@as_graphs
@pytest.mark.parametrize("chosen", [[0, 2, 3, 5], [3, 0, 5, 2], [4], [1, 1, -1, 0, 1, 1, 3], []])
def test_chosen_rows_go_on_alone(graphs: bool, chosen: list[int]) -> None:
    model = built("deep")
    state = prefilled(model, [3, 17, 4, 31, 0, 9])
    decoder = decoder_of(model, state, graphs)
    state = check_steps(model, state, decoder, 9).select(chosen)
    decoder.select(chosen)
    assert decoder.batch == len(chosen)
    same_state(decoder.state(), state)
    state = check_steps(model, state, decoder, 40, seed=1)
    if chosen:
        decoder.select(torch.tensor([0]))
        check_steps(model, state.select([0]), decoder, 9, seed=2)


@contextmanager
def counted(model: ScanLM) -> Iterator[dict[str, int]]:
    """The rows of all merges of the up-sweep, and of all merges."""
    operator, rows = model.layers[0].operator, {"up": 0, "all": 0}

    def add(kind: str, operands: tuple[Tensor, Tensor]) -> None:
        rows[kind] += len(operands[0])

    hooks = [
        operator.register_forward_pre_hook(lambda _, operands: add("up", operands)),
        operator.operator.register_forward_pre_hook(lambda _, operands: add("all", operands)),
    ]
    yield rows
    for hook in hooks:
        hook.remove()


@as_graphs
def test_merges_a_token_do_not_grow_with_the_length(graphs: bool) -> None:
    model, batch, count = built(), 64, 1024
    lengths = np.random.default_rng(3).integers(0, 2**15, batch)
    empty = model.init_state(batch)
    decoder = decoder_of(model, empty, graphs)
    decoder._hold(empty, levels=16)
    decoder._stand_at(lengths.copy())  # of rows whose blocks are zeros: the counts are the same
    tokens = random_tokens(batch)
    with counted(model) as rows:
        for _ in range(count):
            decoder.step(tokens)
    carries = np.bitwise_count(lengths).astype(int).sum() + batch * count - np.bitwise_count(lengths + count).sum()
    folds = sum(int((np.bitwise_count(lengths + done) > 1).sum()) for done in range(1, count + 1))
    if graphs:
        assert carries < rows["up"] <= 2.6 * batch * count
        assert folds <= rows["all"] - rows["up"] <= batch * count
    else:
        assert rows == {"up": carries, "all": carries + folds}
        assert rows["all"] <= 2 * batch * count + 16 * batch


def test_shapes_of_steps() -> None:
    def shape(lengths: list[int], padded: bool = False) -> Together | Apart:
        return next_step(np.array(lengths, dtype=np.int64), padded=padded).shape

    assert shape([]) == shape([0, 0]) == Together(0, False)
    assert shape([3, 3]) == Together(2, False)
    assert shape([3 + 8, 3 + 16, 3 + 64]) == Together(2, True)
    assert shape([3, 3 + 8]) == Apart(2, (2, 2), 1)
    assert shape([7, 1, 4, 8]) == Apart(4, (2, 1, 1), 2)
    assert shape([7, 1, 4, 8], padded=True) == Apart(4, (4, 4, 4), 4)
    assert shape([15] * 10 + [0] * 90, padded=True) == Apart(100, (100, 50, 25, 16), 100)


def test_states_given_and_taken_are_nobody_elses() -> None:
    model = built()
    state = prefilled(model, [6, 6, 7])
    blocks = state.layers[0].blocks.clone()
    decoder = Decoder(model, state)
    decoder.step(random_tokens(3))
    taken = decoder.state()
    kept = taken.layers[0].blocks.clone()
    decoder.step(random_tokens(3))
    assert torch.equal(state.layers[0].blocks, blocks)
    assert torch.equal(taken.layers[0].blocks, kept)
    model.step(random_tokens(3, 2), taken)[0].sum().backward()  # outside inference mode too


def test_what_makes_no_sense_is_refused() -> None:
    model = built()
    state = prefilled(model, [4, 2])
    with pytest.raises(ValueError, match="eval mode"):
        Decoder(built().train(), state)
    with pytest.raises(ValueError, match="the state has 1 layers, the model 3"):
        Decoder(built("deep"), state)
    decoder = Decoder(model, state)
    with pytest.raises(ValueError, match=r"int64 of shape \(2,\), one a stream; got torch.int64 of shape \(3,\)"):
        decoder.step(random_tokens(3))
    with pytest.raises(ValueError, match=r"got torch.float32"):
        decoder.step(torch.zeros(2))
    with pytest.raises(IndexError, match="row 2 is not among the 2 streams"):
        decoder.select([0, 2])


def test_after_a_step_that_failed_half_way_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("deep")
    decoder = Decoder(model, prefilled(model, [4, 4]))
    decoder.step(random_tokens(2))

    def failing(*_: object) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1], "output", failing)
        with pytest.raises(MemoryError):
            decoder.step(random_tokens(2))
    with pytest.raises(RuntimeError, match="make a new Decoder"):
        decoder.step(random_tokens(2))
    with pytest.raises(RuntimeError, match="make a new Decoder"):
        decoder.state()


def test_a_token_outside_the_vocabulary_is_refused_on_a_cpu_and_changes_nothing() -> None:
    model = built()
    state = prefilled(model, [4, 2])
    decoder = Decoder(model, state)
    for wrong in (-1, VOCAB):
        with pytest.raises(IndexError, match=f"from 0 to {VOCAB - 1}; got"):
            decoder.step(torch.tensor([1, wrong]))
    check_steps(model, state, decoder, 2)


@as_graphs
def test_without_memory_to_select_or_to_grow_the_streams_stay_as_they_are(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built()
    state = prefilled(model, [3, 3, 3, 3])
    decoder = decoder_of(model, state, graphs)

    def failing(*_: object) -> Tables:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Tables, "of", failing)
        with pytest.raises(MemoryError):
            decoder.select([2])
        assert decoder.batch == 4
        for _ in range(4):
            decoder.step(random_tokens(4))
        with pytest.raises(MemoryError):  # 8 need a level more
            decoder.step(random_tokens(4))
    check_steps(model, decoder.state(), decoder, 9)


def test_leaves_of_large_vocabularies_are_computed_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    state = prefilled(model, [4, 2])
    for largest, has_table in ((VOCAB * 8, True), (VOCAB * 8 - 1, False)):
        monkeypatch.setattr("logdepth.decoding.weights.LARGEST_LEAF_TABLE", largest)
        monkeypatch.setattr("logdepth.decoding.weights.LEAVES_AT_ONCE", 5)
        decoder = Decoder(model, state, leaf_table=True)
        check_steps(model, state, decoder, 3)
        assert (decoder._weights.leaves is not None) == has_table


@as_graphs
@pytest.mark.parametrize("lengths", [[1, 1], [1, 2]], ids=["together", "apart"])
def test_tokens_may_be_written_where_they_are_read(graphs: bool, lengths: list[int]) -> None:
    model = built()
    state = prefilled(model, lengths)
    decoder = decoder_of(model, state, graphs)
    mine = decoder.tokens
    for tokens in random_tokens(40, 2):  # tables grow meanwhile
        with torch.no_grad():
            logits, state = model.step(tokens[:, None], state)
        mine.copy_(tokens)
        close(decoder.step(mine), logits[:, 0])
    assert decoder.tokens is mine
    decoder.select([1])
    state = state.select([1])
    for tokens in random_tokens(9, 1):
        with torch.no_grad():
            logits, state = model.step(tokens[:, None], state)
        decoder.tokens.copy_(tokens)
        close(decoder.step(decoder.tokens), logits[:, 0])
    with pytest.raises(ValueError, match=r"of shape \(1,\)"):
        decoder.step(mine)


@as_graphs
def test_tokens_of_streams_that_are_left(graphs: bool) -> None:
    model = built()
    state = prefilled(model, [4, 4, 4])
    decoder = decoder_of(model, state, graphs)
    decoder.select([2, 0])
    state = state.select([2, 0])
    for tokens in random_tokens(6, 2):
        with torch.no_grad():
            logits, state = model.step(tokens[:, None], state)
        decoder.tokens.copy_(tokens)
        close(decoder.step(decoder.tokens), logits[:, 0])
