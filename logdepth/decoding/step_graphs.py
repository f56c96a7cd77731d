"""Steps recorded as CUDA graphs: one launch each, however many kernels they have."""

from collections.abc import Callable, Hashable

import torch

Compute = Callable[[], None]


class StepGraphs:
    """Runs a step as it is the first time, records it the second time that its key comes, and replays it from then on.

    A step must read and write the same memory each time, its answer too. Recording does not run it, so that it happens
    once each time.
    """

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device, self.say = device, say
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.usable = True
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.forget()

    def forget(self) -> None:
        """For steps that will use other memory."""
        if self.graphs:
            torch.cuda.synchronize(self.device)  # one may still be running
        self.graphs.clear()
        self.seen: set[Hashable] = set()
        self.pool = torch.cuda.graph_pool_handle()

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

    def _recorded(self, key: Hashable, compute: Compute) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                compute()
        except RuntimeError as error:
            self.usable = False
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.say(f"decoding goes on without CUDA graphs: a step cannot be recorded ({reason})")
            return None
        self.graphs[key] = graph
        return graph
