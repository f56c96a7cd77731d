"""The parts of the benchmark, each in a process of its own.

Nearly all of a part's time would go into compiling. So parts are rehearsed first, all at once, by processes that do
once, untimed, what will be measured, several to a part: what they compiled is in the caches that processes share, and
nothing else of them is left.
"""

import contextlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.program import signal_when_parent_ends, today
from benchmarks.speed import sizes
from logdepth.atomic import read_json


class Part(NamedTuple):
    module: str
    function: str
    """Of a `Bench`: yields what is to be done, piece by piece."""
    seconds: float
    """After which it is ended."""
    rehearsals: int
    """Processes that share its rehearsal: as many as there are Transformers to compile, say. One is enough for a part
    to import beside the others' rehearsals; with none, its own process starts in its turn."""


PARTS = {
    "startup": Part("benchmarks.speed.startup", "measure", 50, rehearsals=0),
    "rates": Part("benchmarks.speed.rates", "measure", 35, rehearsals=1),
    "forward": Part("benchmarks.speed.forward", "measure", 140, rehearsals=4),
    "training": Part("benchmarks.speed.training", "measure", 140, rehearsals=4),
    "decoding": Part("benchmarks.speed.decoding", "measure", 90, rehearsals=3),
    "large": Part("benchmarks.speed.training", "measure_large", 40, rehearsals=1),
}
ENDING_SECONDS = 8.0
"""Of a part's seconds, kept for a measurement under way and for its process to end."""
REHEARSAL_SECONDS = 150.0
"""After which a rehearsal is ended: what it has not compiled, the part will."""
BEST_CONFIG = ".best_config"
"""Of files in which torch.compile keeps which of a kernel's configurations was the fastest."""
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,power.limit,driver_version"


def run_part(name: str, device: torch.device, out: Path | None, smoke: bool, share: int = 0) -> None:
    """In the part's own process, as soon as it is told when it will be ended, by the clock that processes share.

    With no file for results it is a rehearsal, of one share of the pieces.
    """
    from benchmarks.speed.bench import Bench

    part = PARTS[name]
    measure = getattr(importlib.import_module(part.module), part.function)
    size = sizes.smoke() if smoke else sizes.full()
    if smoke:
        torch.set_num_threads(1)
    if out is None:
        size = replace(size, seconds=0.0, least_repeats=1, chunks=1)
    signal_when_parent_ends(signal.SIGKILL)  # until now the end of its input would have ended it
    end = float(sys.stdin.readline())
    seconds = end - time.monotonic() - ENDING_SECONDS  # importing may have taken some of them
    every = 1 if out is not None else part.rehearsals
    for piece in itertools.islice(measure(Bench(size, device, out, seconds)), share, None, every):
        piece()


class PartProcess:
    """A part's process: it imports what it needs, and waits for its turn."""

    def __init__(self, name: str, folder: Path, smoke: bool, *, rehearsed_share: int | None = None) -> None:
        self.name, self.rehearsal = name, rehearsed_share is not None
        self.results = folder / f"{name}.json"
        self.errors = folder / f"{name}{f'-rehearsal-{rehearsed_share}' if self.rehearsal else ''}.errors"
        command = [sys.executable, str(Path(__file__).parents[1] / "gpu.py"), "--part", name]
        command += ["--share", str(rehearsed_share)] if self.rehearsal else ["--out", str(self.results)]
        command += ["--smoke"] if smoke else []
        some_cores = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // 4))}
        with self.errors.open("w") as stream:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=os.environ | some_cores if self.rehearsal else None,
                start_new_session=True,
            )

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
            "date": today(),
            "message": message,
            "seconds": round(time.monotonic() - started, 1),
            "clocks": None if self.rehearsal else clocks(),
            "results": read_json(self.results) if self.results.exists() else [],
        }

    def end(self) -> None:
        """With whatever it has started: compilers, say."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


def rehearse(names: Sequence[str], folder: Path, smoke: bool) -> None:
    """All of these parts at once; returns when nothing of that runs any more."""
    started = time.monotonic()
    processes = [
        PartProcess(name, folder, smoke, rehearsed_share=share)
        for name in names
        for share in range(PARTS[name].rehearsals)
    ]
    with ThreadPoolExecutor(max_workers=len(processes)) as threads:
        try:
            for _ in threads.map(lambda one: one.run(REHEARSAL_SECONDS), processes):
                pass
        finally:  # an interruption need not wait for them
            for one in processes:
                one.end()
    for choice in folder.rglob(f"*{BEST_CONFIG}"):  # of kernels, by times that were taken while others had the GPU too
        choice.unlink()
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
