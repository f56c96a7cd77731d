"""What a CUDA graph reads must live as long as the graph: caches hand out their tensors through `keep`."""

import contextlib
from collections.abc import Iterator

_kept: list[list[object]] = []
"""What the captures under way want alive, the innermost last. The backward pass of a capture runs in another thread."""


def keep(thing: object) -> None:
    """Keeps `thing` for as long as the graph that is being captured. Without a capture, nothing happens.

    For caches that hand out tensors and may forget them: a graph goes on reading the memory that it was captured with.
    """
    if _kept:
        _kept[-1].append(thing)


@contextlib.contextmanager
def keeping() -> Iterator[list[object]]:
    """A scope that collects what is to be kept, for a capture."""
    kept: list[object] = []
    _kept.append(kept)
    try:
        yield kept
    finally:
        _kept.pop()
