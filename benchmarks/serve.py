"""Measures `logdepth serve` under load, on loopback: a server process of its own, and a client here.

    python benchmarks/serve.py                      # the model that comes with the library, or RUN
    python benchmarks/serve.py --smoke              # a tiny model: checks that the program runs, and measures nothing

| what | how |
|---|---|
| throughput | requests at once, streamed and not, against the library's Decoder at the same batch, in turns |
| streams | many streams of few tokens at once: each must equal the text that the library makes alone |
| prefix | time to the first token of a second request whose prompt begins as the first one's |
| fork | of a state of 65,535 tokens, over HTTP and without it |

Client and server share the cores, as on a machine of one's own. Ratios are medians over turns; beside wall time they
are given in CPU time of the server alone, which says what the server itself costs where other programs use the cores.
"""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from benchmarks import program
from logdepth.atomic import write_json
from logdepth.data import CORPORA
from logdepth.decoding import Decoder, SamplingConfig
from logdepth.decoding.continuation import Continuation, choose_next
from logdepth.models import LM
from logdepth.ops.precision import arithmetic
from logdepth.runs import PRETRAINED, LoadedRun, RunFolder, device_named
from logdepth.runs.environment import environment
from logdepth.serve.saved_states import SavedStates
from logdepth.serve.snapshots import Snapshot

SECONDS = 900.0
"""No request may take longer."""


class Sizes(NamedTuple):
    """How much is measured."""

    batch: int = 64
    """Requests at once."""
    batch_tokens: int = 64
    turns: int = 5
    streams: int = 1000
    stream_tokens: int = 32
    prefix: int = 8192
    state: int = 65_535
    forks: int = 50


SMOKE = Sizes(4, 4, 2, 12, 4, 64, 127, 3)
BARS = {
    "throughput": ("requests at once / Decoder, CPU, not streamed", 0.8, ">="),
    "slowest": ("streams: slowest / median", 2.0, "<="),
    "lost": ("streams: lost, or unlike the text alone", 0, "<="),
    "prefix": ("prefix: time to the first token, second / first request", 0.05, "<="),
    "fork": ("fork: milliseconds, without HTTP", 1.0, "<="),
}


class Server:
    """A server process."""

    def __init__(self, run: Path, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "logdepth", "serve", str(run), "--port", "0", *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"http://([\d.]+):(\d+) serves (\S+)", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        self.host, self.port, self.model = found[1], int(found[2]), found[3]

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_megabytes(self) -> float:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1024

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Answer(NamedTuple):
    """A response, and when it came."""

    status: int
    body: bytes
    first_seconds: float
    """Until the first event of the body, or the whole body."""
    seconds: float

    def json(self) -> Any:
        assert self.status == 200, self.body[:300]
        return json.loads(self.body)

    def chunks(self) -> list[Any]:
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n") if line]
        assert self.status == 200, self.body[:300]
        assert lines[-1] == b"[DONE]", lines[-1:]
        return [json.loads(line) for line in lines[:-1]]

    def text(self, stream: bool) -> str:
        if stream:
            return "".join(one["choices"][0]["text"] for one in self.chunks())
        text: str = self.json()["choices"][0]["text"]
        return text


async def ask(server: Server, path: str, body: Any = None, method: str = "POST") -> Answer:
    """One request on a connection of its own, with as little work here as can be."""
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {server.host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    begin = time.perf_counter()
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(server.host, server.port, limit=2**24)
        writer.write(head.encode() + data)
        received = await reader.readuntil(b"\r\n\r\n")
        status = int(received.split(b" ", 2)[1])
        first = None
        parts = []
        while part := await reader.read(2**16):
            first = first or time.perf_counter() - begin
            parts.append(part)
        seconds = time.perf_counter() - begin
        writer.close()
    whole = b"".join(parts)
    if b"transfer-encoding: chunked" in received.lower():
        whole = _joined(whole)
    return Answer(status, whole, first or seconds, seconds)


def _joined(chunked: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = chunked.index(b"\r\n", at)
        size = int(chunked[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(chunked[end + 2 : end + 2 + size])
        at = end + 4 + size


async def ask_all(server: Server, path: str, bodies: Sequence[Any]) -> list[Answer]:
    return await asyncio.gather(*(ask(server, path, body) for body in bodies))


class Alone:
    """The texts of the library, without any server."""

    def __init__(self, loaded: LoadedRun) -> None:
        assert isinstance(loaded.model, LM)
        self.model, self.tokenizer = loaded.model.eval(), loaded.tokenizer
        self.separated = CORPORA[loaded.config.data.corpus].separated
        self.device = self.model.embedding.weight.device

    @torch.inference_mode()
    def texts(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], count: int) -> tuple[list[str], int]:
        """The texts after prompts, and the number of their tokens. Prompts have one length."""
        configs = [SamplingConfig(max_tokens=count, seed=seed) for seed in seeds]
        rows = [
            Continuation(self.tokenizer, prompt, config, separated=self.separated)
            for prompt, config in zip(prompts, configs, strict=True)
        ]
        texts = dict.fromkeys(range(len(rows)), "")
        with arithmetic("auto", self.device):
            tokens = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
            logits, state = self.model.step(tokens, self.model.init_state(len(rows)))
            decoder, last, going = Decoder(self.model, state), logits[:, -1], list(range(len(rows)))
            while True:
                chosen = choose_next([rows[number] for number in going], last)
                for number, token in zip(going, chosen, strict=True):
                    texts[number] += rows[number].add(token)
                left = [place for place, number in enumerate(going) if rows[number].ended is None]
                if not left:
                    return list(texts.values()), sum(row.num_chosen for row in rows)
                if len(left) < len(going):
                    going = [going[place] for place in left]
                    decoder.select(left)
                last = decoder.step(torch.tensor([rows[number].tokens[-1] for number in going], device=self.device))


def prompts_of(alone: Alone, count: int, length: int, seed: int) -> list[list[int]]:
    """Random tokens: what they say makes no difference to the time."""
    chance = np.random.default_rng(seed)
    return chance.integers(3, alone.tokenizer.vocab_size, (count, length)).tolist()


def throughput(server: Server, alone: Alone, sizes: Sizes) -> dict[str, Any]:
    """Tokens per second of requests at once, and of the library's Decoder at the same batch."""
    found: dict[str, list[float]] = {
        name: [] for name in ("decoder", "decoder_cpu", "whole", "whole_cpu", "streamed", "streamed_cpu")
    }
    for turn in range(-1, sizes.turns):  # the first one warms up
        prompts, seeds = prompts_of(alone, sizes.batch, 16, turn + 1), list(range(sizes.batch))
        begin, used = time.perf_counter(), time.process_time()
        expected, num_tokens = alone.texts(prompts, seeds, sizes.batch_tokens)
        times = {"decoder": (time.perf_counter() - begin, time.process_time() - used)}
        for name in ("whole", "streamed"):
            bodies = [
                {
                    "model": server.model, "prompt": prompt, "seed": seed, "max_tokens": sizes.batch_tokens,
                    "stream": name == "streamed",
                }
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]  # fmt: skip
            begin, used = time.perf_counter(), server.cpu_seconds()
            answers = asyncio.run(ask_all(server, "/v1/completions", bodies))
            times[name] = time.perf_counter() - begin, server.cpu_seconds() - used
            texts = [answer.text(name == "streamed") for answer in answers]
            assert texts == expected, f"{sum(map(str.__ne__, texts, expected))} texts differ"
        if turn >= 0:
            for name, (wall, cpu) in times.items():
                found[name].append(num_tokens / wall)
                found[f"{name}_cpu"].append(num_tokens / max(cpu, 0.01))
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = {
        f"{name}/decoder{kind}": statistics.median(
            one / other for one, other in zip(found[name + kind], found["decoder" + kind], strict=True)
        )
        for name in ("whole", "streamed")
        for kind in ("", "_cpu")
    }
    return {"tokens_per_second": medians, "ratios": ratios}


def streams(server: Server, alone: Alone, sizes: Sizes) -> dict[str, Any]:
    """Many streams at once."""
    prompts = prompts_of(alone, sizes.streams, 16, 99)
    bodies = [
        {"model": server.model, "prompt": prompt, "seed": seed, "max_tokens": sizes.stream_tokens, "stream": True}
        for seed, prompt in enumerate(prompts)
    ]
    before = server.peak_megabytes()
    begin = time.perf_counter()
    answers = asyncio.run(ask_all(server, "/v1/completions", bodies))
    wall = time.perf_counter() - begin
    peak = server.peak_megabytes()
    expected: list[str] = []
    for start in range(0, sizes.streams, 50):
        some = range(start, min(start + 50, sizes.streams))
        expected += alone.texts([prompts[number] for number in some], list(some), sizes.stream_tokens)[0]
    lost = sum(answer.status != 200 for answer in answers)
    wrong = sum(
        answer.text(True) != text for answer, text in zip(answers, expected, strict=True) if answer.status == 200
    )
    seconds = sorted(answer.seconds for answer in answers)
    return {
        "lost": lost,
        "unlike_alone": wrong,
        "seconds": wall,
        "median_seconds": statistics.median(seconds),
        "slowest_seconds": seconds[-1],
        "slowest/median": seconds[-1] / statistics.median(seconds),
        "median_first_seconds": statistics.median(answer.first_seconds for answer in answers),
        "peak_megabytes_before": before,
        "peak_megabytes": peak,
    }


def prefix(server: Server, alone: Alone, sizes: Sizes) -> dict[str, Any]:
    """Two requests whose prompts have a beginning in common."""
    found: dict[str, list[float]] = {"first": [], "second": [], "cpu_first": [], "cpu_second": []}
    for turn in range(3):
        (common,) = prompts_of(alone, 1, sizes.prefix, 1000 + turn)
        for number, name in enumerate(("first", "second")):
            body = {
                "model": server.model,
                "prompt": [*common, 5 + number, 6, 7, 8],
                "max_tokens": 4,
                "stream": True,
            }
            used = server.cpu_seconds()
            answer = asyncio.run(ask(server, "/v1/completions", body))
            answer.chunks()
            found[name].append(answer.first_seconds)
            found[f"cpu_{name}"].append(server.cpu_seconds() - used)
    ratios = [second / first for first, second in zip(found["first"], found["second"], strict=True)]
    cpu = [second / first for first, second in zip(found["cpu_first"], found["cpu_second"], strict=True)]
    return {
        "tokens": sizes.prefix,
        "first_seconds": statistics.median(found["first"]),
        "second_seconds": statistics.median(found["second"]),
        "second/first": statistics.median(ratios),
        "second/first_cpu": statistics.median(cpu),
    }


def fork(server: Server, alone: Alone, sizes: Sizes) -> dict[str, Any]:
    """Forks of a long state."""
    (tokens,) = prompts_of(alone, 1, sizes.state, 7)

    async def measured() -> dict[str, Any]:
        saved = (await ask(server, "/v1/states", {"prompt": tokens})).json()
        before = metric(await ask(server, "/metrics", method="GET"), "saved_bytes")
        path = f"/v1/states/{saved['id']}/fork"
        forks = [await ask(server, path, {}) for _ in range(sizes.forks)]
        healths = [await ask(server, "/health", method="GET") for _ in range(sizes.forks)]
        after = metric(await ask(server, "/metrics", method="GET"), "saved_bytes")
        for one in forks:
            assert one.json()["tokens"] == sizes.state
        return {
            "tokens": sizes.state,
            "state_bytes": saved["bytes"],
            "http_milliseconds": 1000 * statistics.median(one.seconds for one in forks),
            "http_of_nothing_milliseconds": 1000 * statistics.median(one.seconds for one in healths),
            "bytes_per_fork_beside_tokens": (after - before) / sizes.forks - 4 * sizes.state,
        }

    return asyncio.run(measured()) | {"milliseconds": fork_alone(alone, sizes)}


def fork_alone(alone: Alone, sizes: Sizes) -> float:
    """What a fork takes without HTTP: a route's work on a snapshot of as many tokens."""
    (tokens,) = prompts_of(alone, 1, sizes.state, 7)
    with torch.inference_mode(), arithmetic("auto", alone.device):
        state = alone.model.init_state(1)
        for start in range(0, sizes.state, 2048):
            part = torch.tensor([tokens[start : start + 2048]], device=alone.device)
            _, state = alone.model.continued(part, state)
        snapshot = Snapshot.of(state)
    states = SavedStates(10**6, 10**12)
    saved = states.save(None, np.array(tokens, dtype=np.int32), snapshot)
    times = []
    for _ in range(sizes.forks):
        begin = time.perf_counter()
        found = states.get(None, saved.id)
        forked = states.save(found.owner, found.tokens, found.snapshot)
        times.append(1000 * (time.perf_counter() - begin))
        assert forked.snapshot is snapshot
    return statistics.median(times)


def metric(answer: Answer, name: str) -> float:
    found = re.search(rf"^logdepth_{name} (\S+)$", answer.body.decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


@contextlib.contextmanager
def served(run: Path, flags: Sequence[str]) -> Iterator[Server]:
    server = Server(run, flags)
    try:
        yield server
        code = server.end()
        assert code == 0, f"the server ended with {code}"
    finally:
        server.process.kill()


def smoke_run(folder: Path) -> Path:
    """A run of a tiny model."""
    from logdepth.training import train
    from tests.run_folders import run_config
    from tests.small_models import HYBRID
    from tests.tiny_corpus import write_corpus

    os.environ["LOGDEPTH_CACHE"] = str(folder / "cache")
    train(run_config(write_corpus(folder / "corpus"), HYBRID, max_steps=2), folder / "run")
    return folder / "run"


def verdicts(results: dict[str, Any]) -> list[str]:
    """Each bar, met or missed."""
    values = {
        "throughput": results["throughput"]["ratios"]["whole/decoder"],
        "slowest": results["streams"]["slowest/median"],
        "lost": results["streams"]["lost"] + results["streams"]["unlike_alone"],
        "prefix": results["prefix"]["second/first"],
        "fork": results["fork"]["milliseconds"],
    }
    lines = []
    for name, (what, bar, relation) in BARS.items():
        met = values[name] >= bar if relation == ">=" else values[name] <= bar
        lines.append(f"{what}: {values[name]:.3g} (bar {relation} {bar}): {'met' if met else 'MISSED'}")
    return lines


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument("run", nargs="?", type=Path, default=PRETRAINED, help="folder of a run (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="few and small requests to a tiny model")
    parser.add_argument("--device", default="auto", help="of the server and of the Decoder")
    parser.add_argument("--turns", type=program.at_least(1), help="turns of the throughput; by default 5")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument(
        "--only", nargs="+", choices=("throughput", "streams", "prefix", "fork"), help="these parts alone"
    )
    chosen = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    sizes = SMOKE if chosen.smoke else Sizes()
    sizes = sizes._replace(turns=chosen.turns or sizes.turns)
    with tempfile.TemporaryDirectory() as folder:
        run = smoke_run(Path(folder)) if chosen.smoke else chosen.run
        loaded = RunFolder(run).load("best", device_named(chosen.device, "--device"))
        alone = Alone(loaded)
        results: dict[str, Any] = {
            "made": program.today(),
            "environment": environment(alone.device),
            "parameters": sum(one.numel() for one in alone.model.parameters()),
            "vocab_size": alone.tokenizer.vocab_size,
            "sizes": sizes._asdict(),
            "load_average": os.getloadavg()[0],
        }
        parts = {"throughput": throughput, "streams": streams, "prefix": prefix, "fork": fork}
        with served(run, ["--device", chosen.device]) as server:
            for name, part in parts.items():
                if chosen.only is None or name in chosen.only:
                    results[name] = part(server, alone, sizes)
                    print(f"{name}: {json.dumps(results[name], indent=2)}", flush=True)
    if chosen.out is not None:
        write_json(chosen.out, results)
    if chosen.only is None and not chosen.smoke:
        print("\n".join(verdicts(results)))


if __name__ == "__main__":
    program.run(main)
