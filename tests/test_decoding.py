"""The decoder: the scan's answers from any state, few merges, the same memory in every step that recurs."""

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logdepth.capture import CaptureError
from logdepth.decoding import Decoder
from logdepth.decoding.counter import Apart, Together, next_step
from logdepth.decoding.step_graphs import StepGraphs
from logdepth.decoding.tables import Tables
from logdepth.kernels import usable_on
from logdepth.models import ScanLM, ScanLMConfig
from logdepth.models.scan_lm import ScanLMState
from logdepth.scanning import ScanState, scan
from tests.small_models import SCAN, SMALL_MODELS, VOCAB

SCAN_MODELS = {name: config for name, config in SMALL_MODELS.items() if isinstance(config, ScanLMConfig)}
every_model = pytest.mark.parametrize("name", SCAN_MODELS)
as_graphs = pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])


class Rehearsed:
    """In place of CUDA graphs: what came first under a key runs again, whatever comes later, on the same memory."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.recorded: dict[Hashable, tuple[Callable[[], None], list[int]]] = {}
        self.replays = 0

    def memory(self) -> list[int]:
        decoder, weights = self.decoder, self.decoder._weights
        tables = [one for tables in decoder._tables for one in (tables.blocks, tables.prefixes)]
        layers = [weight for layer in weights.layers for weight in layer.parameters()]
        own = (decoder._row_tokens, decoder._index, decoder._logits)
        return [one.data_ptr() for one in (*own, *tables, weights.head, *layers)]

    def forget(self) -> None:
        self.recorded.clear()

    def run(self, key: Hashable, compute: Callable[[], None]) -> None:
        self.replays += key in self.recorded
        recorded, memory = self.recorded.setdefault(key, (compute, self.memory()))
        assert memory == self.memory()
        recorded()


def built(name: str = "ar-grc") -> ScanLM:
    torch.manual_seed(1)
    return SCAN_MODELS[name].build(VOCAB).double().eval()


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def same_state(actual: ScanLMState, expected: ScanLMState) -> None:
    assert actual.lengths.tolist() == expected.lengths.tolist()
    for one, other in zip(actual.layers, expected.layers, strict=True):
        close(one.blocks, other.blocks)
        close(one.prefixes, other.prefixes)


def prefilled(model: ScanLM, lengths: list[int]) -> ScanLMState:
    tokens = random_tokens(len(lengths), max(lengths), seed=7)
    with torch.no_grad():
        return model.step(tokens, model.init_state(len(lengths)), lengths=lengths)[1]


def decoder_of(model: ScanLM, state: ScanLMState, graphs: bool, **settings: Any) -> Decoder:
    decoder = Decoder(model, state, **settings)
    if graphs:
        decoder._graphs = Rehearsed(decoder)
    return decoder


def check_steps(model: ScanLM, state: ScanLMState, decoder: Decoder, count: int, seed: int = 0) -> ScanLMState:
    """Some steps by the model and by the decoder; the state after them."""
    for tokens in random_tokens(count, len(state.lengths), seed=seed):
        with torch.no_grad():
            logits, state = model.step(tokens[:, None], state)
        close(decoder.step(tokens), logits[:, 0])
    same_state(decoder.state(), state)
    return state


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


def test_recorded_steps_outlive_rows_until_most_are_gone() -> None:
    model = built()
    decoder = decoder_of(model, prefilled(model, [1, 2, 3, 4, 5]), graphs=True)
    for tokens in random_tokens(20, 5):
        decoder.step(tokens)
    recorded = dict(decoder._graphs.recorded)
    decoder.select([0, 2, 4])
    assert decoder._graphs.recorded == recorded
    decoder.select([0, 1])
    assert not decoder._graphs.recorded


def test_few_shapes_recur() -> None:
    model = built("plain")
    lengths = np.random.default_rng(0).integers(0, 1000, 64).tolist()
    decoder = decoder_of(model, prefilled(model, lengths), graphs=True)
    for tokens in random_tokens(200, 64):
        decoder.step(tokens)
    assert decoder._graphs.replays > 150
    assert len(decoder._graphs.recorded) <= 10


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


@pytest.mark.parametrize("config", ["ar-grc", "ar-mlp-ldru", "deep", "affine"])
@pytest.mark.parametrize("leaf_table", [False, True], ids=["leaves", "table"])
def test_autocast_is_the_callers(config: str, leaf_table: bool) -> None:
    torch.manual_seed(1)
    model = SCAN_MODELS[config].build(VOCAB).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = prefilled(model, [5, 0, 14, 7])
        decoder, plain = Decoder(model, state, leaf_table=leaf_table), state
        for tokens in random_tokens(8, 4):
            with torch.no_grad():
                logits, plain = model.step(tokens[:, None], plain)
            found = decoder.step(tokens)
            assert found.dtype == logits.dtype == torch.bfloat16
            torch.testing.assert_close(found, logits[:, 0], rtol=0.03, atol=0.03)
    assert decoder.state().layers[0].dtype == torch.float32
    for one, other in zip(decoder.state().layers, plain.layers, strict=True):
        torch.testing.assert_close(one.blocks, other.blocks, rtol=0.03, atol=0.03)
    # and without it, from the same decoder
    tokens = random_tokens(4, seed=5)
    expected = model.step(tokens[:, None], decoder.state())[0][:, 0]
    torch.testing.assert_close(decoder.step(tokens), expected.detach(), rtol=1e-5, atol=1e-5)


@as_graphs
def test_autocast_may_change_between_steps(graphs: bool) -> None:
    model = SCAN.build(VOCAB).eval()
    state = prefilled(model, [5, 5, 5])
    decoder = decoder_of(model, state, graphs)
    for number, tokens in enumerate(random_tokens(24, 3)):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=number // 8 == 1):
            logits, state = model.step(tokens[:, None], state)
            found = decoder.step(tokens)
        assert found.dtype == logits.dtype
        torch.testing.assert_close(found, logits[:, 0], rtol=0.03, atol=0.03)


def test_autocast_leaves_float64_alone() -> None:
    model = built("deep")
    state = prefilled(model, [5, 0, 14])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_steps(model, state, Decoder(model, state), 6)


def test_states_keep_the_dtype_that_they_came_in() -> None:
    model = SCAN.build(VOCAB).eval()
    state = prefilled(model, [5, 0, 14, 7])
    low = ScanLMState(tuple(layer.to(torch.bfloat16) for layer in state.layers))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, rounded = Decoder(model, state), Decoder(model, low)
        for tokens in random_tokens(12, 4):
            torch.testing.assert_close(rounded.step(tokens), whole.step(tokens), rtol=0.05, atol=0.05)
    assert [layer.dtype for layer in rounded.state().layers] == [torch.bfloat16]
    assert rounded.nbytes * 2 == whole.nbytes


@pytest.mark.parametrize("lengths", [[3, 3], [3, 11], [3, 4]])
def test_operators_may_answer_in_another_dtype(lengths: list[int]) -> None:
    """As they do under autocast, where a norm gives float32."""
    state = ScanState.empty(2, 3)
    leaves = torch.randn(max(lengths), 2, 3)
    _, state = scan(torch.add, leaves.transpose(0, 1).contiguous(), state, lengths=lengths)
    tables, step = Tables.of(state, levels=4), next_step(np.array(lengths), padded=False)

    def upcasting(left: Tensor, right: Tensor) -> Tensor:
        assert left.dtype == right.dtype == torch.float32
        return left.double() + right

    prefixes = tables.advance(upcasting, upcasting, torch.ones(2, 3), step.shape, torch.from_numpy(step.lists))
    sums = [leaves[:length, row].sum(0) + 1 for row, length in enumerate(lengths)]
    torch.testing.assert_close(prefixes, torch.stack(sums))


def test_weights_are_cast_once_and_the_models_stay() -> None:
    model = SCAN.build(VOCAB).eval()
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    decoder = Decoder(model, prefilled(model, [2, 3]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoder.step(random_tokens(2))
    twin = decoder._weights.layers[0]
    assert twin.operator.operator.gates.weight.dtype == decoder._weights.head.dtype == torch.bfloat16
    assert twin.operator.operator.norm.weight is model.layers[0].operator.operator.norm.weight
    assert twin.into_state.weight.dtype == torch.float32
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, before[key]), key


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


def test_leaves_of_large_vocabularies_are_computed_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    state = prefilled(model, [4, 2])
    for largest, has_table in ((VOCAB * 8, True), (VOCAB * 8 - 1, False)):
        monkeypatch.setattr("logdepth.decoding.weights.LARGEST_LEAF_TABLE", largest)
        monkeypatch.setattr("logdepth.decoding.weights.LEAVES_AT_ONCE", 5)
        decoder = Decoder(model, state, leaf_table=True)
        check_steps(model, state, decoder, 3)
        assert (decoder._weights.leaves is not None) == has_table


def needs_interpreter() -> None:
    if not usable_on(torch.device("cpu")):
        pytest.skip("kernels do not run on the CPU here: Triton's interpreter is not on")


def steps_by_kernels(name: str, lengths: list[int], count: int, graphs: bool, leaf_table: bool) -> Decoder:
    """Some steps by kernels, in float32, against the model's."""
    torch.manual_seed(1)
    model = SCAN_MODELS[name].build(VOCAB).eval()
    state = prefilled(model, lengths)
    decoder = decoder_of(model, state, graphs, leaf_table=leaf_table, kernels=True)
    for tokens in random_tokens(count, len(lengths)):
        with torch.no_grad():
            logits, state = model.step(tokens[:, None], state)
        torch.testing.assert_close(decoder.step(tokens), logits[:, 0], rtol=1e-3, atol=1e-4)
    for one, other in zip(decoder.state().layers, state.layers, strict=True):
        torch.testing.assert_close(one.blocks, other.blocks, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one.prefixes, other.prefixes, rtol=1e-3, atol=1e-4)
    return decoder


@as_graphs
@pytest.mark.parametrize("leaf_table", [False, True], ids=["leaves", "table"])
def test_one_row_by_kernels(graphs: bool, leaf_table: bool) -> None:
    needs_interpreter()
    assert steps_by_kernels("ar-grc", [0], 12, graphs, leaf_table)._weights.few_rows


@pytest.mark.parametrize(
    ("lengths", "count"), [([3], 3), ([2] * 3, 3), ([6, 3, 7], 2), ([3] * 65, 1)], ids=["one", "few", "apart", "many"]
)
@pytest.mark.parametrize("name", ["ar-grc", "plain", "every-merge", "deep"])
def test_kernels_give_the_models_answers(name: str, lengths: list[int], count: int) -> None:
    needs_interpreter()
    assert steps_by_kernels(name, lengths, count, graphs=False, leaf_table=True)._weights.few_rows


def test_kernels_keep_to_autocast() -> None:
    needs_interpreter()
    torch.manual_seed(1)
    model = SCAN.build(VOCAB).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = prefilled(model, [6])
        decoder = Decoder(model, state, kernels=True)
        for tokens in random_tokens(4, 1):
            with torch.no_grad():
                logits, state = model.step(tokens[:, None], state)
            found = decoder.step(tokens)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, logits[:, 0], rtol=0.03, atol=0.03)
    assert decoder._weights.few_rows
    assert decoder.state().layers[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["ar-mlp-ldru", "affine"])
def test_operators_without_kernels_do_without(name: str) -> None:
    assert steps_by_kernels(name, [5, 5], 4, graphs=False, leaf_table=True)._weights.few_rows is None


def test_float64_does_without_kernels() -> None:
    model = built()
    state = prefilled(model, [5, 5])
    decoder = Decoder(model, state, kernels=True)
    check_steps(model, state, decoder, 4)
    assert decoder._weights.few_rows is None


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


class FakeGraph:
    """Counts how often it is replayed."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class FakeRecorder:
    """Records whatever does not raise."""

    recording = False

    def record(self, run: Callable[[], tuple[()]]) -> tuple[FakeGraph, tuple[()]]:
        FakeRecorder.recording = True
        try:
            return FakeGraph(), run()
        except RuntimeError as error:
            raise CaptureError(str(error)) from None
        finally:
            FakeRecorder.recording = False


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr("logdepth.decoding.step_graphs.recorder_on", lambda _: FakeRecorder())


def test_steps_are_recorded_when_they_come_again(fake_cuda: None) -> None:
    graphs, ran = StepGraphs(torch.device("cuda"), pytest.fail), []
    for key, times_run in (("a", 1), ("a", 2), ("a", 2), ("b", 3), ("a", 3)):
        graphs.run(key, lambda: ran.append(1))
        assert len(ran) == times_run
    assert {key: graph.replays for key, graph in graphs.graphs.items()} == {"a": 3}
    graphs.forget()
    graphs.run("a", lambda: ran.append(1))
    assert len(ran) == 4


def test_steps_that_cannot_be_recorded_run_as_they_are(fake_cuda: None) -> None:
    said: list[str] = []
    graphs, done = StepGraphs(torch.device("cuda"), said.append), []

    def compute() -> None:
        if FakeRecorder.recording:
            raise RuntimeError("not while recording")
        done.append(1)

    for times in range(1, 6):
        graphs.run("a", compute)
        assert len(done) == times
    graphs.run("b", compute)
    graphs.run("b", compute)
    assert said == ["decoding goes on without CUDA graphs: a step cannot be recorded (not while recording)"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@needs_gpu
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [[9] * 5, [*range(40)]], ids=["together", "apart"])
@pytest.mark.parametrize("name", ["ar-grc", "ar-mlp-ldru", "deep"])
def test_graphs_give_the_plain_answers_on_a_gpu(name: str, lengths: list[int], low: bool) -> None:
    """In low precision: answers as far from those of float32 as the plain ones are, or nearer."""
    torch.manual_seed(1)
    model = SCAN_MODELS[name].build(VOCAB).eval().cuda()
    tokens = random_tokens(len(lengths), max(lengths), seed=7).cuda()
    errors, size = {"graphs": 0.0, "plain": 0.0}, 0.0
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        state = model.step(tokens, model.init_state(len(lengths)), lengths=lengths)[1]
        decoders = {"graphs": Decoder(model, state, graphs=True), "plain": Decoder(model, state, kernels=False)}
        exact = Decoder(model, state, kernels=False)
        chosen = len(lengths)
        for number, column in enumerate(random_tokens(150, len(lengths)).cuda()):
            expected = exact.step(column[:chosen])
            size += float(expected.square().sum())
            for which, decoder in decoders.items():
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low):  # a new one each time, as users have it
                    errors[which] += float((decoder.step(column[:chosen]) - expected).square().sum())
            if number in (90, 120):
                kept = range(1, chosen) if number == 90 else range(chosen // 3)
                chosen = len(kept)
                for decoder in (exact, *decoders.values()):
                    decoder.select(kept)
        assert len(decoders["graphs"]._graphs.graphs) >= 3
        assert errors["graphs"] <= 4 * errors["plain"] if low else errors["graphs"] < 1e-4
        states = {
            which: torch.cat([layer.prefixes for layer in decoder.state().layers])
            for which, decoder in (*decoders.items(), ("exact", exact))
        }
        off = {which: float((states[which] - states["exact"]).norm() / states["exact"].norm()) for which in decoders}
        assert off["graphs"] <= 2 * off["plain"] if low else off["graphs"] < 1e-3


@needs_gpu
def test_plain_decoding_is_the_models_on_a_gpu() -> None:
    model = dataclasses.replace(SCAN, depth=2).build(VOCAB).eval().cuda()
    state = model.init_state(3)
    decoder = Decoder(model, state)
    for column in random_tokens(40, 3).cuda():
        with torch.no_grad():
            logits, state = model.step(column[:, None], state)
        torch.testing.assert_close(decoder.step(column), logits[:, 0], rtol=1e-3, atol=1e-3)
