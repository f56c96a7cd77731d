"""A process that has imported everything and forks a child for each call, so that a call costs no imports.

A child is a process of its own: it may hang, crash, eat memory or be killed, and nothing of it reaches the next call.
`Worker` starts the process and sends it calls; `python -m tests.hostile.worker` is the process.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).parent.parent.parent
HANG_SECONDS = 20.0
"""A call that takes longer hangs."""
MAIN = "logdepth.cli:main"
PRELOADED = (
    "logdepth.cli.associativity",
    "logdepth.cli.completion",
    "logdepth.sweep",
    "logdepth.reproduce",
    "logdepth.report",
    "logdepth.trained",
    "logdepth.hf.export",
    "matplotlib.backends.backend_svg",
    "matplotlib.backends.backend_agg",
    "jinja2",
    "optuna",
    "sqlalchemy",
    "zstandard",
    "sentencepiece",
    "torch._dynamo",
    "torch.profiler",
)
"""What verbs import late."""


class Said(NamedTuple):
    """How a call ended, and what it printed."""

    code: int | None
    """The exit code; None if a signal ended it."""
    signal: int | None
    hung: bool
    seconds: float
    out: str
    err: str


class Worker:
    """The client of one worker process; a context manager."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The hub's client would retry for longer than a command may take.
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def call(
        self,
        arguments: Sequence[Any],
        *,
        function: str = MAIN,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        limit: float = HANG_SECONDS,
        kill_after: float | None = None,
        stdin: str | None = os.devnull,
        stdout: str | None = None,
        encoding: str = "utf-8",
        memory: int | None = None,
    ) -> Said:
        """Call a function, by default `main`, with arguments in a child, and wait for it.

        Args:
            arguments: JSON-compatible arguments; those of `main` are the command line of the child.
            function: MODULE:NAME.
            cwd: the child's working directory.
            env: environment variables to set in the child.
            limit: seconds after which the child is killed because it hangs.
            kill_after: seconds after which the child is killed on purpose.
            stdin: the file that is the child's stdin; None closes it.
            stdout: the file that is the child's stdout; by default it is returned.
            encoding: that of stdout and stderr.
            memory: largest address space of the child in bytes.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        call = dict(locals()) | {"arguments": list(arguments), "cwd": None if cwd is None else str(cwd)}
        del call["self"]
        self.process.stdin.write(json.dumps(call).encode() + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended with exit code {self.process.wait()}")
        return Said(**json.loads(answer))


def _serve() -> None:
    """Answer calls until stdin is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write among the answers
    for module in PRELOADED:
        importlib.import_module(module)
    from tests.hostile import calls

    calls.prepare_process()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="logdepth-worker-") as folder:
        for line in sys.stdin:
            answers.write(json.dumps(_answer(json.loads(line), Path(folder))._asdict()) + "\n")
            answers.flush()


def _answer(call: dict[str, Any], folder: Path) -> Said:
    out, err = folder / "out", folder / "err"
    start = time.monotonic()
    child = os.fork()
    if not child:
        code = 1
        try:
            code = _in_child(call, out, err)
        finally:
            os._exit(code)
    hung = _wait(child, call["limit"] if call["kill_after"] is None else call["kill_after"])
    _, status = os.waitpid(child, 0)
    signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    texts = [one.read_bytes().decode("utf-8", "backslashreplace") for one in (out, err)]
    code = None if signalled is not None else os.WEXITSTATUS(status)
    hung = hung and call["kill_after"] is None
    return Said(code, signalled, hung, time.monotonic() - start, *texts)


def _wait(child: int, seconds: float) -> bool:
    """Wait for a child; kill it and its own children after so many seconds, and return whether that was needed."""
    descriptor = os.pidfd_open(child)
    try:
        ended, _, _ = select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it may not lead its group yet
    return not ended


def _in_child(call: dict[str, Any], out: Path, err: Path) -> int:
    """What the interpreter does with a program: run it, print what it raises, and flush."""
    os.setsid()
    for descriptor, file in ((1, call["stdout"] or out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    out.touch()
    if call["stdin"] is None:
        os.close(0)
        sys.stdin = None  # type: ignore[assignment]
    else:
        os.dup2(os.open(call["stdin"], os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        open(descriptor, "w", buffering, encoding=call["encoding"], errors=errors, closefd=False)  # noqa: SIM115
        for descriptor, buffering, errors in ((1, -1, "strict"), (2, 1, "backslashreplace"))
    )
    if call["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (call["memory"], call["memory"]))
    os.environ.update(call["env"] or {})
    if call["cwd"] is not None:
        os.chdir(call["cwd"])
    module, name = call["function"].split(":")
    function = getattr(importlib.import_module(module), name)
    is_main = call["function"] == MAIN
    sys.argv = ["logdepth", *call["arguments"]] if is_main else ["logdepth"]
    try:
        code = function() if is_main else function(*call["arguments"])
    except SystemExit as stopped:
        code = stopped.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        traceback.print_exc()  # the interpreter says "Exception ignored"
        code = 120
    sys.stderr.flush()
    return code or 0


if __name__ == "__main__":
    _serve()
