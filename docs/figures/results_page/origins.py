"""Where every number comes from: a line a study."""

from collections.abc import Iterable

from logdepth.results import Results, RunResult, TimingResult
from results_page.kept import Kept, Sweep, label_of
from results_page.markdown import NOTHING


def origins(kept: Kept) -> str:
    lines = [f"- *{label_of(name)}*, `results/{name}/`: {_origin(results)}" for name, results in kept.studies.items()]
    lines += [
        f"- `results/sweeps/{study}/{sweep['recipe']}.json`: {_of_sweep(study, sweep)}."
        for study, sweeps in kept.sweeps.items()
        for sweep in sweeps.values()
    ]
    lines += [
        f"- `results/associativity/{name}.json`: `{command}`, with the weights of that run, which are not kept."
        for name, command in kept.commands.items()
    ]
    return "\n".join(lines) or NOTHING


def _of_sweep(study: str, sweep: Sweep) -> str:
    if "command" in sweep:
        return f"`{sweep['command']}`"
    return f"made before commands were recorded; `python experiments/run.py --list {study}` has the plan's"


def _origin(results: Results) -> str:
    """What was typed, which seeds, how long, when, on what."""
    runs, timings = results
    commands = [run.made.command for run in runs] + [timing.made for timing in timings]
    facts = [_distinct((f"`{command}`" for command in commands), " · ")]
    if runs:
        seeds, days = sorted({run.config.seed for run in runs}), [run.made.at[:10] for run in runs]
        hours = sum(run.made.training_seconds for run in runs) / 3600
        facts += [f"seeds {' '.join(map(str, seeds))}", f"{hours:.2g} hours of training, runs: {len(runs)}"]
        facts += [_distinct((min(days), max(days)), " to ")]
    files: list[RunResult | TimingResult] = [*runs, *timings]
    devices, versions = (_distinct(str(file.environment.get(fact)) for file in files) for fact in ("device", "torch"))
    return "; ".join([*facts, devices, f"torch {versions}"]) + "."


def _distinct(texts: Iterable[str], joint: str = ", ") -> str:
    return joint.join(dict.fromkeys(texts))
