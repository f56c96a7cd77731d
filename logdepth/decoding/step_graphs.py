"""Steps recorded as CUDA graphs: one launch each, however many kernels they have."""

from collections.abc import Callable, Hashable

import torch

from logdepth.capture import CaptureError, Replayable, recorder_on

Compute = Callable[[], None]


class StepGraphs:
    """Runs a step as it is the first time, records it the second time that its key comes, and replays it from then on.

    A step must read and write the same memory each time, its answer too. Recording does not run it, so that it happens
    once each time.
    """

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device, self.say = device, say
        self.usable = True
        self.graphs: dict[Hashable, Replayable] = {}
        self.forget()

    def forget(self) -> None:
        """For steps that will use other memory."""
        if self.graphs:
            torch.cuda.synchronize(self.device)  # one may still be running
        self.graphs.clear()
        self.seen: set[Hashable] = set()
        self.recorder = recorder_on(self.device)

    def run(self, key: Hashable, compute: Compute) -> None:
        """The step, once."""
        graph = self.graphs.get(key)
        if graph is None and self.usable and key in self.seen:
            graph = self._recorded(key, compute)
        if graph is not None:
            graph.replay()
        else:
            compute()
            self.seen.add(key)

    def _recorded(self, key: Hashable, compute: Compute) -> Replayable | None:
        def nothing_to_return() -> tuple[()]:
            compute()
            return ()

        try:
            self.graphs[key], _ = self.recorder.record(nothing_to_return)
        except CaptureError as error:
            self.usable = False
            self.say(f"decoding goes on without CUDA graphs: a step cannot be recorded ({error})")
        return self.graphs.get(key)
