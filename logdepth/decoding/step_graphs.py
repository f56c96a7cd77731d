"""Decoding steps recorded as CUDA graphs: one launch per step, however many kernels it has."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from logdepth.capture import CaptureError, Replayable, recorder_on

Compute = Callable[[], Tensor]


class StepGraphs:
    """Runs a step as it is the first time, records it the second time that its key comes, and replays it from then on.

    A step must read and write the same memory each time. Recording does not run it, so that it happens once each time.
    """

    def __init__(self, device: torch.device, on_warning: Callable[[str], None]) -> None:
        self.device, self.on_warning = device, on_warning
        self.usable = True
        self.graphs: dict[Hashable, tuple[Replayable, Tensor]] = {}
        self.forget()

    def forget(self) -> None:
        """Drops all graphs, because later steps will use other memory."""
        if self.graphs:
            torch.cuda.synchronize(self.device)  # one may still be running
        self.graphs.clear()
        self.seen: set[Hashable] = set()
        self.recorder = recorder_on(self.device)

    def run(self, key: Hashable, compute: Compute) -> Tensor:
        """Computes the step once; the result is valid until the next step."""
        graph = self.graphs.get(key)
        if graph is None and self.usable and key in self.seen:
            graph = self._recorded(key, compute)
        if graph is not None:
            graph[0].replay()
            return graph[1]
        result = compute()
        self.seen.add(key)
        return result

    def _recorded(self, key: Hashable, compute: Compute) -> tuple[Replayable, Tensor] | None:
        try:
            graph, result = self.recorder.record(compute)
            assert isinstance(result, Tensor)
            self.graphs[key] = graph, result
        except CaptureError as error:
            self.usable = False
            self.on_warning(f"decoding continues without CUDA graphs: a step cannot be recorded ({error})")
        return self.graphs.get(key)
