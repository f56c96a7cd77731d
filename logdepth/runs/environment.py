"""The environment of a run: versions, device, threads, and the command that started it."""

import contextlib
import hashlib
import os
import platform
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logdepth.version import __version__


def environment(device: torch.device, ranks: int = 1) -> dict[str, Any]:
    """The versions, the device, the threads and the number of processes in use now, as written to environment.json."""
    cuda = device.type == "cuda"
    return {
        "logdepth": __version__,
        "code": _hash_of_logdepth(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "processor_name": _processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": ranks,
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "cuda": torch.version.cuda if cuda else None,
    }


@cache
def _hash_of_logdepth() -> str:
    """Cached, because files may change while a run is in progress."""
    return hash_of_code(Path(__file__).parent.parent)


def hash_of_code(package: Path) -> str:
    """A hash of a package's source files; it changes where the version number does not."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def typed_command() -> str:
    """The command line of this process, quoted for a shell."""
    return shlex.join(["logdepth", *sys.argv[1:]])


def _processor_name() -> str | None:
    """The name of the processor, if the system tells it."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or None


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between two environments that may change the last bits of a resumed run."""
    decisive = ("logdepth", "code", "python", "torch", "processor", "threads", "ranks", "device", "cuda")
    before = {"ranks": 1} | before  # runs of older versions had one process
    return [f"{name} {before.get(name)} → {now[name]}" for name in decisive if before.get(name) != now[name]]
