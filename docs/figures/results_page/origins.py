"""The origin of every number: the commands that made each result file, with seeds, dates and versions."""

from collections.abc import Iterable

from logdepth.results import Results, RunResult, TimingResult
from results_page.kept import TASK_STUDIES, Kept, Sweep, home_of, label_of
from results_page.markdown import NOTHING


def origins(kept: Kept, study: str) -> str:
    """Return the origins of all result folders that belong to a study."""
    return "\n\n".join(folder_origin(kept, name) for name in kept.studies if home_of(name) == study) or NOTHING


def folder_origin(kept: Kept, name: str) -> str:
    """Return one line of facts about a result folder, then its commands as a code block."""
    results = kept.studies[name]
    runs, timings = results
    commands = [run.made.command for run in runs] + [timing.made for timing in timings]
    return f"**{label_of(name)}** (`results/{name}/`): {_facts(results)}.\n\n{_code_block(commands)}"


def sweep_origins(kept: Kept) -> str:
    lines = [
        f"- `results/sweeps/{study}/{sweep['recipe']}.json`: {_of_sweep(study, sweep)}."
        for study, sweeps in kept.sweeps.items()
        for sweep in sweeps.values()
    ]
    return "\n".join(lines) or NOTHING


def associativity_origins(kept: Kept) -> str:
    lines = [
        f"- `results/associativity/{name}.json`: `{command}`. The weights of that run were not kept."
        for name, command in kept.commands.items()
    ]
    return "\n".join(lines) or NOTHING


def task_origins(kept: Kept) -> str:
    """Return, for each study of tasks, one line of facts and its commands."""
    parts = []
    for name, results in kept.tasks.items():
        devices, versions = (
            _distinct(str(one.environment.get(fact)) for one in results) for fact in ("device", "torch")
        )
        hours = sum(one.seconds for one in results) / 3600
        facts = f"runs: {len(results)}; {hours:.2g} hours of training; {devices}; torch {versions}"
        commands = _code_block(one.command for one in results)
        parts.append(f"**{TASK_STUDIES[name]}** (`results/tasks/{name}/`): {facts}.\n\n{commands}")
    return "\n\n".join(parts) or NOTHING


def _of_sweep(study: str, sweep: Sweep) -> str:
    if "command" in sweep:
        return f"`{sweep['command']}`"
    return f"made before commands were recorded; `python experiments/run.py --list {study}` prints the planned command"


def _facts(results: Results) -> str:
    """Return the seeds, the training time, the dates, the devices and the versions of PyTorch."""
    runs, timings = results
    facts = []
    if runs:
        seeds, days = sorted({run.config.seed for run in runs}), [run.made.at[:10] for run in runs]
        hours = sum(run.made.training_seconds for run in runs) / 3600
        facts += [f"runs: {len(runs)}", f"seeds {' '.join(map(str, seeds))}", f"{hours:.2g} hours of training"]
        facts += [_distinct((min(days), max(days)), " to ")]
    files: list[RunResult | TimingResult] = [*runs, *timings]
    devices, versions = (_distinct(str(file.environment.get(fact)) for file in files) for fact in ("device", "torch"))
    return "; ".join([*facts, devices, f"torch {versions}"])


def _code_block(commands: Iterable[str]) -> str:
    return "\n".join(f"    {command}" for command in dict.fromkeys(commands))


def _distinct(texts: Iterable[str], joint: str = ", ") -> str:
    return joint.join(dict.fromkeys(texts))
