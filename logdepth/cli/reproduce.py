"""`logdepth reproduce`: the paper's experiment on a corpus, whole or in parts."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.drawing import can_draw
from logdepth.errors import UserError
from logdepth.report import Report, write_available
from logdepth.reproduce import run_study, study_of
from logdepth.train import Interrupted

NOT_FINISHED = 3
"""Exit code where something is left to do, or could not be done."""


@dataclass(frozen=True, kw_only=True)
class ReproduceCommand:
    """Train all models of a corpus with all seeds, measure and time them, and write tables, figures and a report.

    What is done is not done again; what was stopped or killed goes on with the same command. Result files made on other
    machines can be copied into the results folder of the study.
    """

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """pydocs, ptb, wikitext2, webmix, openwebtext2, …: any of `logdepth corpora`."""
    models: tuple[str, ...] = ()
    """Some of the models: ar-grc, ar-mlp-ldru, transformer-alibi, …; by default all."""
    seeds: tuple[int, ...] = ()
    """By default 0 for pydocs, 0 1 2 for the others."""
    budget: float | None = None
    """Minutes after which to save and stop, with exit code 3; the same command goes on."""
    config: tuple[Path, ...] = ()
    """JSON files with fields to change, of one recipe as a sweep's best.json, or of all."""
    others: tuple[str, ...] = ()
    """Other text, NAME=PATH of a file or folder, on whose test split every run is measured too, in its own tokens."""
    accelerate: Switch = False
    """Train and measure with fused kernels and CUDA graphs, where there are any for the model and the device."""
    compile: Switch = False
    """torch.compile, in training and for the times."""
    untimed: Switch = False
    """Leave out the times: where something else runs on the machine they would mean nothing."""
    out: Path | None = None
    """Folder of the study; by default studies/CORPUS."""
    data_dir: Path | None = None
    """The folder above those of the corpora; by default $LOGDEPTH_DATA."""
    json: Switch = False
    """Print where the results are, and whether all is done, as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(ReproduceCommand, arguments, "reproduce")
    if command.budget is not None and not command.budget > 0:
        raise UserError(f"--budget must be above 0 minutes; got {command.budget}")
    out = command.out or Path("studies") / command.corpus
    study = study_of(
        command.corpus,
        command.models,
        command.seeds,
        command.config,
        others=command.others,
        accelerate=command.accelerate,
        compiled=command.compile,
    )
    if not can_draw():
        print(f"without matplotlib there will be tables only; `logdepth report {out}` draws later", file=sys.stderr)
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
            print(f"report: {report}   (its tables and figures: {out}/tables, {out}/figures)")
    for line in failed:
        print(f"not trained: {line}", file=sys.stderr)
    return 0 if finished else NOT_FINISHED
