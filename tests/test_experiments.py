"""The configs in experiments/, and the plan: every command is one that `logdepth` takes; kept runs have its configs."""

import json
from pathlib import Path

import pytest
import torch

from experiments.plan import ROWS, Job, jobs
from logdepth import solving
from logdepth.cli.parsing import parse
from logdepth.cli.reproduce import ReproduceCommand, TaskStudyCommand
from logdepth.cli.sweep import SweepCommand
from logdepth.config import from_dict, override
from logdepth.models import num_parameters
from logdepth.recipes import parameters_of, recipe
from logdepth.reproduce import TASK_STUDIES, study_of, task_runs
from logdepth.results import RunResult, read_result
from logdepth.runs import RunConfig, decisive
from logdepth.solving import TaskRunConfig, build_solver, read_task_result
from logdepth.sweep import default_specs, parse_space
from logdepth.sweep.space import described
from logdepth.tasks import task_named
from results_page.kept import TASK_STUDIES as KEPT_TASK_STUDIES

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "experiments").glob("*.json"))
JOBS = jobs()
TASKS = [job for job in JOBS if job.command[:2] in {("reproduce", name) for name in TASK_STUDIES}]
RUNS = [job for job in JOBS if job.command[0] == "reproduce" and job not in TASKS]
SWEEPS = [job for job in JOBS if job.command[0] == "sweep"]


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def name_of(job: Job) -> str:
    return job.name


def test_there_are_some() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_is_used_by_a_job_and_changes_its_recipe(path: Path) -> None:
    saved = json.loads(path.read_text())
    if any(str(path.relative_to(ROOT)) in job.command for job in TASKS):
        return  # test_a_task_is_one_that_reproduce_takes reads it
    studies = {job.command[1] for job in RUNS if str(path.relative_to(ROOT)) in job.command}
    assert studies
    for study in studies:
        of_study = "webmix-memory-window" if study == "architectures" else f"{study}-ar-grc"
        plain = recipe(saved.get("recipe", of_study))
        changed = override(plain, saved.get("config", saved))
        assert changed != plain
        if "deep" in path.stem:  # as large as what it is compared with, or a little smaller
            assert 0.95 * parameters_of(plain) < parameters_of(changed) <= parameters_of(plain)


def test_jobs_have_names_and_places_of_their_own() -> None:
    names = [job.name for job in JOBS]
    assert len(set(names)) == len(names)
    for job in JOBS:
        earlier = names[: names.index(job.name)]
        assert set(job.after) <= set(earlier), "what a job reads is made before it"
    assert len({path for job in JOBS for path in job.unfinished.values()}) == sum(len(job.unfinished) for job in JOBS)
    written = [path for job in JOBS for path in job.keeps]
    kept = [path for job in JOBS for path in job.keeps.values()]
    assert len(set(written)) == len(written)
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("job", RUNS, ids=name_of)
def test_a_run_is_one_that_reproduce_takes(job: Job) -> None:
    command = parse(ReproduceCommand, job.command[1:], "reproduce")
    sweeps = {path: other for other in SWEEPS for path in other.keeps.values()}
    for path in command.config:  # a file of the project, or what a sweep before it keeps
        assert path.exists() or (path in sweeps and any(after == sweeps[path].name for after in reaches(job)))
    there = [path for path in command.config if path.exists()]
    study = study_of(command.corpus, command.models, command.seeds, there)
    assert study.models == command.models
    for written, kept in job.keeps.items():
        assert written.parent == command.out / "results"
        if not job.exclusive and kept.exists():
            result = read_result(kept)
            assert isinstance(result, RunResult)
            planned = {(row, config.seed): config for row, config in study.runs()}[result.row, result.config.seed]
            assert decisive(result.config) == decisive(planned), f"{kept} was made with another config than the plan's"


@pytest.mark.parametrize("job", TASKS, ids=name_of)
def test_a_task_is_one_that_reproduce_takes(job: Job) -> None:
    command = parse(TaskStudyCommand, job.command[1:], "reproduce")
    study = TASK_STUDIES[command.study]
    runs = task_runs(study, command.tasks, command.models, command.seeds, command.config)
    assert len({(solver, config.task) for solver, config in runs}) == 1, "one model on one task"
    assert command.out is not None
    names = [f"{config.task}-{solver}-{config.seed}" for solver, config in runs]
    assert list(job.keeps) == [command.out / "results" / f"{name}.json" for name in names]
    assert job.inputs == {kept: written for written, kept in job.keeps.items()}
    assert list(job.unfinished) in ([], [command.out / "runs" / name for name in names])
    assert job.minutes is not None
    for kept, (_, config) in zip(job.keeps.values(), runs, strict=True):
        assert config.train.threads == 1, "jobs share the cores"
        assert kept.parent.name in KEPT_TASK_STUDIES
        if kept.exists():
            saved = from_dict(TaskRunConfig, read_task_result(kept).config)
            assert solving.decisive(saved) == solving.decisive(config), f"{kept} has another config than the plan's"


def test_checkpoints_of_tasks_are_small_enough_to_be_sent_around() -> None:
    """Of one run per job that has begun: the weights, AdamW's two moments, and AMSGrad's third."""
    largest = 0
    for job in TASKS:
        if job.unfinished:
            command = parse(TaskStudyCommand, job.command[1:], "reproduce")
            _, config = task_runs(
                TASK_STUDIES[command.study], command.tasks, command.models, command.seeds, command.config
            )[0]
            with torch.device("meta"):
                model = build_solver(task_named(config.task), config.solver)
            moments = 3 if config.train.optimizer == "amsgrad" else 2
            largest = max(largest, 4 * (1 + moments) * num_parameters(model))
    assert 2**20 < largest < 16 * 2**20


def reaches(job: Job) -> set[str]:
    """The jobs before a job, and those before them."""
    named = {other.name: other for other in JOBS}
    return set(job.after) | {name for other in job.after for name in reaches(named[other])}


@pytest.mark.parametrize("job", SWEEPS, ids=name_of)
def test_a_sweep_is_one_that_sweep_takes(job: Job) -> None:
    of = recipe(job.command[1])
    command = parse(SweepCommand, job.command[1:], "sweep", SweepCommand(recipe=job.command[1], run=of))
    space = parse_space(command.space or default_specs(command.run), command.run)
    assert (written := list(job.keeps)) == [Path("sweeps") / str(command.study) / "sweep.json"], written
    for kept in job.keeps.values():
        if kept.exists():
            record = json.loads(kept.read_text())
            assert record["recipe"] == command.recipe
            assert record["space"] == described(space)
            assert decisive(from_dict(RunConfig, record["config"])) == decisive(command.run)
            over = [trial for trial in record["trials"] if trial["state"] in ("complete", "pruned")]
            assert len(over) == command.trials
    ((journal, begun),) = job.journals.items()
    assert journal == Path("sweeps") / str(command.study) / "journal.log"
    if begun.exists():
        assert not any(kept.exists() for kept in job.keeps.values())
        lines = map(json.loads, begun.read_text().splitlines())
        terms = next(
            line["user_attr"]["logdepth"]["terms"] for line in lines if "logdepth" in line.get("user_attr", ())
        )
        assert terms["recipe"] == command.recipe
        assert {name: one for name, one in terms.items() if name.startswith("--space")} == {
            f"--space {name}": one for name, one in described(space).items()
        }


def test_models_of_a_study_are_searched_alike() -> None:
    for study in ("wikitext2-tuned", "ptb", "ptb-tuned"):
        commands = [job.command for job in SWEEPS if job.name.startswith(f"{study}/")]
        assert len(commands) == len(ROWS)
        assert len({command[command.index("--trials") + 1] for command in commands}) == 1
        assert len({len([word for word in command if "=" in word]) for command in commands}) == 1
