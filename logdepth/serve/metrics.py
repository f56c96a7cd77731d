"""Metrics of a server in the text format of Prometheus."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from logdepth.serve.engine import Engine
from logdepth.serve.saved_states import SavedStates


@dataclass
class Metrics:
    """What a server has counted since its start."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Responses by route and status."""
    first_text_seconds: float = 0.0
    first_texts: int = 0
    """Requests whose first token has come, and how long they waited for it in all."""
    disconnects: int = 0
    running: int = 0
    """Requests that are being answered."""

    def page(self, engine: Engine, states: SavedStates, texts: int) -> str:
        """All metrics as text."""
        totals, cache = engine.totals, engine.cache
        counters = {
            "prompt_tokens": (totals.prompt_tokens, "Tokens of prompts."),
            "cached_tokens": (totals.cached_tokens, "Tokens of prompts that were not read, because a state was kept."),
            "text_tokens": (totals.text_tokens, "Tokens of texts."),
            "steps": (totals.steps, "Steps of the engine."),
            "failures": (totals.failures, "Jobs that ended with an error of the server."),
            "disconnects": (self.disconnects, "Requests whose client went away."),
            "first_text_seconds": (self.first_text_seconds, "Seconds until the first token, over all requests."),
            "first_texts": (self.first_texts, "Requests whose first token has come."),
        }
        gauges = {
            "running_requests": (self.running, "Requests that are being answered."),
            "texts": (texts, "Texts that grow or wait."),
            "growing_texts": (engine.num_texts, "Texts that grow."),
            "waiting_jobs": (engine.num_waiting, "Jobs that have not begun."),
            "state_bytes": (engine.state_bytes, "Memory for the states of texts."),
            "cache_bytes": (cache.nbytes, "Memory of states kept by prefix."),
            "cached_states": (len(cache), "States kept by prefix."),
            "saved_bytes": (states.nbytes, "Memory of states that clients have saved."),
            "saved_states": (len(states), "States that clients have saved."),
        }
        lines = ["# HELP logdepth_requests_total Responses.", "# TYPE logdepth_requests_total counter"]
        for (route, status), count in sorted(self.requests.items()):
            lines.append(f'logdepth_requests_total{{route="{route}",status="{status}"}} {count}')
        lines += _lines(counters, "counter", "_total")
        lines += _lines(gauges, "gauge", "")
        return "\n".join(lines) + "\n"


def _lines(metrics: Mapping[str, tuple[float, str]], kind: str, suffix: str) -> Iterator[str]:
    for name, (value, help_text) in metrics.items():
        yield f"# HELP logdepth_{name}{suffix} {help_text}"
        yield f"# TYPE logdepth_{name}{suffix} {kind}"
        yield f"logdepth_{name}{suffix} {value}"
