"""Sweeps: the ledger, a sweep and its outcome, what is refused."""

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

import logdepth.sweep.heartbeat as heartbeat
from logdepth.atomic import write_json
from logdepth.checksums import seal
from logdepth.cli import main
from logdepth.config import override, to_dict
from logdepth.errors import UserError
from logdepth.recipes import changes_in, recipe
from logdepth.runs import RunFolder
from logdepth.sweep import Search, without_password
from logdepth.sweep.ledger import GIVEN_BACK, ORIGIN, RETRY_OF, SURPLUS, Ledger, retry_of
from logdepth.sweep.storage import open_storage
from logdepth.sweep.study import TERMS, check_terms
from tests.command_line import refused
from tests.run_folders import measured
from tests.sweep_processes import (
    RECIPE,
    TINY,
    each_done_once,
    flags,
    quick_looks,  # noqa: F401
    trials_of,
)
from tests.tiny_corpus import tiny_data, write_corpus


def attempt(number: int, state: TrialState, **attributes: Any) -> FrozenTrial:
    trial = create_trial(state=state, value=1.0 if state == TrialState.COMPLETE else None, user_attrs=attributes)
    trial.number = number
    return trial


def test_the_ledger_follows_the_first_retry_and_drops_the_others() -> None:
    failed, running, complete, waiting = (
        TrialState.FAIL,
        TrialState.RUNNING,
        TrialState.COMPLETE,
        TrialState.WAITING,
    )
    ledger = Ledger(
        [
            attempt(0, complete),
            attempt(1, failed),
            attempt(2, failed, **{RETRY_OF: 1, ORIGIN: 1}),
            attempt(3, waiting, **{RETRY_OF: 1, ORIGIN: 1}),
            attempt(4, running, **{RETRY_OF: 2, ORIGIN: 1}),
            attempt(5, failed, **{SURPLUS: "of a race"}),
            attempt(6, running),
            attempt(7, failed),
        ]
    )
    assert ledger.origins == [0, 1, 6, 7]
    assert [one.number for one in ledger.attempts(1)] == [1, 2, 4]
    assert [one.number for one in ledger.latest(running)] == [4, 6]
    assert [one.number for one in ledger.latest(failed)] == [7]
    assert ledger.latest(waiting) == []
    assert ledger.reason_to_drop(3, limit=9) == "another attempt continues the same trial"
    assert ledger.reason_to_drop(4, limit=1) is None
    assert ledger.reason_to_drop(6, limit=3) is None
    assert ledger.reason_to_drop(6, limit=2) == "the study has 2 trials"
    assert ledger.is_finished(1)
    assert not ledger.is_finished(2)


def test_only_deaths_are_counted_as_deaths() -> None:
    killed = attempt(4, TrialState.FAIL, deaths=1)
    assert retry_of(killed)[1] == {RETRY_OF: 4, ORIGIN: 4, "deaths": 2}
    stopped = attempt(4, TrialState.FAIL, deaths=1, **{GIVEN_BACK: True})
    assert retry_of(stopped)[1]["deaths"] == 1


def test_a_worker_is_dead_when_its_heartbeat_stops_changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    monitor = heartbeat.LivenessMonitor(tmp_path, grace=10)
    elsewhere: dict[str, Any] = {"worker": ["another machine", "its worker"]}
    beats = {1: [1, 1, 1, 1], 2: [1, 2, 3, 3], 3: [None, None, None, None]}
    found = []
    for look in range(4):
        now = look * 4.0
        dead = [
            number
            for number, one in beats.items()
            if monitor.is_dead(attempt(number, TrialState.RUNNING, beat=one[look], **elsewhere))
        ]
        found.append(dead)
    assert found == [[], [], [], [1, 3]]


def test_workers_of_one_machine_share_its_cores(tmp_path: Path) -> None:
    workers = tmp_path / "workers"
    with heartbeat.registered_worker(workers):
        assert heartbeat.count_alive(workers) == 1
        with heartbeat.registered_worker(workers):
            assert heartbeat.count_alive(workers) == 2
        (workers / "dead").touch()
        assert heartbeat.count_alive(workers) == 1


def test_on_one_machine_the_lock_tells_at_once(tmp_path: Path) -> None:
    monitor = heartbeat.LivenessMonitor(tmp_path, grace=1e9)
    here = heartbeat.machine_id()
    with heartbeat.registered_worker(tmp_path) as name:
        assert not monitor.is_dead(attempt(1, TrialState.RUNNING, worker=[here, name]))
    (tmp_path / "killed").touch()
    assert monitor.is_dead(attempt(2, TrialState.RUNNING, worker=[here, "killed"]))
    assert not monitor.is_dead(attempt(3, TrialState.RUNNING, worker=[here, "registered elsewhere"]))
    assert not monitor.is_dead(attempt(4, TrialState.RUNNING, worker=["elsewhere", "killed"]))
    heartbeat.prune_dead_workers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_all_workers_register_one_that_is_not_registered_has_ended(tmp_path: Path) -> None:
    monitor = heartbeat.LivenessMonitor(tmp_path, grace=1e9, all_register=True)
    here = heartbeat.machine_id()
    with heartbeat.registered_worker(tmp_path) as name:
        assert not monitor.is_dead(attempt(1, TrialState.RUNNING, worker=[here, name]))
        heartbeat.prune_dead_workers(tmp_path)
        assert not monitor.is_dead(attempt(1, TrialState.RUNNING, worker=[here, name]))
    assert monitor.is_dead(attempt(1, TrialState.RUNNING, worker=[here, name]))
    assert not monitor.is_dead(attempt(2, TrialState.RUNNING, worker=["elsewhere", name]))
    assert not monitor.is_dead(attempt(3, TrialState.RUNNING))


def test_a_worker_is_registered_though_its_file_was_removed_before_it_was_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, removed = heartbeat.fcntl.flock, []

    def flock(file: Any, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        original(file, how)

    monkeypatch.setattr(heartbeat.fcntl, "flock", flock)
    with heartbeat.registered_worker(tmp_path) as name:
        assert heartbeat.is_alive(tmp_path, name)


def test_a_sweep_and_its_outcome(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    assert main(flags(corpus, out, "--trials", "3")) == 0
    said = capsys.readouterr()
    assert "3 trials complete, 0 pruned" in said.out
    assert f"next: logdepth train --config {out / 'best.json'} --out runs/sweep" in said.out
    assert "no importance figure: it needs 4 complete trials; there are 3" in said.err
    assert sum(line.startswith("trial ") for line in said.err.splitlines()) == 3
    first = json.loads((out / "sweep.json").read_text())
    assert not (out / "importance.svg").exists()
    assert not list(out.rglob("*.safetensors"))

    assert main(flags(corpus, out, "--trials", "7", "--json")) == 0  # goes on to seven; the last may be pruned
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((out / "sweep.json").read_text())
    assert record["trials"][:3] == first["trials"]
    assert [row["trial"] for row in record["trials"]] == list(range(7))
    assert all(row["attempts"] == 1 for row in record["trials"])
    each_done_once(trials_of(out), 7)
    for name in ("history.svg", "history.png", "importance.svg", "importance.png"):
        assert (out / name).stat().st_size > 1000
    assert {file.name for file in (out / "trials" / "0000").iterdir()} == {
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "tokenizer.model",
    }
    assert list((out / "workers").iterdir()) == []

    complete = [row for row in record["trials"] if row["state"] == "complete"]
    best = min(complete, key=lambda row: row["loss"])
    assert record["best"] == best
    assert record["command"].startswith("logdepth")
    with (out / "trials.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in table] == [row["loss"] for row in record["trials"]]
    assert float(table[2]["dropout"]) == record["trials"][2]["params"]["dropout"]

    # The best trial, trained by either of its files alone, is the trial again.
    machine = ["--train.log-every", "1", "--train.device", "cpu", "--train.threads", "1"]
    for name in ("best.json", "sweep.json"):
        again = tmp_path / name
        assert main(["train", "--config", str(out / name), "--out", str(again), *machine]) == 0
        config = RunFolder(again).config()
        assert config == RunFolder(out / "trials" / f"{best['trial']:04d}").config()
        assert config.train.learning_rate == best["params"]["train.learning_rate"]
        assert min(line["valid_loss"] for line in measured(again) if line["kind"] == "valid") == best["loss"]


@pytest.mark.parametrize("name", ["best.json", "sweep.json"])
def test_an_edited_record_is_used_only_without_its_checksum(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"recipe": RECIPE, "best": {"loss": 3.0}, "best_config": {"train": {"epochs": 3}}, "trials": []}
    file = tmp_path / name
    content = record if name == "sweep.json" else {"recipe": RECIPE, "config": record["best_config"]}
    write_json(file, seal(content))
    assert changes_in(file) == {"recipe": RECIPE, "config": {"train": {"epochs": 3}}}
    file.write_text(file.read_text().replace('"epochs": 3', '"epochs": 4'))
    for command in (["train"], ["sweep", RECIPE], ["reproduce", "pydocs"]):
        assert refused(capsys, *command, "--config", str(file)) == (
            f"logdepth {command[0]}: {file} does not match its checksum: it is damaged, or was edited after it was "
            'written; make it again, or, to use your edits, remove its "sha256" line'
        )
    *lines, last, end = file.read_text().splitlines()
    assert '"sha256": ' in last
    file.write_text("\n".join(lines).removesuffix(",") + "\n" + end)
    assert changes_in(file)["config"] == {"train": {"epochs": 4}}


def test_a_sweep_without_a_best_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({"recipe": RECIPE, "best": None, "best_config": None, "trials": []}))
    for command in (["train"], ["sweep", RECIPE], ["reproduce", "pydocs"]):
        assert "sweep.json is the sweep.json of a sweep without a complete trial" in refused(
            capsys, *command, "--config", str(file)
        )


def test_remarks_of_training_come_once(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--train.warmup-steps", "1000"]
    assert main(flags(corpus, tmp_path / "sweep", "--trials", "2", *slow)) == 0
    said = capsys.readouterr().err
    assert said.count("the warm-up of 1,000 steps is longer than the run") == 1


@pytest.mark.parametrize("lost", ["recipe", "best", "best_config"])
def test_a_damaged_record_is_no_config(lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"recipe": RECIPE, "best": {"loss": 3.0}, "best_config": {}, "trials": [], "space": {}}
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({name: value for name, value in record.items() if name != lost}))
    for command in (["train"], ["train", RECIPE], ["reproduce", "pydocs"]):
        assert "sweep.json is a sweep.json that is damaged or was written by an older logdepth" in refused(
            capsys, *command, "--config", str(file)
        )


def test_what_suits_another_corpus_is_used_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.json"
    file.write_text(json.dumps({"recipe": "ptb-ar-grc", "config": {"train": {"device": "no such"}}}))
    assert main(["train", RECIPE, "--config", str(file)]) == 2
    assert f"{file} is for 'ptb-ar-grc'" in capsys.readouterr().err
    assert main(["train", "--config", str(file)]) == 2
    assert "is for 'ptb-ar-grc'" not in capsys.readouterr().err


def test_best_json_names_its_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.json"
    file.write_text(json.dumps({"recipe": "no-such", "config": {}}))
    assert "there is no recipe 'no-such'" in refused(capsys, "train", "--config", str(file))


def test_an_empty_recipe_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["", "--trials", "1"], ["--trials", "1", ""], []):
        assert refused(capsys, "sweep", *arguments) == (
            "logdepth sweep: RECIPE is missing; `logdepth recipes` lists the recipes"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_store_ends_a_sweep_and_prunes_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "sweep"
    assert main(flags(corpus, out, "--trials", "1")) == 0
    (tokens,) = (tmp_path / "cache" / "stores").glob("*/train.bin")
    damaged = bytearray(tokens.read_bytes())
    damaged[100] ^= 1
    tokens.write_bytes(damaged)
    capsys.readouterr()
    assert "train.bin does not match its checksum" in refused(capsys, *flags(corpus, out, "--trials", "2"))
    record = json.loads((out / "sweep.json").read_text())
    assert [trial["state"] for trial in record["trials"]] == ["complete"]


def test_paths_in_the_outcome_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = Path("first run")
    assert main(["train", RECIPE, *TINY, "--data.paths", str(write_corpus(Path("my text"))), "--out", str(first)]) == 0
    arguments = flags(Path("my text"), Path("my sweep"), "--trials", "1", "--train.init-from", str(first))
    assert main(arguments) == 0
    assert main([*arguments[:-2], "--train.init-from", str(first)]) == 0, "the same command joins the study"
    best = changes_in(Path("my sweep/best.json"))["config"]
    assert best["data"]["paths"] == [str(tmp_path / "my text")]
    assert best["train"]["init_from"] == str(tmp_path / first)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    machine = ["--train.device", "cpu", "--train.threads", "1"]
    assert main(["train", "--config", str(tmp_path / "my sweep" / "best.json"), "--out", "again", *machine]) == 0
    config = RunFolder("again").config()
    assert (config.data.paths, config.train.init_from) == ((tmp_path / "my text",), tmp_path / first)


@pytest.fixture(name="journal", scope="module")
def journal_of_a_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of three trials, one of which is complete."""
    path = tmp_path_factory.mktemp("sweep") / "journal.log"
    study = optuna.create_study(study_name="study", storage=open_storage(None, path))
    study.set_user_attr(TERMS, {"version": "1", "terms": {"recipe": "ptb-ar-grc"}})
    for number in range(3):
        trial = study.ask()
        trial.suggest_float("train.learning_rate", 1e-4, 1e-2, log=True)
        trial.report(3.0 + number, 1)
        if number == 1:
            study.tell(trial, 3.25)
    return path


def what_a_journal_says(path: Path) -> tuple[Any, ...]:
    study = optuna.load_study(study_name="study", storage=open_storage(None, path))
    trials = [(one.state, one.value, one.params, one.intermediate_values) for one in study.trials]
    return study.user_attrs, trials


def test_a_damaged_journal_is_never_silent(journal: Path, tmp_path: Path) -> None:
    content, said, chance = journal.read_bytes(), what_a_journal_says(journal), random.Random(0)
    file, found = tmp_path / "journal.log", 0
    for place in chance.sample(range(len(content) - 1), 200):  # without the last byte, which ends the last line
        damaged = bytearray(content)
        damaged[place] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        try:
            unchanged = what_a_journal_says(file) == said
        except UserError as error:
            unchanged, found = f"{file} does not match its checksum" in str(error), found + 1
        assert unchanged, (place, damaged[place])
    assert found > 190


def test_a_journal_without_checksums_opens(journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [json.loads(line) for line in journal.read_text().splitlines()]
    assert all(log.pop("sha256") for log in logs)
    old = tmp_path / "journal.log"
    old.write_text("".join(json.dumps(log) + "\n" for log in logs))
    assert what_a_journal_says(old) == what_a_journal_says(journal)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path} was written by an older logdepth")
    optuna.load_study(study_name="study", storage=open_storage(None, old)).ask()
    assert "sha256" in json.loads(old.read_text().splitlines()[-1]), "new lines have checksums"


@pytest.mark.parametrize("line", ['{"x": 1}', "[1]", "5", "[" * 100_000, "\0", '{"op_code": 0', "\udcff"])
def test_an_odd_line_of_a_journal_is_one_line(
    line: str, corpus: Path, journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    out.mkdir()
    (out / "journal.log").write_bytes(journal.read_bytes() + line.encode(errors="surrogateescape") + b"\n")
    assert refused(capsys, *flags(corpus, out)) == (
        f"logdepth sweep: {out}/journal.log does not match its checksum: it is damaged, or was edited after it was "
        "written; restore it from a copy, or start another sweep with another --out"
    )


def test_joining_on_other_terms_is_refused(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    space = ["--space", "train.learning_rate=1e-3:1e-2:log"]
    assert main(flags(corpus, out, "--trials", "1", *space)) == 0
    other = ["--space", "train.learning_rate=1e-3:1e-1:log"]
    line = refused(capsys, *flags(corpus, out, "--trials", "2", *other))
    assert "--space train.learning_rate is 0.001:0.01:log in the study and 0.001:0.1:log in this command" in line
    line = refused(capsys, *flags(corpus, out, "--trials", "2", *space, "--train.clip", "2"))
    assert "train.clip is 1.0 in the study and 2.0 in this command" in line
    line = refused(capsys, *flags(corpus, out, "--trials", "2"))
    assert "--space dropout is nothing in the study and 0.0:0.4:0.05 in this command" in line
    elsewhere = tmp_path / "corpus"
    elsewhere.mkdir()
    for split in ("train", "valid", "test"):
        (elsewhere / f"{split}.txt").write_text((corpus / f"{split}.txt").read_text() + "one more line .\n")
    line = refused(capsys, *flags(elsewhere, out, "--trials", "2", *space))
    assert "the text is text-" in line
    assert main(flags(corpus, out, "--trials", "1", *space, "--train.log-every", "3")) == 0  # a worker's own business
    (out / "journal.log").unlink()
    assert "choose another --out" in refused(capsys, *flags(corpus, out, "--trials", "2", *space))


def test_a_study_from_before_a_field_was_there_goes_on(corpus: Path) -> None:
    """The field was then as it is where nobody sets it; set, it is another study."""
    config = override(recipe(RECIPE), {"data": to_dict(tiny_data(corpus))})
    search = Search(recipe=RECIPE, config=config, space={}, trials=1, out=corpus, study=RECIPE)
    old = {name: value for name, value in search.terms.items() if name != "train.shift_windows"}
    study = optuna.create_study()
    study.set_user_attr(TERMS, {"version": "0", "terms": old})
    check_terms(study, search)
    shifted = replace(search, config=override(config, {"train": {"shift_windows": True}}))
    with pytest.raises(UserError, match=r"train\.shift_windows is False in the study and True in this command"):
        check_terms(study, shifted)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql+psycopg2://me:hidden-word@127.0.0.1:1/none", "onnection refused"),
        ("postgresql+psycopg2://me@127.0.0.1:1/none?password=hidden-word", "onnection refused"),
        ("sqlite:////no/such/folder/study.db", "unable to open database file"),
        ("nonsense hidden-word", "not a database URL"),
        ("nosuch://me:hidden-word@there/db", "not a database URL"),
        ("mysql+pymysql://me:hidden-word@there/db", "driver"),
    ],
)
def test_a_database_that_cannot_be_used_is_one_line_without_its_password(
    url: str, said: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *flags(corpus, tmp_path / "sweep", "--storage", url))
    assert said in line
    assert "hidden-word" not in line
    assert "hidden-word" not in without_password(url)


def test_mistakes_are_one_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "RECIPE is missing; `logdepth recipes` lists" in refused(capsys, "sweep", "--trials", "3")
    assert "there is no recipe" in refused(capsys, "sweep", "pydocs-ar-gcr")
    assert "--trials must be at least 1; got 0" in refused(capsys, *flags(corpus, tmp_path, "--trials", "0"))
    assert "--grace must be above 0" in refused(capsys, *flags(corpus, tmp_path, "--grace", "-1"))
    assert "unknown field 'nothing'" in refused(capsys, *flags(corpus, tmp_path, "--space", "train.nothing=1:2"))
    assert "cannot be used here" in refused(capsys, *flags(corpus, tmp_path, "--train.device", "cuda:77"))
    assert not list(tmp_path.iterdir())


def test_without_optuna(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    line = refused(capsys, *flags(corpus, tmp_path))
    assert line == "logdepth sweep: sweeps need optuna; install it with pip install '.[sweep]'"


def test_without_matplotlib(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(flags(corpus, tmp_path / "sweep", "--trials", "1")) == 0
    assert "no figures: they need matplotlib" in capsys.readouterr().err
    assert (tmp_path / "sweep" / "best.json").exists()


def test_training_that_diverges_is_pruned_and_not_tried_again(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    assert main(flags(corpus, out, "--trials", "1", "--space", "train.learning_rate=1e29:1e30")) == 3
    assert "no trial completed" in capsys.readouterr().out
    (row,) = json.loads((out / "sweep.json").read_text())["trials"]
    assert (row["state"], row["reason"], row["attempts"]) == ("pruned", "training diverged", 1)
    assert not (out / "best.json").exists()
    assert not list((out / "trials" / "0000").glob("*.safetensors"))


def test_a_point_that_cannot_be_trained_is_pruned(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    assert main(flags(corpus, out, "--trials", "4", "--no-prune", "--space", "train.context=16,90000")) == 0
    rows = json.loads((out / "sweep.json").read_text())["trials"]
    wrong = [row for row in rows if row["params"]["train.context"] == 90000]
    assert 0 < len(wrong) < 4
    for row in rows:
        assert row["state"] == ("pruned" if row in wrong else "complete")
    assert wrong[0]["reason"].startswith("refused: ")


def test_help_says_what_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweep", "ptb-transformer-alibi", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "its metrics are kept, and its weights and checkpoint are removed" in text
    assert "--model.num-heads INT" in text
