"""`logdepth reproduce`: run the paper's experiment on a corpus, or another study, completely or in parts."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.drawing import can_draw
from logdepth.errors import UserError
from logdepth.report import Report, write_available
from logdepth.reproduce import run_study, study_of
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
    architectures: models of equal size with different blocks, on webmix."""
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
    """Other text to evaluate all runs on, each as NAME=PATH of a file or folder. Its test split is tokenized with the
    runs' tokenizer."""
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


def run(arguments: Sequence[str]) -> int:
    command = parse(ReproduceCommand, arguments, "reproduce")
    if command.budget is not None and not command.budget > 0:
        raise UserError(f"--budget must be above 0 minutes; got {command.budget:g}")
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
        accelerate=command.accelerate,
        compiled=command.compile,
    )
    if not can_draw():
        print(
            "matplotlib is not installed, so only tables will be written; install it with pip install '.[report]' and "
            f"run `{shlex.join(['logdepth', 'report', str(out)])}` for figures",
            file=sys.stderr,
        )
    try:
        finished, failed = run_study(study, out, command.data_dir, command.budget, timed=not command.untimed)
    except Interrupted as stopped:
        print(f"{stopped}; saved. Run the same command again to continue.", file=sys.stderr)
        return stopped.exit_code
    has_results = any((out / "results").glob("*.json"))
    made, report = write_available(out) if has_results else Report([], None)
    if command.json:
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
