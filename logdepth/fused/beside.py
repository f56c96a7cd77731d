"""Work that nothing waits for at once: on a GPU beside the rest, on a second stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Beside:
    """What is done in `beside` reads what was computed before it; its results are there when the scope of this ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._second: Any = None  # streams have no types
        self._used: list[Tensor] = []
        self._results: list[Tensor] = []

    def __enter__(self) -> "Beside":
        return self

    @contextmanager
    def beside(self, *used: Tensor) -> Iterator[None]:
        """`used`: tensors whose owner may forget them meanwhile; their memory is not used again before all is done."""
        if self._device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._second = _second_stream(current.cuda_stream, current.device)
        self._used += used
        self._second.wait_stream(current)
        with torch.cuda.stream(self._second):
            yield

    def made(self, *results: Tensor) -> None:
        """Results of such work: the caller's stream reads them, so the second one must not use their memory again."""
        self._results += results

    def __exit__(self, *_: object) -> None:
        if self._second is None:  # a capture must not wait for a stream that has no part in it
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._second)
        for one in self._results:
            one.record_stream(current)
        self._used.clear()
        self._results.clear()


@cache
def _second_stream(_current: int, device: torch.device) -> Any:
    """One for each stream: what another one captures is not joined by accident."""
    stream: Any = torch.cuda.Stream
    return stream(device)
