"""Run the studies of docs/results.md that are missing in results/, several at a time, and keep their results there.

    python experiments/run.py --list                        # list all jobs with their commands, done and remaining
    python experiments/run.py --lanes 3                     # run all remaining jobs: hours on one GPU
    python experiments/run.py ptb ptb-1k --minutes 120      # run the jobs of two studies for at most two hours

It can be interrupted at any time. To resume, run the same command again. The exit code is 3 if jobs remain or have
failed. Runs are in studies/, sweeps in sweeps/ and logs in studies/logs/. `make results` then updates docs/results.md.
plan.py defines the jobs.
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
sys.path.insert(0, str(ROOT))  # works without installation

import torch

from benchmarks import program
from experiments.plan import Job, jobs
from logdepth.atomic import alone, replacing
from logdepth.errors import UserError
from logdepth.progress import in_words
from logdepth.runs.tensors import read_record
from logdepth.solving.training import CHECKPOINT, REMEDY

LOGS = Path("studies") / "logs"
RUN_FILES = ("config.json", CHECKPOINT)
"""What the folder of a run on a task has."""
POLL_SECONDS, STATUS_SECONDS = 0.5, 15.0
"""Seconds between checks of the running jobs, and between status messages."""
SHUTDOWN_SECONDS = 45.0
"""Seconds that a job has to save and exit after SIGTERM, before it is killed."""
EXIT_INCOMPLETE = 3
"""Exit code if jobs remain or have failed."""


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a study, such as ptb, or some of its jobs, such as ptb/ar-grc or 'ptb/*/sweep'; jobs start in the order "
        "of the names, except that timing jobs run last and alone (default: all jobs)",
    )
    parser.add_argument("--list", action="store_true", help="list done and remaining jobs, and exit")
    parser.add_argument("--lanes", type=int, default=1, help="number of jobs to run at a time (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="minutes after which to save and stop (default: unlimited)")
    parser.add_argument("--data-dir", type=Path, help="root data directory (default: $LOGDEPTH_DATA)")
    given = parser.parse_args()
    if given.lanes < 1 or (given.minutes is not None and not given.minutes > 0):
        raise UserError(f"--lanes must be at least 1, and --minutes above 0; got {given.lanes} and {given.minutes}")
    data = given.data_dir or os.environ.get("LOGDEPTH_DATA")
    corpora = ROOT / "data" if data is None else Path(data)
    if given.data_dir is not None:
        refuse_if_missing(corpora)
    if data is not None:
        os.environ["LOGDEPTH_DATA"] = str(corpora.absolute())
    every = jobs(relative_to_root(corpora))
    os.chdir(ROOT)
    chosen = select_jobs(every, given.names)
    if given.list:
        print(listed(chosen))
        return
    if all(map(is_done, chosen)):
        print("all selected jobs are done")
        return
    if not torch.cuda.is_available():
        raise UserError(
            "the experiments need a CUDA GPU, and none was found; `python experiments/run.py --list` lists the jobs"
        )
    if data is not None:
        refuse_if_missing(Path(os.environ["LOGDEPTH_DATA"]))
    check_dependencies(chosen, every)
    with alone(LOGS, "another process is running experiments in this folder; wait until it ends"):
        sys.exit(Campaign(chosen, given.lanes, given.minutes).run())


def listed(chosen: Sequence[Job]) -> str:
    """List all jobs with their commands, then the number of done jobs of each study."""
    jobs_of: dict[str, list[Job]] = {}
    for job in chosen:
        jobs_of.setdefault(job.name.split("/")[0], []).append(job)
    return "\n".join(
        [
            *(f"{_state(job)}  {job.name}{_estimate(job)}\n      {typed(job)}" for job in chosen),
            *(f"{sum(map(is_done, of_study)):3} of {len(of_study):2}  {study}" for study, of_study in jobs_of.items()),
            f"{sum(map(is_done, chosen))} of {len(chosen)} jobs are done; "
            "run commands in the project's root folder, with $LOGDEPTH_DATA set to the root data directory",
        ]
    )


def _state(job: Job) -> str:
    return "done" if is_done(job) else "left"


def _estimate(job: Job) -> str:
    return "" if job.minutes is None or is_done(job) else f", about {job.minutes:.0f} minutes"


def relative_to_root(path: Path) -> Path:
    """Return a path relative to the project's root folder. Commands with such paths are recorded in results."""
    return Path(os.path.relpath(path, ROOT))


def select_jobs(every: Sequence[Job], patterns: Sequence[str]) -> list[Job]:
    """Select jobs by their names or studies, in the order of `patterns`; without patterns, select all."""

    def matches(job: Job, pattern: str) -> bool:
        return any(fnmatch.fnmatch(job.name, one) for one in (pattern, f"{pattern}/*"))

    for pattern in patterns:
        if not any(matches(job, pattern) for job in every):
            raise UserError(f"there is no job '{pattern}'; `python experiments/run.py --list` lists the jobs")
    if not patterns:
        return list(every)
    return list({job.name: job for pattern in patterns for job in every if matches(job, pattern)}.values())


def refuse_if_missing(corpora: Path) -> None:
    """Raise a UserError if the root data directory does not exist."""
    if not corpora.is_dir():
        raise UserError(f"the data directory {corpora} does not exist; set --data-dir to an existing one")


def check_dependencies(chosen: Sequence[Job], every: Sequence[Job]) -> None:
    """Raise a UserError if a job needs the results of another job that is neither done nor selected."""
    names = {job.name: job for job in every}
    for job in chosen:
        for other in job.after:
            if not is_done(job) and names[other] not in chosen and not is_done(names[other]):
                raise UserError(f"'{job.name}' needs '{other}', which is not done; select it too")


def is_done(job: Job) -> bool:
    """Return whether results/ contains all files that the job keeps."""
    return all(any(kept.parent.glob(kept.name)) for kept in job.keeps.values())


def typed(job: Job) -> str:
    """Return the job's command line."""
    return shlex.join(["logdepth", *job.command])


def copy(files: Mapping[Path, Path]) -> None:
    """Copy files to the places that they are mapped to. A * in a name matches anything, and keeps its value."""
    for source, target in files.items():
        for found in source.parent.glob(source.name):
            with replacing(target.with_name(found.name) if "*" in target.name else target) as new:
                shutil.copyfile(found, new)


def restore_journals(job: Job) -> str | None:
    """Copy a job's journals from results/ if they are longer than the local ones. Return an error message, or None."""
    for written, kept in job.journals.items():
        here, there = complete_lines(written), complete_lines(kept)
        if not here.startswith(there) and not there.startswith(here):
            return f"{written} and {kept} have diverged; remove one of them"
        if len(there) > len(here):
            copy({kept: written})
    return None


def keep_journals(job: Job) -> None:
    """Copy a job's journals to results/ if they are longer; remove them from there once the job is done."""
    done = is_done(job)
    for written, kept in job.journals.items():
        if done:
            kept.unlink(missing_ok=True)
            continue
        here, there = complete_lines(written), complete_lines(kept)
        if len(here) > len(there) and here.startswith(there):
            with replacing(kept) as new:
                new.write_bytes(here)


def restore_runs(job: Job) -> None:
    """Copy the checkpoints of a job's runs from results/ if they are further than the local ones."""
    for folder, kept in job.unfinished.items():
        if steps_of(kept) > steps_of(folder):
            copy({kept / name: folder / name for name in RUN_FILES})


def keep_runs(job: Job) -> None:
    """Copy the checkpoints of a job's runs to results/ if they are further; remove them once their results are kept."""
    finished = {written.stem for written, kept in job.keeps.items() if kept.exists()}
    for folder, kept in job.unfinished.items():
        if folder.name in finished:
            shutil.rmtree(kept, ignore_errors=True)
        elif steps_of(folder) > steps_of(kept):
            copy({folder / name: kept / name for name in RUN_FILES})


def steps_of(folder: Path) -> int:
    """Return after how many steps the checkpoint in the folder of a run on a task was made; -1 if it has no whole one.

    A damaged one is left to the job, which says so.
    """
    if not all((folder / name).exists() for name in RUN_FILES):
        return -1
    try:
        return int(read_record(folder / CHECKPOINT, REMEDY)["state"]["step"])
    except (UserError, KeyError, TypeError, ValueError):
        return -1


def complete_lines(file: Path) -> bytes:
    """Return a file's content up to the end of the last complete line."""
    content = file.read_bytes() if file.exists() else b""
    return content[: content.rfind(b"\n") + 1]


@dataclass(frozen=True, kw_only=True)
class Running:
    """A running job."""

    job: Job
    process: "subprocess.Popen[bytes]"
    log: Path
    started: float
    """Start time, comparable with modification times of files."""

    def finished(self, written: Path) -> bool:
        """Return whether this job has written a file, as opposed to an earlier job with another config."""
        return written.exists() and written.stat().st_mtime >= self.started

    def last_line(self) -> str:
        """Return the last line of output that is not empty."""
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")


class Campaign:
    """Runs jobs in order, up to `lanes` at a time, until all are done or the time limit is reached."""

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
        """Run the jobs; return the exit code."""
        print(f"{len(self.all) - len(self.waiting)} of {len(self.all)} jobs are already done", flush=True)
        for job in self.all:
            keep_journals(job)
            keep_runs(job)
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        before = {number: signal.signal(number, self._stop) for number in signals}
        try:
            reported = self.started
            while not self.stopping and (self.running or self._startable()):
                self._start_some()
                time.sleep(POLL_SECONDS)
                self._poll()
                if time.monotonic() - reported > STATUS_SECONDS:
                    reported = time.monotonic()
                    self._report_status()
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
        """Return the next job that can start. An exclusive job starts only if no other job can start or is running."""
        ready = [job for job in self.waiting if all(is_done(other) for other in self.all if other.name in job.after)]
        if any(one.job.exclusive for one in self.running):
            return None
        if shared := [job for job in ready if not job.exclusive]:
            return shared[0]
        return ready[0] if ready and not self.running else None

    def _start_some(self) -> None:
        while len(self.running) < self.lanes and (job := self._startable()):
            self.waiting.remove(job)
            copy(job.inputs)
            restore_runs(job)
            if reason := restore_journals(job):
                self.failed.append(job.name)
                self._say(f"{job.name}: {reason}")
                continue
            started = time.time()
            log = LOGS / f"{job.name.replace('/', '-')}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [*self.command, *job.command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # this process passes Ctrl-C on
                    preexec_fn=partial(program.signal_when_parent_ends, signal.SIGTERM),
                )
            self.running.append(Running(job=job, process=process, log=log, started=started))
            self._say(f"{job.name}: {typed(job)}")

    def _poll(self) -> None:
        """Keep the files that running jobs have written, and handle jobs that have ended."""
        for one in list(self.running):
            code = one.process.poll()
            # With these exit codes the command has also accepted files from before it started.
            accepted = code == 0 or (code == EXIT_INCOMPLETE and one.job.keep_incomplete)
            for written, kept in one.job.keeps.items():
                if not kept.exists() and (accepted or (one.job.keep_incomplete and one.finished(written))):
                    copy({written: kept})
            if code is None:
                continue
            self.running.remove(one)
            keep_journals(one.job)
            keep_runs(one.job)
            took = in_words(time.time() - one.started)
            if is_done(one.job) and (accepted or self.stopping):
                self._say(f"{one.job.name}: done in {took}")
            elif not self.stopping:
                self.failed.append(one.job.name)
                self._say(f"{one.job.name}: failed after {took}, exit code {code}: {one.last_line()} ({one.log})")

    def _end(self) -> None:
        """Ask the running jobs to save and stop, and keep the files that they have finished."""
        self.stopping = True
        if self.running:
            self._say(f"asking {len(self.running)} jobs to save and stop within {SHUTDOWN_SECONDS:.0f} s")
        for one in self.running:
            one.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + SHUTDOWN_SECONDS
        for one in self.running:
            try:
                one.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(one.process.pid, signal.SIGKILL)  # including its child processes, such as compilers
                one.process.wait()
        self._poll()

    def _report_status(self) -> None:
        for one in self.running:
            keep_journals(one.job)
            keep_runs(one.job)
            self._say(f"  {one.job.name}: {one.last_line()}")

    def _say(self, line: str) -> None:
        print(f"[{in_words(time.monotonic() - self.started)}] {line}", flush=True)

    def _summary(self) -> int:
        left = [job.name for job in self.all if not is_done(job)]
        self._say(f"{len(self.all) - len(left)} of {len(self.all)} jobs are done")
        if self.failed:
            print(f"failed: {', '.join(self.failed)}; see the messages above and the logs in {LOGS}")
        if left:
            print(f"left: {', '.join(left)}; run the same command again to continue")
        return EXIT_INCOMPLETE if left else 0


if __name__ == "__main__":
    program.run(main)
