"""Killed at any instant, full disks, signals: real processes, and weights that end in the same bits."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.run_folders import same_files
from tests.tiny_corpus import VOCAB

STEPS = 60
FLAGS = (
    f"--data.corpus text --data.tokenizer.vocab-size {VOCAB} --model.embed-width 32 --model.operator.width 32 "
    f"--model.leaf-dropout 0.1 --train.max-steps {STEPS} --train.evaluate-every 6 --train.batch-size 8 "
    "--train.context 32 --train.log-every 1 --train.device cpu --train.warmup-steps 5"
).split()


def start(*arguments: str, most_bytes: int | None = None) -> subprocess.Popen[str]:
    def limit() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    return subprocess.Popen(
        [sys.executable, "-m", "logdepth", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
    )


def new_run(corpus: Path, out: Path, most_bytes: int | None = None) -> subprocess.Popen[str]:
    flags = [*FLAGS, "--data.paths", str(corpus), "--out", str(out)]
    return start("pydocs-ar-grc", *flags, most_bytes=most_bytes)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def steps_logged(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_text().count('"train"') if file.exists() else 0


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    while steps_logged(out) < step and process.poll() is None:
        time.sleep(0.001)


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    process = new_run(corpus, out)
    finish(process)
    return out


def test_killed_three_times_ends_in_the_same_bits(corpus: Path, uninterrupted: Path, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # shown when it fails
    chance, out, reached = random.Random(seed), tmp_path / "run", []
    for kill in range(3):
        process = new_run(corpus, out) if not (out / "config.json").exists() else start("--resume", str(out))
        wait_for_step(process, out, chance.randrange(STEPS * kill // 3, STEPS * (kill + 1) // 3))
        time.sleep(chance.random() * 0.02)
        process.kill()
        process.communicate()
        reached.append(steps_logged(out))
        assert process.returncode == -signal.SIGKILL, reached
    process = start("--resume", str(out)) if (out / "config.json").exists() else new_run(corpus, out)
    finish(process)
    same_files(uninterrupted, out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_say_how_to_resume(
    number: signal.Signals, corpus: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = new_run(corpus, out)
    wait_for_step(process, out, 10)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert f"saved. Resume with: logdepth train --resume {out}" in errors
    assert "Traceback" not in errors
    finish(start("--resume", str(out)))
    same_files(uninterrupted, out)


def test_a_full_disk_loses_nothing(corpus: Path, uninterrupted: Path, tmp_path: Path) -> None:
    size = (uninterrupted / "checkpoint.safetensors").stat().st_size
    out = tmp_path / "run"
    process = new_run(corpus, out, most_bytes=size - 1000)
    _, errors = process.communicate()
    assert process.returncode == 2
    last = errors.strip().splitlines()[-1]
    assert last.startswith("logdepth train: ")
    assert "checkpoint.safetensors" in last
    assert last.endswith(f"free some space, then resume with: logdepth train --resume {out}")
    assert "Traceback" not in errors
    assert not list(out.glob(".partial-*"))
    assert not (out / "checkpoint.safetensors").exists()
    load_file(out / "best.safetensors")  # what is there is whole
    finish(start("--resume", str(out)))
    same_files(uninterrupted, out)
