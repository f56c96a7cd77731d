"""Files of a run that were damaged, edited or exchanged are refused; a run is extended through a door of its own."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import logdepth.atomic as atomic
from logdepth.checksums import seal
from logdepth.cli import main
from logdepth.data import prepare
from logdepth.errors import UserError
from logdepth.runs import RunFolder
from logdepth.runs.tensors import load_tensors, save_tensors
from logdepth.training import resume, train
from tests.command_line import refused
from tests.run_folders import interrupted_at, measured, run_config, same_files
from tests.small_models import SMALL_MODELS
from tests.tiny_corpus import write_corpus

FILES = ("config.json", "environment.json", "tokenizer.model", "metrics.jsonl", "checkpoint.safetensors")


@pytest.fixture(scope="module")
def stopped(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first validation."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGDEPTH_CACHE", str(folder.parent / "cache"))
        with interrupted_at(10, signal.SIGINT):
            train(run_config(corpus), folder)
    return folder


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_keeps_a_run_from_resuming(name: str, share: float, run: Path) -> None:
    file = run / name
    flip(file, int(share * (file.stat().st_size - 2)))
    before = {one: (run / one).read_bytes() for one in FILES}
    with pytest.raises(UserError) as caught:
        resume(run)
    assert str(file) in str(caught.value)
    assert "restore " in str(caught.value)
    assert {one: (run / one).read_bytes() for one in FILES} == before


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("which", ["best", "last"])
def test_a_flipped_bit_keeps_weights_from_loading(which: Any, share: float, run: Path) -> None:
    file = RunFolder(run).weights(which)
    flip(file, int(share * (file.stat().st_size - 1)))
    with pytest.raises(UserError, match=rf"{which}\.safetensors .*; restore it from a copy, or train a new run"):
        RunFolder(run).load(which)


@pytest.mark.parametrize("path", ["config/seed", "config/train/learning_rate", "config/model/input_residual", "store"])
def test_an_edited_config_is_refused(path: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "config.json"
    saved = json.loads(file.read_text())
    inner = saved
    *parts, last = path.split("/")
    for part in parts:
        inner = inner[part]
    inner[last] = "other" if isinstance(inner[last], str) else (inner[last] or 0) + 1
    file.write_text(json.dumps(saved))
    for verb in (["train", "--resume", str(run)], ["evaluate", str(run)], ["generate", str(run)]):
        line = refused(capsys, *verb)
        assert f"{file} does not match its checksum" in line
        assert f"logdepth train --resume {run} --train.max-steps N" in line
    del saved["sha256"]
    file.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"config\.json has lost its checksum"):
        RunFolder(run).load()
    file.write_text(json.dumps(seal(saved)))  # even as if it had always been so
    with pytest.raises(UserError, match=r"best\.safetensors does not belong to .*config\.json"):
        RunFolder(run).load()
    file.write_text(json.dumps(saved | {"version": 1}))
    with pytest.raises(UserError, match=r"best\.safetensors does not belong to .*config\.json"):
        RunFolder(run).load()


def test_a_config_that_is_only_formatted_otherwise_is_the_same(run: Path) -> None:
    file = run / "config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(saved.items()))).replace(",", ",\r\n"))
    assert resume(run).finished


def test_files_of_other_runs_are_refused(run: Path, corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train(dataclasses.replace(run_config(corpus, max_steps=8), seed=5), other)
    for name, says in (
        ("best.safetensors", r"best\.safetensors does not belong to .*config\.json"),
        ("last.safetensors", r"last\.safetensors does not belong to"),
    ):
        shutil.copy(other / name, run / name)
        with pytest.raises(UserError, match=says):
            RunFolder(run).load("best" if "best" in name else "last")
    shutil.copy(other / "checkpoint.safetensors", run)
    with pytest.raises(UserError, match=r"checkpoint\.safetensors does not belong to"):
        resume(run)
    shutil.copy(other / "best.safetensors", other / "last.safetensors")
    with pytest.raises(UserError, match=r"last\.safetensors holds the best weights of the run, not the last"):
        RunFolder(other).load("last")


@pytest.mark.parametrize("which", ["best", "last"])
def test_weights_of_another_step_are_refused(which: Any, run: Path, tmp_path: Path) -> None:
    earlier = Path(shutil.copytree(run, tmp_path / "earlier"))
    assert resume(run).best_step == 24
    finished = Path(shutil.copytree(run, tmp_path / "finished"))
    name = f"{which}.safetensors"
    shutil.copy(earlier / name, run / name)
    for use in (lambda: RunFolder(run).load(which), lambda: resume(run)):
        with pytest.raises(
            UserError, match=rf"{which}\.safetensors does not hold the weights that .*checkpoint.* names"
        ):
            use()
    # As after a kill between the weights and their checkpoint: they are of a later step.
    shutil.copy(finished / name, earlier / name)
    assert RunFolder(earlier).load(which).step == 24
    assert resume(earlier).finished


def test_checkpoints_of_older_versions_name_no_weights(run: Path, tmp_path: Path) -> None:
    earlier = (run / "best.safetensors").read_bytes()
    resume(run)
    file = RunFolder(run).checkpoint
    tensors, record = load_tensors(file)
    del record["weights"]
    save_tensors(file, tensors, record)
    (run / "best.safetensors").write_bytes(earlier)
    assert RunFolder(run).load().step == 8
    assert resume(run).finished


def test_weights_load_without_their_checkpoint_but_not_beside_a_damaged_one(run: Path) -> None:
    file = RunFolder(run).checkpoint
    flip(file, 3)
    with pytest.raises(
        UserError, match=r"checkpoint\.safetensors is damaged .* or remove it to use the weights without"
    ):
        RunFolder(run).load()
    save_tensors(file, {}, {"weights": {"best": "x"}, "standing": {"validated": "8"}})
    with pytest.raises(UserError, match=r"best\.safetensors does not hold the weights"):
        RunFolder(run).load()
    file.unlink()
    assert RunFolder(run).load().step == 8


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_without_its_best_weights_does_not_resume(finished: bool, run: Path) -> None:
    if finished:
        resume(run)
    (run / "best.safetensors").unlink()
    before = {one: (run / one).read_bytes() for one in FILES}
    with pytest.raises(UserError, match=r"best\.safetensors is gone; restore it from a copy, or train a new run"):
        resume(run)
    assert {one: (run / one).read_bytes() for one in FILES} == before


@pytest.mark.parametrize(
    "name", ["checkpoint.safetensors", "metrics.jsonl", "best.safetensors", "last.safetensors", "config.json"]
)
def test_a_folder_in_place_of_a_file_is_refused(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).unlink()
    (run / name).mkdir()
    line = refused(capsys, "train", "--resume", str(run))
    assert (f"{run / name} is not a file; move it away" in line) == (name != "config.json")
    assert capsys.readouterr().err == ""


def test_what_a_kill_left_while_weights_were_saved_is_removed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors writes under a temporary name that it makes up, which only a folder of our own can hold."""
    before = sorted(run.iterdir())

    def killed(_: Any, file: Path, **__: Any) -> None:
        Path(file).with_name(".tmpX1y2z3").write_text("half of the weights")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", killed)
        patch.setattr(atomic, "remove_partial", lambda _: None)  # a killed process removes nothing
        with pytest.raises(KeyboardInterrupt):
            resume(run)
    (left,) = set(run.iterdir()) - set(before)
    assert left.name.startswith(atomic.PARTIAL)
    assert resume(run).finished
    assert sorted(run.iterdir()) == before


def test_another_tokenizer_is_refused(run: Path, corpus: Path, tmp_path: Path) -> None:
    config = run_config(corpus, max_steps=2)
    tokenizer = dataclasses.replace(config.data.tokenizer, vocab_size=80)
    train(dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=tokenizer)), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "tokenizer.model", run)
    for use in (lambda: RunFolder(run).load(), lambda: resume(run)):
        with pytest.raises(UserError, match=r"tokenizer\.model does not match its checksum"):
            use()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("mood", "good", "standing: unknown field 'mood'; there are: step.*"),
        ("step", "8", r"standing\.step: expected int; got '8'"),
        ("step", -5, "standing: validated must be from 0 to step; got 8 and -5"),
        ("losses", "abc", r"standing\.losses: expected list; got 'abc'"),
    ],
)
def test_records_that_this_version_does_not_know_are_refused(field: str, value: Any, says: str, run: Path) -> None:
    tensors, record = load_tensors(run / "checkpoint.safetensors")
    record["standing"][field] = value
    save_tensors(run / "checkpoint.safetensors", tensors, record)
    with pytest.raises(UserError, match=rf"not a checkpoint of this version .*\({says}\); restore it"):
        resume(run)


@pytest.mark.parametrize("line", ['{"x":1}', "[1]", "5", '{"kind": "dance", "step": 1}', '{"kind": ["train"]}', '{"ki'])
def test_metrics_that_cannot_be_read_are_reported(line: str, run: Path, corpus: Path) -> None:
    file = run / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(line + "\n" + whole)
    with pytest.raises(UserError, match=r"metrics\.jsonl:1 is not a line of metrics: .*; restore it"):
        RunFolder(run).read_metrics()
    with pytest.raises(UserError, match=r"metrics\.jsonl does not match its checksum.*move it away"):
        resume(run)
    file.write_bytes(b"\xff\n" + whole.encode())
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl"):
        RunFolder(run).read_metrics()


def test_metrics_of_a_finished_run_are_not_to_be_moved_away(corpus: Path, tmp_path: Path) -> None:
    """Without them, a finished run is refused."""
    train(run_config(corpus), tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    for line in (b"5\n", b"\xff\n"):
        file.write_bytes(line + file.read_bytes())
        with pytest.raises(UserError, match=r"metrics\.jsonl.*; restore it from a copy, or train a new run$"):
            RunFolder(tmp_path / "run").read_metrics()


def test_a_folder_whose_name_safetensors_cannot_read_is_not_called_damaged(run: Path, tmp_path: Path) -> None:
    odd = run.rename(tmp_path / "caf\udce9")
    for read in (RunFolder(odd).load, lambda: resume(odd)):
        with pytest.raises(UserError, match=r"is not UTF-8 or has control characters; rename it"):
            read()


def test_a_record_that_is_nested_too_deeply_is_damage(run: Path) -> None:
    tensors, _ = load_tensors(run / "last.safetensors")
    safetensors.torch.save_file(tensors, run / "last.safetensors", {"logdepth": "[" * 100_000})
    with pytest.raises(UserError, match=r"last\.safetensors is damaged .*; restore it from a copy"):
        RunFolder(run).load("last")


@pytest.mark.parametrize(
    ("added", "says"),
    [
        (b'{"x": 1}\n[1]\n\xff\n', "removed 3 lines that are unreadable"),
        (b"5\n", "removed 1 line that is unreadable"),
        (b'{"kind": "train", "step": 17, "sec', None),  # a crash cut it off
    ],
)
def test_unreadable_metrics_after_the_checkpoint_are_reported(
    added: bytes, says: str | None, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(added)
    assert resume(run).finished
    err = capsys.readouterr().err
    assert "unreadable;" not in err if says is None else says in err
    assert [line["step"] for line in measured(run) if line["kind"] == "valid"] == [8, 16, 24]


def test_metrics_that_were_moved_away_are_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    assert resume(run).finished
    assert "metrics.jsonl is gone: the metrics so far are lost" in capsys.readouterr().err
    assert [line["step"] for line in measured(run) if line["kind"] == "valid"] == [16, 24]
    assert resume(run).finished


def test_metrics_of_a_finished_run_are_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("5\n")
    capsys.readouterr()
    resume(run)
    assert capsys.readouterr().err.endswith("metrics.jsonl: removed 1 line that is unreadable\n")
    flip(run / "metrics.jsonl", 100)
    with pytest.raises(UserError, match=r"metrics\.jsonl does not match its checksum.*or train a new run"):
        resume(run)
    (run / "metrics.jsonl").unlink()
    capsys.readouterr()
    with pytest.raises(UserError, match=r"metrics\.jsonl is gone, and the run is finished; restore it"):
        resume(run)
    assert "new ones follow" not in capsys.readouterr().err
    assert not (run / "metrics.jsonl").exists()


def test_an_edit_during_training_does_not_keep_a_run_from_saving(
    run: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    train(run_config(corpus), whole)
    before = (run / "config.json").read_bytes()
    original = RunFolder.save_tensors

    def edited(self: RunFolder, *arguments: Any) -> str:
        (self.path / "config.json").write_text("{}")
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_tensors", edited)
        assert resume(run).finished
    (run / "config.json").write_bytes(before)
    same_files(whole, run)


@pytest.mark.parametrize("name", ["ar-grc", "transformer-alibi"])
def test_a_finished_run_is_extended(
    name: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A constant rate leaves no trace of the former end, so the extended run is the long run, bit for bit."""
    changes: dict[str, Any] = {"schedule": "wsd", "decay_fraction": 1e-9}
    train(run_config(corpus, SMALL_MODELS[name], **changes), tmp_path / "long")
    out = tmp_path / "short"
    train(run_config(corpus, SMALL_MODELS[name], max_steps=16, **changes), out)
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--train.max-steps", "24"]) == 0
    said = capsys.readouterr()
    assert f"{out} continues with train.max_steps 24 (before: 16)" in said.err
    assert "all steps done after 24 steps" in said.out
    same_files(tmp_path / "long", out)
    assert RunFolder(out).config() == RunFolder(tmp_path / "long").config()
    loaded = RunFolder(out).load()
    assert torch.equal(next(loaded.model.parameters()), next(RunFolder(tmp_path / "long").load().model.parameters()))
    assert resume(out).step == 24


def test_best_weights_from_before_an_extension_still_belong_to_the_run(corpus: Path, tmp_path: Path) -> None:
    train(run_config(corpus, max_steps=16), tmp_path)
    best = (tmp_path / "best.safetensors").read_bytes()
    config = RunFolder(tmp_path).config()
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=17))
    resume(tmp_path, config=longer)
    resume(tmp_path, config=dataclasses.replace(longer, train=dataclasses.replace(config.train, max_steps=18)))
    (tmp_path / "best.safetensors").write_bytes(best)
    (tmp_path / "checkpoint.safetensors").unlink()  # it names later weights
    assert RunFolder(tmp_path).load().step == 16


def test_a_run_that_stopped_early_continues_with_more_patience(corpus: Path, tmp_path: Path) -> None:
    worse = {"max_steps": 12, "evaluate_every": 2, "learning_rate": 1e-12, "patience": 2, "warmup_steps": 100}
    state = train(run_config(corpus, **worse), tmp_path)
    assert (state.finished, state.step) == ("no better validation loss", state.step)
    assert state.step < 12
    assert main(["train", "--resume", str(tmp_path), "--train.patience", "50"]) == 0
    assert resume(tmp_path).step == 12


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--train.learning-rate 0.5",
            "with train.learning_rate 0.01; a resumed run cannot change it to 0.5",
        ),
        ("--seed 3", "was trained with seed 0; a resumed run cannot change it to 3"),
        ("--model.input-residual 0.5", "model.input_residual"),
        ("--train.max-steps 9", "has already trained 10 steps; set --train.max-steps to at least that"),
        ("--train.max-steps nine", "nine"),
    ],
)
def test_other_changes_of_a_resumed_run_are_refused(
    flags: str, says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.json").read_bytes()
    assert says in refused(capsys, "train", "--resume", str(run), *flags.split())
    assert (run / "config.json").read_bytes() == before


def test_damage_is_found_before_the_config_of_a_resumed_run_changes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.json").read_bytes()
    flip(run / "metrics.jsonl", 100)
    line = refused(capsys, "train", "--resume", str(run), "--train.max-steps", "30")
    assert "metrics.jsonl does not match its checksum" in line
    assert (run / "config.json").read_bytes() == before


def test_a_resumed_run_does_not_change_to_other_text(
    run: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.json").read_bytes()
    other = write_corpus(tmp_path / "other", count=300)
    line = refused(capsys, "train", "--resume", str(run), "--data.paths", str(other))
    assert "is not the text that" in line
    assert (run / "config.json").read_bytes() == before
    moved = shutil.copytree(corpus, tmp_path / "moved")
    assert main(["train", "--resume", str(run), "--data.paths", str(moved)]) == 0
    assert RunFolder(run).config().data.paths == (moved,)


def test_damaged_validation_tokens_are_found_before_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / "cache"))
    config = run_config(corpus)
    flip(prepare(config.data).folder / "valid.bin", 20)
    with pytest.raises(UserError, match=r"valid\.bin does not match its checksum"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fine_tuning_takes_the_config_of_the_first_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = RunFolder(run).config()
    assert main(["train", "--train.init-from", str(run), "--train.max-steps", "2"]) == 0
    config = RunFolder(tmp_path / "runs" / "from-run-0").config()
    settings = dataclasses.replace(first.train, max_steps=2, init_from=run)
    assert config == dataclasses.replace(first, train=settings)
    assert "logdepth evaluate runs/from-run-0" in capsys.readouterr().out
    line = refused(capsys, "train", "--train.init-from", str(run), "--data.tokenizer.vocab-size", "99", "--out", "x")
    assert line.endswith(f"uses the tokenizer of {run}; leave out other settings of data.tokenizer")
    assert not (tmp_path / "x").exists()


def test_a_closed_terminal_saves(corpus: Path, tmp_path: Path) -> None:
    train(run_config(corpus), tmp_path / "whole")
    with interrupted_at(7, signal.SIGHUP):
        train(run_config(corpus), tmp_path / "parts")
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        assert resume(tmp_path / "parts").finished
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_loaded_weights_have_the_dtype_of_the_model(run: Path) -> None:
    file = RunFolder(run).weights("last")
    before = RunFolder(run).load("last").model.state_dict()
    RunFolder(run).checkpoint.unlink()  # it names the weights that are replaced here
    tensors, record = load_tensors(file)
    save_tensors(file, {name: one.double() for name, one in tensors.items()}, record)
    after = RunFolder(run).load("last").model
    assert all(one.requires_grad for one in after.parameters())
    torch.testing.assert_close(after.state_dict(), before, rtol=0, atol=0)
