"""Outcomes of hostile cases, how they are judged, and the loop that all programs share."""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from logdepth.atomic import write_json
from logdepth.progress import Progress
from tests.hostile.worker import Said

HARMLESS, WARNED, REFUSED, DONE = "harmless", "warned", "refused", "done"
MESSY, SILENT, TRACEBACK, CRASH, HANG = "messy", "silent", "traceback", "crash", "hang"
GOOD = (HARMLESS, WARNED, REFUSED, DONE)
FAILURES = (MESSY, SILENT, TRACEBACK, CRASH, HANG)
EXPLAINED = {
    HARMLESS: "the same numbers and texts as without damage",
    WARNED: "the same, and one line on stderr",
    REFUSED: "exit code 2, and one line on stderr that begins with `logdepth VERB: `",
    DONE: "a command or a corpus that was accepted",
    MESSY: "another exit code, more lines, or half-written files",
    SILENT: "another result, and exit code 0",
    TRACEBACK: "a traceback",
    CRASH: "ended by a signal",
    HANG: "not finished after 20 s",
}
"""From the best outcome to the worst: a case has the worst outcome of all its calls."""
SEVERITY = list(EXPLAINED)
NUMBER = r"[\d,.]+(?:e[+-]\d+)?"
INFORMATION = re.compile(
    "|".join(
        (
            r".*: \w+ of [\d,]+ parameters on .*",  # what is going to be trained
            rf".*step {NUMBER} \(epoch .*\): validation perplexity .*",
            rf".*: {NUMBER}(/{NUMBER})? ?((steps|tokens|bytes|lengths|runs)\b|%).*",  # Progress without a terminal
            rf".*: test perplexity {NUMBER}, .*",
            r"trial \d+: .*",
            r"no importance figure: .*",
            rf"context {NUMBER}: the text is shorter.*",
            r".*the warm-up of .* steps is longer than the run.*",
            r"stopped (by \w+ )?at step .*; saved\..*",
            r"stopped by \w+; saved\..*",
            r".*the budget is spent.*",
            r".* study: \d+ runs? with .* steps to train, .*",  # the estimate of a study
            r".* is for '.*': here its settings are used for another corpus",
            r"the environment has changed .*",
            r".* carry no checksums.*",
        )
    )
)
"""Lines on stderr that may precede the line of an error."""
REMARKABLE = re.compile(r"the environment has changed .*|.* carry no checksums.*")
"""Lines that are a warning if the same verb does not print them without damage."""


class Case(NamedTuple):
    """One case: what was done, how it ended, and why that is its outcome."""

    what: str
    outcome: str
    detail: str = ""


def worst(cases: Iterable[Case]) -> Case:
    return max(cases, key=lambda case: SEVERITY.index(case.outcome))


def judged(said: Said, verb: str) -> tuple[str, str]:
    """Return DONE, REFUSED or a failure, and the line that shows it, for any call of a verb."""
    lines = said.err.splitlines()
    if said.hung:
        return HANG, f"killed after {said.seconds:.0f} s"
    if "Traceback (most recent call last)" in said.err:
        return TRACEBACK, next((line for line in reversed(lines) if line.strip()), "")
    if said.signal is not None:
        return CRASH, f"signal {said.signal}; {' | '.join(lines[-3:])}"
    if said.code == 2:
        others = [line for line in lines[:-1] if not INFORMATION.fullmatch(line)]
        shown = verb if verb.isprintable() else verb.encode("unicode_escape").decode()
        if not lines or not lines[-1].startswith(f"{f'logdepth {shown}'.strip()}: ") or others:
            return MESSY, f"exit code 2, stderr {lines[-4:]}"
        return REFUSED, lines[-1]
    return DONE, f"exit code {said.code}"


def remarks(said: Said) -> set[str]:
    """Return the lines on stderr that are more than information."""
    lines = (line for line in said.err.splitlines() if line.strip())
    return {line for line in lines if REMARKABLE.fullmatch(line) or not INFORMATION.fullmatch(line)}


def parser(description: str | None, count: int) -> argparse.ArgumentParser:
    """Return the parser of the flags that all programs have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--count", type=int, default=count, help=f"number of cases (default {count})")
    made.add_argument("--seed", type=int, default=1, help="seed of all cases (default 1)")
    made.add_argument("--only", type=int, nargs="+", default=[], help="run only the cases with these numbers")
    made.add_argument("--verbose", action="store_true", help="print every case, not only failures")
    made.add_argument("--keep", type=Path, help="folder for what is built once, used again by the next call")
    made.add_argument("--out", type=Path, help="JSON file for the counts and the failures")
    return made


def run_cases(program: str, numbers: Sequence[int], one: Callable[[int], Case], arguments: argparse.Namespace) -> int:
    """Run cases, print failures as they come and a summary at the end; return the exit code."""
    counts: Counter[str] = Counter()
    failures = []
    again = f"python -m tests.hostile.{program} --seed {arguments.seed} --only"
    with Progress(program, len(numbers), unit="cases") as progress:
        for done, number in enumerate(numbers, start=1):
            case = one(number)
            counts[case.outcome] += 1
            failed = case.outcome in FAILURES
            if failed:
                failures.append({"number": number, **case._asdict()})
            if failed or arguments.verbose:
                where = f"   [{again} {number}]" if failed else ""
                print(f"{number}: {case.outcome}: {case.what}: {case.detail}{where}", flush=True)
            progress.update(done, f"{len(failures)} failures")
    print(f"{program}, seed {arguments.seed}: {summary(counts)}", flush=True)
    if arguments.out is not None:
        record = {"program": program, "seed": arguments.seed, "cases": len(numbers), "outcomes": dict(counts)}
        write_json(arguments.out, json.loads(json.dumps(record | {"failures": failures})))
    if not numbers:
        print("there are no cases", file=sys.stderr)
    return 1 if failures or not numbers else 0


def summary(counts: Counter[str]) -> str:
    listed = ", ".join(f"{counts[name]} {name}" for name in SEVERITY if counts[name])
    failed = sum(counts[name] for name in FAILURES)
    return f"{counts.total()} cases: {listed}; {failed or 'no'} failure{'' if failed == 1 else 's'}"


def numbers_of(arguments: argparse.Namespace) -> list[int]:
    return arguments.only or list(range(1, arguments.count + 1))
