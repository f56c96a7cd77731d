"""Training: every model learns, as its config says."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from logdepth.errors import UserError
from logdepth.runs import RunFolder
from logdepth.training import batches_of, train
from logdepth.training.optimizer import learning_rate
from tests.run_folders import measured, run_config, same_files
from tests.small_models import SCAN, SMALL_MODELS
from tests.tiny_corpus import store_of, write_corpus


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_every_model_learns(name: str, corpus: Path, tmp_path: Path) -> None:
    config = run_config(corpus, SMALL_MODELS[name], max_steps=60, evaluate_every=30)
    state = train(config, tmp_path / "run")
    lines = measured(tmp_path / "run")
    first = next(line["loss"] for line in lines if line["kind"] == "train")
    assert state.best_loss < first - 0.5
    assert state.best_loss < math.log(96) - 1
    assert state.finished == "all steps done"


@pytest.mark.parametrize("name", ["ar-grc", "deep", "transformer-alibi"])
def test_muon_learns_on_either_schedule(name: str, corpus: Path, tmp_path: Path) -> None:
    config = run_config(corpus, SMALL_MODELS[name], max_steps=60, evaluate_every=30, optimizer="muon", schedule="wsd")
    assert train(config, tmp_path).best_loss < math.log(96) - 1
    rates = {line["step"]: line["learning_rate"] for line in measured(tmp_path) if line["kind"] == "train"}
    assert rates == {step: learning_rate(config.train, step - 1, 60) for step in rates}
    assert rates[48] == 1e-2
    assert rates[60] == pytest.approx(1e-5)


def test_a_run_folder_has_everything(corpus: Path, tmp_path: Path) -> None:
    config = run_config(corpus)
    train(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert {file.name for file in (tmp_path / "run").iterdir()} == {
        "best.safetensors",
        "checkpoint.safetensors",
        "config.json",
        "environment.json",
        "last.safetensors",
        "lock",
        "metrics.jsonl",
        "tokenizer.model",
    }
    assert folder.config() == config
    assert folder.environment()["torch"] == torch.__version__
    steps = [(line["kind"], line["step"]) for line in folder.read_metrics()]
    assert steps == [
        ("train", 4),
        ("train", 8),
        ("valid", 8),
        ("train", 12),
        ("train", 16),
        ("valid", 16),
        ("train", 20),
        ("train", 24),
        ("valid", 24),
    ]
    loaded = folder.load("last")
    assert loaded.step == 24
    assert not loaded.model.training
    assert loaded.tokenizer.vocab_size == loaded.model.vocab_size


@pytest.mark.parametrize("changes", [{}, {"micro_batch": 3}, {"reset_at_documents": True}, {"shift_windows": True}])
def test_accelerate_is_the_default_and_changes_nothing_on_the_cpu(
    changes: dict[str, Any], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dataclasses.replace(SCAN, leaf_dropout=0.1)
    assert run_config(corpus, model, **changes).train.accelerate
    train(run_config(corpus, model, **changes), tmp_path / "accelerated")
    train(run_config(corpus, model, accelerate=False, **changes), tmp_path / "plain")
    said = capsys.readouterr().err
    assert "graph" not in said
    assert "kernel" not in said
    same_files(tmp_path / "plain", tmp_path / "accelerated")


def test_a_run_trains_on_shifted_windows_where_it_is_asked_to(corpus: Path) -> None:
    store = store_of(list(range(1000)))
    for shifted in (False, True):
        config = run_config(corpus, max_steps=5, shift_windows=shifted)
        assert batches_of(config, store).num_shifts == (config.train.context if shifted else 1)


def test_seeds_decide(corpus: Path, tmp_path: Path) -> None:
    losses = []
    for number, seed in enumerate((0, 0, 1)):
        config = dataclasses.replace(run_config(corpus, max_steps=5), seed=seed)
        losses.append(train(config, tmp_path / str(number)).best_loss)
    assert losses[0] == losses[1] != losses[2]


def test_corpora_smaller_than_a_batch_are_refused_before_anything_is_written(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fewer than one batch of 8 × 10000 \+ 1; lower --train.batch-size"):
        train(run_config(corpus, context=10_000), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_starts_from_the_weights_of_another(corpus: Path, tmp_path: Path) -> None:
    first = train(run_config(corpus), tmp_path / "first")
    other = write_corpus(tmp_path / "other", count=300)
    config = run_config(other, max_steps=2, learning_rate=1e-5, init_from=tmp_path / "first")
    second = train(config, tmp_path / "second")
    assert second.best_loss < first.best_loss + 0.3
    assert RunFolder(tmp_path / "second").tokenizer().hash == RunFolder(tmp_path / "first").tokenizer().hash
    wider = dataclasses.replace(SCAN, embed_width=20)
    with pytest.raises(UserError, match=r"best\.safetensors does not fit the model"):
        train(run_config(corpus, wider, init_from=tmp_path / "first"), tmp_path / "third")
    with pytest.raises(UserError, match="nowhere holds no run"):
        train(run_config(corpus, init_from=tmp_path / "nowhere"), tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_what_is_about_to_happen_is_said(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(run_config(corpus, max_steps=3, warmup_steps=9), tmp_path / "run")
    said = capsys.readouterr().err
    assert f"{tmp_path}/run: LM of " in said
    assert "3 steps of 8 × 16 tokens, from the start" in said
    assert "the warm-up of 9 steps is longer than the run" in said


def test_paths_are_kept_whole(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus.parent)
    train(run_config(Path(corpus.name), max_steps=2), tmp_path / "run")
    assert RunFolder(str(tmp_path / "run")).config().data.paths == (corpus,)


def test_threads_are_those_asked_for(corpus: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        train(run_config(corpus, max_steps=2, threads=3), tmp_path)
        assert RunFolder(tmp_path).environment()["threads"] == 3
    finally:
        torch.set_num_threads(before)
