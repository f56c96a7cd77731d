"""experiments/run.py: jobs run in order, several at a time, their files are kept, and interrupted jobs resume."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments import run as campaign
from experiments.plan import Job
from experiments.run import Campaign, check_dependencies, copy, is_done, relative_to_root, select_jobs, steps_of
from logdepth.errors import UserError
from logdepth.results import RunResult, read_result
from tests.tiny_corpus import write_corpus
from tests.tiny_study import override_files

FAKE = """
import json, pathlib, signal, sys, time
name, seconds, code, *files = sys.argv[1:]
def note(what):
    with open("notes", "a") as notes:
        notes.write(json.dumps([name, what, time.monotonic()]) + chr(10))
def stop(number, frame):
    note("stopped")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
note("begins")
for file in files:
    path = pathlib.Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
    time.sleep(float(seconds) / len(files))
print(name, "says this last")
note("ends")
sys.exit(int(code))
"""
PROGRAM = (sys.executable, "-c", FAKE)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(campaign, "POLL_SECONDS", 0.02)


def job(name: str, *files: str, seconds: float = 0.1, code: int = 0, after: tuple[str, ...] = (), **more: bool) -> Job:
    written = [f"work/{file}" for file in files or (f"{name}.json",)]
    return Job(
        name=name,
        command=(name, str(seconds), str(code), *written),
        keeps={Path(one): Path("results") / Path(one).name for one in written},
        after=after,
        **more,
    )


def noted() -> list[tuple[str, str, float]]:
    notes = Path("notes")
    return [tuple(json.loads(line)) for line in notes.read_text().splitlines()] if notes.exists() else []


def begun() -> list[str]:
    return [name for name, what, _ in noted() if what == "begins"]


def spans() -> dict[str, tuple[float, float]]:
    times = {(name, what): when for name, what, when in noted()}
    return {name: (when, times[name, "ends"]) for (name, what), when in times.items() if what == "begins"}


def go(*chosen: Job, lanes: int = 1, minutes: float | None = None) -> int:
    return Campaign(chosen, lanes, minutes, PROGRAM).run()


def test_what_is_done_is_kept_and_not_done_again(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = job("a"), job("b")
    assert go(first) == 0
    assert go(first, second) == 0
    assert begun() == ["a", "b"]
    assert Path("results/a.json").read_text() == "a"
    assert "1 of 2 jobs are already done" in capsys.readouterr().out


def test_so_many_at_a_time() -> None:
    assert go(*(job(name, seconds=1.0) for name in "abcd"), lanes=2) == 0
    ends = spans().values()
    overlapping = [sum(start < moment < end for start, end in ends) for moment, _ in ends]
    assert max(overlapping) == 1, "another one beside each"
    assert sum(overlapping) >= 1, "but not one after the other"


def test_nothing_runs_beside_what_must_be_alone() -> None:
    assert go(job("a", seconds=0.3), job("times", seconds=0.3, exclusive=True), job("b", seconds=0.3), lanes=3) == 0
    start, end = spans()["times"]
    for name, (other_start, other_end) in spans().items():
        assert name == "times" or other_end <= start or other_start >= end
    assert begun()[-1] == "times", "lanes are not left empty for it while there is other work"


def test_a_job_waits_for_what_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert go(job("best", after=("sweep",)), job("sweep"), lanes=2) == 0
    assert begun() == ["sweep", "best"]
    Path("notes").unlink()
    failing = [job("bad sweep", code=2), job("never", after=("bad sweep",)), job("c")]
    assert go(*failing, lanes=2) == 3
    assert sorted(begun()) == ["bad sweep", "c"]
    said = capsys.readouterr().out
    assert "bad sweep: failed after" in said
    assert "exit code 2: bad sweep says this last" in said
    assert "left: bad sweep, never; run the same command again to continue" in said


def test_of_a_job_that_fails_only_whole_parts_are_kept() -> None:
    parts = job("runs", "0.json", "1.json", code=3, keep_incomplete=True)
    assert go(parts, job("sweep", "record.json", code=3)) == 3
    assert sorted(path.name for path in Path("results").iterdir()) == ["0.json", "1.json"]
    assert is_done(parts)


def test_what_lay_there_before_is_kept_only_if_the_command_accepts_it() -> None:
    """It may have been made with another config, which the command then refuses."""
    refusing = job("runs", "0.json", keep_incomplete=True)
    refusing = dataclasses.replace(refusing, command=("runs", "0.3", "2", "work/elsewhere.json"))
    old = Path("work/0.json")
    old.parent.mkdir()
    old.write_text("of another config")
    os.utime(old, (1, 1))
    assert go(refusing) == 3
    assert not is_done(refusing)
    accepting = dataclasses.replace(refusing, command=("runs", "0.3", "0", "work/elsewhere.json"))
    assert go(accepting) == 0
    assert Path("results/0.json").read_text() == "of another config"


def test_when_time_is_up_jobs_are_asked_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    long = job("long", "0.json", "1.json", seconds=60, keep_incomplete=True)
    assert go(long, job("next"), minutes=4 / 60) == 3
    assert [what for _, what, _ in noted()] == ["begins", "stopped"]
    assert sorted(path.name for path in Path("results").iterdir()) == ["0.json"]
    said = capsys.readouterr().out
    assert "failed" not in said
    assert "left: long, next" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on(number: int) -> None:
    def stop_us() -> None:
        end = time.monotonic() + 60
        while not begun() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop_us, daemon=True).start()
    assert go(job("long", seconds=60)) == 3
    assert [what for _, what, _ in noted()] == ["begins", "stopped"]


def test_a_program_that_is_killed_stops_its_jobs_in_good_order() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(campaign.ROOT)!r})
from tests.test_campaign import go, job
go(job("long", seconds=60))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL) as killed:
        while not begun():
            assert killed.poll() is None
            time.sleep(0.05)
        killed.kill()
    end = time.monotonic() + 60
    while [what for _, what, _ in noted()] != ["begins", "stopped"]:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_job_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "SHUTDOWN_SECONDS", 0.2)
    deaf = (sys.executable, "-c", FAKE.replace("signal.SIGTERM, stop", "signal.SIGTERM, signal.SIG_IGN"))
    started = time.monotonic()
    assert Campaign([job("long", seconds=60)], 1, 1 / 60, deaf).run() == 3
    assert time.monotonic() - started < 30


def test_kept_files_are_brought_to_where_a_job_looks_for_them() -> None:
    Path("results").mkdir()
    Path("results/run-0.json").write_text("kept")
    Path("results/run-1.json").write_text("kept")
    copy({Path("results/run-*.json"): Path("work/run-*.json"), Path("results/not-there.json"): Path("work/x.json")})
    assert sorted(path.name for path in Path("work").iterdir()) == ["run-0.json", "run-1.json"]
    copy({Path("results/run-0.json"): Path("work/other.json")})
    assert Path("work/other.json").read_text() == "kept"


JOURNAL, KEPT = Path("work/journal.log"), Path("results/sweep.journal")
ADDING = """
import pathlib, sys, time
_, lines, seconds, record = sys.argv[1:]
journal = pathlib.Path("work/journal.log")
journal.parent.mkdir(exist_ok=True)
with journal.open("a") as stream:
    stream.write(lines.replace("/", chr(10)))
time.sleep(float(seconds))
if record:
    pathlib.Path(record).write_text("all of it")
"""


def sweep_of(lines: str, *, seconds: float = 0.0, whole: bool = False) -> Job:
    """Adds these lines to its journal, each ended by /; the `whole` of it is done then."""
    record = Path("work/record.json")
    return Job(
        name="sweep",
        command=("sweep", lines, str(seconds), str(record) if whole else ""),
        keeps={record: Path("results/record.json")},
        journals={JOURNAL: KEPT},
    )


def add(job: Job, minutes: float | None = None) -> int:
    return Campaign([job], 1, minutes, (sys.executable, "-c", ADDING)).run()


def test_what_is_begun_goes_on_elsewhere() -> None:
    assert add(sweep_of("a/b/cut off")) == 3
    assert KEPT.read_text() == "a\nb\n", "whole lines alone"
    JOURNAL.unlink()
    assert add(sweep_of("c/")) == 3
    assert JOURNAL.read_text() == KEPT.read_text() == "a\nb\nc\n"
    assert add(sweep_of("d/", whole=True)) == 0
    assert JOURNAL.read_text() == "a\nb\nc\nd\n"
    assert not KEPT.exists()
    KEPT.write_text("a\n")
    assert add(sweep_of("e/")) == 0
    assert not KEPT.exists(), "what is done needs none, wherever it comes from"


def test_what_has_gone_on_elsewhere_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert add(sweep_of("a/")) == 3
    KEPT.write_text("a\nb\n")
    assert add(sweep_of("c/")) == 3
    assert JOURNAL.read_text() == KEPT.read_text() == "a\nb\nc\n"
    KEPT.write_text("a\nb\nother\n")
    assert add(sweep_of("d/")) == 3
    assert f"sweep: {JOURNAL} and {KEPT} have diverged; remove one" in capsys.readouterr().out
    assert (JOURNAL.read_text(), KEPT.read_text()) == ("a\nb\nc\n", "a\nb\nother\n")


def test_what_is_begun_is_kept_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "STATUS_SECONDS", 0.05)
    seen = []

    def look(self: Campaign) -> None:
        seen.append(KEPT.exists() and bool(self.running))
        self.stopping = seen[-1]

    monkeypatch.setattr(Campaign, "_poll", look)
    monkeypatch.setattr(campaign, "SHUTDOWN_SECONDS", 0.5)
    assert add(sweep_of("a/", seconds=60), minutes=1) == 3
    assert seen[-2], "in results/ before the job has ended"


RUN, KEPT_RUN = Path("work/runs/s3-grc-0"), Path("results/unfinished/groups-s3-grc-0")
TRAINING = """
import pathlib, sys, time
from logdepth.runs.tensors import load_tensors, save_tensors
import torch
_, steps, seconds, result = sys.argv[1:]
folder = pathlib.Path("work/runs/s3-grc-0")
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text("the config")
file = folder / "checkpoint.safetensors"
before = load_tensors(file)[1]["state"]["step"] if file.exists() else 0
save_tensors(file, {"weight": torch.zeros(2)}, {"state": {"step": before + int(steps)}})
time.sleep(float(seconds))
if result:
    pathlib.Path(result).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(result).write_text("all of it")
"""


def run_of(steps: int, *, seconds: float = 0.0, whole: bool = False) -> Job:
    """Trains for some steps more than the checkpoint has; the `whole` of it has a result."""
    result = Path("work/results/s3-grc-0.json")
    return Job(
        name="run",
        command=("run", str(steps), str(seconds), str(result) if whole else ""),
        keeps={result: Path("results/tasks/s3-grc-0.json")},
        unfinished={RUN: KEPT_RUN},
    )


def train(job: Job, minutes: float | None = None) -> int:
    return Campaign([job], 1, minutes, (sys.executable, "-c", TRAINING)).run()


def test_runs_on_tasks_go_on_elsewhere() -> None:
    """From the checkpoint in results/, wherever it is further; what is finished is not kept."""
    assert train(run_of(10)) == 3
    assert (steps_of(RUN), steps_of(KEPT_RUN)) == (10, 10)
    assert (KEPT_RUN / "config.json").read_text() == "the config"
    shutil.rmtree("work")
    assert train(run_of(5)) == 3
    assert (steps_of(RUN), steps_of(KEPT_RUN)) == (15, 15)
    (KEPT_RUN / "checkpoint.safetensors").write_text("damaged")
    assert train(run_of(1)) == 3
    assert (steps_of(RUN), steps_of(KEPT_RUN)) == (16, 16), "a damaged copy is none"
    shutil.rmtree("work")
    assert train(run_of(4, whole=True)) == 0
    assert steps_of(RUN) == 20
    assert not KEPT_RUN.exists()
    shutil.copytree(RUN, KEPT_RUN)
    assert train(run_of(1)) == 0
    assert not KEPT_RUN.exists(), "what is done needs none, wherever it comes from"


def test_checkpoints_are_kept_while_a_run_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "STATUS_SECONDS", 0.05)
    monkeypatch.setattr(campaign, "SHUTDOWN_SECONDS", 0.5)

    def look(self: Campaign) -> None:
        self.stopping = steps_of(KEPT_RUN) == 7 and bool(self.running)

    monkeypatch.setattr(Campaign, "_poll", look)
    assert train(run_of(7, seconds=60), minutes=1) == 3
    assert steps_of(KEPT_RUN) == 7


def test_jobs_are_chosen_by_name() -> None:
    sweep, runs, other = job("ptb/sweep"), job("ptb/runs", after=("ptb/sweep",)), job("webmix")
    every = [sweep, runs, other]
    assert select_jobs(every, []) == every
    assert select_jobs(every, ["ptb"]) == select_jobs(every, ["p*/*"]) == [sweep, runs]
    assert select_jobs(every, ["webmix", "ptb/runs", "ptb"]) == [other, runs, sweep], "as they are named"
    with pytest.raises(UserError, match=r"there is no job 'wikitext'; .*--list` lists the jobs"):
        select_jobs(every, ["wikitext"])
    with pytest.raises(UserError, match="'ptb/runs' needs 'ptb/sweep', which is not done; select it too"):
        check_dependencies([runs], every)
    check_dependencies([sweep, runs], every)
    assert go(sweep) == 0
    check_dependencies([runs], every)


def test_a_sweep_and_then_its_best(tmp_path: Path) -> None:
    """With the real commands, small; the sweep goes on from nothing but a journal that another machine has left."""
    corpus = write_corpus(tmp_path / "corpus")
    configs = override_files(tmp_path / "configs", corpus)
    everyone, of_row = configs[1], str(tmp_path / "configs" / "ar-grc.json")
    small = json.loads(Path(everyone).read_text()) | json.loads(Path(of_row).read_text())["config"]
    small["train"] |= {"threads": 1}
    Path("small.json").write_text(json.dumps(small))
    Path("threads.json").write_text('{"train": {"threads": 1}}')  # the machine's: no sweep hands it on
    space = ("--space", "train.learning_rate=1e-3:1e-2:log")
    record = Path("results/sweeps/text/text-ar-grc.json")
    name = "text-ar-grc-0.json"
    sweep = Job(
        name="text/ar-grc/sweep",
        command=("sweep", "text-ar-grc", "--config", "small.json", "--trials", "2", *space),
        keeps={Path("sweeps/text-ar-grc/sweep.json"): record},
        journals={Path("sweeps/text-ar-grc/journal.log"): record.with_suffix(".journal")},
    )
    begun = dataclasses.replace(sweep, command=tuple("1" if word == "2" else word for word in sweep.command))
    assert Campaign([begun], 1, None).run() == 0
    journal, first_trial = Path("sweeps/text-ar-grc/journal.log"), json.loads(record.read_text())["best"]
    shutil.copyfile(journal, record.with_suffix(".journal"))
    record.unlink()
    shutil.rmtree("sweeps")
    every = [
        sweep,
        Job(
            name="text/ar-grc",
            command=tuple(f"reproduce text --models ar-grc --seeds 0 --config {record} threads.json --untimed".split()),
            keeps={Path("studies/text/results") / name: Path("results/text") / name},
            after=("text/ar-grc/sweep",),
        ),
    ]
    assert Campaign(every, 2, None).run() == 0, [log.read_text() for log in campaign.LOGS.iterdir()]
    result = read_result(Path("results/text") / name)
    assert isinstance(result, RunResult)
    best = json.loads(record.read_text())["best"]
    trials = json.loads(record.read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 2
    assert trials[0] == first_trial
    assert not record.with_suffix(".journal").exists()
    assert result.config.train.learning_rate == best["params"]["train.learning_rate"]
    assert result.valid_loss == best["loss"]


def test_corpora_are_named_as_seen_relative_to_root() -> None:
    assert relative_to_root(campaign.ROOT / "data") == Path("data")
    assert relative_to_root(campaign.ROOT.parent / "data") == Path("../data")
    assert (campaign.ROOT / relative_to_root(Path("corpora"))).resolve() == Path("corpora").resolve()


def test_the_program_lists_and_refuses() -> None:
    program = [sys.executable, str(Path(campaign.__file__))]
    listed = subprocess.run([*program, "--list", "wikitext2"], capture_output=True, text=True, check=True)
    assert "done  wikitext2/ar-grc/0\n      logdepth reproduce wikitext2 --models ar-grc " in listed.stdout
    number = listed.stdout.count("done  ")
    count = f"{number} of {listed.stdout.count('logdepth reproduce')}"
    *_, study, whole = listed.stdout.splitlines()
    assert study.split() == [*count.split(), "wikitext2"]
    assert whole.startswith(f"{count} jobs are done; ")
    nothing = subprocess.run([*program, "wikitext2/ar-grc"], capture_output=True, text=True, check=True)
    assert nothing.stdout == "all selected jobs are done\n"
    for arguments, said in (
        (["--list", "nothing"], "there is no job 'nothing'"),
        (["--lanes", "0"], "--lanes must be at least 1"),
        (["--lanes", "two"], "argument --lanes: invalid int value: 'two'; --help lists all options"),
        (["--list", "--data-dir", "/nowhere"], "the data directory /nowhere does not exist"),
    ):
        refused = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert said in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
