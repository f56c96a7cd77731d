"""Serving a model: an engine for many texts at once, and around it a server that speaks OpenAI's API.

Importing this package needs no extra; the server itself is imported by `logdepth serve`.
"""

from logdepth.serve.engine import Engine, EngineConfig
from logdepth.serve.jobs import Event, Failed, Job, PromptRead, Scored, TextAdded
from logdepth.serve.snapshots import Snapshot

__all__ = ["Engine", "EngineConfig", "Event", "Failed", "Job", "PromptRead", "Scored", "Snapshot", "TextAdded"]
