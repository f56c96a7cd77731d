"""SIGKILL at random instants of `train`, `prepare`, `reproduce` (of a corpus, of tasks, and in lanes) and `sweep`.

Run again, they end in the same bits.

    python -m tests.hostile.kills --count 100 --seed 1
    python -m tests.hostile.kills --only 7

Each case kills one of the verbs in turn. An instant depends on how fast the machine is, so a number does not always
repeat a failure. Compared are weights, checkpoints, metrics, result files, tables and stores, without times.
"""

import contextlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logdepth.atomic import PARTIAL
from tests.hostile.outcomes import DONE, MESSY, SILENT, Case, judged, numbers_of, parser, run_cases
from tests.hostile.project import BUILD_SECONDS, LOSSLESS, TASK_SETTINGS, TASKS, content_of
from tests.hostile.worker import Said, Worker
from tests.sweep_processes import TINY
from tests.tiny_corpus import write_corpus
from tests.tiny_study import override_files

RUN = ("pydocs-ar-grc", *TINY, "--data.paths", "corpus", "--model.leaf-dropout", "0.1", "--train.max-steps", "60")
CONFIGS = [f"overrides/{name}.json" for name in ("everyone", "ar-grc", "transformer-alibi")]
SWEEP = ("sweep", *RUN, "--space", "train.learning_rate=1e-3:1e-2:log", "--no-prune", "--json", "--out", "out")
TOKENIZER = ("--data.tokenizer.lossless", "--data.tokenizer.vocab-size", str(LOSSLESS))
COMMANDS = {
    "train": ("train", *RUN, "--out", "out"),
    "prepare": ("prepare", "text", "--data.paths", "corpus", *TOKENIZER, "--json"),
    "reproduce": (
        *("reproduce", "text", "--models", "ar-grc", "transformer-alibi", "--seeds", "0", "--untimed", "--json"),
        *("--out", "out", "--config", *CONFIGS),
    ),
    "sweep": (*SWEEP, "--trials", "2"),
    "tasks": ("reproduce", *TASKS[:-1], "out"),
    "lanes": (
        *("reproduce", "groups", "--tasks", "s3", "--models", "grc", "window", "--seeds", "0", "--longest", "64"),
        *("--config", "tasks.json", "--lanes", "2", "--out", "out"),
    ),
}
WHOLE_SWEEP = (*SWEEP, "--trials", "4")
"""Retries take numbers, and with them come the seeds: after a kill, trial 1 may be called 2 or 3."""
LONGER = TASK_SETTINGS["train"] | {"steps": 300, "check_every": 100, "checkpoint_minutes": 0.001}
LATEST_KILL = 0.97
"""The latest instant of a kill, as a share of the time without one."""


class Kills:
    """Verbs that are killed, in a folder."""

    def __init__(self, base: Path, worker: Worker, seed: int) -> None:
        self.world, self.worker, self.seed = base.resolve() / "kills", worker, seed
        self.found: dict[str, tuple[dict[str, Any], float]] = {}

    def expected(self, verb: str) -> tuple[dict[str, Any], float]:
        """What a verb leaves without a kill, and the seconds that it takes."""
        if verb not in self.found:
            self._clear()
            said = self._call(COMMANDS[verb])
            assert said.code == 0, said
            if verb == "sweep":
                self._clear()
                assert self._call(WHOLE_SWEEP).code == 0
            self.found[verb] = (self._left(verb), said.seconds)
        return self.found[verb]

    def one(self, number: int) -> Case:
        """Kill a verb once and run it again."""
        chance = random.Random(f"kills {self.seed} {number}")
        return self.killed(list(COMMANDS)[number % len(COMMANDS)], chance.random() * LATEST_KILL)

    def killed(self, verb: str, share: float) -> Case:
        """Kill a verb after this share of its time, and run it again."""
        expected, seconds = self.expected(verb)
        while True:
            self._clear()
            first = self._call(COMMANDS[verb], kill_after=share * seconds)
            if first.signal is not None:
                break
            share *= 0.8  # it was faster this time
        what = f"{verb}, killed after {first.seconds:.3f} s of {seconds:.3f}"
        has_run = verb == "train" and (self.world / "out" / "config.json").exists()
        again = self._call(("train", "--resume", "out") if has_run else COMMANDS[verb])
        outcome, detail = judged(again, COMMANDS[verb][0])
        if outcome != DONE or again.code != 0:
            return Case(what, MESSY if outcome == DONE else outcome, f"run again: {detail}; {again.err[-200:]}")
        left = self._left(verb)
        wrong = [name for name in left if left[name] != expected.get(name)]
        missing = [] if verb == "sweep" else sorted(expected.keys() - left.keys())
        if wrong or missing or (verb == "sweep" and len(left) != 2):
            return Case(what, SILENT, f"differs: {wrong[:4]}, missing: {missing[:4]}")
        return Case(what, DONE)

    def _clear(self) -> None:
        shutil.rmtree(self.world, ignore_errors=True)
        write_corpus(self.world / "corpus", count=160)
        override_files(self.world / "overrides", self.world / "corpus")
        (self.world / "tasks.json").write_text(json.dumps(TASK_SETTINGS | {"train": LONGER}))

    def _call(self, command: tuple[str, ...], **settings: Any) -> Said:
        env = {"LOGDEPTH_CACHE": str(self.world / "cache")}
        return self.worker.call(command, cwd=self.world, env=env, **({"limit": BUILD_SECONDS} | settings))

    def _left(self, verb: str) -> dict[str, Any]:
        """The content of all files that a verb made; of a sweep, that of its trials by number."""
        out = self.world / "out"
        if verb == "sweep":
            rows = json.loads((out / "sweep.json").read_text())["trials"]
            return {
                str(row["trial"]): (row["params"], row["loss"], content_of(_metrics(out, row["trial"]))) for row in rows
            }
        found = self.world / "cache" if verb == "prepare" else out
        skipped = ("lock", "environment.json", "report.html")
        files = [file for file in sorted(found.rglob("*")) if file.is_file() and file.name not in skipped]
        here = [file for file in files if not any(part.startswith(PARTIAL) for part in file.parts)]
        return {file.relative_to(found).as_posix(): content_of(file) for file in here if "census" not in file.parts}


def _metrics(out: Path, trial: int) -> Path:
    return out / "trials" / f"{trial:04d}" / "metrics.jsonl"


@contextlib.contextmanager
def kills_in(folder: Path | None, seed: int) -> Iterator[Kills]:
    with contextlib.ExitStack() as stack:
        base = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="logdepth-hostile-")))
        yield Kills(base, stack.enter_context(Worker()), seed)


def main() -> int:
    arguments = parser(__doc__, count=100).parse_args()
    with kills_in(arguments.keep, arguments.seed) as kills:
        return run_cases("kills", numbers_of(arguments), kills.one, arguments)


if __name__ == "__main__":
    sys.exit(main())
