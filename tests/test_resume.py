"""Runs that were stopped resume bit-for-bit; errors lose nothing that was saved."""

import dataclasses
import itertools
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from logdepth.checksums import seal
from logdepth.data import prepare
from logdepth.errors import UserError
from logdepth.runs import RunFolder
from logdepth.runs.environment import differences, environment, hash_of_code
from logdepth.runs.tensors import load_tensors, save_tensors
from logdepth.training import Interrupted, Trainer, resume, train
from logdepth.training.step import TrainingStep
from tests.run_folders import interrupted_at, measured, run_config, same_files
from tests.small_models import SMALL_MODELS


def test_resuming_a_finished_run_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    before = train(run_config(corpus), tmp_path)
    stamp = (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns
    assert resume(tmp_path) == before
    assert (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("stops", [(1,), (8,), (7, 8, 9, 23)])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ar-grc", {}),
        ("transformer-alibi", {}),
        ("ar-grc", {"optimizer": "muon", "schedule": "wsd"}),
        ("transformer-alibi", {"optimizer": "muon", "muon_learning_rate": 0.02}),
    ],
)
def test_interrupted_and_resumed_ends_in_the_same_bits(
    name: str, changes: dict[str, Any], stops: tuple[int, ...], corpus: Path, tmp_path: Path
) -> None:
    model = SMALL_MODELS[name]
    dropout = {"leaf_dropout": 0.1} if name == "ar-grc" else {"dropout": 0.1}
    config = run_config(corpus, dataclasses.replace(model, **dropout), **changes)
    train(config, tmp_path / "whole")
    for number, step in enumerate(stops):
        with interrupted_at(step, (signal.SIGINT, signal.SIGTERM)[number % 2]):
            if number:
                resume(tmp_path / "parts")
            else:
                train(config, tmp_path / "parts")
    resume(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_runs_from_before_a_field_was_added_resume(corpus: Path, tmp_path: Path) -> None:
    """A config.json need not have every field: those that it does not have take their defaults."""
    config = run_config(corpus)
    train(config, tmp_path / "whole")
    with interrupted_at(7, signal.SIGINT):
        train(config, tmp_path / "parts")
    file = tmp_path / "parts" / "config.json"
    saved = json.loads(file.read_text())
    for name in ("optimizer", "muon_learning_rate", "muon_momentum", "schedule", "decay_fraction"):
        del saved["config"]["train"][name]
    (tmp_path / "parts" / "checkpoint.safetensors").unlink()  # it names the config that the run had until now
    del saved["sha256"]
    file.write_text(json.dumps(seal(saved)))
    assert RunFolder(tmp_path / "parts").config() == config
    resume(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_an_interrupted_validation_is_made_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(corpus)
    train(config, tmp_path / "whole")
    original = Trainer._stop_if_asked

    def interrupting(self: Trainer, tokens: int) -> None:
        if self.state.step == 16:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_stop_if_asked", interrupting)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "parts")
    assert [line["step"] for line in measured(tmp_path / "parts") if line["kind"] == "valid"] == [8]
    resume(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_killed_between_the_files_of_the_last_save(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are written before the checkpoint that calls the run finished."""
    config = run_config(corpus)
    train(config, tmp_path / "whole")
    original = RunFolder.save_tensors

    def killed(self: RunFolder, file: Path, tensors: Any, record: Any) -> str:
        if file == self.checkpoint and record["standing"]["finished"]:
            raise KeyboardInterrupt
        return original(self, file, tensors, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_tensors", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "parts")
    assert load_tensors(tmp_path / "parts" / "last.safetensors")[1]["step"] == 24
    resume(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_metrics_after_the_checkpoint_are_measured_again(corpus: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    of_training = {"kind": "train", "seconds": 1.0, "loss": 3.0, "tokens_per_second": 9.0}
    lines = [of_training | {"step": 16}, {"kind": "valid", "step": 16, "seconds": 2.0, "valid_loss": 3.0}]
    folder.append_metrics(lines)
    mark = folder.metrics_mark()
    folder.append_metrics([of_training | {"step": 20}])
    with folder.metrics.open("a") as file:
        file.write('{"kind": "train", "st')
    folder.rewind_metrics(mark)
    assert folder.read_metrics() == lines
    folder.rewind_metrics_to_steps(step=16, validated=8)  # as with checkpoints of older versions
    assert folder.read_metrics() == lines[:1]


def test_speed_after_resuming_counts_the_steps_of_this_process(corpus: Path, tmp_path: Path) -> None:
    config = run_config(corpus, log_every=8)
    with interrupted_at(7, signal.SIGINT):
        train(config, tmp_path)
    again = Trainer(RunFolder(tmp_path), config, prepare(config.data), torch.device("cpu"))
    assert len(again.state.losses) == 7
    again.run()
    speeds = [line["tokens_per_second"] for line in RunFolder(tmp_path).read_metrics() if line["kind"] == "train"]
    assert speeds[0] < 5 * speeds[1]


def test_diverged_training_is_stopped_and_its_last_good_checkpoint_kept(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, steps = TrainingStep._loss, itertools.count()

    def breaking(self: TrainingStep, windows: torch.Tensor) -> torch.Tensor:
        return original(self, windows) * (math.nan if next(steps) == 13 else 1.0)

    monkeypatch.setattr(TrainingStep, "_loss", breaking)
    with pytest.raises(UserError, match=r"at step 14 the loss was nan.*lower --train.learning-rate"):
        train(run_config(corpus), tmp_path)
    tensors, record = load_tensors(tmp_path / "checkpoint.safetensors")
    assert record["standing"]["step"] == 8
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_gradients_that_are_not_finite_are_never_saved(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the last step before a checkpoint may be fine while its gradient is not."""
    original, steps = TrainingStep._loss, itertools.count()

    def breaking(self: TrainingStep, windows: torch.Tensor) -> torch.Tensor:
        loss = original(self, windows)
        if next(steps) == 15:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(TrainingStep, "_loss", breaking)
    with pytest.raises(UserError, match=r"at step 16 .* the norm of the gradient"):
        train(run_config(corpus), tmp_path)
    assert load_tensors(tmp_path / "checkpoint.safetensors")[1]["standing"]["step"] == 8


def test_folders_that_are_taken_are_refused(corpus: Path, tmp_path: Path) -> None:
    config = run_config(corpus, max_steps=2)
    train(config, tmp_path / "run")
    with pytest.raises(UserError, match=r"already holds a run; resume it with `logdepth train --resume"):
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


def test_code_that_changed_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = hash_of_code(tmp_path)
    (tmp_path / "a.txt").write_text("not code")
    assert hash_of_code(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = hash_of_code(tmp_path)
    (tmp_path / "b.py").write_text("x = 2\n")
    assert len({before, renamed, hash_of_code(tmp_path)}) == 3
    facts = environment(torch.device("cpu"))
    assert differences(facts | {"code": "other"}, facts) == [f"code other → {facts['code']}"]


def test_two_processes_cannot_train_in_one_folder(corpus: Path, tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(UserError, match="another process is training"),
    ):
        train(run_config(corpus, max_steps=2), tmp_path)


def test_damaged_runs_are_refused(corpus: Path, tmp_path: Path) -> None:
    train(run_config(corpus, max_steps=2), tmp_path)
    checkpoint = tmp_path / "checkpoint.safetensors"
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-10])
    with pytest.raises(UserError, match=r"checkpoint\.safetensors is damaged"):
        resume(tmp_path)
    save_tensors(checkpoint, {}, {})
    with pytest.raises(UserError, match="is not a checkpoint of this version"):
        resume(tmp_path)
    save_tensors(tmp_path / "best.safetensors", {"x": torch.zeros(1)}, {"step": 1})
    with pytest.raises(UserError, match=r"best\.safetensors does not fit the model"):
        RunFolder(tmp_path).load()
    (tmp_path / "best.safetensors").unlink()
    with pytest.raises(UserError, match=r"best\.safetensors is not there: resume the run .*, or, if .* --weights last"):
        RunFolder(tmp_path).load()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"version": 99}))
    with pytest.raises(UserError, match="has version 99; this logdepth reads versions 1 and 2"):
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


def test_checkpoints_between_validations_change_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_config(corpus), tmp_path / "rarely")
    saves: list[int] = []
    original = Trainer._save
    monkeypatch.setattr(Trainer, "_save", lambda self: saves.append(self.state.step) or original(self))
    train(run_config(corpus, checkpoint_minutes=1e-9), tmp_path / "often")
    assert set(saves) == set(range(1, 25))
    same_files(tmp_path / "rarely", tmp_path / "often")
    odd = {"max_steps": 25, "evaluate_every": 7, "log_every": 10}  # lines and validations at different steps
    train(run_config(corpus, **odd), tmp_path / "odd")
    train(run_config(corpus, **odd, checkpoint_minutes=1e-9), tmp_path / "odd and often")
    same_files(tmp_path / "odd", tmp_path / "odd and often")


def test_short_epochs_do_without_some_checkpoints(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill then loses validations; the best weights on disk are those that the checkpoint knows."""
    train(run_config(corpus), tmp_path / "whole")
    saves: list[int] = []
    original, step = Trainer._save, Trainer._step
    monkeypatch.setattr("logdepth.training.checkpoint.CHECKPOINT_SHARE", 1e-9)
    monkeypatch.setattr(Trainer, "_save", lambda self: saves.append(self.state.step) or original(self))

    def killed(self: Trainer) -> None:
        if self.state.step == 20:
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(run_config(corpus), tmp_path / "parts")
    assert saves == [8]
    assert load_tensors(tmp_path / "parts" / "best.safetensors")[1]["step"] == 8
    assert [line["step"] for line in measured(tmp_path / "parts") if line["kind"] == "valid"] == [8, 16]
    resume(tmp_path / "parts")
    assert saves == [8, 16, 24], "the first of a process, and the last"
    same_files(tmp_path / "whole", tmp_path / "parts")


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
