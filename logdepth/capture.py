"""Captured: a function of tensors whose GPU work is recorded once for each shape and then replayed as one CUDA graph.

A replay launches everything at once, so many small kernels no longer wait for Python. It knows nothing of models.
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from logdepth.keep_alive import keep, keeping

__all__ = ["CaptureError", "Captured", "Outputs", "Recorder", "Replayable", "keep", "recorder_on"]

Outputs = Tensor | tuple[Tensor, ...]
REMEMBERED_KEYS = 1024
"""Kinds of calls whose warm-ups are counted: shapes that never come back must not pile up."""

_failed: list[object] = []
"""Graphs whose capture failed: parts of torch may still point to them."""


class CaptureError(RuntimeError):
    """Why a function could not be captured, in one line."""


class Replayable(Protocol):
    def replay(self) -> None: ...


class Recorder(Protocol):
    """Where and how functions run that are to be captured."""

    def warm_up(self, run: Callable[[], Outputs]) -> Outputs:
        """Runs as a capture will."""
        ...

    def record(self, run: Callable[[], Outputs]) -> tuple[Replayable, Outputs]:
        """Captures without computing anything; a CaptureError leaves everything as it was."""
        ...


class Recording(NamedTuple):
    """A captured call and all that its graph reads and writes."""

    graph: Replayable
    inputs: tuple[Tensor, ...]
    outputs: Outputs
    kept: list[object]


class Captured:
    """A function of tensors that is replayed as a CUDA graph whenever a call looks like one before it.

    Calls look alike if shapes, dtypes, devices and settings are the same, as well as what torch runs under (gradients,
    autocast, deterministic algorithms). The first calls of a kind just run, and their effects count; the next is
    captured, and from then on replayed. Without CUDA, or inside another capture, the function is simply called. Where
    no capture is possible, or too many kinds of calls come, it runs as it is, and says so once.

    What the function does on the CPU happens at the capture only: it must neither read what a GPU computed nor decide
    by anything but its arguments' shapes and its settings. It must not change its arguments: a replay has copies of
    them. Other tensors that it reads, such as weights, must stay where they are; see `keep`. No gradient flows through
    a call: a function that needs any computes and uses them inside. A seed set before a call (torch.manual_seed) gives
    a replay the random numbers that it gives any call.

    Args:
        function: takes tensors by position and hashable settings by keyword; returns a tensor or a tuple of tensors.
        warmups: calls of each kind that run before one is captured; whatever is set up lazily must be by then.
        max_graphs: kinds of calls that get a graph.
        clone: whether results are the caller's to keep; by default they are overwritten by the next call.
        changes: tensors outside that the function changes, such as weights: a replay then counts as a change of them.
        on_warning: gets the line that says why there is no graph; by default a warning.
    """

    def __init__(
        self,
        function: Callable[..., Outputs],
        *,
        warmups: int = 2,
        max_graphs: int = 8,
        clone: bool = False,
        changes: Iterable[Tensor] = (),
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        if warmups < 1 or max_graphs < 0:
            raise ValueError(f"warmups must be at least 1 and max_graphs 0; got {warmups} and {max_graphs}")
        self.function, self.warmups, self.max_graphs, self.clone = function, warmups, max_graphs, clone
        self.changes = tuple(changes)
        self.on_warning = on_warning or partial(warnings.warn, stacklevel=4)
        self.recordings: dict[Hashable, Recording | None] = {}
        """By kind of call; None where the capture failed."""
        self._calls: dict[Hashable, int] = {}
        """Warm-ups of kinds that have no graph yet, the latest last."""
        self._recorder: Recorder | None = None
        self._has_said = False

    def __call__(self, *tensors: Tensor, **settings: Hashable) -> Any:
        _check_arguments(tensors, settings)
        run = partial(self.function, **settings)
        device = _capturing_device(tensors)
        if device is None:
            return _results(run(*tensors))
        key = _kind_of_call(tensors, settings)
        if key not in self.recordings:
            if len(self.recordings) >= self.max_graphs:
                self._say_once(f"calls of more than {self.max_graphs} shapes or settings; the new ones run without one")
                return _results(run(*tensors))
            recorder = self._recorder = self._recorder or recorder_on(device)
            before = self._calls.get(key, 0)
            if before < self.warmups:
                outputs = recorder.warm_up(partial(run, *tensors))
                self._count(key)  # a call that failed has set up nothing for sure
                return _results(outputs)
            self._calls.pop(key)
            self.recordings[key] = self._record(recorder, run, tensors)
        recording = self.recordings[key]
        if recording is None:
            return _results(run(*tensors))
        return self._replay(recording, tensors)

    def forget(self) -> None:
        """Frees the graphs and their memory; calls begin anew."""
        self.recordings.clear()
        self._calls.clear()
        self._recorder = None

    def _count(self, key: Hashable) -> None:
        self._calls[key] = self._calls.pop(key, 0) + 1
        if len(self._calls) > REMEMBERED_KEYS:
            del self._calls[next(iter(self._calls))]

    def _record(self, recorder: Recorder, run: Callable[..., Outputs], tensors: tuple[Tensor, ...]) -> Recording | None:
        inputs = tuple(one.detach().clone(memory_format=torch.contiguous_format) for one in tensors)
        with keeping() as kept:
            try:
                graph, outputs = recorder.record(lambda: _apart_from(inputs, _results(run(*inputs))))
            except CaptureError as error:
                self._say_once(f"{error}; it runs without one")
                return None
        return Recording(graph, inputs, outputs, kept)

    def _replay(self, recording: Recording, tensors: tuple[Tensor, ...]) -> Outputs:
        for static, given in zip(recording.inputs, tensors, strict=True):
            static.copy_(given, non_blocking=True)
        recording.graph.replay()
        if self.changes:
            torch.autograd.graph.increment_version(self.changes)
        outputs = recording.outputs
        if not self.clone:
            return outputs
        return outputs.clone() if isinstance(outputs, Tensor) else tuple(one.clone() for one in outputs)

    def _say_once(self, why: str) -> None:
        if not self._has_said:
            self._has_said = True
            function = self.function.func if isinstance(self.function, partial) else self.function
            name = getattr(function, "__name__", type(function).__name__).strip("_")
            self.on_warning(f"no CUDA graph of {name}: {why}")


class CudaRecorder:
    """Captures on a stream of its own; its graphs share one pool of memory, so they must not run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        stream: Any = torch.cuda.Stream  # has no types
        self.stream = stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Outputs]) -> Outputs:
        # On the stream of the capture: what autograd and cuBLAS set up for a stream must be there before.
        with self._on_stream():
            return run()

    def record(self, run: Callable[[], Outputs]) -> tuple[Replayable, Outputs]:
        with self._on_stream(), _nothing_else_happens():
            graph = torch.cuda.CUDAGraph()
            cause = None
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    try:
                        outputs = run()
                    except Exception as error:
                        cause = _in_one_line(error)  # ending the capture may raise another, which says less
                        raise
                return graph, outputs
            except Exception as error:
                cause = cause or _in_one_line(error)
            self._mend(graph)
        raise CaptureError(cause)

    def _mend(self, graph: torch.cuda.CUDAGraph) -> None:
        """Undoes what torch leaves behind where a capture could not be ended.

        Its allocator then still takes a capture to be under way, and its generator draws no numbers until another
        capture has ended well.
        """
        graph.reset()
        _failed.append(graph)
        self.stream.synchronize()
        with contextlib.suppress(RuntimeError, AttributeError):  # it was ended, or this torch needs no such help
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        number = torch.zeros((), device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="thread_local"):
            number.add_(1)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Work on the recorder's stream, after all and before all of the caller's: memory of both may be reused."""
        with torch.cuda.device(self.device):
            callers = torch.cuda.current_stream()
            self.stream.wait_stream(callers)
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                callers.wait_stream(self.stream)


def recorder_on(device: torch.device) -> Recorder:
    return CudaRecorder(device)


def _capturing_device(tensors: tuple[Tensor, ...]) -> torch.device | None:
    """The GPU that a call can be captured on; None: it is to be called as it is."""
    devices = {one.device for one in tensors}
    if not any(device.type == "cuda" for device in devices) or torch.cuda.is_current_stream_capturing():
        return None
    if len(devices) > 1:
        raise ValueError(f"a captured function takes tensors of one GPU; got {', '.join(sorted(map(str, devices)))}")
    return devices.pop()


def _check_arguments(tensors: tuple[Tensor, ...], settings: dict[str, Hashable]) -> None:
    for one in tensors:
        if not isinstance(one, Tensor):
            raise ValueError(f"a captured function takes tensors by position, settings by name; got {one!r}")
        if one.requires_grad and torch.is_grad_enabled():
            raise ValueError("no gradient flows through a captured function: detach its arguments")
    for name, value in settings.items():
        if isinstance(value, Tensor):
            raise ValueError(f"a captured function takes tensors by position; got one named {name}")
        try:
            hash(value)
        except TypeError:
            raise ValueError(f"settings of a captured function must be hashable; {name} is {value!r}") from None


def _kind_of_call(tensors: tuple[Tensor, ...], settings: dict[str, Hashable]) -> Hashable:
    """All that a graph has baked in."""
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
    )
    return tuple((one.shape, one.dtype, one.device) for one in tensors), tuple(sorted(settings.items())), modes


def _results(outputs: Outputs) -> Outputs:
    """Without their history: a graph has none, and to autograd a call is the same whether it was replayed or not."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if not isinstance(outputs, tuple) or not all(isinstance(one, Tensor) for one in outputs):
        raise ValueError(f"a captured function returns a tensor or a tuple of tensors; got {type(outputs).__name__}")
    return tuple(one.detach() for one in outputs)


def _apart_from(inputs: tuple[Tensor, ...], outputs: Outputs) -> Outputs:
    """Results that share no memory with the inputs, so that they can be arguments of the next call in any order."""
    taken = {one.untyped_storage().data_ptr() for one in inputs}

    def apart(output: Tensor) -> Tensor:
        return output.clone() if output.untyped_storage().data_ptr() in taken else output

    return apart(outputs) if isinstance(outputs, Tensor) else tuple(apart(one) for one in outputs)


@contextlib.contextmanager
def _nothing_else_happens() -> Iterator[None]:
    """No garbage is collected, for CUDA may have to free it; no weight that autocast has cast gets in or out."""
    collecting = gc.isenabled()
    gc.disable()
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        if collecting:
            gc.enable()


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
