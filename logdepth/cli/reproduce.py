"""`logdepth reproduce`: run the paper's experiment on a corpus, or another study, completely or in parts."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, named_first, parse
from logdepth.drawing import can_draw
from logdepth.errors import UserError
from logdepth.report import Report, write_available, write_task_report
from logdepth.reproduce import TASK_STUDIES, StudyOutcome, run_study, run_task_study, study_of, task_runs
from logdepth.training import Interrupted

UNFINISHED = 3
"""Exit code if work remains or has failed."""


Integers = Annotated[
    tuple[int, ...],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="[INT [INT ...]]",
        instance_from_str=lambda words: tuple(int(one) for word in words for one in word.split(",") if one),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda values: [str(value) for value in values],
    ),
]
"""Integers that are separated by blanks or commas."""


@dataclass(frozen=True, kw_only=True)
class ReproduceCommand:
    """Train all models of a study with all seeds, evaluate and time them, and write tables, figures and a report.

    Completed runs are skipped. To resume an interrupted study, run the same command again. Result files from other
    machines can be copied into the study's results folder.
    """

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """Name of a corpus, such as pydocs, ptb or wikitext2, for the paper's models; `logdepth corpora` lists them. Or
    architectures: models of equal size with different blocks, on webmix. Or a study of tasks: regular-languages,
    context-free, groups or recall, with flags of their own; see `logdepth reproduce groups --help`."""
    models: tuple[str, ...] = ()
    """Models to train, such as ar-grc, ar-mlp-ldru or transformer-alibi; by default all."""
    seeds: tuple[int, ...] = ()
    """Seeds of each model; by default 0 for pydocs and text, and 0 1 2 for the other corpora."""
    contexts: Integers = ()
    """Context lengths to evaluate at, besides the training length, such as 32 128 or 32,128; by default those of the
    paper, and fewer for pydocs and text."""
    paths: Annotated[tuple[Path, ...], tyro.conf.arg(name="data.paths")] = ()
    """Files or folders of your own text, for the corpus text."""
    budget: float | None = None
    """Minutes after which to save and stop with exit code 3; by default unlimited. The same command resumes. A
    measurement at one context length is completed first."""
    config: tuple[Path, ...] = ()
    """JSON files with changes to configs. A file that names a recipe, such as a sweep's best.json, changes only that
    recipe; any other file changes all."""
    others: tuple[str, ...] = ()
    """Other text to evaluate all runs on, each as NAME=PATH of a file or folder: all of it, with the runs'
    tokenizer."""
    other_contexts: Integers = ()
    """Context lengths to evaluate on other text at, besides the training length; by default the longest of
    --contexts."""
    accelerate: bool = True
    """Train and measure with kernels and CUDA graphs on a GPU."""
    compile: Switch = False
    """Use torch.compile in training and timing."""
    untimed: Switch = False
    """Do not time the models. Use this if other programs run at the same time, which makes times meaningless."""
    out: Path | None = None
    """Folder of the study; by default studies/CORPUS."""
    data_dir: Path | None = None
    """Root data directory; by default $LOGDEPTH_DATA."""
    json: Switch = False
    """Print the location of the report, and whether the study is finished, as JSON."""


@dataclass(frozen=True, kw_only=True)
class TaskStudyCommand:
    """Train models on generated tasks with several seeds, test them beyond the training lengths, and write a report.

    `logdepth tasks` lists the tasks. Completed runs are skipped. To resume an interrupted study, run the same command
    again. Result files from other machines can be copied into the study's results folder.
    """

    study: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")]
    """regular-languages, context-free, groups or recall."""
    tasks: tuple[str, ...] = ()
    """Tasks to train on, such as s5 or mqar; by default all of the study."""
    models: tuple[str, ...] = ()
    """Models to train, such as grc, memory or rope; by default all of the study."""
    seeds: tuple[int, ...] = ()
    """Seeds of each model on each task; by default 0 1 2."""
    lanes: int = 1
    """Number of runs that train at the same time, each in a process of its own."""
    longest: int | None = None
    """Longest test length. By default, all test cases of a task, up to 65,536 tokens: on a CPU, that takes long."""
    budget: float | None = None
    """Minutes after which to save and stop with exit code 3; by default unlimited. The same command resumes."""
    config: tuple[Path, ...] = ()
    """JSON files with changes to the configs of all runs, such as {"train": {"steps": 5000}}."""
    accelerate: bool = True
    """Train and test with kernels and CUDA graphs on a GPU."""
    out: Path | None = None
    """Folder of the study; by default studies/STUDY."""
    json: Switch = False
    """Print the location of the report, and whether the study is finished, as JSON."""


def run(arguments: Sequence[str]) -> int:
    if named_first(arguments, TASK_STUDIES) in TASK_STUDIES:
        return _run_tasks(parse(TaskStudyCommand, arguments, "reproduce"))
    command = parse(ReproduceCommand, arguments, "reproduce")
    _check_budget(command.budget)
    if "--data.paths" in arguments and not command.paths:
        raise UserError("--data.paths has no value; give at least one file or folder, or remove the flag")
    out = command.out or Path("studies") / command.corpus
    study = study_of(
        command.corpus,
        command.models,
        command.seeds,
        command.config,
        contexts=command.contexts,
        paths=command.paths,
        others=command.others,
        other_contexts=command.other_contexts,
        accelerate=command.accelerate,
        compiled=command.compile,
    )
    return _finish(
        out,
        lambda: run_study(study, out, command.data_dir, command.budget, timed=not command.untimed),
        write_available,
        as_json=command.json,
    )


def _run_tasks(command: TaskStudyCommand) -> int:
    _check_budget(command.budget)
    study = TASK_STUDIES[command.study]
    out = command.out or Path("studies") / command.study
    runs = task_runs(study, command.tasks, command.models, command.seeds, command.config, accelerate=command.accelerate)
    return _finish(
        out,
        lambda: run_task_study(runs, out, lanes=command.lanes, longest=command.longest, budget_minutes=command.budget),
        write_task_report,
        as_json=command.json,
    )


def _check_budget(minutes: float | None) -> None:
    if minutes is not None and not minutes > 0:
        raise UserError(f"--budget must be above 0 minutes; got {minutes:g}")


def _finish(out: Path, work: Callable[[], StudyOutcome], write: Callable[[Path], Report], *, as_json: bool) -> int:
    """Do the work of a study, write its report and print where it is; return the exit code."""
    if not can_draw():
        print(
            "matplotlib is not installed, so only tables will be written; install it with pip install '.[report]' and "
            f"run `{shlex.join(['logdepth', 'report', str(out)])}` for figures",
            file=sys.stderr,
        )
    try:
        finished, failed = work()
    except Interrupted as stopped:
        print(f"{stopped}; saved. Run the same command again to continue.", file=sys.stderr)
        return stopped.exit_code
    has_results = any((out / "results").glob("*.json"))
    made, report = write(out) if has_results else Report([], None)
    if as_json:
        answer = {"study": str(out), "finished": finished, "failed": failed}
        print_json(answer | {"report": None if report is None else str(report)})
    else:
        for table in made[:1]:
            print(table.title)
            print_table(table.heads, table.rows)
            print(table.note)
        if report is not None:
            print(f"report: {report}   (tables: {out}/tables, figures: {out}/figures)")
    for line in failed:
        print(f"not trained: {line}", file=sys.stderr)
    return 0 if finished else UNFINISHED
