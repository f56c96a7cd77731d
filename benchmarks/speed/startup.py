"""Part: from the start of a process to the end of its first training step, with empty caches of compiled kernels.

The process is `first_step.py`: the real training loop on the recipe, everything switched on.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.speed.bench import Bench, Piece, Result

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def measure(bench: Bench) -> Iterator[Piece]:
    with tempfile.TemporaryDirectory() as caches:
        yield partial(bench.attempt, partial(_first_step, bench, Path(caches)), caches="empty")


def _first_step(bench: Bench, caches: Path) -> Result:
    environment = {**os.environ, **{name: str(caches / name) for name in CACHES}}
    # Python files as they are installed, compiled or not; and they stay so.
    environment.pop("PYTHONPYCACHEPREFIX", None)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, str(Path(__file__).with_name("first_step.py")), str(bench.device)]
    if bench.sizes.smoke:
        command.append("--smoke")
    left = max(1.0, bench.deadline - time.monotonic())
    try:
        done = subprocess.run(
            [*command, "--started", str(time.time())], env=environment, capture_output=True, text=True, timeout=left
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no first step within the {left:.0f} s that were left") from None
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result
