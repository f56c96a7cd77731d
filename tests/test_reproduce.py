"""Studies: all runs, once each; what was stopped goes on; what does not fit is refused before work starts."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logdepth.atomic import alone
from logdepth.cli import main
from logdepth.config import to_dict
from logdepth.recipes import RECIPES, rows_of
from logdepth.reproduce import study_of, work
from logdepth.results import read_results
from logdepth.runs import RunFolder
from logdepth.train import train
from tests.tiny_corpus import VOCAB, write_corpus
from tests.tiny_study import CONTEXTS, TIME_TOKENS, TRAINING, override_files

MODELS = ("ar-grc", "transformer-alibi")


@pytest.fixture(autouse=True)
def short_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdepth.reproduce.study.PAPER_CONTEXTS", CONTEXTS)
    monkeypatch.setattr("logdepth.reproduce.study.TIME_TOKENS", TIME_TOKENS)


@pytest.fixture(scope="module")
def flags(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return override_files(tmp_path_factory.mktemp("overrides"), corpus)


def results_of(out: Path) -> dict[str, Any]:
    """The result files of runs, without how they were made."""
    found = {}
    for file in sorted((out / "results").glob("text-*.json")):
        found[file.name] = json.loads(file.read_text())
        found[file.name].pop("made")
    return found


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["reproduce", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("logdepth reproduce: ")
    return lines[-1]


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


def test_what_does_not_fit_is_refused(
    flags: list[str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no corpus 'ptbb' to study; did you mean 'ptb'?" in error_of(capsys, "ptbb")
    assert "there is no model 'ar-gcr'" in error_of(capsys, "ptb", "--models", "ar-gcr")
    assert "--seeds must be different" in error_of(capsys, "ptb", "--seeds", "1", "1")
    assert "--budget must be above 0" in error_of(capsys, "ptb", "--budget", "0")
    assert "ptb.train.txt" in error_of(capsys, "ptb", "--out", str(tmp_path / "ptb"), "--data-dir", str(tmp_path))
    assert not (tmp_path / "ptb").exists(), "nothing was begun"
    assert "which text? --config FILE" in error_of(capsys, "text")
    file = tmp_path / "file"
    file.write_text("")
    assert f"{file} is a file; choose another --out" in error_of(capsys, "text", *flags, "--out", str(file))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"recipe": "ptb-ar-grc", "config": {}}))
    assert "is for the recipe 'ptb-ar-grc'" in error_of(capsys, "text", *flags, str(other))
    other.write_text("[]")
    assert "expected a mapping" in error_of(capsys, "text", *flags, str(other))
    out = tmp_path / "study"
    part = ["text", *flags, "--models", "ar-grc", "--seeds", "0", "--out", str(out)]
    assert main(["reproduce", *part]) == 0
    other.write_text(json.dumps({"train": {"learning_rate": 0.5}}))
    changed = ["text", *flags, str(other), "--models", "ar-grc", "--seeds", "0", "--out", str(out)]
    line = error_of(capsys, *changed)
    assert "text-ar-grc-0.json was made with train.learning_rate 0.01, not 0.5 as asked for now" in line
    result = out / "results" / "text-ar-grc-0.json"
    saved = result.read_text()
    result.unlink()
    assert "ar-grc-0 was made with train.learning_rate 0.01, not 0.5" in error_of(capsys, *changed)
    assert main(["evaluate", str(out)]) == 2
    assert f"it is a study: give one of its runs, such as {out}/runs/ar-grc-0" in capsys.readouterr().err
    result.write_text(saved[: len(saved) // 2])
    assert f"{result} is not readable JSON" in error_of(capsys, *part)


def test_overrides_cannot_make_a_row_another(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    for change, says in (
        ({"config": to_dict(RECIPES["text-ar-grc"]())}, "model.operator.kind of 'ar-mlp-ldru' 'GRCConfig'"),
        ({"model": to_dict(RECIPES["text-ar-grc"]())["model"]}, "model.operator.kind of 'ar-mlp-ldru' 'GRCConfig'"),
        ({"recipe": "text-ar-grc", "config": {"data": {"corpus": "ptb"}}}, "data.corpus of 'ar-grc' 'ptb'"),
        ({"recipe": "text-transformer-alibi", "config": {"model": {"positions": "sinusoidal"}}}, "model.positions of"),
        ({"seed": 4}, "seed of 'ar-grc' 4, not 0"),
    ):
        file.write_text(json.dumps(change))
        assert says in error_of(capsys, "text", *flags, str(file), "--out", str(tmp_path / "study"))


def test_a_run_is_measured_on_the_text_that_it_was_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the first run, and the text changed before it goes on: the second run would have another text."""
    text, out = write_corpus(tmp_path / "text"), tmp_path / "study"
    part = [*override_files(tmp_path, text), "--models", *MODELS, "--seeds", "0", "--out", str(out)]
    with monkeypatch.context() as patch:
        asked = iter([False] * 8 + [True] * 100)
        patch.setattr(work._Work, "_is_spent", lambda _: next(asked))
        assert main(["reproduce", "text", *part]) == 3
    capsys.readouterr()
    with (text / "train.txt").open("a") as file:
        file.write("one more line .\n")
    line = error_of(capsys, "text", *part)
    assert "transformer-alibi seed 0 has another training text than ar-grc seed 0" in line
    assert not (out / "results").exists()
    assert main(["reproduce", "text", *part, "--models", "ar-grc"]) == 0
    result = read_results(out / "results").runs[0]
    assert result.data.store == RunFolder(out / "runs" / "ar-grc-0").store_key()


def test_runs_that_start_from_another_have_its_tokens(corpus: Path, flags: list[str], tmp_path: Path) -> None:
    first = tmp_path / "first"
    config = study_of("text", overrides=[Path(one) for one in flags[1:]]).rows["ar-grc"]
    other = dataclasses.replace(config.data, tokenizer=dataclasses.replace(config.data.tokenizer, vocab_size=VOCAB - 8))
    train(dataclasses.replace(config, data=other), first)
    file = tmp_path / "from.json"
    file.write_text(json.dumps({"train": {"init_from": os.path.relpath(first)}}))
    part = ["text", *flags, str(file), "--models", "ar-grc", "--seeds", "0", "--out", str(tmp_path / "study")]
    assert main(["reproduce", *part]) == 0
    result = read_results(tmp_path / "study" / "results").runs[0]
    assert result.data.store == RunFolder(tmp_path / "study" / "runs" / "ar-grc-0").store_key()
    assert result.main.loss < result.valid_loss + 0.5
    assert main(["reproduce", *part]) == 0, "a relative path is the same path"


def test_other_vocabularies_are_refused_before_training(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "other.json", tmp_path / "study"
    change = {"data": {"tokenizer": {"vocab_size": VOCAB - 8}}}
    file.write_text(json.dumps({"recipe": "text-transformer-alibi", "config": change}))
    line = error_of(capsys, "text", *flags, str(file), "--models", *MODELS, "--seeds", "0", "--out", str(out))
    assert "transformer-alibi seed 0 has another tokenizer than ar-grc seed 0" in line
    assert not out.exists()


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


def test_two_processes_do_not_work_on_one_study(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone(tmp_path, "taken"):
        part = ["text", *flags, "--models", "ar-grc", "--seeds", "0", "--out", str(tmp_path)]
        assert f"another process works on {tmp_path}" in error_of(capsys, *part)


def test_the_default_study_of_every_corpus() -> None:
    for corpus in ("pydocs", "ptb", "wikitext2", "webmix", "openwebtext2"):
        study = study_of(corpus)
        assert [study.recipe(row) for row in study.models] == [
            name for name in RECIPES if name.startswith(f"{corpus}-")
        ]
        assert study.seeds == ((0,) if corpus == "pydocs" else (0, 1, 2))
        assert {config.train.context for config in study.rows.values()} <= set(study.contexts)


KILLED = f"""
import sys
import logdepth.reproduce.study as study
from logdepth.atomic import alone
from logdepth.cli import main
from logdepth.config import to_dict
study.PAPER_CONTEXTS, study.TIME_TOKENS = {CONTEXTS}, {TIME_TOKENS}
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
    assert "saved. The same command goes on." in errors
    assert "Traceback" not in errors


def test_untimed_and_faster_runs_are_the_same(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU there is nothing to accelerate, and the runs say so; no times are taken."""
    plain, faster = tmp_path / "plain", tmp_path / "faster"
    arguments = ["reproduce", "text", *flags, "--models", "ar-grc", "--seeds", "0"]
    assert main([*arguments, "--out", str(plain)]) == 0
    capsys.readouterr()
    assert main([*arguments, "--out", str(faster), "--accelerate", "--untimed"]) == 0
    assert "train.accelerate changes nothing on the cpu" in capsys.readouterr().err
    assert [one.accelerated for one in read_results(plain / "results").timings] == [False]
    found = read_results(faster / "results")
    assert found.timings == []
    assert [run.config.train.accelerate for run in found.runs] == [True]
    assert [run.test for run in found.runs] == [run.test for run in read_results(plain / "results").runs]


def test_times_are_compiled_as_training_is(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        "logdepth.train.faster.compile_model",
        lambda model, any_length: compiled.append((type(model).__name__, any_length)),
    )
    arguments = ["reproduce", "text", *flags, "--models", "ar-grc", "transformer-alibi", "--seeds", "0", "--compile"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    names = ("ScanLM", "Transformer")
    assert compiled == [(name, timed) for timed in (False, True) for name in names], "in training, then for the times"
    (times,) = (tmp_path / "results").glob("timing-*.json")
    assert times.stem.endswith("-compiled")
    assert [one.compiled for one in read_results(tmp_path / "results").timings] == [True]


def test_other_text_is_measured_too(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, elsewhere = tmp_path / "study", write_corpus(tmp_path / "elsewhere", count=160)
    (elsewhere / "train.txt").unlink()  # nobody trains on it
    arguments = ["text", *flags, "--models", "ar-grc", "--seeds", "0", "--untimed", "--out", str(out)]
    assert main(["reproduce", *arguments, "--others", f"elsewhere={elsewhere}"]) == 0
    (run,) = read_results(out / "results").runs
    (other,) = run.others
    assert (other.name, other.text.documents) == ("elsewhere", 1)
    assert [one.context for one in other.test] == [TRAINING["context"], CONTEXTS[-1]]
    capsys.readouterr()
    contexts = [str(one.context) for one in other.test]
    folder = str(out / "runs" / "ar-grc-0")
    assert main(["evaluate", folder, "--paths", str(elsewhere), "--contexts", *contexts, "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["results"]
    assert [one.nats for one in other.test] == [one["nats"] for one in evaluated]
    table = (out / "tables" / "others.md").read_text()
    assert f"{other.test[0].token_perplexity:.2f}" in table
    assert "was not measured on more; remove it" in error_of(capsys, *arguments, "--others", f"more={elsewhere}")
    assert "nowhere is not there" in error_of(capsys, *arguments, "--others", "elsewhere=nowhere")
    (elsewhere / "test.txt").write_text("a small dog sees the cat .\n" * 9)
    said = error_of(capsys, *arguments, "--seeds", "1", "--others", f"elsewhere={elsewhere}")
    assert "text-ar-grc-0.json was measured on another text named 'elsewhere'; call this one otherwise" in said
    assert not (out / "runs" / "ar-grc-1").exists()


def test_a_run_that_was_begun_otherwise_says_that_it_goes_on_so(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    arguments = ["reproduce", "text", *flags, "--models", "ar-grc", "--seeds", "0", "--untimed", "--out", str(out)]
    config = study_of("text", overrides=[Path(one) for one in flags[1:]]).rows["ar-grc"]
    train(config, out / "runs" / "ar-grc-0")
    capsys.readouterr()
    assert main([*arguments, "--accelerate"]) == 0
    assert "ar-grc-0 goes on as it was begun, without --accelerate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["nothing"], "--others needs NAME=PATH"),
        (["=here"], "--others needs NAME=PATH"),
        (["one={untested}", "one=there"], "two texts named 'one'"),
        (["one=nowhere"], "nowhere is not there"),
        (["one={untested}"], "has no test split"),
    ],
)
def test_other_text_is_refused_before_training(
    flags: list[str], others: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untested = tmp_path / "untested"
    write_corpus(untested)
    (untested / "test.txt").unlink()
    given = [one.format(untested=untested) for one in others]
    assert said in error_of(capsys, "text", *flags, "--out", str(tmp_path / "study"), "--others", *given)
    assert not (tmp_path / "study" / "runs").exists()


def test_a_config_need_only_fit_the_models_that_are_asked_for(
    flags: list[str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scan.json"
    data = {"paths": [str(corpus)], "tokenizer": {"vocab_size": VOCAB}}
    file.write_text(json.dumps({"data": data, "model": {"operator": {"width": 24}}}))
    study = study_of("text", ["ar-grc"], overrides=[file])
    assert to_dict(study.rows["ar-grc"])["model"]["operator"]["width"] == 24
    said = error_of(capsys, "text", "--config", str(file))
    assert "unknown field 'operator'" in said
    assert 'for transformer-alibi; a file with a "recipe" changes that one alone' in said
    flat = tmp_path / "flat.json"
    flat.write_text(json.dumps({"recipe": "text-ar-grc", "data": data, "train": {"epochs": 3}}))
    study = study_of("text", ["ar-grc"], overrides=[flat])
    assert (study.models, study.rows["ar-grc"].train.epochs) == (("ar-grc",), 3)
    assert study.rows["transformer-alibi"].train.epochs != 3
