"""Training: every model learns, as its config says."""

import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from logdepth.errors import UserError
from logdepth.runs import RunFolder, TrainConfig, decisive
from logdepth.runs.tensors import load_tensors
from logdepth.train import Trainer, batches_of, compile_model, make_faster, train
from logdepth.train.optimizer import build_optimizer, learning_rate
from tests.run_folders import TRAIN, measured, run_config, same_files
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


def test_micro_batches_give_the_gradient_of_the_batch(corpus: Path, tmp_path: Path) -> None:
    for number, micro_batch in enumerate((None, 4, 3, 1)):
        config = run_config(corpus, SMALL_MODELS["deep"], max_steps=3, micro_batch=micro_batch)
        train(config, tmp_path / str(number))
        left, right = (load_file(tmp_path / name / "last.safetensors") for name in ("0", str(number)))
        for key in left:
            torch.testing.assert_close(left[key], right[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"micro_batch": 3}, {"reset_at_documents": True}, {"shift_windows": True}])
def test_accelerate_changes_nothing_on_the_cpu_and_says_so(
    changes: dict[str, Any], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dataclasses.replace(SCAN, leaf_dropout=0.1)
    train(run_config(corpus, model, **changes), tmp_path / "plain")
    assert "train.accelerate" not in capsys.readouterr().err
    train(run_config(corpus, model, accelerate=True, **changes), tmp_path / "accelerated")
    assert capsys.readouterr().err.count("train.accelerate changes nothing on the cpu") == 1
    same_files(tmp_path / "plain", tmp_path / "accelerated")


def test_machines_of_a_study_may_differ_in_how_they_accelerate(corpus: Path) -> None:
    assert decisive(run_config(corpus)) == decisive(run_config(corpus, accelerate=True, compile=True))


def test_a_captured_step_is_a_step(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a GPU does in a step is one function of windows and rate; a capture that failed leaves nothing in it."""
    config = run_config(corpus, dataclasses.replace(SCAN, leaf_dropout=0.1))
    train(config, tmp_path / "plain")
    original, rates = Trainer._gradients_and_update, []

    def after_a_failure(self: Trainer, windows: torch.Tensor, rate: float) -> Any:
        rates.append(rate)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)  # as a failed capture leaves them
        return original(self, windows, rate)

    monkeypatch.setattr(Trainer, "_gradients_and_update", after_a_failure)
    train(config, tmp_path / "captured")
    assert rates == [learning_rate(config.train, step, 24) for step in range(24)]
    same_files(tmp_path / "plain", tmp_path / "captured")


def test_what_a_scan_model_is_made_of_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, *, dynamic: compiled.append(module))
    config = dataclasses.replace(SCAN, embedding_net=True, post_merge="up")
    model = config.build(96)
    compile_model(model)
    (layer,) = model.layers
    assert compiled == [*layer.operators(), layer.embedding_net]
    compiled.clear()
    compile_model(dataclasses.replace(config, embedding_net=False).build(96))
    assert [type(one).__name__ for one in compiled] == ["PostMerge", "GRC"]


def test_the_loss_of_a_compiled_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does without `forward`, which is all that a module compiles by itself."""
    model, tokens = SMALL_MODELS["transformer-sinusoidal"].build(13), torch.tensor([[1, 2, 3]])
    names, loss, compiled = set(model.state_dict()), model.loss(tokens, tokens), []

    def as_if_compiled(function: Any, *, dynamic: bool | None) -> Any:
        assert dynamic is None
        return lambda *arguments: compiled.append(function.__name__) or function(*arguments)

    monkeypatch.setattr(torch, "compile", as_if_compiled)
    compile_model(model)
    assert model.loss(tokens, tokens) == loss
    assert compiled == ["loss"]
    assert set(model.state_dict()) == names


@pytest.mark.filterwarnings("default")  # the compiler warns of its own insides
def test_models_compiled_before_do_not_use_up_the_recompilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a sweep compile the same code for other rates of dropout."""
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    tokens = torch.tensor([[1, 2, 3]])
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for dropout in (0.1, 0.2, 0.3):
            model = dataclasses.replace(SMALL_MODELS["transformer-sinusoidal"], dropout=dropout).build(13)
            assert make_faster(model, accelerate=False, compiled=True) is None
            assert model(tokens).isfinite().all()


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


def test_early_stopping(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logdepth.train.loop as loop

    real, losses = loop.evaluate, iter([3.0, 2.0, 2.5, 2.0, 2.1, 1.0])

    def scripted(*arguments: Any, **settings: Any) -> Any:
        result = real(*arguments, **settings)
        return dataclasses.replace(result, nats=next(losses) * result.tokens)

    monkeypatch.setattr(loop, "evaluate", scripted)
    state = train(run_config(corpus, max_steps=100, evaluate_every=2, patience=3), tmp_path)
    assert state.finished == "no better validation loss"
    assert (state.step, state.best_step, state.best_loss) == (10, 4, pytest.approx(2.0))
    assert load_tensors(tmp_path / "best.safetensors")[1] == {"step": 4}
    assert load_tensors(tmp_path / "last.safetensors")[1] == {"step": 10}


@pytest.mark.parametrize("name", ["ar-grc", "transformer-alibi"])
def test_documents_that_start_anew_train_as_if_alone(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    original = Trainer._loss

    def looking(self: Trainer, windows: torch.Tensor) -> torch.Tensor:
        windows[:, 5] = self.separator  # a document ends there
        loss = original(self, windows)
        with torch.no_grad():
            parts = [self.model(windows[:, :6]), self.model(windows[:, 6:-1])]
            apart = nn.functional.cross_entropy(torch.cat(parts, dim=1).flatten(0, 1), windows[:, 1:].flatten())
        seen.append((loss.item(), apart.item()))
        return loss

    monkeypatch.setattr(Trainer, "_loss", looking)
    train(run_config(corpus, SMALL_MODELS[name], max_steps=3, reset_at_documents=True), tmp_path / "run")
    for loss, apart in seen:
        assert loss == pytest.approx(apart, rel=1e-5)


def test_gradients_are_clipped(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    original = torch.optim.AdamW.step

    def looking(self: torch.optim.AdamW, *arguments: Any) -> Any:
        grads = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norms.append(torch.stack([grad.norm() for grad in grads]).norm().item())
        return original(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", looking)
    train(run_config(corpus, max_steps=4, clip=0.01), tmp_path / "run")
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)
    before = [line["gradient_norm"] for line in measured(tmp_path / "run") if line["kind"] == "train"]
    assert before[-1] > 0.05


@pytest.mark.parametrize("name", ["ar-grc", "transformer-sinusoidal"])
def test_bfloat16_learns_too(name: str, corpus: Path, tmp_path: Path) -> None:
    state = train(run_config(corpus, SMALL_MODELS[name], max_steps=40, precision="bfloat16"), tmp_path)
    assert state.best_loss < math.log(96) - 1
    assert {tensor.dtype for tensor in load_file(tmp_path / "last.safetensors").values()} == {torch.float32}


def test_corpora_smaller_than_a_batch_are_refused_before_anything_is_written(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fewer than one batch of 8 × 10000 \+ 1; lower --train.batch-size"):
        train(run_config(corpus, context=10_000), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_learning_rate_rises_and_falls_to_a_thousandth() -> None:
    config = TrainConfig(learning_rate=2.0, warmup_steps=10)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == pytest.approx(2.0)
    assert rates[99] == pytest.approx(0.002)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[54] == pytest.approx(1.0, abs=0.05)
    assert learning_rate(TrainConfig(), 0, 1) == pytest.approx(1e-3)


def test_weight_decay_is_on_matrices_alone() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    decayed, plain = build_optimizer(model, TrainConfig(weight_decay=0.5)).param_groups
    assert {tuple(one.shape) for one in decayed["params"]} == {(3, 4), (4, 4)}
    assert {tuple(one.shape) for one in plain["params"]} == {(4,)}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)


def test_tensorboard_gets_the_metrics(corpus: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(run_config(corpus, trackers=("tensorboard",)), tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("valid_loss")] == [8, 16, 24]


def test_trackers_that_are_not_installed_are_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install '\.\[trackers\]'"):
        train(run_config(corpus, trackers=("wandb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"weight_decay": -1.0}, "must not be negative"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(TRAIN, **changes)


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
    with pytest.raises(UserError, match="the tokenizer is missing"):
        train(run_config(corpus, init_from=tmp_path / "nowhere"), tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_what_is_about_to_happen_is_said(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(run_config(corpus, max_steps=3, warmup_steps=9), tmp_path / "run")
    said = capsys.readouterr().err
    assert f"{tmp_path}/run: ScanLM of " in said
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
