"""`logdepth report`: write a study's tables, figures and report from its result files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from logdepth.cli.parsing import parse
from logdepth.drawing import require_matplotlib
from logdepth.report import write_report, write_task_report
from logdepth.solving import holds_task_results


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write the tables, figures and report of a study from its result files, without any training."""

    study: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")]
    """Folder of the study."""


def run(arguments: Sequence[str]) -> int:
    command = parse(ReportCommand, arguments, "report")
    if holds_task_results(command.study / "results"):
        require_matplotlib()
        print(write_task_report(command.study).page)
    else:
        print(write_report(command.study))
    return 0
