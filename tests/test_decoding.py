"""The decoder: the model's answers from any state, few merges, the same memory in every step that recurs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logdepth.blocks import AttentionBlock
from logdepth.blocks.attention import StaticKeyValues
from logdepth.decoding import Decoder
from logdepth.models import LM, LMState
from logdepth.ops import lookup
from logdepth.scanning.static_state import StaticScanState
from logdepth.scanning.step import Apart, Together, next_step
from tests.block_states import clones_of, close, same_state, tensors_of
from tests.decoders import as_graphs, built, check_steps, decoder_of, every_model, prefilled, random_tokens
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
    attends = any(isinstance(block, AttentionBlock) for block in model.blocks)  # which takes much memory
    state = prefilled(model, [*range(71), *((127,) if attends else (1023, 1024))])
    decoder = decoder_of(model, state, graphs, leaf_table=leaf_table)
    same_state(decoder.state(), state)
    check_steps(model, state, decoder, 33)


@as_graphs
@pytest.mark.parametrize("name", ["plain", "hybrid"])
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40), spread=st.sampled_from([0, 2, 6]))
def test_any_lengths_at_any_distance(name: str, graphs: bool, lengths: list[int], spread: int) -> None:
    model = built(name)
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
@pytest.mark.parametrize("name", ["ar-grc", "scan-heads", "transformer-alibi", "hybrid"])
def test_static_states_grow(name: str, graphs: bool, lengths: list[int]) -> None:
    model = built(name)
    state = prefilled(model, lengths)
    decoder = decoder_of(model, state, graphs)
    before = decoder.nbytes
    check_steps(model, state, decoder, 150)
    assert decoder.nbytes > before


@pytest.mark.parametrize("name", ["rope-window-5", "alibi-window-5", "only-mlp"])
def test_a_window_and_an_mlp_take_no_more_memory_with_time(name: str) -> None:
    model = built(name)
    state = prefilled(model, [0, 3, 31, 12])
    decoder = decoder_of(model, state, graphs=True)
    before, memory = decoder.nbytes, decoder._graphs.memory()
    state = check_steps(model, state, decoder, 150)
    assert decoder.nbytes == before
    assert decoder._graphs.memory()[3:] == memory[3:]
    assert (len(decoder._graphs.recorded), decoder._graphs.replays) == (1, 149)  # no step differs from another
    batch, heads, window, head_width = 4, {"rope-window-5": 3, "alibi-window-5": 2, "only-mlp": 0}[name], 5, 12
    assert decoder.nbytes == (0 if not heads else 2 * 8 * batch * window * head_width)
    assert decoder.state().nbytes == state.nbytes <= decoder.nbytes


@as_graphs
@pytest.mark.parametrize("chosen", [[0, 2, 3, 5], [3, 0, 5, 2], [4], [1, 1, -1, 0, 1, 1, 3], []])
@pytest.mark.parametrize("name", ["deep", "scan-up", "alibi-window-5", "hybrid"])
def test_chosen_rows_go_on_alone(name: str, graphs: bool, chosen: list[int]) -> None:
    model = built(name)
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


@every_model
@as_graphs
def test_rows_are_replaced_and_cleared_in_place(name: str, graphs: bool) -> None:
    """Sequences of any lengths join and leave; each goes on as the model itself would."""
    model, chance = built(name), np.random.default_rng(5)
    decoder = decoder_of(model, prefilled(model, [3, 3, 3, 3, 3]), graphs)
    alone = {row: decoder.state([row]) for row in range(5)}
    for number in range(30):
        tokens = random_tokens(5, seed=number)
        logits = decoder.step(tokens).clone()
        for row, state in alone.items():
            with torch.no_grad():
                expected, alone[row] = model.step(tokens[row : row + 1, None], state)
            close(logits[row : row + 1], expected[:, 0])
        leaving = [row for row in alone if chance.random() < 0.15]
        decoder.clear(leaving)
        for row in leaving:
            del alone[row]
        empty = [row for row in range(5) if row not in alone]
        joining = [row for row in empty if chance.random() < 0.4]
        if joining:
            # Two states at a time, also in another order than the rows, and longer than any before.
            joining = joining[::-1]
            lengths = chance.integers(1, 20 + 4 * number, len(joining)).tolist()
            decoder.replace(joining, state := prefilled(model, lengths))
            alone |= {row: state.select([place]) for place, row in enumerate(joining)}
    for row, state in alone.items():
        same_state(decoder.state([row]), state)


@as_graphs
def test_empty_rows_stay_empty(graphs: bool) -> None:
    model = built("hybrid")
    decoder = decoder_of(model, state := prefilled(model, [9, 2, 5]), graphs)
    decoder.clear([0, 2])
    state = state.select([1])
    for tokens in random_tokens(90, 3):
        with torch.no_grad():
            logits, state = model.step(tokens[1:2, None], state)
        close(decoder.step(tokens)[1:2], logits[:, 0])
    assert decoder.state().lengths.tolist() == [0, 92, 0]
    decoder.select([2, 1])  # some may be left out, in place or not
    check = random_tokens(2)
    with torch.no_grad():
        logits, state = model.step(check[1:, None], state)
    close(decoder.step(check)[1:], logits[:, 0])
    assert decoder.state().lengths.tolist() == [0, 93]


def test_replacing_keeps_recorded_steps() -> None:
    model = built("hybrid")
    decoder = decoder_of(model, prefilled(model, [40, 41, 42]), graphs=True)
    for tokens in random_tokens(20, 3):
        decoder.step(tokens)
    recorded = dict(decoder._graphs.recorded)
    decoder.replace([2, 0], prefilled(model, [7, 19]))
    decoder.clear([1])
    assert decoder._graphs.recorded == recorded
    for tokens in random_tokens(9, 3):
        decoder.step(tokens)  # `Rehearsed` asserts that nothing has moved


def test_replacing_what_makes_no_sense_is_refused() -> None:
    model = built()
    decoder = Decoder(model, prefilled(model, [4, 2, 3]))
    with pytest.raises(ValueError, match=r"rows must all differ; got \[1, 1\]"):
        decoder.replace([1, 1], prefilled(model, [1, 2]))
    with pytest.raises(ValueError, match="must have 1 rows of 1 blocks; it has 2 rows of 1 blocks"):
        decoder.replace([1], prefilled(model, [1, 2]))
    with pytest.raises(ValueError, match="it has 1 rows of 3 blocks"):
        decoder.replace([1], prefilled(built("deep"), [1]))
    with pytest.raises(IndexError, match="row 3 is not among the 3 rows"):
        decoder.clear([3])
    assert decoder.state().lengths.tolist() == [4, 2, 3]


@every_model
def test_concatenated_states_go_on_as_each_alone(name: str) -> None:
    model = built(name)
    parts = [prefilled(model, [9, 0, 3]), model.init_state(2), prefilled(model, [33]), prefilled(model, [6, 6])]
    state = LMState.concatenate(parts)
    assert state.lengths.tolist() == [9, 0, 3, 0, 0, 33, 6, 6]
    same_state(state.select([5]), parts[2])
    tokens = random_tokens(8, 7, seed=3)
    with torch.no_grad():
        logits, after = model.step(tokens, state, lengths=[7, 7, 0, 1, 7, 3, 7, 7])
        expected, alone = model.step(tokens[5:6], parts[2], lengths=[3])
    close(logits[5, :3], expected[0, :3])
    same_state(after.select([5]), alone)
    assert after.lengths.tolist() == [16, 7, 3, 1, 7, 36, 13, 13]
    with torch.no_grad():  # packed
        features, after = model.continued(tokens.flatten(), state, cu_seqlens=[0, 7, 7, 9, 16, 30, 33, 34, 56])
        expected, alone = model.step(tokens.flatten()[None, 30:33], parts[2])
    close(model.logits(features[30:33]), expected[0])
    same_state(after.select([5]), alone)


@contextmanager
def counted(model: LM) -> Iterator[dict[str, int]]:
    """The rows of all merges of the up-sweep, and of all merges."""
    operator, rows = model.blocks[0].operator, {"up": 0, "all": 0}

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
    decoder._states = [StaticScanState.of(empty.blocks[0], levels=16)]
    decoder._length, decoder._each = None, lengths.copy()  # of rows whose blocks are zeros: the counts are the same
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


@every_model
def test_states_given_and_taken_are_nobody_elses(name: str) -> None:
    model = built(name)
    state = prefilled(model, [6, 6, 7])
    given_tensors = clones_of(state)
    decoder = Decoder(model, state)
    decoder.step(random_tokens(3))
    taken = decoder.state()
    taken_tensors = clones_of(taken)
    decoder.step(random_tokens(3))
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(state), given_tensors, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(taken), taken_tensors, strict=True))
    model.step(random_tokens(3, 2), taken)[0].sum().backward()  # outside inference mode too


def test_what_makes_no_sense_is_refused() -> None:
    model = built()
    state = prefilled(model, [4, 2])
    with pytest.raises(ValueError, match="eval mode"):
        Decoder(built().train(), state)
    with pytest.raises(ValueError, match="the state has 1 blocks, the model 3"):
        Decoder(built("deep"), state)
    with pytest.raises(TypeError, match="a Decoder takes an LM and a state of it; got Linear and LMState"):
        Decoder(torch.nn.Linear(1, 1).eval(), state)
    with pytest.raises(TypeError, match="got LM and tuple"):
        Decoder(model, state.blocks)
    decoder = Decoder(model, state)
    with pytest.raises(TypeError, match="tokens must be a tensor; got list"):
        decoder.step([1, 2])
    with pytest.raises(ValueError, match=r"int64 of shape \(2,\), one per row; got torch.int64 of shape \(3,\)"):
        decoder.step(random_tokens(3))
    with pytest.raises(ValueError, match=r"got torch.float32"):
        decoder.step(torch.zeros(2))
    with pytest.raises(IndexError, match="row 2 is not among the 2 rows"):
        decoder.select([0, 2])


def test_after_a_step_that_failed_half_way_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("deep")
    decoder = Decoder(model, prefilled(model, [4, 4]))
    decoder.step(random_tokens(2))

    def failing(*_: object) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[1], "output", failing)
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
@pytest.mark.parametrize(
    ("name", "length"), [("ar-grc", 3), ("scan-heads", 3), ("transformer-alibi", 60), ("hybrid", 3)]
)
def test_without_memory_to_select_or_to_grow_the_rows_stay_as_they_are(
    name: str, length: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where memory runs out at the last of several states."""
    model = built(name)
    state = prefilled(model, [length] * 4)
    decoder = decoder_of(model, state, graphs)
    moves = 0

    def no_memory(*_: object) -> None:
        raise MemoryError

    def less_memory(original: Callable[..., None]) -> Callable[..., None]:
        def make_room(self: StaticScanState | StaticKeyValues, longest: int) -> None:
            nonlocal moves
            if isinstance(self, StaticScanState):
                moves += longest.bit_length() > len(self.blocks)
            else:
                moves += self.window is None and longest > self.keys.shape[2]
            if moves == last:
                raise MemoryError
            original(self, longest)

        return make_room

    with monkeypatch.context() as patch:
        for kind in (StaticScanState, StaticKeyValues):
            patch.setattr(kind, "make_room", less_memory(kind.make_room))
        last = {"ar-grc": 1, "scan-heads": 2, "transformer-alibi": 2, "hybrid": 4}[name]
        patch.setattr(StaticScanState, "of", no_memory)
        patch.setattr(StaticKeyValues, "__init__", no_memory)
        with pytest.raises(MemoryError):
            decoder.select([2])
        assert decoder.batch == 4
        for _ in range(4):
            decoder.step(random_tokens(4))
        before = decoder.state()
        with pytest.raises(MemoryError):  # 8 or 65 need more
            decoder.step(random_tokens(4))
        same_state(decoder.state(), before)
    check_steps(model, decoder.state(), decoder, 9)


@pytest.mark.parametrize("fits", [True, False])
def test_leaves_of_large_vocabularies_are_computed_as_needed(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = built(), []
    state = prefilled(model, [4, 2])
    monkeypatch.setattr(lookup, "MAX_TABLE_ELEMENTS", VOCAB * 12 - (not fits))
    decoder = decoder_of(model, state, graphs=False, leaf_table=True)
    hook = model.blocks[0].into_state.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    for tokens in random_tokens(3, 2):
        decoder.step(tokens)
    assert rows == ([VOCAB] if fits else [2, 2, 2])
    hook.remove()
    check_steps(model, decoder.state(), decoder, 3)


@as_graphs
@pytest.mark.parametrize("lengths", [[1, 1], [1, 2]], ids=["together", "apart"])
@pytest.mark.parametrize("name", ["ar-grc", "hybrid"])
def test_tokens_may_be_written_where_they_are_read(name: str, graphs: bool, lengths: list[int]) -> None:
    model = built(name)
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
def test_tokens_of_rows_that_are_left(graphs: bool) -> None:
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
