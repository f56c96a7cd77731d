"""The decoder's recorded steps: which are recorded and when, and the plain answers on a GPU."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from logdepth.capture import CaptureError
from logdepth.decoding import Decoder
from logdepth.decoding.step_graphs import StepGraphs
from logdepth.ops import kernels
from tests.block_states import tensors_of
from tests.decoders import built, decoder_of, prefilled, random_tokens
from tests.small_models import SCAN, VOCAB, small_model


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


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_few_shapes_recur(name: str) -> None:
    model = built(name)
    lengths = np.random.default_rng(0).integers(0, 1000, 64).tolist()
    decoder = decoder_of(model, prefilled(model, lengths), graphs=True)
    for tokens in random_tokens(200, 64):
        decoder.step(tokens)
    assert decoder._graphs.replays > 150
    assert len(decoder._graphs.recorded) <= 10


class FakeGraph:
    """Counts how often it is replayed."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class FakeRecorder:
    """Records whatever does not raise."""

    recording = False

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[FakeGraph, torch.Tensor]:
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

    def compute() -> torch.Tensor:
        ran.append(torch.full((), len(ran) + 1.0))
        return ran[-1]

    for key, times_run, result in (("a", 1, 1), ("a", 2, 2), ("a", 2, 2), ("b", 3, 3), ("a", 3, 2)):
        assert graphs.run(key, compute) == result  # a replay's result is where that of the recording was
        assert len(ran) == times_run
    assert {key: graph.replays for key, (graph, _) in graphs.graphs.items()} == {"a": 3}
    graphs.forget()
    graphs.run("a", compute)
    assert len(ran) == 4


def test_steps_that_cannot_be_recorded_run_as_they_are(fake_cuda: None) -> None:
    said: list[str] = []
    graphs, done = StepGraphs(torch.device("cuda"), said.append), []

    def compute() -> torch.Tensor:
        if FakeRecorder.recording:
            raise RuntimeError("not while recording")
        done.append(1)
        return torch.zeros(())

    for times in range(1, 6):
        graphs.run("a", compute)
        assert len(done) == times
    graphs.run("b", compute)
    graphs.run("b", compute)
    assert said == ["decoding continues without CUDA graphs: a step cannot be recorded (not while recording)"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@needs_gpu
@pytest.mark.filterwarnings("default")  # the compiler warns of its own insides
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [[9] * 5, [*range(40)]], ids=["together", "apart"])
@pytest.mark.parametrize("name", ["ar-grc", "ar-mlp-ldru", "deep", "transformer-alibi", "rope-window-5", "hybrid"])
def test_graphs_give_the_plain_answers_on_a_gpu(name: str, lengths: list[int], low: bool) -> None:
    """In low precision: answers as far from those of float32 as the plain ones are, or nearer."""
    model = small_model(name).float().cuda()
    tokens = random_tokens(len(lengths), max(lengths), seed=7).cuda()
    errors, size = {"graphs": 0.0, "plain": 0.0}, 0.0
    said: list[str] = []
    with torch.no_grad():
        with kernels(False):
            state = model.step(tokens, model.init_state(len(lengths)), lengths=lengths)[1]
        recorded = Decoder(model, state, on_warning=said.append)
        decoders = {"graphs": recorded, "plain": Decoder(model, state, graphs=False)}
        exact = Decoder(model, state, graphs=False)
        chosen = len(lengths)
        for number, column in enumerate(random_tokens(150, len(lengths)).cuda()):
            with kernels(False):
                expected = exact.step(column[:chosen])
            size += float(expected.square().sum())
            for which, decoder in decoders.items():
                with (
                    torch.autocast("cuda", dtype=torch.bfloat16, enabled=low),  # a new one each time, as users have it
                    kernels(None if which == "graphs" else False),
                ):
                    errors[which] += float((decoder.step(column[:chosen]) - expected).square().sum())
            if number in (90, 120):
                kept = range(1, chosen) if number == 90 else range(chosen // 3)
                chosen = len(kept)
                for decoder in (exact, *decoders.values()):
                    decoder.select(kept)
        kinds = 3 if recorded._steps_differ else 1
        assert len(recorded._graphs.graphs) >= kinds
        assert said == []
        assert size > 0
        assert errors["graphs"] <= 4 * errors["plain"] if low else errors["graphs"] < 1e-4
        states = {
            which: torch.cat(
                [
                    one.float().flatten()
                    for one in tensors_of(decoder.state().blocks)
                    if one.is_cuda and one.is_floating_point()
                ]
            )
            for which, decoder in (*decoders.items(), ("exact", exact))
        }
        off = {which: float((states[which] - states["exact"]).norm() / states["exact"].norm()) for which in decoders}
        assert off["graphs"] <= 2 * off["plain"] if low else off["graphs"] < 1e-3


@needs_gpu
def test_plain_decoding_is_the_models_on_a_gpu() -> None:
    model = dataclasses.replace(SCAN, depth=2).build(VOCAB).eval().cuda()
    state = model.init_state(3)
    decoder = Decoder(model, state, graphs=False)
    for column in random_tokens(40, 3).cuda():
        with torch.no_grad():
            logits, state = model.step(column[:, None], state)
        torch.testing.assert_close(decoder.step(column), logits[:, 0], rtol=1e-3, atol=1e-3)


@needs_gpu
def test_graphs_are_the_default_on_a_gpu() -> None:
    model = built().float().cuda()
    state = model.init_state(2)
    assert Decoder(model, state)._graphs is not None
    assert Decoder(model, state, graphs=False)._graphs is None
