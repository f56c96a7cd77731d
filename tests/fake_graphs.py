"""CUDA graphs without a GPU: what is captured runs again on the CPU."""

from collections.abc import Callable

import pytest
from torch import Tensor

from logdepth import capture
from logdepth.capture import CaptureError, Outputs


class FakeGraph:
    """Runs the function again, and puts its results where the first went: as a graph does."""

    def __init__(self, run: Callable[[], Outputs], outputs: Outputs) -> None:
        self.run, self.outputs, self.replays = run, outputs, 0

    def replay(self) -> None:
        self.replays += 1
        for old, new in zip(as_tuple(self.outputs), as_tuple(self.run()), strict=True):
            old.copy_(new)


class FakeRecorder:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.warmups, self.graphs, self.refuses = 0, [], False

    def warm_up(self, run: Callable[[], Outputs]) -> Outputs:
        self.warmups += 1
        return run()

    def record(self, run: Callable[[], Outputs]) -> tuple[FakeGraph, Outputs]:
        if self.refuses:
            raise CaptureError("RuntimeError: not while capturing")
        outputs = run()
        self.graphs.append(FakeGraph(run, outputs))
        return self.graphs[-1], outputs


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


@pytest.fixture(name="recorder")
def fake_recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    fake = FakeRecorder()
    monkeypatch.setattr(capture, "recorder_on", lambda device: fake)
    monkeypatch.setattr(capture, "_capturing_device", lambda tensors: tensors[0].device)
    return fake
