"""Runs as a model of lm-eval: log-likelihoods are the model's, shared contexts are read once, tasks run offline."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("lm_eval")

import datasets

from logdepth.data import TokenStore
from logdepth.errors import UserError
from logdepth.evaluate import evaluate
from logdepth.generate import SamplingConfig, generate
from logdepth.lm_eval import LogDepthLM, _sampling_of, main
from logdepth.models import LM
from tests.small_models import HYBRID, SCAN
from tests.tiny_corpus import sentences, store_of, tiny_data
from tests.written_runs import write_run

CONTEXT = 12
CHOICES = (" in the garden", " by the river .", " under a tree near the door of my neighbour", "x")


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", corpus, HYBRID, context=CONTEXT)


@pytest.fixture
def stream(corpus: Path, tmp_path: Path) -> Path:
    """A run of a corpus that is one stream of text, without ends of documents."""
    data = dataclasses.replace(tiny_data(corpus), corpus="ptb", paths=())
    return write_run(tmp_path / "stream", corpus, SCAN, context=CONTEXT, data=data)


def model_of(run: Path, **arguments: Any) -> LogDepthLM:
    model = LogDepthLM(str(run), **arguments)
    model.model.double()
    return model


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def expected_score(model: LogDepthLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model.model(torch.tensor([[*context, *continuation]]))[0, len(context) - 1 : -1]
    targets = torch.tensor(continuation)
    return -F.cross_entropy(logits, targets, reduction="sum").item(), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_continuations_are_scored_as_the_model_scores_whole_texts(batch_size: int | str, run: Path) -> None:
    model = model_of(run, batch_size=batch_size)
    long = sentences(3, seed=5)
    contexts = [
        "the cat sees",
        f"{long} every bird draws",
        f"{long} the old clock follows",
        "my",
        f"{long} my",
        long,
        "",
    ]
    pairs = [(context, choice) for context in contexts for choice in CHOICES]
    found = model.loglikelihood(requests(*pairs, pairs[0]), disable_tqdm=True)
    assert found[-1] == found[0]
    for (context, choice), (log_likelihood, is_greedy) in zip(pairs, found, strict=False):
        if context:
            tokens = model.tok_encode(context)
            more = model.tok_encode(context + choice)[len(tokens) :]
        else:
            tokens, more = [model.eot_token_id], model.tok_encode(choice)
        log_expected, greedy_expected = expected_score(model, tokens, more)
        assert log_likelihood == pytest.approx(log_expected, rel=1e-9)
        assert is_greedy == greedy_expected


def test_greedy_continuations_are_found(run: Path) -> None:
    model = model_of(run)
    context = model.tok_encode("the cat")
    following: list[int] = []
    for _ in range(4):
        with torch.no_grad():
            following.append(int(model.model(torch.tensor([[*context, *following]]))[0, -1].argmax()))
    other = [*following[:-1], (following[-1] + 1) % model.run_tokenizer.vocab_size]
    given = [(None, context, following), (None, context, other), (None, context, following[:1]), (None, context, [])]
    found = model._loglikelihood_tokens(given, disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True, False, True, True]
    assert found[3] == (0.0, True)


def test_shared_contexts_are_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = model_of(run), []
    continued = LM.continued

    def counted(self: LM, tokens: torch.Tensor, state: Any, lengths: Any = None) -> Any:
        read.append(tokens.numel() if lengths is None else int(np.sum(lengths)))
        return continued(self, tokens, state, lengths)

    monkeypatch.setattr(LM, "continued", counted)
    shots = sentences(8, seed=2)
    questions = [f"{shots}the cat {verb}" for verb in ("sees", "draws", "follows")]
    pairs = [(question, choice) for question in questions for choice in CHOICES]
    model.loglikelihood(requests(*pairs), disable_tqdm=True)
    tokens = [model.tok_encode(question) for question in questions]
    answers = sum(
        len(model.tok_encode(question + choice)) - len(one)
        for question, one in zip(questions, tokens, strict=True)
        for choice in CHOICES
    )
    shared = next(at for at in range(len(tokens[0])) if len({tuple(one[: at + 1]) for one in tokens}) > 1)
    assert shared > 100
    assert sum(read) == shared + sum(len(one) - 1 - shared for one in tokens) + answers


@pytest.mark.parametrize("length", [CONTEXT, 200_000])
def test_rolling_log_likelihood_is_that_of_evaluate(length: int, run: Path, stream: Path) -> None:
    """Of one stream of text, the same number; of a document, the number for the document after the end of another."""
    text = sentences(12, seed=9)
    for folder, separated in ((stream, False), (run, True)):
        model = model_of(folder, max_length=length)
        tokens = ([model.eot_token_id] if separated else []) + model.tok_encode(text)
        store: TokenStore = store_of(tokens)
        expected = evaluate(model.model, store, context=length)
        found = model.loglikelihood_rolling(requests((text,), (text,), ("",)), disable_tqdm=True)
        assert found == pytest.approx([-expected.nats, -expected.nats, 0.0], rel=1e-9)


def test_windows_are_as_long_as_in_training(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = model_of(stream), sentences(12, seed=9)
    expected = evaluate(model.model, store_of(model.tok_encode(text)), context=CONTEXT).nats
    assert model.loglikelihood_rolling(requests((text,)), disable_tqdm=True) == [pytest.approx(-expected)]
    monkeypatch.setattr("logdepth.lm_eval.CHUNK_LOGITS", 5 * model.model.vocab_size)  # windows in parts
    assert model.loglikelihood_rolling(requests((text,)), disable_tqdm=True) == [pytest.approx(-expected)]


def test_a_stream_of_text_does_not_predict_its_first_token(stream: Path) -> None:
    model = model_of(stream)
    tokens = model.tok_encode("the cat sees")
    ((found, _),) = model.loglikelihood(requests(("", "the cat sees")), disable_tqdm=True)
    assert found == pytest.approx(expected_score(model, tokens[:1], tokens[1:])[0])


def test_texts_are_those_of_generate(run: Path) -> None:
    model = model_of(run, batch_size=2)
    prompts = ["the cat", "a small dog remembers every bird", "my", "the old clock"]
    settings: dict[str, Any] = {"until": ["e", "\n"], "max_gen_toks": 9}
    other: dict[str, Any] = {"until": "a", "max_gen_toks": 5, "do_sample": True, "temperature": 0.7, "top_k": 4}
    found = model.generate_until(requests(*((one, settings) for one in prompts), ("my", other)), disable_tqdm=True)
    for prompt, text in zip(prompts, found, strict=False):
        config = SamplingConfig(max_tokens=9, temperature=0, stop=("e", "\n"))
        pieces = generate(model.model, model.run_tokenizer, [prompt], config)
        assert text == "".join(piece.text for piece in pieces)
    assert any(found)
    assert _sampling_of(other) == SamplingConfig(max_tokens=5, temperature=0.7, top_k=4, stop=("a",))
    assert _sampling_of({"temperature": 0.7}) == SamplingConfig(max_tokens=256, temperature=0)
    with pytest.raises(UserError, match="does not know the setting num_beams=4"):
        _sampling_of({"num_beams": 4})


def test_long_contexts_are_shortened_where_asked(run: Path) -> None:
    model = model_of(run, max_length=9)
    context, more = model.tok_encode(sentences(2, seed=1)), [5, 6, 7]
    (found,) = model._loglikelihood_tokens([(None, context, more)], disable_tqdm=True)
    assert found[0] == pytest.approx(expected_score(model, context[-6:], more)[0])
    assert model.tok_encode(model._shortened_text(sentences(2, seed=1), 4)) == context[-5:]


def test_mistakes_are_named(run: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ({"path": str(tmp_path)}, "holds no run"),
        ({"path": str(run), "batch_size": "none"}, "batch_size must be auto or at least 1; got none"),
        ({"path": str(run), "max_length": 0}, "max_length must be at least 1; got 0"),
    ):
        with pytest.raises(UserError, match=words):
            LogDepthLM(**arguments)


QUESTIONS = ("the cat sees", "my neighbour sees", "every bird sees")
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_tasks(folder: Path, text: str) -> None:
    """Tasks on local files of JSON."""
    subjects = ("the cat", "my neighbour", "every bird")
    documents = {
        "choices": [
            {"question": f"{one} sees", "choices": list(CHOICES), "gold": at} for at, one in enumerate(subjects)
        ],
        "text": [{"text": text}],
        "answers": [{"question": f"{one} sees", "answer": "a"} for one in subjects],
    }
    for name, task in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in documents[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))  # JSON is YAML


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # datasets leaves files open
def test_tasks_run_offline_from_the_command_line(
    stream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    text = sentences(10, seed=4).replace("\n", " ").strip()
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks", text)
    words = f"--model logdepth --model_args path={stream} --include_path tasks --tasks {','.join(TASKS)}"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words.split(), "--output_path", "out.json"])
    main()
    assert "logdepth ({'path':" in capsys.readouterr().out
    (file,) = tmp_path.glob("out*.json")
    results = json.loads(file.read_text())["results"]
    model = LogDepthLM(str(stream))
    expected = evaluate(model.model, store_of(model.tok_encode(text)), context=CONTEXT)
    bits = expected.nats / np.log(2) / len(text.encode())
    assert results["text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    scores = model.loglikelihood(
        requests(
            *((f"{one} sees", f" {choice}") for one in ("the cat", "my neighbour", "every bird") for choice in CHOICES)
        )
    )
    best = np.array([score for score, _ in scores]).reshape(3, -1).argmax(1)
    assert results["choices"]["acc,none"] == pytest.approx((best == np.arange(3)).mean())
    assert results["answers"]["exact_match,none"] == 0
