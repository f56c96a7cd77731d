"""The limits of a server."""

from dataclasses import dataclass

from logdepth.serve.engine import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """What clients of a server may do."""

    max_length: int = 131_072
    """Maximum number of tokens of a prompt and its text together."""
    max_concurrent: int = 2048
    """Maximum number of texts of all requests that grow or wait; a request for more is refused with status 429."""
    max_body_bytes: int = 8 * 2**20
    """Maximum size of a request's body; a larger one is refused with status 413."""
    body_seconds: float = 20.0
    """Time in which the body of a request must arrive; otherwise it is refused with status 408."""
    request_seconds: float = 600.0
    """Time in which a request must be answered; otherwise its texts are given up, with status 408."""
    drain_seconds: float = 60.0
    """Time that running requests have to end after SIGTERM or SIGINT; new ones are refused with status 503."""
    max_states: int = 1000
    """Maximum number of states that clients may save."""
    saved_bytes: int = 2 * 2**30
    """Maximum bytes of the states that clients may save."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_length", "max_concurrent", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("max_states", "saved_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative; got {getattr(self, name)}")
        for name in ("body_seconds", "request_seconds", "drain_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite; got {getattr(self, name)}")
