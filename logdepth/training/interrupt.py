"""SIGINT, SIGTERM and SIGHUP as requests to stop: training finishes its step and saves before it stops."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self


def stop_signals() -> list[signal.Signals]:
    """The signals that ask to stop. Under nohup, which ignores SIGHUP, work continues when the terminal closes."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


class Interrupted(BaseException):
    """Training stopped because a signal or the watch asked for it; everything is saved.

    It is no Exception: a compiler that a signal interrupts must not take it for an error of its own.
    """

    def __init__(self, step: int | None, signal_number: int | None) -> None:
        by = "" if signal_number is None else f" by {signal.Signals(signal_number).name}"
        at = "" if step is None else f" at step {step}"
        super().__init__(f"stopped{by}{at}")
        self.step = step
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """The exit code that shells give a process ended by the signal."""
        return 128 + (self.signal_number or 0)


class StopRequest:
    """Receives the first signal while the block runs; a second one has its usual effect.

    Args:
        repeated: whether further signals are ignored, also after the block. For processes that torchrun started: a
            signal may reach them twice, from torchrun and from whoever signals the whole job.
    """

    def __init__(self, *, repeated: bool = False) -> None:
        self.repeated = repeated
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in stop_signals():
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # only the main thread receives signals
                break
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.repeated and self.signal_number is not None:
            self._before = dict.fromkeys(self._before, signal.SIG_IGN)
        self._restore()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.signal_number = self.signal_number or number
        if not self.repeated:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
