"""Perplexities: cases that can be computed by hand, and laws that hold for every model."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth import evaluate as module
from logdepth.errors import UserError
from logdepth.evaluate import PAPER_CONTEXTS, evaluate, loss_graphs, perplexity
from logdepth.models import LM, LanguageModel
from logdepth.ops import cross_entropy
from tests.fake_graphs import FakeRecorder, fake_recorder  # noqa: F401 (a fixture)
from tests.small_models import SMALL_MODELS, VOCAB, small_model
from tests.tiny_corpus import store_of

TOKENS = torch.randint(VOCAB, (501,), generator=torch.Generator().manual_seed(3)).tolist()
every_model = pytest.mark.parametrize("name", SMALL_MODELS)


class Uniform(LanguageModel):
    """Knows nothing."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        return torch.zeros(*tokens.shape, self.vocab_size)

    def init_state(self, batch: int) -> tuple[int]:
        return (batch,)

    def step(self, tokens: Tensor, state: tuple[int], **_: Any) -> tuple[Tensor, tuple[int]]:
        return self(tokens), state


class Certain(Uniform):
    """Gives the token after `t` the probability 1/2 if it is `t + 1`, and the rest evenly to the others."""

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        others = 0.5 / (self.vocab_size - 1)
        probabilities = torch.full((*tokens.shape, self.vocab_size), others, dtype=torch.float64)
        return probabilities.scatter(-1, (tokens[..., None] + 1) % self.vocab_size, 0.5).log()


@pytest.mark.parametrize("context", [1, 7, 64, 500, 1000])
def test_uniform_logits_have_the_perplexity_of_the_vocabulary(context: int) -> None:
    result = evaluate(Uniform(VOCAB), store_of(TOKENS), context=context)
    assert result.tokens == 500
    assert result.token_perplexity == pytest.approx(VOCAB, rel=1e-6)


def test_units_of_a_case_computed_by_hand() -> None:
    # Five tokens, four predicted: three rises at probability 1/2 and one that is no rise, at 0.5 / 9.
    result = evaluate(Certain(10), store_of([3, 4, 5, 6, 2]), context=512)
    nats = 3 * math.log(2) + math.log(18)
    assert result.nats == pytest.approx(nats, rel=1e-6)
    assert result.token_perplexity == pytest.approx(math.exp(nats / 4), rel=1e-6)
    assert result.word_perplexity == pytest.approx(math.exp(nats / 12), rel=1e-6)  # 10 words and 2 line ends
    assert result.bits_per_byte == pytest.approx((3 + math.log2(18)) / 50, rel=1e-6)
    assert result.position_loss[:4] == pytest.approx([math.log(2)] * 3 + [math.log(18)], rel=1e-6)
    assert len(result.position_loss) == 4


@every_model
@pytest.mark.parametrize("context", [1, 13, 32, 499, 500, 2976])
def test_windows_are_what_they_say(name: str, context: int) -> None:
    model = small_model(name)
    result = evaluate(model, store_of(TOKENS), context=context)
    expected, positions = 0.0, np.zeros(context)
    for start in range(0, 500, context):
        window = torch.tensor(TOKENS[start : start + context + 1])[None]
        with torch.no_grad():
            losses = F.cross_entropy(model.eval()(window[:, :-1])[0], window[0, 1:], reduction="none")
        expected += losses.sum().item()
        positions[: len(losses)] += losses.numpy()
    assert result.tokens == 500
    assert result.nats == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(result.position_nats, positions[:500], rtol=1e-5)
    average = np.nansum(result.position_loss * result.position_tokens) / result.position_tokens.sum()
    assert average == pytest.approx(result.loss, rel=1e-9)


@pytest.mark.parametrize(("context", "stride"), [(8, 3), (8, 1), (8, 8), (64, 10), (600, 100), (500, 499)])
def test_strided_windows_predict_every_token_once_with_enough_before_it(context: int, stride: int) -> None:
    model = small_model("ar-grc")
    result = evaluate(model, store_of(TOKENS), context=context, stride=stride)
    assert result.tokens == 500
    expected, counted = 0.0, 0
    for start in range(0, 500, stride):
        end = min(start + context, 500)
        if counted == 500:
            break
        window = torch.tensor(TOKENS[start : end + 1])[None]
        with torch.no_grad():
            losses = F.cross_entropy(model(window[:, :-1])[0], window[0, 1:], reduction="none")
        assert counted == 0 or counted - start >= context - stride
        expected += losses[counted - start :].sum().item()
        counted = end
    assert result.nats == pytest.approx(expected, rel=1e-6)


@every_model
def test_long_windows_go_through_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(name)
    whole = evaluate(model, store_of(TOKENS), context=300)
    monkeypatch.setattr(module, "BATCH_TOKENS", 64)
    parts = evaluate(model, store_of(TOKENS), context=300)
    np.testing.assert_allclose(parts.position_nats, whole.position_nats, rtol=1e-5)


@every_model
def test_documents_that_start_anew_are_as_if_alone(name: str) -> None:
    model = small_model(name)
    tokens = [token if number % 11 else 2 for number, token in enumerate(TOKENS)]
    result = evaluate(model, store_of(tokens, separator=2), context=100, reset_at_documents=True)
    expected = 0.0
    for start in range(0, 500, 100):
        row = tokens[start : start + 101]
        begin = 0
        for place in range(100):
            if row[place] == 2 or place == 99:
                document = torch.tensor(row[begin : place + 1])[None]
                with torch.no_grad():
                    logits = model(document)[0]
                targets = torch.tensor(row[begin + 1 : place + 2])
                expected += F.cross_entropy(logits, targets, reduction="sum").item()
                begin = place + 1
    assert result.nats == pytest.approx(expected, rel=1e-6)
    through = evaluate(model, store_of(tokens, separator=2), context=100).nats
    assert (result.nats == pytest.approx(through, rel=1e-6)) == (name == "only-mlp")  # which remembers nothing


@pytest.mark.parametrize("name", ["ar-grc", "transformer-alibi", "hybrid"])
@pytest.mark.parametrize("separator", [None, 2])
def test_all_logits_of_an_lm_are_never_there_at_once(
    name: str, separator: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = small_model(name), store_of(TOKENS, separator=separator)
    expected = evaluate(model, store, context=64, reset_at_documents=True).nats
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 40 * VOCAB)
    monkeypatch.setattr(LM, "logits", pytest.fail)
    shapes: list[int] = []
    cross_entropies = cross_entropy._losses_in_chunks
    monkeypatch.setattr(
        cross_entropy, "_losses_in_chunks", lambda *these: shapes.append(len(these[0])) or cross_entropies(*these)
    )
    found = evaluate(model, store, context=64, reset_at_documents=True).nats
    assert found == pytest.approx(expected, rel=1e-9)
    assert max(shapes) > 40  # rows that did not go through the head at once


def test_evaluation_leaves_the_model_as_it_was_and_turns_dropout_off() -> None:
    config = dataclasses.replace(SMALL_MODELS["ar-grc"], leaf_dropout=0.5)
    model = config.build(VOCAB).train()
    first, second = (evaluate(model, store_of(TOKENS), context=50).nats for _ in range(2))
    assert first == second
    assert model.training


def test_progress_is_told_and_may_stop_it() -> None:
    seen: list[int] = []
    evaluate(Uniform(VOCAB), store_of(TOKENS), context=100, on_progress=seen.append)
    assert seen[-1] == 500

    def stop(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        evaluate(Uniform(VOCAB), store_of(TOKENS), context=100, on_progress=stop)


def test_the_papers_grid_and_what_is_refused() -> None:
    assert len(PAPER_CONTEXTS) == 24
    assert PAPER_CONTEXTS[0] == 32
    assert PAPER_CONTEXTS[-1] == 2976
    with pytest.raises(ValueError, match="context must be at least 1"):
        evaluate(Uniform(VOCAB), store_of(TOKENS), context=0)
    with pytest.raises(ValueError, match="stride from 1 to context"):
        evaluate(Uniform(VOCAB), store_of(TOKENS), context=8, stride=9)
    with pytest.raises(UserError, match="fewer than two tokens"):
        evaluate(Uniform(VOCAB), store_of([1]), context=8)


def test_as_dict_is_what_json_can_hold() -> None:
    result = evaluate(Uniform(VOCAB), store_of(TOKENS[:6]), context=8)
    result = dataclasses.replace(result, position_tokens=np.array([0, 1, 1, 1, 1]))  # as in a strided evaluation
    saved = json.loads(json.dumps(result.as_dict(positions=True), allow_nan=False))
    assert saved["token_perplexity"] == result.token_perplexity
    assert saved["position_loss"][0] is None


def test_contexts_beyond_the_split_cost_no_memory() -> None:
    result = evaluate(Uniform(VOCAB), store_of(TOKENS), context=10**15)
    assert len(result.position_loss) == 500
    assert perplexity(1e6) == math.inf


@pytest.mark.parametrize("name", ["ar-grc", "transformer-alibi", "hybrid"])
@pytest.mark.parametrize("every", [3, 40, 10**6])
def test_documents_go_through_in_parts_too(name: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(name)
    tokens = [2 if number % every == every - 1 else max(token, 3) for number, token in enumerate(TOKENS)]
    store = store_of(tokens, separator=2)
    whole = evaluate(model, store, context=500, reset_at_documents=True)
    sizes: list[int] = []
    original = LM.run

    def run(self: LM, tokens: Tensor, *others: Any) -> Any:
        sizes.append(tokens.numel())
        return original(self, tokens, *others)

    monkeypatch.setattr(LM, "run", run)
    monkeypatch.setattr(module, "BATCH_TOKENS", 64)
    parts = evaluate(model, store, context=500, reset_at_documents=True)
    np.testing.assert_allclose(parts.position_nats, whole.position_nats, rtol=1e-5)
    assert 0 < max(sizes) <= 64


@every_model
def test_graphs_are_kept_from_one_evaluation_to_the_next_while_weights_change(
    name: str, recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", 128)
    model, store = small_model(name).float(), store_of(TOKENS)
    said: list[str] = []
    graphs = loss_graphs(model, said.append)
    found = []
    for _ in range(4):
        found.append(evaluate(model, store, context=64, graphs=graphs).loss)
        assert found[-1] == evaluate(model, store, context=64, accelerate=False).loss
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
    assert len(set(found)) == 4
    shapes = len(graphs.recordings)
    assert 2 <= shapes == len(recorder.graphs), "full batches, and what is left"
    assert sum(graph.replays for graph in recorder.graphs) + recorder.warmups == 4 * (500 // 128 + 2)
    assert not said
