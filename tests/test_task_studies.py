"""`logdepth reproduce groups` and other studies of tasks: runs beside each other, resuming, reports, refusals."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from logdepth.checksums import seal
from logdepth.cli import main
from logdepth.errors import UserError
from logdepth.report.published import PUBLISHED, published_table
from logdepth.report.tasks import figures, headline, line_of, solvers_in, tasks_in, write_task_report
from logdepth.reproduce import TASK_STUDIES, run_task_study, task_runs
from logdepth.reproduce.tasks import DELETANG_TASKS
from logdepth.solving import (
    SOLVERS,
    Accuracy,
    SolverState,
    SolverTrainer,
    beyond,
    measure_case,
    percent,
    read_task_result,
    read_task_results,
    write_task_result,
)
from logdepth.solving.solver import PrefixSolver
from logdepth.tasks import FAMILIES, LDRU_LANGUAGES, TASKS
from tests.command_line import refused
from tests.tiny_study import made_up_task_result

QUICK = {
    "solver": {"dim": 8},
    "train": {"steps": 12, "batch_tokens": 32, "check_every": 6, "device": "cpu", "curriculum": None, "threads": 1},
}
GROUPS = ("groups", "--tasks", "s3", "--seeds", "0", "--longest", "64")


@pytest.fixture(name="quick")
def quick_settings(tmp_path: Path) -> list[str]:
    """`--config …` of a study that takes a second, and `--out …`."""
    (tmp_path / "quick.json").write_text(json.dumps(QUICK))
    return ["--config", str(tmp_path / "quick.json"), "--out", str(tmp_path / "study")]


@pytest.fixture(autouse=True)
def short_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdepth.solving.accuracy.TEST_SEQUENCES", 16)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def results_of(out: Path) -> dict[str, Any]:
    found = {path.name: json.loads(path.read_text()) for path in sorted((out / "results").glob("*.json"))}
    for one in found.values():
        for name in ("command", "sha256", "environment", "seconds"):
            one.pop(name)
        one["config"]["train"].pop("threads")
    return found


def test_there_is_a_study_for_every_family() -> None:
    assert TASK_STUDIES.keys() == FAMILIES.keys()
    assert all(name == study.name for name, study in TASK_STUDIES.items())


@pytest.mark.parametrize("name", TASK_STUDIES)
def test_every_run_of_a_study_has_a_config(name: str) -> None:
    runs = task_runs(TASK_STUDIES[name])
    tasks = {config.task for _, config in runs}
    expected = LDRU_LANGUAGES if name == "regular-languages" else [one for one in TASKS if TASKS[one].family == name]
    assert tasks == set(expected)
    assert len(runs) == 3 * len(tasks) * len(TASK_STUDIES[name].solvers)
    assert [config.seed for _, config in runs] == sorted(config.seed for _, config in runs)
    for solver, config in runs:
        assert config.form == ("whole" if SOLVERS[solver].is_encoder else "prefixes")


def test_a_task_or_model_that_is_named_twice_is_one() -> None:
    runs = task_runs(TASK_STUDIES["groups"], ["s3", "s4", "s3"], ["rope", "rope"], [1])
    assert [(config.task, solver) for solver, config in runs] == [("s3", "rope"), ("s4", "rope")]


def test_the_encoders_have_the_papers_settings() -> None:
    runs = {
        config.task: config for _, config in task_runs(TASK_STUDIES["regular-languages"], solvers=["encoder-mlp-ldru"])
    }
    assert set(DELETANG_TASKS) <= set(runs)
    for name, steps, rate, dropout in (
        ("parity", 100_000, 1e-3, 0.1),
        ("modular-arithmetic", 1_000_000, 1e-3, 0.1),
        ("tomita-3", 100_000, 1e-3, 0.25),
        ("d3", 100_000, 1e-3, 0.25),
        ("d4", 1_000_000, 1e-4, 0.25),
    ):
        train, solver = runs[name].train, runs[name].solver
        assert (train.optimizer, train.batch_size, train.clip) == ("amsgrad", 256, 1.0)
        assert (train.steps, train.learning_rate, getattr(solver, "dropout")) == (steps, rate, dropout)  # noqa: B009


def test_a_study_in_this_process(quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *GROUPS, "--models", "grc", "rope", *quick]) == 0
    out = tmp_path / "study"
    said = capsys.readouterr()
    assert "GRC scan" in said.out
    assert f"report: {out}/report.html" in said.out
    assert "s3-grc-0: all steps done after 12 steps" in said.err
    assert [one.name for one in read_task_results(out / "results")] == ["s3-grc-0", "s3-rope-0"]
    assert {path.name for path in (out / "tables").iterdir()} >= {"scores.md", "accuracies.csv"}
    page = (out / "report.html").read_text()
    assert "What models compute: groups" in page
    assert 'id="samples"' not in page

    before = results_of(out)
    assert main(["reproduce", *GROUPS, "--models", "grc", "rope", *quick]) == 0
    assert "s3-grc-0" not in capsys.readouterr().err  # nothing was left to do
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out / "report.html")

    longer = [one if one != "64" else "128" for one in GROUPS]
    assert main(["reproduce", *longer, "--models", "grc", *quick]) == 0
    after = results_of(out)
    lengths = [one["length"] for one in after["s3-grc-0.json"]["test"]]
    assert lengths == [16, 32, 64, 128]
    assert after["s3-grc-0.json"]["test"][:3] == before["s3-grc-0.json"]["test"]
    assert after["s3-rope-0.json"] == before["s3-rope-0.json"]


def test_a_signal_saves_and_the_same_command_goes_on(quick: list[str], tmp_path: Path) -> None:
    """Interrupted in the middle of two runs, a study ends in the same results as without an interruption."""
    settings = json.loads(Path(quick[1]).read_text())
    settings["train"] |= {"steps": 100, "check_every": 20}
    Path(quick[1]).write_text(json.dumps(settings))
    arguments = ["reproduce", *GROUPS, "--models", "grc", "window", *quick[:2]]
    assert main([*arguments, "--out", str(tmp_path / "whole")]) == 0
    parts = ["--out", str(tmp_path / "parts")]
    program = [sys.executable, "-m", "logdepth", *arguments, *parts, "--lanes", "2"]
    process = subprocess.Popen(
        program, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    while process.poll() is None and "step 20:" not in process.stderr.readline():
        pass
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, error
    assert error.strip().splitlines()[-1] == "stopped by SIGINT; saved. Run the same command again to continue."
    assert "Traceback" not in error
    assert not results_of(tmp_path / "parts")
    assert any(tmp_path.glob("parts/runs/*/checkpoint.safetensors"))
    assert main([*arguments, *parts]) == 0
    assert results_of(tmp_path / "parts") == results_of(tmp_path / "whole")


def test_a_budget_stops_with_exit_code_3(quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *GROUPS, "--models", "grc", *quick, "--budget", "1e-9", "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {
        "study": str(tmp_path / "study"),
        "finished": False,
        "failed": [],
        "report": None,
    }


def test_processes_that_are_stopped_at_once_have_not_failed(
    quick: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They still import, and have nothing to save."""
    assert main(["reproduce", *GROUPS, "--models", "grc", "rope", *quick, "--lanes", "2", "--budget", "0.002"]) == 3
    said = capfd.readouterr().err
    assert "not trained" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize("lanes", ["1", "2"])
def test_a_run_that_diverges_is_a_result(
    lanes: str, quick: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads(Path(quick[1]).read_text())
    settings["train"]["learning_rate"] = 1e30
    Path(quick[1]).write_text(json.dumps(settings))
    assert main(["reproduce", *GROUPS, "--models", "grc", "rope", *quick, "--lanes", lanes]) == 0
    said = capfd.readouterr()
    assert "s3-rope-0: step 3: the loss is not finite: training diverged" in said.err
    results = read_task_results(tmp_path / "study" / "results")
    assert [one.finished for one in results] == ["diverged"] * 2
    assert all(0 <= one.score < 0.5 for one in results)
    models = (tmp_path / "study" / "tables" / "models.md").read_text()
    assert models.count("| 0 of 1 | 1 of 1 |") == 2


def test_processes_beside_each_other_end_well_or_say_why(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = task_runs(TASK_STUDIES["groups"], ["s3"], ["grc", "rope"], [0], [Path(quick[1])])
    out = tmp_path / "study"
    damaged = out / "runs" / "s3-rope-0"
    monkeypatch.setattr("logdepth.reproduce.tasks.read_checkpoint", lambda *_: None)  # as if it were damaged later
    damaged.mkdir(parents=True)
    (damaged / "checkpoint.safetensors").write_text("is none")
    (damaged / "config.json").write_text("{}")
    finished, failed = run_task_study(runs, out, lanes=2, longest=64)
    assert not finished
    assert [line.startswith(f"s3-rope-0: {damaged / 'config.json'} has lost its checksum") for line in failed] == [True]
    assert not list(out.glob("runs/*/failed*"))
    assert list(results_of(out)) == ["s3-grc-0.json"]
    assert main(["reproduce", *GROUPS, "--models", "grc", *quick[:2], "--out", str(tmp_path / "here")]) == 0
    for name in ("curve", "steps", "finished", "parameters"):
        assert results_of(out)["s3-grc-0.json"][name] == results_of(tmp_path / "here")["s3-grc-0.json"][name]


def test_a_run_that_needs_too_much_memory_does_not_stop_the_others(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = SolverTrainer.run

    def run(self: SolverTrainer) -> SolverState:
        if "attention" in str(self.config.solver).lower():
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")
        return trained(self)

    monkeypatch.setattr(SolverTrainer, "run", run)
    assert main(["reproduce", *GROUPS, "--models", "rope", "grc", *quick]) == 3
    said = capsys.readouterr()
    assert "not trained: s3-rope-0: not enough memory (allocate 9 GiB); choose smaller sizes" in said.err
    assert [one.name for one in read_task_results(tmp_path / "study" / "results")] == ["s3-grc-0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["groups", "--tasks", "s6"], "there is no task 's6' in the study groups; there are: s3, s4"),
        (
            ["groups", "--tasks", "mqar"],
            "there is no task 'mqar' in the study groups; it belongs to `logdepth reproduce",
        ),
        (["recall", "--models", "encoder-grc"], "there is no model 'encoder-grc' in the study recall"),
        (["groups", "--seeds", "1", "1"], "--seeds must be different non-negative integers; got 1 1"),
        (["groups", "--lanes", "0"], "--lanes must be at least 1; got 0"),
        (["groups", "--longest", "16"], "--longest is 16: the test of s3 beyond its training begins at 64"),
        (["groups", "--budget", "0"], "--budget must be above 0 minutes; got 0"),
        (["groups", "--tasks"], "--tasks has no value"),
        (["groups", "--data.paths", "x"], "unrecognized options: --data.paths"),
        (["group"], "there is no corpus or study 'group'; did you mean 'groups'?"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "reproduce", *arguments, "--out", str(tmp_path / "new"))
    assert message in line
    assert not (tmp_path / "new").exists()


def test_an_empty_out_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell makes it of a variable that is not set; as a path, it would mean the working folder."""
    for empty in (["--out", ""], ["--out="]):
        assert refused(capsys, "reproduce", *GROUPS, *empty).endswith(
            ": --out is empty; give a path, or remove the flag"
        )


def test_verbs_of_language_models_refuse_runs_on_tasks(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *GROUPS, "--models", "grc", *quick]) == 0
    folder = tmp_path / "study"
    only = "it is of a study of tasks, which only `logdepth reproduce` and `logdepth report` read"
    for verb in (["evaluate"], ["generate"], ["train", "--resume"]):
        line = refused(capsys, *verb, str(folder / "runs" / "s3-grc-0"))
        assert line.endswith(f"s3-grc-0 holds no run of a language model: {only}")
        assert refused(capsys, *verb, str(folder)).endswith(
            f"study holds no run: there is no config.json in it; {only}"
        )


def test_names_that_cannot_be_recorded_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "reproduce", *GROUPS, "--out", str(tmp_path / "\udcff"))
    assert "is not UTF-8 or has control characters; choose another --out" in line
    assert list(tmp_path.iterdir()) == []


def test_files_must_not_change_what_a_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (
        ('{"task": "s4"}', "would change the task or the seed"),
        ('{"train": {"stepz": 3}}', "unknown field 'stepz'; did you mean 'steps'"),
        ('{"train": {"steps": 0}}', "steps must be at least 1; got 0"),
        ('{"train": {"device": "cuda:99"}}', "device 'cuda:99' cannot be used here"),
        ('{"solver": {"dim": 7}}', "solver of s3: dim 7 does not divide into"),
        ('{"solver": {"blocks": ["attention:backend=flex"]}, "train": {"device": "cpu"}}', "has no gradients on a CPU"),
    ):
        (tmp_path / "c.json").write_text(text)
        options = ["--config", str(tmp_path / "c.json"), "--out", str(tmp_path / "new")]
        assert message in refused(capsys, "reproduce", *GROUPS, *options)
        assert not (tmp_path / "new").exists()


def test_results_of_other_settings_are_refused(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *GROUPS, "--models", "grc", *quick]) == 0
    settings = json.loads(Path(quick[1]).read_text())
    settings["train"]["steps"] = 13
    Path(quick[1]).write_text(json.dumps(settings))
    line = refused(capsys, "reproduce", *GROUPS, "--models", "grc", *quick)
    assert "s3-grc-0.json was made with train.steps 12, not 13; choose another --out, or use the same settings" in line
    other_seed = [one if one != "0" else "1" for one in GROUPS]
    line = refused(capsys, "reproduce", *other_seed, "--models", "grc", *quick)
    assert "s3-grc-1 of this study has train.steps 13, and " in line
    assert "s3-grc-0.json has 12: they are not seeds of the same model; use the same settings, or keep" in line


def test_scores_are_over_the_cases_that_all_runs_have(tmp_path: Path) -> None:
    short = made_up_task_result("mqar", "rope", 0, 0.5)
    long = made_up_task_result("mqar", "grc", 0, 1.0)
    worse = tuple(replace(one, right=0, last_right=0) if one.length > 512 else one for one in long.test)
    for result in (replace(short, test=short.test[:-1]), replace(long, test=worse)):
        write_task_result(tmp_path / "results", result)
    scores = write_task_report(tmp_path).tables[0]
    common = beyond(TASKS["mqar"], [one.case for one in short.test[:-1]])
    share = sum(case.length <= 512 for case in common) / len(common)
    assert scores.rows[0] == ("MQAR", percent(share), "50.00")
    assert f"MQAR: only the {len(short.test) - 1} test cases that all runs have count." in scores.note


def test_seeds_with_other_settings_are_no_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        result = made_up_task_result("mqar", "rope", seed, 0.5)
        write_task_result(tmp_path / "results", replace(result, config=result.config | {"train": {"steps": 5 + seed}}))
    line = refused(capsys, "report", str(tmp_path))
    assert "mqar-rope-1.json has train.steps 6, and " in line
    assert "mqar-rope-0.json has 5: they are not seeds of the same model" in line


def test_a_signal_ends_the_test_of_a_case(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A test of long sequences takes minutes, so the signal is heard between its batches."""
    batches: list[int] = []

    def answers(self: Any, tokens: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        batches.append(len(tokens))
        return original(self, tokens, places)

    def measured(*arguments: Any, **settings: Any) -> Accuracy:
        monkeypatch.setattr(PrefixSolver, "answers", answers)
        os.kill(os.getpid(), signal.SIGTERM)
        return measure_case(*arguments, **settings)

    original = PrefixSolver.answers
    monkeypatch.setattr("logdepth.solving.accuracy.BATCH_TOKENS", 32)  # two sequences
    monkeypatch.setattr("logdepth.reproduce.tasks.measure_case", measured)
    assert main(["reproduce", *GROUPS, "--models", "grc", *quick]) == 128 + signal.SIGTERM
    assert batches == [2]
    assert "stopped by SIGTERM; saved. Run the same command again to continue." in capsys.readouterr().err


def test_cases_of_a_run_that_was_trained_again_are_tested_again(quick: list[str], tmp_path: Path) -> None:
    """Its weights may be others, as on another machine; a result file must not mix the two."""
    arguments = ["reproduce", *GROUPS, "--models", "grc", *quick]
    longer = [one if one != "64" else "128" for one in arguments]
    assert main(arguments) == 0
    path = tmp_path / "study" / "results" / "s3-grc-0.json"
    result = read_task_result(path)
    wrong = tuple(replace(one, right=0, last_right=0, classes=()) for one in result.test)
    other_curve = tuple((step, loss + 1e-6, *rest) for step, loss, *rest in result.curve)
    for curve, expected in ((result.curve, wrong), (other_curve, result.test)):
        write_task_result(path.parent, replace(result, curve=curve, test=wrong))
        assert main(longer) == 0
        assert read_task_result(path).test[:3] == expected


def test_a_lane_without_enough_memory_says_so(
    quick: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large.json"
    large.write_text('{"train": {"batch_tokens": 1099511627776}}')
    configs = ["--config", quick[1], str(large)]
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**42, before[1]))  # some systems promise memory that they do not have
    try:
        assert main(["reproduce", *GROUPS, "--models", "grc", *configs, *quick[2:], "--lanes", "2"]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    said = capfd.readouterr().err
    assert "not trained: s3-grc-0: not enough memory (allocate 8.00 TiB); choose smaller sizes" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "s4-grc-0.json",
            "{",
            "is not readable JSON .*; remove it and run the `logdepth reproduce` command that made it",
        ),
        ("s4-grc-0.json", "5", "is damaged: it holds no fields; remove it and run"),
        ("ptb-ar-grc-0.json", json.dumps(seal({"schema": "x"})), "is not a result file of a task; move it to another"),
    ],
)
def test_odd_results_are_found_before_the_work_begins(
    name: str, content: str, says: str, quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report at the end would be refused."""
    results = tmp_path / "study" / "results"
    results.mkdir(parents=True)
    (results / name).write_text(content)
    assert re.search(rf"results/{name} {says}", refused(capsys, "reproduce", *GROUPS, "--models", "grc", *quick))
    assert re.search(rf"results/{name} .*; (remove|move) it", refused(capsys, "report", str(tmp_path / "study")))
    assert [file.name for file in (tmp_path / "study").iterdir()] == ["results"]


def test_a_study_that_cannot_be_written_is_refused_before_the_work_begins(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "results").write_text("mine")
    line = refused(capsys, "reproduce", *GROUPS, "--models", "grc", *quick)
    assert re.search("cannot write .*/study/results: .* is a file; choose another --out", line)


def test_tables_have_medians_and_all_seeds(tmp_path: Path) -> None:
    """A failed seed is in the brackets; a solved task has a dot; tasks and models are in the order of their lists."""
    for task, solver, shares in (
        ("mqar", "rope", [1.0, 0.5, 1.0]),
        ("mqar", "grc", [0.1, 0.2, 0.3]),
        ("selective-copying", "rope", [0.9991]),
    ):
        for seed, share in enumerate(shares):
            write_task_result(tmp_path / "results", made_up_task_result(task, solver, seed, share))
    results = read_task_results(tmp_path / "results")
    assert tasks_in(results) == ["mqar", "selective-copying"]
    assert solvers_in(results) == ["grc", "rope"]
    scores, models, published, accuracies = write_task_report(tmp_path).tables
    assert scores.heads == ("task", "GRC scan", "Transformer, RoPE")
    assert scores.rows == (
        ("MQAR", "20.00 [10.00, 30.00]", "100 ● [50.00, 100]"),
        ("Selective copying", None, "99.90 ○"),  # too few seeds
        ("solved, of 2", "0", "1"),
    )
    assert [row[:2] for row in models.rows] == [("GRC scan", "10"), ("Transformer, RoPE", "10")]
    assert published.rows[0][3] == "Transformer, RoPE: 100 [50.00, 100], 3 seeds; of 2 models"
    assert accuracies.rows[0][-2:] == ("10.0000", "100")
    assert (tmp_path / "figures" / "accuracy.svg").is_file()


def test_languages_are_counted_by_form(tmp_path: Path) -> None:
    for solver, task, share in (
        ("encoder-grc", "parity", 1.0),
        ("encoder-grc", "d2", 0.998),
        ("encoder-mlp-ldru", "parity", 0.9),
        ("grc", "parity", 0.9),
        ("rope", "parity", 1.0),
    ):
        for seed in range(3):
            write_task_result(tmp_path / "results", made_up_task_result(task, solver, seed, share))
    table = published_table(read_task_results(tmp_path / "results"), ["parity", "d2"])
    assert [row[3] for row in table.rows] == [
        "encoder, GRC: 1 of 2",
        "Transformer, RoPE: 1 of 1",
        "Transformer, RoPE: 100 [100, 100], 3 seeds; of 2 models",  # not encoders, which answer at the end only
    ]


def test_every_published_case_is_tested() -> None:
    """Each row of published numbers finds our result among made-up results of all its tasks."""
    for one in PUBLISHED:
        for solver in ("encoder-grc", "grc"):
            results = [made_up_task_result(task, solver, 0, 0.5) for task in one.tasks]
            if one.ours(results) is not None:
                break
        else:
            raise AssertionError(one.what)
    assert published_table([], ["z60"]).rows == ()
    assert [row[3] for row in published_table([]).rows] == [None] * len(PUBLISHED)


def test_figures_say_who_leads_and_how_small_the_models_are(tmp_path: Path) -> None:
    def line(*shares: tuple[str, str, float]) -> str:
        return headline([made_up_task_result(task, solver, 0, share) for task, solver, share in shares])

    small = "Tiny models, of at most 0.01M parameters; 1 seed each."
    ahead = "GRC scan is ahead beyond the training lengths"
    assert line(("s3", "grc", 1.0), ("s3", "rope", 0.5)) == (
        f"{ahead}: its state takes up one token after another, at any length. {small}"
    )
    assert line(("mqar", "grc", 1.0), ("mqar", "rope", 0.5)) == f"{ahead}. {small}"
    assert line(("s3", "rope", 1.0), ("s3", "grc", 0.5)).startswith(
        "Transformer, RoPE is ahead beyond the training len"
    )
    for nobody in (
        [("s3", "grc", 1.0)],
        [("s3", "grc", 1.0), ("s3", "rope", 1.0)],
        [("s3", "grc", 1.0), ("s3", "rope", 0.5), ("s4", "grc", 0.4), ("s4", "rope", 0.5)],
    ):
        assert line(*nobody) == small
    write_task_result(tmp_path / "results", made_up_task_result("s3", "grc", 0, 1.0))
    write_task_result(tmp_path / "results", made_up_task_result("s3", "rope", 0, 0.5))
    write_task_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count(ahead) == 2, "once above and once in the figure"


def test_lines_of_all_models_differ() -> None:
    lines = [line_of(number) for number in range(len(SOLVERS))]
    assert len({(str(one["color"]), str(one["linestyle"])) for one in lines}) == len(SOLVERS)
    assert len({(str(one["color"]), one["marker"]) for one in lines}) == len(SOLVERS)


def test_legends_are_inside_their_figures(tmp_path: Path) -> None:
    """With one panel and two long names, with all models, and with several panels."""
    pytest.importorskip("matplotlib")
    every = [(task, solver) for task in ("s3", "s4", "s5", "a5") for solver in SOLVERS]
    for pairs in ([("s3", "grc-dropout"), ("s3", "rope")], [("s3", solver) for solver in SOLVERS], every):
        results = [made_up_task_result(task, solver, 0, 0.5) for task, solver in pairs]
        ((_, figure),) = figures(results).values()
        figure.draw_without_rendering()
        whole = figure.bbox
        for part in (*figure.legends, figure._suptitle, *figure.axes):
            box = part.get_tightbbox() if part.get_visible() else None
            if box is not None:
                assert box.x0 >= whole.x0 - 1, part
                assert box.x1 <= whole.x1 + 1, part
                assert box.y0 >= whole.y0 - 1, part


def test_a_report_needs_results(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(UserError, match="contains no result files"):
        write_task_report(tmp_path)


def test_result_files_are_those_of_their_names(tmp_path: Path) -> None:
    path = write_task_result(tmp_path, made_up_task_result("mqar", "rope", 3, 0.5))
    assert read_task_result(path).name == "mqar-rope-3"
