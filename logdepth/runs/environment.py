"""What a run ran on: versions, device and threads; and the command that started it."""

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

import logdepth


def environment(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "logdepth": logdepth.__version__,
        "code": _own_code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "processor_name": _processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "cuda": torch.version.cuda if cuda else None,
    }


@cache
def _own_code() -> str:
    """As it was when first asked for: files may change while a run goes on."""
    return hash_of_code(Path(logdepth.__file__).parent)


def hash_of_code(package: Path) -> str:
    """Of a package's files: what a version number does not tell apart."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def typed_command() -> str:
    """What was typed, as it can be typed again."""
    return shlex.join(["logdepth", *sys.argv[1:]])


def _processor_name() -> str | None:
    """What the system calls it, where it says so."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or None


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What may change the bits of a run that goes on here."""
    decisive = ("logdepth", "code", "python", "torch", "processor", "threads", "device", "cuda")
    return [f"{name} {before.get(name)} → {now[name]}" for name in decisive if before.get(name) != now[name]]
