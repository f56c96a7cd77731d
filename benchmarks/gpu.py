"""Speed on one GPU: forward, training and decoding, beside Transformers and a measured floor, all in one run.

    python benchmarks/gpu.py                        # everything, within 6 minutes; results/speed-<gpu>.json
    python benchmarks/gpu.py --parts rates,forward  # some of it; what the file has of other parts stays
    python benchmarks/gpu.py --smoke                # tiny, on the CPU, to see that it runs; the numbers mean nothing

Each part runs in a process of its own, within its own seconds; one that fails or takes too long is recorded as such,
with what it had measured by then, and the others go on; for the last ones no time may be left. Code is compiled before,
by all parts at once (speed/parts.py); nothing else runs while one measures. The file is written anew after every part.
What the bars are, and how ratios are made, is in speed/bars.py; docs/performance.md shows it all.
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
"""Parts together take no more: the last ones may be cut short."""


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
    failed: list[str] = []  # of those measured now: the file may have them from before
    started = time.monotonic()
    program.exit_when_terminated()
    with tempfile.TemporaryDirectory() as folder, _compile_caches(folder), contextlib.ExitStack() as ending:

        def start(name: str) -> PartProcess:
            process = PartProcess(name, Path(folder), arguments.smoke)
            ending.callback(process.end)
            return process

        # What is not rehearsed comes first, each started in its turn: one measures how a process starts.
        for rehearsed in (False, True):
            group = [name for name in names if (PARTS[name].rehearsals > 0) == rehearsed]
            processes: Iterable[PartProcess] = map(start, group)
            if rehearsed and group:
                processes = list(processes)  # they import beside the rehearsals
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
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas between (default: all)")
    parser.add_argument("--out", type=Path, help="where to write the numbers (default: results/speed-<gpu>.json)")
    parser.add_argument("--smoke", action="store_true", help="rehearse with tiny sizes on the CPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    return parser


@contextlib.contextmanager
def _compile_caches(folder: str) -> Iterator[None]:
    """Compiled code of this run alone, shared by its parts; compiled on all cores."""
    if not (Path(torch.__file__).parent / "__pycache__").exists():  # else every part would compile torch's Python again
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/python"
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    # This one knows models by their source: not by which kernel of attention was allowed when they were compiled.
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
    """The report in a file, to which more parts are added; its ratios need one kind of machine."""
    report: dict[str, Any] = read_json(file)
    for fact in ("device", "torch", "triton"):
        if report["machine"].get(fact) != new["machine"].get(fact):
            raise UserError(
                f"{file} was made with {fact} {report['machine'].get(fact)}, this is {new['machine'].get(fact)}: "
                "run all parts, or choose another --out"
            )
    return report


def better_of(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """A part that was done before and is not now has lost nothing."""
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
