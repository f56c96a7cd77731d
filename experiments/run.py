"""Does every study of docs/results.md that results/ does not hold yet, several at a time, and keeps what comes out.

    python experiments/run.py --list                        # what is done, what is left, and every command
    python experiments/run.py --lanes 3                     # all that is left; hours on one GPU
    python experiments/run.py ptb ptb-1k --minutes 120      # some of it, until time is up

Stop it whenever you like: the same command goes on. Exit code 3: something is left, or failed. Runs and sweeps are in
studies/ and sweeps/, their output in studies/logs/. Then `make results` shows what is new. plan.py has the jobs.
"""

import fnmatch
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # runs uninstalled too

import torch

from benchmarks import program
from experiments.plan import Job, jobs
from logdepth.atomic import alone, replacing
from logdepth.errors import UserError
from logdepth.progress import in_words

LOGS = Path("studies") / "logs"
LOOK_SECONDS, SAY_SECONDS = 0.5, 15.0
ENDING_SECONDS = 45.0
"""For a job that was asked to stop to save and end."""
LEFT = 3


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a study, as ptb, or jobs of it, as ptb/ar-grc or 'ptb/*/sweep'; * stands for anything; those named first "
        "begin first, but for what must be alone (default: all)",
    )
    parser.add_argument("--list", action="store_true", help="only say what is done and what is left")
    parser.add_argument("--lanes", type=int, default=1, help="jobs at a time (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="after which to stop, with everything saved")
    parser.add_argument("--data-dir", type=Path, help="the folder above those of the corpora (default: $LOGDEPTH_DATA)")
    given = parser.parse_args()
    if given.lanes < 1 or (given.minutes is not None and not given.minutes > 0):
        raise UserError("--lanes must be at least 1, and --minutes above 0")
    data = given.data_dir or os.environ.get("LOGDEPTH_DATA")
    corpora = ROOT / "data" if data is None else Path(data)
    if given.data_dir is not None:
        refuse_if_missing(corpora)
    if data is not None:
        os.environ["LOGDEPTH_DATA"] = str(corpora.absolute())
    every = jobs(from_the_project(corpora))
    os.chdir(ROOT)
    chosen = chosen_of(every, given.names)
    if given.list:
        print(listed(chosen))
        return
    if all(map(is_done, chosen)):
        print("nothing is left: results/ holds all of it")
        return
    if not torch.cuda.is_available():
        raise UserError("no GPU here, and days of work without; `python experiments/run.py --list` says what is left")
    if data is not None:
        refuse_if_missing(Path(os.environ["LOGDEPTH_DATA"]))
    refuse_without_what_it_reads(chosen, every)
    with alone(LOGS, "another process runs experiments here"):
        sys.exit(Campaign(chosen, given.lanes, given.minutes).run())


def listed(chosen: Sequence[Job]) -> str:
    """Every job with its command, then how many are done of each study."""
    jobs_of: dict[str, list[Job]] = {}
    for job in chosen:
        jobs_of.setdefault(job.name.split("/")[0], []).append(job)
    return "\n".join(
        [
            *(f"{'done' if is_done(job) else 'left'}  {job.name}\n      {typed(job)}" for job in chosen),
            *(f"{sum(map(is_done, of_study)):3} of {len(of_study):2}  {study}" for study, of_study in jobs_of.items()),
            f"{sum(map(is_done, chosen))} of {len(chosen)} jobs are done; "
            "commands are typed in the project's folder, with $LOGDEPTH_DATA as the one above those of the corpora",
        ]
    )


def from_the_project(path: Path) -> Path:
    """A path as it is typed in the project's folder: commands are kept with results."""
    return Path(os.path.relpath(path, ROOT))


def chosen_of(every: Sequence[Job], patterns: Sequence[str]) -> list[Job]:
    """Jobs by their names, or by their study's, in the order of `patterns`."""

    def matches(job: Job, pattern: str) -> bool:
        return any(fnmatch.fnmatch(job.name, one) for one in (pattern, f"{pattern}/*"))

    for pattern in patterns:
        if not any(matches(job, pattern) for job in every):
            raise UserError(f"there is no job '{pattern}'; `python experiments/run.py --list` names them")
    if not patterns:
        return list(every)
    return list({job.name: job for pattern in patterns for job in every if matches(job, pattern)}.values())


def refuse_if_missing(corpora: Path) -> None:
    if not corpora.is_dir():
        raise UserError(f"the folder of corpora, {corpora}, is not there")


def refuse_without_what_it_reads(chosen: Sequence[Job], every: Sequence[Job]) -> None:
    """A job that reads what another would first have to make needs that one beside it."""
    names = {job.name: job for job in every}
    for job in chosen:
        for other in job.after:
            if not is_done(job) and names[other] not in chosen and not is_done(names[other]):
                raise UserError(f"'{job.name}' needs '{other}', which is not done; name it too")


def is_done(job: Job) -> bool:
    """Whether results/ holds all that the job makes."""
    return all(any(kept.parent.glob(kept.name)) for kept in job.keeps.values())


def typed(job: Job) -> str:
    return shlex.join(["logdepth", *job.command])


def copy(files: Mapping[Path, Path]) -> None:
    """Files → places; a * in both names stands for the same."""
    for source, target in files.items():
        for found in source.parent.glob(source.name):
            with replacing(target.with_name(found.name) if "*" in target.name else target) as new:
                shutil.copyfile(found, new)


def bring_what_is_begun(job: Job) -> str | None:
    """Brings what results/ holds of it to where the command goes on from, unless that is further; else why not."""
    for written, kept in job.begun.items():
        here, there = whole_lines(written), whole_lines(kept)
        if not here.startswith(there) and not there.startswith(here):
            return f"{written} and {kept} went on from the same in two ways; remove one of them"
        if len(there) > len(here):
            copy({kept: written})
    return None


def keep_what_is_begun(job: Job) -> None:
    """In results/, for as long as the job is not done."""
    done = is_done(job)
    for written, kept in job.begun.items():
        if done:
            kept.unlink(missing_ok=True)
            continue
        here, there = whole_lines(written), whole_lines(kept)
        if len(here) > len(there) and here.startswith(there):
            with replacing(kept) as new:
                new.write_bytes(here)


def whole_lines(file: Path) -> bytes:
    """Without one that is still being written."""
    content = file.read_bytes() if file.exists() else b""
    return content[: content.rfind(b"\n") + 1]


@dataclass(frozen=True, kw_only=True)
class Running:
    job: Job
    process: "subprocess.Popen[bytes]"
    log: Path
    began: float
    """By the clock of files."""

    def finished(self, written: Path) -> bool:
        """Whether a file is of this job, not of one before it, whose config may have been another."""
        return written.exists() and written.stat().st_mtime >= self.began

    def said_last(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")


class Campaign:
    """Jobs in order, so many at a time, until all are done or time is up."""

    def __init__(self, chosen: Sequence[Job], lanes: int, minutes: float | None, command: Sequence[str] = ()) -> None:
        self.waiting = [job for job in chosen if not is_done(job)]
        self.all, self.lanes = chosen, lanes
        self.command = command or (sys.executable, "-m", "logdepth")
        self.started = time.monotonic()
        self.deadline = None if minutes is None else self.started + 60 * minutes
        self.running: list[Running] = []
        self.failed: list[str] = []
        self.stopping = False

    def run(self) -> int:
        print(f"{len(self.all) - len(self.waiting)} of {len(self.all)} jobs are done already", flush=True)
        for job in self.all:
            keep_what_is_begun(job)
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        before = {number: signal.signal(number, self._stop) for number in signals}
        try:
            said = self.started
            while not self.stopping and (self.running or self._startable()):
                self._start_some()
                time.sleep(LOOK_SECONDS)
                self._look()
                if time.monotonic() - said > SAY_SECONDS:
                    said = time.monotonic()
                    self._say_how_far()
                if self.deadline is not None and time.monotonic() > self.deadline:
                    self.stopping = True
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._summary()

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _startable(self) -> Job | None:
        """The first whose turn it can be; what must be alone, when there is nothing else to start or to wait for."""
        ready = [job for job in self.waiting if all(is_done(other) for other in self.all if other.name in job.after)]
        if any(one.job.alone for one in self.running):
            return None
        if beside_others := [job for job in ready if not job.alone]:
            return beside_others[0]
        return ready[0] if ready and not self.running else None

    def _start_some(self) -> None:
        while len(self.running) < self.lanes and (job := self._startable()):
            self.waiting.remove(job)
            copy(job.starts_from)
            if reason := bring_what_is_begun(job):
                self.failed.append(job.name)
                self._say(f"{job.name}: {reason}")
                continue
            began = time.time()
            log = LOGS / f"{job.name.replace('/', '-')}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [*self.command, *job.command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is ours to pass on
                    preexec_fn=partial(program.signal_when_parent_ends, signal.SIGTERM),
                )
            self.running.append(Running(job=job, process=process, log=log, began=began))
            self._say(f"{job.name}: {typed(job)}")

    def _look(self) -> None:
        for one in list(self.running):
            code = one.process.poll()
            accepted = code == 0 or (code == LEFT and one.job.in_parts)  # what lay there before too
            for written, kept in one.job.keeps.items():
                if not kept.exists() and (accepted or (one.job.in_parts and one.finished(written))):
                    copy({written: kept})
            if code is None:
                continue
            self.running.remove(one)
            keep_what_is_begun(one.job)
            took = in_words(time.time() - one.began)
            if is_done(one.job) and (accepted or self.stopping):
                self._say(f"{one.job.name}: done in {took}")
            elif not self.stopping:
                self.failed.append(one.job.name)
                self._say(f"{one.job.name}: failed after {took}, exit code {code}: {one.said_last()} ({one.log})")

    def _end(self) -> None:
        """Asks what still runs to save and stop; keeps what it has finished."""
        self.stopping = True
        if self.running:
            self._say(f"asking {len(self.running)} jobs to save and stop, within {ENDING_SECONDS:.0f} s")
        for one in self.running:
            one.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + ENDING_SECONDS
        for one in self.running:
            try:
                one.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(one.process.pid, signal.SIGKILL)  # with what it started: compilers
                one.process.wait()
        self._look()

    def _say_how_far(self) -> None:
        for one in self.running:
            keep_what_is_begun(one.job)
            self._say(f"  {one.job.name}: {one.said_last()}")

    def _say(self, line: str) -> None:
        print(f"[{in_words(time.monotonic() - self.started)}] {line}", flush=True)

    def _summary(self) -> int:
        left = [job.name for job in self.all if not is_done(job)]
        self._say(f"{len(self.all) - len(left)} of {len(self.all)} jobs are done")
        if self.failed:
            print(f"failed: {', '.join(self.failed)}; what they said is above or in {LOGS}")
        if left:
            print(f"left: {', '.join(left)}; the same command goes on")
        return LEFT if left else 0


if __name__ == "__main__":
    program.run(main)
