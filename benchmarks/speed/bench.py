"""What every part measures with: clocks, memory, random tokens, and a file that has each result as soon as it is there.

On CUDA, events around each call; elsewhere the host's clock. What is timed goes in a CUDA graph first (`Captured`).
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.sizes import Sizes
from logdepth.atomic import write_json
from logdepth.capture import Captured
from logdepth.models import LanguageModel

BATCHES = 3
"""Inputs that take turns, so that no run finds all of its input in the cache."""
WARMUPS = 4
"""Calls before the clock runs: two plain ones, the capture, a replay."""
MOST_REPEATS = 500
Result = dict[str, Any]
Piece = Callable[[], None]
"""Of a part's work: it records what it measures, whatever happens."""


class Bench:
    """One part's device, sizes, deadline and results; a rehearsal keeps none of them, and has no file for them."""

    def __init__(self, sizes: Sizes, device: torch.device, out: Path | None, seconds: float) -> None:
        self.sizes, self.device, self.out = sizes, device, out
        self.deadline = time.monotonic() + seconds
        self.results: list[Result] = []
        self.notes: list[str] = []
        self.generator = torch.Generator().manual_seed(0)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def record(self, result: Result) -> None:
        """Keeps a result, on disk too: what comes later may fail or take too long."""
        if self.out is None:
            if "failed" in result:
                print(f"  not compiled before: {in_one_line(result)}", flush=True)
            return
        self.results.append(result)
        write_json(self.out, self.results)
        print(f"  {in_one_line(result)}", flush=True)

    def attempt(self, measure: Callable[[], Result], *, keep_compiled: bool = False, **what: object) -> None:
        """Records what `measure` returns, or why it could not: one failure does not end the part."""
        try:
            if time.monotonic() > self.deadline:
                raise TimeoutError("no time left")
            started, self.notes = time.monotonic(), []
            result = measure()
            notes = {"notes": self.notes} if self.notes else {}
            self.record({**what, **result, **notes, "seconds": round(time.monotonic() - started, 2)})
        except Exception as error:  # whatever it is, the other rows are still worth having
            self.record({**what, "failed": in_short(error)})
        finally:
            self.clear(keep_compiled=keep_compiled)

    def clear(self, *, keep_compiled: bool = False) -> None:
        """Forgets compiled code, and gives memory back, so that the next measurement starts as the first did."""
        if not (keep_compiled or self.sizes.smoke):
            torch.compiler.reset()
        gc.collect()
        if self.cuda:
            torch._C._cuda_clearCublasWorkspaces()  # else they count for the first model alone
            torch.cuda.empty_cache()

    def tokens(self, vocab_size: int, *shape: int) -> list[Tensor]:
        """Random batches of one shape, to be used in turn."""
        return [torch.randint(vocab_size, shape, generator=self.generator).to(self.device) for _ in range(BATCHES)]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16 if self.cuda else torch.float32)

    def low(self, model: LanguageModel) -> LanguageModel:
        """A model for inference: its weights in bfloat16 on a GPU."""
        return model.to(self.device, torch.bfloat16 if self.cuda else torch.float32).eval()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def captured(self, function: Callable[..., Any], *, ours: bool) -> Captured:
        """A function as a CUDA graph. Where there can be none, ours is timed as it is; theirs fails, to be fair."""
        return Captured(function, on_warning=self.note if ours else _refuse)

    def note(self, why: str) -> None:
        """Goes into the result that is being measured."""
        self.notes.append(why)

    def time(self, function: Callable[..., Any], inputs: Sequence[Sequence[Tensor]]) -> Result:
        """Milliseconds of a call: median, quartiles and how often; the inputs take turns."""
        for number in range(WARMUPS):
            function(*inputs[number % len(inputs)])
        self.wait()
        times: list[float] = []
        end = time.monotonic() + self.sizes.seconds
        latest = end + 4 * self.sizes.seconds
        while len(times) < MOST_REPEATS:
            enough = len(times) >= self.sizes.least_repeats
            if (enough and time.monotonic() > end) or (len(times) > 1 and time.monotonic() > latest):
                break
            times += self._timed(function, inputs, count=5 if self.cuda else 1)
        return spread_of(times)

    def _timed(self, call: Callable[..., Any], inputs: Sequence[Sequence[Tensor]], count: int) -> list[float]:
        if not self.cuda:
            start = time.perf_counter()
            call(*inputs[0])
            return [1e3 * (time.perf_counter() - start)]
        pairs: list[tuple[Any, Any]] = []
        event: Any = torch.cuda.Event  # has no types
        for number in range(count):  # all are under way before the first is waited for
            pair = event(enable_timing=True), event(enable_timing=True)
            pair[0].record()
            call(*inputs[number % len(inputs)])
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def allocated(self) -> int:
        """Bytes of GPU memory in tensors now."""
        self.clear()
        return torch.cuda.memory_allocated() if self.cuda else 0

    def forget_peak(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """Most bytes of GPU memory in tensors at once since `forget_peak`."""
        return torch.cuda.max_memory_allocated() if self.cuda else None


def _refuse(why: str) -> None:
    raise RuntimeError(why)


def spread_of(times: Sequence[float]) -> Result:
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return {"milliseconds": quartiles[1], "quartiles": [quartiles[0], quartiles[2]], "repeats": len(times)}


def in_short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def in_one_line(result: Result) -> str:
    shown = {name: value for name, value in result.items() if not isinstance(value, list | dict) and value is not None}
    return ", ".join(
        f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    )
