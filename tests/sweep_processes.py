"""Workers of a sweep as real processes, or on trials that take no time; and what a study holds after them."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logdepth.sweep.worker as worker
from logdepth.runs import RunConfig, RunFolder
from logdepth.sweep.ledger import FINISHED, Ledger, origin_of
from logdepth.sweep.storage import open_storage
from logdepth.training import TrainState
from tests.tiny_corpus import VOCAB

RECIPE = "pydocs-ar-grc"
STEPS = 12
TINY = (
    f"--data.corpus text --data.tokenizer.vocab-size {VOCAB} --model.embed-width 16 --model.operator.width 16 "
    f"--train.max-steps {STEPS} --train.evaluate-every 6 --train.batch-size 4 --train.context 16 --train.log-every 1 "
    "--train.device cpu --train.threads 1 --train.warmup-steps 2"
).split()
PROGRAM = (
    "import sys; import logdepth.sweep.heartbeat as heartbeat; heartbeat.BEAT_SECONDS = 0.2; "
    "from logdepth.cli import main; sys.exit(main())"
)
"""`logdepth`, with a quick heart."""


def flags(corpus: Path, out: Path, *more: str) -> list[str]:
    return ["sweep", RECIPE, *TINY, "--data.paths", str(corpus), "--out", str(out), *more]


def start(corpus: Path, out: Path, *more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *flags(corpus, out, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
    )


def finish(process: "subprocess.Popen[str]") -> str:
    """Waits for a worker that must end well; what it said."""
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return errors


@contextlib.contextmanager
def killed_in_a_trial(victim: "subprocess.Popen[str]", its_out: Path, steps: int, not_its: list[int]) -> Iterator[None]:
    """Kills a worker in the middle of one of its trials, once the block has a trial of its own at work."""
    done = threading.Event()

    def kill() -> None:
        while not done.wait(0.002):
            its = [trial for trial in range(20) if trial not in not_its]
            if not_its and any(3 <= len(steps_in(its_out, trial)) < steps - 3 for trial in its):
                victim.kill()
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        victim.kill()
        victim.communicate()


def record_own_trials(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the trials are added that a worker in this process begins or goes on with."""
    began: list[int] = []
    original = worker.Worker._train

    def recorded(self: worker.Worker, config: RunConfig, folder: RunFolder, watch: Any) -> TrainState:
        began.append(int(folder.path.name))
        return original(self, config, folder, watch)

    monkeypatch.setattr(worker.Worker, "_train", recorded)
    return began


def steps_in(out: Path, trial: int) -> list[int]:
    """Steps of a trial that are in its metrics, in order."""
    lines = RunFolder(out / "trials" / f"{trial:04d}").read_metrics()
    return [line["step"] for line in lines if line["kind"] == "train"]


def wait_for_step(process: "subprocess.Popen[str]", out: Path, trial: int, step: int) -> None:
    while len(steps_in(out, trial)) < step:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)


def trials_of(out: Path, url: str | None = None) -> list[Any]:
    """Optuna's own list: attempts, surplus ones and all."""
    storage = open_storage(url, out / "journal.log")
    return list(storage.get_all_trials(storage.get_study_id_from_name(RECIPE)))


def each_done_once(trials: list[Any], count: int) -> list[int]:
    """Exactly `count` trials, each over exactly once and none still running; returns their origins."""
    over = Counter(origin_of(trial) for trial in trials if trial.state in FINISHED)
    assert set(over.values()) == {1}, over
    assert sorted(over) == Ledger(trials).origins
    assert len(over) == count
    return sorted(over)


@pytest.fixture(name="trained")
def training_in_no_time(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trials take no time: their loss is made up. Returns the trials that were trained to their end."""
    done: list[int] = []

    def in_no_time(self: worker.Worker, config: Any, folder: RunFolder, watch: Any) -> TrainState:
        watch.started(STEPS)
        watch.progress(STEPS, 0)
        watch.validated(6, config.train.learning_rate, over=False)
        done.append(int(folder.path.name))
        return TrainState(step=STEPS, best_loss=config.train.learning_rate, finished="all steps done")

    monkeypatch.setattr(worker.Worker, "_train", in_no_time)
    monkeypatch.setattr(worker, "draw", lambda *_: None)
    return done


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every test file that imports it: workers look often for what the others did."""
    monkeypatch.setattr(worker, "POLL_SECONDS", 0.02)
