"""Training: every model learns; runs resume to the bit; what goes wrong loses nothing."""

import dataclasses
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from logdepth.data import prepare
from logdepth.errors import UserError
from logdepth.models import ModelConfig
from logdepth.runs import RunConfig, RunFolder, TrainConfig
from logdepth.runs.tensors import load_tensors, save_tensors
from logdepth.train import Interrupted, Trainer, resume, train
from logdepth.train.optimizer import build_optimizer, learning_rate
from tests.run_folders import measured, same_files
from tests.small_models import SCAN, SMALL_MODELS
from tests.tiny_corpus import tiny_data, write_corpus

TRAIN = TrainConfig(
    learning_rate=1e-2, max_steps=24, evaluate_every=8, batch_size=8, context=16, log_every=4, device="cpu"
)


def run_config(corpus: Path, model: ModelConfig = SCAN, **changes: Any) -> RunConfig:
    return RunConfig(data=tiny_data(corpus), model=model, train=dataclasses.replace(TRAIN, **changes))


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_every_model_learns(name: str, corpus: Path, tmp_path: Path) -> None:
    config = run_config(corpus, SMALL_MODELS[name], max_steps=60, evaluate_every=30)
    standing = train(config, tmp_path / "run")
    lines = measured(tmp_path / "run")
    first = next(line["loss"] for line in lines if line["kind"] == "train")
    assert standing.best_loss < first - 0.5
    assert standing.best_loss < math.log(96) - 1
    assert standing.finished == "all steps done"


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


def test_resuming_a_finished_run_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    before = train(run_config(corpus), tmp_path)
    stamp = (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns
    assert resume(tmp_path) == before
    assert (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("stops", [(1,), (8,), (7, 8, 9, 23)])
@pytest.mark.parametrize("name", ["ar-grc", "alibi"])
def test_interrupted_and_resumed_ends_in_the_same_bits(
    name: str, stops: tuple[int, ...], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SMALL_MODELS[name]
    dropout = {"leaf_dropout": 0.1} if name == "ar-grc" else {"dropout": 0.1}
    config = run_config(corpus, dataclasses.replace(model, **dropout))
    train(config, tmp_path / "whole")
    original = Trainer._step

    def stopping(self: Trainer) -> None:
        original(self)
        if pending and self.standing.step == pending[0]:
            os.kill(os.getpid(), signal.SIGINT if len(pending) % 2 else signal.SIGTERM)

    pending = list(stops)
    monkeypatch.setattr(Trainer, "_step", stopping)
    steps: list[int] = []
    work = lambda: train(config, tmp_path / "parts")  # noqa: E731
    while True:
        try:
            work()
            break
        except Interrupted as stopped:
            steps.append(stopped.step)
            pending.pop(0)
            work = lambda: resume(tmp_path / "parts")  # noqa: E731
    assert steps == list(stops)
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_an_interrupted_validation_is_made_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(corpus)
    train(config, tmp_path / "whole")
    original = Trainer._give_way

    def interrupting(self: Trainer, tokens: int) -> None:
        if self.standing.step == 16:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_give_way", interrupting)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "parts")
    assert [line["step"] for line in measured(tmp_path / "parts") if line["kind"] == "valid"] == [8]
    resume(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_micro_batches_give_the_gradient_of_the_batch(corpus: Path, tmp_path: Path) -> None:
    for number, micro_batch in enumerate((None, 4, 3, 1)):
        config = run_config(corpus, SMALL_MODELS["deep"], max_steps=3, micro_batch=micro_batch)
        train(config, tmp_path / str(number))
        left, right = (load_file(tmp_path / name / "last.safetensors") for name in ("0", str(number)))
        for key in left:
            torch.testing.assert_close(left[key], right[key], rtol=1e-3, atol=1e-4)


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
    standing = train(run_config(corpus, max_steps=100, evaluate_every=2, patience=3), tmp_path)
    assert standing.finished == "no better validation loss"
    assert (standing.step, standing.best_step, standing.best_loss) == (10, 4, pytest.approx(2.0))
    assert load_tensors(tmp_path / "best.safetensors")[1] == {"step": 4}
    assert load_tensors(tmp_path / "last.safetensors")[1] == {"step": 10}


@pytest.mark.parametrize("name", ["ar-grc", "alibi"])
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


def test_killed_between_the_files_of_the_last_save(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are written before the checkpoint that calls the run finished."""
    import logdepth.train.loop as loop

    config = run_config(corpus)
    train(config, tmp_path / "whole")
    original = loop.save_tensors

    def killed(path: Path, tensors: Any, record: Any) -> None:
        if record["standing"]["finished"]:
            raise KeyboardInterrupt
        original(path, tensors, record)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_tensors", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "parts")
    resume(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_metrics_after_the_checkpoint_are_measured_again(corpus: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines = [{"kind": "train", "step": 16}, {"kind": "valid", "step": 16}, {"kind": "train", "step": 20}]
    folder.append_metrics(lines)
    with folder.metrics.open("a") as file:
        file.write('{"kind": "train", "st')
    folder.rewind_metrics(step=16, validated=8)
    assert folder.read_metrics() == lines[:1]


def test_speed_after_resuming_counts_the_steps_of_this_process(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(corpus, log_every=8)
    original = Trainer._step

    def stopping(self: Trainer) -> None:
        original(self)
        if self.standing.step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopping)
        with pytest.raises(Interrupted):
            train(config, tmp_path)
    again = Trainer(RunFolder(tmp_path), config, prepare(config.data), torch.device("cpu"))
    assert len(again.standing.losses) == 7
    again.run()
    speeds = [line["tokens_per_second"] for line in RunFolder(tmp_path).read_metrics() if line["kind"] == "train"]
    assert speeds[0] < 5 * speeds[1]


@pytest.mark.parametrize("name", ["ar-grc", "sinusoidal"])
def test_bfloat16_learns_too(name: str, corpus: Path, tmp_path: Path) -> None:
    standing = train(run_config(corpus, SMALL_MODELS[name], max_steps=40, precision="bfloat16"), tmp_path)
    assert standing.best_loss < math.log(96) - 1
    assert {tensor.dtype for tensor in load_file(tmp_path / "last.safetensors").values()} == {torch.float32}


def test_diverged_training_is_stopped_and_its_last_good_checkpoint_kept(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer._loss

    def breaking(self: Trainer, windows: torch.Tensor) -> torch.Tensor:
        return original(self, windows) * (math.nan if self.standing.step == 13 else 1.0)

    monkeypatch.setattr(Trainer, "_loss", breaking)
    with pytest.raises(UserError, match=r"at step 14 the loss was nan.*lower --train.learning-rate"):
        train(run_config(corpus), tmp_path)
    tensors, record = load_tensors(tmp_path / "checkpoint.safetensors")
    assert record["standing"]["step"] == 8
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_gradients_that_are_not_finite_are_never_saved(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the last step before a checkpoint may be fine while its gradient is not."""
    original = Trainer._loss

    def breaking(self: Trainer, windows: torch.Tensor) -> torch.Tensor:
        loss = original(self, windows)
        if self.standing.step == 15:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(Trainer, "_loss", breaking)
    with pytest.raises(UserError, match=r"at step 16 .* the gradient's norm"):
        train(run_config(corpus), tmp_path)
    assert load_tensors(tmp_path / "checkpoint.safetensors")[1]["standing"]["step"] == 8


def test_folders_that_are_taken_are_refused(corpus: Path, tmp_path: Path) -> None:
    config = run_config(corpus, max_steps=2)
    train(config, tmp_path / "run")
    with pytest.raises(UserError, match=r"already holds a run; go on with it by `logdepth train --resume"):
        train(config, tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        train(config, tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        train(config, tmp_path / "file")
    with pytest.raises(UserError, match="holds no run"):
        resume(tmp_path / "other")


def test_a_folder_that_was_being_made_when_it_was_killed_is_made_anew(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / ".partial-99-config.json").write_text("{")
    assert train(run_config(corpus, max_steps=2), tmp_path).finished


def test_two_processes_cannot_train_in_one_folder(corpus: Path, tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(UserError, match="another process is training"),
    ):
        train(run_config(corpus, max_steps=2), tmp_path)


def test_corpora_smaller_than_a_batch_are_refused_before_anything_is_written(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fewer than one batch of 8 × 10000 \+ 1; lower --train.batch-size"):
        train(run_config(corpus, context=10_000), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_damaged_runs_are_refused(corpus: Path, tmp_path: Path) -> None:
    train(run_config(corpus, max_steps=2), tmp_path)
    checkpoint = tmp_path / "checkpoint.safetensors"
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-10])
    with pytest.raises(UserError, match=r"checkpoint\.safetensors is damaged"):
        resume(tmp_path)
    save_tensors(checkpoint, {}, None)
    with pytest.raises(UserError, match="is not a checkpoint of this version"):
        resume(tmp_path)
    save_tensors(tmp_path / "best.safetensors", {"x": torch.zeros(1)}, {"step": 1})
    with pytest.raises(UserError, match=r"best\.safetensors does not fit the model"):
        RunFolder(tmp_path).load()
    (tmp_path / "best.safetensors").unlink()
    with pytest.raises(UserError, match="has no best weights yet"):
        RunFolder(tmp_path).load()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"version": 99}))
    with pytest.raises(UserError, match="has version 99; this logdepth reads version 1"):
        RunFolder(tmp_path).load()


def test_a_run_goes_on_with_its_own_text_only(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(run_config(corpus, max_steps=2), tmp_path / "run")
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / "empty"))
    assert resume(tmp_path / "run").finished  # prepared again from the same files
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / "empty too"))
    before = (corpus / "valid.txt").read_text()
    try:
        (corpus / "valid.txt").write_text("the cat sees .\n")
        with pytest.raises(UserError, match=r"is not the text that .* was trained on"):
            resume(tmp_path / "run")
    finally:
        (corpus / "valid.txt").write_text(before)


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
    with pytest.raises(UserError, match=r"pip install 'logdepth\[trackers\]'"):
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


def test_checkpoints_between_validations_change_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_config(corpus), tmp_path / "rarely")
    saves: list[int] = []
    original = Trainer._save
    monkeypatch.setattr(Trainer, "_save", lambda self: saves.append(self.standing.step) or original(self))
    train(run_config(corpus, checkpoint_minutes=1e-9), tmp_path / "often")
    assert set(saves) == set(range(1, 25))
    same_files(tmp_path / "rarely", tmp_path / "often")
    odd = {"max_steps": 25, "evaluate_every": 7, "log_every": 10}  # lines and validations at different steps
    train(run_config(corpus, **odd), tmp_path / "odd")
    train(run_config(corpus, **odd, checkpoint_minutes=1e-9), tmp_path / "odd and often")
    same_files(tmp_path / "odd", tmp_path / "odd and often")


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


def test_weights_that_explode_before_a_validation_are_not_saved(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="after step 1 the validation loss was nan: training diverged"):
        train(run_config(corpus, max_steps=1, learning_rate=1e38), tmp_path)
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_a_run_that_has_begun_no_longer_needs_the_one_it_started_from(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_config(corpus, max_steps=4), tmp_path / "first")
    config = run_config(corpus, max_steps=4, init_from=tmp_path / "first")
    train(config, tmp_path / "whole")

    def killed(self: Trainer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "parts")
    (tmp_path / "first").rename(tmp_path / "moved")
    resume(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_resuming_without_a_tracker_is_refused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(run_config(corpus, trackers=("tensorboard",)), tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match="the tracker tensorboard is not installed"):
        resume(tmp_path)
