"""The parts of the benchmark, each in a process of its own.

Nearly all of a part's time goes into compiling. So parts rehearse first, all at once: each does once, untimed, what it
will measure, and waits for its turn, with what it compiled in the caches that the processes share.
"""

import contextlib
import datetime
import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.speed import sizes
from logdepth.atomic import read_json


class Part(NamedTuple):
    module: str
    function: str
    seconds: float
    """After which it is ended."""
    rehearsed: bool


PARTS = {
    "rates": Part("benchmarks.speed.rates", "measure", 25, rehearsed=False),
    "startup": Part("benchmarks.speed.startup", "measure", 50, rehearsed=False),
    "forward": Part("benchmarks.speed.forward", "measure", 140, rehearsed=True),
    "training": Part("benchmarks.speed.training", "measure", 140, rehearsed=True),
    "decoding": Part("benchmarks.speed.decoding", "measure", 70, rehearsed=True),
    "large": Part("benchmarks.speed.training", "measure_large", 40, rehearsed=True),
}
ENDING_SECONDS = 8.0
"""Of a part's seconds, kept for a measurement under way and for its process to end."""
REHEARSAL_SECONDS = 150.0
"""After which nothing more is begun in a rehearsal."""
LATE_SECONDS = 20.0
"""So much longer may it take to end what was begun; a part that is slower yet is started anew, and not rehearsed."""
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,power.limit,driver_version"


def run_part(name: str, device: torch.device, out: Path, smoke: bool) -> None:
    """In the part's own process, as soon as it is told when it will be ended, by the clock that processes share."""
    from benchmarks.speed.bench import Bench

    part = PARTS[name]
    measure = getattr(importlib.import_module(part.module), part.function)
    size = sizes.smoke() if smoke else sizes.full()
    if smoke:
        torch.set_num_threads(1)
    if part.rehearsed:
        once = replace(size, seconds=0.0, least_repeats=1, chunks=1)
        measure(Bench(once, device, None, float(sys.stdin.readline()) - time.monotonic()))
        _ready_file(out).touch()
    end = float(sys.stdin.readline())
    seconds = end - time.monotonic() - ENDING_SECONDS  # importing may have taken some of them
    measure(Bench(size, device, out, seconds))


class PartProcess:
    """A part's process: it imports what it needs, and waits for its turn."""

    def __init__(self, name: str, folder: Path, smoke: bool) -> None:
        self.name, self.smoke = name, smoke
        self.results, self.errors = folder / f"{name}.json", folder / f"{name}.errors"
        self._start()

    def _start(self) -> None:
        gpu = Path(__file__).parents[1] / "gpu.py"
        command = [sys.executable, str(gpu), "--part", self.name, "--out", str(self.results)]
        command += ["--smoke"] if self.smoke else []
        with self.errors.open("w") as stream:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stream, text=True)

    def rehearse_until(self, end: float) -> None:
        """By the clock that processes share; of a time that is over, nothing is rehearsed."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that has failed: `run` says so
            self.process.stdin.write(f"{end}\n")
            self.process.stdin.flush()

    @property
    def ready(self) -> bool:
        """Its rehearsal is over, or it has failed."""
        return _ready_file(self.results).exists() or self.process.poll() is not None

    def start_anew(self) -> None:
        self.end()
        self._start()
        self.rehearse_until(0.0)

    def run(self, seconds: float) -> dict[str, Any]:
        """What the part measures in its turn."""
        started = time.monotonic()
        status, message = "done", None
        try:
            self.process.communicate(f"{started + seconds}\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            status = "timed out"
            self.end()
        if status == "done" and self.process.returncode:
            status = "failed"
            lines = self.errors.read_text(errors="replace").strip().splitlines()
            message = lines[-1] if lines else f"exit status {self.process.returncode}"
            print("\n".join(lines[-30:]), file=sys.stderr)
        return {
            "status": status,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "message": message,
            "seconds": round(time.monotonic() - started, 1),
            "clocks": clocks(),
            "results": read_json(self.results) if self.results.exists() else [],
        }

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def rehearse(parts: Sequence[PartProcess]) -> None:
    """All at once; returns when none of them computes any more."""
    started = time.monotonic()
    for part in parts:
        part.rehearse_until(started + REHEARSAL_SECONDS)
    latest = started + REHEARSAL_SECONDS + LATE_SECONDS
    while time.monotonic() < latest and not all(part.ready for part in parts):
        time.sleep(0.05)
    for part in parts:
        if not part.ready:
            part.start_anew()
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)


def clocks() -> dict[str, str] | None:
    """What nvidia-smi says of clocks, heat and power; None where it is not there."""
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = done.stdout.splitlines()[0].split(", ")
    return dict(zip(CLOCKS.split(","), values, strict=False))


def _ready_file(results: Path) -> Path:
    return results.with_suffix(".ready")
