"""Work that nothing waits for at once: on a GPU beside the rest, on a second stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


class Beside:
    """What is done in `beside` reads what was computed before it; `join` comes before anyone reads its results."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _second_stream(device) if device.type == "cuda" else None
        self._at_work = False
        self._read: list[Tensor] = []

    @contextmanager
    def beside(self, *read: Tensor) -> Iterator[None]:
        """`read`: tensors whose maker may forget them meanwhile; their memory is not used again before `join`."""
        if self._stream is None:
            yield
            return
        self._at_work = True
        self._read += read
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None and self._at_work:  # a capture must not wait for a stream that has no part in it
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._at_work = False
            self._read.clear()


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
