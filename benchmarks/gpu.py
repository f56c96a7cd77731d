"""Measures speed on one GPU (forward, training, decoding), compared with Transformers and a measured floor.

    python benchmarks/gpu.py                        # everything, within 6 minutes; results/speed-<gpu>.json
    python benchmarks/gpu.py --parts rates,forward  # some parts; other parts in the file are kept
    python benchmarks/gpu.py --smoke                # tiny sizes on the CPU, to check that it runs

Each part runs in its own process with its own time limit. A part that fails or exceeds its limit is recorded as such,
with the measurements made so far, and the other parts still run. The last parts may be left without time. All parts
compile their code in parallel beforehand (speed/parts.py); nothing else runs while a part measures. The result file is
rewritten after every part. speed/bars.py defines the targets and ratios; docs/performance.md shows the results.
"""

import argparse
import contextlib
import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # runs uninstalled too

import torch

from benchmarks import program
from benchmarks.speed import bars
from benchmarks.speed.parts import PARTS, PartProcess, clocks, rehearse, run_part
from logdepth.atomic import read_json, write_json
from logdepth.errors import UserError
from logdepth.runs.environment import environment, hash_of_code

ALL_SECONDS = 352.0
"""Time limit for all parts together; the last parts may be cut short."""


def main() -> None:
    arguments = _parser().parse_args()
    device = torch.device("cpu" if arguments.smoke else "cuda")
    if arguments.part:
        run_part(arguments.part, device, arguments.out, arguments.smoke, arguments.share)
        return
    names = list(dict.fromkeys(arguments.parts.split(",")))
    for name in names:
        if name not in PARTS:
            raise UserError(f"there is no part '{name}'; parts are {', '.join(PARTS)}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no GPU here; --smoke rehearses on the CPU, in a minute or two")
    out = arguments.out or (None if arguments.smoke else ROOT / "results" / f"speed-{program.name_of_gpu()}.json")
    report = _new_report(device, arguments.smoke)
    code = {name: report["machine"][name] for name in ("code", "benchmark")}
    if out is not None and out.exists() and set(names) != set(PARTS):
        report = _gone_on_with(out, report)
    before = report["seconds"]
    failed: list[str] = []  # parts of this run; the file may have earlier results of them
    started = time.monotonic()
    program.exit_when_terminated()
    with tempfile.TemporaryDirectory() as folder, _compile_caches(folder), contextlib.ExitStack() as ending:

        def start(name: str) -> PartProcess:
            process = PartProcess(name, Path(folder), arguments.smoke)
            ending.callback(process.end)
            return process

        # Parts without a rehearsal come first, started one after another: one of them measures how a process starts.
        for rehearsed in (False, True):
            group = [name for name in names if (PARTS[name].rehearsals > 0) == rehearsed]
            processes: Iterable[PartProcess] = map(start, group)
            if rehearsed and group:
                processes = list(processes)  # they import while the rehearsals run
                rehearse(group, Path(folder), arguments.smoke)
            for one in processes:
                print(f"{one.name}:", flush=True)
                seconds = min(PARTS[one.name].seconds, ALL_SECONDS - (time.monotonic() - started))
                done = one.run(max(seconds, 0.0)) | {"code": code}
                if done["status"] != "done":
                    failed.append(one.name)
                report["parts"][one.name] = better_of(report["parts"].get(one.name), done)
                report["seconds"] = round(before + time.monotonic() - started, 1)
                report["clocks"]["after"] = clocks()
                measured = {part: done["results"] for part, done in report["parts"].items()}
                report["floor_flops_per_second"] = bars.best_rate(measured)
                report["rows"] = [] if arguments.smoke else bars.verdicts(measured)
                if out is not None:
                    write_json(out, report)
    _print(report)
    if failed:
        sys.exit(f"not done: {', '.join(failed)}")


def _parser() -> argparse.ArgumentParser:
    parser = program.Parser(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, separated by commas (default: all)")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: results/speed-<gpu>.json)")
    parser.add_argument(
        "--smoke", action="store_true", help="rehearse with tiny sizes on the CPU; the numbers mean nothing"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    return parser


@contextlib.contextmanager
def _compile_caches(folder: str) -> Iterator[None]:
    """Use fresh compile caches for this run, shared by its parts, and compile on all cores."""
    if not (
        Path(torch.__file__).parent / "__pycache__"
    ).exists():  # else every part would compile torch's Python files again
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/python"
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    # This cache identifies models by their source, not by the attention kernel allowed when they were compiled.
    os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(16, os.cpu_count() or 1))
    yield


def _new_report(device: torch.device, smoke: bool) -> dict[str, Any]:
    facts = environment(device) | {"benchmark": hash_of_code(ROOT / "benchmarks")}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts["triton"] = importlib.metadata.version("triton")
    now = clocks()
    return {
        "smoke": smoke,
        "date": program.today(),
        "machine": facts,
        "clocks": {"before": now, "after": now},
        "seconds": 0.0,
        "floor_flops_per_second": None,
        "rows": [],
        "parts": {},
    }


def _gone_on_with(file: Path, new: dict[str, Any]) -> dict[str, Any]:
    """Return the report in a file, to add parts to it; all parts must be from the same kind of machine."""
    report: dict[str, Any] = read_json(file)
    for fact in ("device", "torch", "triton"):
        if report["machine"].get(fact) != new["machine"].get(fact):
            raise UserError(
                f"{file} was made with {fact} {report['machine'].get(fact)}, this is {new['machine'].get(fact)}: "
                "run all parts, or choose another --out"
            )
    return report


def better_of(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Return the new result of a part, or the earlier one if only that was completed."""
    if before is None or before["status"] != "done" or now["status"] == "done":
        return now
    return before


def _print(report: dict[str, Any]) -> None:
    print(f"\n{'':<78} {'ours':>11} {'theirs':>11}          ratio" if report["rows"] else "")
    what = None
    for row in report["rows"]:
        if row["what"] != what:
            what = row["what"]
            marks = f"{'≤' if row['at_most'] else '≥'} {row['bar']:.4g}"
            stretch = "" if row["stretch"] is None else f", stretch {row['stretch']:.4g}"
            print(f"{what}   ({marks}{stretch})")
        if row["ratio"] is None:
            print(f"  {row['model']} | {row['against']}: not measured")
        else:
            verdict = {"stretch": "stretch", "bar": "met", "missed": "MISSED"}[row["met"]]
            theirs = "" if row["theirs"] is None else f"{row['theirs']:.4g}"
            print(
                f"  {row['model'] + ' | ' + row['against']:<76} {row['ours']:>11.4g} {theirs:>11} "
                f"{row['unit']:<8} {row['ratio']:.4g} {verdict}"
            )
    for name, part in report["parts"].items():
        failed = sum("failed" in one for one in part["results"])
        print(
            f"{name}: {part['status']} in {part['seconds']:.0f} s, {len(part['results'])} results, {failed} failed"
            + (f"; {part['message']}" if part["message"] else "")
        )
    print(f"{report['seconds']:.0f} s in all")
    if report["smoke"]:
        print("a rehearsal: sizes are tiny whatever the names say, and no number means anything")


if __name__ == "__main__":
    program.run(main)
