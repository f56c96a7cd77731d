"""Measures what checksums cost: the time to load a run, to start and to resume training, and of a whole `generate`.

    python benchmarks/loading.py                            # verified against unverified
    python benchmarks/loading.py --before OLD_CHECKOUT      # also against older code

A small run and one of about 100 million parameters are made by each version of the code. A process per version stays
alive, and they take turns, so all versions see the same machine; ratios are medians over turns. Training is started up
to its first step. Memory of the measurement before is given back first, as a new process has none. Files are read from
the page cache, where the cost of a checksum is largest; with --cold, from the disk. The target is 1.05.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CODE = Path(os.environ.get("LOGDEPTH_CODE", ROOT))
"""The checkout whose package is measured in this process."""
sys.path[:0] = [str(CODE), str(ROOT)]

import torch

from benchmarks import program
from logdepth.atomic import write_json
from logdepth.data import DataConfig, TokenizerConfig
from logdepth.models import TransformerConfig
from logdepth.recipes import recipe
from logdepth.runs import RunConfig, RunFolder, TrainConfig
from logdepth.runs.environment import environment
from logdepth.training import Interrupted, Trainer, Watch, resume, train
from tests.tiny_corpus import write_corpus

BAR = 1.05
SENTENCES = 40_000
VOCAB_SIZE = 300
FIRST = "load in a new process"
GENERATE = "generate --max-tokens 1"
ALL = ("load", "start training", "resume training", FIRST, GENERATE)
LOAD_ONCE = """
import sys, time
from pathlib import Path
from logdepth.runs import RunFolder
begin = time.perf_counter()
RunFolder(Path(sys.argv[1])).load("last")
print(time.perf_counter() - begin)
"""


class StartedError(Exception):
    """Training is about to do its first step."""


class Stopping(Watch):
    """Stops a run after its first step, so that it has a checkpoint."""

    def must_stop(self) -> bool:
        return True


class Anything(str):
    """A checksum that is equal to any other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


def configs(corpus: Path) -> dict[str, RunConfig]:
    train_config = TrainConfig(max_steps=10, batch_size=2, context=16, device="cpu")
    data = DataConfig(corpus="text", paths=(corpus,), tokenizer=TokenizerConfig(vocab_size=VOCAB_SIZE, lossless=True))
    large = TransformerConfig(embed_width=1024, num_layers=8, num_heads=8)
    return {
        "small": RunConfig(data=data, model=recipe("pydocs-ar-grc").model, train=train_config),
        "large": RunConfig(data=data, model=large, train=train_config),
    }


def serve(folder: Path, verified: bool) -> None:
    """Make the runs if they are not there, then measure what stdin asks for, and answer with seconds."""
    torch.set_num_threads(2)
    os.environ["LOGDEPTH_CACHE"] = str(folder / "cache")
    answers, sys.stdout = sys.stdout, sys.stderr
    runs = configs(folder / "corpus")
    if not (folder / "corpus").exists():
        write_corpus(folder / "corpus", SENTENCES)
        for name, config in runs.items():
            with contextlib.suppress(Interrupted):
                train(config, folder / name, watch=Stopping())
    if not verified:
        turn_off_checksums()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        what, name = json.loads(line)
        print(measured(what, name, folder, runs[name]), file=answers, flush=True)


def turn_off_checksums() -> None:
    """Replace the functions that compute checksums in every module that has imported them."""
    unverified = Anything("unverified")
    replacements: dict[str, Callable[..., Any]] = {
        "checksum_of": lambda _: unverified,
        "checksum_of_bytes": lambda _: unverified,
        "start_checksum": lambda _data, _threads: lambda: unverified,
    }
    for name, replacement in replacements.items():
        for module in [module for key, module in sys.modules.items() if key.startswith("logdepth")]:
            if hasattr(module, name):
                setattr(module, name, replacement)


def measured(what: str, name: str, folder: Path, config: RunConfig) -> float:
    """Seconds of one measurement."""
    for file in (folder / "cache").rglob("*.bin"):
        file.touch()  # stores are verified once per process and state of the file
    ctypes.CDLL(None).malloc_trim(0)
    number = len(list(folder.glob("new-*")))
    work: dict[str, Callable[[], Any]] = {
        "load": lambda: RunFolder(folder / name).load("last"),
        "start training": lambda: train(config, folder / f"new-{number}"),
        "resume training": lambda: resume(folder / name),
    }
    with started():
        begin = time.perf_counter()
        with contextlib.suppress(StartedError):
            work[what]()
        return time.perf_counter() - begin


@contextlib.contextmanager
def started() -> Iterator[None]:
    """End training before its first step."""

    def stop(_: Trainer) -> None:
        raise StartedError

    original, Trainer._step = Trainer._step, stop  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer._step = original  # type: ignore[method-assign]


@dataclasses.dataclass
class Version:
    """A process that measures one version of the code."""

    code: Path
    folder: Path
    verified: bool = True

    def __post_init__(self) -> None:
        arguments = [str(self.folder), *([] if self.verified else ["--unverified"])]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"LOGDEPTH_CODE": str(self.code)},
            preexec_fn=lambda: program.signal_when_parent_ends(9),
        )
        assert self._answer() == "ready"

    def seconds(self, what: str, name: str) -> float:
        if what == GENERATE:
            return self._generate(name)
        if what == FIRST:
            return float(self._run("-c", LOAD_ONCE, str(self.folder / name)))
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, name]) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the process that measures {self.code} ended; run {__file__} --serve FOLDER to see why"
        return line

    def _generate(self, name: str) -> float:
        begin = time.perf_counter()
        self._run("-m", "logdepth", "generate", str(self.folder / name), "--weights", "last", "--max-tokens", "1")
        return time.perf_counter() - begin

    def _run(self, *arguments: str) -> bytes:
        """Run Python with this version of the code; return what it printed."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | {"PYTHONPATH": str(self.code)},
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
        ).stdout


def drop_caches() -> None:
    """Make the next read of any file go to the disk."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def compare(versions: dict[str, Version], what: str, name: str, repeats: int, cold: bool) -> dict[str, Any]:
    """Measure versions in turn; return medians of seconds, and of the ratios to the other versions in a turn."""
    if what in (FIRST, GENERATE):  # a new process cannot be told not to verify
        versions = {version: one for version, one in versions.items() if one.verified}
    turns = []
    for turn in range(repeats + 1):
        order = list(versions) if turn % 2 else list(versions)[::-1]
        seconds = {}
        for version in order:
            if cold:
                drop_caches()
            seconds[version] = versions[version].seconds(what, name)
        turns.append(seconds)
    turns = turns[1:]  # the first fills caches
    others = [version for version in versions if version != "now"]
    return {
        "what": what,
        "run": name,
        "seconds": {version: statistics.median(one[version] for one in turns) for version in versions},
        "fastest": {version: min(one[version] for one in turns) for version in versions},
        "turns": turns,
        "ratios": {other: statistics.median(one["now"] / one[other] for one in turns) for other in others},
    }


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument("--before", type=Path, help="checkout of older code to compare with (default: none)")
    parser.add_argument(
        "--repeats", type=program.at_least(1), default=15, help="turns per measurement (default: %(default)s)"
    )
    parser.add_argument("--what", nargs="+", choices=ALL, default=ALL, help="what to measure (default: everything)")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each measurement, as root")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: none)")
    parser.add_argument("--serve", type=Path, help="used by this program itself: measure in this folder")
    parser.add_argument("--unverified", action="store_true", help="used by this program itself: no checksums")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve.resolve(), not arguments.unverified)
        return
    with tempfile.TemporaryDirectory() as folder:
        here, versions = Path(folder), {}
        versions["now"] = Version(ROOT, here / "now")
        versions["unverified"] = Version(ROOT, here / "now", verified=False)
        if arguments.before is not None:
            versions["before"] = Version(arguments.before.resolve(), here / "before")
        device = torch.device("cpu")
        results = {"date": program.today(), "environment": environment(device), "bar": BAR, "rows": []}
        print(f"{'run':<6} {'what':<24} {'now':>9}  ratio to other versions")
        for name in ("small", "large"):
            for what in arguments.what:
                row = compare(versions, what, name, arguments.repeats, arguments.cold)
                results["rows"].append(row)
                ratios = [
                    f"{other} {row['seconds'][other]:.3f} s: {ratio:.3f} {'met' if ratio <= BAR else 'MISSED'}"
                    for other, ratio in row["ratios"].items()
                ]
                print(f"{name:<6} {what:<24} {row['seconds']['now']:>7.3f} s  {', '.join(ratios)}", flush=True)
                if arguments.out:
                    write_json(arguments.out, results)
        for version in versions.values():
            version.close()


if __name__ == "__main__":
    program.run(main)
