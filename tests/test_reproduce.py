"""Studies: all runs, once each; what was stopped goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from logdepth.architectures import ARCHITECTURES
from logdepth.cli import main
from logdepth.models import LM
from logdepth.recipes import RECIPES, rows_of
from logdepth.reproduce import study_of, work
from logdepth.results import read_results
from logdepth.training import train
from tests.study_commands import MODELS, flags_of_a_small_study, results_of, shorten_lengths  # noqa: F401 (fixtures)
from tests.tiny_study import CONTEXTS, TIME_TOKENS, TRAINING


def test_all_models_and_seeds(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    assert main(["reproduce", "text", *flags, "--seeds", "0", "3", "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"study": str(out), "finished": True, "failed": [], "report": str(out / "report.html")}
    results = read_results(out / "results")
    assert {(run.row, run.config.seed) for run in results.runs} == {
        (row, seed) for row in rows_of("text") for seed in (0, 3)
    }
    for run in results.runs:
        assert [one.context for one in run.test] == list(CONTEXTS)
        assert run.positions.context == CONTEXTS[-1]
        assert sum(run.positions.tokens) == run.main.tokens == run.data.splits["test"].tokens - 1
        assert run.steps == TRAINING["max_steps"]
        assert [one.step for one in run.valid_curve] == [6, 12, 18, 24, 30]
        assert min(one.loss for one in run.valid_curve) == pytest.approx(run.valid_loss, abs=1e-6)
        assert run.samples[0].prompt == "The"
        assert "command" not in run.environment
    assert {model.row for model in results.timings[0].models} == set(rows_of("text"))
    written = {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    assert main(["reproduce", "text", *flags, "--seeds", "0", "3", "--out", str(out)]) == 0
    assert written == {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()}, (
        "done work was done again"
    )


def test_parts_made_elsewhere_merge_by_copying(flags: list[str], tmp_path: Path) -> None:
    for model in MODELS:
        assert (
            main(["reproduce", "text", *flags, "--models", model, "--seeds", "0", "--out", str(tmp_path / model)]) == 0
        )
    here, there = (tmp_path / model / "results" for model in MODELS)
    copied = here / f"text-{MODELS[1]}-0.json"
    copied.write_bytes((there / copied.name).read_bytes())
    before = copied.stat().st_mtime_ns
    assert main(["reproduce", "text", *flags, "--models", *MODELS, "--seeds", "0", "--out", str(here.parent)]) == 0
    assert copied.stat().st_mtime_ns == before
    assert not (here.parent / "runs" / f"{MODELS[1]}-0").exists()
    assert {model.row for model in read_results(here).timings[0].models} == set(MODELS), "timed together"


def test_a_budget_stops_and_the_same_command_goes_on(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def study(out: Path, *more: str) -> bool:
        part = ["--models", *MODELS, "--seeds", "1", "--out", str(out), "--json"]
        code = main(["reproduce", "text", *flags, *part, *more])
        finished: bool = json.loads(capsys.readouterr().out)["finished"]
        assert code == (0 if finished else 3)
        return finished

    assert study(tmp_path / "whole")
    asked = 0

    def spent_after_some_questions(_: object) -> bool:
        nonlocal asked
        asked += 1
        return asked % 17 == 0

    monkeypatch.setattr(work._Work, "_is_spent", spent_after_some_questions)
    sittings = 1
    while not study(tmp_path / "parts", "--budget", "1000"):
        sittings += 1
    assert sittings > 3
    assert results_of(tmp_path / "parts") == results_of(tmp_path / "whole")


def test_models_are_timed_together(flags: list[str], tmp_path: Path) -> None:
    def timed() -> list[str]:
        (only,) = read_results(tmp_path / "results").timings
        return [model.row for model in only.models]

    part = ["reproduce", "text", *flags, "--seeds", "0", "--out", str(tmp_path)]
    assert main([*part, "--models", MODELS[1]]) == 0
    assert timed() == [MODELS[1]]
    assert main([*part, "--models", MODELS[0]]) == 0
    assert timed() == list(MODELS)
    (file,) = (tmp_path / "results").glob("timing-*.json")
    before = file.stat().st_mtime_ns
    assert main([*part, "--models", MODELS[1]]) == 0
    assert file.stat().st_mtime_ns == before


def test_a_run_that_diverges_does_not_keep_the_others(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "wild.json", tmp_path / "study"
    wild = {"recipe": "text-ar-grc", "config": {"train": {"learning_rate": 1e30, "warmup_steps": 0}}}
    file.write_text(json.dumps(wild))
    part = ["text", *flags, str(file), "--models", *MODELS, "--seeds", "0", "--out", str(out), "--json"]
    assert main(["reproduce", *part]) == 3
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert not answer["finished"]
    assert "ar-grc seed 0: at step" in answer["failed"][0]
    assert "not trained: ar-grc seed 0" in said.err
    assert [run.row for run in read_results(out / "results").runs] == [MODELS[1]]


def test_the_default_study_of_every_corpus() -> None:
    for corpus in ("pydocs", "ptb", "wikitext2", "webmix", "openwebtext2"):
        study = study_of(corpus)
        ours = {f"{corpus}-hybrid", *(f"{corpus}-{row}" for row in ARCHITECTURES)}
        papers = [name for name in RECIPES if name.startswith(f"{corpus}-") and name not in ours]
        assert [study.recipe(row) for row in study.models] == papers
        assert study.seeds == ((0,) if corpus == "pydocs" else (0, 1, 2))
        assert {config.train.context for config in study.rows.values()} <= set(study.contexts)


KILLED = f"""
import sys
import logdepth.reproduce.study as study
from logdepth.atomic import alone
from logdepth.cli import main
from logdepth.config import to_dict
study.TEXT_CONTEXTS, study.TIME_TOKENS = {CONTEXTS}, {TIME_TOKENS}
sys.exit(main(sys.argv[1:]))
"""


def start(flags: list[str], out: Path) -> subprocess.Popen[str]:
    arguments = ["reproduce", "text", *flags, "--models", *MODELS, "--seeds", "0", "1", "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
    )


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def progress_of(out: Path) -> float:
    """Runs done, and the part of the one in the making."""
    done = len(list((out / "results").glob("text-*.json")))
    lines = [file.read_text().count('"train"') for file in out.glob("runs/*/metrics.jsonl")]
    return done + sum(lines) / TRAINING["max_steps"] / 4


def instants(chance: random.Random) -> Iterator[float]:
    """Three, anywhere in a study of four runs."""
    return iter(sorted(chance.uniform(0, 4) for _ in range(3)))


def test_killed_three_times_gives_the_same_result_files(flags: list[str], tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "killed"
    finish(start(flags, whole))
    seed = random.randrange(10**6)
    print("seed", seed)  # shown when it fails
    chance = random.Random(seed)
    for instant in instants(chance):
        process = start(flags, out)
        while progress_of(out) < instant and process.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, (seed, instant)
    finish(start(flags, out))
    assert len(results_of(whole)) == 4
    assert results_of(out) == results_of(whole)
    assert (out / "report.html").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_say_how_to_go_on(number: signal.Signals, flags: list[str], tmp_path: Path) -> None:
    process = start(flags, tmp_path)
    while progress_of(tmp_path) < 0.1 and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert "saved. Run the same command again to continue." in errors
    assert "Traceback" not in errors


def test_untimed_and_accelerated_runs_are_the_same(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU there is nothing to accelerate; no times are taken."""
    plain, faster = tmp_path / "plain", tmp_path / "faster"
    arguments = ["reproduce", "text", *flags, "--models", "ar-grc", "--seeds", "0"]
    assert main([*arguments, "--out", str(plain), "--no-accelerate"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--out", str(faster), "--untimed"]) == 0
    said = capsys.readouterr().err.replace(str(tmp_path), "")
    assert "kernel" not in said
    assert "graph" not in said
    assert [one.accelerated for one in read_results(plain / "results").timings] == [False]
    assert [run.config.train.accelerate for run in read_results(plain / "results").runs] == [False]
    found = read_results(faster / "results")
    assert found.timings == []
    assert [run.config.train.accelerate for run in found.runs] == [True]
    assert [run.test for run in found.runs] == [run.test for run in read_results(plain / "results").runs]


def test_times_are_compiled_as_training_is(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, bool]] = []

    def compile_model(model: LM, any_length: bool = False) -> None:
        compiled.append((type(model.blocks[0]).__name__, any_length))

    for module in ("training.loop", "reproduce.measure"):
        monkeypatch.setattr(f"logdepth.{module}.compile_model", compile_model)
    arguments = ["reproduce", "text", *flags, "--models", "ar-grc", "transformer-alibi", "--seeds", "0", "--compile"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    names = ("PaperLayer", "AttentionBlock")
    assert compiled == [(name, timed) for timed in (False, True) for name in names], "in training, then for the times"
    (times,) = (tmp_path / "results").glob("timing-*.json")
    assert times.stem.endswith("-compiled")
    assert [one.compiled for one in read_results(tmp_path / "results").timings] == [True]


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_was_begun_otherwise_says_that_it_goes_on_so(
    begun: bool, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    arguments = ["reproduce", "text", *flags, "--models", "ar-grc", "--seeds", "0", "--untimed", "--out", str(out)]
    overrides = [Path(one) for one in flags[1:]]
    config = study_of("text", overrides=overrides, accelerate=begun).rows["ar-grc"]
    assert config.train.accelerate == begun
    train(config, out / "runs" / "ar-grc-0")
    capsys.readouterr()
    assert main([*arguments, *(["--no-accelerate"] if begun else [])]) == 0
    how = "with" if begun else "without"
    assert f"ar-grc-0 resumes as it was started, {how} --accelerate" in capsys.readouterr().err
