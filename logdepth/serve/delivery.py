"""Delivery: from the engine's thread to the requests that wait in an event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self

from logdepth.serve.engine import Engine
from logdepth.serve.jobs import Event, Failed, Job, PromptRead, TextAdded


class Channel:
    """What comes of the jobs of one request."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self._unfinished = {job: job.count if job.sampling is not None else 1 for job in jobs}
        """How many texts of each job have not ended, or 1 for a prompt that is only read."""
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    @property
    def unfinished(self) -> list[Job]:
        """Jobs of which more is to come."""
        return list(self._unfinished)

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()
        job = event.job
        ended = isinstance(event, Failed)
        if isinstance(event, TextAdded):
            ended = event.ended is not None
        elif isinstance(event, PromptRead):
            ended = job.sampling is None and event.num_read == len(job.tokens)
        if ended and job in self._unfinished:
            self._unfinished[job] -= 1
            if not self._unfinished[job] or isinstance(event, Failed):
                del self._unfinished[job]

    async def next(self) -> list[Event]:
        """Wait for events; all that have arrived, or nothing if all jobs have ended."""
        if not self._events and not self._unfinished:
            return []
        await self._arrived.wait()
        self._arrived.clear()
        events = list(self._events)
        self._events.clear()
        return events


class Delivery:
    """An engine in a thread of its own, and the channels of the requests that wait for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._channels: dict[Job, Channel] = {}

    def begin(self) -> Self:
        """Start the engine. To be called in the event loop in which requests will wait."""
        self._loop = asyncio.get_running_loop()
        self._thread = self.engine.start(self._notify)
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return self._thread.is_alive()

    def end(self, seconds: float = 10.0) -> None:
        """Stop the engine, whatever it is doing."""
        self.engine.stop()
        self._thread.join(seconds)

    @asynccontextmanager
    async def opened(self, jobs: Sequence[Job]) -> AsyncIterator[Channel]:
        """Submit jobs. Those that have not ended when the scope is left are cancelled."""
        channel = Channel(jobs)
        for job in channel.jobs:
            self._channels[job] = channel
            self.engine.submit(job)
        try:
            yield channel
        finally:
            for job in channel.unfinished:
                self.engine.cancel(job)
            for job in channel.jobs:
                del self._channels[job]

    def _notify(self, events: list[Event]) -> None:
        """Called by the engine's thread, once per step."""
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            channel = self._channels.get(event.job)
            if channel is not None:
                channel.put(event)
